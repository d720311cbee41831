"""Entry points: an engine that is not as expected is left alone, and a process that loads nothing imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fake_sglang, fake_tokenspeed, fake_vllm, prestarted
from support.signing import make_keys

from relayout import plugins
from relayout.engines.vllm import loader_class


def test_an_sglang_that_is_not_as_expected_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fake_sglang.install(monkeypatch, with_plugin=False)
    monkeypatch.setattr(fake.load_config, "_verify_load_format", lambda self, strictly: None)
    monkeypatch.setattr(fake.load_config._verify_load_format, "__code__", (lambda config, strictly: None).__code__)
    plugins.sglang()
    assert fake.formats == ["auto", "safetensors"]
    assert "takes ['config', 'strictly'], expected ['self'] first" in caplog.text


def test_a_vllm_that_is_not_as_expected_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_vllm.install(monkeypatch)
    engine.formats.clear()
    monkeypatch.delattr(sys.modules["vllm.model_executor.model_loader.default_loader"], "DefaultModelLoader")
    plugins.vllm()
    assert engine.formats == {}
    assert "relayout: not available in this vllm" in caplog.text
    with pytest.raises(TypeError, match="has no create_model, load_weights, get_all_weights"):
        loader_class(object)


LAZY = """
import sys
from relayout import plugins
plugins.vllm()
plugins.vllm()
assert not {"torch", "vllm", "relayout.engines.vllm"} & set(sys.modules)
assert len([finder for finder in sys.meta_path if type(finder).__module__ == "relayout.plugins"]) == 1
import vllm
from importlib.util import find_spec
assert find_spec("vllm.model_executor.model_loader")  # As of somebody who only asks.
from vllm.model_executor import model_loader
print(list(model_loader._LOAD_FORMAT_TO_MODEL_LOADER))
"""
LOADERS = """
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
_LOAD_FORMAT_TO_MODEL_LOADER = {"auto": DefaultModelLoader}
def register_model_loader(name):
    return lambda loader: _LOAD_FORMAT_TO_MODEL_LOADER.setdefault(name, loader)
"""


@pytest.mark.parametrize(
    ("methods", "formats", "said"),
    [
        ("create_model = load_weights = get_all_weights = _get_weights_iterator = download_model = None", 2, ""),
        ("load_weights = None", 1, "relayout: not available in this vllm: TypeError"),
    ],
)
def test_a_process_that_loads_nothing_imports_nothing_and_one_that_does_knows_the_format(
    tmp_path: Path, methods: str, formats: int, said: str
) -> None:
    loaders = tmp_path / "vllm" / "model_executor" / "model_loader"
    loaders.mkdir(parents=True)
    (loaders / "__init__.py").write_text(LOADERS)
    (loaders / "base_loader.py").write_text("from abc import ABC\nclass BaseModelLoader(ABC): pass")
    (loaders / "default_loader.py").write_text(
        f"from .base_loader import BaseModelLoader\nclass DefaultModelLoader(BaseModelLoader):\n    {methods}"
    )
    done = prestarted.run(script=f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{LAZY}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["auto", "relayout"][:formats])
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


@pytest.mark.parametrize(
    ("kind", "call"),
    [(fake_vllm, plugins.vllm), (fake_sglang, plugins.sglang), (fake_tokenspeed, plugins.tokenspeed)],
)
def test_an_engine_that_is_not_as_expected_does_not_start_under_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, call: Callable[[], None]
) -> None:
    kind.install(monkeypatch, with_plugin=False)
    monkeypatch.setattr(plugins, "_plugin", lambda engine: SimpleNamespace())
    call()
    monkeypatch.setenv("RELAYOUT_TRUST", str(make_keys(tmp_path).policy))
    with pytest.raises(SystemExit, match="RELAYOUT_TRUST cannot be kept in this"):
        call()
