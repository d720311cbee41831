"""A follower has each step as it was published, whichever it had before, and takes nothing else for it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from support.sidecar import Piece, forge, forge_digests, forge_pieces, proof
from support.steps import CONFIG, assert_is_step, closed_index, names_of, put, weights_of

import relayout
from relayout.format.delta import encode, xor_into
from relayout.loader.in_place import change_by


def test_one_that_joins_late_or_goes_back_has_any_step(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=3)
    for step in range(1, 6):
        publisher.publish(weights_of(step), step)
    for step in (5, 3, 1, 4):
        late = relayout.Follower(root, 0)
        assert late.update(step) == step
        assert_is_step(late.tensors, weights_of(step), 0)
    back = relayout.Follower(root, 0)
    for step in (5, 2, 4):
        back.update(step)
        assert_is_step(back.tensors, weights_of(step), 0)


def test_tensors_that_somebody_changed_are_loaded_again(root: str) -> None:
    """All are compared, also one that the delta leaves as it is."""
    publisher = relayout.Publisher(root, config=CONFIG, tp=2)
    before, after = weights_of(1), weights_of(2)
    name = min(before)
    after[name] = before[name]
    publisher.publish(before, 1)
    follower = relayout.Follower(root, 0)
    follower.update()
    publisher.publish(after, 2)
    follower.tensors[name].view(torch.int16).view(-1)[3] ^= 1
    assert follower.update() == 2
    assert_is_step(follower.tensors, after, 0)


def test_a_reader_of_an_older_index_goes_on_with_what_is_there(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=3, keep=1, keep_seconds=0)
    publisher.publish(weights_of(1), 1)
    slow = relayout.Follower(root, 0)
    slow.update()
    publisher.publish(weights_of(2), 2)

    def late(*arguments: Any, **options: Any) -> Any:
        for step in range(3, 9):
            publisher.publish(weights_of(step), step)
        relayout.Steps(root).prune(grace_seconds=0)
        monkeypatch.undo()
        return change_by(*arguments, **options)

    monkeypatch.setattr("relayout.train.follower.change_by", late)
    assert slow.update() == 8
    assert_is_step(slow.tensors, weights_of(8), 0)


def test_an_empty_root_has_no_step(root: str) -> None:
    assert relayout.Steps(root).newest() is None
    assert relayout.Steps(root).chain() is None
    with pytest.raises(
        relayout.PlanError, match=r"has no steps yet: no (such file or folder|objects with this prefix)"
    ):
        relayout.Follower(root, 0).update()
    put(root, "mine", b"mine")
    with pytest.raises(relayout.PlanError, match=r"has no steps yet \(steps\.json of relayout\.Publisher is missing\)"):
        relayout.Follower(root, 0).update()


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_what_makes_another_content_than_the_index_says_is_not_taken_for_the_step(tmp_path: Path, kind: str) -> None:
    places = {}
    for root, last in (("steps", 2), ("other", 3)):
        publisher = relayout.Publisher(tmp_path / root, config=CONFIG, tp=2, full_every=1 if kind == "full" else 100)
        for step, weights in ((1, 1), (2, last)):
            done = publisher.publish(weights_of(weights), step)
        stored = done.full if kind == "full" else done.delta
        assert stored is not None
        places[root] = tmp_path / root / stored.name
    follower = relayout.Follower(tmp_path / "steps", 0)
    follower.update(1)
    shutil.rmtree(places["steps"])
    places["other"].rename(places["steps"])
    entries = json.loads((tmp_path / "steps" / "steps.json").read_text())
    if kind == "full":  # Else there is another way.
        entries["steps"][-1]["delta"] = None
        (tmp_path / "steps" / "steps.json").write_bytes(closed_index(entries))
    expected = entries["steps"][-1]["content"]
    says = rf"steps: the way to step 2 makes content (?!{expected})[0-9a-f]{{64}}, the index of steps says {expected}$"
    with pytest.raises(relayout.FormatError, match=says):
        follower.update()
    assert_is_step(follower.tensors, weights_of(1), 0)
    assert follower.step == 1
    assert follower.update(1) is None


def test_a_follower_has_the_tensors_of_a_step_that_has_more_or_fewer_or_others(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, unmatched="replicate")
    follower = relayout.Follower(root, 0)
    more = {"model.extra.weight": torch.arange(5.0)}
    for step, others in enumerate(
        [{}, more, {"model.extra.weight": torch.arange(6.0)}, {"model.extra.weight": torch.arange(6)}, {}], 1
    ):
        assert publisher.publish(weights_of(step) | others, step).full is not None
        assert follower.update() == step
        assert follower.tensors.keys() == (weights_of(step) | others).keys()
        assert all(follower.tensors.pop(name).equal(tensor) for name, tensor in others.items())
        assert_is_step(follower.tensors, weights_of(step), 0)
        follower.tensors |= {name: tensor.clone() for name, tensor in others.items()}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_follower_has_the_dtype_of_the_step_and_goes_on_by_deltas(
    root: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """When a trainer is started again with another one: FP32 could hold what is BF16, but no delta could change it."""
    name, whole = "model.norm.weight", torch.arange(64.0)
    follower, place = relayout.Follower(root, 0), 0
    for number, dtype in enumerate(dtypes):
        publisher = relayout.Publisher(root, config=CONFIG, dtype=dtype)
        for step in (10 * number + 1, 10 * number + 2):
            whole[step] += 1
            publisher.publish({name: whole}, step)
            chain = relayout.Steps(root).chain(follower.content)
            assert follower.update() == step
            assert follower.tensors[name].dtype == dtype
            assert follower.tensors[name].equal(whole.to(dtype))
            assert chain is not None
            assert (chain.full is None) == (step % 10 == 2)
            if step % 10 == 2:
                assert follower.tensors[name].data_ptr() == place, "changed where it is"
            place = follower.tensors[name].data_ptr()


def test_a_follower_reuses_no_memory_that_a_load_would_not_make(tmp_path: Path) -> None:
    root, weights = tmp_path / "steps", {f"model.layers.{i}.input_layernorm.weight": torch.randn(64) for i in range(4)}
    same, strided, wide, gone = weights
    follower = relayout.Follower(root, 0)
    relayout.Publisher(root, config=CONFIG).publish(weights, 1)
    follower.update()
    follower.tensors[strided] = torch.empty(64, 2)[:, 0]
    follower.tensors[wide] = follower.tensors[wide].double()
    before = {name: tensor.data_ptr() for name, tensor in follower.tensors.items()}
    weights.pop(gone)
    relayout.Publisher(root, config=CONFIG).publish(weights, 2)
    follower.update()
    assert follower.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        found = follower.tensors[name]
        assert found.equal(tensor)
        assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
        assert (found.data_ptr() == before[name]) == (name == same)


MIB = 2**20
NORM = "model.norm.weight"


def norm_of(step: int) -> dict[str, torch.Tensor]:
    """A tensor of three chunks, of which each step changes some elements of the second one."""
    values = torch.arange(3 * MIB // 2).bfloat16()
    for number in range(1, step):
        values[MIB // 2 + 7 * number : MIB - 7 : 1000] += 2.0 ** (number + 20)
    return {NORM: values}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root to whose last step deltas alone lead. Of its weight file, three chunks, the second one changes."""
    root = tmp_path_factory.mktemp("intact") / "steps"
    publisher = relayout.Publisher(root, config=CONFIG, full_every=100)
    for step in (1, 2, 3):
        publisher.publish(norm_of(step), step)
    return root


def changing(row: int, change: Callable[[Piece], Piece]) -> Callable[[list[Piece]], object]:
    def edit(found: list[Piece]) -> None:
        found[row] = change(found[row])

    return edit


def other_bytes(piece: Piece) -> Piece:
    """Two elements more change."""
    number, stored, content = piece
    change = np.zeros(MIB, np.uint8)
    xor_into(stored, change)
    change[[10, -10]] ^= 1
    return number, encode(change, [(MIB, 2)]), content


def nothing(piece: Piece) -> Piece:
    """No element changes."""
    head = np.array([1, MIB, 2, 0, 0], "<u4").tobytes()
    return piece[0], head + zstandard.compress(b""), piece[2]


Forgery = Callable[[Path], object]
MAKES_OTHERS = r"model\.norm\.weight.*: is not what .*/{delta} makes of step 2: load the tensors again"
OTHER_DIGESTS = (
    r"/{delta}/relayout\.digests\.delta: its digests of the tensors of rank 0 do not make those of the result"
)
FORGERIES: dict[str, tuple[Forgery, str]] = {
    "no piece": (lambda delta: forge_pieces(delta, 0, lambda found: found.pop()), MAKES_OTHERS),
    "no file": (lambda delta: forge(delta / "relayout.json", lambda top: top["files"].clear()), MAKES_OTHERS),
    "other bytes of a piece": (lambda delta: forge_pieces(delta, 0, changing(1, other_bytes)), MAKES_OTHERS),
    "nothing of a piece": (lambda delta: forge_pieces(delta, 0, changing(1, nothing)), MAKES_OTHERS),
    "the piece before": (lambda delta: forge_pieces(delta, 0, changing(1, lambda one: (1, *one[1:]))), MAKES_OTHERS),
    "the piece behind": (lambda delta: forge_pieces(delta, 0, changing(1, lambda one: (3, *one[1:]))), MAKES_OTHERS),
    "a piece more": (
        lambda delta: forge_pieces(delta, 0, lambda found: found.append((3, *found[1][1:]))),
        MAKES_OTHERS,
    ),
    "a piece that is none": (
        lambda delta: forge_pieces(delta, 0, changing(1, lambda one: (2, b"piece", one[2]))),
        r"/{delta}/.*\.delta: \d+ runs in 5 bytes",
    ),
    "a piece that is not there": (
        lambda delta: forge_pieces(delta, 0, changing(1, lambda one: (4, *one[1:]))),
        r"/{delta}/.*\.delta: pieces that changed: expected rising numbers below 4",
    ),
    "no digest": (lambda delta: forge_digests(delta, 0, lambda rows: rows.pop()), OTHER_DIGESTS),
    "another digest": (
        lambda delta: forge_digests(delta, 0, lambda rows: rows.__setitem__(0, (rows[0][0], bytes(16)))),
        OTHER_DIGESTS,
    ),
    "another base": (
        lambda delta: forge(delta / "relayout.json", lambda top: top.update(base=proof(b"another"))),
        r"/{delta}: applies to content [0-9a-f]{{64}}, not to step 2 of content",
    ),
}
"""What is done to a delta, all of whose own digests are made true again; and what one says that has the step before."""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_delta_is_refused_and_the_next_update_has_the_step(
    intact: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that has the step before; by that one again, which then has no other way than from the folder; by all."""
    said = []

    def heard(*arguments: Any, **options: Any) -> Any:
        try:
            return change_by(*arguments, **options)
        except relayout.RelayoutError as error:
            said.append(str(error))
            raise

    monkeypatch.setattr("relayout.train.follower.change_by", heard)
    root = Path(shutil.copytree(intact, tmp_path / "steps"))
    delta = root / names_of(str(root), "delta")[-1]
    follower, (forgery, says) = relayout.Follower(root, 0), FORGERIES[name]
    assert follower.update(2) == 2
    [memory] = [one.data_ptr() for one in follower.tensors.values()]
    true = Path(shutil.copytree(delta, tmp_path / "true"))
    forgery(delta)
    for one in (follower, follower, relayout.Follower(root, 0)):
        with pytest.raises((relayout.FormatError, relayout.PlanError)):
            one.update()
        if one.content is not None:
            assert one.step == 2
            assert one.tensors[NORM].equal(norm_of(2)[NORM])
    assert len(said) == 1
    assert re.search(says.format(delta=delta.name), said[0])
    if says != MAKES_OTHERS and "none" not in name:
        assert follower.tensors[NORM].equal(norm_of(2)[NORM]), "nothing was changed"
    shutil.rmtree(delta)
    true.rename(delta)
    assert follower.update() == 3
    assert follower.tensors.keys() == {NORM}
    assert follower.tensors[NORM].equal(norm_of(3)[NORM])
    assert (follower.step, follower.content) == (3, relayout.Steps(root).entries()[-1].content)
    assert follower.tensors[NORM].data_ptr() == memory, "in the memory that it had"
    assert follower.update() is None


def test_a_piece_with_another_byte_anywhere_whose_proof_is_true_makes_no_step_of_other_tensors(
    intact: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(intact, tmp_path / "steps"))
    delta = root / names_of(str(root), "delta")[-1]
    true = Path(shutil.copytree(delta, tmp_path / "true"))
    follower, random, num_refused = relayout.Follower(root, 0), np.random.default_rng(0), 0
    for _ in range(24):
        follower.update(2)

        def other_byte(piece: Piece) -> Piece:
            stored = bytearray(piece[1])
            stored[random.integers(len(stored))] ^= 1 << random.integers(8)
            return piece[0], bytes(stored), piece[2]

        forge_pieces(delta, 0, changing(int(random.integers(2)), other_byte))
        try:
            assert follower.update() == 3
        except relayout.FormatError:
            num_refused += 1
            assert follower.content is None or follower.tensors[NORM].equal(norm_of(2)[NORM])
        else:  # In the header, which a follower does not have, or in what zstd ignores.
            assert follower.tensors[NORM].equal(norm_of(3)[NORM])
        shutil.rmtree(delta)
        shutil.copytree(true, delta)
        assert follower.update() in (3, None)
        assert follower.tensors[NORM].equal(norm_of(3)[NORM])
    assert num_refused > 6
