"""relayout.conversion.layout: where each slice lies in its rank file, by properties over sizes from 0 to gigabytes."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from support.planning import all_slices, conversion_of, plan_of

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.conversion.layout import Conversion, HeaderBuilder, check_alignment, not_for_dcp_because
from relayout.core.extents import Extent
from relayout.core.slices import BITS, NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.format.safetensors import parse_header
from relayout.plans.plan import Plan
from relayout.storage.local.store import LocalStore

ALIGNMENTS = [512, 4096, 65536, 2 * 2**20]
CONTENT = "0123456789abcdef0123456789abcdef"


def make_source(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> SourceCheckpoint:
    """A checkpoint of tensors (name, dtype, shape), none of which is stored anywhere."""
    heads = tuple(SourceTensor(name, dtype, shape, 0, Extent(0, 0)) for name, dtype, shape in tensors)
    return SourceCheckpoint(LocalStore(Path("checkpoint")), (), heads, metadata or {})


def largest_power(nbytes: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides; `limit` for nothing."""
    power = limit
    while nbytes % power:
        power //= 2
    return power


def smallest_power(sizes: list[int], limit: int) -> int:
    """Of the slices of one tensor."""
    return min(largest_power(nbytes, limit) for nbytes in sizes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[SourceCheckpoint, Plan, list[list[int]]]:
    """A checkpoint, a plan, and the bytes of each tensor's slice on each rank, which are often round numbers."""
    num_ranks = draw(st.integers(1, 3))
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    slices: list[tuple[Slice, ...]] = []
    nbytes: list[list[int]] = []
    for number in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(["U8", "BF16", "F32", "I64", "F4"]))
        item_bits = BITS[dtype]
        unit = 2 if dtype == "F4" else 1
        lengths = [
            unit * (draw(st.integers(0, 5)) << draw(st.sampled_from([0, 0, 1, 3, 5, 8, 9, 11, 12, 16, 21])))
            for _ in range(num_ranks)
        ]
        if draw(st.booleans()):
            tensors.append((f"t.{number}", dtype, (lengths[0],)))
            slices.append((WHOLE,) * num_ranks)
            lengths = lengths[:1] * num_ranks
        else:
            tensors.append((f"t.{number}", dtype, (sum(lengths),)))
            starts = [sum(lengths[:rank]) for rank in range(num_ranks)]
            slices.append(tuple(Slice.along(0, (part,)) for part in zip(starts, lengths, strict=True)))
        nbytes.append([length * item_bits // 8 for length in lengths])
    return make_source(tensors), plan_of("x", num_ranks, tuple(slices)), nbytes


max_part_sizes = st.sampled_from([1, 4096, 100_000, 10**7, 48 * 10**9])


@given(case=cases(), alignment=st.sampled_from(ALIGNMENTS), max_part_nbytes=max_part_sizes)
def test_each_slice_lies_behind_the_one_before_and_is_as_aligned_as_the_slices_of_its_tensor(
    case: tuple[SourceCheckpoint, Plan, list[list[int]]], alignment: int, max_part_nbytes: int
) -> None:
    source, plan, nbytes = case
    layout = conversion_of(source, plan, alignment, max_part_nbytes=max_part_nbytes).layout
    assert len(layout.holders) == plan.num_ranks
    assert sorted(number for numbers in layout.holders for number in numbers) == list(range(len(layout.files)))
    for rank in range(plan.num_ranks):
        assert sorted(t for file in layout.files_of(rank) for t in file.tensors) == list(range(len(nbytes)))
        for file in layout.files_of(rank):
            assert file.holder == rank
            assert file.data_start % alignment == 0
            position = file.data_start
            for t, offset in zip(file.tensors, file.offsets, strict=True):
                assert offset == position
                assert offset % smallest_power(nbytes[t], alignment) == 0
                assert offset % (BITS[source.tensors[t].dtype] // 8 or 1) == 0
                position += nbytes[t][rank]
            assert file.nbytes == position
    assert layout.nbytes == sum(file.nbytes for file in layout.files)


@given(case=cases(), alignment=st.sampled_from(ALIGNMENTS), max_part_nbytes=max_part_sizes)
def test_in_a_unit_aligned_tensors_come_first_in_model_order_then_a_tail_by_falling_power(
    case: tuple[SourceCheckpoint, Plan, list[list[int]]], alignment: int, max_part_nbytes: int
) -> None:
    source, plan, nbytes = case
    for order in conversion_of(source, plan, alignment, max_part_nbytes=max_part_nbytes).layout.units:
        powers = [smallest_power(nbytes[t], alignment) for t in order]
        assert powers == sorted(powers, reverse=True)
        aligned = [t for t in order if all(size % alignment == 0 for size in nbytes[t])]
        assert list(order[: len(aligned)]) == aligned == sorted(aligned)
        for power, group in groupby(order, key=lambda t: smallest_power(nbytes[t], alignment)):
            tensors = list(group)
            if power >= 16:
                assert tensors == sorted(tensors)
            else:  # By falling sizes, so that one strided read spreads all of a size.
                keys = [([-size for size in nbytes[t]], t) for t in tensors]
                assert keys == sorted(keys)


@given(case=cases(), max_part_nbytes=max_part_sizes)
def test_a_unit_is_neighbors_in_model_order_as_many_as_the_limit_of_its_files_allows(
    case: tuple[SourceCheckpoint, Plan, list[list[int]]], max_part_nbytes: int
) -> None:
    source, plan, nbytes = case
    layout = conversion_of(source, plan, 4096, max_part_nbytes=max_part_nbytes).layout
    assert [t for unit in layout.units for t in sorted(unit)] == list(range(len(nbytes)))
    assert all(layout.units) or (len(layout.units) == 1 and not nbytes)
    for unit, following in zip(layout.units, [*layout.units[1:], ()], strict=True):
        full = [sum(nbytes[t][rank] for t in unit) for rank in range(plan.num_ranks)]
        assert max(full) <= max_part_nbytes or len(unit) == 1
        if following:
            more = nbytes[min(following)]
            assert any(a + b > max_part_nbytes for a, b in zip(full, more, strict=True))


@given(case=cases(), max_part_nbytes=max_part_sizes)
def test_part_p_of_every_rank_holds_what_it_has_of_unit_p_in_the_same_order(
    case: tuple[SourceCheckpoint, Plan, list[list[int]]], max_part_nbytes: int
) -> None:
    source, plan, _ = case
    layout = conversion_of(source, plan, 4096, max_part_nbytes=max_part_nbytes).layout
    for rank in range(plan.num_ranks):
        files = layout.files_of(rank)
        assert [file.tensors for file in files] == list(layout.units)
        assert [file.name for file in files] == [
            f"model-rank-{rank}-part-{part}.safetensors" for part in range(len(layout.units))
        ]


def test_a_rank_that_holds_nothing_of_a_unit_has_an_empty_part() -> None:
    source = make_source([(f"t{i}", "U8", (4096,)) for i in range(3)])
    owners = (0, 1, 1)
    plan = plan_of("x", 2, [tuple(WHOLE if rank == owner else NOT_HELD for rank in range(2)) for owner in owners])
    layout = conversion_of(source, plan, 4096, max_part_nbytes=4096).layout
    assert layout.units == ((0, 1), (2,))
    assert [[file.tensors for file in layout.files_of(rank)] for rank in range(2)] == [[(0,), ()], [(1,), (2,)]]
    assert layout.files_of(0)[1].nbytes == layout.files_of(0)[1].data_start == 4096


@given(
    rows=st.lists(st.lists(st.integers(0, 5000), min_size=3, max_size=3), min_size=1, max_size=6),
    row_nbytes=st.sampled_from([1, 8, 16, 160, 4096]),
    max_part_nbytes=max_part_sizes,
)
def test_a_rank_has_the_rows_of_a_table_as_one_run_that_is_a_file_of_its_own(
    rows: list[list[int]], row_nbytes: int, max_part_nbytes: int
) -> None:
    """Whatever their sizes, also if a slice is empty or not there at all, and with other tensors between them."""
    tensors = [(f"t.{2 * n}", "U8", (sum(of_rank), row_nbytes)) for n, of_rank in enumerate(rows)]
    others = [(f"t.{2 * n + 1}", "U8", (5000,)) for n in range(len(rows))]
    starts = [np.cumsum([0, *of_rank]).tolist() for of_rank in rows]
    cut = [
        tuple(Slice.along(0, ((start, n),)) if n % 2 else NOT_HELD for start, n in zip(at, of_rank, strict=False))
        for at, of_rank in zip(starts, rows, strict=True)
    ]
    source = make_source([one for pair in zip(tensors, others, strict=True) for one in pair])
    slices = [one for part in cut for one in (part, (WHOLE,) * 3)]
    table = tuple(range(0, 2 * len(rows), 2))[::-1]
    plan = plan_of("x", 3, slices, tables=(table,))
    layout = conversion_of(source, plan, 4096, max_part_nbytes=max_part_nbytes).layout
    assert layout.units[-1] == table
    assert sorted(t for unit in layout.units[:-1] for t in unit) == list(range(1, 2 * len(rows), 2))
    for rank in range(3):
        file = layout.files_of(rank)[-1]
        held = [t for t in table if rows[t // 2][rank] % 2]
        assert file.tensors == tuple(held)
        nbytes = [rows[t // 2][rank] * row_nbytes for t in held]
        assert list(file.offsets) == [file.data_start + sum(nbytes[:n]) for n in range(len(held))]
        assert file.data_start % 4096 == 0
        assert file.nbytes == file.data_start + sum(nbytes)


def test_a_checkpoint_of_tables_alone_has_no_other_unit() -> None:
    source = make_source([("t.0", "U8", (5, 3)), ("t.1", "U8", (7, 3))])
    conversion = conversion_of(source, plan_of("x", 1, ((WHOLE,), (WHOLE,)), tables=((1,), (0,))), 4096)
    assert conversion.layout.units == ((1,), (0,))


def test_a_part_ends_before_its_header_is_more_than_hubs_parse() -> None:
    source = make_source([(f"{i}" * 10**6, "U8", (2,)) for i in range(10, 22)])
    plan = plan_of("x", 2, ((Slice.along(0, ((0, 1),)), Slice.along(0, ((1, 1),))),) * 12)
    conversion = conversion_of(source, plan, 4096)
    layout = conversion.layout
    files = layout.files_of(1)
    assert [t for file in files for t in file.tensors] == list(range(12))
    assert all(10_000_000 < file.data_start < 25_000_000 for file in files[:-1])
    assert len(files) > 1


@pytest.mark.parametrize("alignment", [-512, -1, 0, 1, 256, 511, 513, 1536, 4097, 6000, 32 * 2**20])
def test_an_alignment_that_is_no_power_of_two_in_the_range_is_refused(alignment: int) -> None:
    message = f"^align: {alignment} bytes, expected a power of two from 512 to 16777216$"
    with pytest.raises(PlanError, match=message):
        check_alignment(alignment)
    with pytest.raises(PlanError, match=message):
        conversion_of(make_source([]), plan_of("none", 1, ()), alignment)


@pytest.mark.parametrize("alignment", [512 << i for i in range(16)])
def test_every_power_of_two_in_the_range_is_an_alignment(alignment: int) -> None:
    check_alignment(alignment)
    layout = conversion_of(make_source([("a", "U8", (3,))]), plan_of("none", 1, ((WHOLE,),)), alignment).layout
    assert layout.files[0].offsets == [alignment]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_part_size_below_one_byte_is_refused(nbytes: int) -> None:
    with pytest.raises(PlanError, match=f"a part size of {nbytes} bytes"):
        conversion_of(make_source([]), plan_of("none", 1, ()), 512, max_part_nbytes=nbytes)


# Headers of rank files.

TENSORS: list[tuple[str, str, tuple[int, ...]]] = [
    ("embed", "BF16", (10, 256)),
    ("layers.0.down", "F32", (3, 8)),
    ("layers.0.norm", "BF16", (5,)),
    ("layers.0.up", "U8", (4, 64, 2)),
    ("scale", "F32", ()),
]


def halves(dim: int) -> list[tuple[int, int]]:
    return [(0, dim // 2), (dim // 2, dim - dim // 2)]


# The vocabulary's second part is empty on rank 1.
BOXES = plan_of(
    "x",
    2,
    (
        (Slice.along(0, ((0, 10),)), Slice.along(0, ((10, 0),))),
        tuple(Slice.along(1, (part,)) for part in halves(8)),
        (WHOLE, WHOLE),
        tuple(Slice.along(1, (part,)) for part in halves(64)),
        (WHOLE, WHOLE),
    ),
)
FUSED = plan_of(
    "x",
    2,
    (
        *all_slices(BOXES)[:3],
        (Slice.along(1, ((0, 8), (32, 8))), Slice.along(1, ((8, 8), (40, 8)))),
        all_slices(BOXES)[4],
    ),
)


def header_of(conversion: Conversion, number: int) -> bytes:
    headers = HeaderBuilder(conversion.source, conversion.cut, conversion.options)
    return headers.build(conversion.layout.files[number], CONTENT)


def written(conversion: Conversion, number: int) -> bytes:
    """The file with position-dependent data."""
    head, file = header_of(conversion, number), conversion.layout.files[number]
    return head + (np.arange(file.nbytes - len(head)) * 31 + 7).astype(np.uint8).tobytes()


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("max_part_nbytes", [10**9, 300])
@pytest.mark.parametrize("plan", [BOXES, FUSED], ids=["boxes", "fused"])
def test_the_stock_reader_reads_rank_files(plan: Plan, max_part_nbytes: int, alignment: int) -> None:
    source = make_source(TENSORS)
    conversion = conversion_of(source, plan, alignment, max_part_nbytes=max_part_nbytes)
    layout = conversion.layout
    for rank, numbers in enumerate(layout.holders):
        seen: dict[str, tuple[int, ...]] = {}
        for number in numbers:
            file, blob = layout.files[number], written(conversion, number)
            assert len(blob) == file.nbytes
            ours = parse_header(blob[: file.data_start], file.nbytes, file.name)
            assert ours.data_start == file.data_start
            assert [one.name for one in ours.tensors] == [TENSORS[t][0] for t in file.tensors]
            assert [file.data_start + one.offset for one in ours.tensors] == file.offsets
            assert list(json.loads(blob[8 : file.data_start])) == ["__metadata__", *(one.name for one in ours.tensors)]
            stock = dict(safetensors.deserialize(blob))
            seen |= {name: tuple(one["shape"]) for name, one in stock.items()}
            for one in ours.tensors:
                start = file.data_start + one.offset
                assert (stock[one.name]["dtype"], bytes(stock[one.name]["data"])) == (
                    one.dtype,
                    blob[start : start + one.nbytes],
                )
        assert seen == {
            "embed": ((10, 256), (0, 256))[rank],
            "layers.0.down": (3, 4),
            "layers.0.norm": (5,),
            "layers.0.up": (4, 32 if plan is BOXES else 16, 2),
            "scale": (),
        }


@pytest.mark.parametrize("max_part_nbytes", [10**9, 300])
def test_metadata_names_the_content_first_and_what_the_source_has_goes_along_but_for_what_is_ours(
    max_part_nbytes: int,
) -> None:
    stale = {"format": "mlx", "relayout": "old", "DCP_SHARDING_INFO": "{}", "DCP_VERSION": "0.9", "author": "größe"}
    conversion = conversion_of(make_source(TENSORS, stale), FUSED, 512, max_part_nbytes=max_part_nbytes)
    assert (len(conversion.layout.files) > 2) == (max_part_nbytes == 300)
    for number, file in enumerate(conversion.layout.files):
        blob = header_of(conversion, number)
        entry = f'{{"format":1,"tensors_digest":"{CONTENT}"}}'
        assert blob[8:].startswith(b'{"__metadata__":{"relayout":' + json.dumps(entry).encode())
        assert parse_header(blob, file.nbytes, "x").metadata == {"relayout": entry, "format": "mlx", "author": "größe"}


def test_headers_have_what_dcp_needs_only_where_it_can_read_the_slices() -> None:
    source = make_source(TENSORS)
    assert conversion_of(source, BOXES, 512).options.dcp
    without = conversion_of(source, FUSED, 512)
    assert not without.options.dcp
    for number, file in enumerate(without.layout.files):
        assert sorted(parse_header(header_of(without, number), file.nbytes, "x").metadata) == ["format", "relayout"]
    why = not_for_dcp_because(source, FUSED, "ranks")
    assert why == f"a slice of {TENSORS[3][0]!r} is several ranges, and PyTorch DCP needs a single box"
    assert not_for_dcp_because(make_source([("x", "F8_E8M0", (4,))]), plan_of("x", 2, ((WHOLE, WHOLE),)), "ranks")
