"""The shards that are converted without being written are those of huggingface_hub and of the stock safetensors."""

from __future__ import annotations

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from relayout.checkpoint.shards import MemoryShard, in_stored_order, lay_out_shards, model_order, share_out
from relayout.core.extents import Extent
from relayout.loader.held import HeldTensor

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8, torch.float16]
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
def test_shards_are_filled_as_huggingface_hub_does(sizes: list[int], limit: int) -> None:
    split = split_state_dict_into_shards_factory(
        {str(index): size for index, size in enumerate(sizes)},
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    expected = [list(map(int, names)) for names in split.filename_to_tensors.values()]
    assert share_out(sizes, limit) == expected


def shards_of(tensors: dict[str, torch.Tensor]) -> tuple[list[MemoryShard], list[HeldTensor]]:
    held = [HeldTensor.of(name, tensor) for name, tensor in tensors.items()]
    heads = [one.head for one in held]
    shards, _ = lay_out_shards(heads, [in_stored_order(heads, range(len(heads)))], {})
    return shards, held


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6))
def test_a_shard_is_what_the_stock_safetensors_saves(kinds: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in kinds.items()}
    [shard], held = shards_of(tensors)
    blob = bytearray(shard.header.ljust(shard.nbytes, b"\0"))
    for t, part, position in shard.parts(Extent(0, shard.nbytes)):
        blob[position : position + part.nbytes] = held[t].bytes_of(part).tobytes()
    assert bytes(blob) == save(tensors, {"format": "pt"})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 200), st.integers(0, 60))
def test_an_extent_of_a_shard_has_the_bytes_of_its_tensors(sizes: list[int], offset: int, nbytes: int) -> None:
    tensors = {f"t{index}": torch.arange(size, dtype=torch.uint8) for index, size in enumerate(sizes)}
    [shard], held = shards_of(tensors)
    whole = save(tensors, {"format": "pt"})
    offset += len(shard.header) - 20
    found = bytearray(whole[offset : offset + nbytes].ljust(nbytes, b"\0"))
    for position in range(max(0, len(shard.header) - offset), min(nbytes, shard.nbytes - offset)):
        found[position] = 255
    for t, part, position in shard.parts(Extent(offset, nbytes)):
        found[position : position + part.nbytes] = held[t].bytes_of(part).tobytes()
    assert bytes(found) == whole[offset : offset + nbytes].ljust(nbytes, b"\0")


@given(st.lists(st.text(alphabet="\0\1\2\3\4.01a9²é", max_size=8), max_size=8))
@example(["b", "a.٣", "a.²", "a.x", "a.", "a.10", "a.7.b", f"a.{10**25}", f"a.{9 * 10**24}", "a.7", "a"])
def test_model_order_is_that_of_the_parts(names: list[str]) -> None:
    """Parts as tuples compare as FORMAT.md says: numbers by value, and before words."""

    def by_parts(name: str) -> list[tuple[bool, int, str]]:
        parts = name.split(".")
        return [(False, int(part), "") if part.isascii() and part.isdigit() else (True, 0, part) for part in parts]

    assert sorted(names, key=model_order) == sorted(names, key=by_parts)
