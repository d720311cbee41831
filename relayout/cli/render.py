"""Text output: tables and progress."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from relayout.cli.streams import abandon
from relayout.commands.differences import Report
from relayout.commands.inspect import Inspection, RankSummary
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

_MAX_GROUPS = 60
_SECONDS_BETWEEN_EVENTS = 1.0
_MAX_DIFFERENCES = 20
_PIPE_WIDTH = 100_000


def progress(what: str, *, as_json: bool = False) -> Progress:
    """What shows how far work is: events on stderr, or a bar where that is a terminal, or nothing."""
    if as_json:
        return _events(what)
    return sys.stderr is not None and sys.stderr.isatty()  # rich would count FORCE_COLOR as a terminal.


def _events(what: str) -> Callable[[int, int], None]:
    """A function that reports progress as JSON on stderr, at most one line per second."""
    started = reported = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported < _SECONDS_BETWEEN_EVENTS:
            return
        reported = now
        event = {"event": what, "done_nbytes": done, "total_nbytes": total, "seconds": round(now - started, 3)}
        try:
            print(json.dumps(event), file=sys.stderr, flush=True)
        except OSError:  # A closed stderr must not stop the work.
            abandon(sys.stderr)

    return report


def print_summary(summary: Summary) -> None:
    """Print the result of `convert`."""
    console = _console()
    copied = summary.source_nbytes - summary.resumed_nbytes
    speed = copied / max(summary.seconds, 1e-9) / 1e9
    overhead = 100 * (summary.written_nbytes / max(1, summary.source_nbytes) - 1)
    console.print(
        f"[bold green]done[/] {_text(summary.output)}: {_count(summary.num_tensors, 'tensor')} for "
        f"{_count(summary.num_ranks, 'rank')} in {_count(summary.num_files, 'file')}, {decimal(summary.source_nbytes)} "
        f"read, {decimal(summary.written_nbytes)} written ({overhead:+.2f} %) in {summary.seconds:.1f} s "
        f"({speed:.2f} GB/s), peak memory {decimal(summary.peak_nbytes)}"
    )
    if summary.resumed_nbytes:
        console.print(
            f"{decimal(summary.resumed_nbytes)} of it were kept from an interrupted conversion, after a check"
        )
    console.print(_ranks_in_words(summary.rank_nbytes, summary.replicated_nbytes, summary.source_nbytes))
    _print_unmatched(console, summary.unmatched, summary.untaken)
    _print_left_out(console, summary.left_out)


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
    _console().print(
        f"[bold green]restored[/] {_text(restored.output)}: {_count(restored.num_tensors, 'tensor')} in "
        f"{_count(restored.num_files, 'file')}, {decimal(restored.written_nbytes)} in {restored.seconds:.1f} s "
        f"({restored.written_nbytes / max(restored.seconds, 1e-9) / 1e9:.2f} GB/s), every digest matches, "
        f"peak memory {decimal(restored.peak_nbytes)}"
    )


def print_warmed(warmed: Warmed) -> None:
    """After files were brought into the page cache."""
    table = _table("file", "size", "resident before", "after")
    for file in warmed.files:
        shares = [
            "unknown" if one is None else f"{100 * one / max(1, file.nbytes):.1f} %"
            for one in (file.before_nbytes, file.after_nbytes)
        ]
        table.add_row(_text(file.name), decimal(file.nbytes), *shares)
    console = _console()
    console.print(table)
    rate = warmed.read_nbytes / max(warmed.seconds, 1e-9) / 1e9
    console.print(f"read {decimal(warmed.read_nbytes)} in {warmed.seconds:.1f} s ({rate:.2f} GB/s)")
    if warmed.left_nbytes:
        console.print(f"[yellow]left {decimal(warmed.left_nbytes)}[/] for want of memory: --memory says how much")


def print_page(written: PageWritten) -> None:
    """After a page was written."""
    shown = "forecast of a conversion" if written.is_forecast else "converted checkpoint"
    _console().print(
        f"[bold green]wrote[/] {_text(written.output)} ({decimal(written.nbytes)}): {shown}, "
        f"{_count(written.num_tensors, 'tensor')}, {_count(written.num_ranks, 'rank')}; open it in a browser"
    )


def print_preview(preview: Preview) -> None:
    """Print the plan for `convert --dry-run`."""
    console = _console()
    table = _table("tensors", "#count", "dtype", "shape", "cut", "shape per rank", "#bytes per rank")
    for group in preview.groups[:_MAX_GROUPS]:
        shapes = " or ".join(_shape(shape) for shape in group.rank_shapes[:3])
        table.add_row(
            _text(group.pattern),
            str(group.count),
            group.dtype,
            _shape(group.shape),
            group.cut,
            shapes,
            decimal(group.rank_nbytes),
        )
    console.print(table)
    _print_more(console, len(preview.groups) - _MAX_GROUPS, "groups")
    share = 100 * preview.tail_nbytes / max(1, sum(preview.rank_nbytes))
    owned = ", experts owned whole" if preview.expert_parallel else ""
    console.print(
        f"plan {_text(preview.plan)}{owned}: {_text(preview.source)} ({decimal(preview.source_nbytes)}) -> "
        f"{_text(preview.output)} ({decimal(preview.written_nbytes)}, {_count(preview.num_files, 'file')} of "
        f"{_count(preview.num_units, 'unit')}), "
        f"aligned to {preview.alignment} bytes except {share:.2f} % of the bytes"
    )
    if preview.balance < 1:
        ranks = _table("#rank", "#tensors", "#bytes")
        for rank, (count, nbytes) in enumerate(zip(preview.rank_tensors, preview.rank_nbytes, strict=True)):
            ranks.add_row(str(rank), f"{count:,}", decimal(nbytes))
        console.print(ranks)
    words = _ranks_in_words(preview.rank_nbytes, preview.replicated_nbytes, preview.source_nbytes)
    console.print(f"{words}; balance {preview.balance:.4f} (average over largest)")
    _print_unmatched(console, preview.unmatched, preview.untaken)
    _print_left_out(console, preview.left_out)
    console.print("nothing was written (--dry-run)")


def print_plans(families: Sequence[Family]) -> None:
    """Print the list of `plans`."""
    table = _table("plan", "model types", "experts")
    for family in families:
        types = ", ".join(family.model_types)
        if family.quantization:
            types += f" ({family.quantization} only)"
        owned = bool(family.experts_each or family.experts_stacked)
        table.add_row(family.name, types, "cut, or owned" if owned else "")
    console = _console()
    console.print(table)
    console.print("`relayout plans NAME` prints one, as a start for your own")


def print_report(report: Report) -> None:
    """Print the result of `verify`."""
    console = _console()
    for difference in report.differences[:_MAX_DIFFERENCES]:
        console.print(f"[red]differs[/] {_text(str(difference))}")
    _print_more(console, len(report.differences) - _MAX_DIFFERENCES, "differences")
    checked = (
        f"{_count(report.num_tensors, 'slice')} of {_count(report.num_ranks, 'rank')}, {decimal(report.nbytes)} hashed"
    )
    if report.compared_with_source:
        checked += ", every slice compared with the source"
    verdict = (
        "[bold green]verified[/]" if report.ok else f"[bold red]{_count(len(report.differences), 'difference')}[/]:"
    )
    console.print(f"{verdict} {checked}")


def print_inspection(found: Inspection) -> None:
    """Print the result of `inspect`."""
    console = _console()
    kind = "converted" if found.converted else "plain"
    plan = "" if found.plan is None else f"plan {_text(found.plan)}, "
    console.print(
        f"{_text(found.path)}: {kind} checkpoint, model type {_text(found.model_type or 'unknown')}, {plan}"
        f"{_count(found.num_tensors, 'tensor')}, {decimal(found.nbytes)} in {_count(found.num_files, 'file')}"
    )
    table = _table("tensors", "#count", "dtype", "shape", "part of", "#bytes")
    for group in found.groups[:_MAX_GROUPS]:
        table.add_row(
            _text(group.pattern),
            str(group.count),
            group.dtype,
            _shape(group.shape),
            group.cut or "",
            decimal(group.nbytes),
        )
    if not any(group.cut for group in found.groups):
        del table.columns[4]
    console.print(table)
    _print_more(console, len(found.groups) - _MAX_GROUPS, "groups")
    if found.ranks:
        _print_ranks(console, found.ranks)
    aligned = _table("#aligned to", "#bytes", "#share")
    for alignment, nbytes in found.aligned_nbytes.items():
        aligned.add_row(str(alignment), decimal(nbytes), f"{100 * nbytes / max(1, found.nbytes):.1f} %")
    console.print(aligned)
    if found.dcp is not None:
        no = "not by PyTorch DCP (--no-dcp, or a slice of a fused tensor is not one contiguous box)"
        console.print(f"readable as one model by relayout.safe_open, and {'by PyTorch DCP' if found.dcp else no}")
    if found.amplification:
        _print_amplification(console, found)
    _print_left_out(console, found.left_out)


def _print_ranks(console: Console, ranks: Sequence[RankSummary]) -> None:
    table = _table("#rank", "#tensors", "#bytes", "#files", "#reads to load")
    for rank in ranks:
        cells = rank.rank, rank.num_tensors, decimal(rank.nbytes), rank.num_files, rank.num_reads
        table.add_row(*map(str, cells))
    console.print(table)


def _print_amplification(console: Console, found: Inspection) -> None:
    table = _table("#tp", "#a rank needs", "#reads of dim-0 slices", "#reads of whole shards", "#stored", "#or whole")
    for row in found.amplification:
        if row.needed_nbytes is None:
            table.add_row(str(row.tp), "-", "-", decimal(row.whole_nbytes), "-", "-")
        else:
            table.add_row(
                str(row.tp),
                decimal(row.needed_nbytes),
                _factor(row.row_reader_nbytes or 0, row.needed_nbytes),
                _factor(row.whole_nbytes, row.needed_nbytes),
                f"{(row.ranks_layout_nbytes or 0) / max(1, found.nbytes):.2f}x",
                f"{(row.whole_layout_nbytes or 0) / max(1, found.nbytes):.2f}x",
            )
    console.print("bytes that one rank would read from this checkpoint; its size converted, or with --layout whole:")
    console.print(table)
    for reason in dict.fromkeys(row.reason for row in found.amplification if row.reason):
        console.print(f"[yellow]note[/] {_text(reason)}")


def print_diagnosis(found: Diagnosis) -> None:
    """Print the result of `doctor`."""
    console = _console()
    kind = "converted" if found.is_converted else "plain, sliced at every load"
    console.print(f"{_text(found.path)}: {kind}, {_count(len(found.ranks), 'rank')}")
    places = Counter(_place(file) for one in found.ranks for file in one.files)
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
    for reason in dict.fromkeys(one.reason for one in found.ranks):
        console.print(f"[bold]backend[/] {_text(found.ranks[0].device)}: {_text(reason)}")
    table = _table(
        "#rank",
        "backend",
        "#bytes",
        "#read / needed",
        "#zero-copy",
        "#in page cache",
        "#requests",
        "#threads",
        "#buffers",
    )
    for one in found.ranks[:_MAX_GROUPS]:
        table.add_row(
            str(one.rank),
            one.backend,
            decimal(one.nbytes),
            f"{one.read_nbytes / max(1, one.nbytes):.3f}",
            f"{100 * one.zero_copy_nbytes / max(1, one.nbytes):.1f} %",
            f"{100 * one.resident_nbytes / max(1, one.read_nbytes):.1f} %",
            f"{one.num_requests:,}",
            str(one.threads),
            decimal(one.memory),
        )
    console.print(table)
    _print_more(console, len(found.ranks) - _MAX_GROUPS, "ranks")
    if not found.is_converted:
        console.print("[yellow]note[/] relayout convert writes a folder that loads without copies")


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


def _ranks_in_words(rank_nbytes: tuple[int, ...], replicated: int, source: int) -> str:
    low, high = min(rank_nbytes), max(rank_nbytes)
    each = decimal(low) if low == high else f"{decimal(low)} to {decimal(high)}"
    return f"each rank {each}; replicated {decimal(replicated)} ({100 * replicated / max(1, source):.2f} %)"


def _print_unmatched(console: Console, unmatched: tuple[str, ...], untaken: tuple[str, ...]) -> None:
    for names, why, held in ((unmatched, "no rule", ", whole on every rank"), (untaken, "not taken by vLLM", "")):
        patterns = Counter(map(collapse_numbers, names))
        for pattern, count in list(patterns.items())[:_MAX_GROUPS]:
            console.print(f"[yellow]{why}[/] {_text(pattern)}: {_count(count, 'tensor')}{held}")
        _print_more(console, len(patterns) - _MAX_GROUPS, "patterns")


def _print_left_out(console: Console, left_out: tuple[str, ...]) -> None:
    for line in left_out[:_MAX_DIFFERENCES]:
        console.print(f"[yellow]left out[/] {_text(line)}")
    _print_more(console, len(left_out) - _MAX_DIFFERENCES, "left out")


def _print_more(console: Console, count: int, what: str) -> None:
    if count > 0:
        console.print(f"... and {count} more {what}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _text(text: str) -> str:
    """Untrusted text with markup and control characters escaped."""
    return escape(escape_controls(text))


def _table(*headings: str) -> Table:
    """A plain table. A heading with a leading # marks a column of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        is_number = heading.startswith("#")
        table.add_column(heading.removeprefix("#"), justify="right" if is_number else "left", overflow="fold")
    return table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with code 1, which means that verification found a difference.
        raise BrokenPipeError


def _console() -> Console:
    # A pipe has no width: do not break lines.
    console = _Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console
