"""Fixtures of the tests of stores: a converted checkpoint and its source, and a hub."""

from __future__ import annotations

from support.loader_fixtures import converted, model
from support.remote import hub

__all__ = ["converted", "hub", "model"]
