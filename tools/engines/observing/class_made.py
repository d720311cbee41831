"""Runs beside an engine: makes the headers of a checkpoint from an engine's own class.

transformers writes checkpoints of its own classes only. Many classes of engines have no counterpart there. Such a class
is built whole, for one rank, and a tensor is made for each part that its loader fills: the q, k and v of a parallel
layer, the matrices of each expert. Parameters have other names in engines than in checkpoints. The names that a class
exchanges lie in its code as literals (`("qkv_proj", "q_proj", "q")`) and in its `WeightsMapper`; both are applied
backwards. A parameter often has several possible names, so the class's own loader decides: it is given probes of all
tensors, and each tensor that it refuses or ignores, and each parameter that it leaves, gets the next possible name,
until all tensors are loaded and all parameters are written.

The names are therefore names that the engine's loader takes. They need not be those of a published checkpoint.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch

from relayout.core.slices import num_bytes
from relayout.format.safetensors import TensorEntry, build_header
from relayout.observe.tracing import LoadRecorder, Probe

_DTYPE = "BF16"
_MAX_LOADS = 200
"""The most loads of one class: each gives another name to one kind of tensor, or to several."""
_MATRICES = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
"""Parameters that hold matrices of all experts, and the usual names of the matrices."""
_PREFIXES = ("model.", "language_model.", "language_model.model.", "transformer.", "thinker.", "llm.")

Way = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of tensors that together fill one parameter."""


class Loads(Protocol):
    """Builds an engine's class, and lets its loader load tensors."""

    def build(self) -> torch.nn.Module:
        """Build the class for one rank; large parameters have no memory."""

    def load(
        self, model: torch.nn.Module, recorder: LoadRecorder, tensors: Iterable[tuple[str, str, Sequence[int]]]
    ) -> None:
        """Load probes of these tensors into a model."""


class WrittenRecorder(LoadRecorder):
    """A recorder that also notes which parameters have been written to."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.written: set[int] = set()
        """The storages of the parameters."""

    def copied(self, target: torch.Tensor, source: Probe) -> None:
        """Record a copy into a tensor that is no probe."""
        super().copied(target, source)
        self.written.add(storage_of(target))


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


@dataclass
class _Kind:
    """Parameters that differ in numbers only, such as that of a layer, and the ways to name what fills them."""

    ways: list[list[Way]] = field(default_factory=list)
    """For each parameter, its ways, in one order."""
    chosen: int = 0

    def next(self) -> bool:
        """Choose the next way. False: there was none."""
        self.chosen += 1
        return self.chosen < min(map(len, self.ways))


def write(folder: Path, loads: Loads, names: Sequence[tuple[str, str]] = ()) -> int:
    """Write model.safetensors, with holes in the place of values, and return the number of tensors.

    Args:
        folder: to write to.
        loads: the engine's class.
        names: words of names of checkpoints, and of the engine's, to be tried besides those in its code.

    Raises:
        LookupError: the loader takes no tensors of any names for some parameters.
    """
    tensors = tensors_of(loads, names)
    sizes = [num_bytes(_DTYPE, shape) or 0 for _, shape in tensors]
    entries = (
        TensorEntry(name, _DTYPE, shape, end - nbytes, nbytes)
        for (name, shape), nbytes, end in zip(tensors, sizes, accumulate(sizes), strict=True)
    )
    header = build_header(entries, {}, alignment=8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes))
    return len(tensors)


def tensors_of(loads: Loads, names: Sequence[tuple[str, str]] = ()) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of tensors that fill all parameters of a class. Arguments as of `write`.

    Raises:
        LookupError: the loader takes no tensors of any names for some parameters.
    """
    model = loads.build()
    kinds: dict[str, _Kind] = {}
    storages: dict[str, set[int]] = {}
    for name, parameter, ways in all_ways(model, names):
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        kinds.setdefault(kind, _Kind()).ways.append(ways)
        # SGLang fills parameters of one element with a number, which no recorder sees.
        storages.setdefault(kind, set()).update([storage_of(parameter)] * (parameter.numel() > 1))
    errors: dict[str, str] = {}
    """Of each kind, with its most usual name."""
    for _ in range(_MAX_LOADS):
        of_kind = {name: kind for kind, one in kinds.items() for ways in one.ways for name, _ in ways[one.chosen]}
        shapes = {tensor: shape for one in kinds.values() for ways in one.ways for tensor, shape in ways[one.chosen]}
        recorder = WrittenRecorder(model)
        failed, error = _load(loads, model, recorder, list(shapes.items()))
        if failed is not None:
            wrong = {of_kind[failed]}
        elif not (wrong := {of_kind[name] for name in _named_by(error, shapes)}):
            recorder.finish()
            wrong = {kind for kind, memory in storages.items() if not memory <= recorder.written}
            wrong |= {of_kind[name] for name in shapes if not recorder.loaded(name).is_held}
            if error and not wrong:
                raise LookupError(f"the loader ends with {error}")
        if not wrong:
            return list(shapes.items())
        for kind in wrong:
            errors.setdefault(kind, error or "not loaded")
        if lost := [kind for kind in sorted(wrong) if not kinds[kind].next()]:
            raise LookupError(f"no name was found for {', '.join(lost[:3])}; the first: {errors[lost[0]]}")
    raise LookupError(f"no names were found in {_MAX_LOADS} loads")


def _named_by(error: str, names: Iterable[str]) -> Iterator[str]:
    """Names that end as the first name in an error does: some loaders collect tensors before they load them."""
    if found := re.search(r"'((?:\w+\.)+\w+)'", error):
        end = ".".join(found[1].split(".")[-4:])
        yield from (name for name in names if name.endswith(end))


def _load(
    loads: Loads, model: torch.nn.Module, recorder: LoadRecorder, tensors: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[str | None, str]:
    """Load, and return the tensor at which it failed, or None, and the error."""
    last: list[str] = []

    def given() -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for name, shape in tensors:
            last[:] = [name]
            yield name, _DTYPE, shape
        last.clear()

    try:
        loads.load(model, recorder, given())
    except Exception as error:
        return (last[0] if last else None), f"{type(error).__name__}: {error}"[:300]
    return None, ""


def all_ways(
    model: torch.nn.Module, names: Sequence[tuple[str, str]] = ()
) -> Iterator[tuple[str, torch.Tensor, list[Way]]]:
    """Yield each parameter's name, the parameter, and the ways to fill it."""
    modules = dict(model.named_modules())
    seen: set[int] = set()
    for path, module in modules.items():
        ancestors = [modules[path[:end]] for end in _ends(path)]
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{path}.{key}".removeprefix(".")
            splits = list(dict.fromkeys(_splits(path, key, parameter, module, ancestors)))
            mappers = [
                (path[:end], mapper)
                for end, owner in zip(_ends(path), ancestors, strict=True)
                if (mapper := getattr(owner, "hf_to_vllm_mapper", None)) is not None
            ]
            files = dict.fromkeys(_file_of(cls) for owner in ancestors for cls in type(owner).__mro__)
            renames = tuple(dict.fromkeys(pair for file in files for pair in _renames_of(file)))
            ways = [tuple(way) for split in splits for way in _renamed(split, mappers, names, renames)]
            yield name, parameter, list(dict.fromkeys(ways))


def _ends(path: str) -> list[int]:
    """The lengths of a path and of its beginnings, the innermost first."""
    return [len(path), *(place.start() for place in reversed(list(re.finditer(r"\.", path)))), 0] if path else [0]


def _splits(
    path: str, key: str, parameter: torch.Tensor, module: torch.nn.Module, ancestors: Sequence[torch.nn.Module]
) -> Iterator[Way]:
    """The ways to divide a parameter into tensors, in the engine's names; the most usual first."""
    shape, name = tuple(parameter.shape), f"{path}.{key}".removeprefix(".")
    part, _, what = key.partition("_")
    if part in _MATRICES and what in ("weight", "bias") and len(shape) in (2, 3):
        experts = path.removesuffix(".routed_experts")
        for matrices in _matrices_of(module, ancestors):
            of_part = matrices[:1] + matrices[2:] if part == "w13" else matrices[1:2]
            rows = (shape[1] // len(of_part), *shape[2:])
            yield tuple(
                (f"{experts}.{expert}.{matrix}.{what}", rows) for expert in range(shape[0]) for matrix in of_part
            )
        for matrices in _matrices_of(module, ancestors):
            # All experts in one tensor.
            of_part = matrices[:1] + matrices[2:] if part == "w13" else matrices[1:2]
            rows = (shape[0], shape[1] // len(of_part), *shape[2:])
            for owner in (experts, experts.rpartition(".")[0]):
                yield tuple((f"{owner}.{matrix}.{what}", rows) for matrix in of_part)
    known = getattr(module, "output_sizes", None)
    if shape and (known is None or (len(known) > 1 and shape[0] == sum(known))):
        for stacked, parts in (pair for owner in ancestors for pair in _all_stacks(owner)):
            if not f".{name}.".endswith(f"{_dotted(stacked, path)}.{key}."):
                continue
            sizes = known or [shape[0] // len(parts)] * len(parts)
            covered = [_covered(shard, index) for index, (_, shard) in enumerate(parts)]
            if sum(sizes) == shape[0] and sorted(index for indices in covered for index in indices) == list(
                range(len(sizes))
            ):
                yield tuple(
                    (
                        _replace_last(f".{path}", stacked.rstrip("."), weight.rstrip(".")).removeprefix(".")
                        + f".{key}",
                        (sum(sizes[index] for index in indices), *shape[1:]),
                    )
                    for (weight, _), indices in zip(parts, covered, strict=True)
                )
    yield ((name, shape),)


def _all_stacks(owner: torch.nn.Module) -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Merged layers that a class has literals of, in its mapper or in the files of its code."""
    mapped: dict[str, list[tuple[str, Any]]] = {}
    mapper = getattr(owner, "hf_to_vllm_mapper", None)
    for weight, (stacked, shard) in getattr(mapper, "orig_to_new_stacked", {}).items():
        mapped.setdefault(stacked, []).append((weight, shard))
    yield from ((stacked, tuple(map(_hashable, parts))) for stacked, parts in mapped.items())
    for cls in type(owner).__mro__:
        yield from _stacks_of(_file_of(cls))


def _dotted(stacked: str, path: str) -> str:
    """A literal as the end of a path has it."""
    stacked = stacked.rstrip(".")
    return stacked if stacked.startswith(".") or not f".{path}".endswith(f".{stacked}") else f".{stacked}"


def _replace_last(text: str, old: str, new: str) -> str:
    before, found, after = text.rpartition(old)
    return before + new + after if found else text


def _covered(shard: Any, index: int) -> Sequence[int]:
    """The outputs of a merged layer that one tensor fills."""
    if isinstance(shard, tuple | list):
        return [one for one in shard if isinstance(one, int)]
    if isinstance(shard, int):
        return [shard]
    return ["qkv".index(shard)] if shard in ("q", "k", "v") else [index]


def _matrices_of(module: torch.nn.Module, ancestors: Sequence[torch.nn.Module]) -> Iterator[tuple[str, ...]]:
    """Names of an expert's matrices: gate, down, and up, if it has one."""
    own = tuple(getattr(module, f"ckpt_{matrix}_proj_name", None) for matrix in ("gate", "down", "up"))
    found = [own] if own[0] else []
    found += [names for owner in ancestors for cls in type(owner).__mro__ for names in _experts_of(_file_of(cls))]
    found += [("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3"), ("up_proj", "down_proj")]
    for names in dict.fromkeys(found):
        yield tuple(name for name in names if name)


def _renamed(
    split: Way,
    mappers: Sequence[tuple[str, Any]],
    first: Sequence[tuple[str, str]],
    renames: Sequence[tuple[str, str]],
) -> Iterator[Way]:
    """The split in the names that checkpoints may have, each way by the same rules for all of its tensors."""
    options = [list(_sources(name, mappers, first, renames)) for name, _ in split]
    for number in range(min(map(len, options))):
        yield tuple((names[number], shape) for names, (_, shape) in zip(options, split, strict=True))


def _sources(
    name: str,
    mappers: Sequence[tuple[str, Any]],
    first: Sequence[tuple[str, str]],
    renames: Sequence[tuple[str, str]],
) -> Iterator[str]:
    """Names that mappers or words map to a name, the words of `first` before all others, and other usual ones."""
    names = [name]
    for prefix, mapper in mappers:
        begin = f"{prefix}." if prefix else ""
        before = [begin + old for one in names for old in _unmapped(one.removeprefix(begin), mapper)]
        names = list(dict.fromkeys([*before, *names]))
    yield from _replaced(names, first)
    yield from names
    yield from _replaced(names, renames)
    for one in names:
        for prefix in _PREFIXES:
            yield one.removeprefix(prefix) if one.startswith(prefix) else prefix + one
    bare = re.sub(r"^(language_model|model|llm|thinker)\.", "", name)
    yield from (f"model.{bare}", bare)


def _replaced(names: Sequence[str], words: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The names with each word's replacement turned back."""
    for name in names:
        yield from (name.replace(new, old) for old, new in words if new and new in name)


def _unmapped(name: str, mapper: Any) -> Iterator[str]:
    """Names that a `WeightsMapper` maps to a name, by at most three rules backwards."""
    found, last = [name], [name]
    for _ in range(3):
        last = [old for one in last for old in _one_back(one, mapper) if old not in found]
        found += last
    exact = [old for old in dict.fromkeys(found) if mapper._map_name(old) == name]
    yield from sorted(exact, key=lambda old: old == name)


def _one_back(name: str, mapper: Any) -> Iterator[str]:
    for old, new in mapper.orig_to_new_prefix.items():
        if new is not None and name.startswith(new):
            yield old + name[len(new) :]
    for old, new in mapper.orig_to_new_substr.items():
        if new and new in name:
            yield name.replace(new, old, 1)
    for old, new in mapper.orig_to_new_suffix.items():
        if new and name.endswith(new):
            yield name[: len(name) - len(new)] + old


def _file_of(cls: type) -> str:
    """The file of a class of a model; empty: the class is torch's, or of a layer."""
    module = sys.modules.get(cls.__module__)
    is_model = re.search(r"\.models\b", cls.__module__) and not cls.__module__.startswith("torch")
    return str(getattr(module, "__file__", "") or "") if is_model else ""


@cache
def _literals(file: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(Path(file).read_text()))) if file else ()


def _constant(node: ast.AST | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError):
        return None


@cache
def _stacks_of(file: str) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Merged layers of a file of code, each with the weights of checkpoints that fill it, and their shards.

    From lists of `(merged, weight, shard)`, and dictionaries `{weight: (merged, shard)}` and `{merged: [weights]}`.
    """
    found: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
    for node in _literals(file):
        stacks: dict[str, list[tuple[str, Any]]] = {}
        if isinstance(node, ast.List | ast.Tuple):
            for element in map(_constant, node.elts):
                if (
                    isinstance(element, tuple)
                    and len(element) == 3
                    and all(isinstance(one, str) for one in element[:2])
                ):
                    stacks.setdefault(element[0], []).append((element[1], element[2]))
        elif isinstance(node, ast.Dict):
            for key, value in zip(map(_constant, node.keys), map(_constant, node.values), strict=True):
                if isinstance(key, str) and isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
                    stacks.setdefault(value[0], []).append((key, value[1]))
                elif isinstance(key, str) and isinstance(value, list) and all(isinstance(one, str) for one in value):
                    stacks[key] = [(weight, index) for index, weight in enumerate(value)]
        found += [(stacked, tuple(_hashable(part) for part in parts)) for stacked, parts in stacks.items()]
    return tuple(dict.fromkeys(found))


@cache
def _renames_of(file: str) -> tuple[tuple[str, str], ...]:
    """Words of names of checkpoints in a file of code, and what it replaces them by.

    From calls of `name.replace(old, new)`, and dictionaries and lists of pairs of words.
    """
    found: list[tuple[Any, Any]] = []
    for node in _literals(file):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replace" and len(node.args) in (2, 3):
            found.append((_constant(node.args[0]), _constant(node.args[1])))
        elif isinstance(node, ast.Dict):
            found += zip(map(_constant, node.keys), map(_constant, node.values), strict=True)
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            found.append((_constant(node.elts[0]), _constant(node.elts[1])))
    are_words = (pair for pair in found if all(isinstance(word, str) and len(word) > 2 for word in pair))
    return tuple(dict.fromkeys(pair for pair in are_words if pair[0] != pair[1]))


def _hashable(part: tuple[str, Any]) -> tuple[str, Any]:
    weight, shard = part
    return weight, tuple(shard) if isinstance(shard, list) else shard


@cache
def _experts_of(file: str) -> tuple[tuple[str | None, ...], ...]:
    """Names of an expert's matrices, gate, down, up, in a file of code, where it makes the mapping of experts."""
    found = []
    for node in _literals(file):
        if isinstance(node, ast.Call):
            named = {keyword.arg: _constant(keyword.value) for keyword in node.keywords}
            names = tuple(named.get(f"ckpt_{matrix}_proj_name") for matrix in ("gate", "down", "up"))
            if isinstance(names[0], str) and isinstance(names[1], str):
                found.append(names)
    return tuple(dict.fromkeys(found))
