"""Weights that a training writes: saves of one process or a group, and a sequence of steps that readers follow."""
