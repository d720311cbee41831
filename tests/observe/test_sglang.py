"""SGLang's classes, in a process of their own, load probes: what reaches a rank, and why one cannot be built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.fake_engine_packages import HIDDEN, assert_holds_slices, without_package, write_source

import relayout
from relayout.checkpoint.source import read_source
from relayout.core.slices import NOT_HELD, WHOLE
from relayout.errors import PlanError
from relayout.observe.observation import Observation, observe, observe_plan
from relayout.storage.stores import find_store


@pytest.mark.usefixtures("sglang")
def test_each_rank_has_what_the_class_copies_and_the_record_says_from_where(tmp_path: Path) -> None:
    tensors = write_source(tmp_path / "model", is_trusted=True, num_unused=1)
    done = relayout.convert(tmp_path / "model", tmp_path / "out", tp=4, plan="sglang", trust_remote_code=True)
    assert done.unused == ("unused", "unused.0")
    assert_holds_slices(tmp_path / "out", tensors)
    assert relayout.verify(tmp_path / "out", source=tmp_path / "model").ok
    assert "sglang:0.0.fake OddForCausalLM" in (tmp_path / "out" / "relayout.json").read_text()
    with pytest.raises(PlanError, match=r"observed from SGLang 0\.0\.fake OddForCausalLM at 4 ranks.* degree only"):
        relayout.load(tmp_path / "out", 0, tp=2)
    assert relayout.load(tmp_path / "out", 0, tp=1)["out.weight"].shape == (HIDDEN, HIDDEN)


@pytest.mark.usefixtures("sglang")
def test_scalars_that_are_filled_in_and_what_a_draft_model_takes_are_held(tmp_path: Path) -> None:
    names = write_source(tmp_path / "model", has_draft=True, more={"scale": 1.5, "expert.scale": 2.5})
    source = read_source(find_store(tmp_path / "model"))
    [observed] = observe(source, [2], engine="sglang")
    assert isinstance(observed, Observation)
    loaded = {tensor.name: slices for tensor, slices in zip(source.tensors, observed.loaded_slices, strict=True)}
    assert loaded.keys() == names.keys()
    assert loaded["scale"] == loaded["expert.scale"] == loaded["unused"] == (WHOLE, WHOLE)
    assert not any(NOT_HELD in slices for slices in loaded.values())


@pytest.mark.usefixtures("sglang")
def test_what_cannot_be_observed_is_an_error_that_names_class_and_line(tmp_path: Path) -> None:
    write_source(tmp_path / "model", more={"sum": 1.0})
    values, heads = observe(read_source(find_store(tmp_path / "model")), [2, 3], engine="sglang")
    line = (
        r"--plan sglang: rank 0 of 2: .*'sum'.* needs its values \(sglang\.srt\..*odd, OddForCausalLM\.load, line \d+"
    )
    assert re.search(line, str(values))
    assert re.search(r"SGLang refuses its config\.json: ValueError: heads must be divisible .*\(3\)", str(heads))


def test_without_sglang_observing_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_package("sglang", tmp_path, monkeypatch)
    write_source(tmp_path / "model")
    message = r"--plan sglang: SGLang cannot be imported \(none here\): run relayout in SGLang's environment"
    with pytest.raises(PlanError, match=message):
        relayout.convert(tmp_path / "model", tmp_path / "out", tp=2, plan="sglang")
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match=message):
        observe_plan(tmp_path / "model", tmp_path / "plan.toml", engine="sglang")
    # One rank needs no plan.
    assert relayout.convert(tmp_path / "model", tmp_path / "one", tp=1, plan="sglang").num_ranks == 1
