"""Loads one rank: reads its bytes into memory and returns tensors."""
