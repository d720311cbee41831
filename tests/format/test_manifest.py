"""relayout.json survives a round trip, of any arena and of some ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given
from support.sidecar import MANIFEST, STORED_TABLE, Files, entry_of, indexed, rank_files

from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, plan_arena
from relayout.format.manifest import (
    MAX_TABLE_NBYTES,
    compress,
    decompress,
    dump_manifest,
    parse_manifest,
)

WHERE = "relayout.json"


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, model_type=None, dcp=True),
        MANIFEST.only([1]),
        replace(MANIFEST.only([0]), conversion=None),
        replace(MANIFEST, whole=replace(MANIFEST.holders[1], table="relayout.whole.json.zst")),
    ],
    ids=["a model type", "none, and dcp", "one rank", "one rank, and no conversion", "whole tensors"],
)
def test_a_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    assert parse_manifest(dump_manifest(manifest), WHERE) == manifest
    assert json.loads(dump_manifest(manifest))["requires"] == ([] if manifest.whole is None else ["whole"])


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


def test_what_expands_beyond_the_limit_is_refused() -> None:
    assert decompress(zstandard.ZstdCompressor().compress(b"7" * 1000), "x", 1000) == b"7" * 1000
    with pytest.raises(FormatError, match=r"^x: expands to more than 1000 bytes"):
        decompress(zstandard.ZstdCompressor().compress(b"7" * 1001), "x", 1000)


def test_what_a_table_expands_to_has_the_limit_that_its_writer_has() -> None:
    longest = bytes(MAX_TABLE_NBYTES)
    stored = zstandard.ZstdCompressor(level=1).compress(longest)
    assert len(decompress(stored, "x")) == MAX_TABLE_NBYTES
    with pytest.raises(FormatError, match=rf"^x: expands to more than {MAX_TABLE_NBYTES} bytes"):
        decompress(zstandard.ZstdCompressor(level=1).compress(longest + b"7"), "x")
    with pytest.raises(PlanError, match=f"of {MAX_TABLE_NBYTES + 1:,} bytes: readers accept {MAX_TABLE_NBYTES:,}"):
        compress(longest + b"7")


def test_a_manifest_has_a_line_for_each_field_file_and_rank() -> None:
    lines = dump_manifest(MANIFEST).decode().split("\n")
    top = json.loads(dump_manifest(MANIFEST))
    of_entries = [json.loads(line.removesuffix(",")) for line in lines if line.startswith("    {")]
    assert of_entries == [*top["files"], *top["ranks"]]
    fields = [line.split('"')[1] for line in lines if line.startswith('  "')]
    assert fields == list(top)
    assert lines[0] == "{"
    assert lines[-2:] == ["}", ""]
    assert len(lines) == 3 + len(fields) + len(of_entries) + len(["files", "ranks"])
