"""The memory of torch tensors: views of an arena, and tensors that share memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relayout.core.slices import BITS, TORCH_NAMES
from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch

    from relayout.loader.sources.rank import TensorColumns

MAX_WORK = 100_000
"""Upper bound of the work of one comparison, in numpy's units. Tensors that need more count as sharing memory."""


def check_mode() -> None:
    """Raise PlanError where torch creates tensors without memory.

    Raises:
        PlanError: FakeTensorMode is on, in this thread.
    """
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(sys.modules["torch"].empty(0, device="cpu"), fake.FakeTensor):
        raise PlanError("under torch's FakeTensorMode tensors have no memory to load into", code="unsupported")


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the name of a torch dtype in file headers; None if safetensors does not have it."""
    name = str(dtype).removeprefix("torch.")
    return next((known for known, torch_name in TORCH_NAMES.items() if torch_name == name), None)


def torch_dtype(name: str, dtype: str) -> torch.dtype:
    """Return torch's dtype for a safetensors dtype; `name`, of the tensor, is for the error message."""
    import torch

    torch_type = getattr(torch, TORCH_NAMES.get(dtype, ""), None)
    if torch_type is None:
        raise PlanError(f"torch {torch.__version__} has no dtype for {dtype}", tensor=name, code="unsupported")
    assert isinstance(torch_type, torch.dtype)
    return torch_type


def numpy_dtype(name: str, dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for a safetensors dtype: a built-in one, or one that `ml_dtypes` has registered."""
    try:
        return np.dtype(TORCH_NAMES.get(dtype, ""))
    except TypeError:
        what = f"numpy has no dtype for {dtype}: import ml_dtypes (or jax) first, or use framework 'pt'"
        raise PlanError(what, tensor=name, code="unsupported") from None


def to_numpy(tensor: torch.Tensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a CPU tensor as an array of the same bits and of this dtype; a copy if it is not contiguous."""
    array: npt.NDArray[Any] = bytes_of(tensor.contiguous()).numpy().view(dtype).reshape(tensor.shape)
    return array


def torch_shape(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in torch's elements: a torch element of F4 holds two numbers."""
    if dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise PlanError(
            f"torch has no F4 tensor of shape {list(shape)}: its last dim is odd", tensor=name, code="unsupported"
        )
    return (*shape[:-1], shape[-1] // 2)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a 1-D uint8 tensor."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    result: torch.Tensor = whole.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.element_size(),), (1,))
    return result


def to_device(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return the tensor on a device, as a copy if it is on another one."""
    import torch

    try:
        return tensor.to(device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"cannot allocate {tensor.nbytes} bytes on {device}: {str(error).splitlines()[0]}") from None


def make_views(base: torch.Tensor, tensors: TensorColumns) -> dict[str, torch.Tensor]:
    """Return dense, row-major views of the arena, by tensor name."""
    import torch

    check_mode()
    whole = base[: base.numel() // 16 * 16]
    forms: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, tuple[int, ...], list[int], int, int]] = {}
    views = {}
    # as_strided on a typed view takes a third of the time of slicing and viewing.
    make = torch.as_strided
    with _uncollected():
        for name, dtype, shape, offset in zip(
            tensors.names, tensors.dtypes, tensors.shapes, tensors.offsets, strict=True
        ):
            if (dtype, shape) not in forms:
                counted = torch_shape(name, dtype, shape)
                typed = whole.view(torch_dtype(name, dtype))
                item_nbytes = max(1, BITS[dtype] // 8)
                forms[dtype, shape] = (typed, counted, _row_major(counted), item_nbytes, int(typed.storage_offset()))
            parent, counted, strides, item_nbytes, first = forms[dtype, shape]
            views[name] = make(parent, counted, strides, first + (offset // item_nbytes if 0 not in counted else 0))
    return views


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: its repeated scans double the cost of creating many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(1, shape[axis])
    return strides


@dataclass(frozen=True, slots=True)
class Strided:
    """The memory layout of a tensor that has at least one element."""

    address: int
    """Address of the first element, never 0."""
    item_nbytes: int
    strides: tuple[int, ...]
    """Steps along the axes, in elements."""
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Address after the last byte."""
        last = sum(stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True))
        return self.address + (last + 1) * self.item_nbytes

    @property
    def is_simple(self) -> bool:
        """True if each stride is larger than the span of all inner axes, as in every view of a dense tensor.

        Then no byte belongs to two elements.
        """
        reach = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride < reach:
                return False
            reach += stride * (size - 1)
        return True

    @property
    def array(self) -> npt.NDArray[np.void]:
        """The elements, for comparing addresses only: do not access them, as the memory may be a device's."""
        interface = {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": tuple(stride * self.item_nbytes for stride in self.strides),
            "typestr": f"|V{self.item_nbytes}",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


def sharing(tensors: Sequence[Strided]) -> Iterator[tuple[int, int]]:
    """Yield the positions of all pairs of tensors that share a byte.

    Only pairs with overlapping address ranges are compared: usually none, or the parts of one fused parameter.
    """
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].address)
    reaching: list[int] = []
    for index in order:
        reaching = [other for other in reaching if tensors[other].end > tensors[index].address]
        for other in reaching:
            if share(tensors[other], tensors[index]):
                yield min(other, index), max(other, index)
        reaching.append(index)


def share(first: Strided, second: Strided) -> bool:
    """Return True if two tensors have a byte in common, or if it would take too long to find out."""
    try:
        # numpy's stubs allow only None and zero as the limit.
        return np.shares_memory(first.array, second.array, max_work=MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors if they are the same view of the same memory.

    Equal keys mean that both read and write the same bytes, with the same dtype, conjugation and negation.
    Tensors without elements have no address; they are the same only if they share a storage.
    """
    memory = address_of(tensor) or (tensor.untyped_storage()._cdata,)
    return memory, tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def why_not_plain(tensor: object) -> str | None:
    """Return why a tensor's memory cannot be read or written directly, and what to do; None if it can.

    For a DTensor, pass its local shard.
    """
    import torch

    kind = type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        return f"a {kind}, expected a tensor"
    if kind == "ShardedTensor":
        return "a ShardedTensor, as FSDP1 has, expected a tensor or a DTensor: shard the model by fully_shard (FSDP2)"
    if torch.nn.parameter.is_lazy(tensor):
        return f"a {kind}, which has no shape yet: run the model once before"
    try:
        if tensor.is_nested:
            return "a nested tensor, expected a dense one: give its values() and offsets() as tensors"
        if tensor.is_quantized:
            return f"{tensor.dtype}, expected a plain dtype: dequantize() it, or give int_repr() and scales as tensors"
        if tensor.layout != torch.strided:
            return f"{tensor.layout}, expected torch.strided: call to_dense() before"
        if tensor.is_meta:
            return "on meta, expected cpu or another device with memory: call to_empty(device=...) of its model before"
        if not tensor.numel():
            return None
        if address_of(tensor) == 0:
            return f"a {kind} without memory of its own, expected a plain tensor: give the tensors that it is made of"
        storage = tensor.untyped_storage()
        if memory_of(tensor).end > address_of(storage) + storage.nbytes():
            return "a tensor whose memory was freed in part: give it while its module holds it"
    except (RuntimeError, TypeError, ValueError) as error:  # A class of tensors may refuse any operation.
        return f"a {kind}, which has no memory as plain tensors have ({str(error).splitlines()[0]:.80})"
    return None


def memory_of(tensor: torch.Tensor) -> Strided:
    """Return the memory layout of a tensor's elements."""
    return Strided(tensor.data_ptr(), tensor.element_size(), tensor.stride(), tuple(tensor.shape))


def address_of(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the address of a tensor's first byte; 0 if it has no memory."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Several kinds of tensors have no memory, and torch has no other test for it.
        return 0


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Notify autograd that tensors were changed in place: a backward pass that has saved one of them then fails."""
    import torch

    increment = getattr(torch.autograd.graph, "increment_version", None)
    if increment is not None:  # Older versions of torch do not have it.
        increment(tensors)
