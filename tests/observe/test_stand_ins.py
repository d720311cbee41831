"""What takes the place of vLLM's kernels refuses what they refuse (vLLM 0.33, `check_marlin_supports_layer`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from relayout.observe.stand_ins import of_whole_groups


def chosen(columns: int, num_ranks: int, group: int) -> str:
    shapes = {"full_weight_shape": (columns, 64), "partition_weight_shape": (columns // num_ranks, 64)}
    kernel: str = of_whole_groups(lambda _config: "a kernel")(SimpleNamespace(group_size=group, **shapes))
    return kernel


@pytest.mark.parametrize(
    ("columns", "num_ranks", "group"),
    [(13824, 4, 128), (14336, 16, 128), (25600, 8, 128), (13824, 8, -1), (128, 2, 128)],
)
def test_ranks_of_whole_groups_or_of_one_scale_have_a_kernel(columns: int, num_ranks: int, group: int) -> None:
    assert chosen(columns, num_ranks, group) == "a kernel"


@pytest.mark.parametrize(("columns", "num_ranks"), [(13824, 8), (25600, 16), (29568, 2)])
def test_values_that_share_a_scale_are_not_on_two_ranks(columns: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=r"not a multiple of 128, which share a scale"):
        chosen(columns, num_ranks, 128)
