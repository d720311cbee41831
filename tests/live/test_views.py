"""relayout.live.views against torch: what torch copies, and where elements that change must change after that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relayout.core.aten import geometry_of
from relayout.live.views import View, view_of


@st.composite
def viewed(draw: st.DrawFn, shape: list[int]) -> Any:
    """A function that makes a view of a tensor of this shape: as loaders cut, turn and split."""
    steps: list[Any] = []
    tensor = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else 0
        size = tensor.shape[axis] if tensor.dim() else 0
        kind = draw(st.sampled_from(["narrow", "select", "transpose", "chunk", "split", "step"])) if size else "none"
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            step: Any = ("narrow", axis, start, draw(st.integers(1, size - start)))
        elif kind == "select":
            step = ("select", axis, draw(st.integers(0, size - 1)))
        elif kind == "transpose":
            step = ("transpose", axis, draw(st.integers(0, tensor.dim() - 1)))
        elif kind == "chunk" and size % 2 == 0:
            step = ("narrow", axis, size // 2 * draw(st.integers(0, 1)), size // 2)
        elif kind == "split" and size % 2 == 0:
            step = ("unflatten", axis, (2, size // 2))
        elif kind == "step":
            step = ("__getitem__", (slice(None),) * axis + (slice(None, None, 2),))
        else:
            continue
        steps.append(step)
        tensor = getattr(tensor, step[0])(*step[1:])

    def view(of: torch.Tensor) -> torch.Tensor:
        for name, *arguments in steps:
            of = getattr(of, name)(*arguments)
        return of

    return view


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A slice, a view of it, memory, and a view of that of the same size, in another layout."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int16).view(shape)
    source = draw(viewed(shape))(whole)
    order = draw(st.permutations(range(source.dim())))
    # Memory with room around and between the elements.
    gaps = [draw(st.integers(0, 2)) for _ in order]
    roomy = [source.shape[axis] + gap for axis, gap in zip(order, gaps, strict=True)]
    offset = draw(st.integers(0, 5))
    memory = torch.full((offset + int(np.prod(roomy)) + 3,), -1, dtype=torch.int16)
    target = memory[offset : offset + int(np.prod(roomy))].view(roomy)
    for axis, wanted in enumerate(order):
        target = target.narrow(axis, draw(st.integers(0, gaps[axis])), source.shape[wanted])
    back = [order.index(axis) for axis in range(source.dim())]
    return whole, source, memory, target.permute(back)


@given(copied=copies(), chosen=st.data())
def test_elements_that_change_are_found_where_torch_copied_them(copied: Any, chosen: Any) -> None:
    whole, source, memory, target = copied
    target.copy_(source)
    view = view_of(7, geometry_of(source), geometry_of(target), 2)
    assert view is not None
    assert view.memory == 7
    assert view.num_elements == source.numel()
    held = sorted(source.reshape(-1).tolist())
    assert (view.source, view.end) == (held[0], held[-1] + 1)

    elements = np.array(sorted(chosen.draw(st.sets(st.integers(0, whole.numel() - 1)))), np.int64)
    has, indices = view.indices(elements)
    expected = memory.clone()
    whole.view(-1)[torch.from_numpy(elements)] += 1000
    target.copy_(source)
    expected[torch.from_numpy(indices)] += 1000
    assert torch.equal(memory, expected)
    assert set(elements[has].tolist()) == set(elements.tolist()) & set(held)


@given(copied=copies())
def test_a_view_says_what_torch_reads_and_writes(copied: Any) -> None:
    whole, source, memory, target = copied
    view = view_of(0, geometry_of(source), geometry_of(target), 2)
    assert view is not None
    memory.as_strided(*view.of_memory).copy_(whole.view(-1).as_strided(*view.of_slice))
    assert torch.equal(target, source)
    assert (memory != -1).sum() == source.numel()
    indices = [view.place(number) for number in range(view.num_elements)]
    assert memory[indices].tolist() == sorted(source.reshape(-1).tolist())
    assert view.target_end == max(indices) + 1


def test_layers_that_are_alike_share_their_axes() -> None:
    first, second = (view_of(0, ((4, 8), (8, 1), 0), ((4, 8), (16, 1), at), 2) for at in (0, 8))
    assert first is not None
    assert second is not None
    assert first.axes is second.axes


def test_a_view_of_rows_is_one_run() -> None:
    assert view_of(1, ((4, 8), (8, 1), 16), ((4, 8), (8, 1), 64), 4) == View(1, ((32, 1, 1),), 16, 64, 4)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.empty(1, 3).expand(2, 3), torch.empty(2, 3)),
        (torch.empty(2, 3), torch.empty(1, 3).expand(2, 3)),
        (torch.empty(6).as_strided((3, 3), (1, 1)), torch.empty(3, 3)),
        (torch.empty(3, 3), torch.empty(6).as_strided((3, 3), (1, 1))),
        (torch.empty(0, 3), torch.empty(0, 3)),
    ],
    ids=["one for many", "many into one", "windows", "into windows", "nothing"],
)
def test_there_is_no_view_where_elements_are_not_told_apart(source: torch.Tensor, target: torch.Tensor) -> None:
    assert view_of(0, geometry_of(source), geometry_of(target), 4) is None
