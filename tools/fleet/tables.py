"""What `tools/run fleet` prints and draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.published import PUBLISHED
from fleet.simulation import EVERY_RANK, GLOBAL, GROUP, ONE_READER, RANGES, SWARM, WAYS, Fleet, Outcome, simulate

MODEL_NBYTES = 141.1e9
"""Llama-3.1-70B in BF16."""
NUM_NODES = (1, 4, 16, 64, 256, 1024)
STORAGE = {
    "shared file system, 40 GB/s in all": Fleet(1, MODEL_NBYTES, storage=40e9, nic=50e9),
    "object store, 1 TB/s in all": Fleet(
        1,
        MODEL_NBYTES,
        storage=1e12,
        nic=12.5e9,
        latency=0.1,
        connection=0.625e9,
        concurrency=16,
        request_nbytes=32 * 2**20,
    ),
    "one link, 100 Gb/s in all": Fleet(
        1, MODEL_NBYTES, storage=12.5e9, nic=12.5e9, latency=0.1, request_nbytes=32 * 2**20
    ),
}
INCIDENTS: dict[str, dict[str, Any]] = {
    "16 nodes": {},
    "starts 1 s apart": {"stagger": 1.0},
    "one node with a tenth of the NIC": {"slow": 10.0},
    "one node dies after 2 s": {"dead_at": 2.0},
    "503 above 500 requests/s": {"max_requests": 500.0},
}
COLORS = {
    EVERY_RANK: "#cbd5e1",
    ONE_READER: "#64748b",
    SWARM: "#d97706",
    GLOBAL: "#7c3aed",
    RANGES: "#8ccfc6",
    GROUP: "#0f766e",
}
"""Ours in teal; where two are equal the later hides none: it is drawn as dots."""
MARKERS = {EVERY_RANK: "o", ONE_READER: "s", SWARM: "^", GLOBAL: "D", RANGES: "o", GROUP: "o"}


DOCUMENT = Path(__file__).parents[2] / "relayout" / "conversion" / "CLUSTERS.md"
_BEGIN, _END = "<!-- fleet: made by `tools/run fleet document` -->\n", "<!-- end -->\n"


def document() -> str:
    """The document with the tables of today."""
    before, _, after = DOCUMENT.read_text().partition(_BEGIN)
    return before + _BEGIN + "\n".join(lines()).strip() + "\n" + _END + after.partition(_END)[2]


def lines() -> Iterator[str]:
    """The tables, in Markdown."""
    for title, fleet in STORAGE.items():
        yield f"\n**{title}**: seconds until the last rank is ready (TB from storage)\n"
        shown = (1, 16, 128, 1024)
        yield "| way | " + " | ".join(f"{number} node{'s' * (number > 1)}" for number in shown) + " |"
        yield "|---|" + "---:|" * len(shown)
        for way in WAYS:
            found = [simulate(way, replace(fleet, num_nodes=number)) for number in shown]
            yield f"| {way} | " + " | ".join(map(_cell, found)) + " |"
    yield "\n**What may happen** (the object store, 16 nodes): first / median / last rank, s; requests/s at most\n"
    yield "| way | " + " | ".join(INCIDENTS) + " |"
    yield "|---|" + "---:|" * len(INCIDENTS)
    fleet = replace(STORAGE["object store, 1 TB/s in all"], num_nodes=16)
    for way in WAYS:
        found = [simulate(way, replace(fleet, **change)) for change in INCIDENTS.values()]
        yield f"| {way} | " + " | ".join(map(_times, found)) + " |"
    yield "\n**Published, and simulated**\n"
    yield "| what | published, s | simulated, s | factor | assumed |"
    yield "|---|---:|---:|---:|---|"
    for one in PUBLISHED:
        factor = max(one.simulated / one.seconds, one.seconds / one.simulated)
        yield f"| {one.what} | {one.seconds} | {one.simulated:.2f} | {factor:.1f} | {one.assumed} |"


def _cell(found: Outcome) -> str:
    return f"{_seconds(found.last)} ({found.storage_nbytes / 1e12:,.2f})"


def _times(found: Outcome) -> str:
    times = " / ".join(map(_seconds, (found.first, found.median, found.last)))
    return f"{times}; {found.peak_requests:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def draw(path: Path) -> None:
    """Seconds until the last rank, over the number of nodes, for each storage, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        figure, panels = pyplot.subplots(1, len(STORAGE), figsize=(12, 4.6), sharey=True)
        for axes, (title, fleet) in zip(panels, STORAGE.items(), strict=True):
            for way, color in COLORS.items():
                times = [simulate(way, replace(fleet, num_nodes=number)).last for number in NUM_NODES]
                axes.plot(
                    NUM_NODES,
                    times,
                    color=color,
                    marker=MARKERS[way],
                    markersize=8 if way in (ONE_READER, GLOBAL) else 4.5,
                    markerfacecolor="white" if way in (ONE_READER, GLOBAL) else color,
                    linewidth=1.8,
                    label=way,
                )
            axes.set(title=title, xscale="log", yscale="log", xlabel="nodes of 8 GPUs", xticks=NUM_NODES)
            axes.set_xticklabels(map(str, NUM_NODES))
            axes.minorticks_off()
            axes.grid(color="#e2e8f0", linewidth=0.8)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        panels[0].set_ylabel("seconds until the last rank is ready")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.suptitle(
            "A fleet that starts at once, simulated: Llama-70B, 141 GB, tensor-parallel over 8 GPUs of each node",
            x=0.06,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
        figure.legend(handles, labels, loc="lower center", ncols=6, frameon=False)
        figure.subplots_adjust(left=0.06, right=0.99, top=0.84, bottom=0.21, wspace=0.06)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)
