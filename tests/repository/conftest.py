"""Fixtures of the tests of the repository."""

from support.command_runs import here

__all__ = ["here"]
