"""Outputs below a prefix of a bucket: who owns what there, who writes, what is recorded, and how it is published."""
