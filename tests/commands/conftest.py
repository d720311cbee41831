"""Fixtures of the tests of commands."""

from __future__ import annotations

from support.training import steps

__all__ = ["steps"]
