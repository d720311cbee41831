"""A chart of the drive's bandwidth while loaders read, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain

from relayout.benchmark.verdict import RankLoads, Timing

_WIDTH, _HEIGHT = 760, 300
"""Pixels of one panel."""
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 66, 16, 38
"""Margins of the plot in its panel, in pixels."""
_INK, _PALE, _GRID, _LIMIT, _OURS = "#0f172a", "#64748b", "#e2e8f0", "#dc2626", "#0f766e"
_OTHERS = ("#7c3aed", "#d97706", "#2563eb", "#be185d", "#4d7c0f", "#475569")
_NUM_TICKS = 5


def bandwidth_chart(groups: Sequence[RankLoads], limit: float | None) -> str | None:
    """Return a chart of GB/s over time, a panel for each group of loads; None: no load has samples.

    Of each loader, the run with the median time is shown.

    Args:
        limit: the drive's limit in GB/s, drawn as a dashed line; None: it is unknown.
    """
    shown = [group for group in groups if any(_samples(timing) for timing in group.done)]
    if not shown:
        return None
    height = _HEIGHT * len(shown)
    panels = chain.from_iterable(
        (f'<g transform="translate(0 {_HEIGHT * number})">', *_panel(group, limit), "</g>")
        for number, group in enumerate(shown)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        ' font-family="sans-serif" font-size="11">',
        "<title>Bandwidth of the drive while it is read</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    )
    return "\n".join((*head, *panels, "</svg>", ""))


def _samples(timing: Timing) -> list[tuple[float, float, float]]:
    """Return start, end and GB/s of each interval in the run with the median time."""
    samples = timing.median_run().drive
    return [(one.start, one.start + one.seconds, one.gb_per_s) for one in samples]


def _panel(group: RankLoads, limit: float | None) -> Iterator[str]:
    lines = [(timing, found) for timing in group.done if (found := _samples(timing))]
    seconds = max(end for _, found in lines for _, end, _ in found)
    most = max((limit or 0.0, *(speed for _, found in lines for _, _, speed in found))) or 1.0
    across, down = (_WIDTH - _LEFT - _RIGHT) / seconds, (_HEIGHT - _TOP - _BOTTOM) / (1.05 * most)

    def x(second: float) -> str:
        return f"{_LEFT + second * across:.1f}"

    def y(speed: float) -> str:
        return f"{_HEIGHT - _BOTTOM - speed * down:.1f}"

    title = f"{group.title}, {group.state}: GB/s of the drive (10^9 bytes) over seconds"
    yield f'<text x="{_LEFT}" y="20" font-size="13" font-weight="bold" fill="{_INK}">{escape(title)}</text>'
    for tick in _ticks(most):
        yield f'<line x1="{x(0)}" x2="{x(seconds)}" y1="{y(tick)}" y2="{y(tick)}" stroke="{_GRID}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(tick)}" dy="4" text-anchor="end" fill="{_PALE}">{tick:g}</text>'
    for tick in _ticks(seconds):
        yield (
            f'<text x="{x(tick)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="{_PALE}">{tick:g} s</text>'
        )
    if limit is not None:
        yield (
            f'<line class="limit" x1="{x(0)}" x2="{x(seconds)}" y1="{y(limit)}" y2="{y(limit)}" stroke="{_LIMIT}"'
            ' stroke-dasharray="5 4"/>'
        )
    others = iter(_OTHERS * len(lines))
    at = _LEFT
    for timing, found in lines:
        color = _OURS if timing.family == "relayout" else next(others)
        corners = chain.from_iterable(((start, speed), (end, speed)) for start, end, speed in found)
        points = " ".join(f"{x(second)},{y(speed)}" for second, speed in corners)
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        label = f"{timing.title} {timing.median('seconds'):.2f} s"
        yield f'<rect x="{at}" y="34" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{at + 14}" y="43" fill="{_INK}">{escape(label)}</text>'
        at += 24 + 6 * len(label)


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 to `most`, about `_NUM_TICKS` of them."""
    size = 10.0 ** int(f"{most / _NUM_TICKS:e}".partition("e")[2])
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * _NUM_TICKS >= most)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]
