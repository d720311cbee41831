"""Text output: the answer first, then tables that fit the terminal; and progress."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from relayout.cli.streams import abandon
from relayout.cli.tables import UNBROKEN_SPACE, Column, name, number, table, unbroken, words
from relayout.commands.differences import Report
from relayout.commands.inspect import Amplification, Inspection, RankSummary
from relayout.commands.restore import Restored
from relayout.commands.warm import Warmed
from relayout.conversion.jobs import ConvertedUnits
from relayout.conversion.preview import Preview
from relayout.conversion.run import Summary
from relayout.core.patterns import collapse_numbers
from relayout.errors import escape_controls
from relayout.plans.family import Family
from relayout.progress import Progress
from relayout.storage.stores import scheme_of

if TYPE_CHECKING:
    from relayout.html_report.page import PageWritten
    from relayout.loader.diagnose.doctor import Diagnosis
    from relayout.loader.diagnose.explain import FileFacts
    from relayout.observe.plan_file import ObservedPlan

_MAX_ROWS = 60
_SECONDS_BETWEEN_EVENTS = 1.0
_MAX_DIFFERENCES = 20
_PIPE_WIDTH = 100_000
_USUAL_DEGREE = 8
"""The tensor-parallel degree that the first lines of `inspect` speak of, or the next lower one that is possible."""
_ALIGNMENTS = {4096: "4 KiB", 2 * 2**20: "2 MiB"}
"""Blocks of drives, huge pages."""


def progress(what: str, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> Progress:
    """What shows how far work is: events on stderr; or a bar where that is a terminal, else lines with `verbose`."""
    if as_json:
        return _Events(what)
    return not quiet and sys.stderr is not None and (verbose or sys.stderr.isatty())


class _Events:
    """Reports progress as JSON on stderr, at most one line per second in each phase."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._phase: str | None = None
        self._started = self._reported = time.monotonic()

    def begin(self, phase: str) -> None:
        if self._phase is not None:  # Tell of a new phase at once.
            self._reported = -_SECONDS_BETWEEN_EVENTS
        self._phase = phase

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported < _SECONDS_BETWEEN_EVENTS:
            return
        self._reported = now
        event = {
            "event": self._what,
            "phase": self._phase,
            "done_nbytes": done,
            "total_nbytes": total,
            "seconds": round(now - self._started, 3),
        }
        try:
            print(json.dumps(event), file=sys.stderr, flush=True)
        except OSError:  # A closed stderr must not stop the work.
            abandon(sys.stderr)


def print_summary(summary: Summary) -> None:
    """Print the result of `convert`."""
    console = _console()
    copied = summary.source_nbytes - summary.resumed_nbytes
    overhead = 100 * (summary.written_nbytes / max(1, summary.source_nbytes) - 1)
    console.print(
        f"[bold green]done[/] {_text(summary.output)}: {_count(summary.num_tensors, 'tensor')} for "
        f"{_count(summary.num_ranks, 'rank')} in {_count(summary.num_files, 'file')}"
    )
    console.print(_ranks_in_words(summary.rank_nbytes, summary.replicated_nbytes, summary.source_nbytes))
    console.print(
        f"{decimal(summary.source_nbytes)} read, {decimal(summary.written_nbytes)} written ({overhead:+.2f} %) in "
        f"{summary.seconds:.1f} s ({_rate(copied, summary.seconds)}), peak memory {decimal(summary.peak_nbytes)}"
    )
    if summary.resumed_nbytes:
        console.print(
            f"{decimal(summary.resumed_nbytes)} of it were kept from an interrupted conversion, after a check"
        )
    if summary.num_ranks == 1:
        console.print("1 rank: nothing is cut, stock loaders read the folder too; --tp N cuts it for N ranks")
    _print_unmatched(console, summary.unmatched, summary.unused)
    _print_left_out(console, summary.left_out)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{decimal(round(nbytes / max(seconds, 1e-9)), precision=2)}/s"


def print_units(done: ConvertedUnits) -> None:
    """Print the result of `convert --unit`."""
    console = _console()
    for one in done.units:
        how = f"{decimal(one.source_nbytes)} in {one.seconds:.1f} s" if one.read_nbytes else "was done before"
        console.print(f"[bold green]done[/] unit {one.unit} of {done.num_units} of {_text(done.output)}: {how}")
    if not done.units:
        console.print(f"nothing to do: {_text(done.output)} has {_count(done.num_units, 'unit')}")


def print_committed(summary: Summary) -> None:
    """Print the result of `convert --commit`."""
    _console().print(
        f"[bold green]published[/] {_text(summary.output)}: {_count(summary.num_tensors, 'tensor')} for "
        f"{_count(summary.num_ranks, 'rank')} in {_count(summary.num_files, 'file')}, "
        f"{decimal(summary.written_nbytes)}, in {summary.seconds:.1f} s"
    )


def print_restored(restored: Restored) -> None:
    """Print the result of `restore`."""
    console = _console()
    console.print(
        f"[bold green]restored[/] {_text(restored.output)}: {_count(restored.num_tensors, 'tensor')} in "
        f"{_count(restored.num_files, 'file')}, every digest matches"
    )
    console.print(
        f"{decimal(restored.written_nbytes)} in {restored.seconds:.1f} s "
        f"({_rate(restored.written_nbytes, restored.seconds)}), "
        f"peak memory {decimal(restored.peak_nbytes)}"
    )


def print_warmed(warmed: Warmed, *, verbose: bool = False) -> None:
    """After files were brought into the page cache."""
    console = _console(verbose=verbose)
    total = sum(file.nbytes for file in warmed.files)
    resident = [file.after_nbytes for file in warmed.files]
    now = "" if None in resident else f": {_percent(sum(filter(None, resident)), total)} of {decimal(total)} are there"
    console.print(
        f"[bold green]warm[/] {_text(warmed.path)}{now}; {decimal(warmed.read_nbytes)} read in {warmed.seconds:.1f} s "
        f"({_rate(warmed.read_nbytes, warmed.seconds)})"
    )
    if warmed.left_nbytes:
        console.print(f"[yellow]left {decimal(warmed.left_nbytes)}[/] for want of memory: --memory says how much")
    rows = []
    for file in warmed.files:
        shares = (
            "unknown" if one is None else _percent(one, file.nbytes) for one in (file.before_nbytes, file.after_nbytes)
        )
        rows.append((file.name, decimal(file.nbytes), *shares))
    _print_table(console, [name("file"), number("size"), number("in cache before"), number("now")], rows, "files")


def print_page(written: PageWritten) -> None:
    """After a page was written."""
    shown = "forecast of a conversion" if written.is_forecast else "converted checkpoint"
    _console().print(
        f"[bold green]wrote[/] {_text(written.output)} ({decimal(written.nbytes)}): {shown}, "
        f"{_count(written.num_tensors, 'tensor')}, {_count(written.num_ranks, 'rank')}; open it in a browser"
    )


def print_preview(preview: Preview, *, verbose: bool = False) -> None:
    """Print the plan for `convert --dry-run`."""
    console = _console(verbose=verbose)
    owned = ", experts owned whole" if preview.expert_parallel else ""
    console.print(
        f"{_text(preview.source)} ({decimal(preview.source_nbytes)}) -> {_text(preview.output)} "
        f"({decimal(preview.written_nbytes)} in {_count(preview.num_files, 'file')} of "
        f"{_count(preview.num_units, 'unit')}); nothing was written (--dry-run)"
    )
    words_of_ranks = _ranks_in_words(preview.rank_nbytes, preview.replicated_nbytes, preview.source_nbytes)
    console.print(f"{words_of_ranks}; balance {preview.balance:.4f} (average over largest)")
    share = 100 * preview.tail_nbytes / max(1, sum(preview.rank_nbytes))
    console.print(
        f"plan {_text(preview.plan)}{owned}; aligned to {preview.alignment} bytes except {share:.2f} % of the bytes"
    )
    if preview.balance < 1:
        ranks = zip(preview.rank_tensors, preview.rank_nbytes, strict=True)
        rows = [(str(rank), f"{count:,}", decimal(nbytes)) for rank, (count, nbytes) in enumerate(ranks)]
        _print_table(console, [number("rank"), number("tensors"), number("bytes")], rows, "ranks")
    columns = [
        name("tensors"),
        number("count"),
        Column("dtype", drop=1),
        Column("shape", drop=2),
        words("cut"),
        words("per rank"),
        number("bytes"),
    ]
    rows_of_groups = [
        (
            group.pattern,
            str(group.count),
            group.dtype,
            _shape(group.shape),
            group.cut,
            " or ".join(_shape(shape) for shape in group.rank_shapes[:3]),
            decimal(group.rank_nbytes),
        )
        for group in preview.groups
    ]
    _print_table(console, columns, rows_of_groups, "groups")
    _print_unmatched(console, preview.unmatched, preview.unused)
    _print_left_out(console, preview.left_out)


def print_observed(made: ObservedPlan) -> None:
    """Print what `plans --observe` wrote."""
    console = _console()
    degrees = ", ".join(map(str, made.degrees))
    console.print(
        f"{_text(made.output)}: {_count(made.num_rules, 'rule')}, observed from vLLM {made.engine} at {degrees} ranks"
    )
    for line in made.unmatched:
        console.print(f"[yellow]no rule[/] {_text(line)}")


def print_plans(families: Sequence[Family]) -> None:
    """Print the list of `plans`."""
    console = _console(verbose=True)
    rows = []
    for family in families:
        types = ", ".join(family.model_types)
        if family.quantization:
            types += f" ({family.quantization} only)"
        owned = bool(family.experts_each or family.experts_stacked)
        rows.append((family.name, types, "cut, or owned" if owned else ""))
    console.print(
        f"{_count(len(families), 'built-in plan')}; `relayout plans NAME` prints one, as a start for your own"
    )
    _print_table(console, [Column("plan"), words("model types"), words("experts")], rows, "plans")


def print_report(report: Report, *, verbose: bool = False) -> None:
    """Print the result of `verify`."""
    console = _console(verbose=verbose)
    checked = (
        f"{_count(report.num_tensors, 'slice')} of {_count(report.num_ranks, 'rank')}, {decimal(report.nbytes)} hashed"
    )
    if report.compared_with_source:
        checked += ", every slice compared with the source"
    verdict = (
        "[bold green]verified[/]" if report.ok else f"[bold red]{_count(len(report.differences), 'difference')}[/]:"
    )
    console.print(f"{verdict} {checked}")
    for difference in report.differences[: console.max_lines]:
        console.print(f"[red]differs[/] {_text(str(difference))}")
    _print_more(console, len(report.differences) - console.max_lines, "differences")


def print_inspection(found: Inspection, *, verbose: bool = False) -> None:
    """Print the result of `inspect`."""
    console = _console(verbose=verbose)
    kind = "converted" if found.converted else "plain"
    plan = "" if found.plan is None else f"plan {_text(found.plan)}, "
    console.print(
        f"{_text(found.path)}: {kind} checkpoint, model type {_text(found.model_type or 'unknown')}, {plan}"
        f"{_count(found.num_tensors, 'tensor')}, {decimal(found.nbytes)} in {_count(found.num_files, 'file')}"
    )
    if found.ranks:
        who = "each rank gets" if len(found.ranks) > 1 else f"rank {found.ranks[0].rank} gets"
        reads = max(rank.num_reads for rank in found.ranks)
        sizes = [rank.nbytes for rank in found.ranks]
        console.print(f"[bold]{who} {_range(sizes)} in {_count(reads, 'read')}[/]")
    if found.amplification:
        _print_gain(console, found.amplification)
    if found.dcp is not None:
        no = "not by PyTorch DCP (--no-dcp, or a slice of a fused tensor is not one contiguous box)"
        console.print(f"readable as one model by relayout.safe_open, and {'by PyTorch DCP' if found.dcp else no}")
    shares = (f"{_percent(found.aligned_nbytes[one], found.nbytes)} to {what}" for one, what in _ALIGNMENTS.items())
    console.print(f"bytes of tensors that are aligned: {', '.join(shares)}")
    if found.ranks:
        _print_ranks(console, found.ranks)
    if found.amplification:
        _print_amplification(console, found.amplification, found.nbytes)
    columns = [name("tensors"), number("count"), Column("dtype", drop=1), words("shape")]
    columns += [words("part of")] if found.converted else []
    rows = [
        (
            group.pattern,
            str(group.count),
            group.dtype,
            _shape(group.shape),
            *([_cut(group.cut)] if found.converted else []),
            decimal(group.nbytes),
        )
        for group in found.groups
    ]
    _print_table(console, [*columns, number("bytes")], rows, "groups")
    _print_left_out(console, found.left_out)


def _print_ranks(console: _Console, ranks: Sequence[RankSummary]) -> None:
    rows = [
        (str(rank.rank), f"{rank.num_tensors:,}", decimal(rank.nbytes), str(rank.num_files), str(rank.num_reads))
        for rank in ranks
    ]
    columns = [number(heading) for heading in ("rank", "tensors", "bytes", "files", "reads to load")]
    _print_table(console, columns, rows, "ranks")


def _print_gain(console: _Console, degrees: Sequence[Amplification]) -> None:
    """What the conversion would change, at a usual degree; why others are impossible."""
    possible = [row for row in degrees if row.needed_nbytes is not None and row.tp <= _USUAL_DEGREE]
    if possible:
        row = possible[-1]
        needed = decimal(row.needed_nbytes or 0)
        console.print(
            f"[bold]a rank of {row.tp} would read {decimal(row.row_reader_nbytes or 0)} to get {needed}; "
            f"after convert --tp {row.tp}: {needed} in one read[/]"
        )
    for reason in dict.fromkeys(row.reason for row in degrees if row.reason):
        console.print(f"[yellow]note[/] {_text(reason)}")


def _print_amplification(console: _Console, degrees: Sequence[Amplification], nbytes: int) -> None:
    rows = []
    for row in degrees:
        if row.needed_nbytes is None:
            rows.append([str(row.tp), "-", "-", decimal(row.whole_nbytes), "-", "-"])
            continue
        sizes = (row.ranks_layout_nbytes or 0, row.whole_layout_nbytes or 0)
        rows.append(
            [
                str(row.tp),
                decimal(row.needed_nbytes),
                _factor(row.row_reader_nbytes or 0, row.needed_nbytes),
                _factor(row.whole_nbytes, row.needed_nbytes),
                *(f"{size / max(1, nbytes):.2f}x" for size in sizes),
            ]
        )
    headings = ("tp", "a rank needs", "reads by slices", "reads whole shards", "stored", "or whole")
    _print_table(console, [number(heading) for heading in headings], rows, "degrees")


def print_diagnosis(found: Diagnosis, *, verbose: bool = False) -> None:
    """Print the result of `doctor`."""
    console = _console(verbose=verbose)
    kind = "converted" if found.is_converted else "plain, sliced at every load"
    console.print(f"{_text(found.path)}: {kind}, {_count(len(found.ranks), 'rank')}")
    for reason in {re.sub(r"\d+ %", "", one.reason): one.reason for one in reversed(found.ranks)}.values():
        console.print(f"[bold]backend[/] {_text(found.ranks[0].device)}: {_text(reason)}")
    places = Counter({file.name: _place(file) for one in found.ranks for file in one.files}.values())
    for place, count in places.items():
        console.print(f"[bold]files[/] {_count(count, 'file')} on {_text(place)}")
    console.print(f"[bold]machine[/] {_text(_machine(found))}")
    if (network := found.network) is not None:
        console.print(
            f"[bold]network[/] {1000 * network.latency_seconds:.1f} ms to the first byte,"
            f" {network.bytes_per_second / 1e9:.2f} GB/s by {_count(network.threads, 'connection')}"
            f" ({decimal(network.sample_nbytes)} read): rank {found.ranks[0].rank} would take"
            f" {network.seconds(found.ranks[0].read_nbytes):.1f} s"
        )
    gds = next((one.gds for one in found.ranks if one.gds is not None), None)
    if found.gpus:
        console.print(f"[bold]GPUDirect Storage[/] {_text(gds or 'not available')}")
    if not found.is_converted:
        console.print("[yellow]note[/] relayout convert writes a folder that loads without copies")
    budgets = {(one.threads, one.memory) for one in found.ranks}
    for threads, memory in sorted(budgets):
        console.print(f"[bold]budget[/] a rank: {_count(threads, 'thread')}, {decimal(memory)} of buffers at most")
    headings = ("bytes", "read/needed", "in place", "in cache", "requests")
    rows = [
        (
            str(one.rank),
            one.backend,
            decimal(one.nbytes),
            f"{one.read_nbytes / max(1, one.nbytes):.3f}",
            _percent(one.zero_copy_nbytes, one.nbytes),
            _percent(one.resident_nbytes, one.read_nbytes),
            f"{one.num_requests:,}",
        )
        for one in found.ranks
    ]
    _print_table(console, [number("rank"), Column("backend"), *map(number, headings)], rows, "ranks")


def _place(file: FileFacts) -> str:
    """The file system of a file and its direct I/O, in words."""
    system = file.filesystem
    drive = "" if system.drive_block_nbytes is None else f", drive blocks of {system.drive_block_nbytes}"
    if system.kind == (scheme_of(system.mount_point) or ""):
        return f"{system.mount_point}, by ranges of at most {system.block_nbytes // 2**20} MiB"
    refused = file.refuses_direct
    direct = (
        "direct I/O works" if refused is None else f"direct I/O does not work ({refused}), reads use the page cache"
    )
    return f"{system.kind} at {system.mount_point}, blocks of {system.block_nbytes} bytes{drive}; {direct}"


def _machine(found: Diagnosis) -> str:
    ranks = f", {found.local_world_size} ranks on this node (LOCAL_WORLD_SIZE)" if found.local_world_size > 1 else ""
    torch = "torch is not installed, but loading needs it" if found.torch is None else f"torch {found.torch}"
    gpus = ", ".join(found.gpus) or "no CUDA device"
    return f"{_count(found.num_cpus, 'processor')}{ranks}; {torch}; {gpus}"


def _factor(nbytes: int, needed: int) -> str:
    return f"{decimal(nbytes)} ({nbytes / max(1, needed):.1f}x)"


def _percent(nbytes: int, total: int) -> str:
    return f"{100 * nbytes / max(1, total):.1f} %"


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return decimal(low) if low == high else f"{decimal(low)} to {decimal(high)}"


def _ranks_in_words(rank_nbytes: tuple[int, ...], replicated: int, source: int) -> str:
    share = f"{100 * replicated / max(1, source):.2f} %"
    return f"each rank {_range(rank_nbytes)}; replicated {decimal(replicated)} ({share})"


def _print_unmatched(console: _Console, unmatched: tuple[str, ...], unused: tuple[str, ...]) -> None:
    if unmatched or unused:
        console.print()
    for names, why, held in ((unmatched, "no rule", ", whole on every rank"), (unused, "not loaded by vLLM", "")):
        patterns = Counter(map(collapse_numbers, names))
        for pattern, count in list(patterns.items())[: console.max_rows]:
            console.print(f"[yellow]{why}[/] {_text(pattern)}: {_count(count, 'tensor')}{held}")
        _print_more(console, len(patterns) - console.max_rows, "patterns")


def _print_left_out(console: _Console, left_out: tuple[str, ...]) -> None:
    if left_out:
        console.print()
    for line in left_out[: console.max_lines]:
        console.print(f"[yellow]left out[/] {_text(line)}")
    _print_more(console, len(left_out) - console.max_lines, "left out")


def _print_more(console: _Console, count: int, what: str) -> None:
    if count > 0:
        console.print(f"... and {count} more {what}; --verbose prints all")


def _print_table(console: _Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], what: str) -> None:
    """Print a table after an empty line. Cells are untrusted text."""
    shown = rows[: console.max_rows]
    safe = [[UNBROKEN_SPACE.join(map(escape_controls, cell.split(UNBROKEN_SPACE))) for cell in row] for row in shown]
    headings, rule, *lines = table(columns, safe, console.width)
    console.print(f"\n[bold]{headings}[/]", soft_wrap=True)
    for line in (rule, *lines):
        console.print(line, markup=False, soft_wrap=True)
    _print_more(console, len(rows) - console.max_rows, what)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shape(shape: tuple[int, ...]) -> str:
    return unbroken(" x ".join(map(str, shape)) or "scalar")


def _cut(cut: str | None) -> str:
    """Which part of a tensor is stored; the shape at the end stays in one line."""
    words, bracket, shape = (cut or "").partition("[")
    return f"{words}{unbroken(bracket + shape)}"


def _text(text: str) -> str:
    """Untrusted text with markup and control characters escaped."""
    return escape(escape_controls(text))


class _Console(Console):
    """Standard output, and how much is printed there."""

    max_rows = _MAX_ROWS
    """Of a table."""
    max_lines = _MAX_DIFFERENCES
    """Of one kind of finding."""

    def on_broken_pipe(self) -> None:
        # rich would exit with code 1, which means that verification found a difference.
        raise BrokenPipeError


def _console(*, verbose: bool = False) -> _Console:
    """In a terminal lines end between words. A pipe has no width, unless COLUMNS says one."""
    console = _Console(highlight=False)
    if verbose:
        console.max_rows = console.max_lines = sys.maxsize
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # A name of a tensor may have what the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    return console
