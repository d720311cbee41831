"""What `tools/run engines --step hub` compares has the hub's counts, and what it found was equal or refused by both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines.cases import Case, hub_cases
from engines.hub_counts import DEGREES, HUB, is_equal, is_not_loaded, narrowed

RESULTS = Path(__file__).parents[2] / "tools" / "results" / "engines.json"


@pytest.mark.parametrize("case", list(hub_cases()), ids=lambda case: case.name)
def test_no_degree_is_cut_otherwise_or_refused_where_the_engine_loads_it(case: Case) -> None:
    found = json.loads(RESULTS.read_text())["vllm"]["hub"]
    loads = {tp: found[f"{case.name}, tp {tp}"] for tp in DEGREES}
    assert is_equal(loads[1])
    assert [tp for tp, load in loads.items() if not is_equal(load) and not is_not_loaded(load)] == []


def test_ranks_divide_small_widths_where_they_divide_those_of_the_hub() -> None:
    for name, model in HUB.items():
        wide, narrow = (config.get("text_config", config) for config in (model.config, narrowed(model.config)))
        for key in wide.keys() & {"intermediate_size", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size"}:
            fits = [[width % tp == 0 for tp in DEGREES] for width in (wide[key], narrow[key])]
            assert fits[0] == fits[1], (name, key)
        assert all(narrow[key] == wide[key] for key in wide if "heads" in key or "experts" in key), name
        assert narrow["vocab_size"] == wide["vocab_size"]
