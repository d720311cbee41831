"""Fixtures of all tests: small models written by transformers, the fault library, conversions made once."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.conversions import conversions
from support.faults import shim
from support.models import SIZES, save_pretrained
from support.profile import PROFILE
from support.skips import reason_of

from relayout.storage.stores import REGISTRY

# The hub's library asks for a list of its own once a day, without a token: requests of tests are counted.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

__all__ = ["conversions", "shim"]

_ANY_TIME = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "everyday", max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=_ANY_TIME
)
settings.register_profile(
    "long", settings.get_profile("everyday"), max_examples=2000, derandomize=False, print_blob=True
)
settings.load_profile(PROFILE)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there before the first test stays: no collection of garbage need look at a million objects again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were skipped: what is missing here by mistake, a reader sees."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(reason_of(str(report.longrepr[2] if report.longrepr else "")) for report in skipped)
    if reasons:
        terminalreporter.write_sep("-", f"{reasons.total()} skipped, by reason")
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
            terminalreporter.write_line(f"{count:5} {reason}")


@pytest.fixture(scope="session", autouse=True)
def toy_store() -> Iterator[None]:
    """All that a store needs to be known, beside its module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, "toy", "support.toy_store")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_drive() -> Iterator[None]:
    """`os.fsync` does nothing: no test here loses power. What is flushed, and when, is seen by other means."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 heads, 2 KV heads, a vocabulary that is no multiple of 64, biases, several shards; written by transformers."""
    from transformers import LlamaConfig

    return save_pretrained(
        tmp_path_factory.mktemp("llama") / "llama",
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    )


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases on q, k, v, and tied embeddings: no lm_head."""
    from transformers import Qwen2Config

    return save_pretrained(tmp_path_factory.mktemp("qwen2") / "qwen2", Qwen2Config(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No biases, in one shard."""
    from transformers import MistralConfig

    return save_pretrained(
        tmp_path_factory.mktemp("mistral") / "mistral", MistralConfig(**SIZES, head_dim=16), max_shard_size="1GB"
    )


@pytest.fixture
def hasty() -> Iterator[None]:
    """Python changes from one thread to another as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
