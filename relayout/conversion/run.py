"""`convert`: a source checkpoint in, a folder of rank files out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from relayout import __version__
from relayout.checkpoint.source import Catalogue, read_catalogue
from relayout.conversion.copy import DEFAULT_JOBS, DEFAULT_MEMORY, RankFileSink, digests_of_all, run_steps, share_memory
from relayout.conversion.journal import Journal, TensorDigests
from relayout.conversion.layout import (
    DEFAULT_ALIGNMENT,
    DEFAULT_MAX_PART_NBYTES,
    Conversion,
    Layout,
    RankHeaders,
    check_alignment,
    cut_tensors,
    lay_out,
)
from relayout.conversion.resume import claims_of, still_true, undertaking_of
from relayout.conversion.side_files import copy_side_file, modes_of
from relayout.conversion.steps import copy_steps
from relayout.core.arguments import integer
from relayout.core.digests import digest_hex
from relayout.core.slices import CutTensor
from relayout.errors import FormatError, PlanError
from relayout.format.index import (
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    Arena,
    IndexedFile,
    Manifest,
    RankEntry,
    RankTable,
    plan_arena,
)
from relayout.format.manifest import SOURCE_RECORD_NAME, compress, dump_manifest, table_name
from relayout.format.rank_table import dump_table
from relayout.format.source_record import (
    RecordedFile,
    SideFile,
    SourceRecord,
    dump_record,
)
from relayout.plans.planner import TRANSFORMERS, Unmatched, plan_for
from relayout.storage.hashing import CHUNK_NBYTES as REHASH_NBYTES
from relayout.storage.memory import peak_nbytes
from relayout.storage.protocols import Kind, Staging
from relayout.storage.stores import find_store, scheme_of

_SIDECAR_NBYTES_PER_TENSOR = 300


@dataclass(frozen=True, slots=True)
class Summary:
    """What a conversion did."""

    output: str
    num_ranks: int
    num_tensors: int
    num_files: int
    """Rank files written."""
    source_nbytes: int
    """Bytes of all source tensors."""
    written_nbytes: int
    """Bytes of all rank files."""
    rank_nbytes: tuple[int, ...]
    """Bytes of each rank's tensors."""
    replicated_nbytes: int
    """Bytes that are stored more than once, counted once for each copy beyond the first."""
    resumed_nbytes: int
    """Source bytes of tensors that an interrupted conversion had written: checked, and not written again."""
    seconds: float
    peak_nbytes: int
    """The most memory that the process ever held (resident)."""
    left_out: tuple[str, ...]
    """What of the source did not go along, and why."""
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def plan_conversion(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    tp: int = 1,
    align: int = DEFAULT_ALIGNMENT,
    plan: str | os.PathLike[str] | None = None,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    max_part_nbytes: int = DEFAULT_MAX_PART_NBYTES,
    dcp: bool | None = None,
) -> Conversion:
    """Read the source's headers and decide everything; arguments as for `convert`. Writes nothing.

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.
    """
    tp, align, max_part_nbytes = integer(tp, "tp"), integer(align, "align"), integer(max_part_nbytes, "max_part_nbytes")
    check_alignment(align)
    store = find_store(source)
    made = find_store(default_output(source, tp) if output is None else output)
    catalogue = read_catalogue(store)
    if store.kind() is Kind.FILE and store.parent()[1].startswith("."):
        raise PlanError(f"{source}: a hidden file, which would not be restored: give it another name")
    rules = plan_for(
        catalogue,
        tp,
        plan if plan is None or plan == TRANSFORMERS else Path(plan),
        expert_parallel=expert_parallel,
        unmatched=unmatched,
    )
    return lay_out(made, catalogue, rules, align, max_part_nbytes, dcp)


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    tp: int = 1,
    align: int = DEFAULT_ALIGNMENT,
    plan: str | os.PathLike[str] | None = None,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    max_part_nbytes: int = DEFAULT_MAX_PART_NBYTES,
    dcp: bool | None = None,
    force: bool = False,
    jobs: int = DEFAULT_JOBS,
    memory: int = DEFAULT_MEMORY,
    on_progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Rewrite a safetensors checkpoint so that each tensor-parallel rank's bytes are contiguous and aligned.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file. Never written to.
        output: the folder to make; default is `SOURCE-tpN` beside the source. It appears complete or not at all.
        tp: number of tensor-parallel ranks.
        align: power of two, in bytes; tensors whose size is a multiple of it start at multiples of it.
        plan: a plan file, or "transformers" for that package's plan; default is the built-in plan for config.json's
            `model_type`. Not needed for `tp=1`.
        expert_parallel: experts are owned whole, in contiguous blocks over the ranks; all else is cut as without.
        unmatched: what becomes of tensors that no rule names: "error", or "replicate" to let every rank hold them
            whole, which is the default with the plan of transformers.
        max_part_nbytes: a rank is split into files of about this many bytes.
        dcp: whether headers say what PyTorch DCP needs to read the ranks as one model. None: if every slice is one box,
            as all but those of fused tensors are; True: or it is an error; False: no, which makes headers shorter.
        force: replace an output folder that relayout wrote, or discard an interrupted conversion to it that cannot be
            gone on with.
        jobs: threads that copy.
        memory: bytes that they may use for copying.
        on_progress: called now and then with (source bytes done, source bytes in all).

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.
        OSError: reading or writing failed.

    If it fails, or is interrupted, after some tensors were written, they stay in a hidden folder beside the output, and
    the same call goes on from there: it reads what is written again, and believes only what has the right digest.
    """
    jobs, memory = integer(jobs, "jobs"), integer(memory, "memory")
    conversion = plan_conversion(
        source,
        output,
        tp=tp,
        align=align,
        plan=plan,
        expert_parallel=expert_parallel,
        unmatched=unmatched,
        max_part_nbytes=max_part_nbytes,
        dcp=dcp,
    )
    return carry_out(conversion, force=force, jobs=jobs, memory=memory, on_progress=on_progress)


def carry_out(
    conversion: Conversion,
    *,
    force: bool = False,
    jobs: int = DEFAULT_JOBS,
    memory: int = DEFAULT_MEMORY,
    on_progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Do what was planned; arguments, result and errors as for `convert`."""
    started = time.monotonic()
    jobs, chunk_nbytes = share_memory(jobs, memory)
    catalogue, layout = conversion.catalogue, conversion.layout
    conversion.output.check_output(conversion.source, MANIFEST_NAME, force=force)
    total = catalogue.nbytes
    undertaking = undertaking_of(conversion)
    modes = modes_of(catalogue.folder, [file.name for file in catalogue.files], with_folder=not catalogue.is_file)
    with conversion.output.stage(MANIFEST_NAME, replace=force, modes=modes) as staging:
        claims = claims_of(staging, undertaking, force=force)
        staging.advice = f"what is done is kept in {staging.where}; the same command goes on from there"
        staging.check_space(_needed_nbytes(conversion) - staging.allocated_nbytes())
        num_readers = max(1, min(jobs, memory // REHASH_NBYTES))
        done = still_true(staging, claims, conversion, num_readers)
        resumed_nbytes = sum(catalogue.tensors[t].extent.nbytes for t in done)
        with Journal(staging, undertaking, append=bool(claims)) as journal:

            def complete(t: int, digests: TensorDigests) -> None:
                journal.add(t, digests)
                staging.is_kept = True

            sink = RankFileSink(staging, layout)
            try:
                written = run_steps(
                    conversion,
                    copy_steps(conversion, done=done, chunk_nbytes=chunk_nbytes),
                    sink,
                    num_threads=jobs,
                    on_tensor=complete,
                    on_progress=None if on_progress is None else lambda n: on_progress(resumed_nbytes + n, total),
                )
            finally:
                sink.close()
        _write_sidecar(staging, conversion, {**done, **written})
        if undertaking_of(conversion) != undertaking:
            staging.is_kept = False
            raise FormatError(f"{conversion.source}: has changed while it was read")
    rank_nbytes = tuple(sum(file.nbytes - file.data_start for file in files) for files in layout.ranks)
    return Summary(
        output=str(conversion.output),
        num_ranks=conversion.plan.num_ranks,
        num_tensors=len(catalogue.tensors),
        num_files=sum(map(len, layout.ranks)),
        source_nbytes=total,
        written_nbytes=layout.nbytes,
        rank_nbytes=rank_nbytes,
        replicated_nbytes=sum(rank_nbytes) - total,
        resumed_nbytes=resumed_nbytes,
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
        left_out=catalogue.left_out,
        unmatched=conversion.plan.unmatched,
    )


def default_output(source: str | os.PathLike[str], tp: int) -> str | Path:
    """`SOURCE-tpN` beside the source; for a snapshot in a Hugging Face cache, `REPOSITORY-tpN` right here.

    Raises:
        PlanError: there is no place beside the source.
    """
    if scheme_of(source) is not None:
        return f"{os.fspath(source).rstrip('/').removesuffix('.safetensors')}-tp{tp}"
    source = Path(source)
    named = source.resolve() if source.name in ("", "..") else source
    if not named.name:
        raise PlanError(f"{source}: nothing lies beside the root folder; choose another folder with -o")
    repository = named.absolute().parent.parent.name
    if named.absolute().parent.name == "snapshots" and repository.startswith("models--"):
        # Not into the hub's cache, among revisions: into the working directory, by the repository's name.
        return Path(f"{repository.split('--')[-1]}-tp{tp}")
    return named.with_name(f"{named.name.removesuffix('.safetensors')}-tp{tp}")


def _needed_nbytes(conversion: Conversion) -> int:
    catalogue = conversion.catalogue
    side = sum(status.nbytes for name in catalogue.side_files if (status := catalogue.folder.stat(name)))
    sidecar = _SIDECAR_NBYTES_PER_TENSOR * len(catalogue.tensors) * (conversion.plan.num_ranks + 1)
    return conversion.layout.nbytes + side + sidecar


def _write_sidecar(staging: Staging, conversion: Conversion, digests: Mapping[int, TensorDigests]) -> None:
    """Write everything but the tensors' bytes: side files, source record, headers, rank tables, manifest."""
    catalogue, layout, options = conversion.catalogue, conversion.layout, conversion.options
    side_files = [copy_side_file(catalogue.folder, staging, name) for name in catalogue.side_files]
    digests = digests_of_all(conversion, digests)
    sources = [digests[t].source for t in range(len(catalogue.tensors))]
    record = dump_record(_source_record(conversion, sources, side_files))
    conversion_id = digest_hex(record)
    stored_record = compress(record)
    staging.put(SOURCE_RECORD_NAME, [stored_record])
    entries = []
    headers = RankHeaders(conversion)
    tensors = cut_tensors(catalogue, conversion.plan)
    for rank, files in enumerate(layout.ranks):
        indexed = []
        for file in files:
            header = headers.build(file, conversion_id)
            staging.write_head(file.name, header, file.nbytes)
            indexed.append(IndexedFile(file.name, file.nbytes, file.data_start, digest_hex(header)))
        sizes = [[tensors[t].rank_nbytes(rank) for t in file.tensors] for file in files]
        arena = plan_arena([(file.data_start, file.offsets, nbytes) for file, nbytes in zip(files, sizes, strict=True)])
        table = dump_table(_rank_table(conversion, rank, tensors, arena, digests), conversion_id)
        staging.put(table_name(rank), [table])
        entries.append(
            RankEntry(
                table=table_name(rank),
                table_digest=digest_hex(table),
                num_tensors=sum(len(file.tensors) for file in files),
                nbytes=sum(map(sum, sizes)),
                files=tuple(indexed),
                arena_nbytes=arena.nbytes,
                reads=arena.reads,
            )
        )
    hub_index = _hub_index(catalogue, layout) if options.num_ranks == 1 else None
    if hub_index is not None:
        staging.put(HUB_INDEX_NAME, [hub_index])
    manifest = Manifest(
        generator=f"relayout {__version__}",
        conversion=conversion_id,
        model_type=catalogue.model_type,
        plan=options.plan,
        expert_parallel=options.expert_parallel,
        alignment=options.alignment,
        dcp=options.dcp,
        record_digest=digest_hex(stored_record),
        source_nbytes=catalogue.nbytes,
        hub_index_digest=None if hub_index is None else digest_hex(hub_index),
        ranks=tuple(entries),
    )
    staging.put(MANIFEST_NAME, [dump_manifest(manifest)])


def _source_record(conversion: Conversion, digests: Sequence[str], side_files: Sequence[SideFile]) -> SourceRecord:
    catalogue = conversion.catalogue
    tensors = catalogue.tensors
    return SourceRecord(
        options=conversion.options,
        names=[tensor.name for tensor in tensors],
        dtypes=[tensor.dtype for tensor in tensors],
        shapes=[tensor.shape for tensor in tensors],
        digests=digests,
        cuts=conversion.plan.cuts,
        cut_of=conversion.plan.cut_of,
        file_of=[tensor.file for tensor in tensors],
        offsets=[tensor.extent.offset for tensor in tensors],
        files=tuple(RecordedFile(file.name, file.nbytes, file.header) for file in catalogue.files),
        index=catalogue.index,
        side_files=tuple(side_files),
    )


def _rank_table(
    conversion: Conversion,
    rank: int,
    cut: Sequence[CutTensor],
    arena: Arena,
    digests: Mapping[int, TensorDigests],
) -> RankTable:
    files = conversion.layout.ranks[rank]
    order = [t for file in files for t in file.tensors]
    tensors = [cut[t] for t in order]
    return RankTable(
        rank=rank,
        names=[conversion.catalogue.tensors[t].name for t in order],
        dtypes=[tensor.dtype for tensor in tensors],
        shapes=[tensor.rank_shape(rank) for tensor in tensors],
        files=[number for number, file in enumerate(files) for _ in file.tensors],
        offsets=_flatten(file.offsets for file in files),
        arena_offsets=_flatten(arena.offsets),
        digests=[digests[t].slices[cut[t].cut.which[rank]] for t in order],
        source_shapes=[tensor.shape for tensor in tensors],
        slices=[tensor.cut.slices[rank] for tensor in tensors],
    )


def _hub_index(catalogue: Catalogue, layout: Layout) -> bytes:
    """The index.json that lets stock loaders read a folder of one rank."""
    weight_map = {catalogue.tensors[t].name: file.name for file in layout.ranks[0] for t in file.tensors}
    ordered = {tensor.name: weight_map[tensor.name] for tensor in catalogue.tensors}
    top = {"metadata": {"total_size": catalogue.nbytes}, "weight_map": ordered}
    return (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()


def _flatten(columns: Iterable[Sequence[int]]) -> list[int]:
    return [value for column in columns for value in column]
