"""`convert`: a source checkpoint in, a folder of rank files out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict, Unpack

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.source import read_source
from relayout.conversion import preview
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS, hash_chunks, run_unit, share_memory
from relayout.conversion.journal import Claims, Journal, TensorDigests
from relayout.conversion.layout import DEFAULT_ALIGNMENT, DEFAULT_MAX_PART_NBYTES, Conversion, check_alignment, lay_out
from relayout.conversion.resume import claims_of, still_true, undertaking_of
from relayout.conversion.side_files import output_modes
from relayout.conversion.sidecar import HeaderWriter, write_sidecar
from relayout.conversion.steps import CopyPlan
from relayout.core.arguments import integer, size
from relayout.errors import FormatError, PlanError
from relayout.format.index import RANKS, WHOLE_TENSORS
from relayout.plans.family import TRANSFORMERS, VLLM
from relayout.plans.planner import Unmatched, plan_for
from relayout.progress import Progress, reporting
from relayout.results import Result
from relayout.storage.hashing import CHUNK_NBYTES as REHASH_NBYTES
from relayout.storage.memory import peak_nbytes
from relayout.storage.protocols import Kind, Staging
from relayout.storage.stores import find_input, find_store, scheme_of

_SIDECAR_NBYTES_PER_TENSOR = 300


@dataclass(frozen=True, slots=True)
class Summary(Result):
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
    untaken: tuple[str, ...]
    """Tensors that the engine does not take, from which the plan was observed."""


class PlanOptions(TypedDict, total=False):
    """How a checkpoint is converted: what decides the bytes that are written."""

    tp: int
    """Number of tensor-parallel ranks; default 1."""
    align: int | str
    """Power of two, 512 bytes to 16 MiB; tensors whose slices are all multiples of it start at multiples of it.
    Default 4096."""
    plan: str | os.PathLike[str] | None
    """A plan file, "transformers" for that package's plan, or "vllm": cut as the classes of the installed vLLM cut;
    default is the built-in plan for config.json's `model_type`. Not needed for `tp=1`."""
    trust_remote_code: bool
    """With "vllm": let it run Python files of the source; default False."""
    expert_parallel: bool
    """Experts are owned whole, in contiguous blocks over the ranks; all else is cut as without."""
    unmatched: Unmatched | None
    """What becomes of tensors that no rule names: "error", or "replicate" to let every rank hold them whole, which is
    the default with the plan of transformers."""
    max_part_nbytes: int | str
    """A rank is split into files of about this many bytes; default 48 GB."""
    dcp: bool | None
    """Whether headers say what PyTorch DCP needs to read the ranks as one model. None: if every slice is one box, as
    all but those of fused tensors are; True: or it is an error; False: no, which makes headers shorter."""
    layout: str
    """"ranks": each rank's slices in files of its own, the default. "whole": whole tensors, which every stock loader
    reads, and beside them those slices of each rank that are not contiguous in them; a third larger for a Llama."""


@dataclass(frozen=True, slots=True)
class ConversionPlan(Conversion):
    """A conversion that was planned, to be looked at and to be carried out. May be used by any number of threads."""

    def __repr__(self) -> str:
        ranks = f"{self.plan.num_ranks} ranks"
        return f"<ConversionPlan {str(self.source.root)!r} to {str(self.output)!r}: {ranks}; see preview()>"

    def _repr_html_(self) -> str:
        """For notebooks: the preview."""
        return self.preview()._repr_html_()

    def preview(self) -> preview.Preview:
        """What it will do, in sums that a person can check."""
        return preview.preview(self)

    def run(
        self,
        *,
        force: bool = False,
        sha256: bool = False,
        threads: int = DEFAULT_THREADS,
        memory: int | str = DEFAULT_MEMORY,
        progress: Progress = None,
    ) -> Summary:
        """Do what was planned; arguments, result and errors as for `convert`."""
        shared = share_memory(integer(threads, "threads"), size(memory, "memory"), self.output)
        return _run(self, force, sha256, *shared, progress)


def plan_conversion(
    source: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, **options: Unpack[PlanOptions]
) -> ConversionPlan:
    """Read the source's headers and decide everything that `convert` does. Writes nothing.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file.
        output: the folder to make; default is `SOURCE-tpN` beside the source.
        options: see `PlanOptions`; sizes are bytes, or text such as "48GB".

    Returns:
        What `preview()` shows and `run()` carries out.

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", tp=4)
        >>> len(plan.preview().rank_nbytes)
        4
    """
    tp = integer(options.get("tp", 1), "tp")
    alignment = size(options.get("align", DEFAULT_ALIGNMENT), "align")
    max_part_nbytes = size(options.get("max_part_nbytes", DEFAULT_MAX_PART_NBYTES), "max_part_nbytes")
    check_alignment(alignment)
    store = find_input(source)
    made = find_store(default_output(source, tp) if output is None else output)
    checkpoint = read_source(store)
    if store.kind() is Kind.FILE and store.parent()[1].startswith("."):
        raise PlanError(
            "a hidden file, which would not be restored: give it another name", path=str(source), code="option"
        )
    plan = options.get("plan")
    expert_parallel = options.get("expert_parallel", False)
    if plan == VLLM and tp > 1:
        # Starts vLLM.
        from relayout.observe.observation import observed_plan

        trust = options.get("trust_remote_code", False)
        rules = observed_plan(checkpoint, tp, expert_parallel=expert_parallel, trust_remote_code=trust)
    else:
        rules = plan_for(
            checkpoint,
            tp,
            None if plan is None or plan == VLLM else plan if plan == TRANSFORMERS else Path(plan),
            expert_parallel=expert_parallel,
            unmatched=options.get("unmatched"),
        )
    layout = options.get("layout", RANKS)
    if layout not in (RANKS, WHOLE_TENSORS):
        raise PlanError(f"layout={layout!r}, expected {RANKS!r} or {WHOLE_TENSORS!r}", code="option")
    planned = lay_out(made, checkpoint, rules, alignment, max_part_nbytes, options.get("dcp"), layout)
    return ConversionPlan(*(getattr(planned, field.name) for field in fields(planned)))


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    sha256: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
    **options: Unpack[PlanOptions],
) -> Summary:
    """Rewrite a safetensors checkpoint so that each tensor-parallel rank's bytes are contiguous and aligned.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file. Never written to.
        output: the folder to make; default is `SOURCE-tpN` beside the source. It appears complete or not at all.
        force: replace an output folder that relayout wrote, or discard an interrupted conversion to it that cannot be
            gone on with.
        sha256: store the SHA-256 of each rank file in the manifest, for hubs and tools that sign. Reads them again.
        threads: threads that read, copy and write.
        memory: bytes that they may use for copying, also as text, such as "512MiB".
        progress: True for a bar on stderr, or a function that is called now and then with (source bytes done, source
            bytes in all).
        options: `tp`, `align`, `plan`, `expert_parallel`, `unmatched`, `max_part_nbytes`, `dcp`, `layout`: see
            `PlanOptions`.

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.
        OSError: reading or writing failed.

    If it fails, or is interrupted, after some tensors were written, they stay in a hidden folder beside the output, and
    the same call goes on from there: it reads what is written again, and believes only what has the right digest.

    Example:
        >>> import relayout
        >>> summary = relayout.convert("llama-3.1-8b", "out", tp=8)
        >>> summary.num_ranks, summary.num_files
        (8, 8)
    """
    threads, memory = integer(threads, "threads"), size(memory, "memory")
    planned = plan_conversion(source, output, **options)
    return planned.run(force=force, sha256=sha256, threads=threads, memory=memory, progress=progress)


def _run(
    conversion: Conversion, force: bool, sha256: bool, threads: int, chunk_nbytes: int, progress: Progress
) -> Summary:
    started = time.monotonic()
    source = conversion.source
    conversion.output.check_output(conversion.source.root, CONVERTED, force=force)
    undertaking = undertaking_of(conversion)
    with conversion.output.stage(CONVERTED, replace=force, modes=output_modes(source)) as staging:
        if sha256 and not staging.can_read:
            what = "cannot read files before they are published: convert to a local folder, or without sha256"
            raise PlanError(what, path=str(conversion.output), code="option")
        claims = claims_of(staging, undertaking, force=force)
        staging.advice = f"what is done is kept in {staging.where}; the same command goes on from there"
        staging.check_space(_needed_nbytes(conversion) - staging.allocated_nbytes())
        num_readers = num_readers_of(threads, chunk_nbytes)
        with reporting(progress if claims.tensors else None, "checking what is done", source.nbytes):
            done = still_true(staging, claims, conversion, num_readers)
        resumed_nbytes = sum(source.tensors[t].extent.nbytes for t in done.tensors)
        headers = HeaderWriter(staging, conversion)
        with (
            Journal(staging, undertaking, append=bool(claims.tensors)) as journal,
            reporting(progress, "converting", source.nbytes) as report,
        ):
            digests, chunks = _run_units(conversion, staging, journal, headers, done, threads, chunk_nbytes, report)
        write_sidecar(staging, conversion, digests, chunks, headers.files, threads=num_readers, sha256=sha256)
        if undertaking_of(conversion) != undertaking:
            staging.is_kept = False
            raise FormatError("has changed while it was read", path=str(conversion.source.root), code="mismatch")
    return summary_of(conversion, resumed_nbytes, time.monotonic() - started)


def summary_of(conversion: Conversion, resumed_nbytes: int, seconds: float) -> Summary:
    """The summary of a conversion that is done."""
    source, layout = conversion.source, conversion.layout
    rank_nbytes = conversion.rank_nbytes
    return Summary(
        output=str(conversion.output),
        num_ranks=conversion.plan.num_ranks,
        num_tensors=len(source.tensors),
        num_files=len(layout.files),
        source_nbytes=source.nbytes,
        written_nbytes=layout.nbytes,
        rank_nbytes=rank_nbytes,
        replicated_nbytes=layout.data_nbytes - source.nbytes,
        resumed_nbytes=resumed_nbytes,
        seconds=seconds,
        peak_nbytes=peak_nbytes(),
        left_out=source.left_out,
        unmatched=conversion.plan.unmatched,
        untaken=conversion.plan.untaken,
    )


def _run_units(
    conversion: Conversion,
    staging: Staging,
    journal: Journal,
    headers: HeaderWriter,
    done: Claims,
    threads: int,
    chunk_nbytes: int,
    report: Callable[[int], None] | None,
) -> tuple[dict[int, TensorDigests], dict[int, bytes]]:
    """Convert one unit after the other, but for tensors that are done.

    Returns:
        The digests of all tensors, and of the chunks of all files.
    """
    layout, tensors = conversion.layout, conversion.source.tensors
    digests = dict(done.tensors)
    chunks = dict(done.chunks)
    num_readers = num_readers_of(threads, chunk_nbytes)
    passed = 0

    def note(written: Mapping[int, TensorDigests]) -> None:
        if written:
            journal.add(written)
            staging.is_kept = True

    def tell(nbytes: int) -> None:
        if report is not None:
            report(passed + resumed + nbytes)

    plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes)
    for number, unit in enumerate(layout.units):
        resumed = sum(tensors[t].extent.nbytes for t in unit if t in done.tensors)
        written = run_unit(
            plan, number, staging, done=done.tensors.keys(), threads=threads, on_tensors=note, on_progress=tell
        )
        digests |= written.tensors
        unknown = [file for file in layout.files_of_unit[number] if file not in {**chunks, **written.chunks}]
        added = {**written.chunks, **hash_chunks(staging, layout, unknown, num_readers)}
        journal.add_files(added)
        chunks |= added
        headers.write(number, digests, chunks)
        passed += sum(tensors[t].extent.nbytes for t in unit)
    return digests, chunks


def num_readers_of(threads: int, chunk_nbytes: int) -> int:
    """How many of the threads may read files again: they need memory of another size."""
    return max(1, min(threads, 2 * threads * chunk_nbytes // REHASH_NBYTES))


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
        raise PlanError(
            "nothing can be beside the root folder; choose another folder with -o", path=str(source), code="option"
        )
    repository = named.absolute().parent.parent.name
    if named.absolute().parent.name == "snapshots" and repository.startswith("models--"):
        # Not into the hub's cache, among revisions: into the working directory, by the repository's name.
        return Path(f"{repository.split('--')[-1]}-tp{tp}")
    return named.with_name(f"{named.name.removesuffix('.safetensors')}-tp{tp}")


def _needed_nbytes(conversion: Conversion) -> int:
    source = conversion.source
    side = sum(status.nbytes for name in source.side_files if (status := source.folder.stat(name)))
    sidecar = _SIDECAR_NBYTES_PER_TENSOR * len(source.tensors) * (conversion.plan.num_ranks + 1)
    return conversion.layout.nbytes + conversion.layout.nbytes // 2**16 + side + sidecar
