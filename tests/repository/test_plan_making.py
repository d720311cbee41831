"""Built-in plans are what `tools/run engines --step plans` makes of what was observed of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines.observing.plan_making import checkpoints_of, text_of
from engines.observing.plan_table import TABLE
from support.observed_slices import read

from relayout.plans.family import builtin_text

OBSERVED = read(Path(__file__).parents[1] / "plans" / "observed.jsonl.xz")


@pytest.mark.parametrize("name", TABLE)
def test_a_plan_is_what_its_observation_makes(name: str) -> None:
    assert text_of(name, TABLE[name], checkpoints_of(TABLE[name], OBSERVED)) == builtin_text(name)
