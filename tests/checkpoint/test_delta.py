"""A base is read through deltas as what they make, or not at all: chains of any length, and forged ones."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file
from support.bits import flip
from support.conversions import stored_in
from support.loader_fixtures import assert_equal
from support.training import convert, tree
from xxhash import xxh3_128_digest

import relayout
from relayout.checkpoint.delta import read_deltas, with_deltas
from relayout.errors import FormatError, PlanError
from relayout.format.delta import encode
from relayout.format.manifest import sealed
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import find_input


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
    assert {tuple(sorted(found.values())) for found in of_each} == {(1, 1), (1, 1, 3)}  # Nothing changed; weights did.
    assert sum(path.startswith(f"{chain[0] / '0'}/") for path in opened) < 10


@pytest.mark.parametrize("name", ["model-rank-0-part-0.safetensors.delta", "relayout.json", "new/relayout.json"])
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


NEW_MANIFEST = Path("new") / "relayout.json"


def test_a_manifest_of_another_delta_is_not_believed(steps: Path, tmp_path: Path) -> None:
    """It is intact: found when the delta is read; and if it comes later, when the manifest is asked for again."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    made = with_deltas(find_input(steps / "0"), read_deltas(tmp_path / "delta"))
    shutil.copy(steps / "1-to-2" / NEW_MANIFEST, tmp_path / "delta" / "new")
    for read in (lambda: made.read("relayout.json", 2**20), lambda: list(read_deltas(tmp_path / "delta"))):
        with pytest.raises(FormatError, match="digest differs from the one in the delta's manifest"):
            read()


@pytest.mark.parametrize("forgery", ["one file more", "other files"])
def test_a_delta_that_says_it_is_between_other_layouts_is_refused(forgery: str, steps: Path, tmp_path: Path) -> None:
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    top = json.loads((forged / "relayout.json").read_bytes())
    if forgery == "one file more":
        top["files"].append(top["files"][0])
    else:
        made = convert(steps / "source-1", tmp_path / "made", align=8192) / "relayout.json"
        top["makes"] = blake3(made.read_bytes()).hexdigest()
        shutil.copy(made, forged / NEW_MANIFEST)
    del top["self_digest"]
    (forged / "relayout.json").write_bytes(sealed(top))
    with pytest.raises(FormatError, match=r"not between checkpoints of one layout: .*files differ"):
        relayout.load(steps / "0", 0, deltas=forged)


def test_a_forged_header_is_refused(steps: Path, tmp_path: Path) -> None:
    """Its piece and the delta's digests fit each other, and it still names its content: it has another space."""
    forged = shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    file = json.loads((steps / "1" / "relayout.json").read_bytes())["files"][0]
    path, start = forged / f"{file['name']}.delta", file["data_start"]
    old, new = (np.frombuffer((steps / step / file["name"]).read_bytes()[:start], np.uint8).copy() for step in "01")
    assert new[-1] == ord(" ")
    new[-1] = ord("\t")
    header, blob = encode(old ^ new, [(start, 1)]), path.read_bytes()
    num_pieces = 1 - (start - file["nbytes"]) // 2**20
    rows = blob[-24 * num_pieces :]
    pieces = blob[int.from_bytes(rows[:8], "little") : -24 * num_pieces]
    rows = len(header).to_bytes(8, "little") + xxh3_128_digest(header) + rows[24:]
    path.write_bytes(header + pieces + rows)
    top = json.loads((forged / "relayout.json").read_bytes())
    top["files"][0] = {"nbytes": len(header + pieces + rows), "index_digest": blake3(rows).hexdigest()}
    del top["self_digest"]
    (forged / "relayout.json").write_bytes(sealed(top))
    with pytest.raises(FormatError, match="its header does not match the manifest"):
        relayout.load(steps / "0", 0, deltas=forged)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_no_file_stays_open_if_a_delta_is_damaged(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    flip(tmp_path / "delta" / "new" / "relayout.chunks", 0)
    made = with_deltas(find_input(steps / "0"), read_deltas(tmp_path / "delta"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FormatError, match="differs from the manifest"):
        made.open("model-rank-0-part-0.safetensors")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # Garbage of other tests may be closed meanwhile.


def test_deltas_are_a_path_or_a_list_of_paths(steps: Path) -> None:
    with pytest.raises(PlanError, match=r"^deltas: 5, expected the path of a delta, or a list of paths$") as raised:
        relayout.load(steps / "0", 0, deltas=5)  # type: ignore[arg-type]
    assert raised.value.code == "option"
