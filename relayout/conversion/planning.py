"""Plans conversions: the slices of each rank, by rules or as an installed engine cuts, and their files and offsets.

`preview` sums up a planned conversion, and `check_plan` lists the tensors without a rule in a plan.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from relayout import extensions
from relayout.checkpoint.folder import ADAPTER_WEIGHTS, CONFIG_NAME, WEIGHTS_OF_TRANSFORMERS
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.conversion.layout import (
    DEFAULT_ALIGNMENT,
    DEFAULT_MAX_PART_NBYTES,
    Conversion,
    check_alignment,
    check_planned,
)
from relayout.core.arguments import collapse_numbers, integer, path_text, size, takes
from relayout.core.slices import Cut, CutTensor
from relayout.errors import PlanError, shown
from relayout.format.index import HUB_INDEX_NAME, RANKS, WHOLE_TENSORS
from relayout.plans.family import ENGINES, TRANSFORMERS
from relayout.plans.plan import Plan
from relayout.plans.planner import Unmatched, matching_plans, plan_for, without_rule
from relayout.reporting import Result
from relayout.storage.stores import Store, find_input, find_store, scheme_of


class CutOptions(TypedDict, total=False):
    """The options of `relayout.convert` that decide how tensors are cut and aligned."""

    tp: int
    align: int | str
    plan: Plan | str | os.PathLike[str] | None
    trust_remote_code: bool
    expert_parallel: bool
    unmatched: Unmatched | None


class ConvertOptions(CutOptions, total=False):
    """The options that decide the bytes of a conversion; `relayout.convert` explains each."""

    max_part_nbytes: int | str
    layout: Literal["ranks", "whole"]
    ranks: str | Iterable[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The values of `ConvertOptions`, checked. Sizes are numbers of bytes."""

    tp: int = 1
    align: int | str = DEFAULT_ALIGNMENT
    plan: Plan | str | os.PathLike[str] | None = None
    trust_remote_code: bool = False
    expert_parallel: bool = False
    unmatched: Unmatched | None = None
    max_part_nbytes: int | str = DEFAULT_MAX_PART_NBYTES
    layout: Literal["ranks", "whole"] = "ranks"
    ranks: str | Iterable[int] | None = None

    def __post_init__(self) -> None:
        parsed = {
            "tp": integer(self.tp, "tp"),
            "align": (alignment := size(self.align, "align")),
            "max_part_nbytes": size(self.max_part_nbytes, "max_part_nbytes (--max-part-size)"),
        }
        check_alignment(alignment)
        if self.layout not in (RANKS, WHOLE_TENSORS):
            raise PlanError(f"layout: {self.layout!r}, expected {RANKS!r} or {WHOLE_TENSORS!r}", code="option")
        for name, value in parsed.items():
            object.__setattr__(self, name, value)

    def lay_out(self, checkpoint: SourceCheckpoint, output: Store) -> Conversion:
        """Find the plan of a checkpoint, from its headers, and decide everything that its conversion does."""
        plan = find_plan(
            checkpoint,
            self.tp,
            self.plan,
            expert_parallel=self.expert_parallel,
            unmatched=self.unmatched,
            trust_remote_code=self.trust_remote_code,
        )
        planned = Conversion.lay_out(
            output,
            checkpoint,
            plan,
            alignment=int(self.align),
            max_part_nbytes=int(self.max_part_nbytes),
            layout=self.layout,
            ranks=self.ranks,
        )
        _check_opened_by_transformers(planned)
        return planned


def _check_opened_by_transformers(planned: Conversion) -> None:
    """Raise PlanError if config.json names weights that the output lacks: transformers could not open it.

    A folder with only slices is not for transformers, so its config.json may name the model's own file.
    """
    source, options = planned.source, planned.options
    # Listed in any case: side files that cannot be copied are an error before a byte is written.
    others = (HUB_INDEX_NAME, *source.side_files)
    named = source.config.get(WEIGHTS_OF_TRANSFORMERS)
    if not isinstance(named, str) or named in others:
        return
    is_model = named in (source.index and source.index[0], *(file.name for file in source.files))
    if is_model and options.num_ranks > 1 and options.layout == RANKS:
        return
    which = "which the output would have under other names" if is_model else "which engines do not load"
    what = f"{WEIGHTS_OF_TRANSFORMERS} is {shown(named)}, {which}: remove the entry from a copy of the folder"
    raise PlanError(what, path=source.folder.location(CONFIG_NAME), code="unsupported")


@takes(ConvertOptions, PlanOptions)
def plan_conversion(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    **options: Unpack[ConvertOptions],
) -> Conversion:
    """Read the source's headers and decide everything that `convert` does. Writes nothing.

    Args:
        source: a checkpoint folder, a Hugging Face cache snapshot, a folder of torch DCP, or one .safetensors file.
        output: the folder to make; default is `SOURCE-tpN` next to the source folder. A single file has no default: the
            output would lie in the folder of the source.
        options: as for `convert`.

    Returns:
        The planned conversion, for `preview`, `carry_out` and `is_carried_out`.

    Raises:
        FormatError: the source is damaged.
        PlanError: the source cannot be converted with these options.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", tp=4)
        >>> len(relayout.preview(plan).rank_nbytes)
        4
    """
    parsed = PlanOptions(**options)
    if parsed.expert_parallel and parsed.tp == 1:
        what = "expert_parallel: one rank holds all experts: omit --expert-parallel, or set --tp 2 or more"
        raise PlanError(what, path=str(source), code="option")
    store = find_input(source)
    target = find_store(default_output(source, parsed.tp) if output is None else output)
    checkpoint = read_source(store)
    if {file.name for file in checkpoint.files} == {ADAPTER_WEIGHTS}:
        what = (
            f"a LoRA adapter of PEFT ({ADAPTER_WEIGHTS}), not a model: convert its base model; engines load the adapter"
            " unchanged"
        )
        raise PlanError(what, path=str(source), code="unsupported")
    if checkpoint.is_file and output is None:
        what = "a single file: name the folder to write with -o OUT, or convert the file's folder"
        raise PlanError(what, path=str(source), code="option")
    if checkpoint.is_file and checkpoint.skipped:
        what = f"a part of a model, without {checkpoint.skipped[0]}"
        raise PlanError(what, path=str(source), code="option")
    if checkpoint.is_file and store.parent()[1].startswith("."):
        what = "a hidden file, which could not be restored: rename it"
        raise PlanError(what, path=str(source), code="option")
    return parsed.lay_out(checkpoint, target)


def default_output(source: str | os.PathLike[str], tp: int) -> str | Path:
    """Return `SOURCE-tpN` next to the source; for a snapshot of the hub, `REPOSITORY-tpN` in the working directory."""
    if scheme_of(source) is not None:
        return f"{os.fspath(source).rstrip('/')}-tp{tp}"
    source = Path(source)
    named = source.resolve() if source.name in ("", "..") else source
    if not named.name:
        what = "the root folder has no parent folder for the output: name the folder to write with -o OUT"
        raise PlanError(what, path=str(source), code="option")
    repository = named.absolute().parent.parent.name
    if named.absolute().parent.name == "snapshots" and repository.startswith("models--"):
        # The output does not belong in the hub's cache among revisions: use the working directory and the repository's
        # name.
        return Path(f"{repository.split('--')[-1]}-tp{tp}")
    return named.with_name(f"{named.name}-tp{tp}")


def observer(engine: str) -> tuple[str, Callable[[SourceCheckpoint, int], Plan]]:
    """Return the name and version of an installed engine, and a function that observes plans from it.

    Args:
        engine: a key of `ENGINES`.
    """
    version = import_module(engine).__version__
    return f"{engine} {version}", lambda checkpoint, num_ranks: find_plan(checkpoint, num_ranks, engine)


def find_plan(
    checkpoint: SourceCheckpoint,
    num_ranks: int,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    expert_parallel: bool = False,
    unmatched: Unmatched | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Return the plan of a checkpoint; every kind of `plan` gives the same type.

    Args:
        plan: a plan that was found for this checkpoint before; a plan file; "transformers", or a key of `ENGINES`;
            None: the built-in plan for the model type.
        expert_parallel, unmatched: as for `planner.plan_for`.
        trust_remote_code: True if an observed engine may run Python files of the checkpoint.
    """
    if isinstance(plan, Plan):
        if (plan.num_ranks, len(plan.cut_of)) != (num_ranks, len(checkpoint.tensors)):
            what = f"the plan is for {plan.num_ranks} ranks and {len(plan.cut_of)} tensors"
            expected = f"expected {num_ranks} and {len(checkpoint.tensors)}"
            raise PlanError(f"{what}, {expected}", path=str(checkpoint.root), code="no_plan")
        return plan
    if isinstance(plan, str) and plan in ENGINES:
        if num_ranks == 1:  # One rank holds everything: no engine needs to start.
            return plan_for(checkpoint, 1)
        observation = extensions.find("observe.observation")
        if observation is None:
            raise PlanError(f"plan: {plan!r}: relayout.observe is not installed", code="unsupported")
        observed: Plan = observation.observed_plan(
            checkpoint, num_ranks, plan, expert_parallel=expert_parallel, trust_remote_code=trust_remote_code
        )
        return observed
    if plan is not None:
        engines = " or ".join(map(repr, ENGINES))
        path_text(plan, "plan", f"a plan file, the name of a built-in plan, 'transformers', {engines}")
    named = Path(plan) if isinstance(plan, os.PathLike) else plan
    return plan_for(checkpoint, num_ranks, named, expert_parallel=expert_parallel, unmatched=unmatched)


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Tensors with names that differ only in numbers, of one dtype and shape, all cut in the same way."""

    pattern: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    cut: str
    """Description of the cut for users."""
    rank_shapes: tuple[tuple[int, ...], ...]
    """The different shapes that ranks hold, in rank order."""
    rank_nbytes: int
    """Bytes of the whole group in the rank that holds most."""


@dataclass(frozen=True, slots=True, repr=False)
class Preview(Result):
    """Summary of a planned conversion."""

    source: str
    output: str
    plan: str
    expert_parallel: bool
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """The ranks that are converted."""
    alignment: int
    num_tensors: int
    source_nbytes: int
    """Bytes of the source's tensors that are read."""
    written_nbytes: int
    rank_nbytes: tuple[int, ...]
    """Bytes of the tensors of each rank in `ranks`."""
    rank_tensors: tuple[int, ...]
    """Number of tensors of each rank in `ranks`."""
    balance: float
    """Bytes of the average rank divided by those of the largest: 1.0 if all ranks hold the same number of bytes."""
    replicated_nbytes: int | None
    """Bytes stored more than once, counted once for each copy beyond the first; None: not all ranks are converted."""
    tail_nbytes: int
    """Bytes, over all ranks, of tensors with any slice size that is not a multiple of the alignment."""
    num_files: int
    num_units: int
    """Number of units, which can be converted separately, see `--unit`."""
    groups: tuple[PlannedGroup, ...]
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""
    unused: tuple[str, ...]
    """Tensors that the engine does not load, if the plan was observed from an engine."""
    left_out: tuple[str, ...]


def preview(conversion: Conversion) -> Preview:
    """Sum up a planned conversion.

    Args:
        conversion: the result of `plan_conversion`.

    Example:
        >>> import relayout
        >>> relayout.preview(relayout.plan_conversion("llama-3.1-8b", tp=4)).num_files
        4
    """
    check_planned(conversion)
    source, plan, layout = conversion.source, conversion.plan, conversion.layout
    options, rank_nbytes = conversion.options, conversion.rank_nbytes
    counts = Counter(conversion.cut)
    words = {
        tensor.cut: _cut_in_words(plan.cuts[cut]) for tensor, cut in set(zip(conversion.cut, plan.cut_of, strict=True))
    }
    groups: dict[tuple[str, str, tuple[int, ...], str], list[tuple[CutTensor, int]]] = {}
    named = Counter(zip((collapse_numbers(tensor.name) for tensor in source.tensors), conversion.cut, strict=True))
    for (pattern, tensor), count in named.items():
        groups.setdefault((pattern, tensor.dtype, tensor.shape, words[tensor.cut]), []).append((tensor, count))
    return Preview(
        source=str(conversion.source.root),
        output=str(conversion.output),
        plan=options.plan,
        expert_parallel=options.expert_parallel,
        num_ranks=options.num_ranks,
        ranks=conversion.ranks,
        alignment=options.alignment,
        num_tensors=len(source.tensors),
        source_nbytes=conversion.nbytes_of(),
        written_nbytes=layout.nbytes,
        rank_nbytes=rank_nbytes,
        rank_tensors=tuple(
            sum(count for tensor, count in counts.items() if tensor.cut.slices[rank].is_held)
            for rank in conversion.ranks
        ),
        balance=sum(rank_nbytes) / max(1, max(rank_nbytes) * len(rank_nbytes)),
        replicated_nbytes=conversion.replicated_nbytes,
        tail_nbytes=sum(count * _tail_nbytes(tensor, options.alignment) for tensor, count in counts.items()),
        num_files=len(layout.files),
        num_units=len(layout.units),
        groups=tuple(_group(*key, members, plan.num_ranks) for key, members in groups.items()),
        unmatched=plan.unmatched,
        unused=plan.unused,
        left_out=source.left_out,
    )


def _tail_nbytes(tensor: CutTensor, alignment: int) -> int:
    """Return how many bytes of a tensor, over all ranks, are outside the aligned front of its files; 0 if none."""
    if not any(nbytes % alignment for nbytes in tensor.sizes):
        return 0
    return sum(nbytes * len(ranks) for nbytes, ranks in zip(tensor.sizes, tensor.cut.holders, strict=True))


def _group(
    pattern: str, dtype: str, shape: tuple[int, ...], cut: str, members: list[tuple[CutTensor, int]], num_ranks: int
) -> PlannedGroup:
    ranks = range(num_ranks)
    shapes = (tensor.rank_shape(rank) for tensor, _ in members for rank in ranks if tensor.cut.slices[rank].is_held)
    rank_nbytes = max(sum(tensor.rank_nbytes(rank) * count for tensor, count in members) for rank in ranks)
    count = sum(count for _, count in members)
    return PlannedGroup(pattern, count, dtype, shape, cut, tuple(dict.fromkeys(shapes)), rank_nbytes)


def _cut_in_words(cut: Cut) -> str:
    if cut.is_whole:
        return "whole"
    if not all(part.is_held for part in cut.distinct):
        return "whole, in one rank"
    by_axis = [axis_ranges for part in cut.distinct for axis_ranges in part.by_axis or ()]
    dims = ", ".join(f"dim {axis}" for axis in sorted({axis for axis, _ in by_axis}))
    num_ranges = max(len(ranges) for _, ranges in by_axis)
    fused = f", {num_ranges} ranges" if num_ranges > 1 else ""
    holders = zip(cut.distinct, cut.holders, strict=True)
    shared = max((len(ranks) for part, ranks in holders if all(ranges for _, ranges in part.by_axis or ())), default=1)
    return f"{dims}{fused}" if shared == 1 else f"{dims}{fused}, each part in {shared} ranks"


@dataclass(frozen=True, slots=True)
class KindWithoutRule:
    """Tensors with names that differ only in numbers, and that no rule matches."""

    pattern: str
    """The name that a rule must match, with `*` for numbers; for scales of a quantized weight, the weight's name."""
    count: int
    shape: tuple[int, ...]
    """Shape of the first tensor."""
    example: str
    """Name of the first tensor."""


@dataclass(frozen=True, slots=True, repr=False)
class PlanCheck(Result):
    """The result of `check_plan`."""

    path: str
    model_type: str | None
    plan: str | None
    """Full name of the plan that was checked; None if this checkpoint has no plan."""
    num_tensors: int
    kinds: tuple[KindWithoutRule, ...]
    """Tensors without a rule, by kind; without a plan, all tensors."""
    matching: tuple[str, ...]
    """Names of built-in plans with rules for every tensor, if the checked plan lacks some."""

    @property
    def ok(self) -> bool:
        """True if every tensor has a rule."""
        return not self.kinds


def check_plan(path: str | os.PathLike[str], *, plan: str | os.PathLike[str] | None = None) -> PlanCheck:
    """Find the tensors of a plain checkpoint that no rule matches. Reads headers only.

    Args:
        path: a checkpoint folder, Hugging Face snapshot, or .safetensors file.
        plan: a plan file, the name of a built-in plan, or "transformers"; None: the built-in plan for the model type,
            if there is one.
    """
    if isinstance(plan, str) and plan in ENGINES:
        raise PlanError(f"a plan observed from {ENGINES[plan]} has no rules to check", code="option")
    checkpoint = read_source(find_input(path))
    chosen = plan if plan is None or plan == TRANSFORMERS else Path(plan)
    family = plan_for(checkpoint, 1, chosen).family
    kinds: dict[str, KindWithoutRule] = {}
    for tensor, wanted in without_rule(checkpoint, family):
        # Braces and # have a meaning in patterns and cannot be escaped.
        pattern = re.sub(r"[{}#]", "*", collapse_numbers(wanted))
        first = kinds.get(pattern, KindWithoutRule(pattern, 0, tensor.shape, tensor.name))
        kinds[pattern] = KindWithoutRule(pattern, first.count + 1, first.shape, first.example)
    return PlanCheck(
        path=str(checkpoint.root),
        model_type=checkpoint.model_type,
        plan=None if family is None else family.full_name,
        num_tensors=len(checkpoint.tensors),
        kinds=tuple(kinds.values()),
        matching=tuple(matching_plans(checkpoint)) if kinds else (),
    )
