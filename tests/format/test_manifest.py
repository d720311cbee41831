"""relayout.json survives a round trip, of any arena and of some ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given
from support.sidecar import MANIFEST, STORED_TABLE, Files, entry_of, indexed, rank_files

from relayout.errors import FormatError
from relayout.format.index import Manifest, plan_arena
from relayout.format.manifest import decompress, dump_manifest, parse_manifest

WHERE = "relayout.json"


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, model_type=None, dcp=True),
        MANIFEST.only([1]),
        replace(MANIFEST.only([0]), conversion=None),
    ],
    ids=["a model type", "none, and dcp", "one rank", "one rank, and no conversion"],
)
def test_a_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    assert parse_manifest(dump_manifest(manifest), WHERE) == manifest


def test_a_manifest_of_some_ranks_has_null_for_the_others() -> None:
    """Rank 1 has two files, one of which rank 2 has, too."""
    first, second = MANIFEST.files
    third = replace(first, name="model-shared.safetensors")
    ranks = [(0,), (2, 1), (2,)]
    entries = tuple(replace(entry_of(rank, STORED_TABLE), files=files) for rank, files in enumerate(ranks))
    manifest = replace(MANIFEST, files=(first, second, third), ranks=entries)
    names = {
        (0, 1, 2): [["model-rank-0-part-0"], ["model-shared", "model-rank-1-part-0"], ["model-shared"]],
        (1, 2): [None, ["model-shared", "model-rank-1-part-0"], ["model-shared"]],
        (2,): [None, None, ["model-shared"]],
        (0,): [["model-rank-0-part-0"], None, None],
    }
    for some, expected in names.items():
        top = json.loads(dump_manifest(manifest.only(some)))
        files = [file["name"].removesuffix(".safetensors") for file in top["files"]]
        found = [None if entry is None else [files[index] for index in entry["files"]] for entry in top["ranks"]]
        assert found == expected
        assert set(files) == {name for entry in found if entry is not None for name in entry}
        assert (top["num_ranks"], top["conversion"]) == (3, MANIFEST.conversion)
        assert manifest.only(some).present == some


@given(files=rank_files())
def test_the_reads_of_any_arena_survive_a_round_trip(files: Files) -> None:
    arena = plan_arena(files)
    entry = replace(
        MANIFEST.ranks[0],
        num_tensors=sum(len(sizes) for _, _, sizes in files),
        nbytes=sum(sum(sizes) for _, _, sizes in files),
        files=tuple(range(len(files))),
        arena_nbytes=arena.nbytes,
        reads=arena.reads,
    )
    parts = (
        indexed(f"part-{number}.safetensors", start + sum(sizes), start)
        for number, (start, _, sizes) in enumerate(files)
    )
    manifest = replace(MANIFEST, files=tuple(parts), ranks=(entry,))
    assert parse_manifest(dump_manifest(manifest), WHERE) == manifest


def test_what_expands_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayout.format.manifest.MAX_TABLE_NBYTES", 1000)
    assert decompress(zstandard.ZstdCompressor().compress(b"7" * 1000), "x") == b"7" * 1000
    with pytest.raises(FormatError, match=r"^x: expands to more than 1000 bytes"):
        decompress(zstandard.ZstdCompressor().compress(b"7" * 1001), "x")
