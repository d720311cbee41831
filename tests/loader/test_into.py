"""`relayout.load(into=...)`: tensors that exist are filled where they are, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.bits import flip
from support.headers import entry, file_of
from support.loader_fixtures import (
    MIB,
    WAYS,
    assert_equal,
    by_two_ways,
    extents,
    nothing_left_behind,
    whole_tensors,
    write_model,
)
from support.patience import PATIENCE

import relayout
from relayout.errors import FormatError, PlanError
from relayout.loader.backends.cuda import DeviceJob
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.backends.host import ThreadedJob

Make = Callable[[torch.Tensor], torch.Tensor]
GUARD = 64
UNTOUCHED = 0xEE
FEW = {"verify": True, "threads": 2, "memory": 2 * MIB}


@pytest.fixture(scope="module")
def stored(converted: Path) -> dict[str, torch.Tensor]:
    return whole_tensors(converted, "model-rank-1-*")


class Guarded:
    """Tensors like others, each in memory of its own that is full of one byte, with some more of it around."""

    def __init__(self, tensors: dict[str, torch.Tensor], make: Make) -> None:
        self._make = make
        self._memory = {}
        self.tensors = {}
        for name, tensor in tensors.items():
            # Place enough for each tensor to be strided.
            memory = torch.full((4 * tensor.nbytes + 4 * GUARD,), UNTOUCHED, dtype=torch.uint8)
            self._memory[name] = memory
            self.tensors[name] = make(_typed(memory[GUARD:], tensor))

    def assert_filled(self, expected: dict[str, torch.Tensor]) -> None:
        """All tensors are those, and the bytes around them are as they were."""
        assert_equal(self.tensors, expected)
        for name, tensor in self.tensors.items():
            with torch.no_grad():
                _fill(tensor)
            assert (self._memory[name] == UNTOUCHED).all(), name

    def assert_untouched(self) -> None:
        """Nothing has been written."""
        for name, memory in self._memory.items():
            assert (memory == UNTOUCHED).all(), name


def _typed(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Room for four tensors of this kind, as one with an axis more."""
    return memory[: 4 * like.nbytes].view(like.dtype).view(4, *like.shape)


def _fill(tensor: torch.Tensor) -> None:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[tensor.element_size()]
    value = int.from_bytes(bytes([UNTOUCHED]) * tensor.element_size(), "little", signed=kind != torch.uint8)
    tensor.detach().view(kind).fill_(value)


def odd_address(room: torch.Tensor) -> torch.Tensor:
    """One element behind where a tensor would begin."""
    flat = room.view(-1)
    nbytes = room[0].numel()
    return flat[1 : 1 + nbytes].view(room[0].shape) if nbytes else room[0]


def transposed(room: torch.Tensor) -> torch.Tensor:
    shape = room.shape[1:]
    return room[0].view(shape[::-1]).permute(*range(len(shape))[::-1])


def part_of_a_fused_parameter(room: torch.Tensor) -> torch.Tensor:
    """Narrow along axis 1, as an engine's q, k or v where weights are stored transposed."""
    if room.dim() < 3:
        return room[1]
    fused = room.view(-1)[: 3 * room[0].numel()].view(room.shape[1], 3 * room.shape[2])
    return fused.narrow(1, room.shape[2], room.shape[2])


MAKERS: dict[str, Make] = {
    "contiguous": lambda room: room[1],
    "odd address": odd_address,
    "transposed": transposed,
    "fused": part_of_a_fused_parameter,
    "every other row": lambda room: room.view(-1)[: 2 * room[0].numel()].view(-1, 2, *room.shape[2:])[:, 0],
    "parameter": lambda room: torch.nn.Parameter(room[1], requires_grad=False),
    "detached": lambda room: room[1].detach()[...],
}


@pytest.mark.parametrize(
    ("way", "kind", "options"),
    [
        *((way, "odd address", {}) for way in WAYS),
        *((way, kind, FEW) for way in ("auto", "gds") for kind in MAKERS),
    ],
    indirect=["way"],
)
def test_tensors_are_filled_where_they_are_and_nothing_around_them(
    converted: Path, stored: dict[str, torch.Tensor], way: str, kind: str, options: dict[str, Any]
) -> None:
    guarded = Guarded(stored, MAKERS[kind])
    given = dict(guarded.tensors)
    with nothing_left_behind():
        found = relayout.load(converted, 1, into=given, backend=way, **options)
    assert list(found) == list(stored)
    assert all(found[name] is given[name] for name in found)
    guarded.assert_filled(stored)


@by_two_ways
def test_a_wider_dtype_has_the_same_values(tmp_path: Path, way: str) -> None:
    stored = {"bf16": torch.arange(-99.0, 99).to(torch.bfloat16), "f16": torch.rand(7).half(), "f32": torch.rand(3, 5)}
    save_file(stored, tmp_path / "model.safetensors")
    relayout.convert(tmp_path / "model.safetensors", tmp_path / "out")
    wider = {"bf16": torch.float32, "f16": torch.float64, "f32": torch.float64}
    into = {name: torch.zeros(stored[name].shape, dtype=dtype) for name, dtype in wider.items()}
    relayout.load(tmp_path / "out", 0, into=into, backend=way)
    assert all(torch.equal(into[name], stored[name].to(dtype)) for name, dtype in wider.items())
    for name, dtype in (("f32", torch.bfloat16), ("bf16", torch.float16), ("f16", torch.bfloat16)):
        with pytest.raises(PlanError, match=f"is {dtype} .*, expected {stored[name].dtype}"):
            relayout.load(tmp_path / "out", 0, into={name: stored[name].to(dtype)}, backend=way)


@by_two_ways
def test_autograd_finds_out_that_a_parameter_was_filled(tmp_path: Path, way: str) -> None:
    layer = torch.nn.Linear(300, 700)
    expected = {name: torch.randn(tensor.shape) for name, tensor in layer.named_parameters()}
    save_file(expected, tmp_path / "model.safetensors")
    relayout.convert(tmp_path / "model.safetensors", tmp_path / "out")
    for is_strided in (False, True):
        layer.zero_grad()
        if is_strided:
            layer.weight.data = layer.weight.data.t().contiguous().t()
        parameters = dict(layer.named_parameters())
        product = (torch.ones(300, requires_grad=True) @ layer.weight.t()).sum()
        versions = [parameter._version for parameter in layer.parameters()]
        relayout.load(tmp_path / "out", 0, into=parameters, backend=way)
        assert_equal(parameters, expected)
        assert all(parameter.requires_grad and parameter.is_leaf for parameter in layer.parameters())
        assert all(one._version > before for one, before in zip(layer.parameters(), versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()  # type: ignore[no-untyped-call]
        layer(torch.ones(300)).sum().backward()
        assert layer.weight.grad is not None
    with torch.inference_mode():
        into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        relayout.load(tmp_path / "out", 0, into=into, backend=way)
    assert_equal(into, expected)


@by_two_ways
def test_fused_parameters_of_an_engine_get_their_parts(tmp_path: Path, way: str) -> None:
    """q, k and v in one parameter by rows, gate and up by columns, the first contiguous parts, the others not."""
    sizes = {name: (torch.bfloat16, (rows, 1030)) for name, rows in (("q", 600), ("k", 130), ("v", 130))}
    sizes |= dict.fromkeys(("gate", "up"), (torch.bfloat16, (515, 999)))
    relayout.convert(write_model(tmp_path / "source", sizes), tmp_path / "out")
    stored = whole_tensors(tmp_path / "out")
    rows = torch.full((860, 1030), 7, dtype=torch.bfloat16)
    columns = torch.full((515, 2 * 999), 7, dtype=torch.bfloat16)
    into = {
        "q": rows[:600],
        "k": rows[600:730],
        "v": rows[730:],
        "gate": columns[:, :999],
        "up": columns.narrow(1, 999, 999),
    }
    relayout.load(tmp_path / "out", 0, into=into, backend=way, memory=4 * MIB)
    assert_equal({"": rows}, {"": torch.cat([stored[name] for name in ("q", "k", "v")])})
    assert_equal({"": columns}, {"": torch.cat([stored["gate"], stored["up"]], 1)})


@by_two_ways
@pytest.mark.parametrize("names", [None, "**norm**", ["lm_head.weight", "**.0.mlp.**"], "**"])
def test_what_names_asks_for_beside_comes_in_memory_of_its_own(
    converted: Path, stored: dict[str, torch.Tensor], way: str, names: Any
) -> None:
    some = {name: stored[name] for name in list(stored)[::3]}
    guarded = Guarded(some, lambda room: room[1])
    found = relayout.load(converted, 1, into=guarded.tensors, names=names, backend=way, verify=True)
    selected = relayout.load(converted, 1, names=names or []).keys()
    assert list(found) == [name for name in stored if name in some or name in selected]
    assert all(found[name] is tensor for name, tensor in guarded.tensors.items())
    assert_equal(found, {name: stored[name] for name in found})
    guarded.assert_filled(some)
    with pytest.raises(PlanError, match=r"^into: no tensors to fill"):
        relayout.load(converted, 1, into={}, backend=way)


@by_two_ways
@pytest.mark.filterwarnings("ignore:.*plain checkpoint")
def test_a_plain_folder_is_cut_into_given_tensors(model: Path, stored: dict[str, torch.Tensor], way: str) -> None:
    some = {name: tensor for name, tensor in stored.items() if tensor.dim() == 2}
    for make in (MAKERS["odd address"], MAKERS["fused"]):
        guarded = Guarded(some, make)
        relayout.load(model, 1, tp=2, into=guarded.tensors, backend=way)
        guarded.assert_filled(some)


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda tensor: tensor.view(torch.int32), r"is torch.int32 \[68, 512\], expected torch.float32 \[68, 512"),
    "shape": (lambda tensor: tensor.view(512, 68), r"is torch.float32 \[512, 68\], expected torch.float32 \[68, 512\]"),
    "length": (lambda tensor: tensor[1:], r"is torch.float32 \[67, 512\], expected"),
    "flat": (lambda tensor: tensor.view(-1), r"is torch.float32 \[34816\], expected"),
    "device": (lambda tensor: tensor.to("meta"), "is on meta, expected cpu"),
    "sparse": (lambda tensor: tensor.to_sparse(), "is torch.sparse_coo, expected torch.strided"),
    "sparse rows": (lambda tensor: tensor.to_sparse_csr(), "is torch.sparse_csr, expected torch.strided"),
    "mkldnn": (lambda tensor: tensor.to_mkldnn(), "is torch._mkldnn, expected torch.strided"),
    "quantized": (lambda tensor: torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint8), "is torch.qint8"),
    "numpy": (lambda tensor: tensor.numpy(), "is a ndarray"),
    "list": (lambda tensor: tensor.tolist(), "is a list"),
    "conjugate": (lambda tensor: torch.complex(tensor, tensor).conj().imag, "is a lazy view"),
    **{
        f"strides {strides}": (
            lambda tensor, strides=strides: tensor.as_strided((68, 512), strides),
            "is a lazy view, or has overlapping elements",
        )
        for strides in ((1, 1), (200, 1), (0, 1), (512, 0))
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("make", [MAKERS["contiguous"], MAKERS["transposed"]], ids=["contiguous", "transposed"])
def test_one_wrong_tensor_is_named_before_any_is_touched(
    converted: Path, stored: dict[str, torch.Tensor], make: Make, wrong: str
) -> None:
    change, message = WRONG[wrong]
    guarded = Guarded(stored, make)
    name = "model.layers.3.mlp.down_proj.weight"
    given = guarded.tensors | {name: change(torch.zeros(stored[name].shape))}
    with nothing_left_behind(), pytest.raises(PlanError, match=rf"into\['{name}'\] {message}") as caught:
        relayout.load(converted, 1, into=given)
    assert caught.value.code == "option"
    guarded.assert_untouched()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "nothing"}, r"no tensor matches 'nothing' \(there are 23\)"),
        ({"backend": "magic"}, "backend 'magic'"),
        ({"threads": 0}, "threads: 0"),
        ({"memory": 1000}, "1000"),
        ({"memory": MIB}, "1048576 "),
        (
            {"into": {"lm_head": torch.empty(3)}},
            "into: the rank has no tensor 'lm_head'; did you mean 'lm_head.weight'",
        ),
    ],
)
def test_a_request_that_makes_no_sense_touches_nothing(
    converted: Path, stored: dict[str, torch.Tensor], options: dict[str, Any], message: str
) -> None:
    """Half of the tensors are contiguous, so that each of the two ways is tried."""
    names = list(stored)
    straight = Guarded({name: stored[name] for name in names[::2]}, MAKERS["contiguous"])
    others = Guarded({name: stored[name] for name in names[1::2]}, MAKERS["transposed"])
    given = straight.tensors | others.tensors | options.get("into", {})
    with nothing_left_behind(), pytest.raises(PlanError, match=message):
        relayout.load(converted, 1, **{**options, "into": given})
    straight.assert_untouched()
    others.assert_untouched()


@by_two_ways
@pytest.mark.parametrize("make", ["contiguous", "transposed"])
def test_verify_finds_damage(
    converted: Path, stored: dict[str, torch.Tensor], tmp_path: Path, way: str, make: str
) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    for file in sorted(folder.glob("model-rank-1-*")):
        name, (_, end) = next(item for item in extents(file).items() if "_proj" in item[0])
        given = {name: MAKERS[make](_typed(torch.empty(4 * stored[name].nbytes, dtype=torch.uint8), stored[name]))}
        flip(file, end - 1, 6)
        with nothing_left_behind(), pytest.raises(FormatError, match=rf"^{file}: bytes \d+ to \d+ do not"):
            relayout.load(folder, 1, into=given, backend=way, verify=True)
        relayout.load(folder, 1, into=given, backend=way)
        flip(file, end - 1, 6)
        relayout.load(folder, 1, into=given, backend=way, verify=True)
        assert_equal(given, {name: stored[name]})


@by_two_ways
def test_tensors_that_share_memory_may_be_given_under_two_names(
    converted: Path, stored: dict[str, torch.Tensor], way: str
) -> None:
    """Tied embeddings: the same bytes in the file, one parameter in the engine."""
    tied = torch.empty_like(stored["lm_head.weight"])
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    assert_equal(
        relayout.load(converted, 1, into=dict.fromkeys(names, tied), backend=way, verify=True),
        {name: stored[name] for name in names if torch.equal(stored[name], stored[names[0]])},
    )


def test_progress_rises_to_all_the_bytes(converted: Path, stored: dict[str, torch.Tensor]) -> None:
    told: list[tuple[int, int]] = []
    into = {name: torch.empty_like(tensor) for name, tensor in stored.items() if "gate" in name}
    into |= {
        name: torch.empty(tensor.shape[::-1], dtype=tensor.dtype).t() for name, tensor in stored.items() if "up" in name
    }
    found = relayout.load(converted, 1, into=into, names="**down**", progress=lambda *one: told.append(one))
    total = sum(tensor.nbytes for tensor in found.values())
    assert {one for _, one in told} == {total}
    assert told == sorted(told)
    assert told[-1] == (total, total)


@by_two_ways
def test_f4_tensors_are_filled_as_torch_counts_them(tmp_path: Path, way: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of({"x": entry(0, 6, [3, 4], "F4")}, b"abcdef"))
    relayout.convert(tmp_path / "model.safetensors", tmp_path / "out")
    memory = torch.zeros(8, dtype=torch.uint8)
    into = {"x": memory[1:7].view(torch.float4_e2m1fn_x2).view(3, 2)}
    relayout.load(tmp_path / "out", 0, into=into, backend=way)
    assert bytes(memory.numpy()) == b"\0abcdef\0"


PAIR = ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight")


# Which tensors do, test_tensors.py tests.


@pytest.mark.parametrize("is_first", [False, True])
def test_tensors_that_share_memory_are_named_before_any_is_touched(
    converted: Path, stored: dict[str, torch.Tensor], is_first: bool
) -> None:
    guarded = Guarded(stored, MAKERS["contiguous"])
    memory = torch.full((5 * stored[PAIR[0]].nbytes,), UNTOUCHED, dtype=torch.uint8)
    room = _typed(memory, stored[PAIR[0]])
    one, other = room[0], room.view(-1, *room.shape[2:])[1 : 1 + room.shape[1]]  # One row behind.
    into = dict(zip(PAIR, (one, other) if is_first else (other, one), strict=True))
    with nothing_left_behind(), pytest.raises(PlanError, match=f"'{PAIR[0]}' and '{PAIR[1]}'.* share memory"):
        relayout.load(converted, 1, into=guarded.tensors | into)
    guarded.assert_untouched()
    assert (memory == UNTOUCHED).all()


def test_tensors_that_lie_between_each_other_are_filled(converted: Path, stored: dict[str, torch.Tensor]) -> None:
    memory = torch.full((5 * stored[PAIR[0]].nbytes,), UNTOUCHED, dtype=torch.uint8)
    room = _typed(memory, stored[PAIR[0]])
    both = room.view(-1)[: 2 * room[0].numel()]
    into = {name: both[number::2].view(room[0].shape) for number, name in enumerate(PAIR)}
    assert_equal(relayout.load(converted, 1, into=into), {name: stored[name] for name in PAIR})


@pytest.mark.filterwarnings("ignore:.*plain checkpoint")
def test_two_names_of_one_tensor_are_refused_where_nothing_tells_that_they_are_tied(model: Path) -> None:
    tied = torch.full((72, 33), 7)
    with pytest.raises(PlanError, match=r"'lm_head.weight' and 'model.embed_tokens.weight'.* share memory"):
        relayout.load(model, 1, tp=2, into=dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"], tied))
    assert (tied == 7).all()


def test_damage_that_can_be_known_before_leaves_all_tensors_as_they_were(
    converted: Path, stored: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Of two files, the first has what would be filled at once, the other what goes through memory of the loader."""
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    first, *_, last = sorted(folder.glob("model-rank-1-*"))
    straight = Guarded({name: stored[name] for name in extents(first)}, MAKERS["contiguous"])
    matrices = {name: stored[name] for name in extents(last) if stored[name].dim() == 2}
    others = Guarded(matrices, MAKERS["transposed"])
    assert matrices
    assert not any(tensor.is_contiguous() for tensor in others.tensors.values())

    def cut() -> None:
        os.truncate(last, last.stat().st_size - 1)

    def exchange() -> None:
        last.write_bytes(first.read_bytes()[:4096] + bytes(last.stat().st_size - 4096))

    for damage in (exchange, cut, last.unlink):
        damage()
        with nothing_left_behind(), pytest.raises(FormatError, match=last.name):
            relayout.load(folder, 1, into=straight.tensors | others.tensors)
        straight.assert_untouched()
        others.assert_untouched()


def test_whoever_is_interrupted_has_tensors_that_no_thread_writes_to(
    converted: Path, stored: dict[str, torch.Tensor], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the very moment when the load begins to wait for its threads."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for kind in (ThreadedJob, DeviceJob):
        monkeypatch.setattr(kind, "join", interrupt)
    into = {name: torch.empty_like(tensor) for name, tensor in stored.items()}
    with nothing_left_behind(), pytest.raises(KeyboardInterrupt):
        relayout.load(converted, 1, into=into, backend=way)


def test_when_a_read_fails_the_error_waits_for_reads_that_are_under_way(
    converted: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, over, late = threading.Event(), threading.Event(), []
    true_read = ReadableFiles.read
    numbers = iter(range(1000))

    def read(self: ReadableFiles, *given: Any) -> None:
        if next(numbers) == 1:
            failed.set()
            raise OSError(errno.EIO, "of the drive")
        failed.wait(PATIENCE)
        late.append(over.wait(0.2))  # Nobody may have been told yet.
        true_read(self, *given)

    monkeypatch.setattr(ReadableFiles, "read", read)
    into = {name: torch.empty_like(tensor) for name, tensor in stored.items()}

    def load() -> None:
        try:
            relayout.load(converted, 1, into=into, backend="buffered", threads=3)
        finally:
            over.set()

    with nothing_left_behind(), pytest.raises(OSError, match="of the drive"):
        load()
    assert late
    assert not any(late)
