"""What each rank of a serving engine cuts out of a tensor: index arithmetic of numpy, written down from the engines.

vLLM 0.33 `model_executor/layers/{linear,vocab_parallel_embedding}.py` and `models/*.py`; SGLang 0.5 for a vocabulary
whose padded size does not divide. Nothing here is from relayout, whose own rules are to be compared with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Sizes = Mapping[str, int]


class IndivisibleError(Exception):
    """An engine refuses to divide this tensor over so many ranks."""


def split_cut(cut: str) -> tuple[str, int]:
    """`kind@axis`, of which the axis is 0 where it is left out."""
    kind, _, axis = cut.partition("@")
    return kind, int(axis or 0)


def expected(cut: str, whole: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    """What each rank holds of a tensor.

    Raises:
        IndivisibleError: an engine would not divide it so.
    """
    kind, axis = split_cut(cut)
    if kind == "whole":
        return [whole] * num_ranks
    numbered = np.arange(whole.shape[axis])
    return [whole.take(indices, axis) for indices in _CUTS[kind.partition(":")[0]](kind, numbered, num_ranks, sizes)]


def owners(num_experts: int, num_ranks: int) -> list[int]:
    """The rank that holds each expert: contiguous blocks, what is over goes to the first (vLLM expert_map_manager)."""
    return [rank for rank, block in enumerate(np.array_split(np.arange(num_experts), num_ranks)) for _ in block]


def _times(kind: str) -> int:
    """How many times as many heads as others some layers have: `heads:2`."""
    return int(kind.partition(":")[2] or 1)


def _equally(indices: Array, num_groups: int, num_ranks: int) -> list[Array]:
    if num_groups % num_ranks or indices.size % num_groups:
        raise IndivisibleError(f"{indices.size} in {num_groups} groups over {num_ranks} ranks")
    return np.split(indices, num_ranks)


def _kv(indices: Array, kv_heads: int, num_ranks: int) -> list[Array]:
    """More ranks than heads: each head goes to as many neighboring ranks (QKVParallelLinear)."""
    if kv_heads >= num_ranks:
        return _equally(indices, kv_heads, num_ranks)
    if num_ranks % kv_heads:
        raise IndivisibleError(f"{kv_heads} KV heads over {num_ranks} ranks")
    by_head = indices.reshape(kv_heads, -1)
    return [by_head[rank // (num_ranks // kv_heads)] for rank in range(num_ranks)]


def _joined(*parts: Sequence[Array]) -> list[Array]:
    return [np.concatenate(of_rank) for of_rank in zip(*parts, strict=True)]


def _query_key_value(query: Array, key: Array, value: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    return _joined(
        _equally(query, sizes["A"], num_ranks), _kv(key, sizes["K"], num_ranks), _kv(value, sizes["K"], num_ranks)
    )


def _fused(_kind: str, indices: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    """All queries, all keys, all values (phi3; gpt2 on its other axis)."""
    heads, kv_heads = sizes["A"], sizes["K"]
    by_head = indices.reshape(heads + 2 * kv_heads, -1)
    query, key, value = (part.ravel() for part in np.split(by_head, [heads, heads + kv_heads]))
    return _query_key_value(query, key, value, num_ranks, sizes)


def _grouped(_kind: str, indices: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    """A group of queries, their key, their value, and the next group (falcon.py and bloom.py load_weights)."""
    per_group = sizes["A"] // sizes["K"]
    groups = indices.reshape(sizes["K"], per_group + 2, -1)
    query, key, value = groups[:, :per_group].ravel(), groups[:, per_group].ravel(), groups[:, per_group + 1].ravel()
    return _query_key_value(query, key, value, num_ranks, sizes)


def _vocabulary(_kind: str, indices: Array, num_ranks: int, _sizes: Sizes) -> list[Array]:
    padded = -(-indices.size // 64) * 64
    if padded % num_ranks:
        padded = -(-indices.size // (64 * num_ranks)) * 64 * num_ranks
    share = padded // num_ranks
    return [indices[rank * share : (rank + 1) * share] for rank in range(num_ranks)]


def _gate_up(_kind: str, indices: Array, num_ranks: int, _sizes: Sizes) -> list[Array]:
    gate, up = np.split(indices, 2)
    return _joined(_equally(gate, gate.size, num_ranks), _equally(up, up.size, num_ranks))


def _tower(kind: str, indices: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    """Parts of a vision part, which is whole if ranks do not divide its heads (vision.py is_vit_use_data_parallel)."""
    if sizes["VA"] % num_ranks:
        return [indices] * num_ranks
    parts = np.split(indices, kind.count("|") + 1)
    return _joined(*(_equally(part, part.size, num_ranks) for part in parts))


def _convolution(_kind: str, indices: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    """mamba_v2_sharded_weight_loader over query, key, value of linear attention."""
    key_dim = sizes["G"] * sizes["B"]
    query, key, value = np.split(indices, [key_dim, 2 * key_dim])
    heads = sizes["G"], sizes["G"], sizes["W"]
    parts = zip((query, key, value), heads, strict=True)
    return _joined(*(_equally(part, count, num_ranks) for part, count in parts))


def _ragged(kind: str, indices: Array, num_ranks: int, _sizes: Sizes) -> list[Array]:
    """Whole blocks, as many for each rank as the first; the last may hold fewer, or none (gpt_oss.py)."""
    block = int(kind.partition(":")[2])
    share = -(-(indices.size // block) // num_ranks) * block
    return [indices[rank * share : (rank + 1) * share] for rank in range(num_ranks)]


def hash_columns(vocabulary: int, count: int, layer: int) -> list[int]:
    """The rows of the columns of a layer's hash table, as `EngramLayout` hands primes out (deepseek_v41 engram.py)."""
    sieve = np.ones(vocabulary + 100 * count * (layer + 1) + 100, bool)
    for factor in range(2, int(sieve.size**0.5) + 1):
        sieve[2 * factor :: factor] = False
    primes = [int(prime) for prime in np.flatnonzero(sieve) if prime >= max(vocabulary, 2)]
    return primes[layer * count : (layer + 1) * count]


def _hash(kind: str, indices: Array, num_ranks: int, _sizes: Sizes) -> list[Array]:
    """Whole columns (ParallelEngramEmbedding), or equal rows (SGLang shard_range) where a rank would have no column."""
    columns = hash_columns(*map(int, kind.partition(":")[2].split("/")))
    share = -(-len(columns) // num_ranks)
    if (num_ranks - 1) * share >= len(columns):
        size = indices.size
        return [indices[size * rank // num_ranks : size * (rank + 1) // num_ranks] for rank in range(num_ranks)]
    of_column = np.repeat(np.arange(len(columns)), columns)
    return [indices[of_column // share == rank] for rank in range(num_ranks)]


def _shard(kind: str, indices: Array, num_ranks: int, sizes: Sizes) -> list[Array]:
    """Rows of a shard that belong to a rank's share of all shards, which are equal (compute_ple_shard_overlap)."""
    shard, count = map(int, kind.partition(":")[2].split("/"))
    held = _vocabulary(kind, np.arange(count * indices.size), num_ranks, sizes)
    return [indices[part[part // indices.size == shard] % indices.size] for part in held]


_CUTS: dict[str, Callable[[str, Array, int, Sizes], list[Array]]] = {
    "even": lambda _kind, indices, num_ranks, _sizes: _equally(indices, indices.size, num_ranks),
    "heads": lambda kind, indices, num_ranks, sizes: _equally(indices, _times(kind) * sizes["A"], num_ranks),
    "linear": lambda _kind, indices, num_ranks, sizes: _equally(indices, sizes["G"], num_ranks),
    "kv": lambda kind, indices, num_ranks, sizes: _kv(indices, _times(kind) * sizes["K"], num_ranks),
    "q|k|v": _fused,
    "grouped": _grouped,
    "vocabulary": _vocabulary,
    "even|even": _gate_up,
    "groups": lambda _kind, indices, num_ranks, sizes: _equally(indices, sizes["G"], num_ranks),
    "tower": _tower,
    "tower|tower": _tower,
    "tower|tower|tower": _tower,
    "key|key|value": _convolution,
    "ragged": _ragged,
    "hash": _hash,
    "shard": _shard,
}
