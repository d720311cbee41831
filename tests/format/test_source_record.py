"""The source record: it has the options of a conversion, and is refused without one of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.local_stores import read_manifest, read_record

import relayout
from relayout.errors import FormatError
from relayout.format.manifest import SOURCE_RECORD_NAME, decompress
from relayout.format.source_record import (
    VERIFIED_BY,
    ConversionOptions,
    FileDigest,
    RecordedPlan,
    dump_record,
    parse_record,
)


def test_the_record_has_the_options_and_is_refused_without_one(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "out", tp=2, align=512, max_part_nbytes=400_000)
    manifest = read_manifest(tmp_path / "out")
    options = read_record(tmp_path / "out", manifest).options
    assert options == ConversionOptions(2, "builtin:llama", False, 512, 400_000, True, "ranks")
    top = json.loads(decompress((tmp_path / "out" / SOURCE_RECORD_NAME).read_bytes(), "x"))
    assert parse_record(json.dumps(top).encode(), 2, "x").plan == RecordedPlan("llama", "builtin", top["plan"]["rules"])
    del top["plan"]["rules"]["cut"]  # What the rules mean is not the record's business.
    parse_record(json.dumps(top | {"plan": None}).encode(), 2, "x")
    for wrong in (0, "llama", [], False):
        with pytest.raises(FormatError, match="x: 'plan' is missing or not an object"):
            parse_record(json.dumps(top | {"plan": wrong}).encode(), 2, "x")
    with pytest.raises(FormatError, match="x: 'plan' is missing or not an object"):
        parse_record(json.dumps({key: value for key, value in top.items() if key != "plan"}).encode(), 2, "x")
    for name in ("expert_parallel", "alignment", "max_part_nbytes", "dcp"):
        for wrong in ({key: value for key, value in top.items() if key != name}, top | {name: None}):
            with pytest.raises(FormatError, match=f"x: .*'{name}'.* missing or not"):
                parse_record(json.dumps(wrong).encode(), 2, "x")


def test_by_what_the_source_was_verified_is_there_only_if_it_was(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "out", tp=2)
    record = read_record(tmp_path / "out", read_manifest(tmp_path / "out"))
    blob = dump_record(record)
    assert "verified" not in json.loads(blob)
    name = record.files[0].name
    digests = ("sha256:" + "0" * 64, "git-sha1:" + "1" * 40)
    verified = tuple(FileDigest(name, digest, by) for digest in digests for by in VERIFIED_BY)
    again = dump_record(replace(record, verified=verified))
    assert json.loads(again) == json.loads(blob) | {
        "verified": {
            "name": [name] * len(verified),
            "digest": [each.digest for each in verified],
            "by": [each.by for each in verified],
        }
    }
    assert parse_record(again, 2, "x").verified == verified
