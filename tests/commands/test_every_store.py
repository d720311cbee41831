"""Converting, looking, proving, restoring and loading, from and to every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.loader_fixtures import assert_equal
from support.models import llama_files
from support.store_contract import KINDS, WRITABLE, Ground, content, ground
from support.training import next_step

import relayout
from relayout.errors import PlanError
from relayout.storage.stores import find_store

TP = 2
Files = dict[str, bytes]


MODEL = llama_files(64, head_dim=16, mlp=160, layers=3, vocabulary=96) | {
    "tokenizer.json": b"words" * 300_000,
    "sub/notes.txt": "Grüße".encode(),
}


def files_of(url: str) -> Files:
    """Everything that is there, by name."""
    store = find_store(url)
    return {entry.name: content(store, entry.name) for entry in store.walk() if not entry.is_folder}


def write(place: Ground, name: str, files: Files) -> str:
    for file, blob in files.items():
        place.kind.write(place.store(name), file, blob)
    if (folder := place.store(name).path("")) is not None:
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
    return place.url(name)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and what becomes of it, on the drive."""
    folder = tmp_path_factory.mktemp("every-store")
    write(Ground(KINDS["local"], str(folder)), "model", MODEL)
    relayout.convert(folder / "model", folder / "out", tp=TP)
    relayout.convert(next_step(folder / "model", folder / "trained", 1), folder / "out-1", tp=TP)
    relayout.delta(folder / "out", folder / "out-1", folder / "delta")
    return folder


@pytest.fixture(scope="module", params=[name for name, kind in KINDS.items() if kind.has_plain])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A place of each kind, with the model and its conversion: made there, or copied. Tests only read these two."""
    folder = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch, ground(request.param, folder, patch) as found:
        source = write(found, "model", MODEL)
        if found.kind.is_writable:
            assert relayout.convert(source, tp=TP).output == found.url(f"model-tp{TP}")
        else:
            made = request.getfixturevalue("local") / "out"
            write(found, f"model-tp{TP}", files_of(str(made)))
        yield found


@pytest.fixture
def converted(here: Ground) -> str:
    return here.url(f"model-tp{TP}")


@pytest.fixture
def writable(here: Ground) -> None:
    if not here.kind.is_writable:
        pytest.skip("relayout does not write to this store")


@pytest.mark.usefixtures("writable")
def test_a_conversion_has_the_same_bytes_in_every_store(converted: str, local: Path) -> None:
    expected = files_of(str(local / "out"))
    found = files_of(converted)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_a_conversion_is_proved(here: Ground, converted: str) -> None:
    report = relayout.verify(converted, source=here.url("model"))
    assert (report.ok, report.compared_with_source) == (True, True)


def test_damage_and_a_file_too_many_are_found(here: Ground, local: Path) -> None:
    files, name = files_of(str(local / "out")), "model-rank-1-part-0.safetensors"
    blob = bytearray(files[name])
    blob[-5] ^= 1
    more = {"model.safetensors": MODEL["model-00001-of-00002.safetensors"]} if here.kind.is_listed else {}
    damaged = write(here, "damaged", files | {name: bytes(blob)} | more)
    found = relayout.verify(damaged).differences
    assert {one.file for one in found} == {name, *more}
    assert "digest differs: the stored bytes are damaged" in [one.what for one in found]
    with pytest.raises(relayout.FormatError, match="digest"):
        relayout.load(damaged, 1, verify=True)


def test_it_is_looked_at_alike(here: Ground, converted: str, local: Path) -> None:
    for name, other in ((f"model-tp{TP}", "out"), ("model", "model")):
        found = relayout.inspect(here.url(name))
        assert found.path == here.url(name)
        assert replace(found, path="") == replace(relayout.inspect(local / other), path="")


@pytest.mark.parametrize("tp", [None, 1, 4])
def test_every_rank_is_loaded_alike(converted: str, local: Path, tp: int | None) -> None:
    for rank in range(tp or TP):
        assert_equal(relayout.load(converted, rank, tp=tp), relayout.load(local / "out", rank, tp=tp))


def test_tensors_come_one_after_another_and_are_proved(converted: str, local: Path) -> None:
    found = dict(relayout.iter_load(converted, 1, verify=True, memory=4 * 2**20))
    assert_equal(found, relayout.load(local / "out", 1))


def test_given_tensors_are_filled(converted: str, local: Path) -> None:
    expected = relayout.load(local / "out", 0)
    given = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert_equal(relayout.load(converted, 0, into=given), expected)


def test_a_plain_checkpoint_is_sliced_while_it_is_loaded(here: Ground, local: Path) -> None:
    source = write(here, "model", MODEL)
    with pytest.warns(UserWarning, match="a plain checkpoint"):
        assert_equal(relayout.load(source, 1, tp=TP), relayout.load(local / "out", 1))
    one = relayout.load(f"{source}/model-00001-of-00002.safetensors", 0, tp=1)
    assert 0 < len(one) < len(relayout.load(source, 0, tp=1))


def test_a_rank_is_opened(converted: str, local: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with relayout.open(converted, 1) as opened, relayout.open(local / "out", 1) as expected:
        assert opened.keys() == expected.keys()
        assert opened.metadata() == expected.metadata()
        assert torch.equal(opened.get_tensor(name), expected.get_tensor(name))
        assert torch.equal(opened.get_slice(name)[3:9, 1:5], expected.get_slice(name)[3:9, 1:5])


def test_whole_tensors_are_opened(converted: str, local: Path) -> None:
    with relayout.safe_open(converted) as opened, relayout.safe_open(local / "out") as expected:
        assert opened.keys() == expected.keys()
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            assert torch.equal(opened.get_tensor(name), expected.get_tensor(name))
        assert opened.metadata() == expected.metadata() == {"format": "pt"}


def test_a_rank_is_copied_from_every_store(converted: str, local: Path, tmp_path: Path) -> None:
    done = relayout.copy(converted, tmp_path / "copy", ranks=[1])
    assert relayout.verify(done.output, source=local / "model").ok
    assert_equal(relayout.load(done.output, 1), relayout.load(local / "out", 1))
    assert files_of(done.output).keys() == {file.name for file in relayout.files(converted, ranks=[1]).files}


@pytest.mark.usefixtures("writable")
def test_a_rank_is_copied_to_every_store(here: Ground, local: Path) -> None:
    done = relayout.copy(local / "out", here.url("copy"), ranks=[1])
    assert done.output == here.url("copy")
    assert relayout.verify(done.output).ok
    assert_equal(relayout.load(done.output, 1), relayout.load(local / "out", 1))
    with pytest.raises(PlanError, match="copy: of 2 ranks it has only 1, and lacks 0"):
        relayout.load(done.output, 0)
    with pytest.raises(PlanError, match="already holds"):
        relayout.copy(local / "out", here.url("copy"), ranks=[0])
    relayout.copy(local / "out", here.url("copy"), ranks=[0], force=True)
    assert relayout.verify(done.output).ranks == (0,)


@pytest.mark.usefixtures("writable")
def test_deltas_are_written_and_applied(here: Ground, converted: str, local: Path) -> None:
    newer = write(here, "newer", files_of(str(local / "out-1")))
    delta = relayout.delta(converted, newer, here.url("delta")).output
    assert files_of(delta) == files_of(str(local / "delta"))
    made = relayout.apply_deltas(converted, [delta], here.url("made")).output
    assert files_of(made) == files_of(str(local / "out-1"))


def test_deltas_are_read(here: Ground, converted: str, local: Path, tmp_path: Path) -> None:
    delta = write(here, "delta-to-read", files_of(str(local / "delta")))
    expected = relayout.load(local / "out-1", 1)
    assert_equal(relayout.load(converted, 1, deltas=[delta]), expected)
    for _ in range(2):
        assert_equal(relayout.load(converted, 1, deltas=[delta], cache=tmp_path / "cache"), expected)
    tensors = relayout.load(converted, 1)
    relayout.apply(delta, 1, tensors, base=converted)
    assert_equal(tensors, expected)
    assert_equal(relayout.load(converted, 0, tp=1, deltas=delta), relayout.load(local / "out-1", 0, tp=1))


def test_a_backend_that_needs_descriptors_refuses_a_store_without(here: Ground, converted: str) -> None:
    if find_store(converted).path("x") is not None:
        assert len(relayout.load(converted, 0, backend="direct")) > 10
        return
    with pytest.raises(PlanError, match=f"backend 'direct' needs file descriptors, which {converted} does not have"):
        relayout.load(converted, 0, backend="direct")
    assert relayout.explain(converted, 0).backend == "buffered"
    assert len(relayout.load(converted, 0, backend="buffered")) > 10


@pytest.mark.usefixtures("writable")
def test_what_is_there_is_replaced_only_if_asked_for(here: Ground, local: Path) -> None:
    source, out = here.url("model"), write(here, "older", files_of(str(local / "out")))
    nbytes = f"{relayout.inspect(source).nbytes:,}"
    with pytest.raises(PlanError, match=f"holds a complete conversion of model type llama, {nbytes} bytes, at TP 2;"):
        relayout.convert(source, out, tp=TP)
    relayout.convert(source, out, tp=4, force=True)
    assert relayout.inspect(out).ranks[-1].rank == 3
    assert relayout.verify(out, source=source).ok


def test_what_is_not_there_is_told(here: Ground) -> None:
    nothing = here.url("nothing")
    for call in (
        lambda: relayout.convert(nothing),
        lambda: relayout.load(nothing, 0),
        lambda: relayout.inspect(nothing),
        lambda: relayout.safe_open(nothing),
        lambda: relayout.verify(nothing),
    ):
        with pytest.raises(PlanError, match="nothing: no") as caught:
            call()
        assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(("source", "target"), list(pairwise([*WRITABLE, WRITABLE[0]])))
def test_from_each_store_to_another(
    source: str, target: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "source", tmp_path / "target"
    for place in places:
        place.mkdir()
    with ground(source, places[0], monkeypatch) as here, ground(target, places[1], monkeypatch) as there:
        model = write(here, "model", MODEL)
        out = relayout.convert(model, there.url("out"), tp=TP).output
        assert relayout.verify(out, source=model).ok
        assert_equal(relayout.load(out, 1), relayout.load(local / "out", 1))
        assert files_of(relayout.restore(out, here.url("back")).output) == MODEL
