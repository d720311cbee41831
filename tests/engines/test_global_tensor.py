"""The global tensor answers as the whole tensor would, and tells when it had to read it."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_operations import Operation, copies, views

from relayout.core.slices import Slice
from relayout.engines.global_tensor import GlobalTensor, Usage
from relayout.engines.rank_weights import EngineOptions, RankWeights
from relayout.errors import PlanError
from relayout.loader.sources.rank import TensorColumns


@dataclass
class Case:
    """A global tensor, the whole tensor that it stands for, and which elements of that its slice holds."""

    whole: torch.Tensor
    mask: torch.Tensor
    local: torch.Tensor
    tensor: torch.Tensor
    usage: Usage


def make(
    shape: Sequence[int],
    axis: int,
    ranges: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    strict: bool = False,
) -> Case:
    whole = torch.arange(1, math.prod(shape) + 1).reshape(tuple(shape)).to(dtype)
    local = torch.cat([whole.narrow(axis, *one) for one in ranges], axis) if ranges else whole.narrow(axis, 0, 0)
    mask = torch.zeros(tuple(shape), dtype=torch.bool)
    for one in ranges:
        mask.narrow(axis, *one).fill_(True)
    usage = Usage(strict=strict)
    source = whole.clone()
    local = local.clone(memory_format=torch.contiguous_format)
    tensor = GlobalTensor.of("w", local, shape, axis, ranges, reader(source), usage)
    return Case(whole, mask, local, tensor, usage)


def reader(whole: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """What reads a part of the whole tensor."""
    return lambda index: whole[index].clone()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[int, int]]]:
    """A shape, an axis, and up to three ranges along it, that do not overlap."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    borders = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=2, max_size=6)))
    ranges = [(start, end - start) for start, end in zip(borders[::2], borders[1::2], strict=False)]
    return shape, axis, ranges


ELEMENTWISE: list[Operation] = [
    ("double()", lambda t: t.double()),
    ("+ 1", lambda t: t + 1),
    ("neg", lambda t: -t),
    ("exp", lambda t: (t * 0.01).exp()),
    ("== 3", lambda t: t == 3),
    ("to(float16)", lambda t: t.to(torch.float16)),
]


def values(tensor: torch.Tensor) -> torch.Tensor:
    """As a plain tensor; if that needs elements that are not held, all are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@given(data=st.data(), cut=cuts(), strict=st.booleans())
def test_any_sequence_of_views_and_copies_is_that_of_the_whole_tensor(
    data: st.DataObject, cut: tuple[list[int], int, list[tuple[int, int]]], strict: bool
) -> None:
    case = make(*cut, strict=strict)
    whole, mask, tensor = case.whole, case.mask, case.tensor
    is_moved = True
    for _ in range(data.draw(st.integers(1, 5))):
        more = [] if strict else [st.sampled_from(ELEMENTWISE)]
        operation = data.draw(st.one_of(views(whole.shape), views(whole.shape), copies(whole.shape), *more))
        _, function = operation
        try:
            whole = function(whole)
        except (RuntimeError, IndexError):  # torch refuses it.
            continue
        before = case.usage.count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = function(tensor)
        if operation in ELEMENTWISE:
            is_moved = False
        else:
            mask = function(mask)
            assert case.usage.count == before or not is_moved, "views and copies need no whole tensor"
        assert (tensor.shape, tensor.dtype, tensor.device) == (whole.shape, whole.dtype, whole.device)
        if type(tensor) is torch.Tensor and case.usage.count == 0:
            assert mask.all()
        if mask.all() and len(cut[2]) == 1 and is_moved:
            assert type(tensor) is torch.Tensor, "what is held is answered by plain views"
    if strict and not mask.all():
        with pytest.raises(PlanError, match="'w': copy_ needs elements that this rank's slice does not hold"):
            values(tensor)
    elif not strict or type(tensor) is torch.Tensor:
        assert torch.equal(values(tensor), whole)
    if strict:
        assert case.usage.count == 0


@given(data=st.data(), cut=cuts())
def test_what_is_written_to_views_of_the_slice_is_seen_by_others(
    data: st.DataObject, cut: tuple[list[int], int, list[tuple[int, int]]]
) -> None:
    case = make(*cut)
    whole, tensor = case.whole, case.tensor
    for value in range(data.draw(st.integers(1, 3))):
        name, function = data.draw(views(whole.shape).filter(lambda operation: not operation[0].startswith("expand")))
        try:
            view = function(whole)
        except (RuntimeError, IndexError):
            continue
        written = function(tensor)
        if type(written) is torch.Tensor:
            view.fill_(-value)
            written.fill_(-value)
        else:
            with pytest.raises(
                PlanError, match=r"'w'.*: fill_ writes to elements that this rank's slice does not hold"
            ):
                written.fill_(-value)
    assert torch.equal(values(tensor), whole), name


def test_what_is_written_to_elements_that_were_moved_is_seen_in_all_of_them() -> None:
    case = make([4, 6], 0, [(2, 2)])
    moved, expected = case.tensor.flip(0), case.whole.flip(0)
    moved[:2].fill_(-1)
    expected[:2] = -1
    assert torch.equal(values(moved), expected)


def test_views_of_the_slice_share_its_memory() -> None:
    case = make([4, 6], 0, [(2, 2)], strict=True)
    for view in (
        case.tensor.narrow(0, 2, 2),
        case.tensor[2:],
        case.tensor.chunk(2)[1],
        case.tensor.t()[:, 2:].t(),
        case.tensor.view(2, 2, 6)[1],
    ):
        assert type(view) is torch.Tensor
        assert view.data_ptr() == case.local.data_ptr()
        assert torch.equal(view, case.whole[2:])


def test_views_of_views_and_views_with_a_step_are_those_of_the_whole_tensor() -> None:
    case = make([4, 6], 0, [(2, 2)], strict=True)
    assert torch.equal(case.tensor[:, 3:].narrow(0, 2, 2), case.whole[2:, 3:])
    assert torch.equal(case.tensor[2:4:2], case.whole[2:4:2])


def test_dtype_views_of_the_slice_share_its_memory() -> None:
    case = make([4, 6], 1, [(2, 2)], dtype=torch.int16, strict=True)
    whole = case.whole
    for dtype, start in ((torch.uint8, 4), (torch.bfloat16, 2), (torch.int32, 1)):
        count = 2 * 2 // dtype.itemsize
        view = case.tensor.view(dtype).narrow(1, start, count)
        assert view.data_ptr() == case.local.data_ptr()
        assert torch.equal(view.view(torch.uint8), whole.view(dtype).narrow(1, start, count).view(torch.uint8))


def test_a_dtype_view_whose_border_is_inside_the_slice_is_of_the_whole_tensor() -> None:
    case = make([4, 6], 1, [(1, 3)], dtype=torch.int16)
    with pytest.warns(UserWarning, match="tensor 'w': view needs elements"):
        view = case.tensor.view(torch.int32)
    assert torch.equal(view, case.whole.view(torch.int32))


def test_elementwise_operations_are_done_on_the_slice() -> None:
    case = make([4, 6], 0, [(2, 2)], strict=True)
    for name, function in ELEMENTWISE:
        done = function(case.tensor)
        assert isinstance(done, GlobalTensor), name
        assert torch.equal(done[2:], function(case.whole)[2:]), name


def test_an_operation_that_needs_more_reads_the_whole_tensor_once_and_warns_once() -> None:
    case = make([4, 6], 0, [(0, 2)])
    other = GlobalTensor.of("v", case.local, [4, 6], 0, [(0, 2)], reader(case.whole), case.usage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert case.tensor.sum() == case.whole.sum()
        assert case.tensor[1:].max() == case.whole.max()
        assert other.sum() == case.whole.sum()
    assert [str(one.message).partition(" that")[0] for one in caught] == ["tensor 'w': sum needs elements"]
    assert case.usage.count == 2
    assert case.usage.nbytes == 2 * case.whole.nbytes


def test_of_what_lies_beside_the_slice_only_the_part_that_is_needed_is_read() -> None:
    for axis, ranges in ((0, [(2, 2)]), (1, [(0, 3)]), (0, [])):
        case = make([8, 6], axis, ranges)
        with warnings.catch_warnings(action="ignore"):
            part = case.tensor.narrow(axis, 4, 2)
            assert type(part) is GlobalTensor
            assert torch.equal(torch.empty(part.shape).copy_(part), case.whole.narrow(axis, 4, 2))
            assert case.usage.nbytes == case.whole.narrow(axis, 4, 2).nbytes
            assert torch.equal(case.tensor[..., 5].clone(), case.whole[..., 5])
            assert case.usage.whole == ({"w"} if axis == 0 and ranges else set())


def test_what_is_expected_to_be_read_is_counted_and_not_warned_of() -> None:
    whole = torch.arange(24).reshape(4, 6)
    usage = Usage(is_expected=True)
    tensor = GlobalTensor.of("w", whole[:0], [4, 6], 0, (), reader(whole), usage)
    with warnings.catch_warnings(action="error"):
        assert torch.equal(torch.empty_like(whole).copy_(tensor), whole)
    assert (usage.count, usage.nbytes, usage.whole) == (1, whole.nbytes, {"w"})


def test_threads_that_need_the_whole_tensor_wait_for_one_read() -> None:
    case = make([4, 6], 0, [(0, 2)])
    is_free: list[bool] = []

    def read(index: Any) -> torch.Tensor:
        other = threading.Thread(target=lambda: is_free.append(case.usage.lock.acquire(blocking=False)))
        other.start()
        other.join()
        return case.whole[index].clone()

    tensor = GlobalTensor.of("w", case.local, [4, 6], 0, [(0, 2)], read, case.usage)
    with pytest.warns(UserWarning, match="tensor 'w'"):
        assert tensor.sum() == case.whole.sum()
    assert is_free == [False]


def test_new_tensors_of_its_shape_need_no_elements() -> None:
    case = make([4, 6], 0, [(0, 2)], strict=True)
    for made in (
        torch.zeros_like(case.tensor),
        torch.empty_like(case.tensor).zero_(),
        case.tensor.new_zeros(4, 6),
    ):
        assert type(made) is torch.Tensor
        assert made.device == case.local.device
        assert torch.equal(made, torch.zeros(4, 6))
    assert torch.ones_like(case.tensor, dtype=torch.bool, device="meta").is_meta
    assert not case.tensor.is_pinned()


def test_it_has_no_address_and_cannot_be_moved() -> None:
    case = make([4, 6], 0, [(0, 2)])
    with pytest.raises(PlanError, match="has no address"):
        case.tensor.data_ptr()
    with pytest.raises(PlanError, match=r"'w'.*: t_ writes to elements"):
        case.tensor.t_()
    with pytest.raises(PlanError, match=r"'w'.*: add writes to elements"):
        torch.add(case.whole, 1, out=case.tensor)


def test_tolist_and_numpy_have_the_whole_tensor() -> None:
    case = make([4, 6], 0, [(0, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert case.tensor.tolist() == case.whole.tolist()
        assert case.tensor.numpy().tolist() == case.whole.tolist()
        case.tensor.numpy().fill(-1)
        assert case.tensor.tolist() == case.whole.tolist(), "the array is not this tensor's memory"


def test_a_slice_of_another_shape_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tensor 'w': slice has shape \[3, 6\], expected \[2, 6\]"):
        GlobalTensor.of("w", torch.zeros(3, 6), [4, 6], 0, [(0, 2)], lambda index: torch.zeros(4, 6), Usage())


@pytest.mark.parametrize(("shape", "dtype"), [((3, 6), torch.float32), ((4, 6), torch.float16)])
def test_a_whole_tensor_of_another_shape_or_dtype_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    read = torch.zeros(shape, dtype=dtype)
    tensor = GlobalTensor.of("w", torch.zeros(2, 6), [4, 6], 0, [(0, 2)], lambda index: read, Usage())
    says = rf"tensor 'w': read as \[{shape[0]}, 6\] {dtype}, expected \[4, 6\]"
    with pytest.warns(UserWarning, match="'w'"), pytest.raises(PlanError, match=says):
        tensor.sum()


def test_a_tensor_that_the_rank_does_not_hold_is_read_when_it_is_wanted() -> None:
    case = make([4, 6], 0, [])
    assert case.tensor.shape == (4, 6)
    assert isinstance(case.tensor, GlobalTensor)
    assert case.usage.count == 0
    with pytest.warns(UserWarning, match="tensor 'w'"):
        assert torch.equal(torch.zeros(4, 6).copy_(case.tensor), case.whole)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rank", range(4))
def test_a_loader_that_pads_the_last_ranks_with_zeros_reads_no_more_than_the_slice(axis: int, rank: int) -> None:
    """So vLLM 0.33 loads shared experts with fewer blocks than ranks (`_pad_shared_expert_weight`)."""
    case = make([6, 6], axis, [(2 * rank, 2)] if rank < 3 else [], strict=True)
    zeros = [2 if along == axis else 6 for along in (0, 1)]
    padded = torch.cat([case.tensor, case.tensor.new_zeros(zeros)], axis)
    found = torch.ones(zeros).copy_(padded.narrow(axis, 2 * rank, 2))
    assert torch.equal(found, torch.cat([case.whole, torch.zeros(zeros)], axis).narrow(axis, 2 * rank, 2))


@pytest.mark.parametrize(("axis", "ranges"), [(0, ((2, 2),)), (1, ((4, 4),))])
def test_pairs_of_a_packed_type_are_counted_along_the_last_axis_only(axis: int, ranges: Any) -> None:
    part = Slice.along(axis, ranges)
    columns = TensorColumns(["w"], ["F4"], [part.shape((4, 8))], parts=[part], source_shapes=[(4, 8)])
    packed = torch.arange(16, dtype=torch.uint8).view(4, 4)
    held = packed[2:] if axis == 0 else packed[:, 2:]
    given = held.contiguous().view(torch.float4_e2m1fn_x2)
    [(name, made)] = RankWeights("none", 0, 2, EngineOptions(strict=True)).deliver()._slices(columns, [("w", given)])
    assert (name, made.shape) == ("w", (4, 4))
    assert torch.equal(made.narrow(axis, 2, 2).view(torch.uint8), held)


def test_its_text_says_what_it_holds() -> None:
    assert repr(make([4, 6], 0, [(2, 2)]).tensor) == (
        "GlobalTensor('w', axis 0: [(2, 2)], [4, 6] of [4, 6], torch.float32)"
    )


def test_it_is_noted_which_tensors_have_been_used() -> None:
    for use in (
        lambda t: t.narrow(0, 2, 1),
        lambda t: t.t(),
        lambda t: torch.cat([torch.zeros(1, 6), t]),
        lambda t: -t,
    ):
        case = make([4, 6], 0, [(2, 2)], strict=True)
        case.tensor.shape, case.tensor.dtype, case.tensor.device, repr(case.tensor)
        assert case.usage.used == set()
        use(case.tensor)
        assert case.usage.used == {"w"}


def test_threads_that_need_whole_tensors_first_open_the_checkpoint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery, opened = RankWeights("folder", 0, 2, EngineOptions()).deliver(), []
    monkeypatch.setattr("relayout.engines.rank_weights.is_converted", lambda store: True)
    monkeypatch.setattr("relayout.engines.rank_weights.find_input", lambda path: None)

    def slow(path: str, deltas: object) -> object:
        time.sleep(0.1)
        opened.append(object())
        return opened[-1]

    monkeypatch.setattr("relayout.loader.view.safe_open", slow)
    with ThreadPoolExecutor(2) as threads:
        seen = list(threads.map(lambda _: delivery._whole, range(2)))
    assert seen == opened * 2
