"""Fixtures of the tests of registries: a converted checkpoint and its source."""

from __future__ import annotations

from support.loader_fixtures import converted, model

__all__ = ["converted", "model"]
