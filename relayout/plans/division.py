"""Divides dimensions and experts among ranks. Pure integer arithmetic.

The rules are those of the engines (vLLM 0.33 `model_executor/layers/linear.py` and `vocab_parallel_embedding.py`;
SGLang 0.5 for a vocabulary that cannot be divided evenly).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

from relayout.core.arguments import numbers
from relayout.core.extents import align_up
from relayout.core.slices import NOT_HELD, WHOLE, Cut, Range, Slice, merged
from relayout.core.tables import PlannedTensor
from relayout.errors import PlanError
from relayout.plans.family import (
    EVEN,
    EXPERTS,
    HASH_COLUMNS,
    HASH_HEADS,
    HASH_VOCABULARY,
    HEAD_DIM,
    KV_HEADS,
    MAX_NGRAM,
    RAGGED,
    VOCABULARY,
    Family,
    Rule,
    SizeSource,
    head_dim_of,
    is_shared,
    language_config,
    look_up,
)
from relayout.plans.quantization import INPUT_SCALES

VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to a multiple of this before they divide it (vLLM DEFAULT_VOCAB_PADDING_SIZE)."""

_MAX_SIZE = 2**63 - 1

_MAX_RANGES = 2**16
"""Largest number of ranges in a fused dimension."""

_MAX_COLUMNS = 2**12
"""Largest number of columns in all hash tables together."""

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases that make the Miller-Rabin primality test exact below 3.1 * 10**23 (Sorenson and Webster, 2015)."""

_HEADS = frozenset({"heads", KV_HEADS})


class Sizes:
    """Looks up the sizes that a family's rules use in config.json. The language model's object has precedence."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[SizeSource]],
        config: Mapping[str, Any],
        defaults: Mapping[str, int] | None = None,
    ) -> None:
        """Initialize the lookup; `defaults` has the values of keys that config.json omits."""
        nested = language_config(config)
        self._configs = (nested, config, defaults or {})
        self._sources = sources

    def has(self, size: str) -> bool:
        """Return True if the plan has a source for the size."""
        return size in self._sources

    def is_computed(self, size: str) -> bool:
        """Return True if one of the plan's sources for the size is a quotient."""
        return any("/" in str(source.use) for source in self._sources.get(size, ()))

    def find(self, size: str) -> int | None:
        """Return the size, or None if config.json does not have it."""
        for source in self._sources.get(size, ()):
            if source.when is not None and self._value(source.when) != source.equals:
                continue
            value = self._number(source.use)
            if value is not None:
                return value
        return None

    def _number(self, use: str | int) -> int | None:
        if isinstance(use, int):
            return use
        dividend, _, divisor = (part.strip() for part in use.partition("/"))
        if divisor:
            numbers = self._number(dividend), self._number(divisor)
            return None if numbers[0] is None or numbers[1] is None else numbers[0] // numbers[1] or None
        value = self._value(dividend)
        return value if type(value) is int and 0 < value <= _MAX_SIZE else None

    def _value(self, key: str) -> Any:
        return look_up(key, *self._configs)

    def get(self, size: str) -> int:
        """Return the size, or raise PlanError if config.json does not have it."""
        value = self.find(size)
        if value is None:
            keys = " or ".join(str(source.use) for source in self._sources.get(size, ()))
            missing = (
                f"config.json has no positive integer {keys}" if keys else "the plan does not say where to find it"
            )
            raise PlanError(f"size {size!r} is unknown: {missing}", code="config")
        return value


def divide(rule: Rule, size: int, sizes: Sizes, num_ranks: int) -> list[tuple[Range, ...]]:
    """Return, for each rank, its ranges of a dimension of `size` elements, in the order that the rank stores them."""
    if len(rule.units) > 1 or rule.widths:
        return _fused(rule, size, sizes, num_ranks)
    [unit] = rule.units
    if unit == VOCABULARY:
        ranges = vocabulary_ranges(size, num_ranks)
    elif unit == RAGGED:
        ranges = ragged_ranges(size, rule.block, num_ranks)
    elif unit == EVEN:
        ranges = even_ranges(size, size, num_ranks)
    elif unit == HASH_COLUMNS:
        heads, orders = sizes.get(HASH_HEADS), sizes.get(MAX_NGRAM) - 1
        ranges = hash_ranges(size, hash_columns(size, sizes.get(HASH_VOCABULARY), heads * orders), num_ranks)
    else:
        count = sizes.get(unit)
        head_dim = head_dim_of(unit)
        if head_dim is not None and (unit in _HEADS or sizes.has(head_dim)) and size != count:
            _check_heads(size, count, sizes, head_dim)
        elif size % count:
            raise PlanError(f"{size} elements, but config.json declares {count} {unit}", code="config")
        ranges = even_ranges(size, count, num_ranks, share=is_shared(unit))
    return [(part,) for part in ranges]


def even_ranges(size: int, count: int, num_ranks: int, *, share: bool = False) -> list[Range]:
    """Divide `count` groups of `size // count` elements evenly; return (start, length) for each rank.

    With `share` and more ranks than groups, each group is held by the same number of neighboring ranks
    (vLLM 0.33 QKVParallelLinear: KV head `rank // (num_ranks // count)`).
    """
    group = size // count if count else 0
    if share and num_ranks > count > 0:
        if num_ranks % count == 0:
            ranks = num_ranks // count
            return [(rank // ranks * group, group) for rank in range(num_ranks)]
        raise PlanError(
            f"{count} heads of {group} elements, which {num_ranks} ranks cannot share evenly", code="indivisible"
        )
    if count % num_ranks == 0:
        length = count // num_ranks * group
        return [(rank * length, length) for rank in range(num_ranks)]
    what = f"{count} elements" if group <= 1 else f"{count} groups of {group} elements"
    raise PlanError(f"{what}, not a multiple of {num_ranks}", code="indivisible")


def vocabulary_ranges(size: int, num_ranks: int) -> list[Range]:
    """Divide vocabulary rows as engines do: pad to a multiple of 64, divide, and drop the padding.

    If the number of ranks does not divide the padded size, pad to a multiple of 64 x ranks (SGLang 0.5
    `vocab_parallel_embedding.py`; vLLM raises an error). The last ranks may hold fewer rows, or none.
    """
    padded = align_up(size, VOCABULARY_MULTIPLE)
    if padded % num_ranks:
        padded = align_up(size, VOCABULARY_MULTIPLE * num_ranks)
    return _ceil_ranges(size, padded // num_ranks, num_ranks)


def ragged_ranges(size: int, block: int, num_ranks: int) -> list[Range]:
    """Divide whole blocks: each rank holds the rounded-up share, and the last ranks may hold less, or nothing.

    vLLM 0.33 does the same (`models/gpt_oss.py`).
    """
    if size % block:
        raise PlanError(f"{size} elements, not a multiple of the block size {block}", code="indivisible")
    return _ceil_ranges(size, -(-size // block // num_ranks) * block, num_ranks)


def hash_columns(size: int, vocabulary: int, count: int) -> tuple[int, ...]:
    """Return the number of rows in each of the `count` columns of a hash table of n-grams with `size` rows.

    The number of rows in each column is prime. The tables of a model use the primes from `vocabulary` on in ascending
    order, each once, so the sum of a table's primes identifies its columns. The rule is that of vLLM 0.33
    (`models/deepseek_v41/common/engram.py`, `EngramLayout`) and SGLang 0.5.23 (`srt/layers/engram.py`).

    Raises:
        PlanError: `size` is not the sum of `count` successive primes of that sequence, or `count` is out of range.
    """
    if not 1 <= count <= _MAX_COLUMNS:
        raise PlanError(f"{count} columns of a hash table, expected 1 to {_MAX_COLUMNS}", code="config")
    columns = _columns_of(size, vocabulary, count)
    if columns is None:
        what = f"{size} rows, which are not the sum of {count} successive primes from {vocabulary} on"
        raise PlanError(f"{what}: config.json declares other tables of n-grams", code="config")
    return columns


@lru_cache(maxsize=64)
def _columns_of(size: int, vocabulary: int, count: int) -> tuple[int, ...] | None:
    found = _primes(vocabulary)
    for _ in range(_MAX_COLUMNS // count if vocabulary * count <= size else 0):
        columns = tuple(islice(found, count))
        if sum(columns) >= size:  # The sums are ascending, so no later one can match.
            return columns if sum(columns) == size else None
    return None


def _primes(start: int) -> Iterator[int]:
    """Yield the primes from `start` on."""
    candidate = max(start, 2)
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(number: int) -> bool:
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    for witness in _WITNESSES:
        power = pow(witness, number - 1 >> twos, number)
        if power != 1 and all(pow(power, 1 << square, number) != number - 1 for square in range(twos)):
            return False
    return True


def hash_ranges(size: int, columns: Sequence[int], num_ranks: int) -> list[Range]:
    """Divide the columns of a hash table: each rank holds the rounded-up share, and the last ones may hold fewer.

    vLLM 0.33 does the same (`ParallelEngramEmbedding`), and so does SGLang 0.5.23 (`shard_range`) if the number of
    ranks divides the number of columns. If a rank would hold no column (an error in vLLM), all ranks hold equal numbers
    of rows instead, rounded down, as in SGLang.
    """
    share = -(-len(columns) // num_ranks)
    starts = [0, *accumulate(columns)]
    bounds = [starts[min(rank * share, len(columns))] for rank in range(num_ranks + 1)]
    if (num_ranks - 1) * share >= len(columns):
        bounds = [size * rank // num_ranks for rank in range(num_ranks + 1)]
    return [(start, end - start) for start, end in pairwise(bounds)]


def part_of(ranges: Sequence[Range], start: int, length: int) -> tuple[Range, ...]:
    """Return the parts of `ranges` inside `[start, start + length)`, counted from `start`."""
    clipped = [(max(first, start), min(first + count, start + length)) for first, count in ranges]
    return tuple((first - start, end - first) for first, end in clipped if first < end)


def owner(expert: int, count: int, num_ranks: int) -> int:
    """Return the rank that owns the expert: the rank for which `owner_ranges` contains it."""
    base, rest = divmod(count, num_ranks)
    first = rest * (base + 1)  # Number of experts on the ranks that hold one expert more.
    return expert // (base + 1) if expert < first else rest + (expert - first) // base


def owner_ranges(count: int, num_ranks: int) -> list[Range]:
    """Divide experts into contiguous blocks; if there is a remainder, the first ranks hold one expert more each.

    vLLM 0.33 does the same (`fused_moe/expert_map_manager.py`, linear placement).
    """
    base, rest = divmod(count, num_ranks)
    return [(rank * base + min(rank, rest), base + (rank < rest)) for rank in range(num_ranks)]


def checked_cut(dtype: str, shape: tuple[int, ...], slices: tuple[Slice, ...]) -> Cut:
    """Return a cut with slices in canonical form, after checking that each slice consists of whole bytes."""
    cut = Cut(tuple(part.canonical(shape) for part in slices))
    _ = cut.tensor(dtype, shape).transfers
    return cut


def with_experts(
    family: Family, tensors: Sequence[PlannedTensor], slices: Sequence[Slice], experts: str | Iterable[int]
) -> list[Slice]:
    """Replace a rank's slices of the experts by the given experts, each held whole.

    Input scales of experts are unchanged: each rank has the scales of all experts.

    Args:
        family: the rules, which name the tensors of experts.
        tensors: the tensors of the checkpoint.
        slices: the rank's slice of each tensor.
        experts: the experts' numbers, in a form that `core.arguments.numbers` accepts.

    Raises:
        PlanError: no tensor belongs to an expert, or `experts` contains a number that no layer has.
    """
    stored = [_experts_in(family, tensor) for tensor in tensors]
    count = max((numbers_of.stop for numbers_of in stored if numbers_of is not None), default=0)
    if not count:
        raise PlanError(f"experts: no tensor matches the experts of plan {family.full_name!r}", code="option")
    wanted = numbers(experts, count, "experts", f"the checkpoint has {count}")
    chosen = []
    for tensor, part, numbers_of in zip(tensors, slices, stored, strict=True):
        if numbers_of is None:
            chosen.append(part)
        elif family.expert(tensor.name) is not None:
            chosen.append(WHOLE if numbers_of.start in wanted else NOT_HELD)
        else:
            rows = ((expert, 1) for expert in wanted if expert in numbers_of)
            chosen.append(Slice.along(0, rows).canonical(tensor.shape))
    return chosen


def _experts_in(family: Family, tensor: PlannedTensor) -> range | None:
    """Return the numbers of the experts that a tensor has weights of; None if it does not belong to experts."""
    expert = family.expert(tensor.name)
    if expert is not None:
        return None if tensor.name.rpartition(".")[2] in INPUT_SCALES else range(expert, expert + 1)
    return range(tensor.shape[0]) if tensor.shape and family.stacks_experts(tensor.name) else None


class ExpertOwners:
    """Assigns the tensors of experts to ranks, for expert parallelism."""

    def __init__(self, family: Family, sizes: Sizes, whole: Cut) -> None:
        self._family = family
        self._sizes = sizes
        self._whole = whole
        self._num_ranks = len(whole.slices)
        self._owned: dict[int, Cut] = {}

    def owners(self, tensor: PlannedTensor) -> Cut | None:
        """Return the cut of the tensor, or None if it does not belong to an expert."""
        expert = self._family.expert(tensor.name)
        if expert is not None:
            if tensor.name.rpartition(".")[2] in INPUT_SCALES:
                return self._whole
            count = self._sizes.get(EXPERTS)
            if expert >= count:
                raise PlanError(f"expert {expert}, but config.json declares {count} experts", code="config")
            return self._owned_by(owner(expert, count, self._num_ranks))
        if tensor.shape and self._family.stacks_experts(tensor.name):
            declared = self._sizes.find(EXPERTS)
            if declared not in (None, tensor.shape[0]):
                raise PlanError(
                    f"{tensor.shape[0]} experts along dim 0, but config.json declares {declared}", code="config"
                )
            slices = tuple(Slice.along(0, (part,)) for part in owner_ranges(tensor.shape[0], self._num_ranks))
            return checked_cut(tensor.dtype, tensor.shape, slices)
        return None

    def _owned_by(self, rank: int) -> Cut:
        if rank not in self._owned:
            self._owned[rank] = self._whole.only((rank,))
        return self._owned[rank]


def _ceil_ranges(size: int, share: int, num_ranks: int) -> list[Range]:
    starts = [min(rank * share, size) for rank in range(num_ranks)]
    return [(start, min(share, size - start)) for start in starts]


def _fused(rule: Rule, size: int, sizes: Sizes, num_ranks: int) -> list[tuple[Range, ...]]:
    """Divide each part of a fused dimension; each rank holds its range of the first part, then of the second, etc.

    The fused layers of engines do the same (vLLM 0.33 MergedColumnParallelLinear and QKVParallelLinear).
    """
    parts = _parts(rule, size, sizes)
    groups = 1 if rule.interleaved is None else sizes.get(rule.interleaved)
    if any(count % groups for count, _ in parts):
        counts = " + ".join(str(count) for count, _ in parts)
        raise PlanError(f"{counts} heads cannot be divided into {groups} equal groups", code="indivisible")
    if groups * len(parts) > _MAX_RANGES:
        raise PlanError(f"{groups} groups of {len(parts)} parts are too many ranges, limit {_MAX_RANGES}", code="limit")
    pitch = size // groups
    held: list[list[Range]] = [[] for _ in range(num_ranks)]
    before = 0
    for unit, (count, width) in zip(rule.units, parts, strict=True):
        together = count // groups * width  # Elements of the part in one group.
        ranges = even_ranges(count * width, count, num_ranks, share=is_shared(unit))
        for rank, (start, length) in enumerate(ranges):
            while length:
                group, inside = divmod(start, together)
                count_here = min(length, together - inside)
                held[rank].append((group * pitch + before + inside, count_here))
                start, length = start + count_here, length - count_here
        before += together
    return [merged(ranges or [(0, 0)]) for ranges in held]


def _parts(rule: Rule, size: int, sizes: Sizes) -> list[tuple[int, int]]:
    """Return, for each part of a fused dimension, its number of units and the number of elements in each unit."""
    if set(rule.units) == {EVEN}:
        if size % len(rule.units):
            raise PlanError(
                f"{size} elements cannot be divided into {len(rule.units)} parts of equal size", code="indivisible"
            )
        return [(size // len(rule.units), 1)] * len(rule.units)
    counts = [sizes.get(unit) for unit in rule.units]
    if rule.widths:
        parts = list(zip(counts, (sizes.get(width) for width in rule.widths), strict=True))
        if sum(count * width for count, width in parts) != size:
            words = " + ".join(f"{count} * {width}" for count, width in parts)
            raise PlanError(f"{size} elements, but config.json declares {words}", code="config")
        return parts
    if _HEADS & set(rule.units):
        _check_heads(size, sum(counts), sizes)
    elif size % sum(counts):
        raise PlanError(
            f"{size} elements cannot be divided into {' + '.join(map(str, counts))} units of equal size",
            code="indivisible",
        )
    return [(count, size // sum(counts)) for count in counts]


def _check_heads(size: int, count: int, sizes: Sizes, name: str = HEAD_DIM) -> None:
    """Raise PlanError unless the dimension consists of the declared number of heads of the declared size.

    If the plan does not compute the head size, it may be unknown, since the model may have heads of several sizes.
    """
    head_dim = sizes.get(name) if sizes.is_computed(name) else sizes.find(name)
    if size % count or (head_dim is not None and size != count * head_dim):
        by = "" if head_dim is None else f" of {head_dim} elements"
        raise PlanError(f"{size} elements, but config.json declares {count} heads{by}", code="config")
