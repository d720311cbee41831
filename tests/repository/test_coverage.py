"""Most architectures that engines generate text with have a plan or can be observed; those that do not are listed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from engines import coverage, registries
from engines.observing import class_made

ROOT = Path(__file__).parents[2]
SHARES = {"vllm": 0.95, "sglang": 0.90}
"""Reached so far, and never less; the goal is 0.95 of each."""


@pytest.fixture(autouse=True)
def without_cached() -> Iterator[None]:
    """Tests replace what `_observed` reads."""
    coverage._observed.cache_clear()
    yield
    coverage._observed.cache_clear()


def test_each_engine_has_plans_for_most_of_what_can_be_built() -> None:
    found = coverage.architectures()
    for engine, counts in coverage.counted(found).items():
        missing = {one.name: one.why for one in found if engine in one.since and one.state == "none" and one.is_built}
        assert counts["all"] == counts["built-in"] + counts["observed"] + counts["none"] > 200
        assert coverage.share(counts) >= SHARES[engine], f"{engine}: {coverage.share(counts):.3f}, missing: {missing}"


def test_what_cannot_be_built_was_attempted_and_has_its_error() -> None:
    attempts = {line["architecture"] for line in map(json.loads, (ROOT / "tools/results/attempts.jsonl").open())}
    for one in coverage.architectures():
        if one.state == "none" and not one.is_built:
            assert one.name in attempts
            assert one.why.partition(": ")[2], one.name


def test_model_types_of_plans_count_and_observations_of_another_cut_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"section": "text_generation", "vllm": {"module": "m", "since": ""}, "model_types": ["llama"]}
    attempt = {"architecture": "New", "engine": "vllm", "step": "done", "builtin": {"plan": "llama", "different": 1}}
    monkeypatch.setattr(coverage, "_attempts", dict)
    assert coverage._architecture("New", row).state == "built-in"
    assert coverage._architecture("New", {**row, "model_types": ["unheard_of"]}).state == "none"
    monkeypatch.setattr(coverage, "_attempts", lambda: {("vllm", "New"): attempt})
    coverage._observed.cache_clear()
    one = coverage._architecture("New", row)
    assert (one.state, one.plan, one.observed) == ("observed", "", ("vllm",))


@pytest.mark.parametrize(
    ("step", "error", "is_built"),
    [
        ("make", "LookupError: no package has a configuration for New", False),
        ("build", "ModuleNotFoundError: No module named 'cutlass'", False),
        ("build", "ValueError: heads must be a multiple of 3", True),
        ("name", "LookupError: no name was found for a; CUDA", True),
    ],
)
def test_only_what_no_configuration_would_change_takes_an_architecture_out_of_the_count(
    monkeypatch: pytest.MonkeyPatch, step: str, error: str, is_built: bool
) -> None:
    row = {"section": "text_generation", "vllm": {"module": "m", "since": ""}, "model_types": []}
    attempt = {"architecture": "New", "engine": "vllm", "step": step, "error": error}
    monkeypatch.setattr(coverage, "_attempts", lambda: {("vllm", "New"): attempt})
    one = coverage._architecture("New", row)
    assert (one.state, one.is_built, one.why) == ("none", is_built, f"{step}: {error}")


def wheel_of(**files: str) -> ZipFile:
    """A wheel with these files; `__` in a name is `/`."""
    memory = io.BytesIO()
    with ZipFile(memory, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name.replace("__", "/") + ".py", text)
    return ZipFile(memory)


def test_registries_are_read_without_imports() -> None:
    wheel = wheel_of(
        vllm__model_executor__models__registry="""
import nowhere
_TEXT_GENERATION_MODELS = {"A": ("a", "A"), **_OTHERS}
_SPECULATIVE_DECODING_MODELS: dict = {"B": ("b", "B")}
_PREVIOUSLY_SUPPORTED_MODELS = {"C": "0.1"}
""",
        sglang__srt__models__one="class A: pass\nclass B(A): pass\nEntryClass = [A]\nEntryClass.append(B)\n",
        sglang__srt__models__two="class D: pass\nEntryClass = D\n",
        sglang__srt__configs__one='class DConfig:\n    model_type = "d_two"\n',
        transformers__models__auto__modeling_auto='X = [("a_type", "AForCausalLM"), ("b_type", ("BModel", "BForX"))]',
    )
    assert registries.of_vllm(wheel) == {"A": ("text_generation", "a"), "B": ("speculative_decoding", "b")}
    assert registries.of_sglang(wheel) == {"A": ("", "one"), "B": ("", "one"), "D": ("", "two")}
    assert registries.types_of_engine(wheel) == {"d": {"d_two"}}
    assert registries.types_of_transformers(wheel) == {
        "AForCausalLM": {"a_type"},
        "BModel": {"b_type"},
        "BForX": {"b_type"},
    }
    generating = [
        name
        for name in ("XForCausalLM", "XForCausalLMNextN", "XDraftModel", "TransformersForCausalLM")
        if registries.is_generating(name, "")
    ]
    assert generating == ["XForCausalLM"]


class Merged(torch.nn.Module):
    """A merged layer as engines have it: two outputs in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.output_sizes = [6, 4]
        self.weight = torch.nn.Parameter(torch.empty(10, 3))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.empty(2, 8, 3))
        self.w2_weight = torch.nn.Parameter(torch.empty(2, 3, 4))


class Engine(torch.nn.Module):
    """A class whose loader takes only the names that its checkpoints have."""

    STACKED = (("in_proj", "first", 0), ("in_proj", "second", 1))

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"in_proj": Merged(), "experts": Experts()})])
        self.norm = torch.nn.Parameter(torch.empty(3))


class ToyLoads:
    """Builds `Engine`, whose checkpoints begin all names with `transformer.`, and name matrices w1, w2, w3."""

    def __init__(self, ignores: str = "-") -> None:
        self.ignores = ignores

    def build(self) -> torch.nn.Module:
        return Engine()

    def load(
        self,
        model: torch.nn.Module,
        recorder: class_made.LoadRecorder,
        tensors: Iterable[tuple[str, str, Sequence[int]]],
    ) -> None:
        parameters = dict(model.named_parameters())
        for stored, _, shape in tensors:
            probe = recorder.probe(stored, shape, torch.bfloat16)
            name = stored.removeprefix("transformer.")
            if name == stored:
                raise KeyError(stored)
            if self.ignores in name:
                continue
            if ".experts." in name:
                expert, matrix = name.split(".")[3:5]
                place = {"w1": ("w13", slice(0, 4)), "w3": ("w13", slice(4, 8)), "w2": ("w2", slice(0, 3))}[matrix]
                parameters[f"layers.0.experts.{place[0]}_weight"].data[int(expert), place[1]].copy_(probe)
            elif "first" in name or "second" in name:
                rows = slice(0, 6) if "first" in name else slice(6, 10)
                parameters["layers.0.in_proj.weight"].data[rows].copy_(probe)
            else:
                parameters[name].data.copy_(probe)


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the classes above is that of an engine's models."""
    monkeypatch.setattr(class_made, "_file_of", lambda cls: __file__ if cls is Engine else "")


def test_a_class_without_a_checkpoint_gets_one_that_its_loader_loads_completely() -> None:
    made = dict(class_made.tensors_of(ToyLoads()))
    before = "transformer.layers.0"
    assert made == {
        "transformer.norm": (3,),
        f"{before}.in_proj.weight".replace("in_proj", "first"): (6, 3),
        f"{before}.in_proj.weight".replace("in_proj", "second"): (4, 3),
        **{f"{before}.experts.{expert}.{matrix}.weight": (4, 3) for expert in (0, 1) for matrix in ("w1", "w3")},
        **{f"{before}.experts.{expert}.w2.weight": (3, 4) for expert in (0, 1)},
    }


def test_a_parameter_that_no_name_fills_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match=r"no name was found for norm; the first: KeyError: 'norm'"):
        class_made.tensors_of(ToyLoads(ignores="norm"))


def test_headers_of_made_checkpoints_are_read_by_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    assert class_made.write(tmp_path, ToyLoads()) == 9
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == dict(  # noqa: SIM118
            class_made.tensors_of(ToyLoads())
        )
