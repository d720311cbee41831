"""Weights that a training run writes: saves of one process or a group, and a sequence of steps that readers follow."""
