"""Weights written by a training run: saves of one process or a group, and a sequence of steps that readers follow."""
