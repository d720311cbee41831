"""Memory that nobody has written is found by its marks, in whatever way all else was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter, init

from relayout.engines.unwritten import Sentinels, check_written, unwritten
from relayout.errors import PlanError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.int32)
FLOATS = DTYPES[:3]


def made(*tensors: Callable[[], torch.Tensor]) -> torch.nn.Module:
    """A model whose parameters `0`, `1` ... are made by these functions, within marks."""
    model = torch.nn.Module()
    with Sentinels():
        for number, make in enumerate(tensors):
            model.register_parameter(str(number), Parameter(make(), requires_grad=False))
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (12,), (64,), (3, 1, 2), (384, 256), (700, 1100), (12, 64, 96)])
def test_what_was_never_written_is_found_and_what_was_is_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = made(*[lambda: torch.empty(shape, dtype=dtype)] * 3)
    assert unwritten(model) == (["0", "1", "2"] if model.get_parameter("0").nbytes >= 8 else [])
    values = torch.randn(shape) if dtype.is_floating_point else torch.randint(-128, 128, shape)
    model.get_parameter("0").data.copy_(values)
    model.get_parameter("1").data.copy_(torch.ones(shape))
    assert unwritten(model) == (["2"] if model.get_parameter("0").nbytes >= 8 else [])


@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("axis", [0, 1])
def test_a_part_that_was_left_out_is_found_along_either_axis(axis: int, part: int) -> None:
    for shape, dtype in [((640, 512), torch.bfloat16), ((512, 6400), torch.int32), ((4000, 4096), torch.bfloat16)]:
        model = made(lambda shape=shape, dtype=dtype: torch.empty(shape, dtype=dtype))
        parts = torch.tensor_split(model.get_parameter("0").data, 10, axis)
        for number, one in enumerate(parts):
            if number != part:
                one.fill_(3)
        assert unwritten(model) == ["0"]
        parts[part].fill_(3)
        assert unwritten(model) == []


@pytest.mark.parametrize(
    ("shape", "num_parts"), [((128, 96, 64), 256), ((128, 2), 256), ((300, 32, 120), 600), ((1023, 700), 33)]
)
def test_half_of_an_expert_or_a_33rd_of_rows_that_was_left_out_is_found(shape: tuple[int, ...], num_parts: int) -> None:
    model = made(lambda: torch.empty(shape))
    parts = model.get_parameter("0").data.view(num_parts, -1)
    before = parts.clone()
    parts.fill_(1)
    for part in {*range(0, num_parts, 5), *range(num_parts - 9, num_parts)}:
        parts[part] = before[part]
        assert unwritten(model) == ["0"]
        parts[part] = 1
    assert unwritten(model) == []


def test_values_that_are_given_on_purpose_count_and_random_ones_do_not() -> None:
    model = made(
        lambda: torch.empty(64, 64).fill_(1),
        lambda: torch.ones(64),
        lambda: torch.arange(64.0).repeat(9),
        lambda: torch.empty(64).copy_(torch.linspace(0, 1, 64)),
    )
    with Sentinels():
        model.linear = torch.nn.Linear(64, 64)
        model.norm = torch.nn.LayerNorm(64)
        model.register_buffer("state", torch.empty(8))
        model.register_buffer("scratch", torch.empty(8), persistent=False)
    assert unwritten(model) == ["linear.weight", "linear.bias", "state"]
    with pytest.raises(
        PlanError, match=r"^m: nothing was loaded into linear\.weight, linear\.bias: .* Engine's Module"
    ):
        check_written(model, "m", "Engine", ("state",))


def test_memory_beside_a_parameter_and_placeholders_are_not_looked_at() -> None:
    model = made(
        lambda: torch.empty(1000, 64)[:900],
        lambda: torch.empty(64, 640).t(),
        lambda: torch.empty(0, 8),
        lambda: torch.empty(8, device="meta"),
        lambda: torch.empty(4000, 64)[1000:3000],
    )
    model.get_parameter("0").data.fill_(2)
    model.get_parameter("4").data.fill_(2)
    assert unwritten(model) == ["1"]
    model.get_parameter("1").data.fill_(2)
    assert unwritten(model) == []
    model.get_parameter("0").data.untyped_storage().resize_(900 * 64 * 4)
    assert unwritten(model) == []


def test_a_parameter_that_is_tied_is_named_once() -> None:
    model = made(lambda: torch.empty(64))
    model.register_parameter("tied", model.get_parameter("0"))
    assert unwritten(model) == ["0"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (12,), (64,), (3, 1, 2), (700, 1100), (12, 64, 96)])
def test_what_nobody_has_written_gets_back_what_it_had(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Random values, and, where it has been written since, what was written."""

    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        model = torch.nn.Module()
        for number in range(2):
            values = torch.randn(shape) if dtype.is_floating_point else torch.randint(-128, 128, shape)
            filled = torch.empty(shape, dtype=dtype).copy_(values)
            parameter = Parameter(filled, requires_grad=False)
            model.register_parameter(str(number), init.uniform_(parameter) if dtype in FLOATS else parameter)
        model.register_buffer("scratch", init.normal_(Parameter(torch.empty(9))).detach(), persistent=False)
        return model

    plain = make()
    with (marks := Sentinels()):
        marked = make()
    assert ("0" in unwritten(marked)) == (dtype in FLOATS)
    for model in (plain, marked):
        model.get_parameter("1").data.view(-1)[: len(model.get_parameter("1")) // 2 + 1].fill_(3)
    marks.restore(marked)
    assert unwritten(marked) == []
    for (name, expected), (_, one) in zip(plain.state_dict().items(), marked.state_dict().items(), strict=True):
        assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8)), name
    assert torch.equal(marked.get_buffer("scratch"), plain.get_buffer("scratch"))


def test_memory_that_was_given_up_or_is_read_as_another_dtype_is_left_alone() -> None:
    model = torch.nn.Module()
    with (marks := Sentinels()):
        model.packed = Parameter(torch.empty(64, dtype=torch.bfloat16).view(torch.int8), requires_grad=False)
        model.moved = Parameter(torch.empty(64, 64))
        model.smaller = Parameter(torch.empty(64))
    model.moved.data = torch.full((64, 64), 2.0)
    model.smaller.data.untyped_storage().resize_(8)
    model.packed.data.copy_(torch.tensor([-91, 127, 1, 2, 3, 4, 5, 6] * 16))  # Begins as a mark does.
    expected = model.packed.data.clone()
    marks.restore(model)
    assert torch.equal(model.packed.data, expected)
    assert bool((model.moved == 2).all())


def test_random_values_of_what_is_no_parameter_are_kept() -> None:
    with Sentinels():
        noise = torch.empty(64).normal_()
    assert not noise.isnan().any()


def test_values_that_a_view_shares_are_not_marked() -> None:
    values = torch.ones(2, 64)
    with Sentinels():
        init.normal_(Parameter(values[1]))
    assert bool((values[0] == 1).all())
