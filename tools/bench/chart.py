"""`tools/run bench chart`: draws what `tools/run bench load` measured."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

WIDTH, DPI = 12.0, 150
PANEL_TOP, ROW_HEIGHT = 1.4, 0.62
"""Inches: above the first row, and of each."""
OURS, THEIRS = "#0f766e", "#64748b"
OURS_LIGHT, THEIRS_LIGHT = "#8ccfc6", "#cbd5e1"
INK, PALE, GRID, LIMIT = "#0f172a", "#64748b", "#e2e8f0", "#dc2626"

States = dict[str, dict[str, Any]]
"""Results of one scenario: "cold", "warm"."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw all scenarios side by side, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import patheffects, pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    scenarios: dict[str, States] = {}
    for result in (one for one in results["scenarios"] if one.get("memory", "touched") == "touched"):
        scenarios.setdefault(result["title"], {})[result["state"]] = result
    rows = {title: _rows(states, results["peers"]) for title, states in scenarios.items()}
    height = PANEL_TOP + 0.6 + ROW_HEIGHT * max(map(len, rows.values()))
    style = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    # Letters stay legible where lines cross them.
    halo = [patheffects.withStroke(linewidth=2.5, foreground="white")]
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, len(scenarios), figsize=(WIDTH, height), squeeze=False)
        longest = max(
            (seconds for each in rows.values() for row in each for seconds in row["seconds"].values()), default=1.0
        )
        for axes, (title, states) in zip(panels[0], scenarios.items(), strict=True):
            axes.set_xlim(0, 1.2 * longest)  # One scale for all panels, so that bars can be compared.
            _panel(axes, title, states, rows[title], halo)
        figure.text(0.02, 1 - 0.3 / height, _title(results), fontsize=14, fontweight="bold", va="center")
        figure.text(0.02, 1 - 0.6 / height, _subtitle(results), fontsize=9.5, color=PALE, va="center")
        drive = Line2D([], [], color=LIMIT, linewidth=1, linestyle=(0, (4, 3)), label="bytes needed / drive (fio)")
        figure.legend(
            handles=[Patch(color=THEIRS, label="cold cache"), Patch(color=THEIRS_LIGHT, label="warm cache"), drive],
            loc="upper right",
            bbox_to_anchor=(0.99, 1 - 0.42 / height),
            ncols=3,
            frameon=False,
            fontsize=8.5,
            handlelength=1.4,
            labelcolor=INK,
        )
        figure.subplots_adjust(left=0.02, right=0.985, top=1 - PANEL_TOP / height, bottom=0.6 / height, wspace=0.09)
        figure.savefig(path, dpi=DPI, facecolor="white")
        pyplot.close(figure)


def _title(results: dict[str, Any]) -> str:
    size = results["settings"]["size_gb"]
    target = "" if results["settings"]["device"] == "cpu" else " to a GPU"
    return f"Loading a checkpoint of Llama-3.1-8B shapes, {size:g} GB{target}: seconds, less is better"


def _subtitle(results: dict[str, Any]) -> str:
    machine, runs = results["machine"], results["settings"]["runs"]
    parts = [f"{machine['num_cpus']} cores"]
    limits = [one["drive_gb_per_s"] for one in results["scenarios"] if one["drive_gb_per_s"]]
    if limits:
        parts.append(f"drive {median(limits):.1f} GB/s")
    parts.append(f"median of {runs}" if runs > 1 else "one run")
    parts.append("each peer at the fastest of its settings")
    return ", ".join(parts)


def _rows(states: States, peers: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each family: the best of its peers in each state, or how it failed; the fastest first."""
    families: dict[str, dict[str, Any]] = {}
    for state, result in states.items():
        for name, peer in peers.items():
            family = peer["family"]
            row = families.setdefault(family, {"family": family, "seconds": {}, "failures": {}})
            if name in result["peers"]:
                seconds = result["peers"][name]["seconds"]
                row["seconds"][state] = min(seconds, row["seconds"].get(state, seconds))
            elif name in result["failures"]:
                row["failures"][state] = result["failures"][name][0]
    tried = [row for row in families.values() if row["seconds"] or row["failures"]]
    return sorted(tried, key=lambda row: row["seconds"].get("cold", row["seconds"].get("warm", float("inf"))))


def _panel(axes: Any, title: str, states: States, rows: list[dict[str, Any]], halo: list[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    # Linear from 0: the length of a bar on a logarithmic axis has no meaning.
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    for place, row in enumerate(rows):
        _bars(axes, place, row, [state for state in ("cold", "warm") if state in states], halo)
    _limit_line(axes, states, len(rows), halo)
    axes.set_title(title[0].upper() + title[1:], loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.set_ylim(len(rows) - 0.6, -0.62)
    axes.set_yticks([])
    axes.tick_params(axis="x", which="both", length=0, labelsize=8, labelcolor=PALE)
    axes.set_xlabel("seconds to load (linear)", fontsize=8.5, color=PALE, loc="left")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _bars(axes: Any, place: int, row: dict[str, Any], states: list[str], halo: list[Any]) -> None:
    ours = row["family"] == "relayout"
    text = {"va": "center", "path_effects": halo, "zorder": 5}
    bold = "bold" if ours else "normal"
    axes.text(0, place - 0.35, row["family"], fontsize=9, fontweight=bold, color=OURS if ours else INK, **text)
    colors = {"cold": OURS if ours else THEIRS, "warm": OURS_LIGHT if ours else THEIRS_LIGHT}
    for state, middle in zip(states, (-0.09, 0.15), strict=False):
        seconds = row["seconds"].get(state)
        if seconds is None:
            failed = f" {state}: {row['failures'].get(state, 'not measured')}"
            axes.text(0, place + middle, failed, fontsize=7.5, color=LIMIT, **text)
            continue
        axes.barh(place + middle, seconds, height=0.22, color=colors[state], linewidth=0)
        label = f" {seconds:.2f}" if seconds < 9.995 else f" {seconds:.1f}"
        axes.text(seconds, place + middle, label, fontsize=8, color=OURS if ours else INK, fontweight=bold, **text)


def _limit_line(axes: Any, states: States, num_rows: int, halo: list[Any]) -> None:
    """The time that the drive needs for the bytes."""
    limit = states.get("cold", {}).get("drive_gb_per_s")
    if not limit:
        return
    seconds = states["cold"]["nbytes"] / limit / 1e9
    axes.plot([seconds, seconds], [-0.58, num_rows - 0.62], color=LIMIT, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    near_end = axes.transData.transform((seconds, 0))[0] > axes.transAxes.transform((0.7, 0))[0]
    axes.text(
        seconds,
        -0.64,
        f"{seconds:.2f}",
        color=LIMIT,
        fontsize=8,
        ha="right" if near_end else "center",
        va="bottom",
        path_effects=halo,
    )
