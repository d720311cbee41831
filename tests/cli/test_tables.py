"""Tables that fit a width: no word is broken, names are shortened in the middle, and columns are dropped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import relayout
from relayout.cli.command import Column, Line, shortened, table
from relayout.cli.render import diagnosis
from relayout.loader.diagnose import diagnose

COLUMNS = [
    Column("name", "name"),
    Column("n", "number"),
    Column("dtype", drop=1),
    Column("shape", drop=2),
    Column("cut", "words"),
]
ROW = ["model.layers.*.self_attn.q_proj.weight", "32", "BF16", "4096x4096", "dim 0, each part in 2 ranks"]


def printed(rows: list[list[str]], width: int) -> list[str]:
    """The lines of a table, as rich prints it."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table(COLUMNS, rows, width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_table_as_wide_as_it_wants_shows_all() -> None:
    assert printed([ROW], 200) == [
        "name                                     n  dtype  shape      cut",
        "--------------------------------------- --- ------ ---------- ---------------------------",
        "model.layers.*.self_attn.q_proj.weight  32  BF16   4096x4096  dim 0, each part in 2 ranks",
    ]


def test_a_narrow_table_wraps_words_then_drops_columns() -> None:
    assert printed([ROW], 80)[2:] == [
        "model.layer...elf_attn.q_proj.weight  32  BF16   4096x4096  dim 0, each part in",
        "                                                            2 ranks",
    ]
    assert printed([ROW], 60) == [
        "name                                   n  cut",
        "------------------------------------- --- ------------------",
        "model.layer...elf_attn.q_proj.weight  32  dim 0, each part",
        "                                          in 2 ranks",
    ]


@pytest.mark.parametrize("width", range(50, 110))
def test_no_line_of_a_table_is_wider_than_it_may_be_and_no_word_is_cut(width: int) -> None:
    lines = printed([ROW, ["lm_head.weight", "1", "F32", "scalar", "whole"]], width)
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert {"dim", "0,", "each", "part", "in", "2", "ranks", "32", "lm_head.weight", "whole"} <= words


def test_names_are_shortened_in_the_middle() -> None:
    assert shortened("model.layers.*.self_attn.q_proj.weight", 23) == "model.....q_proj.weight"
    assert shortened("short", 5) == "short"
    assert len(shortened("x" * 50, 20)) == 20
    assert shortened("重" * 20, 11).count("重") == 4  # Each is two cells wide.


def test_what_differs_between_ranks_by_a_measured_number_alone_is_said_once(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(64)}
    relayout.save(tensors, tmp_path / "out", config={"model_type": "llama"}, tp=4)
    found = diagnose(tmp_path / "out", device="cpu")
    times = ("0.1 ms a huge page, 12 %", "0.24 ms a huge page, 3 %", "0.1 ms a huge page, 12 %", "no huge pages, 3 %")
    ranks = tuple(replace(rank, reason=f"memory: {said}") for rank, said in zip(found.ranks, times, strict=True))
    lines = [block.text for block in diagnosis(replace(found, ranks=ranks)) if isinstance(block, Line)]
    assert [line for line in lines if "memory:" in line] == [
        "cpu: memory: no huge pages, 3 %",
        "cpu: memory: 0.1 ms a huge page, 12 %",
    ]
