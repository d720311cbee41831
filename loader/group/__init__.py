"""Loads by all members of a torch.distributed group: each reads a part, and receives the rest from the others."""
