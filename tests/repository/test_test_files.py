"""Each module's tests are in a file of its name, but for the modules that are listed here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

EXCEPTIONS = {
    "loader/backends/base.py": "the conformance suite of backends: loader/test_backends.py",
    "loader/backends/host.py": "the conformance suite of backends: loader/test_backends.py, test_load_memory.py",
    "loader/changes.py": "deltas on the way into memory: checkpoint/test_delta.py, live/test_staging.py",
    "loader/sources/checkpoint.py": "every load: loader/test_loading.py, test_load_options.py",
    "relayout/__main__.py": "every test of the command: cli/",
    "relayout/commands/convert.py": "conversions: conversion/test_run.py",
    "relayout/commands/inspect.py": "what commands print: cli/test_reading.py",
    "relayout/conversion/sidecar.py": "the folder as a whole: conversion/test_consistency.py, test_content.py",
    "relayout/storage/cloud/bucket.py": "the conformance suite of stores: storage/test_stores.py",
    "relayout/storage/cloud/store.py": "the conformance suite of stores: storage/test_stores.py",
    "relayout/storage/local/store.py": "the conformance suite of stores: storage/test_stores.py",
    "relayout/storage/web/http.py": "the conformance suite of stores: storage/test_stores.py",
    "relayout/storage/web/hub.py": "loads from the hub: loader/test_hub.py",
    "relayout/storage/web/hub_library.py": "loads from the hub: loader/test_hub.py, storage/test_hub_bucket.py",
}
"""Modules that are tested only as a part of something larger, and where."""


def test_the_tests_of_a_module_are_in_a_file_of_its_name() -> None:
    """In the folder of its package, or beside it: `relayout/x/y/z.py` is tested in `tests/x/test_z.py`."""
    files = [path.relative_to(ROOT) for folder in ("relayout", "loader") for path in (ROOT / folder).rglob("*.py")]
    missing = set()
    for path in files:
        # relayout/loader is a symbolic link to loader/.
        if path.name == "__init__.py" or path.parts[:2] == ("relayout", "loader"):
            continue
        package = path.parts[:-1] if path.parts[0] == "loader" else path.parts[1:-1]
        folder = ROOT.joinpath("tests", *package[:1])
        if not any(folder.rglob(f"test_{path.stem.strip('_')}.py")):
            missing.add(str(path))
    assert missing == EXCEPTIONS.keys()
    assert len(EXCEPTIONS) <= 20


def test_the_tests_of_exceptions_are_where_they_are_said_to_be() -> None:
    for module, where in EXCEPTIONS.items():
        folder = None
        for place in where.partition(": ")[2].split(", "):
            folder = place.rpartition("/")[0] if "/" in place else folder
            path = ROOT / "tests" / (place if "/" in place else f"{folder}/{place}")
            assert path.exists(), (module, path)
