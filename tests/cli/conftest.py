"""Fixtures of the command's tests."""

from support.command_runs import converted, here, work
from support.halfway import big

__all__ = ["big", "converted", "here", "work"]
