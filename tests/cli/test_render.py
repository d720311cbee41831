"""What results say, as text: ranks, rates, and what differs between ranks."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import relayout
from relayout.cli.command import Block, Line
from relayout.cli.render import diagnosis, summary
from relayout.loader.diagnose import diagnose


def lines_of(blocks: Iterable[Block]) -> list[str]:
    return [f"{block.label} {block.text}".strip() for block in blocks if isinstance(block, Line)]


def test_doctor_says_which_ranks_a_folder_has_and_buffers_in_the_unit_of_the_option(
    llama: Path, tmp_path: Path
) -> None:
    relayout.convert(llama, tmp_path / "out", tp=8, ranks="0-3")
    lines = lines_of(diagnosis(diagnose(tmp_path / "out", device="cpu")))
    assert lines[0] == f"{tmp_path / 'out'}: converted, ranks 0-3 of 8"
    assert lines_of(diagnosis(diagnose(tmp_path / "out", device="cpu", rank=2)))[0].endswith("converted, rank 2 of 8")
    assert next(line for line in lines if line.startswith("backend ")).startswith("backend to cpu, ")
    [budget] = [line for line in lines if line.startswith("budget ")]
    assert re.search(r" [0-9.]+ MB of buffers$", budget)


def test_a_resumed_conversion_counts_what_it_has_read_itself(llama: Path, tmp_path: Path) -> None:
    done = relayout.convert(llama, tmp_path / "out", tp=2)
    done = replace(done, source_nbytes=1_600_000_000, resumed_nbytes=1_200_000_000, seconds=10.0)
    lines = lines_of(summary(done))
    assert any(line.startswith("400.0 MB read in 10.0 s (40.00 MB/s)") for line in lines)
    assert "1.2 GB of it was done by an interrupted conversion" in lines


def test_what_differs_between_ranks_by_a_measured_number_alone_is_said_once(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(64)}
    relayout.save(tensors, tmp_path / "out", config={"model_type": "llama"}, tp=4)
    found = diagnose(tmp_path / "out", device="cpu")
    times = ("0.1 ms a huge page, 12 %", "0.24 ms a huge page, 3 %", "0.1 ms a huge page, 12 %", "no huge pages, 3 %")
    ranks = tuple(replace(rank, reason=f"memory: {said}") for rank, said in zip(found.ranks, times, strict=True))
    lines = [block.text for block in diagnosis(replace(found, ranks=ranks)) if isinstance(block, Line)]
    assert [line for line in lines if "memory:" in line] == [
        "to cpu, memory: no huge pages, 3 %",
        "to cpu, memory: 0.1 ms a huge page, 12 %",
    ]


def test_doctor_warns_of_large_files_in_one_stripe_of_lustre_and_of_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"model.norm.weight": torch.ones(64)}
    relayout.save(tensors, tmp_path / "out", config={"model_type": "llama"}, tp=2)
    asked = set()

    def attribute(path: Path, name: str) -> bytes:
        asked.add((Path(path).name, name))
        return struct.pack("<IIQQIHH", 0x0BD10BD0, 1, 5, 6, 2**20, 1, 0) + bytes(24)

    monkeypatch.setattr(os, "getxattr", attribute, raising=False)
    found = diagnose(tmp_path / "out", device="cpu")
    files = [file for rank in found.ranks for file in rank.files]
    assert {(file.name, "lustre.lov") for file in files} == asked
    assert {file.num_stripes for file in files} == {1}

    def notes(stripes: int | None, nbytes: int) -> list[str]:
        ranks = tuple(
            replace(rank, files=tuple(replace(file, num_stripes=stripes, nbytes=nbytes) for file in rank.files))
            for rank in found.ranks
        )
        return [line for line in lines_of(diagnosis(replace(found, ranks=ranks))) if "stripe" in line]

    assert notes(1, 2**28) == [
        "note Lustre has 2 large files in one stripe, read from one server: lfs migrate -c 8 FILE stripes a file over 8"
    ]
    assert notes(1, 2**28 - 1) == notes(2, 2**28) == notes(None, 2**28) == []
