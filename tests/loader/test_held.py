"""What a process holds of a tensor: the parts of DTensors are those that PyTorch cuts, and bytes those of `tobytes`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from relayout.core.extents import Extent
from relayout.core.slices import WHOLE, Cut, TensorHead
from relayout.errors import PlanError
from relayout.loader.held import HeldTensor, _as_numbers, part_of, unwrapped
from relayout.train.group_save import MemberParts
from relayout.train.save import HeldTensors


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), max_size=3))
def test_parts_are_those_that_torch_cuts(length: int, axes: list[tuple[int, int, int]]) -> None:
    expected, mesh, coordinate = torch.arange(length), [], []
    placements = [Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor) for _, _, factor in axes]
    for (count, index, _), placement in zip(axes, placements, strict=True):
        mesh.append(count)
        coordinate.append(index % count)
        expected = placement._split_tensor(expected, count, with_padding=False)[0][index % count]
    part = part_of("x", (length,), mesh, coordinate, placements)
    ranges = part.ranges_along(0)
    found = range(length) if ranges is None else [n for start, size in ranges for n in range(start, start + size)]
    assert list(found) == expected.tolist()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", range(4))
def test_parts_of_fp4_are_counted_in_numbers(axis: int, index: int) -> None:
    packed = torch.arange(15).reshape(3, 5)
    part = part_of("x", (3, 5), [4], [index], [Shard(axis)])
    part, shape = _as_numbers("x", part, (3, 5))
    assert shape == (3, 10)
    numbers = torch.arange(30).reshape(3, 10)  # Those of element n are 2n and 2n + 1.
    local = Shard(axis)._split_tensor(packed, 4, with_padding=False)[0][index]
    ranges = part.ranges_along(axis)
    along = torch.tensor([n for start, size in ranges or () for n in range(start, start + size)], dtype=torch.int64)
    expected = torch.stack([2 * local, 2 * local + 1], -1).reshape(part.shape(shape))
    assert torch.equal(numbers.index_select(axis, along), expected)


@given(st.permutations(range(3)), st.integers(0, 119), st.integers(1, 120), st.sampled_from(["int32", "uint8"]))
def test_bytes_of_what_is_not_contiguous(order: list[int], offset: int, nbytes: int, dtype: str) -> None:
    tensor = torch.arange(30, dtype=getattr(torch, dtype)).reshape(2, 3, 5).permute(order)
    dense = tensor.numpy().tobytes()
    offset %= len(dense)
    extent = Extent(offset, min(nbytes, len(dense) - offset))
    held = HeldTensor(TensorHead("x", {"int32": "I32", "uint8": "U8"}[dtype], tuple(tensor.shape)), WHOLE, tensor)
    assert held.bytes_of(extent).tobytes() == dense[extent.offset : extent.end]


def test_only_the_same_elements_of_one_memory_are_the_same() -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    upper, lower, again = (HeldTensor.of("x", part).memory for part in (whole[:2], whole[2:], whole.detach()[:2]))
    assert upper == again
    assert upper != lower
    assert upper != HeldTensor.of("x", whole[:2].t()).memory


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    place = tmp_path_factory.mktemp("meet") / "file"
    torch.distributed.init_process_group("gloo", f"file://{place}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


KINDS = [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float4_e2m1fn_x2]
SIGNS = {"": lambda z: z, "conj": torch.conj, "imag": lambda z: z.imag, "neg": lambda z: z.conj().imag}
AXES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=3)
VIEWS = st.tuples(st.sampled_from([*KINDS, *SIGNS]), AXES, st.integers(0, 3), st.booleans())


def viewed(memory: torch.Tensor, kind: torch.dtype | str, axes: list[tuple[int, int]], start: int) -> torch.Tensor:
    """Elements of a memory, any of which may be seen several times."""
    size, strides = [size for size, _ in axes], [stride for _, stride in axes]
    base = memory.view(torch.complex64 if isinstance(kind, str) else kind)
    view = base.as_strided(size, strides, start)
    return SIGNS[kind](view) if isinstance(kind, str) else view


@given(st.lists(VIEWS, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_copies_on_the_host_have_the_bytes_that_safetensors_saves(
    mesh: DeviceMesh, views: list[tuple[Any, list[tuple[int, int]], int, bool]], random: Random
) -> None:
    memory = torch.frombuffer(bytearray(random.randbytes(256)), dtype=torch.uint8)
    tensors, held = {}, {}
    for number, (kind, axes, start, is_distributed) in enumerate(views):
        tensor, name = viewed(memory, kind, axes, start), str(number)
        given = (
            DTensor.from_local(tensor, mesh, [Replicate()]) if is_distributed and not isinstance(kind, str) else tensor
        )
        held[name] = HeldTensor.of(name, given)
        tensors[name] = tensor.resolve_conj().resolve_neg().contiguous().clone()
    blob = save(tensors)
    length = int.from_bytes(blob[:8], "little")
    copied = HeldTensors(held, {}).on_host().tensors
    for name, entry in json.loads(blob[8 : 8 + length]).items():
        start, end = entry["data_offsets"]
        for one in (held[name], copied[name]):
            assert (one.head.dtype, list(one.head.shape)) == (entry["dtype"], entry["shape"])
            dense = blob[8 + length + start : 8 + length + end]
            low, high = sorted(random.randint(0, len(dense)) for _ in range(2))
            for extent in (Extent(0, len(dense)), Extent(low, high - low)):
                assert one.bytes_of(extent).tobytes() == dense[extent.offset : extent.end]


def test_only_the_same_view_of_one_memory_is_the_same() -> None:
    z = torch.arange(6.0).reshape(3, 2)
    pair, imag = torch.view_as_complex(z), torch.view_as_complex(z).imag
    different = [z, z.t(), z[:2], z[1:], z.expand(2, 3, 2), z.view(torch.int32), pair, pair.conj(), imag]
    different += [torch.view_as_complex(z).conj().imag, z.clone(), torch.empty(0), torch.empty(0)]
    assert len({HeldTensor.of("x", one).memory for one in different}) == len(different)
    for one in different:
        assert HeldTensor.of("x", one).memory == HeldTensor.of("y", one.detach()).memory
    assert HeldTensor.of("x", z, torch.bfloat16).memory != HeldTensor.of("x", z).memory


PLACEMENTS = st.sampled_from([Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)])


def local_of(tensor: torch.Tensor, placements: list[Placement], mesh: list[int], at: tuple[int, ...]) -> torch.Tensor:
    """What PyTorch gives a process of a mesh."""
    for placement, count, index in zip(placements, mesh, at, strict=True):
        if not isinstance(placement, Replicate):
            tensor = placement._split_tensor(tensor, count, with_padding=False)[0][index]  # type: ignore[attr-defined]
    return tensor.clone()


@given(st.lists(st.tuples(st.integers(1, 3), PLACEMENTS), max_size=3), st.booleans(), st.data())
def test_replicas_that_differ_in_one_element_are_found_and_named(
    axes: list[tuple[int, Placement]], is_strided: bool, data: st.DataObject
) -> None:
    mesh, placements = [count for count, _ in axes], [placement for _, placement in axes]
    whole = torch.arange(30, dtype=torch.float32).reshape(6, 5)
    members = list(product(*map(range, mesh)))
    parts = [part_of("x", (6, 5), mesh, at, placements) for at in members]
    locals_ = [local_of(whole, placements, mesh, at) for at in members]
    head = TensorHead("x", "F32", (6, 5))
    heads = [TensorHead("y", "F32", (0,)), head]
    cuts = [Cut((WHOLE,) * len(parts)).tensor("F32", (0,)), Cut(tuple(parts)).tensor("F32", (6, 5))]
    holders = MemberParts(heads, cuts)

    def check() -> None:
        given = [local.t().contiguous().t() if is_strided else local for local in locals_]
        held = [HeldTensor(head, part, local) for part, local in zip(parts, given, strict=True)]
        holders.check_replicas([holders.digests(member, {1: one}, 2) for member, one in enumerate(held)])

    check()
    changed = data.draw(st.sampled_from([m for m, local in enumerate(locals_) if local.numel()]))
    element = data.draw(st.integers(0, locals_[changed].numel() - 1))
    locals_[changed].view(-1)[element] = -1
    others = [m for m, part in enumerate(parts) if part == parts[changed] and m != changed]
    if others:
        with pytest.raises(PlanError, match=f"(members|and) {changed} .*hold different values") as caught:
            check()
        assert caught.value.tensor == "x"
    else:
        check()


def test_names_of_wrapped_modules_are_those_of_torchs_checkpoints() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.checkpoint.state_dict import _get_fqns

    layers = [torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2)), checkpoint_wrapper(torch.nn.Linear(2, 2))]
    layers.append(checkpoint_wrapper(torch.compile(torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2))))))
    plain = torch.nn.Sequential(torch.nn.ModuleDict({"module": torch.nn.ModuleList(layers)}))
    wrapped = torch.compile(plain)
    model, name_of = unwrapped(wrapped)
    assert model is plain
    names = [name for name, _ in wrapped.named_parameters()]
    assert len(names) == 8
    for name in names:
        found = name_of(name.removeprefix("_orig_mod."))
        assert found.startswith("0.module.")
        if ".3." not in name:  # torch itself leaves `_orig_mod` where activation checkpointing wraps a compiled layer.
            assert {found} == _get_fqns(wrapped, name)
    assert [name_of(name) for name in model.state_dict()] == [
        f"0.module.{rest}.{kind}" for rest in ("0", "1", "2", "3.0") for kind in ("weight", "bias")
    ]


def test_a_model_inside_ddp_is_itself(mesh: DeviceMesh) -> None:
    from torch.nn.parallel import DistributedDataParallel

    inner = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    outer = torch.nn.ModuleDict({"part": DistributedDataParallel(inner)})
    for wrapped in (DistributedDataParallel(inner), torch.compile(DistributedDataParallel(torch.compile(inner)))):
        model, name_of = unwrapped(wrapped)
        assert model is inner
        assert list(map(name_of, model.state_dict())) == ["module.weight", "module.bias"]
    model, name_of = unwrapped(outer)
    assert model is outer
    assert list(map(name_of, model.state_dict())) == ["part.module.weight", "part.module.bias"]


def test_two_numbers_in_a_byte_need_a_dim() -> None:
    two = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert HeldTensor.of("w", two).head.shape == (8,)
    with pytest.raises(
        PlanError, match=r"^tensor 'w': F4 without a dim, expected an even number of elements$"
    ) as caught:
        HeldTensor.of("w", two[0])
    assert caught.value.code == "unsupported"
