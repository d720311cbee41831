"""Runs the jobs of a conversion on many machines."""
