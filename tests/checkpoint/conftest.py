"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from support.signed_folders import copy_of, keys, signed, source
from support.training import steps

__all__ = ["copy_of", "keys", "signed", "source", "steps"]
