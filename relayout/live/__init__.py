"""Weights that change in a live engine: their locations in memory, and updates of vLLM and SGLang."""
