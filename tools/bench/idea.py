"""`tools/run bench idea`: draws what one rank reads of a layer, before and after the conversion, to scale."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from support.hub_models import MODELS

import relayout
from bench.chart import INK, OURS, PALE, THEIRS_LIGHT

MODEL, TP, RANK, LAYER = "Llama-3.1-8B", 8, 3, "model.layers.0."
MANY_RUNS = 100
"""As many are drawn as a hatched area: they cannot be told apart at this scale."""
SMALL_NBYTES = 1_000_000
"""Smaller tensors, which have the width of a hair here, have no label."""
WIDTH, HEIGHT, MARGIN, BAR = 960, 250, 10, 46
"""Pixels of the picture, of the space left and right, of a bar's height."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the layer, and where the rank's bytes of it are."""

    name: str
    start: int
    """Bytes from the first tensor of the layer in the shard."""
    nbytes: int
    runs: tuple[tuple[int, int], ...]
    """(start, nbytes) of the rank's runs in the shard, counted likewise."""
    rank_nbytes: int


def parts(folder: Path) -> list[Part]:
    """The tensors of one layer, in file order."""
    MODELS[MODEL].write(folder)
    plan = relayout.plan_conversion(folder, tp=TP)
    found = [(tensor, cut) for tensor, cut in zip(plan.source.tensors, plan.cut, strict=True)]
    found = sorted((one for one in found if one[0].name.startswith(LAYER)), key=lambda one: one[0].extent.offset)
    first = found[0][0].extent.offset
    assert all(a.extent.end == b.extent.offset for (a, _), (b, _) in pairwise(found)), "the layer is not in one piece"
    return [
        Part(
            tensor.name.removeprefix(LAYER).split(".")[-2],
            tensor.extent.offset - first,
            tensor.extent.nbytes,
            tuple(
                (tensor.extent.offset - first + one.source + number * one.source_stride, one.nbytes)
                for one in cut.rank_transfers(RANK)
                for number in range(one.count)
            ),
            cut.rank_nbytes(RANK),
        )
        for tensor, cut in found
    ]


def draw(path: Path) -> None:
    """Write the picture as SVG."""
    with tempfile.TemporaryDirectory() as scratch:
        layer = parts(Path(scratch) / "model")
    path.write_text("\n".join(_svg(layer)) + "\n")


def _svg(layer: list[Part]) -> list[str]:
    total, mine = layer[-1].start + layer[-1].nbytes, sum(one.rank_nbytes for one in layer)
    scale = (WIDTH - 2 * MARGIN) / total
    num_runs = sum(len(one.runs) for one in layer)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<defs><pattern id="runs" width="3" height="{BAR}" patternUnits="userSpaceOnUse">'
        f'<rect width="1" height="{BAR}" fill="{OURS}"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(MARGIN, 22, f"Before: one layer in a shard, {total / 1e6:.0f} MB", "bold"),
        _text(
            WIDTH - MARGIN,
            22,
            f"rank {RANK} of {TP} needs {mine / 1e6:.0f} MB of it, in {num_runs:,} runs",
            "bold",
            "end",
            OURS,
        ),
    ]
    for one in layer:
        lines += _tensor(one, scale)
    what = f"After: the same layer in rank {RANK}'s file, {mine / 1e6:.0f} MB"
    return [
        *lines,
        _text(MARGIN, 152, what, "bold"),
        _text(WIDTH - MARGIN, 152, "one read", "bold", "end", OURS),
        _box(0, 164, mine * scale, OURS),
        _text(MARGIN + mine * scale + 8, 192, "contiguous, 4 KiB-aligned, between the layers before and after it"),
        _text(MARGIN, 240, f"{MODEL}, tensor parallelism of {TP}; widths are to scale", color=PALE),
        "</svg>",
    ]


def _tensor(one: Part, scale: float) -> list[str]:
    lines = [_box(one.start * scale, 34, max(one.nbytes * scale - 1, 0.5), THEIRS_LIGHT)]
    if len(one.runs) > MANY_RUNS:
        lines.append(_box(one.start * scale, 34, one.nbytes * scale - 1, "url(#runs)"))
    else:
        lines += [_box(start * scale, 34, nbytes * scale, OURS) for start, nbytes in one.runs]
    if one.nbytes >= SMALL_NBYTES:
        middle = MARGIN + (one.start + one.nbytes / 2) * scale
        name = one.name if one.nbytes > 20 * SMALL_NBYTES else one.name.removesuffix("_proj")
        lines.append(_text(middle, 96, name, anchor="middle", color=PALE))
        if len(one.runs) > MANY_RUNS:
            lines.append(_text(middle, 113, f"{len(one.runs):,} runs", anchor="middle", color=PALE))
    return lines


def _box(x: float, y: int, width: float, fill: str) -> str:
    return f'<rect x="{MARGIN + x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{fill}"/>'


def _text(x: float, y: int, what: str, weight: str = "normal", anchor: str = "start", color: str = INK) -> str:
    size = 16 if weight == "bold" else 13
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{color}"'
    return f'<text x="{x:.2f}" y="{y}" {style}>{escape(what)}</text>'
