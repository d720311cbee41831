"""Who loads: without a policy relayout or the engine; under a policy relayout alone, and only what is signed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fake_sglang, fake_tokenspeed, fake_vllm
from support.fake_vllm import Model, Tensors
from support.signing import UNTRUSTED, Keys, make_keys, write_states

from relayout import FormatError, PlanError
from relayout.checkpoint.trust import TrustedStore
from relayout.engines.load import WeightsLocation, source_url
from relayout.errors import RelayoutError

HUB = "org/model"
"""A repository that the engine finds by itself."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def states(folders: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed llama, and what is not that."""
    root = tmp_path_factory.mktemp("states")
    write_states(folders / "llama", root, keys)
    return root


def start(**options: Any) -> Callable[[Any, str, str, Model], None]:
    return lambda engine, folder, signed, model: engine.load(folder, model, **options)


def side_weights(engine: Any, folder: str, signed: str, model: Model) -> None:
    """The model is signed, and names weights elsewhere."""
    model.secondary_weights = [SimpleNamespace(model_or_path=folder, prefix="", file="")]
    engine.load(signed, model)


def reload(engine: fake_vllm.Engine, folder: str, signed: str, model: Model) -> None:
    """As `reload_weights(weights_path=...)` of a live vLLM."""
    engine.load(signed, model)
    loader = engine.formats["auto"](fake_vllm.LoadConfig("auto"))
    model.load_weights(loader.get_all_weights(fake_vllm.model_config(folder), model))


def update(engine: fake_sglang.Engine, folder: str, signed: str, model: Model) -> None:
    engine.load(signed, model)
    done, answer = engine.update(model, folder, signed)
    if not done:
        raise PlanError(answer)


STARTS = {
    "auto": start(load_format="auto"),
    "relayout": start(load_format="relayout"),
    "draft, auto": start(load_format="auto", draft=True),
    "draft, relayout": start(load_format="relayout", draft=True),
}
WAYS: dict[str, tuple[Any, Callable[[Any, str, str, Model], None]]] = {
    **{f"vLLM: {name}": (fake_vllm, way) for name, way in STARTS.items()},
    **{f"SGLang: {name}": (fake_sglang, way) for name, way in STARTS.items()},
    **{f"TokenSpeed: {name}": (fake_tokenspeed, way) for name, way in STARTS.items()},
    "SGLang: safetensors": (fake_sglang, start(load_format="safetensors")),
    "vLLM: reload": (fake_vllm, reload),
    "SGLang: update": (fake_sglang, update),
}
NEVER = {
    "vLLM: safetensors": (fake_vllm, start(load_format="safetensors")),
    "vLLM: side weights": (fake_vllm, side_weights),
    "SGLang: dummy": (fake_sglang, start(load_format="dummy")),
    "TokenSpeed: dummy": (fake_tokenspeed, start(load_format="dummy")),
    "TokenSpeed: side weights": (fake_tokenspeed, side_weights),
}
"""Not even what is signed, since relayout does not load it."""


@pytest.mark.parametrize("cache", ["", "cache"])
@pytest.mark.parametrize("way", [*WAYS, *NEVER])
def test_under_a_policy_only_what_is_signed_gets_into_an_engine(
    states: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Tensors, way: str, cache: str
) -> None:
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / cache) if cache else "")
    kind, run = {**WAYS, **NEVER}[way]
    monkeypatch.setattr(kind, "Path", lambda path: states / "plain" if str(path) == HUB else Path(path))
    engine, signed = kind.install(monkeypatch), str(states / "signed")
    let_in, unexplained = [], []
    for state in (HUB, *UNTRUSTED, "another config", *["signed"] * (way in NEVER)):
        for rank in range(2):
            model = Model(whole, rank, 2)
            try:
                run(engine, HUB if state == HUB else str(states / state), signed, model)
                let_in.append((state, rank))
            except RelayoutError as error:
                if state not in ("damaged", "another config") and str(keys.policy) not in str(error):
                    unexplained.append(error)
    assert (let_in, unexplained) == ([], [])
    if way in WAYS:
        for rank in range(2):
            model = Model(whole, rank, 2)
            run(engine, signed, signed, model)
            model.assert_holds_what_it_cuts_of(whole)


@pytest.mark.parametrize(
    "way", ["vLLM: auto", "SGLang: auto", "TokenSpeed: auto", "vLLM: draft, auto", "SGLang: update"]
)
def test_a_load_proves_what_the_engine_reads_itself_once(
    states: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, whole: Tensors, way: str
) -> None:
    """And an update, of a model that was loaded, once more."""
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    proofs: list[TrustedStore] = []
    prove = TrustedStore.verify_side_files
    monkeypatch.setattr(TrustedStore, "verify_side_files", lambda store: (proofs.append(store), prove(store))[1])
    kind, run = WAYS[way]
    run(kind.install(monkeypatch), str(states / "signed"), str(states / "signed"), Model(whole, 0, 2))
    assert len(proofs) == (2 if way == "SGLang: update" else 1)


def test_without_a_policy_the_engine_loads_what_is_plain(states: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WeightsLocation(str(states / "unsigned"), is_explicit=False).is_ours
    assert WeightsLocation("s3://bucket/model", is_explicit=True).is_ours
    assert not WeightsLocation(str(states / "plain"), is_explicit=False).is_ours
    assert not WeightsLocation(f"hf://{HUB}", is_explicit=False).is_ours
    assert not WeightsLocation(str(states / "nothing"), is_explicit=False).is_ours
    with pytest.raises(FormatError, match=r"relayout\.json: is missing next to rank files"):
        _ = WeightsLocation(str(states / "without relayout.json"), is_explicit=False).is_ours


@pytest.mark.parametrize(
    ("model", "url"),
    [(HUB, f"hf://{HUB}@v2"), ("here/model", "here/model"), ("/org/model", "/org/model"), ("s3://a/b", "s3://a/b")],
)
def test_a_name_is_of_the_hub_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here", "model").mkdir(parents=True)
    assert source_url(model, "v2") == url
    assert source_url(model, None) == url.removesuffix("@v2")


@pytest.mark.parametrize("policy", ["", "missing.toml"])
def test_a_policy_that_cannot_be_read_stops_a_load(states: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("RELAYOUT_TRUST", policy)
    with pytest.raises((PlanError, OSError), match=policy or "RELAYOUT_TRUST is empty"):
        _ = WeightsLocation(str(states / "signed"), is_explicit=False).is_ours
