"""Arguments of another type, to every public function: a PlanError, or what they are taken for."""

from __future__ import annotations

import inspect
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.signing import make_keys

import relayout
from relayout.errors import PlanError

Call = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
"""A function, and arguments with which it succeeds."""

FUNCTIONS = sorted(
    name
    for name in relayout.__all__
    if inspect.isfunction(getattr(relayout, name)) or name in ("Publisher", "Follower", "Cache")
)
METHODS = ["CheckpointView.get_tensor", "CheckpointView.get_slice", "CheckpointView.held_slice"]


class Odd:
    """An object of no known type."""


def odd_values() -> Iterator[Any]:
    yield from (5, 1.5, "nothing such", Odd(), {5: 6}, {"model.norm.weight": 6}, {}, iter(["a"]), b"x", [5], None, True)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Call]:
    place = tmp_path_factory.mktemp("arguments")
    numbers = itertools.count()
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.arange(64.0).reshape(16, 4),
        "model.norm.weight": torch.ones(4),
    }
    plain, old, new, delta = (str(place / name) for name in ("plain", "old", "new", "delta"))
    Path(plain).mkdir()
    save_file(tensors, Path(plain, "model.safetensors"))
    Path(plain, "config.json").write_text('{"model_type": "llama"}')
    relayout.convert(plain, old, tp=2)
    relayout.save({name: tensor + 1 for name, tensor in tensors.items()}, new, config=plain, tp=2)
    relayout.delta(old, new, delta)
    keys = make_keys(place)

    def fresh() -> str:
        return str(place / f"fresh-{next(numbers)}")

    def planned() -> relayout.Conversion:
        return relayout.plan_conversion(plain, fresh(), tp=2)

    def opened(name: str) -> Call:
        method = name.rpartition(".")[2]
        return lambda: (getattr(relayout.open(old, 0), method), {"name": "model.norm.weight"})

    given: dict[str, Callable[[], dict[str, Any]]] = {
        **dict.fromkeys(("load", "iter_load", "open", "explain", "warm"), lambda: {"path": old, "rank": 0}),
        **dict.fromkeys(("safe_open", "inspect", "verify", "files", "plan_bench"), lambda: {"path": old}),
        **dict.fromkeys(("restore", "copy"), lambda: {"path": old, "output": fresh()}),
        **dict.fromkeys(("convert", "plan_conversion"), lambda: {"source": plain, "output": fresh(), "tp": 2}),
        **dict.fromkeys(("preview", "carry_out", "is_carried_out"), lambda: {"conversion": planned()}),
        "rows": lambda: {"path": old, "rank": 0, "name": "model.layers.0.mlp.up_proj.weight", "ids": [0, 3]},
        "open_rows": lambda: {"path": old, "rank": 0, "name": "model.layers.0.mlp.up_proj.weight"},
        "verify_source": lambda: {"path": plain},
        "report": lambda: {"path": old, "output": f"{fresh()}.html"},
        "save": lambda: {"tensors": dict(tensors), "output": fresh(), "config": plain, "tp": 2},
        "delta": lambda: {"old": old, "new": new, "output": fresh()},
        "apply_deltas": lambda: {"base": old, "deltas": [delta], "output": fresh()},
        "apply": lambda: {"delta": delta, "rank": 0, "tensors": relayout.load(old, 0), "base": old},
        "sign": lambda: {"path": relayout.copy(old, fresh()).output, "key": keys.key},
        "Publisher": lambda: {"root": fresh(), "tp": 2},
        "Follower": lambda: {"root": fresh(), "rank": 0},
        "Cache": lambda: {"folder": fresh()},
    }
    made: dict[str, Call] = {name: opened(name) for name in METHODS}
    for name, arguments in given.items():
        made[name] = lambda name=name, arguments=arguments: (getattr(relayout, name), arguments())  # type: ignore[misc]
    return made


def test_every_public_function_is_called(calls: dict[str, Call]) -> None:
    assert sorted(calls) == sorted([*FUNCTIONS, *METHODS])


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_an_argument_of_another_type_is_named_or_taken(
    name: str, calls: dict[str, Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no value of the argument is never a bare error of Python from somewhere inside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bare = []
    function, _ = calls[name]()
    num_refused = 0
    for parameter in inspect.signature(function).parameters:
        for value in odd_values():
            function, arguments = calls[name]()
            try:
                with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
                    warnings.simplefilter("ignore")
                    result = function(**arguments | {parameter: value})
                    list(result) if name == "iter_load" else None
            except PlanError as error:
                # Any truth value is one of `expert_parallel`, and no plan of this model has experts.
                if isinstance(value, Odd) and error.code != "option" and parameter != "expert_parallel":
                    bare.append(f"{parameter}={value!r}: code {error.code}: {error}")
                num_refused += 1
            except (relayout.FormatError, OSError):  # Of a folder that an earlier call has made.
                assert value == "nothing such"
            except Exception as error:
                bare.append(f"{parameter}={value!r}: {type(error).__name__}: {error}")
    assert bare == []
    assert num_refused > 4, "values that are none are refused, most of them"


def test_names_may_come_from_an_iterator(calls: dict[str, Call]) -> None:
    for name in ("load", "iter_load", "open"):
        function, arguments = calls[name]()
        found = function(**arguments, names=iter(["**.weight"]))
        assert len(dict(found) if name == "iter_load" else found.keys()) == 2
