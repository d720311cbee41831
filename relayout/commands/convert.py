"""`convert`: a source checkpoint in, a folder of rank files out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, ParamSpec, TypedDict, TypeVar, Unpack

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS
from relayout.conversion.layout import DEFAULT_ALIGNMENT, DEFAULT_MAX_PART_NBYTES, check_alignment
from relayout.conversion.run import ConversionPlan, Summary
from relayout.core.arguments import integer, size
from relayout.core.digests import DigestAlgorithm
from relayout.errors import PlanError, did_you_mean, shown
from relayout.format.index import RANKS, WHOLE_TENSORS
from relayout.planning import find_plan
from relayout.plans.plan import Plan
from relayout.plans.planner import Unmatched
from relayout.progress import Progress
from relayout.storage.protocols import Store
from relayout.storage.stores import find_input, find_store, scheme_of


class PlanOptions(TypedDict, total=False):
    """How a checkpoint is converted: what decides the bytes that are written."""

    tp: int
    """Number of tensor-parallel ranks; default 1."""
    align: int | str
    """Power of two, 512 bytes to 16 MiB; tensors whose slices are all multiples of it start at multiples of it.
    Default 4096."""
    plan: Plan | str | os.PathLike[str] | None
    """A plan file, the name of a built-in plan, "transformers" for that package's plan, or "vllm": cut as the classes
    of the installed vLLM cut; or the `Plan` of another `ConversionPlan` of this checkpoint. Default is the built-in
    plan for config.json's `model_type`. Not needed for `tp=1`."""
    trust_remote_code: bool
    """With "vllm": let it run Python files of the source; default False."""
    expert_parallel: bool
    """Assign whole experts to ranks, in contiguous blocks; all other tensors are cut as without."""
    unmatched: Unmatched | None
    """What to do with tensors that no rule matches: "error", or "replicate" to store them whole for every rank, which
    is the default with the plan of transformers."""
    max_part_nbytes: int | str
    """A rank is split into files of about this many bytes; default 48 GB."""
    layout: Literal["ranks", "whole"]
    """"ranks", the default: separate files for each rank's slices. "whole": whole tensors, which every stock loader
    reads, and each rank's slices that are not contiguous in them; a third larger for a Llama."""
    ranks: str | Iterable[int] | None
    """Write only these ranks, such as range(4) or "0-3", and read only what they need of the source. Default: all."""
    digest: Literal["xxh3_128", "sha256"]
    """How stored bytes are hashed: "xxh3_128", the default, detects damage; "sha256" is what a signature needs."""


P = ParamSpec("P")
R = TypeVar("R")


def with_options(function: Callable[P, R]) -> Callable[P, R]:
    """Let `help` and completion show the keys of `PlanOptions` as the arguments that they are."""
    known = inspect.signature(function)
    given = [one for one in known.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind.__forward_arg__)
        for name, kind in PlanOptions.__annotations__.items()
    ]
    function.__signature__ = known.replace(parameters=[*given, *options])  # type: ignore[attr-defined]
    return function


@with_options
def plan_conversion(
    source: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, **options: Unpack[PlanOptions]
) -> ConversionPlan:
    """Read the source's headers and decide everything that `convert` does. Writes nothing.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file.
        output: the folder to make; default is `SOURCE-tpN` beside the source folder. A single file has no default: it
            would lie in the folder of the source.
        tp, align, plan, trust_remote_code, expert_parallel, unmatched, max_part_nbytes, layout, ranks, digest:
            see `PlanOptions`; sizes are bytes, or text such as "48GB".

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
    tp, *_ = _layout_of(options)
    store = find_input(source)
    target = find_store(default_output(source, tp) if output is None else output)
    checkpoint = read_source(store)
    if checkpoint.is_file and output is None:
        what = "a single file: name the folder to write with -o OUT, or convert the file's folder"
        raise PlanError(what, path=str(source), code="option")
    if checkpoint.is_file and checkpoint.left_out:
        what = f"a part of a model, without {checkpoint.left_out[0]}"
        raise PlanError(what, path=str(source), code="option")
    if checkpoint.is_file and store.parent()[1].startswith("."):
        what = "a hidden file, which could not be restored: rename it"
        raise PlanError(what, path=str(source), code="option")
    return plan_checkpoint(checkpoint, target, **options)


def plan_checkpoint(checkpoint: SourceCheckpoint, target: Store, **options: Unpack[PlanOptions]) -> ConversionPlan:
    """As `plan_conversion`, of a checkpoint whose headers were read."""
    tp, alignment, max_part_nbytes, layout, digest = _layout_of(options)
    plan = find_plan(
        checkpoint,
        tp,
        options.get("plan"),
        expert_parallel=options.get("expert_parallel", False),
        unmatched=options.get("unmatched"),
        trust_remote_code=options.get("trust_remote_code", False),
    )
    how = (alignment, max_part_nbytes, layout, options.get("ranks"), digest)
    return ConversionPlan.lay_out(target, checkpoint, plan, *how)


def _layout_of(options: PlanOptions) -> tuple[int, int, int, str, DigestAlgorithm]:
    """Degree, alignment, part size, layout, and how stored bytes are hashed."""
    if unknown := sorted(options.keys() - PlanOptions.__annotations__.keys()):
        advice = did_you_mean(unknown[0], PlanOptions.__annotations__)
        raise TypeError(f"{shown(unknown[0])} is no option of a conversion{advice}")
    tp = integer(options.get("tp", 1), "tp")
    alignment = size(options.get("align", DEFAULT_ALIGNMENT), "align")
    max_part_nbytes = size(options.get("max_part_nbytes", DEFAULT_MAX_PART_NBYTES), "max_part_nbytes (--max-part-size)")
    check_alignment(alignment)
    layout = options.get("layout", RANKS)
    if layout not in (RANKS, WHOLE_TENSORS):
        raise PlanError(f"layout: {layout!r}, expected {RANKS!r} or {WHOLE_TENSORS!r}", code="option")
    named, known = options.get("digest", DigestAlgorithm.XXH3_128.value), [each.value for each in DigestAlgorithm]
    if named not in known:
        raise PlanError(f"digest: {shown(named)}, expected {' or '.join(known)}", code="option")
    return tp, alignment, max_part_nbytes, layout, DigestAlgorithm(named)


@with_options
def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
    **options: Unpack[PlanOptions],
) -> Summary:
    """Rewrite a safetensors checkpoint so that each tensor-parallel rank's bytes are contiguous and aligned.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file. Never written to.
        output: the folder to make; default is `SOURCE-tpN` beside the source folder. It appears complete or not at all.
        force: replace an output folder that relayout wrote, or discard an interrupted conversion that cannot be
            resumed.
        threads: threads that read, copy and write.
        memory: bytes that they may use for copying, also as text, such as "512MiB".
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).
        tp, align, plan, trust_remote_code, expert_parallel, unmatched, max_part_nbytes, layout, ranks, digest:
            see `PlanOptions`.

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.
        OSError: reading or writing failed.

    If it fails or is interrupted after some tensors were written, they stay in a hidden folder beside the output. The
    same call resumes: it reads the written tensors again, and keeps those with the right digest.

    Example:
        >>> import relayout
        >>> summary = relayout.convert("llama-3.1-8b", "out", tp=8)
        >>> summary.num_ranks, summary.num_files
        (8, 8)
    """
    threads, memory = integer(threads, "threads"), size(memory, "memory")
    planned = plan_conversion(source, output, **options)
    return planned.run(force=force, threads=threads, memory=memory, progress=progress)


def default_output(source: str | os.PathLike[str], tp: int) -> str | Path:
    """`SOURCE-tpN` beside the source folder; for a snapshot in a Hugging Face cache, `REPOSITORY-tpN` right here.

    Raises:
        PlanError: the source is the root folder.
    """
    if scheme_of(source) is not None:
        return f"{os.fspath(source).rstrip('/')}-tp{tp}"
    source = Path(source)
    named = source.resolve() if source.name in ("", "..") else source
    if not named.name:
        what = "the root folder has no folder beside it: name the folder to write with -o OUT"
        raise PlanError(what, path=str(source), code="option")
    repository = named.absolute().parent.parent.name
    if named.absolute().parent.name == "snapshots" and repository.startswith("models--"):
        # Not into the hub's cache, among revisions: into the working directory, by the repository's name.
        return Path(f"{repository.split('--')[-1]}-tp{tp}")
    return named.with_name(f"{named.name}-tp{tp}")
