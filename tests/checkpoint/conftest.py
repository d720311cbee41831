"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from support.training import steps

__all__ = ["steps"]
