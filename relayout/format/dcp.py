"""Parses the `.metadata` of a folder that PyTorch's distributed checkpoints (DCP) wrote: tensors and their positions.

DCP stores a tensor as boxes: contiguous ranges along each dim. Each box was written by one process, to a `.distcp`
file. `.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. Nested dicts that were saved are
flattened in it; `planner_data` has their keys (PyTorch 2.13: `metadata.py`, `filesystem.py`, `default_planner.py`,
`_nested_dict.py`). It is read as data (`pickles`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from relayout.core.extents import Extent
from relayout.core.slices import Slice, TensorHead
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import MAX_AXES, check_name, check_path
from relayout.format.pickles import Called, read_pickle
from relayout.format.torch_save import TORCH_DTYPES

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
"""Keys of the model's state dict, in checkpoints that also contain an optimizer's."""

_MODULE = "torch.distributed.checkpoint.metadata."
_TENSOR, _BYTES = f"{_MODULE}TensorStorageMetadata", f"{_MODULE}BytesStorageMetadata"
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
_NAMES = frozenset(
    {
        *(
            _MODULE + name
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
                *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        *(_STORED, _SIZE, "torch.serialization._get_layout", "collections.OrderedDict"),
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows", "Pure")),
        *TORCH_DTYPES,
        # Of an optimizer's state, or of tensors that no model has: they are refused by name if the model has them.
        *(f"torch.{name}" for name in ("complex32", "complex128", "float4_e2m1fn_x2", "uint1", "int4", "uint4")),
    }
)
_MAX_BOXES = 2**24
_MAX_SIZE = 2**63


@dataclass(frozen=True, slots=True)
class SavedBox:
    """A box of a tensor."""

    part: Slice
    shape: tuple[int, ...]
    file: str
    """Name of the file that has it."""
    extent: Extent
    """Extent of the stored item in the file: an archive of `torch.save`."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the model."""

    head: TensorHead
    boxes: tuple[SavedBox, ...]
    """Boxes that have elements. They fill the tensor, without overlap."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model in a folder of DCP."""

    tensors: tuple[SavedTensor, ...]
    left_out: tuple[str, ...]
    """Other entries of the folder, as text for the user."""


def parse_metadata(blob: bytes, where: str) -> SavedModel:
    """Parse `.metadata`, and find the model in it.

    Raises:
        FormatError: it is damaged, or imports names that such a file does not need; or boxes do not fill a tensor.
        PlanError: it has no model, or several, or a tensor that relayout does not read.
    """
    with about(path=where):
        top = _state(read_pickle(blob, _NAMES, where), f"{_MODULE}Metadata")
        entries, paths = _dict(top, "state_dict_metadata"), top.get("planner_data")
        stored = _stored(_dict(top, "storage_data"))
        chosen, left_out = _choose(entries, paths if isinstance(paths, dict) else {})
        _check_megatron(chosen.values())
        num_boxes = 0
        tensors = []
        for full_name, name in chosen.items():
            with about(tensor=name):
                check_name(name)
                tensors.append(_tensor(full_name, name, entries[full_name], stored))
            num_boxes += len(tensors[-1].boxes)
            if num_boxes > _MAX_BOXES:
                raise FormatError(f"more than {_MAX_BOXES} boxes", code="limit")
        return SavedModel(tuple(tensors), tuple(left_out))


def _state(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Called) or value.kind != kind or not isinstance(value.state, dict):
        raise FormatError(f"expected {kind.rpartition('.')[2]}", code="field")
    return value.state


def _dict(fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise FormatError(f"{name!r} is missing or not a dict: was it written by another storage writer?", code="field")
    return value


def _stored(entries: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]:
    """Return the stored item of each box, by the tensor's full name and the offsets of the box in it."""
    stored = {}
    for index, info in entries.items():
        fields = _state(index, f"{_MODULE}MetadataIndex")
        full_name, offset = fields.get("fqn"), fields.get("offset")
        if isinstance(full_name, str) and offset is not None:
            stored[full_name, _sizes(offset)] = _state(info, _STORED)
    return stored


def _choose(entries: Mapping[Any, Any], paths: Mapping[Any, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the model's tensors, as a dict from full name to name in the model, and a text about the other entries."""
    keys = {full_name: _path(full_name, paths) for full_name in entries if isinstance(full_name, str)}
    tensors = [name for name in keys if getattr(entries[name], "kind", None) == _TENSOR]
    above: dict[tuple[str, ...], None] = {}
    for full_name in tensors:
        path = keys[full_name]
        depth = next((depth for depth, key in enumerate(path[:-1]) if key in MODEL_KEYS), None)
        if depth is not None:
            above[path[: depth + 1]] = None
    if len(above) > 1:
        listed = ", ".join(".".join(path) for path in above)
        raise PlanError(f"has several models ({listed}): save the one to convert alone", code="option")
    model = next(iter(above), ())
    chosen = {
        full_name: ".".join(keys[full_name][len(model) :])
        for full_name in tensors
        if keys[full_name][: len(model)] == model and (model or len(keys[full_name]) == 1)
    }
    if not chosen:
        tops = sorted({keys[full_name][0] for full_name in tensors})
        found = f"tensors only under {', '.join(map(shown, tops[:8]))}" if tops else "no tensors"
        what = f"{found}; expected the model's at the top, or under {' or '.join(map(repr, MODEL_KEYS[:2]))}"
        raise PlanError(what, code="missing")
    others = {keys[full_name][0] for full_name in keys if full_name not in chosen} - {*model[:1]}
    counts = [(top, sum(path[0] == top for name, path in keys.items() if name not in chosen)) for top in sorted(others)]
    return chosen, [f"{top}: {count} entries that are not of the model" for top, count in counts[:_MAX_NAMED]]


_MAX_NAMED = 16


def _path(full_name: str, paths: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the path of keys to an entry in the saved dicts."""
    path = paths.get(full_name)
    if not isinstance(path, tuple) or not path or not all(isinstance(key, (str, int)) for key in path):
        return (full_name,)
    return tuple(map(str, path))


def _check_megatron(names: Iterable[str]) -> None:
    """Raise PlanError for names of Megatron Core: it stacks all layers, and fuses other tensors than the hub."""
    name = next((name for name in names if ".self_attention.linear_" in name or ".mlp.linear_fc" in name), None)
    if name is not None:
        what = (
            "a name of Megatron Core: missing are the hub's, such as model.layers.0.self_attn.q_proj.weight; export the"
            " checkpoint to the hub's form first (Megatron Bridge, AutoBridge.export_ckpt)"
        )
        raise PlanError(what, tensor=name, code="unsupported")


def _tensor(full_name: str, name: str, entry: Any, stored: Mapping[Any, Mapping[str, Any]]) -> SavedTensor:
    fields = _state(entry, _TENSOR)
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Called) else None
    pickled = state[0] if isinstance(state, tuple) and state else None
    dtype = TORCH_DTYPES.get(pickled) if isinstance(pickled, str) else None
    if dtype is None:
        raise PlanError(f"a tensor of {shown(pickled)}, which safetensors does not have", code="unsupported")
    shape, chunks = _sizes(fields.get("size")), fields.get("chunks")
    if not isinstance(chunks, list):
        raise FormatError("has no list of chunks", code="field")
    found: dict[tuple[int, ...], SavedBox] = {}
    for chunk in chunks:
        one = _state(chunk, f"{_MODULE}ChunkStorageMetadata")
        starts, sizes = _sizes(one.get("offsets")), _sizes(one.get("sizes"))
        if not len(starts) == len(sizes) == len(shape) or any(
            start + size > dim for start, size, dim in zip(starts, sizes, shape, strict=True)
        ):
            raise FormatError(f"a box at {list(starts)} of {list(sizes)} is not in {list(shape)}", code="coverage")
        if not prod(sizes):
            continue
        info = stored.get((full_name, starts))
        if info is None:
            raise FormatError(f"no file has its box at {list(starts)}", code="missing")
        if starts in found:
            raise FormatError(f"two boxes at {list(starts)}", code="coverage")
        found[starts] = _box(starts, sizes, shape, info)
    boxes = tuple(found.values())
    _check_filled(shape, list(zip(found, (box.shape for box in boxes), strict=True)))
    return SavedTensor(TensorHead(name, dtype, shape), boxes)


def _box(starts: Sequence[int], sizes: tuple[int, ...], shape: Sequence[int], info: Mapping[str, Any]) -> SavedBox:
    file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(file, str) or type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
        raise FormatError("its data has no location in a file", code="field")
    check_path(file)
    if info.get("transform_descriptors"):
        what = f"compressed by {shown(info['transform_descriptors'])}: save it without extensions"
        raise PlanError(what, code="unsupported")
    ranges = {
        axis: ((start, size),)
        for axis, (start, size, dim) in enumerate(zip(starts, sizes, shape, strict=True))
        if size != dim
    }
    return SavedBox(Slice.of(ranges), sizes, file, Extent(offset, nbytes))


def _check_filled(shape: Sequence[int], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Check that boxes, each inside the shape, contain every element exactly once."""
    covered = sum(prod(sizes) for _, sizes in boxes)
    if covered != prod(shape):
        what = f"its boxes have {covered} of {prod(shape)} elements: was the save interrupted?"
        raise FormatError(what, code="coverage")
    if any(_overlapping(boxes)):
        raise FormatError("its boxes overlap", code="coverage")


def _overlapping(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[bool]:
    """Yield, for each pair of boxes that meet along the axis with the most distinct starts, True if they overlap."""
    if len(boxes) < 2:
        return
    axis = max(range(len(boxes[0][0])), key=lambda axis: len({starts[axis] for starts, _ in boxes}))
    current: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for starts, sizes in sorted(boxes, key=lambda box: box[0][axis]):
        current = [box for box in current if box[0][axis] + box[1][axis] > starts[axis]]
        for other, extents in current:
            yield all(
                a < b + size and b < a + own for a, own, b, size in zip(starts, sizes, other, extents, strict=True)
            )
        current.append((starts, sizes))


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a `torch.Size`."""
    sizes = value.args[0] if isinstance(value, Called) and value.kind == _SIZE and len(value.args) == 1 else None
    if not isinstance(sizes, tuple) or len(sizes) > MAX_AXES:
        raise FormatError("a shape or offset is not a torch.Size", code="field")
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes) or prod(sizes) >= _MAX_SIZE:
        raise FormatError(f"{shown(sizes)} is not a list of sizes below 2**63", code="limit")
    return sizes
