"""Loads that the members of a torch.distributed group do together: each reads a part, and gets the rest from others."""
