"""What results say, as text: ranks, rates, and what differs between ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

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
    assert re.search(r" [0-9]+ MiB of buffers$", budget)


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
