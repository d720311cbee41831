"""Text output of `bench`, at most 80 columns wide."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable

import typer

from relayout.benchmark.measure import Bench, BenchPlan
from relayout.benchmark.verdict import RankLoads, faster
from relayout.errors import escape_controls

_WIDTH = 80
_NAME_WIDTH = 28


def print_bench(found: Bench) -> None:
    """Print the result of `bench`: the verdict, then the figures."""
    lines = [*_wrapped(found.verdict)]
    for warning in found.warnings:
        lines += _wrapped(f"warning: {warning}")
    for wrong in found.wrong:
        lines += _wrapped(f"WRONG BYTES: {wrong}")
    lines += ["", *table_of(found.loads, found.drive_gb_per_s)]
    if found.drive_gb_per_s is not None:
        lines.append(f"drive: {found.drive_gb_per_s:.2f} GB/s by direct reads of the same files (10^9 bytes)")
    machine = found.machine
    system = f"{machine.file_system}{'' if machine.drive is None else f' on {machine.drive}'}"
    lines += _wrapped(
        f"machine: {machine.num_cpus} processors, {machine.memory_nbytes / 1e9:.0f} GB of memory, {system},"
        f" load average {machine.load_average:.1f} at the start"
    )
    for why in found.left_out:
        lines += _wrapped(f"not measured: {why}")
    same = "all loaders loaded the same bytes" if not found.wrong else "not all loaders loaded the same bytes"
    lines += _wrapped(f"medians of {found.runs} runs, each in a fresh process; {same} (compared after the clock)")
    lines += _wrapped("+MiB: memory at its peak, of one process, beyond the tensors")
    print("\n".join(lines), flush=True)


def may_drop_caches(plan: BenchPlan, *, yes: bool) -> bool:
    """Whether the files may be dropped from the page cache: ask, if there is a person to ask."""
    if yes:
        return True
    if not sys.stdin.isatty():
        return False
    question = (
        f"Cold loads drop {len(plan.folders.every_file)} files ({plan.droppable_nbytes / 1e9:.1f} GB) from the page"
        " cache, again and again. Other processes that use them will wait for the drive. Without, warm loads only are"
        " measured. Drop them?"
    )
    try:
        return typer.confirm("\n".join(_wrapped(question)), err=True)
    except typer.Abort:  # The end of input; Ctrl-C is heard elsewhere.
        return False


def tell(line: str) -> None:
    """One line about what is going on, on stderr."""
    typer.echo(escape_controls(line), err=True)


def table_of(loads: Iterable[RankLoads], drive: float | None) -> list[str]:
    """The figures: for each group of loads its loaders, the fastest first, and why others are not there."""
    lines = [f"{'':{_NAME_WIDTH}}{'s':>8}{'GB/s':>7}{'of drive':>9}{'CPU s':>7}{'+MiB':>7}  relayout is"]
    for group in loads:
        lines.append(f"{group.title}, {group.state}")
        ours = group.ours()
        for one in group.done:
            share = "" if drive is None or group.state != "cold" else f"{100 * one.gb_per_s / drive:.0f} %"
            cells = f"{one.median('seconds'):8.2f}{one.gb_per_s:7.2f}{share:>9}{one.median('cpu_seconds'):7.2f}"
            cells += f"{one.median('peak_minus_needed_nbytes') / 2**20:7.0f}"
            ratio = "" if ours is None or one is ours else faster(one.median("seconds") / ours.median("seconds"))
            lines.append(f"{'  ' + one.title:{_NAME_WIDTH}}{cells}  {ratio}".rstrip())
        for one in group.timings:
            if one.failure is not None:
                lines += _wrapped(f"  {one.title}: {one.failure}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(escape_controls(text), _WIDTH, subsequent_indent="  ", break_long_words=False)
