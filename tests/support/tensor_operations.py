"""Operations on tensors that return views, or move elements: hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

Operation = tuple[str, Callable[[torch.Tensor], Any]]


@st.composite
def views(draw: st.DrawFn, shape: Sequence[int]) -> Operation:
    """An operation that returns views of a tensor of that shape."""
    if not shape:
        return "unsqueeze(0)", lambda t: t.unsqueeze(0)
    axis = draw(st.integers(0, len(shape) - 1))
    signed = axis - len(shape) if draw(st.booleans()) else axis
    dim = shape[axis]
    start = draw(st.integers(0, dim))
    length = draw(st.integers(0, dim - start))
    order = draw(st.permutations(range(len(shape))))
    kinds: list[Operation] = [
        (f"narrow({signed}, {start}, {length})", lambda t: t.narrow(signed, start, length)),
        (f"permute({order})", lambda t: t.permute(tuple(order))),
        (f"transpose({axis}, -1)", lambda t: t.transpose(axis, -1)),
        (f"unsqueeze({axis})", lambda t: t.unsqueeze(axis)),
        (f"unflatten({axis})", lambda t: t.unflatten(axis, (1, dim))),
        ("squeeze()", lambda t: t.squeeze()),
        ("[...]", lambda t: t[...]),
        ("detach()", lambda t: t.detach()),
        ("data", lambda t: t.data),
        (f"[{start}:]", lambda t: t[start:]),
        (f"[..., ::2] of {len(shape)}", lambda t: t[..., ::2]),
        ("view(shape)", lambda t: t.view(t.shape)),
        ("view(-1)", lambda t: t.view(-1)),
        (f"[:, ..., {start}:{start + length}]", lambda t: t[(*[slice(None)] * axis, slice(start, start + length))]),
        (f"[{start}:9, 1:]", lambda t: t[start:9, 1:]),
    ]
    if dim:
        index = draw(st.integers(-dim, dim - 1))
        count = draw(st.integers(1, dim))
        kinds += [
            (f"select({axis}, {index})", lambda t: t.select(axis, index)),
            (f"chunk({count}, {axis})[-1]", lambda t: t.chunk(count, axis)[-1]),
            (f"split({count}, {axis})[0]", lambda t: t.split(count, axis)[0]),
            (f"split sizes [{start}, rest]", lambda t: t.split([start, dim - start], axis)[1]),
            (f"unbind({axis})[{index}]", lambda t: t.unbind(axis)[index]),
            (f"tensor_split({count}, {axis})[0]", lambda t: t.tensor_split(count, axis)[0]),
        ]
    if dim and dim % 2 == 0:
        kinds.append((f"unflatten({axis}) in halves", lambda t: t.unflatten(axis, (2, dim // 2))))
    if len(shape) == 2:
        kinds += [("t()", lambda t: t.t()), ("T", lambda t: t.T)]
    if 0 not in shape:
        kinds.append(("expand(2, ...)", lambda t: t.expand(2, *t.shape)))
    return draw(st.sampled_from(kinds))


@st.composite
def copies(draw: st.DrawFn, shape: Sequence[int]) -> Operation:
    """An operation that returns new memory, in which an element is one of the tensor's."""
    axis = draw(st.integers(-len(shape), max(0, len(shape) - 1)))
    kinds: list[Operation] = [
        ("clone()", lambda t: t.clone()),
        ("contiguous()", lambda t: t.contiguous()),
        ("reshape(-1)", lambda t: t.reshape(-1)),
        ("flatten()", lambda t: t.flatten()),
    ]
    if shape and 0 not in shape:
        kinds += [
            (f"cat twice along {axis}", lambda t: torch.cat([t, t], axis)),
            (f"stack of itself along {axis}", lambda t: torch.stack([t, t], axis)),
            (f"flip({axis})", lambda t: t.flip(axis)),
            (f"repeat_interleave(2, {axis})", lambda t: t.repeat_interleave(2, axis)),
            (f"roll(1, {axis})", lambda t: t.roll(1, axis)),
            ("[[0, -1]]", lambda t: t[[0, -1]]),
            (f"index_select({axis}, 0)", lambda t: t.index_select(axis, torch.tensor([0]))),
        ]
    return draw(st.sampled_from(kinds))
