"""Tables that fit a width: no word is broken, names are shortened in the middle, and columns are dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import relayout
from relayout.cli.command import Block, Column, Line, Table, shortened, show, table
from relayout.cli.render import diagnosis, inspection, summary
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
        console.print(table(COLUMNS, rows, console))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_table_as_wide_as_it_wants_shows_all() -> None:
    assert printed([ROW], 200) == [
        "name                                     n  dtype  shape      cut",
        "--------------------------------------- --- ------ ---------- ---------------------------",
        "model.layers.*.self_attn.q_proj.weight  32  BF16   4096x4096  dim 0, each part in 2 ranks",
    ]


def test_a_narrow_table_wraps_words_drops_columns_and_shortens_names() -> None:
    assert printed([ROW], 80)[2:] == [
        "model.layers.*.self_attn.q_proj.weight  32  BF16   4096x4096  dim 0, each part",
        "                                                              in 2 ranks",
    ]
    assert printed([ROW], 60) == [
        "name                                     n  cut",
        "--------------------------------------- --- ----------------",
        "model.layers.*.self_attn.q_proj.weight  32  dim 0, each part",
        "                                            in 2 ranks",
    ]
    assert printed([ROW], 52)[2:] == [
        "model.lay...f_attn.q_proj.weight  32  dim 0, each",
        "                                      part in 2",
        "                                      ranks",
    ]


def inspected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path, width: int) -> str:
    """What `inspect` prints about the degrees, on a terminal of a width."""
    monkeypatch.setenv("COLUMNS", str(width))
    [degrees] = [
        block
        for block in inspection(relayout.inspect(path))
        if isinstance(block, Table) and block.columns[0].heading == "tp"
    ]
    show([degrees])
    return capsys.readouterr().out


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


@pytest.mark.parametrize("width", [*range(20, 100, 4), 60, 200])
def test_numbers_of_a_table_are_never_cut(
    width: int, llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = inspected(capsys, monkeypatch, llama, 1000)
    text = inspected(capsys, monkeypatch, llama, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "..." not in text
    rows = [line.split("  ") for line in whole.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) > 2
    for row in rows:
        for number in [cell.strip() for cell in row if cell.strip()][:3]:
            assert number in " ".join(text.split()), (number, text)


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
        "to cpu, memory: no huge pages, 3 %",
        "to cpu, memory: 0.1 ms a huge page, 12 %",
    ]
