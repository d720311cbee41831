"""Fixtures of the command's tests."""

from support.halfway import big

__all__ = ["big"]
