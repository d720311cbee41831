"""Processes that fill sharded models together, and how these differ from what PyTorch and transformers cut.

`of_models` with `FOLDER N FAMILY...` in sys.argv: of each FOLDER has a checkpoint, FAMILY, and its conversion,
FAMILY-out. Each of N processes has transformers load each, sharded in each way of `MODELS`, keeps what it then holds,
overwrites that, and has relayout fill it again. It writes what differs to FOLDER/member-NUMBER-of-N.json.

`main` with `FOLDER`: four processes fill DTensors in many ways, one case after the other, see `group_worker`. FOLDER
has the checkpoints `wide` and `foreign`, which differ in their values, conversions of `wide` for 2 ranks: `out`,
`whole` in that layout, `signed`; `foreign-out`, and the `delta` from there to `out`; and `big` with its conversion
`big-out`.

`from_bucket` with `FOLDER URL`: they fill what FOLDER/big has from there.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.group_worker import NUM_MEMBERS, forked, join
from support.page_cache import drop
from support.plain_group_worker import drive_nbytes
from support.profile import sample
from support.toy_store import Fault, shelf

from relayout.core.extents import BLOCK
from relayout.storage.stores import REGISTRY

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 240
RANGE_NBYTES = 16 * BLOCK
SOURCES = ("toy://group/wide", "toy://group/out", "FOLDER/whole")
""""FOLDER" is that of the test."""
MODELS: Mapping[int, Mapping[str, dict[str, int]]] = {
    2: {"fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}},
    3: {"fsdp": {"fsdp_size": 3}},
    4: {
        "fsdp": {"fsdp_size": 4},
        "tp": {"tp_size": 4},
        "fsdp x tp": {"fsdp_size": 2, "tp_size": 2},
        "replicas x fsdp": {"dp_replicate_size": 2, "fsdp_size": 2},
    },
}
"""How transformers shards models among so many processes."""


def of_models() -> None:
    folder, num_members, families = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401 (once, before the members are forked)
    from support import transformers_worker

    transformers_worker._prepare(folder / family for family in families)
    codes = forked(partial(_fills_models, folder, num_members, families), num_members)
    assert codes == [0] * num_members, codes


def _fills_models(folder: Path, num_members: int, families: list[str], number: int) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import relayout

    meet = folder / f"of-{num_members}"
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # Processes that wait for each other say where.
    join(meet, number, num_members)
    found: dict[str, Any] = {}
    for family in families:
        for way, sizes in MODELS[num_members].items():
            model = AutoModelForCausalLM.from_pretrained(
                folder / family, dtype="auto", distributed_config=DistributedConfig(**sizes)
            )
            expected = {name: one.clone() for name, one in held_of(model).items()}
            for source in ("", "-out"):
                for one in held_of(model).values():
                    one.view(torch.uint8).fill_(0xEE)
                relayout.load(folder / f"{family}{source}", into=model, group=dist.group.WORLD)
                filled = held_of(model)
                different = [name for name, one in expected.items() if not same_bits(one, filled[name])]
                sharded = [name for name, one in model.state_dict().items() if hasattr(one, "to_local")]
                found[f"{family}{source}, {way}"] = {"different": different, "sharded": len(sharded)}
        found[f"{family}, made without memory"] = _logits_differ(folder / family, num_members)
    (folder / f"member-{number}-of-{num_members}.json").write_text(json.dumps(found))


def module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module with these parameters, at the places that their names say."""
    import torch

    model = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return model


def _logits_differ(source: Path, num_members: int) -> bool:
    """Whether a model that is made on "meta", sharded, given memory and filled says something else than a usual one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    import relayout

    usual = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=usual.dtype)
    mesh = init_device_mesh("cpu", (num_members,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for one in (*model.parameters(), *model.buffers()):
        local_of(one).fill_(7)
    model.init_weights()
    relayout.load(source, into=model, group=dist.group.WORLD)
    ids = torch.arange(1, 9)[None]
    return not torch.equal(usual(ids).logits, model(ids).logits)


def main() -> None:
    folder = Path(sys.argv[1])
    REGISTRY["toy"] = "support.toy_store"
    for name in ("wide", "out"):
        for file in (folder / name).iterdir():
            shelf("group").write(f"{name}/{file.name}", file.read_bytes())
    codes = forked(partial(_member, folder))
    assert codes == [0, 0, 0, -signal.SIGKILL], codes


def from_bucket() -> None:
    codes = forked(partial(_from_bucket, Path(sys.argv[1]), sys.argv[2]))
    assert codes == [0] * NUM_MEMBERS, codes


def _from_bucket(folder: Path, url: str, number: int) -> None:
    import torch.distributed as dist

    from relayout.loader.api import load

    join(folder, number)
    expected = placed(whole_of(folder / "big"), "replicas x columns")
    filled = emptied(expected)
    load(url, into=filled, group=dist.group.WORLD)
    (folder / f"of-bucket-{number}.json").write_text(json.dumps(differing(filled, expected)))


MESHES = {
    "rows": ((4,), ["rows"]),
    "columns": ((4,), ["columns"]),
    "rows x columns": ((2, 2), ["rows", "columns"]),
    "columns x rows": ((2, 2), ["columns", "rows"]),
    "rows x rows": ((2, 2), ["rows", "rows"]),
    "rows of rows": ((2, 2), ["strided", "rows"]),
    "columns of columns": ((2, 2), ["strided columns", "columns"]),
    "replicas": ((4,), ["whole"]),
    "replicas x rows": ((2, 2), ["whole", "rows"]),
    "replicas x columns": ((2, 2), ["whole", "columns"]),
    "three": ((3,), ["rows"]),
    "three, columns": ((3,), ["columns"]),
    "a pair": ((2,), ["columns"]),
}
"""The shape of a mesh of the first processes, and how tensors are placed along its dims."""


def meshes() -> list[str]:
    everyday = ("rows", "columns x rows", "rows of rows", "columns of columns", "replicas x rows", "three, columns")
    return sample(MESHES, everyday)


def placed(whole: Mapping[str, torch.Tensor], mesh_name: str) -> dict[str, Any]:
    """DTensors that PyTorch cuts from whole tensors; what has one axis only is not cut along another."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    shape, ways = MESHES[mesh_name]
    mesh = DeviceMesh("cpu", _numbers(shape))
    kinds = {
        "rows": Shard(0),
        "columns": Shard(1),
        "strided": _StridedShard(0, split_factor=2),
        "strided columns": _StridedShard(1, split_factor=2),
        "whole": Replicate(),
    }

    def placement(way: str, tensor: torch.Tensor) -> Any:
        return Replicate() if "columns" in way and tensor.dim() < 2 else kinds[way]

    return {
        name: distribute_tensor(tensor.clone(), mesh, [placement(way, tensor) for way in ways], src_data_rank=None)
        for name, tensor in whole.items()
    }


def _numbers(shape: tuple[int, ...]) -> Any:
    import torch

    count = 1
    for length in shape:
        count *= length
    return torch.arange(count).reshape(shape)


def whole_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def emptied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Like tensors, with other elements."""
    import torch

    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in made.items():
        local = local_of(tensor)
        local.copy_(torch.full_like(local, 119))
        assert not local.numel() or not same_bits(local, local_of(tensors[name]))
    return made


def local_of(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return local


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of tensors of which this process holds different bits."""
    assert one.keys() == other.keys()
    assert len(one) > 7
    return [name for name, tensor in one.items() if not same_bits(local_of(tensor), local_of(other[name]))]


def failure() -> Exception:
    return OSError(errno.EIO, "the drive is on fire", "model")


class _Cases:
    """What this process saw, case by case; also in its file."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.whole = whole_of(folder / "wide")
        self.shelf = shelf("group")
        self.found: dict[str, Any] = {}

    def __call__(self, name: str, path: str, into: Any, expected: Any = None, **options: Any) -> None:
        """Load, and note what differs, or the error; and what was read of the shelf. Then remove all faults."""
        import torch.distributed as dist

        from relayout.loader.api import load

        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # Processes that wait for each other say where.
        before, seen = self.shelf.read_nbytes, dict[str, Any]()
        try:
            load(path, into=into, **{"group": dist.group.WORLD, **options})
            seen["different"] = None if expected is None else differing(into, expected)
        except (Exception, KeyboardInterrupt) as error:
            seen |= {"kind": type(error).__name__, "error": str(error)}
        seen["nbytes"] = self.shelf.read_nbytes - before
        self.shelf.faults.clear()
        self.found[name] = seen
        (self.folder / f"member-{self.number}.json").write_text(json.dumps(self.found))


WIDE, OUT = "toy://group/wide", "toy://group/out"


def _member(folder: Path, number: int) -> None:
    from relayout.loader.group import exchange
    from relayout.loader.group.plan import plan_exchange

    join(folder, number)
    case = _Cases(folder, number)
    expected = placed(case.whole, "replicas x columns")
    case("first", WIDE, emptied(expected), expected)  # Imports: the next one reads nothing else.
    _cold(case)
    exchange.plan_exchange = partial(plan_exchange, most_nbytes=RANGE_NBYTES)  # type: ignore[assignment]
    _all_meshes(case)
    _many_ways(case)
    _are_refused(case)
    _fail(case)
    if number == 3:
        case.shelf.faults.append(
            Fault("read", "*.safetensors", after=3, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
        )
    case("killed", WIDE, emptied(expected))


def _all_meshes(case: _Cases) -> None:
    from relayout.loader.group.collectives import Group

    expected = placed(case.whole, "replicas x columns")
    # Before groups of some processes only are made: torch 2.13 names a new one by how many a process knows.
    has_gloo = Group.has_gloo
    Group.has_gloo = property(lambda _: False)  # type: ignore[assignment, method-assign]
    for time in ("", " again"):
        case(f"a group without gloo{time}", WIDE, emptied(expected), expected)
    Group.has_gloo = has_gloo  # type: ignore[method-assign]
    for mesh in meshes():
        expected = placed(case.whole, mesh)
        for source in SOURCES:
            case(f"{mesh}, {source}", source.replace("FOLDER", str(case.folder)), emptied(expected), expected)
        case(f"{mesh}, alone", f"{case.folder}/out", emptied(expected), expected, group=None)
        case(f"{mesh}, alone, plain", f"{case.folder}/wide", emptied(expected), expected, group=None)


def _many_ways(case: _Cases) -> None:
    from relayout.loader import sharded

    whole, folder, number = case.whole, case.folder, case.number
    expected = placed(whole, "replicas x columns")
    case("deltas", f"{folder}/foreign-out", emptied(expected), expected, deltas=f"{folder}/delta")
    case("verified", OUT, emptied(expected), expected, verify=True)
    case("signed", f"{folder}/signed", emptied(expected), expected, trust=f"{folder}/signer.toml")
    done: list[tuple[int, int]] = []
    case("progress", WIDE, emptied(expected), expected, progress=lambda *told: done.append(told))
    case.found["progress"]["told"] = done
    case("direct", f"{folder}/wide", emptied(expected), expected, backend="direct")
    beside, sharded.page_cache_of = sharded.page_cache_of, lambda store: str(number)
    for kind in ("wide", "out"):
        case(f"several machines, {kind}", f"{folder}/{kind}", emptied(expected), expected)
    sharded.page_cache_of = beside
    strided = {name: _strided(tensor) for name, tensor in expected.items()}
    assert any(not local_of(tensor).is_contiguous() for tensor in strided.values())
    small, sharded.MAX_IN_FLIGHT = sharded.MAX_IN_FLIGHT, 2**20
    case("strided", WIDE, emptied(strided), expected)
    case("strided, alone", OUT, emptied(strided), expected, group=None)
    case("strided on one", OUT, emptied(strided if number == 1 else expected), expected)
    wider = {name: _widened(tensor) for name, tensor in expected.items()}
    case("wider", OUT, emptied(wider), wider)
    case("wider, alone", WIDE, emptied(wider), wider, group=None)
    sharded.MAX_IN_FLIGHT = small
    mixed = {name: whole[name].clone() if "norm" in name else tensor for name, tensor in expected.items()}
    case("plain tensors among them", WIDE, emptied(mixed), mixed)
    tied = emptied(expected)
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].detach()
    case("tied", WIDE, tied, expected)
    other_layer = f".layers.{1 - number // 2}."
    stage = {name: tensor for name, tensor in whole.items() if other_layer not in name}
    case("stages", WIDE, emptied(stage), stage)
    some = {name: tensor for name, tensor in expected.items() if "input_layernorm" not in name}
    names = ("**.mlp.**", "**.post_attention_layernorm.weight", "{lm_head,model.norm,model.embed_tokens}.weight")
    case("some", OUT, emptied(some), some, names=names)


def _cold(case: _Cases) -> None:
    import torch.distributed as dist

    folder = case.folder
    big = placed(whole_of(folder / "big"), "replicas x columns")
    for kind in ("big", "big-out"):
        for stored in (folder / kind).glob("*.safetensors"):
            drop(stored)
        dist.barrier()
        before = drive_nbytes()
        case(f"cold, {kind}", f"{folder}/{kind}", emptied(big), big)
        case.found[f"cold, {kind}"]["drive"] = drive_nbytes() - before


def _are_refused(case: _Cases) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    whole, folder, number = case.whole, case.folder, case.number
    expected = placed(whole, "replicas x columns")
    line = init_device_mesh("cpu", (NUM_MEMBERS,))

    def but(name: str, tensor: Any) -> dict[str, Any]:
        return {**emptied(expected), name: tensor}

    norm = "model.layers.0.input_layernorm.weight"
    case("partial", WIDE, but(norm, DTensor.from_local(whole[norm].clone(), line, [Partial()])))
    case("lacking", WIDE, but("model.layers.0.mlp.gate_prog.weight", whole[norm].clone()))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    case("fused", WIDE, but(fused, distribute_tensor(torch.ones(4, 4), line, [Shard(0)], src_data_rank=None)))
    case("beside", WIDE, {name: tensor for name, tensor in emptied(expected).items() if name != norm})
    case("shape", WIDE, but(norm, whole[norm][:-1].clone()))
    case("shape of one", WIDE, but(norm, whole[norm][:-1].clone()) if number == 2 else emptied(expected))
    down = "model.layers.0.mlp.down_proj.weight"
    case("narrower", WIDE, but(down, whole[down].half()))
    case("meta", WIDE, but(norm, whole[norm].to("meta")))
    fsdp1 = FullyShardedDataParallel(module_of({norm: torch.zeros(101)}), device_id=torch.device("cpu"))
    case("FSDP1", WIDE, fsdp1, names=norm)
    case("not tensors", WIDE, but(norm, 3))
    case("nothing to fill", WIDE, 7)
    both = torch.zeros(201, 33, dtype=torch.int64)
    case("overlapping", WIDE, emptied(expected) | {"lm_head.weight": both[1:], "model.embed_tokens.weight": both[:-1]})
    gates = [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (0, 1)]
    memory = torch.zeros_like(whole[gates[0]])
    case("other values for tied ones", WIDE, {name: memory.detach() for name in gates}, names="**.gate_proj.weight")
    case("another checkpoint", f"{folder}/foreign" if number == 2 else f"{folder}/wide", emptied(expected))
    case("other names", WIDE, emptied(expected), names="**.mlp.**" if number == 2 else None)
    case("another backend", f"{folder}/wide", emptied(expected), backend="direct" if number == 2 else "auto")
    trust = f"{folder}/signer.toml" if number == 2 else None
    case("trusted by one", f"{folder}/signed", emptied(expected), trust=trust)
    case("verify", WIDE, emptied(expected), verify=True)
    case("degree", WIDE, emptied(expected), tp=2)
    case("degree of one", WIDE, emptied(expected), tp=2 if number == 1 else None)
    case("rank", WIDE, emptied(expected), rank=0, tp=2)
    case("cache", WIDE, emptied(expected), cache=str(folder / "cache"))
    case("device", WIDE, emptied(expected), device="meta")
    case("bad option", WIDE, emptied(expected), threads=0 if number == 3 else None)


def _fail(case: _Cases) -> None:
    from relayout.loader.group import exchange

    number, expected = case.number, placed(case.whole, "replicas x columns")

    def fault_of(member: int, **how: Any) -> None:
        if number == member:
            case.shelf.faults.append(Fault("read", "*.safetensors", **how))

    fault_of(2, after=3, times=None, error=failure)
    case("a read fails", WIDE, emptied(expected))
    fault_of(2, after=6, times=None, error=failure)
    case("a read fails, converted", OUT, emptied(expected))

    def interrupted(done: int, total: int) -> None:
        if done > total / 4:
            raise KeyboardInterrupt

    case("interrupted", WIDE, emptied(expected), progress=interrupted if number == 1 else None)
    reserve = exchange.reserve
    if number == 3:
        exchange.reserve = _no_memory
    case("no memory", WIDE, emptied(expected))
    exchange.reserve = reserve
    case("afterwards", WIDE, emptied(expected), expected)


def _no_memory(*_: Any) -> Any:
    raise MemoryError("there is no memory for a buffer")


def _with_local(tensor: Any, local: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    if not hasattr(tensor, "to_local"):
        return local
    place = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **place)


def _strided(tensor: Any) -> Any:
    local = local_of(tensor)
    return _with_local(tensor, local.t().contiguous().t() if local.dim() == 2 else local)


def _widened(tensor: Any) -> Any:
    import torch

    local = local_of(tensor)
    return _with_local(tensor, local.float() if local.dtype == torch.bfloat16 else local)


def held_of(model: Any) -> dict[str, torch.Tensor]:
    """What this process holds of each tensor, in its own memory."""
    state = model.state_dict().items()
    return {name: (one.to_local() if hasattr(one, "to_local") else one).detach() for name, one in state}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    dense = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*dense)
