"""Fixtures: engines, and checkpoints that they load."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fake_sglang, fake_tokenspeed, fake_vllm
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.fake_sglang import AnyEngine
from support.fake_vllm import Tensors
from support.families import FAMILIES
from support.patience import PATIENCE

import relayout


@pytest.fixture
def conversions_end(tmp_path: Path) -> Iterator[None]:
    """Conversions that a start has begun in the background end before the test's folder is deleted."""
    yield
    for thread in threading.enumerate():
        if thread.name == "relayout-cache":
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a conversion in the background does not end"


@pytest.fixture
def vllm(conversions_end: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> fake_vllm.Engine:
    """With relayout's plugin."""
    caplog.set_level(logging.INFO)
    return fake_vllm.install(monkeypatch)


@pytest.fixture
def sglang(
    conversions_end: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> fake_sglang.Engine:
    """With relayout's plugin."""
    caplog.set_level(logging.INFO)
    fake = fake_sglang.install(monkeypatch)
    assert fake.formats == ["auto", "safetensors", "relayout"]
    return fake


@pytest.fixture
def tokenspeed(
    conversions_end: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> fake_tokenspeed.Engine:
    """With relayout's plugin."""
    caplog.set_level(logging.INFO)
    return fake_tokenspeed.install(monkeypatch)


@pytest.fixture(params=[fake_vllm, fake_sglang, fake_tokenspeed], ids=["vllm", "sglang", "tokenspeed"])
def engine(
    conversions_end: None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> AnyEngine:
    """Each, with relayout's plugin."""
    caplog.set_level(logging.INFO)
    installed: AnyEngine = request.param.install(monkeypatch)
    return installed


@pytest.fixture(scope="session")
def folders(llama: Path, qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, and converted for 2 and 4 ranks; a tied qwen2, for 2; a qwen3_moe as moe, cut and with owned experts."""
    root = tmp_path_factory.mktemp("engines")
    shutil.copytree(llama, root / "llama")
    shutil.copytree(qwen2, root / "qwen2")
    (root / "moe").mkdir()
    write_family(FAMILIES["qwen3_moe"], root / "moe")
    for tp in (2, 4):
        relayout.convert(root / "llama", root / f"llama-tp{tp}", tp=tp)
    relayout.convert(root / "qwen2", root / "qwen2-tp2", tp=2)
    relayout.convert(root / "moe", root / "moe-tp2", tp=2)
    relayout.convert(root / "moe", root / "moe-ep2", tp=2, expert_parallel=True)
    return root


@pytest.fixture(scope="session")
def whole(folders: Path) -> Tensors:
    """The tensors of the llama."""
    return reference_tensors(folders / "llama")
