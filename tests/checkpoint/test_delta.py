"""A base is read through deltas as what they make, or not at all: chains of any length, and forged ones."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.bits import flip
from support.conversions import stored_in
from support.loader_fixtures import assert_equal
from support.sidecar import RESULT, Piece, forge, forge_digests, forge_pieces, forge_result, proof
from support.training import convert, tree

import relayout
from relayout.checkpoint.delta import read_deltas, with_deltas
from relayout.errors import FormatError, PlanError
from relayout.format.delta import encode
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import find_input

PROOF = proof(b"another piece")


def test_loads_of_every_kind_read_through_deltas(steps: Path) -> None:
    deltas = [steps / "0-to-1", steps / "1-to-2"]
    for rank in range(2):
        expected = stored_in(steps / "2", rank)
        assert_equal(relayout.load(steps / "0", rank, deltas=deltas, verify=True), expected)
        assert_equal(dict(relayout.iter_load(steps / "0", rank, deltas=deltas, memory="4MiB")), expected)
        into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        assert_equal(relayout.load(steps / "0", rank, deltas=deltas, into=into), expected)
        some = relayout.load(steps / "0", rank, deltas=deltas, names="**.down_proj.weight")
        assert_equal(some, {name: tensor for name, tensor in expected.items() if name in some})
        assert some
    whole = {}
    for path in (steps / "source-2").glob("*.safetensors"):
        whole |= load_file(path)
    assert_equal(relayout.load(steps / "0", 0, tp=1, deltas=deltas), whole)


def test_a_backend_that_needs_a_file_says_so(steps: Path) -> None:
    with pytest.raises(PlanError, match="backend 'direct' needs file descriptors"):
        relayout.load(steps / "0", 0, deltas=steps / "0-to-1", backend="direct")


CHAIN = 260


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """A folder with a base, `0`, deltas `d1` to `d260`, some of the steps they make, and the values of all, by numpy.

    Some steps change nothing, some all, and only few of them config.json.
    """
    folder, random = tmp_path_factory.mktemp("chain"), np.random.default_rng(7)
    values = [{f"model.layers.{layer}.mlp.up_proj.weight": np.zeros((40, 32), np.uint16) for layer in range(3)}]
    for step in range(CHAIN + 1):
        if step:
            share = random.choice([0, 0.01, 0.3, 1])
            values.append({name: _changed(value, share, random) for name, value in values[-1].items()})
        tensors = {name: torch.from_numpy(value).view(torch.bfloat16) for name, value in values[-1].items()}
        config = {"model_type": "llama", "step": step // 100}
        relayout.save(tensors, folder / f"{step}", config=config, tp=2, threads=1)
        if step:
            relayout.delta(folder / f"{step - 1}", folder / f"{step}", folder / f"d{step}", threads=1)
        if step - 1 not in (-1, 0, *LENGTHS):
            shutil.rmtree(folder / f"{step - 1}")
    return folder, values


def _changed(value: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    chosen = random.random(value.shape) < share
    return value ^ np.where(chosen, random.integers(1, 2**16, value.shape, np.uint16), np.uint16(0))


LENGTHS = (1, 2, 37, CHAIN)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Only some more files may be open than there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64 + len(list(Path("/proc/self/fd").iterdir())), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_chain_of_any_length_makes_its_last_step(
    length: int, chain: tuple[Path, list[dict[str, np.ndarray]]], few_descriptors: None, tmp_path: Path
) -> None:
    folder, values = chain
    deltas = [folder / f"d{step}" for step in range(1, length + 1)]
    expected = {name: torch.from_numpy(value).view(torch.bfloat16) for name, value in values[length].items()}
    assert_equal(relayout.load(folder / "0", 0, tp=1, deltas=deltas), expected)
    with relayout.safe_open(folder / "0", deltas=deltas) as opened:
        assert_equal({name: opened.get_tensor(name) for name in expected}, expected)
    for rank in range(2):
        assert_equal(relayout.load(folder / "0", rank, deltas=deltas), stored_in(folder / f"{length}", rank))
    relayout.apply_deltas(folder / "0", deltas, tmp_path / "made")
    assert tree(tmp_path / "made") == tree(folder / f"{length}")


def test_each_delta_of_a_chain_costs_the_same(
    chain: tuple[Path, list[dict[str, np.ndarray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files opened and read, and memory for their indexes."""
    opened: list[str] = []
    for name in ("open", "read"):
        known = getattr(LocalStore, name)
        monkeypatch.setattr(LocalStore, name, lambda *given, known=known, **named: (
            opened.append(given[0].location(given[1])), known(*given, **named))[1])  # fmt: skip
    deltas = [chain[0] / f"d{step}" for step in range(1, CHAIN + 1)]
    relayout.load(chain[0] / "0", 0, deltas=deltas)
    of_each = [Counter(path for path in opened if path.startswith(f"{delta}/")) for delta in deltas[1:-1]]
    # Nothing changed; weights did.
    assert {tuple(sorted(found.values())) for found in of_each} == {(1, 1), (1, 1, 3)}
    assert sum(path.startswith(f"{chain[0] / '0'}/") for path in opened) < 10


@pytest.mark.parametrize("name", ["model-rank-0-part-0.safetensors.delta", "relayout.json", RESULT])
def test_a_damaged_delta_of_a_chain_is_named_by_its_position(
    name: str, chain: tuple[Path, list[dict[str, np.ndarray]]], tmp_path: Path
) -> None:
    deltas = [chain[0] / f"d{step}" for step in range(1, CHAIN + 1)]
    at = next(at for at in range(200, CHAIN) if (deltas[at] / "model-rank-0-part-0.safetensors.delta").exists())
    shutil.copytree(deltas[at], tmp_path / "damaged")
    flip(tmp_path / "damaged" / name, 20)
    with pytest.raises(FormatError, match=f"delta {at + 1}: .*d"):
        relayout.load(chain[0] / "0", 0, deltas=[*deltas[:at], tmp_path / "damaged", *deltas[at + 1 :]])
    with pytest.raises(PlanError, match=f"delta {at + 1}: applies to content .*, not to what delta {at} makes"):
        relayout.load(chain[0] / "0", 0, deltas=[*deltas[:at], *deltas[at + 1 :]])


def test_a_manifest_of_another_delta_is_not_believed(steps: Path, tmp_path: Path) -> None:
    """It is intact: found when the delta is read. If it comes later, the one that was read stays."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    made = with_deltas(find_input(steps / "0"), read_deltas(tmp_path / "delta"))
    shutil.copy(steps / "1-to-2" / RESULT, tmp_path / "delta" / "new")
    with pytest.raises(FormatError, match="digest differs from the one in the delta's manifest"):
        list(read_deltas(tmp_path / "delta"))
    assert made.read("relayout.json", 2**20) == (steps / "1" / "relayout.json").read_bytes()


def test_a_base_that_other_deltas_change_is_not_believed(steps: Path, tmp_path: Path) -> None:
    """What was read before has its proof, and so has what is read of the others, but not together."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    made = with_deltas(find_input(steps / "0"), read_deltas(tmp_path / "delta"))
    for path in (steps / "1-to-2").glob("*.delta"):
        shutil.copy(path, tmp_path / "delta")
    for name in ("model-rank-0-part-0.safetensors", "relayout.chunks", "relayout.digests"):
        with (
            pytest.raises(FormatError, match=r"differs? from the manifest|bytes long, expected"),
            made.open(name) as file,
        ):
            file.read(0, memoryview(bytearray(file.nbytes)))


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file twice": (
        lambda delta: forge(delta / "relayout.json", lambda top: top["files"].append(top["files"][0])),
        r"files \[0, 1, 0\], expected rising numbers",
    ),
    "a file more": (
        lambda delta: forge(delta / "relayout.json", lambda top: top["files"].append(top["files"][0] | {"file": 2})),
        "changes of file 2, there are 2",
    ),
    "a part of digests more": (
        lambda delta: forge(delta / "relayout.json", lambda top: top["digests"].append(top["digests"][0])),
        "digests of 4 parts, 2 holders and the source have some",
    ),
    "a part of digests less": (
        lambda delta: forge(delta / "relayout.json", lambda top: top["digests"].pop()),
        "digests of 2 parts, 2 holders and the source have some",
    ),
    "a longer file": (
        lambda delta: forge_result(delta, lambda top: top["files"][1].update(nbytes=top["files"][1]["nbytes"] + 1)),
        "does not keep the layout of .*: the files differ",
    ),
    "another table": (
        lambda delta: forge_result(delta, lambda top: top["ranks"][1].update(table_digest="0" * 64)),
        "does not keep the layout of .*: the tables differ",
    ),
    "another number of source tensors": (
        lambda delta: forge_result(delta, lambda top: top["source"].update(num_tensors=3)),
        "does not keep the layout of .*: the number of source tensors differs",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_delta_that_says_it_is_between_other_layouts_is_refused(name: str, steps: Path, tmp_path: Path) -> None:
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    change, what = FORGERIES[name]
    change(forged)
    with pytest.raises(FormatError, match=what) as caught:
        relayout.load(steps / "0", 0, deltas=forged)
    assert str(caught.value).startswith(f"{forged}")
    with pytest.raises(FormatError, match=what):
        relayout.apply_deltas(steps / "0", forged, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_delta_to_a_conversion_that_is_aligned_otherwise_is_refused(steps: Path, tmp_path: Path) -> None:
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    made = json.loads((convert(steps / "source-1", tmp_path / "made", align=8192) / "relayout.json").read_bytes())
    forge_result(forged, lambda top: top.update(made))
    with pytest.raises(FormatError, match=r"does not keep the layout of .*: the files differ"):
        relayout.load(steps / "0", 0, deltas=forged)


def test_a_forged_header_is_refused(steps: Path, tmp_path: Path) -> None:
    """Its piece and the delta's digests fit each other, and it still names its tensors: it has another space."""
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    file = json.loads((steps / "1" / "relayout.json").read_bytes())["files"][0]
    old, new = (
        np.frombuffer((steps / step / file["name"]).read_bytes()[: file["data_start"]], np.uint8).copy()
        for step in "01"
    )
    assert new[-1] == ord(" ")
    new[-1] = ord("\t")
    header = (0, encode(old ^ new, [(len(new), 1)]), proof(new.tobytes()))
    forge_pieces(forged, 0, lambda pieces: pieces.insert(0, header) or pieces.pop(1))  # type: ignore[func-returns-value]
    with pytest.raises(FormatError, match="the digest of its header differs from the manifest"):
        relayout.load(steps / "0", 0, deltas=forged)
    header = (*header[:2], file["header_digest"])
    forge_pieces(forged, 0, lambda pieces: pieces.insert(0, header) or pieces.pop(1))  # type: ignore[func-returns-value]
    with pytest.raises(FormatError, match="its header does not match the manifest"):
        relayout.load(steps / "0", 0, deltas=forged)


@pytest.mark.parametrize("forgery", ["bytes", "proof", "piece less"])
def test_a_forged_chunk_is_refused(forgery: str, steps: Path, tmp_path: Path) -> None:
    """What is stored has its proof; what it makes has not the one of the result, or the index another one."""
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    file = json.loads((steps / "1" / "relayout.json").read_bytes())["files"][0]
    nbytes = (file["nbytes"] - file["data_start"] - 1) % 2**20 + 1
    change = np.zeros(nbytes, np.uint8)
    change[-1] = 1

    def replaced(pieces: list[Piece]) -> None:
        number, stored, content = pieces.pop()
        if forgery != "piece less":
            is_bytes = forgery == "bytes"
            pieces.append(
                (number, encode(change, [(nbytes, 1)]) if is_bytes else stored, content if is_bytes else PROOF)
            )

    forge_pieces(forged, 0, replaced)
    where = re.escape(f"{forged}: relayout.chunks of the result")
    what = rf"do not match digest .*: damaged|{where}: its part for .* differs from the manifest"
    with pytest.raises(FormatError, match=what):
        relayout.load(steps / "0", 0, deltas=forged)
    with pytest.raises(FormatError, match=what):
        relayout.apply_deltas(steps / "0", forged, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_forged_digests_are_refused(position: int, steps: Path, tmp_path: Path) -> None:
    """Of each rank, and of the source. Loads need none."""
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    forge_digests(forged, position, lambda rows: rows.pop())
    assert_equal(relayout.load(steps / "0", 0, deltas=forged), stored_in(steps / "1", 0))
    what = r"relayout\.digests of the result: its part for .* differs from the manifest"
    with pytest.raises(FormatError, match=what):
        relayout.apply_deltas(steps / "0", forged, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_any_range_of_the_digests_is_that_of_the_result(steps: Path) -> None:
    made = with_deltas(find_input(steps / "0"), read_deltas([steps / "0-to-1", steps / "1-to-2"]))
    for name in ("relayout.digests", "relayout.chunks"):
        expected = (steps / "2" / name).read_bytes()
        assert made.read(name, 2**20) == expected
        assert expected != (steps / "0" / name).read_bytes()
        status = made.stat(name)
        assert status is not None
        assert status.nbytes == len(expected)
        with made.open(name) as file:
            for start in range(0, len(expected), 7):
                for nbytes in (1, 15, 16, 17, 32, 33, 100):
                    view = memoryview(bytearray(min(nbytes, len(expected) - start)))
                    file.read(start, view)
                    assert view == expected[start : start + nbytes], (name, start, nbytes)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("place", [0, -1])
def test_no_file_stays_open_if_a_delta_is_damaged(place: int, steps: Path, tmp_path: Path) -> None:
    """In its first piece, which is the header, or in its index."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    made = with_deltas(find_input(steps / "0"), read_deltas(tmp_path / "delta"))
    flip(tmp_path / "delta" / "model-rank-0-part-0.safetensors.delta", place)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FormatError, match=r"differs from the manifest|does not match its digest"):
        made.open("model-rank-0-part-0.safetensors")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # Garbage of other tests may be closed meanwhile.


def test_deltas_are_a_path_or_a_list_of_paths(steps: Path) -> None:
    with pytest.raises(PlanError, match=r"^deltas: 5, expected the path of a delta, or a list of paths$") as raised:
        relayout.load(steps / "0", 0, deltas=5)  # type: ignore[arg-type]
    assert raised.value.code == "option"
