"""Fixtures of the tests of copies: a server with a converted checkpoint and its source."""

from __future__ import annotations

from support.loader_fixtures import converted, model
from support.remote import server

__all__ = ["converted", "model", "server"]
