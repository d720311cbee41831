"""Finds the store of a path or URL by the URL's scheme; a path without a scheme is local."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from relayout.errors import PlanError
from relayout.storage.local.store import LocalStore
from relayout.storage.protocols import Kind, Refusal, Store

Factory: TypeAlias = Callable[[str], Store | Refusal]
"""Makes the store for a URL of its scheme, or returns a refusal with the reason."""


def _memory(url: str) -> Store | Refusal:
    from relayout.storage import in_memory  # Loads of local files should not wait for it.

    return in_memory.offer(url)


def _cloud(url: str) -> Store | Refusal:
    from relayout.storage.cloud import store

    return store.offer(url)


def _web(url: str) -> Store | Refusal:
    from relayout.storage.web import site

    return site.offer(url)


def _hub(url: str) -> Store | Refusal:
    from relayout.storage.web import hub

    return hub.offer(url)


def _file(url: str) -> Store | Refusal:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        return Refusal("expected file:///PATH")
    return LocalStore(Path(unquote(parts.path)))


REGISTRY: dict[str, Factory] = {
    "memory": _memory,
    "file": _file,
    "https": _web,
    "http": _web,
    "hf": _hub,
    **dict.fromkeys(("s3", "s3a", "gs", "az", "abfs", "abfss"), _cloud),
}
"""Store factories by URL scheme."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")


def find_store(path: str | os.PathLike[str]) -> Store:
    """The store for a path or URL. A URL must be a `str`, because `pathlib.Path` joins double slashes.

    Raises:
        PlanError: the scheme is not registered, or its store refuses the URL.
    """
    found = scheme_of(path)
    if found is None:
        return LocalStore(Path(path))
    if found not in REGISTRY:
        known = ", ".join(f"{scheme}://" for scheme in REGISTRY)
        raise PlanError(
            f"no store for {found}://, expected a path, or one of {known}", path=_shown(path), code="option"
        )
    store = REGISTRY[found](os.fspath(path))
    if isinstance(store, Refusal):
        raise PlanError(store.reason, path=_shown(path), code="option")
    return store


def _shown(url: str | os.PathLike[str]) -> str:
    """A URL without what may be secret: a password, or a signature."""
    return re.sub(r"//.*(@|%40)", "//", os.fspath(url), flags=re.IGNORECASE | re.DOTALL).partition("?")[0]


def find_input(path: str | os.PathLike[str]) -> Store:
    """The store of something to read: as `find_store`; "ORG/MODEL" is a repository of the hub if there is no such path.

    Raises:
        PlanError: as `find_store`.
    """
    store = find_store(path)
    try:
        is_absent = isinstance(path, str) and isinstance(store, LocalStore) and store.kind() is Kind.NOTHING
    except PermissionError:  # Something is there: what reads it says that it may not.
        return store
    if is_absent:
        from relayout.storage.web import hub

        return hub.offer_model(str(path), store.absence) or store
    return store


def check_exists(store: Store) -> None:
    """Check that there is something at the store's own path or prefix.

    Raises:
        PlanError: there is nothing.
    """
    if store.kind() is Kind.NOTHING:
        raise PlanError(store.absence(), path=str(store), code="missing")


def scheme_of(path: str | os.PathLike[str]) -> str | None:
    """The scheme of a URL, in lower case; None for a path."""
    found = _URL.match(path) if isinstance(path, str) else None
    return found["scheme"].lower() if found else None
