"""Rules are fitted to what vLLM's classes take: vLLM is a package of the tests, in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support.fake_engine_packages import without_package, write_source
from typer.testing import CliRunner

import relayout
from relayout.checkpoint.source import read_source
from relayout.cli.app import app
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.format.fields import dump_slice
from relayout.format.index import HUB_INDEX_NAME
from relayout.observe.observation import observe_plan, parse, same_elements, write_stub
from relayout.plans.family import ENGINES
from relayout.storage.stores import find_store


def test_a_tensor_of_which_no_rank_has_elements_is_loaded_by_none() -> None:
    empty = json.loads(json.dumps([dump_slice(Slice.along(0, ()))]))
    result = {"version": "0", "model_class": "Odd", "ranks": [empty, empty]}
    assert parse("vllm", result).loaded_slices == ((NOT_HELD, NOT_HELD),)


def test_the_stub_of_weights_in_the_format_of_mistral_has_the_name_by_which_vllm_knows_it(tmp_path: Path) -> None:
    write_source(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "consolidated.safetensors")
    (tmp_path / "stub").mkdir()
    write_stub(read_source(find_store(tmp_path / "model")), tmp_path / "stub")
    assert [file.name for file in (tmp_path / "stub").glob("*.safetensors")] == ["consolidated.safetensors"]


@pytest.mark.usefixtures("vllm")
def test_rules_are_written_by_which_an_array_of_processes_converts_without_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of CLUSTERS.md: 8 units, one start of vLLM."""
    monkeypatch.chdir(tmp_path)
    tensors = write_source(tmp_path / "model", num_unused=8)
    written = observe_plan("model", "plan.toml")
    assert (written.degrees, written.held_out) == ((2, 4), (4,))
    assert written.unmatched == ("odd.weight: no rule describes how it is sliced along dim 0",)
    plan = tomllib.loads(Path("plan.toml").read_text())
    assert plan["cut"]["out.weight"] == {"dim": 1, "by": "even"}
    assert plan["cut"]["embed.weight"] == plan["cut"]["odd.weight"] == "whole"
    with pytest.raises(PlanError, match="exists; choose another -o"):
        observe_plan("model", "plan.toml")
    shutil.rmtree(tmp_path / "packages")
    without_package("vllm", tmp_path, monkeypatch)
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


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_second_observation_is_equal_byte_for_byte_and_finds_the_conversion_in_the_cache(
    tmp_path: Path, engine: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(engine)
    write_source(tmp_path / "model", num_unused=8)
    model, cache = str(tmp_path / "model"), tmp_path / "cache"
    texts, plans = [], []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.toml"
        for words in (
            ["plans", "observe", model, "-o", str(file), "--engine", engine],
            ["cache", "add", model, "--tp", "2", "--folder", str(cache), "--observe", engine],
        ):
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            subprocess.run([sys.executable, "-P", "-m", "relayout", *words], env=environment, check=True)
        texts.append(file.read_bytes())
        [kept] = cache.rglob("plan.json")
        plans.append(kept.read_bytes())
        kept.unlink()  # As a cache that needs its room.
    assert texts[0] == texts[1]
    assert plans[0] == plans[1]
    assert f'"name":"{engine}:0.0.fake OddForCausalLM"'.encode() in plans[0]
    assert len(list(cache.rglob("relayout.json"))) == 1


def test_the_engines_are_vllm_and_sglang(tmp_path: Path) -> None:
    write_source(tmp_path / "model")
    with pytest.raises(PlanError, match="engine: 'ours', expected vllm or sglang"):
        observe_plan(tmp_path / "model", tmp_path / "plan.toml", engine="ours")
    for engine in ENGINES:
        module = importlib.import_module(f"relayout.observe.{engine}")
        assert all(hasattr(module, name) for name in ("INSTALL", "start", "configuration", "observe_rank"))


def test_the_stub_of_weights_with_an_index_has_one(tmp_path: Path) -> None:
    """SGLang's class of Llama 4 looks there for a vision part."""
    write_source(tmp_path / "model")
    source = read_source(find_store(tmp_path / "model"))
    (tmp_path / "one").mkdir()
    write_stub(source, tmp_path / "one")
    assert not (tmp_path / "one" / HUB_INDEX_NAME).exists()
    names = {tensor.name: "model.safetensors" for tensor in source.tensors}
    (tmp_path / "model" / HUB_INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    (tmp_path / "other").mkdir()
    write_stub(read_source(find_store(tmp_path / "model")), tmp_path / "other")
    assert json.loads((tmp_path / "other" / HUB_INDEX_NAME).read_text())["weight_map"] == names


def test_slices_are_compared_by_their_elements_in_whatever_order() -> None:
    part, other = Slice.along(0, ((4, 2), (0, 4))), Slice.along(0, ((0, 6),))
    assert same_elements([part], [other], (8, 4))
    assert same_elements([WHOLE], [Slice.along(1, ((0, 4),))], (8, 4))
    assert not same_elements([part], [Slice.along(1, ((0, 6),))], (8, 6))
    assert not same_elements([part], [NOT_HELD], (8, 4))
