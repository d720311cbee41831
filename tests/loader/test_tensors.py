"""Whether tensors share memory, compared with sets of addresses that torch itself tells of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relayout.errors import PlanError
from relayout.loader import tensors as tensors_module
from relayout.loader.tensors import Strided, numpy_dtype, share, sharing, why_not_plain

ROOM = 512
START = 4096
"""Address of the memory."""


def of(tensor: torch.Tensor) -> Strided:
    address = START + tensor.storage_offset() * tensor.element_size()
    return Strided(address, tensor.element_size(), tensor.stride(), tuple(tensor.shape))


def offsets(tensor: torch.Tensor) -> list[int]:
    """The bytes of each element, by torch's own view of memory that holds their numbers."""
    numbers = torch.arange(ROOM)
    size = tensor.element_size()
    firsts = torch.as_strided(numbers, tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1).tolist()
    return [first * size + byte for first in firsts for byte in range(size)]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any strided tensor, overlapping or not, within the room."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int64]))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 20), min_size=len(shape), max_size=len(shape)))
    reach = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    start = draw(st.integers(0, min(60, ROOM - 1 - reach)))
    return torch.empty(ROOM, dtype=dtype).as_strided(shape, strides, start)


@given(views())
def test_a_simple_tensor_has_each_byte_once_and_ends_behind_the_last(one: torch.Tensor) -> None:
    found = offsets(one)
    assert of(one).address == START + min(found)
    assert of(one).end == START + max(found) + 1
    if of(one).is_simple:
        assert len(set(found)) == len(found)


@given(st.data())
def test_what_is_cut_permuted_and_stepped_through_of_a_dense_tensor_is_simple(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dense = torch.empty(shape, dtype=data.draw(st.sampled_from([torch.uint8, torch.float32])))
    axes = data.draw(st.permutations(range(len(shape))))
    index = tuple(slice(data.draw(st.integers(0, size - 1)), None, data.draw(st.integers(1, 3))) for size in shape)
    assert of(dense[index].permute(axes)).is_simple


@given(st.lists(views(), max_size=6))
def test_all_pairs_that_share_memory_are_found(tensors: list[torch.Tensor]) -> None:
    sets = [set(offsets(one)) for one in tensors]
    expected = [(a, b) for b in range(len(sets)) for a in range(b) if sets[a] & sets[b]]
    assert sorted(sharing([of(one) for one in tensors])) == sorted(expected)


def test_parts_of_one_large_parameter_are_told_apart_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "MAX_WORK", 8)
    columns = [Strided(START + part * 2048, 2, (6 * 1024, 1), (4096, 1024)) for part in range(6)]
    transposed = [Strided(START + part * 2048, 2, (1, 6 * 1024), (1024, 4096)) for part in range(6)]
    interleaved = [Strided(START + part * 2, 2, (2 * 2880 * 2880, 2 * 2880, 2), (32, 2880, 2880)) for part in range(2)]
    for parts in (columns, transposed, interleaved):
        assert list(sharing(parts)) == []
    overlapping = [columns[0], Strided(columns[1].address - 2, 2, (6 * 1024, 1), (4096, 1024))]
    assert list(sharing(overlapping)) == [(0, 1)]


def test_tensors_that_lie_side_by_side_need_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "share", lambda one, other: pytest.fail("compared"))
    assert list(sharing([Strided(number * 64, 2, (8, 1), (4, 8)) for number in (3, 0, 2, 1, 5, 4)])) == []


def test_what_takes_too_long_counts_as_shared() -> None:
    """An example of numpy's: without a limit it takes a minute, and they share none."""
    one = Strided(4096, 1, (36674, 61119, 85569), (1049, 1049, 1049))
    assert share(one, Strided(4096 + 64023025, 1, (12223, 12224, 1), (1049, 1049, 1)))


@pytest.mark.parametrize(
    "plain", [torch.ones(3), torch.empty(0), torch.empty(0, 4), torch.tensor(1.0), torch.ones(2, 3).t()]
)
def test_a_tensor_with_memory_of_its_own_is_plain_also_without_elements(plain: torch.Tensor) -> None:
    assert why_not_plain(plain) is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (5, "a int"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor, expected a dense one"),
        (torch.ones(3).to_sparse(), "torch.sparse_coo, expected torch.strided: call to_dense()"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "torch.qint8, expected a plain dtype"),
        (torch.empty(3, device="meta"), "on meta, expected cpu or another device with memory"),
        (torch.empty(0, device="meta"), "on meta, expected cpu or another device with memory"),
        (torch.nn.LazyLinear(3).weight, "which has no shape yet"),
    ],
)
def test_what_has_no_plain_memory_is_told_with_the_reason(other: object, says: str) -> None:
    assert says in (why_not_plain(other) or "plain")


def test_a_dtype_that_numpy_lacks_is_named() -> None:
    assert numpy_dtype("norm", "F16") == np.float16
    with pytest.raises(PlanError, match=r"^tensor 'norm': numpy has no dtype for F4: import ml_dtypes") as caught:
        numpy_dtype("norm", "F4")
    assert caught.value.code == "unsupported"
