"""Plans conversions: which rank holds what, by rules or as the installed vLLM cuts, and where all of it will lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Literal

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.conversion.layout import DEFAULT_ALIGNMENT, DEFAULT_MAX_PART_NBYTES, Conversion, check_alignment
from relayout.core.arguments import integer, size
from relayout.core.digests import DigestAlgorithm
from relayout.errors import PlanError, shown
from relayout.format.index import RANKS, WHOLE_TENSORS
from relayout.plans.family import VLLM
from relayout.plans.plan import Plan
from relayout.plans.planner import Unmatched, plan_for
from relayout.storage.stores import Store, find_input, find_store, scheme_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What decides the bytes that a conversion writes; `relayout.convert` explains each option.

    Raises:
        PlanError: an option is invalid.
    """

    tp: int
    align: InitVar[int | str]
    plan: Plan | str | os.PathLike[str] | None
    trust_remote_code: bool
    expert_parallel: bool
    unmatched: Unmatched | None
    max_part_nbytes: InitVar[int | str]
    layout: str
    ranks: str | Iterable[int] | None
    digest: InitVar[str]
    alignment: int = field(init=False)
    """The alignment in bytes."""
    part_nbytes: int = field(init=False)
    """The size of a rank's files, about."""
    algorithm: DigestAlgorithm = field(init=False)

    def __post_init__(self, align: int | str, max_part_nbytes: int | str, digest: str) -> None:
        parsed: dict[str, object] = {
            "tp": integer(self.tp, "tp"),
            "alignment": (alignment := size(align, "align")),
            "part_nbytes": size(max_part_nbytes, "max_part_nbytes (--max-part-size)"),
        }
        check_alignment(alignment)
        if self.layout not in (RANKS, WHOLE_TENSORS):
            raise PlanError(f"layout: {self.layout!r}, expected {RANKS!r} or {WHOLE_TENSORS!r}", code="option")
        known = [each.value for each in DigestAlgorithm]
        if digest not in known:
            raise PlanError(f"digest: {shown(digest)}, expected {' or '.join(known)}", code="option")
        for name, value in {**parsed, "algorithm": DigestAlgorithm(digest)}.items():
            object.__setattr__(self, name, value)

    def lay_out(self, checkpoint: SourceCheckpoint, output: Store) -> Conversion:
        """Find the plan of a checkpoint whose headers were read, and decide everything that a conversion of it does.

        Raises:
            FormatError: the plan file is not valid.
            PlanError: the checkpoint cannot be converted like this.
        """
        plan = find_plan(
            checkpoint,
            self.tp,
            self.plan,
            expert_parallel=self.expert_parallel,
            unmatched=self.unmatched,
            trust_remote_code=self.trust_remote_code,
        )
        return Conversion.lay_out(
            output,
            checkpoint,
            plan,
            alignment=self.alignment,
            max_part_nbytes=self.part_nbytes,
            layout=self.layout,
            ranks=self.ranks,
            digest=self.algorithm,
        )


def plan_conversion(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    tp: int = 1,
    align: int | str = DEFAULT_ALIGNMENT,
    plan: Plan | str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    max_part_nbytes: int | str = DEFAULT_MAX_PART_NBYTES,
    layout: Literal["ranks", "whole"] = "ranks",
    ranks: str | Iterable[int] | None = None,
    digest: Literal["xxh3_128", "sha256"] = "xxh3_128",
) -> Conversion:
    """Read the source's headers and decide everything that `convert` does. Writes nothing.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file.
        output: the folder to make; default is `SOURCE-tpN` beside the source folder. A single file has no default: it
            would lie in the folder of the source.
        tp, align, plan, trust_remote_code, expert_parallel, unmatched, max_part_nbytes, layout, ranks, digest:
            as for `convert`.

    Returns:
        What `preview` shows, `carry_out` carries out, and `is_done` finds done.

    Raises:
        FormatError: the source is damaged.
        PlanError: it cannot be converted like this.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", tp=4)
        >>> len(relayout.preview(plan).rank_nbytes)
        4
    """
    options = PlanOptions(
        tp=tp,
        align=align,
        plan=plan,
        trust_remote_code=trust_remote_code,
        expert_parallel=expert_parallel,
        unmatched=unmatched,
        max_part_nbytes=max_part_nbytes,
        layout=layout,
        ranks=ranks,
        digest=digest,
    )
    store = find_input(source)
    target = find_store(default_output(source, options.tp) if output is None else output)
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
    return options.lay_out(checkpoint, target)


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


def observer() -> tuple[str, Callable[[SourceCheckpoint, int], Plan]]:
    """What observes a plan where no built-in one is for a model, the installed vLLM, and its name with the version.

    Raises:
        ImportError: vLLM is not installed.
    """
    import vllm

    return f"vllm {vllm.__version__}", lambda checkpoint, num_ranks: find_plan(checkpoint, num_ranks, VLLM)


def find_plan(
    checkpoint: SourceCheckpoint,
    num_ranks: int,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """The plan of a checkpoint: a value, whoever has found it.

    Args:
        plan: a plan that was found for this checkpoint before; a plan file; "transformers" or "vllm"; None: the
            built-in plan for the model type.
        expert_parallel, unmatched: as for `planner.plan_for`.
        trust_remote_code: whether vLLM may run Python files of the checkpoint.

    Raises:
        FormatError: the plan file is not valid.
        PlanError: there is no plan, or it is of another checkpoint or degree.
    """
    if isinstance(plan, Plan):
        if (plan.num_ranks, len(plan.cut_of)) != (num_ranks, len(checkpoint.tensors)):
            what = f"the plan is for {plan.num_ranks} ranks and {len(plan.cut_of)} tensors"
            expected = f"expected {num_ranks} and {len(checkpoint.tensors)}"
            raise PlanError(f"{what}, {expected}", path=str(checkpoint.root), code="no_plan")
        return plan
    if plan == VLLM:
        if num_ranks == 1:  # Which holds everything: no reason to start vLLM.
            return plan_for(checkpoint, 1)
        from relayout.observe.observation import observed_plan

        return observed_plan(
            checkpoint, num_ranks, expert_parallel=expert_parallel, trust_remote_code=trust_remote_code
        )
    named = Path(plan) if isinstance(plan, os.PathLike) else plan
    return plan_for(checkpoint, num_ranks, named, expert_parallel=expert_parallel, unmatched=unmatched)
