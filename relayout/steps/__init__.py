"""Weights as a sequence of steps: a root to which a trainer publishes, and from which readers follow."""
