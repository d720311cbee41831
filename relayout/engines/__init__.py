"""Inference engines that start from converted checkpoints: the global tensor, and a plugin for each engine."""
