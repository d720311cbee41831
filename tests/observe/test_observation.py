"""A checkpoint is converted as a class of vLLM takes it: vLLM is a package of the tests, in a process of its own."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import fake_vllm_package
from typer.testing import CliRunner

import relayout
from relayout.checkpoint.source import read_source
from relayout.cli.app import app
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.format.fields import dump_slice
from relayout.observe.observation import observe, observe_plan, parse, same_elements, write_stand_in
from relayout.storage.stores import find_store

HIDDEN = 16


def write_source(folder: Path, **config: Any) -> Mapping[str, np.ndarray[Any, Any]]:
    """A model of 4 heads of 4 elements; `unused` is what its class does not take."""
    shapes = {
        "embed.weight": (64, HIDDEN),
        "qkv.weight": (3 * HIDDEN, HIDDEN),
        "out.weight": (HIDDEN, HIDDEN),
        "odd.weight": (8, HIDDEN),
        "unused": (5,),
        **{f"unused.{number}": (50,) for number in range(config.pop("num_unused", 0))},
    }
    tensors = {
        name: np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()
    }
    if config.pop("scaled", False):
        tensors["scale"] = np.ones(1, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "odd", "hidden_size": HIDDEN, "num_attention_heads": 4, **config})
    )
    return tensors


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm_package.write(tmp_path / "packages")
    root = Path(relayout.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{root}")


@pytest.mark.usefixtures("vllm")
def test_each_rank_has_what_the_class_copies_and_the_record_says_from_where(tmp_path: Path) -> None:
    tensors = write_source(tmp_path / "model", is_trusted=True, has_draft=True, num_unused=1)
    done = relayout.convert(tmp_path / "model", tmp_path / "out", tp=4, plan="vllm", trust_remote_code=True)
    assert done.unused == ("unused.0",)  # `unused` is what a draft model takes, which wants more than is there.
    for rank in range(4):
        held = relayout.load(tmp_path / "out", rank)
        rows = slice(12 * rank, 12 * (rank + 1))  # q, k and v of its head are neighbors, as stored.
        np.testing.assert_array_equal(held["qkv.weight"].numpy(), tensors["qkv.weight"][rows])
        np.testing.assert_array_equal(held["out.weight"].numpy(), tensors["out.weight"][:, 4 * rank : 4 * (rank + 1)])
        np.testing.assert_array_equal(held["embed.weight"].numpy(), tensors["embed.weight"])
        # Three rows; the last rank has those that no rank takes, too.
        odd = slice(rank, rank + 3 if rank < 3 else None)
        np.testing.assert_array_equal(held["odd.weight"].numpy(), tensors["odd.weight"][odd])
        np.testing.assert_array_equal(held["unused.0"].numpy(), tensors["unused.0"])
    assert relayout.verify(tmp_path / "out", source=tmp_path / "model").ok
    assert "vllm:0.0.fake OddForCausalLM" in (tmp_path / "out" / "relayout.json").read_text()
    with pytest.raises(
        PlanError, match=r"observed from vLLM 0\.0\.fake OddForCausalLM at 4 ranks.* at that degree only"
    ):
        relayout.load(tmp_path / "out", 0, tp=2)
    assert relayout.load(tmp_path / "out", 0, tp=1)["out.weight"].shape == (HIDDEN, HIDDEN)


def test_a_tensor_of_which_no_rank_has_elements_is_loaded_by_none() -> None:
    empty = json.loads(json.dumps([dump_slice(Slice.along(0, ()))]))
    result = {"version": "0", "model_class": "Odd", "ranks": [empty, empty]}
    assert parse(result).loaded_slices == ((NOT_HELD, NOT_HELD),)


def test_the_stand_in_of_weights_in_the_format_of_mistral_has_the_name_by_which_vllm_knows_it(tmp_path: Path) -> None:
    write_source(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "consolidated.safetensors")
    (tmp_path / "stand_in").mkdir()
    write_stand_in(read_source(find_store(tmp_path / "model")), tmp_path / "stand_in")
    assert [file.name for file in (tmp_path / "stand_in").glob("*.safetensors")] == ["consolidated.safetensors"]


@pytest.mark.usefixtures("vllm")
def test_rules_are_written_by_which_an_array_of_processes_converts_without_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of CLUSTERS.md: 8 units, one start of vLLM."""
    monkeypatch.chdir(tmp_path)
    tensors = write_source(tmp_path / "model", num_unused=8)
    written = observe_plan("model", "plan.toml")
    assert (written.degrees, written.held_out) == ((2, 4), (4,))
    assert written.unmatched == ("odd.weight: it is cut along dim 0 in a way that no rule describes",)
    plan = tomllib.loads(Path("plan.toml").read_text())
    assert plan["cut"]["out.weight"] == {"dim": 1, "by": "even"}
    assert plan["cut"]["embed.weight"] == plan["cut"]["odd.weight"] == "whole"
    with pytest.raises(PlanError, match="exists; choose another -o"):
        observe_plan("model", "plan.toml")
    shutil.rmtree(tmp_path / "packages")
    without_vllm(tmp_path, monkeypatch)
    words = ["convert", "model", "-o", "out", "--tp", "2", "--max-part-size", "256", "--plan", "plan.toml", "--json"]
    for number in range(8):
        done = CliRunner().invoke(app, [*words, "--unit", f"{number}/8"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["units"]
    assert CliRunner().invoke(app, [*words, "--commit"]).exit_code == 0
    held = relayout.load(tmp_path / "out", 1)
    np.testing.assert_array_equal(held["qkv.weight"].numpy(), tensors["qkv.weight"][24:])
    np.testing.assert_array_equal(held["out.weight"].numpy(), tensors["out.weight"][:, 8:])
    np.testing.assert_array_equal(held["odd.weight"].numpy(), tensors["odd.weight"])
    assert relayout.verify("out", source="model").ok


@pytest.mark.usefixtures("vllm")
def test_what_cannot_be_observed_is_an_error_that_names_class_and_line(tmp_path: Path) -> None:
    write_source(tmp_path / "model", scaled=True)
    values, heads = observe(read_source(find_store(tmp_path / "model")), [2, 3])
    line = r"tensor 'scale'.* needs its values \(vllm\..*odd, OddForCausalLM\.load_weights, line \d+: self"
    assert re.search(line, str(values))
    assert re.search(r"refuses its config\.json: ValueError: heads must be divisible .*\(3\)", str(heads))


def test_without_vllm_observing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(tmp_path, monkeypatch)
    write_source(tmp_path / "model")
    message = (
        r"--plan vllm: vLLM cannot be imported \(none here\): install vllm \(a build for CPUs.*\) beside relayout$"
    )
    with pytest.raises(PlanError, match=message):
        relayout.convert(tmp_path / "model", tmp_path / "out", tp=2, plan="vllm")
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match=message):
        observe_plan(tmp_path / "model", tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()
    # One rank needs no plan.
    assert relayout.convert(tmp_path / "model", tmp_path / "one", tp=1, plan="vllm").num_ranks == 1


def without_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be imported in processes that are started."""
    (folder / "packages").mkdir(exist_ok=True)
    (folder / "packages" / "vllm.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'packages'}:{Path(relayout.__file__).parents[1]}")


def test_slices_are_compared_by_their_elements_in_whatever_order() -> None:
    part, other = Slice.along(0, ((4, 2), (0, 4))), Slice.along(0, ((0, 6),))
    assert same_elements([part], [other], (8, 4))
    assert same_elements([WHOLE], [Slice.along(1, ((0, 4),))], (8, 4))
    assert not same_elements([part], [Slice.along(1, ((0, 6),))], (8, 6))
    assert not same_elements([part], [NOT_HELD], (8, 4))
