"""What an engine takes of a checkpoint's tensors, observed in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.children import QUIET, WITH_STDOUT, start_child, wait_for_child
from relayout.core.dtypes import num_bytes
from relayout.core.slices import NOT_HELD, WHOLE, Cut, Slice, number_cuts
from relayout.errors import PlanError
from relayout.format.slices import parse_slice
from relayout.observe.taken import completed
from relayout.plans.division import ragged_ranges
from relayout.plans.family import VLLM, Family
from relayout.plans.plan import Plan

_MAX_SIDE_NBYTES = 2**24
"""Of a file beside the weights that an engine may look at: configurations, and code."""
_SIDE_SUFFIXES = (".json", ".py", ".txt")
_SMALL_NBYTES = 2**20
_SILENCE_SECONDS = 600
"""After which the process that observes is taken for stuck: it says when vLLM is imported, and when a rank is done."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the ranks of an engine take."""

    engine: str
    """Its version, and the class that loaded."""
    slices: tuple[tuple[Slice, ...], ...]
    """For each tensor, in the checkpoint's order, what each rank takes."""


def observe(
    checkpoint: SourceCheckpoint,
    degrees: Sequence[int],
    *,
    expert_parallel: bool = False,
    trust_remote_code: bool = False,
) -> list[Observation | PlanError]:
    """Let the installed vLLM load a checkpoint's headers. Reads no tensor data; takes no memory for weights.

    Args:
        checkpoint: the tensors and config.json.
        degrees: tensor-parallel degrees.
        expert_parallel: experts are owned whole.
        trust_remote_code: run Python files of the checkpoint.

    Returns:
        For each degree what was observed, or why nothing was: vLLM is not installed, has no class for the checkpoint,
        refuses it at this degree, or its class does what cannot be observed.
    """
    with TemporaryDirectory(prefix="relayout-observe-") as scratch:
        write_stand_in(checkpoint, Path(scratch))
        job = {
            "folder": scratch,
            "tensors": [(tensor.name, tensor.dtype, tensor.shape) for tensor in checkpoint.tensors],
            "expert_parallel": expert_parallel,
            "trust_remote_code": trust_remote_code,
        }
        found = run([{**job, "tp": tp} for tp in degrees])
    return [
        PlanError(f"--plan vllm: {one['error']}", code="no_plan") if "error" in one else parse(one) for one in found
    ]


def run(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Carry out each `Job` of `observe/vllm.py` in a process of their own: vLLM is large, and its state must not stay.

    Raises:
        PlanError: the process ended without a result, or is stuck.
    """
    with TemporaryDirectory(prefix="relayout-observe-") as scratch:
        file = Path(scratch, "jobs.json")
        file.write_text(json.dumps(jobs))
        result, log = Path(f"{file}.result"), Path(scratch, "log")
        with log.open("wb") as output:
            child = start_child("relayout.observe.vllm", str(file), stdin=QUIET, stdout=output, stderr=WITH_STDOUT)
            status = wait_for_child(child, log, _SILENCE_SECONDS)
        if not result.exists():
            last = log.read_text(errors="replace").strip().rpartition("\n")[2][:500]
            how = f"said nothing for {_SILENCE_SECONDS} s" if status is None else f"ended with {status}"
            raise PlanError(f"--plan vllm: the process that observes vLLM {how}: {last}", code="no_plan")
        found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def observed_plan(
    checkpoint: SourceCheckpoint, tp: int, *, expert_parallel: bool = False, trust_remote_code: bool = False
) -> Plan:
    """The plan by which a checkpoint is cut as the installed vLLM cuts it, at this degree.

    Tensors that vLLM does not take, such as the head of a model that uses its embedding instead, are held whole by
    every rank if they are small, else in equal blocks of rows; they are listed.

    Raises:
        PlanError: there was nothing to observe, see `observe`.
    """
    [observation] = observe(checkpoint, [tp], expert_parallel=expert_parallel, trust_remote_code=trust_remote_code)
    if isinstance(observation, PlanError):
        raise observation
    untaken = []
    cuts = []
    for tensor, slices in zip(checkpoint.tensors, observation.slices, strict=True):
        if not any(part.is_held for part in slices):
            untaken.append(tensor.name)
            slices = _of_untaken(tensor.dtype, tensor.shape, tp)
        cuts.append(Cut(tuple(part.canonical(tensor.shape) for part in completed(slices, tensor.shape))))
    family = Family(observation.engine, VLLM)
    return Plan(family.full_name, tp, *number_cuts(cuts), expert_parallel, untaken=tuple(untaken), family=family)


def _of_untaken(dtype: str, shape: tuple[int, ...], tp: int) -> tuple[Slice, ...]:
    nbytes = num_bytes(dtype, shape) or 0
    if nbytes <= _SMALL_NBYTES or (nbytes // shape[0]) * shape[0] != nbytes:
        return (WHOLE,) * tp
    return tuple(Slice.along(0, (part,)) for part in ragged_ranges(shape[0], 1, tp))


def parse(found: Mapping[str, Any]) -> Observation:
    ranks = [[parse_slice(one) for one in rank] for rank in found["ranks"]]
    slices = tuple(_aligned(one) for one in zip(*ranks, strict=True))
    return Observation(f"{found['version']} {found['model_class']}", slices)


def _aligned(slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """The same elements; ranks without any are cut along the axis that the others are cut along. If none has any, no
    rank holds the tensor."""
    if all(not part.is_held or any(not ranges for _, ranges in part.by_axis or ()) for part in slices):
        return (NOT_HELD,) * len(slices)
    axes = {part.axes for part in slices if part.axes and all(ranges for _, ranges in part.by_axis or ())}
    if len(axes) != 1 or len(axis := axes.pop()) != 1:
        return slices
    empty = Slice.along(axis[0], ())
    return tuple(empty if any(not ranges for _, ranges in part.by_axis or ()) else part for part in slices)


def write_stand_in(checkpoint: SourceCheckpoint, folder: Path) -> None:
    """A folder that looks like the checkpoint, with holes where the weights are. By the name of its file vLLM knows the
    format of Mistral, whose configuration is params.json."""
    for name in checkpoint.side_files:
        status = checkpoint.folder.stat(name)
        if name.endswith(_SIDE_SUFFIXES) and status is not None and status.nbytes <= _MAX_SIDE_NBYTES:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(checkpoint.folder.read(name, _MAX_SIDE_NBYTES))
    header: dict[str, Any] = {}
    end = 0
    for tensor in checkpoint.tensors:
        start, end = end, end + tensor.extent.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    is_mistral = all(one.name.startswith("consolidated") for one in checkpoint.files)
    with (folder / ("consolidated.safetensors" if is_mistral else "model.safetensors")).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
