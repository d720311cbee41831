"""Checkpoints of every family and quantized form, and their conversions, each made once in a process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpoints import write_family
from support.families import EXPERT_FAMILIES, FAMILIES
from support.profile import sample
from support.quantized import EXPERT_QUANTIZED, QUANTIZED, write_quantized
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import relayout
from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.arguments import collapse_numbers
from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.plans.plan import Plan

Tensors = dict[str, torch.Tensor]

DEGREES = (1, 2, 4, 8, 16)
WIDE = {  # 16 heads: for 16 ranks.
    "llama_wide": replace(FAMILIES["llama"], sizes={"A": 16, "D": 8}),
    "phi3_wide": replace(FAMILIES["phi3"], sizes={"A": 16, "D": 8}),
    "gpt_oss_mxfp4_wide": replace(FAMILIES["gpt_oss_mxfp4"], sizes={"A": 16, "I": 288, "H": 96, "D": 16}),
}
OF_EACH_KIND = sample(
    [*FAMILIES, *QUANTIZED],
    [
        "llama",  # Dense, separate projections.
        "phi3",  # Fused query, key, value, and gate, up.
        "gpt2",  # Transposed weights.
        "falcon_40b",  # Queries interleaved with keys and values.
        "gpt_oss_mxfp4",  # Stacked, quantized experts in blocks.
        "llama4",  # Vision, stacked experts.
        "fp8_blocks_deepseek",  # Latent attention, experts and shared experts.
        "qwen4_exp",  # A table in shards.
        "gptq_4bit_biases_fused",
        "nvfp4_modelopt_moe",
    ],
)
"""Families and quantized forms whose bytes are converted, loaded and restored every day; plans are compared for all."""
CASES = [*OF_EACH_KIND, *WIDE]
EXPERT_CASES = sample(
    [*EXPERT_FAMILIES, *EXPERT_QUANTIZED],
    ["gpt_oss_mxfp4", "llama4", "fp8_blocks_deepseek", "nvfp4_modelopt_moe"],
)


def grouped(names: list[str]) -> list[Any]:
    """Parameters of which pytest-xdist runs those of one checkpoint in one process, which converts it once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(f"checkpoint-{name}")) for name in names]


@dataclass(frozen=True)
class Conversions:
    """Checkpoints and conversions of them, each written when it is first asked for."""

    folder: Path
    made: dict[tuple[str, int, bool], Path | PlanError] = field(default_factory=dict)

    def source(self, name: str) -> Path:
        """The checkpoint of that name."""
        path = self.folder / name
        if not path.exists():
            if name in QUANTIZED:
                write_quantized(QUANTIZED[name], path)
            else:
                write_family({**FAMILIES, **WIDE}[name], path)
        return path

    def outcome(self, name: str, tp: int, *, experts: bool = False) -> Path | PlanError:
        """Its conversion to a degree, or why there is none."""
        key = (name, tp, experts)
        if key not in self.made:
            out = self.folder / f"{name}-tp{tp}{'-experts' if experts else ''}"
            try:
                relayout.convert(self.source(name), out, tp=tp, expert_parallel=experts and tp > 1, threads=1)
                self.made[key] = out
            except PlanError as error:
                self.made[key] = error
        return self.made[key]

    def at(self, name: str, tp: int, *, experts: bool = False) -> Path:
        """Its conversion to a degree."""
        found = self.outcome(name, tp, experts=experts)
        if isinstance(found, PlanError):
            raise found.with_traceback(None)
        return found

    def whole(self, name: str, tp: int) -> Path:
        """Its conversion to a degree, in the layout `whole`."""
        out = self.folder / f"{name}-tp{tp}-whole"
        if not out.exists():
            relayout.convert(self.source(name), out, tp=tp, layout="whole", threads=1)
        return out

    def largest(self, name: str) -> int:
        """The largest degree up to 8 at which it can be converted."""
        return next(tp for tp in (8, 4, 2, 1) if not isinstance(self.outcome(name, tp), PlanError))


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversions]:
    """Checkpoints and conversions of them, removed in the end."""
    folder = tmp_path_factory.mktemp("conversions")
    yield Conversions(folder)
    shutil.rmtree(folder, ignore_errors=True)


def dcp_tensors(folder: Path, *, one_of_each_kind: bool = False) -> dict[str, torch.Tensor]:
    """What PyTorch DCP finds, with the dtypes and shapes that it finds; or of names that differ in numbers one."""
    reader = HuggingFaceStorageReader(str(folder))
    described, tensors = reader.read_metadata().state_dict_metadata, {}
    names = {collapse_numbers(name) if one_of_each_kind else name: name for name in described}
    for name in names.values():
        found = described[name]
        assert isinstance(found, TensorStorageMetadata)
        tensors[name] = torch.full(found.size, 77, dtype=torch.uint8).to(found.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def stored_in(folder: Path, rank: int) -> Tensors:
    """What a rank's files hold, by stock safetensors."""
    files = sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: object) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys(), where
    for name, tensor in found.items():
        other = expected[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), (where, name)
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
        same = torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert same, (where, name)


def reference_tensors(folder: Path) -> Tensors:
    """Every tensor of a source, by the stock reader."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stock:
            tensors |= {name: stock.get_tensor(name) for name in stock.keys()}  # noqa: SIM118
    assert tensors
    return tensors


def held_by(rank: int, plan: Plan, source: SourceCheckpoint, whole: Tensors) -> Tensors:
    """What a rank holds by the plan."""
    slices = {tensor.name: plan.cut(t).slices[rank] for t, tensor in enumerate(source.tensors)}
    return {name: part_of(whole[name], part) for name, part in slices.items() if part.is_held}


def part_of(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    if part.ranges is None:
        return tensor
    pieces = [tensor.narrow(part.axis, start, length) for start, length in part.ranges or ((0, 0),)]
    return torch.cat(pieces, part.axis)
