"""Predict which tensors an engine will use, of those that it places by itself, from its use of the first layers.

With expert parallelism, a process uses some experts, each whole. The selection depends on the launch: on the degrees,
the placement, and redundant experts. Only the engine's loader determines it, and it skips all other experts before it
touches their tensors. Therefore tensors of the first layers are delivered unread, and are read when they are used. If
two layers have used the same experts, the same experts of later layers are read ahead, in large requests. Correctness
does not depend on the prediction: an unexpected tensor is read when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relayout.core.arguments import collapse_numbers

_EXPERT = re.compile(r"(?:.*\.)?experts\.")
_SHARED = re.compile(r"(?:.*\.)?shared_experts?\.")
_OF_ALL_RANKS = re.compile(r"(?:.*\.)?(?:mlp|ffn|feed_forward)\.|(?:.*\.)?lm_head\.")
_NUM_LEARNED = 2
"""Layers of a kind that are delivered unread: if two agree, the selection is taken for a placement."""


def is_expert(name: str) -> bool:
    """Return True if a tensor belongs to routed experts."""
    return _EXPERT.match(name) is not None


def is_shared_expert(name: str) -> bool:
    """Return True if a tensor belongs to an expert that processes all tokens."""
    return _SHARED.match(name) is not None


def is_of_feed_forward(name: str) -> bool:
    """Return True if a tensor belongs to a layer's part after attention (such as experts) or to the output head."""
    return _OF_ALL_RANKS.match(name) is not None or is_expert(name) or is_shared_expert(name)


def is_rearranged(table: Any) -> bool:
    """Return True if experts are not placed in even blocks: some are replicated, or a map places them.

    Args:
        table: an engine's `ExpertLocationMetadata` (SGLang 0.5.23 `eplb/expert_location.py`, TokenSpeed 0.1.1
            `moe/expert_location.py`); None: it has none.
    """
    if table is None:
        return False
    places = table.physical_to_logical_map_cpu
    return places.shape[1] != table.num_logical_experts or any(
        layer != list(range(len(layer))) for layer in places.tolist()
    )


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """The tensors of one layer that an engine places."""

    kind: str
    """The layer's name, with `*` in place of numbers."""
    names: Mapping[str, str]
    """The tensors' names, by the part that follows the layer's name."""

    def used(self, whole: Collection[str]) -> set[str]:
        """Return the parts of names (keys of `names`) of the tensors that were used whole."""
        return {member for member, name in self.names.items() if name in whole}


def layers_of(names: Iterable[str]) -> list[PlacedLayer]:
    """Group names by layers, in order of each layer's first name."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        prefix = _layer(name)
        layers.setdefault(prefix, {})[name[len(prefix) :]] = name
    return [PlacedLayer(collapse_numbers(prefix), members) for prefix, members in layers.items()]


def _layer(name: str) -> str:
    found = _EXPERT.match(name) or _SHARED.match(name) or _OF_ALL_RANKS.match(name)
    return "" if found is None else found[0]


def first_layers(layers: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Return the layers to learn from: the first ones of each kind."""
    return [layer for of_kind in _by_kind(layers).values() for layer in of_kind[:_NUM_LEARNED]]


def expected(layers: Sequence[PlacedLayer], whole: Collection[str]) -> list[str]:
    """Return the tensors of later layers that will be used whole, if these layers are used like the first ones.

    Args:
        whole: the names of the first layers' tensors that were used whole.
    """
    found = []
    for of_kind in _by_kind(layers).values():
        learned, others = of_kind[:_NUM_LEARNED], of_kind[_NUM_LEARNED:]
        in_all = set.intersection(*(set(layer.names) for layer in learned))
        if len({frozenset(layer.used(whole) & in_all) for layer in learned}) > 1:
            continue  # Each layer has a placement of its own.
        used = set[str]().union(*(layer.used(whole) for layer in learned))
        found += [name for layer in others for member, name in layer.names.items() if member in used]
    return found


def _by_kind(layers: Sequence[PlacedLayer]) -> dict[str, list[PlacedLayer]]:
    kinds: dict[str, list[PlacedLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    return kinds
