"""Engines that carry out a conversion's jobs on many machines."""
