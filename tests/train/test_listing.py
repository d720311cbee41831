"""The proof that the chains of a root lead to what its index says: what it names, and what it calls proven is read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from support.bits import flip
from support.sidecar import RESULT, Piece, Top, forge, forge_digests, forge_pieces, forge_result, proof
from support.steps import (
    CONFIG,
    assert_is_step,
    changed,
    closed_index,
    delete,
    files_in,
    files_of,
    laid_out,
    names_of,
    published,
    put,
    weights_of,
)

import relayout
from relayout.train.listing import list_steps

RECORD, HUB_INDEX, DIGESTS = "relayout.source.json.zst", "model.safetensors.index.json", "relayout.digests.delta"
CHANGES = tuple(f"model-rank-{rank}-part-0.safetensors.delta" for rank in range(2))


def differences_of(root: str | Path) -> tuple[str, ...]:
    found = list_steps(root, check=True).differences
    assert found is not None
    return found


def in_manifest(root: str) -> str:
    name = names_of(root, "full")[-1]
    changed(root, f"{name}/relayout.json", 40)
    return name


def in_header(root: str) -> str:
    name = names_of(root, "full")[-1]
    changed(root, f"{name}/model-rank-1-part-0.safetensors", 20)
    return name


def table_of_folder(root: str) -> str:
    name = names_of(root, "full")[-1]
    delete(root, f"{name}/relayout.rank-0.json.zst")
    return name


def of_another_step(root: str) -> str:
    one, other = names_of(root, "delta")[-2:]
    for path, content in files_of(root).items():
        if path.startswith(f"{one}/") and content:
            put(root, path.replace(one, other), content)
    return other


def in_digests_of_folder(file: str, position: int, part: int) -> Callable[[str], str]:
    """The damage of a file that the manifest proves part by part."""

    def damage(root: str) -> str:
        name = names_of(root, "full")[-1]
        changed(root, f"{name}/{file}", position)
        return f"{name}: the part of {file} at {part} differs from the manifest"

    return damage


DAMAGES: dict[str, Callable[[str], str]] = {
    "manifest of a folder": in_manifest,
    "header of a folder": in_header,
    "table of a folder": table_of_folder,
    "delta of another step": of_another_step,
    "proofs of chunks of rank 0": in_digests_of_folder("relayout.chunks", 3, 0),
    "proofs of chunks of rank 1": in_digests_of_folder("relayout.chunks", -1, 32),
    "digests of rank 0": in_digests_of_folder("relayout.digests", 0, 0),
    "digests of rank 1": in_digests_of_folder("relayout.digests", 192, 192),
    "digests of the source": in_digests_of_folder("relayout.digests", -1, 384),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_chain_that_leads_elsewhere_is_named(root: str, damage: str) -> None:
    published(root)
    assert differences_of(root) == ()
    name = DAMAGES[damage](root)
    [difference] = differences_of(root)
    assert name in difference


Damage = Callable[[str, str], None]


def truncated(root: str, path: str) -> None:
    content = files_of(root)[path]
    put(root, path, content[: len(content) // 2])


def longer(root: str, path: str) -> None:
    put(root, path, files_of(root)[path] + b"\0")


def flipped_at(position: int) -> Damage:
    return lambda root, path: changed(root, path, position)


KINDS: dict[str, Damage] = {
    "missing": delete,
    "empty": lambda root, path: put(root, path, b""),
    "truncated": truncated,
    "longer": longer,
    "changed in front": flipped_at(1),
    "changed at the end": flipped_at(-2),
}
OF_CHANGES = KINDS | {"changed in front": flipped_at(-2 * 80)}
"""Of what is stored of pieces nothing is read: their index, of 80 bytes for each, is behind them."""


def test_a_damaged_file_of_a_delta_is_named(root: str) -> None:
    published(root)
    delta = names_of(root, "delta")[-1]
    intact = files_in(f"{root}/{delta}")
    assert set(intact) == {"relayout.json", DIGESTS, RESULT, *CHANGES}
    for name, content in intact.items():
        for kind, damage in (OF_CHANGES if name in CHANGES else KINDS).items():
            damage(root, f"{delta}/{name}")
            found = differences_of(root)
            assert len(found) == 1, (name, kind, found)
            where = delta if (name, kind) == ("relayout.json", "missing") else f"{delta}/{name}"
            assert re.match(f"step 5: .*{re.escape(where)}: ", found[0]), (kind, found)
            put(root, f"{delta}/{name}", content)
    assert differences_of(root) == ()


def test_a_missing_side_file_of_a_folder_is_named(root: str) -> None:
    published(root)
    folder = names_of(root, "full")[-1]
    delete(root, f"{folder}/config.json")
    [found] = differences_of(root)
    assert re.match(f"step [0-9]: .*{re.escape(folder)}/config.json: is missing$", found)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root to whose last step deltas alone lead."""
    root = tmp_path_factory.mktemp("intact") / "steps"
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=100)
    for step in (1, 2, 3):
        publisher.publish(weights_of(step), step)
    return root


@pytest.fixture
def chain(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "chain"))


def last_delta(root: Path) -> Path:
    return root / names_of(str(root), "delta")[-1]


HeldTensors = list[tuple[int, relayout.Follower]]
"""Followers, each with its rank."""


def assert_all_is_read(root: Path, held: HeldTensors) -> None:
    """Compare what is read with what was published: each step, from nothing; and the newest, by those that have one."""
    entries = relayout.Steps(root).entries()
    for rank in range(2):
        for entry in entries:
            late = relayout.Follower(root, rank)
            assert late.update(entry.step) == entry.step
            assert_is_step(late.tensors, weights_of(entry.step), rank)
    for rank, follower in held:
        assert follower.update() == entries[-1].step
        assert_is_step(follower.tensors, weights_of(entries[-1].step), rank)


def holding(root: Path, *steps: int) -> HeldTensors:
    """Followers of both ranks that have these steps."""
    found = []
    for step in steps:
        for rank in range(2):
            found.append((rank, relayout.Follower(root, rank)))
            assert found[-1][1].update(step) == step
    return found


def test_a_byte_that_is_damaged_anywhere_in_a_delta_is_named_or_in_a_piece(chain: Path) -> None:
    """What is in a piece, readers find; `--check` reads headers' pieces too."""
    delta, num_in_pieces = last_delta(chain), 0
    for name, whole in files_in(str(delta)).items():
        header_nbytes = int.from_bytes(whole[-152:-144], "little")  # The index has the header, and a chunk.
        for position in range(0, len(whole), 41):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            (delta / name).write_bytes(damaged)
            found = differences_of(chain)
            if name in CHANGES and header_nbytes <= position < len(whole) - 2 * 80:
                num_in_pieces += 1
                assert found == (), (name, position)
                with pytest.raises(relayout.FormatError, match=rf"{re.escape(name)}: .* does not match its digest"):
                    relayout.Follower(chain, CHANGES.index(name)).update()
            else:
                assert len(found) == 1, (name, position)
                assert f"{delta / name}" in found[0], (name, position)
        (delta / name).write_bytes(whole)
    assert num_in_pieces
    assert differences_of(chain) == ()
    assert_all_is_read(chain, holding(chain, 1))


def forged(change: Callable[[Top], object]) -> Callable[[Path], object]:
    """A forgery of the delta's manifest."""
    return lambda delta: forge(delta / "relayout.json", change)


def other_result(change: Callable[[Top], object]) -> Callable[[Path], object]:
    """A forgery of what the delta makes; the index of the root says that it is the step."""

    def forgery(delta: Path) -> None:
        forge_result(delta, change)
        top = json.loads((delta.parent / "steps.json").read_bytes())
        top["steps"][-1]["content"] = json.loads((delta / "relayout.json").read_bytes())["makes"]
        (delta.parent / "steps.json").write_bytes(closed_index(top))

    return forgery


def pieces(file: int, change: Callable[[list[Piece]], object]) -> Callable[[Path], object]:
    return lambda delta: forge_pieces(delta, file, change)


def digests(position: int, change: Callable[[list[tuple[int, bytes]]], object]) -> Callable[[Path], object]:
    return lambda delta: forge_digests(delta, position, change)


def other_proof(row: int) -> Callable[[list[Piece]], object]:
    """The index has another BLAKE3 digest of a piece in the result."""

    def change(found: list[Piece]) -> None:
        number, stored, _ = found[row]
        found[row] = (number, stored, proof(b"another piece"))

    return change


def other_digest(rows: list[tuple[int, bytes]]) -> None:
    rows[0] = (rows[0][0], bytes(16))


def no_digests(delta: Path) -> None:
    for position in range(3):
        forge_digests(delta, position, lambda rows: rows.clear())
    (delta / DIGESTS).unlink()


def with_file(name: str, content: bytes | None) -> Callable[[Path], object]:
    """A file more is in `others`; None: and not in new/."""

    def forgery(delta: Path) -> None:
        if content is not None:
            (delta / "new" / name).write_bytes(content)
        forge(delta / "relayout.json", lambda top: top["others"].append(name))

    return forgery


def without_file(name: str) -> Callable[[Path], object]:
    def forgery(delta: Path) -> None:
        (delta / "new" / name).unlink()
        forge(delta / "relayout.json", lambda top: top["others"].remove(name))

    return forgery


def both(*forgeries: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda delta: [forgery(delta) for forgery in forgeries]


other_hub_index = other_result(lambda top: top.update(hub_index_digest=proof(b"{}")))
"""The result has another index for stock loaders, which the delta need not have."""


def is_expected(what: str) -> str:
    return f"{what} has digest [0-9a-f]{{64}}, expected [0-9a-f]{{64}}$"


def differs(file: str, start: int) -> str:
    return f"the part of {file} at {start} differs from the manifest$"


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (pieces(1, lambda found: found.pop(0)), is_expected("the header of model-rank-1-part-0.safetensors")),
    "another header": (
        pieces(1, other_proof(0)),
        r"rank-1-part-0\.safetensors\.delta: the digest of its header differs from the manifest$",
    ),
    "no chunk of rank 0": (pieces(0, lambda found: found.pop()), differs("relayout.chunks", 0)),
    "no chunk of rank 1": (pieces(1, lambda found: found.pop()), differs("relayout.chunks", 32)),
    "another chunk of rank 0": (pieces(0, other_proof(1)), differs("relayout.chunks", 0)),
    "another chunk of rank 1": (pieces(1, other_proof(1)), differs("relayout.chunks", 32)),
    "a chunk behind the last": (
        pieces(0, lambda found: found.append((2, *found[1][1:]))),
        r"rank-0-part-0\.safetensors\.delta: pieces that changed: expected rising numbers below 2$",
    ),
    "a file less": (forged(lambda top: top["files"].pop()), is_expected("the header of model-rank-1-part-0.\\w+")),
    "the files of one": (
        forged(lambda top: top["files"].__setitem__(1, top["files"][0] | {"file": 1})),
        r"rank-1-part-0\.safetensors\.delta: ",
    ),
    "a digest of rank 0 less": (digests(0, lambda rows: rows.pop()), differs("relayout.digests", 0)),
    "a digest of rank 1 less": (digests(1, lambda rows: rows.pop(0)), differs("relayout.digests", 192)),
    "a digest of the source less": (digests(2, lambda rows: rows.pop()), differs("relayout.digests", 384)),
    "another digest of rank 0": (digests(0, other_digest), differs("relayout.digests", 0)),
    "another digest of rank 1": (digests(1, other_digest), differs("relayout.digests", 192)),
    "another digest of the source": (digests(2, other_digest), differs("relayout.digests", 384)),
    "no digests": (no_digests, differs("relayout.digests", 0)),
    "another base": (forged(lambda top: top.update(base=proof(b"another"))), "not to the step before of content"),
    "another result": (
        forged(lambda top: top.update(makes=proof(b"another"))),
        "new/relayout.json.zst: digest differs",
    ),
    "a file of nobody": (with_file("notes.txt", b"mine"), "has notes.txt, which is not a file of the result$"),
    "a file of a delta": (with_file(CHANGES[0], b"mine"), f"has {CHANGES[0]}, which is not a file of the result$"),
    "a file that is not there": (with_file("config.json", None), "new/config.json: is missing$"),
    **{
        f"{name} among others": (
            with_file(name, content),
            f"relayout.json: has {name} among other files, which is made",
        )
        for name, content in {
            "relayout.rank-0.json.zst": b"{}",
            "relayout.chunks": b"never read",
            "relayout.digests": None,
            "relayout.json": b"{}",
            "model-rank-0-part-0.safetensors": None,
        }.items()
    },
    "another hub index": (with_file(HUB_INDEX, b"[]"), f"new/{HUB_INDEX}: digest differs"),
    "the result has another hub index": (other_hub_index, is_expected(HUB_INDEX)),
    "the result has another hub index, which is not there": (
        both(with_file(HUB_INDEX, None), other_hub_index),
        f"new/{HUB_INDEX}: cannot be read: No such file",
    ),
    "the result has another record": (
        other_result(lambda top: top["source"].update(record_digest=proof(b"{}"))),
        is_expected(RECORD),
    ),
    "the result has another header": (
        other_result(lambda top: top["files"][0].update(header_digest=proof(b"{}"))),
        r"rank-0-part-0\.safetensors\.delta: the digest of its header differs from the manifest$",
    ),
    "the result has other chunks": (
        other_result(lambda top: top["files"][1].update(chunks_digest=proof(b"{}"))),
        differs("relayout.chunks", 32),
    ),
    "the result has other digests": (
        other_result(lambda top: top["ranks"][1].update(digests_digest=proof(b"{}"))),
        differs("relayout.digests", 192),
    ),
    "the result has other digests of the source": (
        other_result(lambda top: top["source"].update(digests_digest=proof(b"{}"))),
        differs("relayout.digests", 384),
    ),
    "the result has another table": (
        other_result(lambda top: top["ranks"][1].update(table_digest=proof(b"{}"))),
        "does not keep the layout of the step before: the tables differ",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_delta_is_named_though_its_own_digests_are_true(chain: Path, name: str) -> None:
    forgery, says = FORGERIES[name]
    forgery(last_delta(chain))
    [difference] = differences_of(chain)
    assert difference.startswith(f"step 3: {last_delta(chain)}")
    assert re.search(says, difference)


def with_other_configs(tmp_path: Path) -> Path:
    """A root of three steps, each with another config.json, and so another source record."""
    places = [tmp_path / f"{step}" for step in (1, 2, 3)]
    for step, place in enumerate(places, 1):
        relayout.save(weights_of(step), place, config=CONFIG | {"step": step}, tp=2, threads=1)
    for old, new in pairwise(places):
        relayout.delta(old, new, tmp_path / f"to-{new.name}")
    laid_out(tmp_path / "steps", places[0], tmp_path / "to-2", tmp_path / "to-3")
    assert set(files_in(str(tmp_path / "to-3"))) == {
        *("relayout.json", DIGESTS, RESULT, *CHANGES),
        *(f"new/{name}" for name in ("config.json", RECORD)),
    }
    return tmp_path / "steps"


SMALL: dict[str, tuple[Callable[[Path], object], str]] = {
    "no record": (without_file(RECORD), is_expected(RECORD)),
    "a record that is not there": (lambda delta: (delta / "new" / RECORD).unlink(), f"new/{RECORD}: cannot be read"),
    "a damaged record": (lambda delta: flip(delta / "new" / RECORD, 100), f"new/{RECORD}: digest differs"),
    "no config": (without_file("config.json"), is_expected("config.json")),
    "a config that is not there": (
        lambda delta: (delta / "new/config.json").unlink(),
        "new/config.json: is missing$",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_file_that_changed_and_that_a_delta_lacks_is_named(tmp_path: Path, name: str) -> None:
    root = with_other_configs(tmp_path)
    forgery, says = SMALL[name]
    forgery(last_delta(root))
    [difference] = differences_of(root)
    assert difference.startswith(f"step 3: {last_delta(root)}")
    assert re.search(says, difference)


def test_of_a_step_that_is_not_proven_others_are_not_said_to_be_wrong(tmp_path: Path) -> None:
    """What comes behind it is proven from the next folder on."""
    publisher = relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2, full_every=4)
    for step in range(1, 8):
        publisher.publish(weights_of(step), step)
    deltas = names_of(str(tmp_path / "steps"), "delta")
    for delta in (deltas[0], deltas[-1]):
        forge_pieces(tmp_path / "steps" / delta, 0, lambda found: found.pop())
    found = differences_of(tmp_path / "steps")
    assert [difference.split(":")[0] for difference in found] == ["step 2", "step 7"]


PROVEN: dict[str, Callable[[Path], object]] = {
    "as published": lambda delta: None,
    "another generator": other_result(lambda top: top.update(generator="another")),
    "a field more": other_result(lambda top: top.update(x_more=1)),
    "another hub index": both(with_file(HUB_INDEX, b"{}"), other_hub_index),
    "no hub index": other_result(lambda top: top.update(hub_index_digest=None)),
    "a config as before": with_file("config.json", json.dumps(CONFIG).encode()),
    "a field more of the delta": forged(lambda top: top.update(x_more=1)),
}


@pytest.mark.parametrize("name", PROVEN)
def test_what_is_proven_is_read(chain: Path, name: str) -> None:
    held = holding(chain, 1, 2)
    PROVEN[name](last_delta(chain))
    assert differences_of(chain) == ()
    assert_all_is_read(chain, held)


@pytest.mark.parametrize("name", ["as published", *SMALL])
def test_what_is_proven_of_steps_of_which_small_files_change_is_read(tmp_path: Path, name: str) -> None:
    """Of the step that is not proven, the weights are."""
    root = with_other_configs(tmp_path)
    held = holding(root, 1)
    assert differences_of(root) == ()
    if name in SMALL:
        SMALL[name][0](last_delta(root))
    assert_all_is_read(root, held)


def test_a_file_that_would_have_other_tensors_than_its_header_says_is_not_proven(chain: Path) -> None:
    other_result(lambda top: top["files"][0].update(tensors_digest="0" * 32))(last_delta(chain))
    with pytest.raises(relayout.FormatError, match=r"tensors_digest in its header differs from 0{32}"):
        relayout.Follower(chain, 0).update()
    assert differences_of(chain) != ()
