"""The text of each result: the answer first, then tables. Pure functions from a result to lines and tables."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.filesize import decimal

from relayout.cli.command import Block, Column, Line, Listing, Table
from relayout.core.arguments import collapse_numbers, ranks_text
from relayout.plans.family import ENGINES
from relayout.storage.stores import scheme_of

if TYPE_CHECKING:
    from relayout.commands.cache import CacheListing
    from relayout.commands.copy import AlreadyThere, CopyResult
    from relayout.commands.delta import DeltaResult
    from relayout.commands.inspect import Amplification, Inspection
    from relayout.commands.restore import RestoreResult
    from relayout.commands.sign import SignResult
    from relayout.commands.verify_source import SourceVerification
    from relayout.commands.warm import WarmResult
    from relayout.conversion.consistency import Verification
    from relayout.conversion.jobs import ConvertedUnits
    from relayout.conversion.planning import PlanCheck, Preview
    from relayout.conversion.run import Summary
    from relayout.format.source_record import FileDigest
    from relayout.loader.diagnose import Diagnosis, FileFacts
    from relayout.plans.family import Family

_USUAL_DEGREE = 8
"""Tensor-parallel degree in the first lines of `inspect`, unless another was requested; the next lower possible degree
is used if this one is not possible."""
_SHOWN_NAME = 12
"""Letters of the name of a cache entry."""
_MIN_STRIPED_NBYTES = 2**28
"""Smaller files of Lustre are good in one stripe: opening more costs a request to each server."""


def summary(done: Summary) -> Iterator[Block]:
    """Yield the output of `convert`."""
    more = 100 * (done.written_nbytes / max(1, done.source_nbytes) - 1)
    overhead = f" ({more:+.2f} %)" if len(done.ranks) == done.num_ranks else ""
    yield Line(f"{done.output}: {_tensors_of_ranks(done)}", "done", "bold green")
    yield Line(_rank_sizes(done))
    now_nbytes = done.source_nbytes - done.resumed_nbytes
    yield Line(
        f"{decimal(now_nbytes)} read in {_time(now_nbytes, done.seconds)}, peak memory {decimal(done.peak_nbytes)};"
        f" {decimal(done.written_nbytes)} written{overhead}"
    )
    if done.resumed_nbytes:
        yield Line(f"{decimal(done.resumed_nbytes)} of it was done by an interrupted conversion")
    if done.num_ranks == 1:
        yield Line("1 rank: all tensors are whole, stock loaders read the folder too")
    if done.verified:
        shards = len({one.name for one in done.verified})
        some = "" if shards == done.num_shards else f"{shards} of "
        yield Line(f"source verified: {some}{counted(done.num_shards, 'shard')}, {signer_text(done.verified)}")
    if done.is_private:
        yield Line(
            f"only you can read it, as with the source; for others: chmod -R a+rX {done.output}", "note", "yellow"
        )
    yield from _exceptions(done)


def already_there(done: AlreadyThere) -> Iterator[Block]:
    """Yield the output of `convert` and `copy` with `--if-missing` if the output exists."""
    yield Line(
        f"{done.output}: already there, all files with their lengths: nothing to do (relayout verify compares bytes)",
        "done",
        "bold green",
    )


def copied(done: CopyResult) -> Iterator[Block]:
    """Yield the output of `copy` and `apply`."""
    ranks, what = _ranks(done.ranks, done.num_ranks), counted(done.num_files, "file")
    yield Line(f"{done.output}: {what} for {ranks}, every byte compared with its digest", "done", "bold green")
    now_nbytes = done.nbytes - done.resumed_nbytes
    yield Line(f"{decimal(now_nbytes)} in {_time(now_nbytes, done.seconds)}")
    if done.resumed_nbytes:
        yield Line(f"{decimal(done.resumed_nbytes)} of it was done by an interrupted copy")
    if done.reused_nbytes:
        yield Line(f"{decimal(done.reused_nbytes)} of it came from an older version, and was not read from the source")
    if done.shared_nbytes:
        yield Line(f"{decimal(done.shared_nbytes)} of it shares blocks with the older version, and takes no space")
    if done.copied_nbytes:
        yield Line(f"{decimal(done.copied_nbytes)} of it was copied by the server from an older version, and not sent")


def units(done: ConvertedUnits) -> Iterator[Block]:
    """Yield the output of `convert --unit`."""
    for unit in done.units:
        how = f"{decimal(unit.source_nbytes)} in {unit.seconds:.1f} s" if unit.read_nbytes else "was done before"
        yield Line(f"unit {unit.unit} of {done.num_units} of {done.output}: {how}", "done", "bold green")
    if not done.units:
        yield Line(f"nothing to do: {done.output} has {counted(done.num_units, 'unit')}")


def committed(done: Summary) -> Iterator[Block]:
    """Yield the output of `convert --commit`."""
    size = f"{decimal(done.written_nbytes)}, in {done.seconds:.1f} s"
    yield Line(f"{done.output}: {_tensors_of_ranks(done)}, {size}", "published", "bold green")


def signed(done: SignResult) -> Iterator[Block]:
    """Yield the output of `sign`."""
    yield Line(f"{done.signature}: {counted(done.num_files, 'file')}", "signed", "bold green")
    yield Line(f"{decimal(done.nbytes)} in {_time(done.nbytes, done.seconds)}; content {done.content}")


def restored(done: RestoreResult) -> Iterator[Block]:
    """Yield the output of `restore`."""
    counts = f"{counted(done.num_tensors, 'tensor')} in {counted(done.num_files, 'file')}"
    yield Line(f"{done.output}: {counts}, every digest matches", "restored", "bold green")
    yield Line(
        f"{decimal(done.written_nbytes)} in {_time(done.written_nbytes, done.seconds)}, "
        f"peak memory {decimal(done.peak_nbytes)}"
    )


def delta_done(done: DeltaResult) -> Iterator[Block]:
    """Yield the output of `delta`."""
    share = f"{decimal(done.delta_nbytes)}, {_percent(done.delta_nbytes, done.nbytes)} of {decimal(done.nbytes)}"
    yield Line(f"{done.output}: {share}", "written", "bold green")
    yield Line(
        f"{counted(done.num_files, 'file')} in {_time(done.nbytes, done.seconds)}, "
        f"peak memory {decimal(done.peak_nbytes)}"
    )


def warmed(done: WarmResult) -> Iterator[Block]:
    """Yield the output of `warm`."""
    total = sum(file.nbytes for file in done.files)
    resident = [file.after_nbytes for file in done.files]
    now = "" if None in resident else f": {_percent(sum(filter(None, resident)), total)} of {decimal(total)} in cache"
    read = f"{decimal(done.read_nbytes)} read in {_time(done.read_nbytes, done.seconds)}"
    yield Line(f"{done.path}{now}; {read}", "warm", "bold green")
    if done.left_nbytes:
        yield Line("not read: over the memory limit, which --memory sets", decimal(done.left_nbytes), "yellow")
    rows = [
        (file.name, decimal(file.nbytes), *(_percent(n, file.nbytes) for n in (file.before_nbytes, file.after_nbytes)))
        for file in done.files
    ]
    yield Table([Column("file", "name"), *of_numbers("bytes", "in cache before", "now")], rows, "files")


def cache(listing: CacheListing) -> Iterator[Block]:
    """Yield the output of `cache`."""
    held = f"{counted(len(listing.entries), 'checkpoint')}, {decimal(listing.nbytes)}" if listing.entries else "empty"
    yield Line(f"{listing.folder}: {held if listing.exists else 'does not exist; relayout cache add creates it'}")
    for entry in listing.removed:
        yield Line(f"{entry.name[:_SHOWN_NAME]}: {entry.source or '-'}, {decimal(entry.nbytes)}", "removed", "yellow")
    for name in listing.in_use:
        yield Line(f"{name}: a process uses it", "kept", "yellow")
    rows = [
        (
            entry.name[:_SHOWN_NAME],
            entry.source or "-",
            f"{entry.ranks} of {entry.num_ranks}" if entry.ranks else str(entry.num_ranks or "-"),
            decimal(entry.nbytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) + (", in use" if entry.is_in_use else ""),
        )
        for entry in listing.entries
    ]
    if rows:
        yield Table(
            [Column("entry"), Column("source", "name"), *of_numbers("ranks", "size"), Column("used")],
            rows,
            "entries",
        )


def preview(planned: Preview) -> Iterator[Block]:
    """Yield the output of `convert --dry-run`."""
    units = f" of {planned.num_units:,} units" if planned.num_units > 1 else ""
    files = f"{counted(planned.num_files, 'file')}{units}"
    yield Line(
        f"{planned.source} ({decimal(planned.source_nbytes)}) -> {planned.output} "
        f"({decimal(planned.written_nbytes)} in {files}); nothing was written (--dry-run)"
    )
    yield Line(f"{_rank_sizes(planned)}; balance {planned.balance:.4f} (average over largest)")
    owned = ", experts owned whole" if planned.expert_parallel else ""
    unaligned = 100 * planned.tail_nbytes / max(1, sum(planned.rank_nbytes))
    yield Line(
        f"plan {planned.plan}{owned}; aligned to {planned.alignment} bytes except {unaligned:.2f} % of the bytes"
    )
    if planned.balance < 1:
        numbers = zip(planned.ranks, planned.rank_tensors, planned.rank_nbytes, strict=True)
        of_ranks = [(str(rank), f"{count:,}", decimal(nbytes)) for rank, count, nbytes in numbers]
        yield Table(of_numbers("rank", "tensors", "bytes"), of_ranks, "ranks")
    columns = [Column("tensors", "name"), *of_numbers("count"), Column("dtype", drop=1), Column("shape", drop=2)]
    columns += [Column("cut", "words"), Column("per rank", "words"), *of_numbers("bytes")]
    rows = []
    for group in planned.groups:
        shapes = " or ".join(map(_shape, group.rank_shapes[:3]))
        what = (group.pattern, str(group.count), group.dtype, _shape(group.shape))
        rows.append((*what, group.cut, shapes, decimal(group.rank_nbytes)))
    yield Table(columns, rows, "groups")
    yield from _exceptions(planned)


def families(built_in: Sequence[Family]) -> Iterator[Block]:
    """Yield the output of `plans list`."""
    yield Line(f"{counted(len(built_in), 'built-in plan')}; `relayout plans show NAME` prints one to start from")
    rows = []
    for family in built_in:
        types = ", ".join(family.model_types) + (f" ({family.quantization} only)" if family.quantization else "")
        rows.append((family.name, types, "cut, or owned" if family.experts_each or family.experts_stacked else ""))
    yield Table([Column("plan"), Column("model types", "words"), Column("experts", "words")], rows, "plans")


def plan_check(checked: PlanCheck) -> Iterator[Block]:
    """Yield the output of `plans check`."""
    model = "no model_type in config.json" if checked.model_type is None else f"model type {checked.model_type}"
    plan = "no built-in plan matches it" if checked.plan is None else f"plan {checked.plan}"
    yield Line(f"{checked.path}: {counted(checked.num_tensors, 'tensor')}, {model}, {plan}")
    if checked.ok:
        yield Line("every tensor has a rule")
        return
    yield Line(f"{counted(sum(kind.count for kind in checked.kinds), 'tensor')} without a rule; ways on:")
    for name in checked.matching:
        yield Line("its rules match every tensor: check that the model is built so", f"--plan {name}")
    observed = "cuts as its own loaders do; `relayout plans observe SRC --engine {}` writes a plan file"
    for engine, name in ENGINES.items():
        yield Line(f"where {name} is installed: {observed.format(engine)}", f"--plan {engine}")
    yield Line("where transformers is installed: its plan, if it has one", "--plan transformers")
    yield Line("a plan file of your own (PLANS.md); `relayout plans show NAME` prints one to start from", "--plan FILE")
    rows = [(kind.pattern, f"{kind.count:,}", _shape(kind.shape), kind.example) for kind in checked.kinds]
    columns = [Column("pattern", "name"), Column("count", "number"), Column("shape"), Column("example", "name", drop=1)]
    yield Table(columns, rows, "kinds")


def verification(result: Verification, *, has_source: bool) -> Iterator[Block]:
    """Yield the output of `verify`; `has_source` is True if a comparison with the source was requested."""
    who = _ranks(result.ranks, result.num_ranks)
    text = f"{counted(result.num_tensors, 'slice')} of {who}, {decimal(result.nbytes)} hashed"
    if result.compared_with_source:
        text += ", every slice compared with the source"
    elif has_source:
        text += ", not compared with the source because of what differs"
    else:
        text += ", compared with its own digests and no source"
    if result.ok:
        yield Line(text, "verified", "bold green")
        if result.signer is not None:
            what = "all signed files" if len(result.ranks) == result.num_ranks else f"the signed files of {who}"
            yield Line(f"by {result.signer}: {what} unchanged", "signed", "bold green")
        elif result.has_signature:
            yield Line("its signature was not checked: --trust POLICY does that", "note", "yellow")
    else:
        yield Line(text, f"{counted(len(result.differences), 'difference')}:", "bold red")
    yield Listing([str(difference) for difference in result.differences], "differences", "differs", "red")
    if result.culprit is not None:
        yield Line(_NEXT[result.culprit], "next")


def source_verification(result: SourceVerification) -> Iterator[Block]:
    """Yield the output of `verify` for a plain checkpoint."""
    shards, unknown = len(result.shards), [name for name in result.shards if name in result.unknown]
    of_shards = [one for one in result.verified if one.name in result.shards]
    if not result.ok:
        found = counted(len(result.differences), "difference")
        yield Line(f"{result.path}: {decimal(result.nbytes)} hashed", f"{found}:", "bold red")
    elif result.is_verified:
        text = f"{result.path}: {counted(shards, 'shard')}, every byte, {signer_text(of_shards)}"
        yield Line(text, "verified", "bold green")
    elif len(unknown) < shards:
        text = f"{result.path}: {shards - len(unknown)} of {counted(shards, 'shard')}, {signer_text(of_shards)}"
        yield Line(text, "verified in part", "bold yellow")
    else:
        what = "of its shards: headers and index agree, the bytes of tensors were compared with nothing"
        yield Line(f"{result.path}: {what}", "no digest known", "bold yellow")
    if result.ok:
        others = {one.name for one in result.verified} - set(result.shards)
        text = f"{counted(result.num_tensors, 'tensor')}, headers and index agree"
        yield Line(f"{text}; {counted(len(others), 'other file')} compared; {decimal(result.nbytes)} hashed")
    if result.signer is not None:
        yield Line(f"by {result.signer}", "signed", "bold green" if result.ok else "")
    elif result.has_signature:
        yield Line("its signature was not checked: --trust POLICY does that", "note", "yellow")
    yield Listing([str(difference) for difference in result.differences], "differences", "differs", "red")
    yield Listing(list(result.unknown), "files", "no digest known", "yellow")
    if result.differences:
        yield Line("download these files again, or take them from where they are intact", "next")


def signer_text(verified: Iterable[FileDigest]) -> str:
    """Return the origins of verified digests, each with the kind of digest, as text."""
    kinds = dict.fromkeys(f"{one.by} ({one.digest.partition(':')[0]})" for one in verified)
    return f"by {', '.join(kinds)}"


_NEXT = {
    "folder": "copy these files again from where they are intact, or convert again with --force",
    "source": "the folder is intact: it was converted from another model, or from this one before it changed; name its"
    " own source, or convert this one into a folder of its own",
    "either": "the folder agrees with its own digests; without --ranks, verify tells whether it or the source is wrong",
    "side files": "the weights are equal: only these small files of the source are missing or have changed; the folder"
    " has those of the conversion",
    "ranks": "only the files of the other ranks were copied here, which are intact: verify --ranks checks those alone;"
    " relayout copy --ranks makes a folder that lists no others",
    "others": "the folder's own files are intact: move the others away",
}
"""Advice by culprit of the differences."""


def inspection(result: Inspection) -> Iterator[Block]:
    """Yield the output of `inspect`."""
    kind = "converted" if result.converted else "plain"
    plan = "" if result.plan is None else f"plan {result.plan}, "
    yield Line(
        f"{result.path}: {kind} checkpoint, model type {result.model_type or 'unknown'}, {plan}"
        f"{counted(result.num_tensors, 'tensor')}, {decimal(result.nbytes)} in {counted(result.num_files, 'file')}"
    )
    if result.num_ranks is not None and len(result.present) < result.num_ranks:
        yield Line(f"the folder has only {_ranks(result.present, result.num_ranks)}")
    if result.ranks:
        who = "each rank gets" if len(result.ranks) > 1 else f"rank {result.ranks[0].rank} gets"
        reads = counted(max(rank.num_reads for rank in result.ranks), "read")
        yield Line("", f"{who} {_range([rank.nbytes for rank in result.ranks])} in {reads}")
    yield from _gain(result)
    if result.dcp is not None:
        no = "not by PyTorch DCP (a dtype that it lacks, or a slice of a fused tensor that is not one contiguous box)"
        yield Line(f"readable as one model by relayout.safe_open, and {'by PyTorch DCP' if result.dcp else no}")
    if result.ranks:
        numbers = [(rank.rank, rank.num_tensors, rank.nbytes, rank.num_files, rank.num_reads) for rank in result.ranks]
        rows = [(str(rank), f"{count:,}", decimal(nbytes), *map(str, more)) for rank, count, nbytes, *more in numbers]
        yield Table(of_numbers("rank", "tensors", "bytes", "files", "reads to load"), rows, "ranks")
    if result.amplification:
        columns = [
            *of_numbers("tp", "a rank needs", "reads slicing rows"),
            Column("reads whole shards", "number", 3),
        ]
        columns += [Column("output", "number", 2), Column("layout whole", "number", 1)]
        yield Table(columns, list(_amplification(result)), "degrees")
    whose = f"tensors of rank {result.ranks[0].rank}" if result.ranks else "tensors"
    columns = [Column(whose, "name"), Column("count", "number"), Column("dtype", drop=1), Column("shape", "words")]
    groups = []
    for group in result.groups:
        part = [group.cut or ""] if result.converted else []
        groups.append((group.pattern, str(group.count), group.dtype, _shape(group.shape), *part, decimal(group.nbytes)))
    columns += [Column("part of the whole", "words")] if result.converted else []
    yield Table([*columns, Column("bytes", "number")], groups, "groups")
    yield Listing(result.left_out, "files", "left out")
    if (following := _next_command(result)) is not None:
        yield Line(following, "next")


def _next_command(result: Inspection) -> str | None:
    """Return the command that usually follows `inspect`; None if the checkpoint cannot be converted as it is."""
    path = shlex.quote(str(result.path))
    if result.converted:
        return f"vllm serve {path} -tp {result.num_ranks} --load-format relayout"
    degrees = _possible(result)
    return f"relayout convert {path} --tp {degrees[-1].tp}" if degrees else None


def _possible(result: Inspection) -> list[Amplification]:
    """Return the usual degrees that a plain checkpoint can be converted for."""
    rows = result.amplification
    return [row for row in rows if row.reason is None and (row.tp <= _USUAL_DEGREE or len(rows) == 1)]


def _gain(result: Inspection) -> Iterator[Block]:
    """Yield the effect of a conversion at a usual degree, and the reason why other degrees are not possible."""
    rows = result.amplification
    if possible := _possible(result):
        row = possible[-1]
        needed = decimal(row.needed_nbytes or 0)
        read = decimal(row.row_reader_nbytes or 0)
        after = f"after convert --tp {row.tp}: {needed} in one read"
        yield Line("", f"a rank of {row.tp} would read {read} to get {needed}; {after}")
    refused = [row for row in rows if row.reason is not None]
    if refused:
        degrees = ", ".join(str(row.tp) for row in refused)
        first = f"; for {refused[0].tp}" if len(refused) > 1 else ""
        yield Line(f"cannot be divided among {degrees} ranks{first}: {refused[0].reason}", "note", "yellow")


def _amplification(result: Inspection) -> Iterator[Sequence[str]]:
    for row in result.amplification:
        needed, total = row.needed_nbytes, max(1, result.nbytes)
        if needed is None:
            yield str(row.tp), "-", "-", decimal(row.whole_nbytes), "-", "-"
            continue
        reads = (f"{decimal(n)} ({n / max(1, needed):.1f}x)" for n in (row.row_reader_nbytes or 0, row.whole_nbytes))
        stored = (f"{(nbytes or 0) / total:.2f}x" for nbytes in (row.ranks_layout_nbytes, row.whole_layout_nbytes))
        yield str(row.tp), decimal(needed), *reads, *stored


def diagnosis(result: Diagnosis) -> Iterator[Block]:
    """Yield the output of `doctor`."""
    kind = "converted" if result.is_converted else "plain, sliced at every load"
    first = result.ranks[0]
    yield Line(f"{result.path}: {kind}, {_ranks([rank.rank for rank in result.ranks], result.num_ranks)}")
    for reason in {re.sub(r"[0-9.]+ (%|ms)", "", rank.reason): rank.reason for rank in reversed(result.ranks)}.values():
        yield Line(f"to {first.device}, {reason}", "backend")
    places = Counter({file.name: _file_system(file) for rank in result.ranks for file in rank.files}.values())
    for place, count in places.items():
        yield Line(f"{counted(count, 'file')} on {place}", "files")
    sharing = (
        f", {result.local_world_size} ranks on this node (LOCAL_WORLD_SIZE)" if result.local_world_size > 1 else ""
    )
    torch = "torch is not installed, but loading needs it" if result.torch is None else f"torch {result.torch}"
    gpus = ", ".join(result.gpus) or "no CUDA device"
    yield Line(f"{counted(result.num_cpus, 'processor')}{sharing}; {torch}; {gpus}", "machine")
    if (network := result.network) is not None:
        yield Line(
            f"{1000 * network.latency_seconds:.1f} ms to the first byte,"
            f" {network.bytes_per_second / 1e9:.2f} GB/s over {counted(network.threads, 'connection')}"
            f" ({decimal(network.sample_nbytes)} read): rank {first.rank} would take"
            f" {network.seconds(first.read_nbytes):.1f} s",
            "network",
        )
    if result.gpus:
        yield Line(next((rank.gds for rank in result.ranks if rank.gds), "not available"), "GPUDirect Storage")
    if not result.is_converted:
        yield Line("relayout convert writes a folder that loads without copies", "note", "yellow")
    if unstriped := {file.name for rank in result.ranks for file in rank.files if _is_on_one_server(file)}:
        what = f"Lustre has {counted(len(unstriped), 'large file')} in one stripe, read from one server"
        yield Line(f"{what}: lfs migrate -c 8 FILE stripes a file over 8", "note", "yellow")
    for threads, memory in sorted({(rank.threads, rank.memory) for rank in result.ranks}):
        yield Line(f"each rank uses at most {counted(threads, 'thread')} and {decimal(memory)} of buffers", "budget")
    rows = [
        (
            str(rank.rank),
            rank.backend,
            decimal(rank.nbytes),
            f"{rank.read_nbytes / max(1, rank.nbytes):.3f}",
            _percent(rank.zero_copy_nbytes, rank.nbytes),
            _percent(rank.resident_nbytes, rank.read_nbytes),
            f"{rank.num_requests:,}",
        )
        for rank in result.ranks
    ]
    numbers = of_numbers("bytes", "read/needed", "in place", "in cache", "requests")
    yield Table([Column("rank", "number"), Column("backend"), *numbers], rows, "ranks")


def _file_system(file: FileFacts) -> str:
    """Return the file system of a file, and its support for direct I/O, as text."""
    system = file.filesystem
    drive = "" if system.drive_block_nbytes is None else f", drive blocks of {system.drive_block_nbytes}"
    if system.kind == (scheme_of(system.mount_point) or ""):
        return f"{system.mount_point}, in ranges of at most {decimal(system.block_nbytes)}"
    refused = file.refuses_direct
    works = "works" if refused is None else f"does not work ({refused}), reads use the page cache"
    return f"{system.kind} at {system.mount_point}, blocks of {system.block_nbytes} bytes{drive}; direct I/O {works}"


def _is_on_one_server(file: FileFacts) -> bool:
    """Return True if a file on Lustre has one stripe, but is large enough for more."""
    return file.num_stripes == 1 and file.nbytes >= _MIN_STRIPED_NBYTES


def _exceptions(done: Summary | Preview) -> Iterator[Block]:
    """Yield tensors that no rule matches or that the engine does not use, and files that are not copied."""
    for names, label, held in (
        (done.unmatched, "no rule", ", whole on every rank"),
        (done.unused, "unused by vLLM", ""),
    ):
        patterns = Counter(map(collapse_numbers, names))
        texts = [f"{pattern}: {counted(count, 'tensor')}{held}" for pattern, count in patterns.items()]
        yield Listing(texts, "patterns", label)
    yield Listing(done.left_out, "files", "left out")


def _tensors_of_ranks(done: Summary) -> str:
    ranks = _ranks(done.ranks, done.num_ranks)
    return f"{counted(done.num_tensors, 'tensor')} for {ranks} in {counted(done.num_files, 'file')}"


def _ranks(ranks: Sequence[int], num_ranks: int) -> str:
    """Return the number of ranks if all are included; otherwise the ranks, and the number of all ranks."""
    some = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)} of {num_ranks}"
    return counted(num_ranks, "rank") if len(ranks) == num_ranks else some


def _rank_sizes(done: Summary | Preview) -> str:
    text = f"each rank {_range(done.rank_nbytes)}"
    if done.replicated_nbytes is None:
        return text
    share = f"{100 * done.replicated_nbytes / max(1, done.source_nbytes):.2f} %"
    return f"{text}; replicated {decimal(done.replicated_nbytes)} ({share})"


def of_numbers(*headings: str) -> list[Column]:
    """Return columns of kind "number"."""
    return [Column(heading, "number") for heading in headings]


def counted(count: int, what: str) -> str:
    """Return a number with its noun, such as "3 ranks"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _percent(nbytes: int | None, total: int) -> str:
    return "unknown" if nbytes is None else f"{100 * nbytes / max(1, total):.1f} %"


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return decimal(low) if low == high else f"{decimal(low)} to {decimal(high)}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _time(nbytes: int, seconds: float) -> str:
    return f"{seconds:.1f} s ({decimal(round(nbytes / max(seconds, 1e-9)), precision=2)}/s)"
