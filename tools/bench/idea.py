"""`tools/run bench idea`: draws what one rank reads of a layer, before and after the conversion, to scale."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.hub_models import MODELS

import relayout
from bench.chart import INK, OURS, PALE, THEIRS_LIGHT

MODEL, TP, RANK, LAYER = "Llama-3.1-8B", 8, 3, "model.layers.0."
MANY_RUNS = 100
"""As many are drawn as a hatched area: they cannot be told apart at this scale."""
SMALL_NBYTES = 1_000_000
"""Smaller tensors, which have the width of a hair here, have no label."""


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
    """Write the picture, as SVG or PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with tempfile.TemporaryDirectory() as scratch:
        layer = parts(Path(scratch) / "model")
    total, mine = layer[-1].start + layer[-1].nbytes, sum(one.rank_nbytes for one in layer)
    num_runs = sum(len(one.runs) for one in layer)
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": INK,
        "svg.hashsalt": "relayout",
        "hatch.linewidth": 0.4,
    }
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(10.5, 2.9))
        axes.set_xlim(-total * 0.005, total * 1.005)
        axes.set_ylim(-0.35, 3.75)
        axes.axis("off")
        _say(axes, 3.6, f"Before: one layer in a shard, {total / 1e6:.0f} MB", _reads(num_runs, mine))
        for one in layer:
            _tensor(axes, one)
        _say(axes, 1.35, f"After: the same layer in rank {RANK}'s file, {mine / 1e6:.0f} MB", "one read")
        axes.add_patch(_box(0, 0.3, mine, facecolor=OURS, edgecolor="none"))
        axes.text(
            mine + total * 0.008, 0.6, "contiguous, 4 KiB-aligned, between the layers before and after it", va="center"
        )
        axes.text(0, -0.25, f"{MODEL}, tensor parallelism of {TP}; widths are to scale", color=PALE, fontsize=8)
        figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
        figure.savefig(path, dpi=150, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else {})
        pyplot.close(figure)


def _reads(num_runs: int, nbytes: int) -> str:
    return f"rank {RANK} of {TP} needs {nbytes / 1e6:.0f} MB of it, in {num_runs:,} runs"


def _say(axes: Any, height: float, what: str, reads: str) -> None:
    axes.text(0, height, what, fontsize=11, fontweight="bold", va="top")
    axes.text(axes.get_xlim()[1], height, reads, fontsize=11, va="top", ha="right", color=OURS, fontweight="bold")


def _tensor(axes: Any, one: Part) -> None:
    axes.add_patch(_box(one.start, 2.35, one.nbytes, facecolor=THEIRS_LIGHT, edgecolor="white", linewidth=0.8))
    if len(one.runs) > MANY_RUNS:
        area = _box(one.start, 2.35, one.nbytes, facecolor="none", edgecolor=OURS, linewidth=0, hatch="||||||||")
        axes.add_patch(area)
    else:
        for start, nbytes in one.runs:
            axes.add_patch(_box(start, 2.35, nbytes, facecolor=OURS, edgecolor="none"))
    if one.nbytes >= SMALL_NBYTES:
        middle = one.start + one.nbytes / 2
        runs = f"\n{len(one.runs):,} runs" if len(one.runs) > MANY_RUNS else ""
        name = one.name if one.nbytes > 20 * SMALL_NBYTES else one.name.removesuffix("_proj")
        axes.text(middle, 2.25, name + runs, ha="center", va="top", fontsize=8, color=PALE, linespacing=1.35)


def _box(start: float, height: float, width: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, height), width, 0.62, **style)
