"""vLLM's classes, in a process of their own, load probes: what reaches a rank, and why one cannot be built."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.fake_engine_packages import HIDDEN, assert_holds_slices, without_package, write_source

import relayout
from relayout.checkpoint.source import read_source
from relayout.errors import PlanError
from relayout.observe.observation import observe, observe_plan
from relayout.storage.stores import find_store


@pytest.mark.usefixtures("vllm")
def test_each_rank_has_what_the_class_copies_and_the_record_says_from_where(tmp_path: Path) -> None:
    tensors = write_source(tmp_path / "model", is_trusted=True, has_draft=True, num_unused=1)
    done = relayout.convert(tmp_path / "model", tmp_path / "out", tp=4, plan="vllm", trust_remote_code=True)
    assert done.unused == ("unused.0",)  # `unused` is what a draft model takes, which wants more than is there.
    assert_holds_slices(tmp_path / "out", tensors)
    for rank in range(4):
        unused = relayout.load(tmp_path / "out", rank, names="unused.0")["unused.0"]
        np.testing.assert_array_equal(unused.numpy(), tensors["unused.0"])
    assert relayout.verify(tmp_path / "out", source=tmp_path / "model").ok
    assert "vllm:0.0.fake OddForCausalLM" in (tmp_path / "out" / "relayout.json").read_text()
    with pytest.raises(
        PlanError, match=r"observed from vLLM 0\.0\.fake OddForCausalLM at 4 ranks.* at that degree only"
    ):
        relayout.load(tmp_path / "out", 0, tp=2)
    assert relayout.load(tmp_path / "out", 0, tp=1)["out.weight"].shape == (HIDDEN, HIDDEN)


@pytest.mark.usefixtures("vllm")
def test_what_cannot_be_observed_is_an_error_that_names_class_and_line(tmp_path: Path) -> None:
    write_source(tmp_path / "model", more={"scale": 1.0})
    values, heads = observe(read_source(find_store(tmp_path / "model")), [2, 3])
    line = r"tensor 'scale'.* needs its values \(vllm\..*odd, OddForCausalLM\.load_weights, line \d+: self"
    assert re.search(line, str(values))
    assert re.search(r"refuses its config\.json: ValueError: heads must be divisible .*\(3\)", str(heads))


def test_without_vllm_observing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_package("vllm", tmp_path, monkeypatch)
    write_source(tmp_path / "model")
    message = (
        r"--plan vllm: vLLM cannot be imported \(none here\): "
        r"install vllm \(a CPU build.*\) in the environment of relayout$"
    )
    with pytest.raises(PlanError, match=message):
        relayout.convert(tmp_path / "model", tmp_path / "out", tp=2, plan="vllm")
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match=message):
        observe_plan(tmp_path / "model", tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()
    # One rank needs no plan.
    assert relayout.convert(tmp_path / "model", tmp_path / "one", tp=1, plan="vllm").num_ranks == 1
