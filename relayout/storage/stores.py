"""Finds the store of a path or URL by the URL's scheme; a path without a scheme is local."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path

from relayout.errors import PlanError, about
from relayout.storage.local.store import LocalStore
from relayout.storage.protocols import Kind, Store

REGISTRY: dict[str, str] = {
    "https": "relayout.storage.web.http",
    "http": "relayout.storage.web.http",
    "hf": "relayout.storage.web.hub",
    **dict.fromkeys(("s3", "gs", "az"), "relayout.storage.cloud.store"),
}
"""The module for each scheme of URLs, imported on first use. It has `offer(url: str) -> Store`, which raises PlanError
for a URL that names no place there."""

_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<rest>[^/].*)", re.DOTALL)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")


def find_store(path: str | os.PathLike[str]) -> Store:
    """The store for a path or URL. A URL must be a `str`, because `pathlib.Path` joins double slashes.

    Raises:
        PlanError: the scheme is not registered, or its store refuses the URL.
    """
    scheme = scheme_of(path)
    if scheme is None:
        _check_slashes(path)
        return LocalStore(Path(path))
    if scheme not in REGISTRY:
        known = ", ".join(f"{name}://" for name in REGISTRY)
        what = f"no store for {scheme}://, expected a path, or one of {known}"
        raise PlanError(what, path=_shown(path), code="option")
    with about(path=_shown(path)):
        store: Store = import_module(REGISTRY[scheme]).offer(os.fspath(path))
    return store


def _check_slashes(path: str | os.PathLike[str]) -> None:
    """Raise PlanError for a URL that lacks a slash, unless there is a folder of that name."""
    match = _SLASH.match(os.fspath(path))
    if match and match["scheme"].lower() in REGISTRY and not os.path.lexists(match["scheme"] + ":"):
        url = f"{match['scheme']}://{match['rest']}"
        raise PlanError(f"a URL has two slashes: {url}", path=os.fspath(path), code="option")


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
    except PermissionError:  # It exists: reading it reports the error.
        return store
    if is_absent:
        from relayout.storage.web import hub

        return hub.offer_model(str(path), store.not_found_message) or store
    return store


def check_exists(store: Store) -> None:
    """Raise PlanError if there is nothing at the store's own path or prefix."""
    if store.kind() is Kind.NOTHING:
        raise PlanError(store.not_found_message(), path=str(store), code="missing")


def scheme_of(path: str | os.PathLike[str]) -> str | None:
    """The scheme of a URL, in lower case; None for a path."""
    match = _URL.match(path) if isinstance(path, str) else None
    return match["scheme"].lower() if match else None
