"""Observes in a child process the slices that ranks of an installed engine load; derives a plan or a plan file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.arguments import compile_glob
from relayout.core.slices import NOT_HELD, WHOLE, Cut, Slice, joined, num_bytes, number_cuts
from relayout.core.workers import QUIET, WITH_STDOUT, start_child, wait_for_child
from relayout.errors import PlanError, readable, shown
from relayout.format.fields import parse_slice
from relayout.format.index import HUB_INDEX_NAME
from relayout.format.safetensors import TensorEntry, build_header
from relayout.observe.fitting import Example, elements_along, fit
from relayout.plans.division import ragged_ranges
from relayout.plans.family import ENGINES, MAX_PLAN_NBYTES, Family, parse_family
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_by
from relayout.reporting import Result
from relayout.storage.local.descriptors import write_file
from relayout.storage.stores import find_input

_MAX_SIDE_NBYTES = 2**24
"""Largest file next to the weights that an engine may read, such as a configuration, or code; in bytes."""
_SIDE_SUFFIXES = (".json", ".py", ".txt")
_SMALL_NBYTES = 2**20
_SILENCE_SECONDS = 600
"""Longest time without output of the observing process. It prints when the engine is imported, and for each rank."""

DEGREES = range(2, 17)
"""Degrees at which a plan file is observed. Engines reject those that do not divide the heads."""

JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """The slices that the ranks of an engine load."""

    engine: str
    """The engine's package, a key of `ENGINES`."""
    version: str
    """The engine's version, and the name of the class that loaded."""
    loaded_slices: tuple[tuple[Slice, ...], ...]
    """For each tensor in the checkpoint's order: the slice that each rank loads."""


@dataclass(frozen=True, slots=True, repr=False)
class ObservedPlan(Result):
    """Result of `observe_plan`: a plan file that was written."""

    output: str
    engine: str
    """The engine's name and version, and the name of its class."""
    degrees: tuple[int, ...]
    """The degrees at which the engine's ranks were observed."""
    held_out: tuple[int, ...]
    """The degrees that rules were not derived from. All rules agree with them."""
    num_rules: int
    unmatched: tuple[str, ...]
    """Patterns of tensors that no rule fits, each with the reason. Every rank holds these whole."""


def run_in_child(jobs: Sequence[JsonObject]) -> list[JsonObject]:
    """Carry out jobs of one engine in a child process, so that the memory and state of the engine do not remain."""
    engine = jobs[0]["engine"]
    with TemporaryDirectory(prefix="relayout-observe-") as scratch:
        file, log = Path(scratch, "jobs.json"), Path(scratch, "log")
        file.write_text(json.dumps(jobs))
        result = Path(f"{file}.result")
        with log.open("wb") as output:
            child = start_child("relayout.observe.ranks", str(file), stdin=QUIET, stdout=output, stderr=WITH_STDOUT)
            status = wait_for_child(child, log, _SILENCE_SECONDS)
        if not result.exists():
            last = log.read_text(errors="replace").strip().rpartition("\n")[2][:500]
            how = f"wrote nothing for {_SILENCE_SECONDS} s" if status is None else f"ended with {status}"
            what = f"--plan {engine}: the process that observes {ENGINES[engine]} {how}"
            raise PlanError(f"{what}: {last}", code="no_plan")
        results: list[JsonObject] = json.loads(result.read_text())
    return results


def observe(
    checkpoint: SourceCheckpoint,
    degrees: Sequence[int],
    *,
    engine: str = "vllm",
    expert_parallel: bool = False,
    trust_remote_code: bool = False,
    run: Callable[[Sequence[JsonObject]], list[JsonObject]] = run_in_child,
) -> list[Observation | PlanError]:
    """Load a checkpoint's headers with an installed engine. Reads no tensor data, and needs no memory for weights.

    Args:
        checkpoint: the tensors and config.json.
        degrees: tensor-parallel degrees.
        engine: a key of `ENGINES`.
        expert_parallel: True if each expert is held whole by one rank.
        trust_remote_code: allow the engine to run Python files of the checkpoint.
        run: carries out jobs: takes the fields of each `ObservationJob`, and returns the results.

    Returns:
        For each degree, the observation, or the reason for failure: the engine is not installed, has no class for the
        checkpoint, rejects it at this degree, or its class does something that cannot be observed.
    """
    with TemporaryDirectory(prefix="relayout-observe-") as scratch:
        write_stub(checkpoint, Path(scratch))
        job = {
            "engine": engine,
            "folder": scratch,
            "tensors": [(tensor.name, tensor.dtype, tensor.shape) for tensor in checkpoint.tensors],
            "expert_parallel": expert_parallel,
            "trust_remote_code": trust_remote_code,
        }
        return [parse(engine, result) for result in run([{**job, "tp": tp} for tp in degrees])]


def observed_plan(
    checkpoint: SourceCheckpoint,
    tp: int,
    engine: str,
    *,
    expert_parallel: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """Return a plan that cuts a checkpoint as an installed engine does at this degree. Options as in `observe`."""
    [observation] = observe(
        checkpoint, [tp], engine=engine, expert_parallel=expert_parallel, trust_remote_code=trust_remote_code
    )
    if isinstance(observation, PlanError):
        raise observation
    return plan_of(checkpoint, observation, tp, expert_parallel=expert_parallel)


def plan_of(checkpoint: SourceCheckpoint, observation: Observation, tp: int, *, expert_parallel: bool = False) -> Plan:
    """Return a plan that assigns the observed slices to ranks.

    Some tensors are not loaded by the engine, such as the head of a model that uses its embedding instead. Every rank
    holds these whole if they are small, and otherwise in equal blocks of rows. The plan lists them as `unused`.
    """
    unused = []
    cuts = []
    for tensor, slices in zip(checkpoint.tensors, observation.loaded_slices, strict=True):
        if not any(part.is_held for part in slices):
            unused.append(tensor.name)
            slices = _of_unused(tensor.dtype, tensor.shape, tp)
        cuts.append(Cut(tuple(part.canonical(tensor.shape) for part in completed(slices, tensor.shape))))
    family = Family(observation.version, observation.engine)
    return Plan(family.full_name, tp, *number_cuts(cuts), expert_parallel, unused=tuple(unused), family=family)


def completed(slices: Sequence[Slice], shape: tuple[int, ...]) -> tuple[Slice, ...]:
    """Return the slices, with unloaded elements (such as rows beyond the vocabulary) added to the last slice."""
    slices = tuple(slices)
    if not any(part.is_held for part in slices):
        return (WHOLE,) * len(slices)
    if any(part.is_whole for part in slices) or not all(shape):
        return slices
    axes = {axis for part in slices for axis in part.axes}
    if len(axes) > 1:
        # Cut along several axes: if each rank has a cell of a grid, the sizes of all cells add up to the tensor's size.
        held = {part for part in slices if part.is_held}
        return slices if sum(prod(part.shape(shape)) for part in held) == prod(shape) else (*slices[:-1], WHOLE)
    [axis] = axes
    missing, end = [], 0
    for start, length in (*joined(part for held in slices for part in held.ranges_along(axis) or ()), (shape[axis], 0)):
        missing.append((end, start - end))
        end = start + length
    if not any(length for _, length in missing):
        return slices
    return (*slices[:-1], Slice.along(axis, joined((*(slices[-1].ranges_along(axis) or ()), *missing))))


def _of_unused(dtype: str, shape: tuple[int, ...], tp: int) -> tuple[Slice, ...]:
    nbytes = num_bytes(dtype, shape) or 0
    if nbytes <= _SMALL_NBYTES or (nbytes // shape[0]) * shape[0] != nbytes:
        return (WHOLE,) * tp
    return tuple(Slice.along(0, (part,)) for part in ragged_ranges(shape[0], 1, tp))


def parse(engine: str, result: JsonObject) -> Observation | PlanError:
    """Return the observation of an engine, or the error, from the result of a job."""
    if "error" in result:
        return PlanError(f"--plan {engine}: {result['error']}", code="no_plan")
    ranks = [[parse_slice(part) for part in rank] for rank in result["ranks"]]
    slices = tuple(map(_aligned, zip(*ranks, strict=True)))
    return Observation(engine, f"{result['version']} {result['model_class']}", slices)


def _aligned(slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Make empty slices empty along the axis that the other ranks' slices are cut along.

    If all slices are empty, no rank holds the tensor.
    """
    if all(not part.is_held or _is_empty(part) for part in slices):
        return (NOT_HELD,) * len(slices)
    axes = {part.axes for part in slices if part.axes and not _is_empty(part)}
    if len(axes) != 1 or len(axis := axes.pop()) != 1:
        return slices
    return tuple(Slice.along(axis[0], ()) if _is_empty(part) else part for part in slices)


def _is_empty(part: Slice) -> bool:
    return any(not ranges for _, ranges in part.by_axis or ())


def write_stub(checkpoint: SourceCheckpoint, folder: Path) -> None:
    """Write a folder that looks like the checkpoint, with holes instead of weights.

    Engines recognize the format of Mistral, which has its configuration in params.json, by the name of the weight file.
    SGLang's class of Llama 4 checks the hub's index, if it exists, for a vision part (`mllama4.py`, 0.5.23).
    """
    for name in checkpoint.side_files:
        status = checkpoint.folder.stat(name)
        if name.endswith(_SIDE_SUFFIXES) and status is not None and status.nbytes <= _MAX_SIDE_NBYTES:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(checkpoint.folder.read(name, _MAX_SIDE_NBYTES))
    sizes = [tensor.extent.nbytes for tensor in checkpoint.tensors]
    entries = (
        TensorEntry(tensor.name, tensor.dtype, tensor.shape, end - nbytes, nbytes)
        for tensor, nbytes, end in zip(checkpoint.tensors, sizes, accumulate(sizes), strict=True)
    )
    header = build_header(entries, {}, alignment=8)
    is_mistral = all(file.name.startswith("consolidated") for file in checkpoint.files)
    weights = "consolidated.safetensors" if is_mistral else "model.safetensors"
    if checkpoint.folder.stat(HUB_INDEX_NAME) is not None:
        index = {"metadata": {}, "weight_map": {tensor.name: weights for tensor in checkpoint.tensors}}
        (folder / HUB_INDEX_NAME).write_text(json.dumps(index))
    with (folder / weights).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes))


def observe_plan(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    engine: str = "vllm",
    trust_remote_code: bool = False,
) -> ObservedPlan:
    """Observe an installed engine at each degree up to 16, and write equivalent rules as a plan file.

    Args:
        source: a checkpoint. Only its headers and config.json are read.
        output: the plan file to create.
        engine: "vllm" or "sglang".
        trust_remote_code: allow the engine to run Python files of the source.
    """
    if engine not in ENGINES:
        raise PlanError(f"engine: {shown(engine)}, expected {' or '.join(ENGINES)}", code="option")
    file = Path(output)
    if os.path.lexists(file):
        raise PlanError("exists; choose another -o", path=file, code="exists")
    checkpoint = read_source(find_input(source))
    results = observe(checkpoint, DEGREES, engine=engine, trust_remote_code=trust_remote_code)
    observations = {
        degree: result for degree, result in zip(DEGREES, results, strict=True) if isinstance(result, Observation)
    }
    if not observations:
        raise next(result for result in results if isinstance(result, PlanError))
    degrees = tuple(observations)
    held_out = degrees[-2:-1] if len(degrees) > 2 else degrees[1:]
    loaded = {degree: observation.loaded_slices for degree, observation in observations.items()}
    fitted = fit([Example(checkpoint, loaded)], held_out)
    observed = f"{ENGINES[engine]} {observations[degrees[0]].version}"
    text = fitted.as_toml(f"Observed from {observed} at {', '.join(map(str, degrees))} ranks.")
    _check_reproduced(checkpoint, parse_family(text, str(file), file.name), loaded, fitted.unmatched)
    write_file(file, readable(text.encode(), MAX_PLAN_NBYTES, "a plan file"), replace=False)
    unmatched = tuple(f"{pattern}: {why}" for pattern, why in fitted.unmatched.items())
    return ObservedPlan(str(file), observed, degrees, held_out, len(fitted.family.rules), unmatched)


def same_elements(slices: Sequence[Slice], others: Sequence[Slice], shape: Sequence[int]) -> bool:
    """Return True if the slices of each rank contain the same elements of a tensor, in any order."""
    return all(
        part.is_held == other.is_held
        and all(
            elements_along(part, axis, size) == elements_along(other, axis, size) for axis, size in enumerate(shape)
        )
        for part, other in zip(slices, others, strict=True)
    )


def _check_reproduced(
    checkpoint: SourceCheckpoint,
    family: Family,
    loaded: Mapping[int, Sequence[tuple[Slice, ...]]],
    unmatched: Iterable[str],
) -> None:
    """Raise PlanError unless the plan, applied as in a conversion, reproduces the observed slices.

    Tensors that no rule fits are not compared: every rank holds them whole, which is sufficient for any engine.
    """
    patterns = list(map(compile_glob, unmatched))
    fitting = [t for t, tensor in enumerate(checkpoint.tensors) if not any(p.match(tensor.name) for p in patterns)]
    for degree, slices in loaded.items():
        plan = plan_by(checkpoint, degree, family)
        for t in fitting:
            tensor = checkpoint.tensors[t]
            if any(part.is_held for part in slices[t]) and not same_elements(
                plan.cut(t).slices, completed(slices[t], tensor.shape), tensor.shape
            ):
                what = f"the derived rules do not reproduce the observed cut at {degree} ranks"
                raise PlanError(what, tensor=tensor.name, code="unsupported")
