"""Converted folders written from tensors in memory, of one process or of all processes of a training."""
