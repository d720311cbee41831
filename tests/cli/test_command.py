"""Tables that fit a width: no word is broken, names are shortened in the middle, and columns are dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

import relayout
from relayout.cli.command import Column, Table, shortened, show, table
from relayout.cli.render import inspection

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
