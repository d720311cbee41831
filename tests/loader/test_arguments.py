"""What callers give to the loader: numbers that are integers and others, and modes of torch in which nothing loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.loader_fixtures import LITTLE, MIB, assert_equal, nothing_left_behind, whole_tensors
from support.page_cache import without_residency
from torch._subclasses.fake_tensor import FakeTensorMode

import relayout
from relayout.errors import PlanError
from relayout.loader.backends.base import Options

CALLS: dict[str, Callable[..., Any]] = {
    "load": relayout.load,
    "iter_load": lambda *given, **options: dict(relayout.iter_load(*given, **options)),
    "explain": relayout.explain,
}


@pytest.mark.parametrize("make", [np.int64, np.uint8, np.int32, torch.tensor])
def test_integers_of_any_make_are_integers(converted: Path, model: Path, make: Callable[[int], Any]) -> None:
    stored = whole_tensors(converted, "model-rank-1-*")
    for kind in ("load", "iter_load"):
        found = CALLS[kind](converted, make(1), tp=make(2), threads=make(3))
        assert_equal(found, stored)
        assert_equal(CALLS[kind](converted, make(1), verify=True), stored)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_equal(CALLS[kind](model, make(1), tp=make(2)), stored)
    with relayout.open(converted, make(1)) as opened:
        assert opened.rank == 1
        assert type(opened.rank) is int
    told = relayout.explain(converted, make(1), threads=make(3), tp=make(2))
    assert without_residency(told) == without_residency(relayout.explain(converted, 1, threads=3, tp=2))
    assert {type(told.rank), type(told.threads), type(told.memory)} == {int}


@pytest.mark.parametrize("value", [np.int64(4 * MIB), "4MiB", "4 M"])
def test_memory_may_be_any_integer_or_text(converted: Path, value: Any) -> None:
    assert len(relayout.load(converted, 1, memory=value)) == 23
    assert len(list(relayout.iter_load(converted, 1, memory=value))) == 23
    told = relayout.explain(converted, 1, memory=value)
    assert (told.memory, type(told.memory)) == (4 * MIB, int)


WRONG = [True, False, np.bool_(True), 1.0, np.float64(1), "1", b"1", [1], Path("1")]
INTEGERS = ("rank", "tp", "threads", "memory")


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        *(("load", argument, value) for argument in INTEGERS for value in WRONG),
        *((kind, argument, 1.0) for kind in CALLS if kind != "load" for argument in INTEGERS),
        *(("open", argument, 1.0) for argument in ("rank", "tp")),
    ],
)
def test_what_is_no_integer_is_named(converted: Path, kind: str, argument: str, value: Any) -> None:
    given = {"rank": 1, argument: value}
    # Text is a size, and this one too small.
    is_size = (argument, value) == ("memory", "1")
    message = r"^memory: 1 bytes, expected" if is_size else rf"^{argument}: .* is not an integer$"
    with nothing_left_behind(), pytest.raises(PlanError, match=message):
        {**CALLS, "open": relayout.open}[kind](converted, given.pop("rank"), **given)


@pytest.mark.parametrize("deltas", [(), "a delta"])
def test_without_a_rank_all_tensors_are_whole(converted: Path, model: Path, tmp_path: Path, deltas: Any) -> None:
    expected = load_file(model / "model.safetensors")
    if deltas:
        changed = {**expected, "model.norm.weight": expected["model.norm.weight"] + 1}
        converted = tmp_path / "old"
        relayout.save(expected, converted, config=model, tp=2)
        relayout.save(changed, tmp_path / "new", config=model, tp=2)
        relayout.delta(converted, tmp_path / "new", tmp_path / "delta")
        expected, deltas = changed, tmp_path / "delta"
    for call in (relayout.load, lambda *given, **options: dict(relayout.iter_load(*given, **options))):
        assert_equal(call(converted, deltas=deltas), expected)
        assert_equal(call(converted, tp=np.int64(1), deltas=deltas, verify=not deltas), expected)
        with pytest.raises(PlanError, match=r"^rank: missing, expected 0 to 1, as tp is given$"):
            call(converted, tp=2, deltas=deltas)
    if deltas:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(relayout.load(model), expected)
        with relayout.open(model) as plain, relayout.safe_open(model) as safe, relayout.open(converted) as opened:
            for view in (plain, safe, opened):
                assert (view.rank, view.num_ranks) == (0, 1)
                assert_equal({name: view[name] for name in view}, expected)


ODD: list[tuple[dict[str, Any], str]] = [
    ({"path": 5}, r"^path: 5, expected the path of a folder, or a URL as text$"),
    ({"path": None}, r"^path: None, expected the path"),
    ({"names": 3}, r"^names: 3, expected a pattern, or a list of patterns$"),
    ({"names": [b"model.norm.weight"]}, r"^names: \[b'model.norm.weight'\], expected a pattern"),
    ({"into": 5}, r"^into is a int, expected tensors by name$"),
    ({"into": torch.nn.Linear(1, 1)}, r"^into is a model: leave out the rank"),
    ({"trust": 5}, r"^trust: 5, expected the path of a policy$"),
    ({"cache": 5}, r"^cache: 5, expected a folder, or a relayout\.Cache$"),
    ({"group": "x"}, r"^group: 'x', expected a torch\.distributed group, such as torch\.distributed\.group\.WORLD$"),
]


@pytest.mark.parametrize(("odd", "message"), ODD)
def test_what_is_of_another_type_is_named(model: Path, converted: Path, odd: dict[str, Any], message: str) -> None:
    path = model if "cache" in odd else converted
    with nothing_left_behind(), pytest.raises(PlanError, match=message):
        relayout.load(**{"path": path, "rank": 0, "tp": 2, **odd})


def test_so_it_is_where_folders_are_called_otherwise() -> None:
    calls: list[tuple[str, Callable[[Any], object]]] = [
        ("root", relayout.Publisher),
        ("root", relayout.Steps),
        ("root", lambda odd: relayout.Follower(odd, 0)),
        ("delta", lambda odd: relayout.apply(odd, 0, {}, base="folder")),
        ("folder", relayout.transformers.from_pretrained),
    ]
    for what, call in calls:
        for odd in (5, b"folder", None):
            with pytest.raises(PlanError, match=rf"^{what}: {odd!r}, expected the path of a folder, or a URL as text$"):
                call(odd)


def test_what_is_no_tensors_by_name_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^tensors is a Linear, expected tensors by name, such as its state_dict\(\)$"):
        relayout.save(torch.nn.Linear(1, 1), tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^dtype is 'bfloat16', expected a floating-point dtype of torch$"):
        relayout.Publisher(tmp_path / "out", dtype="bfloat16")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


NO_SENSE: list[tuple[dict[str, Any], str, str]] = [
    ({"rank": 2}, "option", r"out: rank 2, expected 0 to 1"),
    ({"rank": -1}, "option", r"out: rank -1, expected 0 to 1"),
    ({"rank": 4, "tp": 4}, "option", r"out: rank 4, expected 0 to 3 \(tensor-parallel degree 4\)$"),
    ({"tp": 0}, "option", r"^tp: 0, expected 1 or more$"),
    ({"tp": -2}, "option", r"^tp: -2, expected 1 or more$"),
    ({"backend": "fast"}, "option", r"^backend 'fast', expected one of auto, direct, buffered, pinned, gds, "),
    ({"backend": "pinned"}, "unsupported", r"^backend 'pinned' loads to a CUDA device, not to 'cpu'$"),
    ({"backend": "gds"}, "unsupported", r"^backend 'gds' loads to a CUDA device, not to 'cpu'$"),
    ({"device": "meta"}, "option", r"^device 'meta': its tensors have no memory to load into$"),
    ({"device": "cuda:77"}, "option", r"^device 'cuda:77': "),
    ({"device": "toaster"}, "option", r"^device 'toaster': "),
    ({"threads": 0}, "option", r"^threads: 0, expected 1 or more$"),
    ({"threads": -2}, "option", r"^threads: -2, expected 1 or more$"),
    ({"memory": 0}, "option", r"^memory: 0 bytes, expected (1048576|2097152) or more$"),
    ({"memory": MIB - 1}, "option", r"^memory: 1048575 bytes, expected (1048576|2097152) or more$"),
]


@pytest.mark.parametrize(("options", "code", "message"), NO_SENSE)
@pytest.mark.parametrize("kind", [*CALLS, "names", "open"])
def test_a_request_that_makes_no_sense_is_refused(
    converted: Path, kind: str, options: dict[str, Any], code: str, message: str
) -> None:
    calls = {**CALLS, "names": partial(relayout.load, names="**"), "open": relayout.open}
    given = {"rank": 0, **options}
    if kind == "open" and given.keys() - {"rank", "device", "tp"}:
        pytest.skip("it has no such option")
    with nothing_left_behind(), pytest.raises(PlanError, match=message) as caught:
        calls[kind](converted, given.pop("rank"), **given)
    assert caught.value.code == code


def test_a_backend_of_host_memory_is_refused_for_another_device() -> None:
    with pytest.raises(PlanError, match=r"^backend 'toy' loads to host memory, not to 'meta'$") as caught:
        Options("meta", "toy").backend_for(())
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("kind", ["load", "iter_load"])
@pytest.mark.parametrize("tp", [10**9, 7])
def test_a_degree_that_is_impossible_is_refused_without_advice_to_convert(model: Path, kind: str, tp: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PlanError, match=f"{tp}"):
            CALLS[kind](model, 0, tp=tp)


@pytest.fixture
def unreadable(converted: Path, tmp_path: Path) -> Path:
    """A converted folder of which nothing can be read."""
    (tmp_path / "relayout.json").mkdir()
    return tmp_path


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


FAKE = "under torch's FakeTensorMode tensors have no memory"


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "call",
    [
        *(partial(call, backend=backend) for call in CALLS.values() for backend in ("auto", "direct")),
        relayout.open,
        lambda folder, rank: relayout.safe_open(folder),
        lambda folder, rank: relayout.load(folder, rank, into={"lm_head.weight": torch.empty(3)}),
    ],
)
def test_under_fake_tensor_mode_a_load_is_refused_before_anything_is_read(
    unreadable: Path, call: Callable[[Path, int], object]
) -> None:
    with nothing_left_behind(), pytest.raises(PlanError, match=FAKE):
        call(unreadable, 0)


def test_what_was_opened_before_is_not_read_under_fake_tensor_mode(converted: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    stored, iterator = whole_tensors(converted, "model-rank-1-*"), relayout.iter_load(converted, 1, memory=LITTLE)
    with nothing_left_behind(), relayout.open(converted, 1) as one, relayout.safe_open(converted) as whole:
        first = next(iterator)
        calls: list[Callable[[], Any]] = [
            lambda: one.get_tensor(name),
            lambda: one.get_slice(name)[1:3],
            lambda: whole.get_tensor(name),
            lambda: whole.get_slice(name)[1:3],
            lambda: list(iterator),
        ]
        for call in calls:
            with FakeTensorMode(), pytest.raises(PlanError, match=FAKE):
                call()
        assert_equal({name: one.get_tensor(name)}, {name: stored[name]})
        assert_equal(dict([first]), {first[0]: stored[first[0]]})


def test_a_default_device_without_memory_is_no_trouble(converted: Path) -> None:
    stored = whole_tensors(converted, "model-rank-1-*")
    into = {name: torch.empty_like(tensor) for name, tensor in stored.items()}
    with torch.device("meta"):
        assert_equal(relayout.load(converted, 1), stored)
        assert_equal(dict(relayout.iter_load(converted, 1)), stored)
        assert_equal(relayout.load(converted, 1, into=into), stored)
        with relayout.open(converted, 1) as opened:
            assert_equal({name: opened.get_tensor(name) for name in opened.keys()}, stored)  # noqa: SIM118
        with relayout.safe_open(converted) as whole:
            assert whole.get_tensor("model.norm.weight").device == torch.device("cpu")
