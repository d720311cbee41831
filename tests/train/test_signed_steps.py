"""Signed steps: under a policy followers take what a trainer has signed, as the step that was signed, or nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import prestarted
from support.bits import flip
from support.sidecar import RESULT, forge, forge_pieces
from support.steps import (
    CONFIG,
    assert_is_step,
    closed_index,
    delete,
    files_in,
    files_of,
    names_of,
    outputs_of,
    put,
    weights_of,
)

import relayout
from relayout.errors import FormatError, PlanError, RelayoutError
from relayout.train.listing import list_steps

if TYPE_CHECKING:
    from support.signing import Keys

pytest.importorskip("model_signing", reason="makes and verifies signatures")

DIGESTS = "relayout.digests.delta"
CHANGES = tuple(f"model-rank-{rank}-part-0.safetensors.delta" for rank in range(2))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    from support.signing import make_keys

    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Somebody whom the policy does not name."""
    from support.signing import make_keys

    return make_keys(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture
def policy(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy of this process, from here on."""
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    return keys.policy


NUM_STEPS = 4


def publish(root: str | Path, key: Path | None, **options: Any) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, key=key, **{"full_every": 3} | options)
    for step in range(1, NUM_STEPS + 1):
        publisher.publish(weights_of(step), step)


def statement_of(signature: bytes) -> tuple[str, dict[str, str]]:
    """The name of what a signature is of, and the SHA-256 of each file that it lists; the signature is not verified."""
    statement = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))
    [subject] = statement["subject"]
    return subject["name"], {one["name"]: one["digest"] for one in statement["predicate"]["resources"]}


def test_each_folder_and_delta_is_signed_and_followers_under_a_policy_have_each_step(root: str, keys: Keys) -> None:
    publish(root, keys.key)
    for kind in ("full", "delta"):
        for name in names_of(root, kind):
            files = files_in(f"{root}/{name}")
            digest = hashlib.sha256(files["relayout.json"]).hexdigest()
            assert statement_of(files["model.sig"]) == (name, {"relayout.json": digest})
    for entry in relayout.Steps(root).entries():
        if entry.delta is not None:
            assert entry.delta.nbytes == sum(map(len, files_in(f"{root}/{entry.delta.name}").values()))
    assert list_steps(root, check=True).differences == ()
    for is_trusting in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_trusting:
                patch.setenv("RELAYOUT_TRUST", str(keys.policy))
            held = relayout.Follower(root, 1)
            for step in range(1, NUM_STEPS + 1):
                late = relayout.Follower(root, 0)
                for follower, rank in ((held, 1), (late, 0)):
                    assert follower.update(step) == step
                    assert_is_step(follower.tensors, weights_of(step), rank)
            assert held.update() is None


def test_what_a_bucket_or_a_folder_has_instead_of_a_signature_is_refused(root: str, keys: Keys, policy: Path) -> None:
    publish(root, keys.key, full_every=100)
    held = relayout.Follower(root, 0)
    held.update(2)
    before, last = names_of(root, "delta")[-2:]
    signature = files_of(root)[f"{last}/model.sig"]
    for other in (None, b"{}", files_of(root)[f"{before}/model.sig"]):
        delete(root, f"{last}/model.sig") if other is None else put(root, f"{last}/model.sig", other)
        for follower in (held, relayout.Follower(root, 1)):
            with pytest.raises(FormatError, match=rf"{last}.*(is not signed|no signature of a signer)") as error:
                follower.update()
            assert error.value.code == "signature"
        assert_is_step(held.tensors, weights_of(2), 0)
    put(root, f"{last}/model.sig", signature)
    assert held.update() == NUM_STEPS
    assert_is_step(held.tensors, weights_of(NUM_STEPS), 0)


def test_what_is_retired_goes_with_its_signature(root: str, keys: Keys, policy: Path) -> None:
    publish(root, keys.key, full_every=2, keep=1, keep_seconds=0)
    assert relayout.Steps(root).prune(grace_seconds=0)
    named = {name for kind in ("full", "delta") for name in names_of(root, kind)}
    assert outputs_of(root) == {*named, "steps.json"}
    late = relayout.Follower(root, 0)
    assert late.update() == NUM_STEPS
    assert_is_step(late.tensors, weights_of(NUM_STEPS), 0)


def test_a_certificate_signs_steps(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "steps"
    publish(place, keys.key, certificate=keys.certificate, chain=[keys.root])
    (tmp_path / "policy.toml").write_text(f'[[signer]]\ncertificates = ["{keys.root}"]\n')
    monkeypatch.setenv("RELAYOUT_TRUST", str(tmp_path / "policy.toml"))
    follower = relayout.Follower(place, 0)
    for step in (2, NUM_STEPS):
        assert follower.update(step) == step
        assert_is_step(follower.tensors, weights_of(step), 0)
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))  # Which trusts the bare key.
    with pytest.raises(FormatError, match="no signature of a signer"):
        relayout.Follower(place, 0).update()


def test_a_key_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(PlanError, match="cannot sign with it"):
        relayout.Publisher(tmp_path / "steps", config=CONFIG, key=tmp_path / "key")
    with pytest.raises(FileNotFoundError):
        relayout.Publisher(tmp_path / "steps", config=CONFIG, key=tmp_path / "nothing")
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize("option", ["certificate", "chain"])
def test_a_certificate_without_what_it_is_for_is_refused(tmp_path: Path, keys: Keys, option: str) -> None:
    """`relayout.sign` refuses a chain without a certificate."""
    given: dict[str, Any] = {"certificate": keys.certificate} if option == "certificate" else {"chain": [keys.root]}
    with pytest.raises(PlanError):
        relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2, **given)


def test_a_policy_names_places_and_contents_of_steps(
    intact: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a delta, the content that it makes."""
    contents = [entry.content for entry in relayout.Steps(intact).entries()]
    policy = tmp_path / "policy.toml"
    monkeypatch.setenv("RELAYOUT_TRUST", str(policy))
    signer = f'[[signer]]\npublic_key = "{keys.public}"\n'
    policy.write_text(f"{signer}content = {json.dumps(contents[:2])}\n")
    follower = relayout.Follower(intact, 0)
    assert follower.update(2) == 2
    with pytest.raises(FormatError, match=r"the content [0-9a-f]{64} is not one that the policy names"):
        follower.update()
    assert_is_step(follower.tensors, weights_of(2), 0)
    policy.write_text(f'{signer}prefixes = ["{tmp_path}/elsewhere"]\n')
    for one in (follower, relayout.Follower(intact, 0)):
        with pytest.raises(PlanError, match="has no signer for this place"):
            one.update()
    policy.write_text(f'{signer}prefixes = ["{intact}"]\n')
    assert follower.update() == NUM_STEPS
    assert_is_step(follower.tensors, weights_of(NUM_STEPS), 0)


@pytest.fixture(scope="module")
def intact(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed root to whose last step deltas alone lead."""
    root = tmp_path_factory.mktemp("intact") / "steps"
    publish(root, keys.key, full_every=100)
    return root


@pytest.fixture
def chain(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "chain"))


@pytest.mark.xdist_group("group")
def test_processes_that_publish_together_sign_each_step_once(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "steps")
    given: dict[str, Any] = {"imports": prestarted.GROUP, "env": prestarted.ONE_THREAD}
    script = "from support.steps_worker import that_are_signed; that_are_signed()"
    done = prestarted.run(tmp_path, root, keys.key, script=script, **given)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    held = relayout.Follower(root, 1)
    for step, kinds in ((1, ["full"]), (2, ["delta"]), (3, ["full", "delta"])):
        [entry] = [entry for entry in relayout.Steps(root).entries() if entry.step == step]
        assert [kind for kind in ("full", "delta") if getattr(entry, kind)] == kinds
        for one in entry.stored:
            files = files_in(f"{root}/{one.name}")
            digest = hashlib.sha256(files["relayout.json"]).hexdigest()
            assert statement_of(files["model.sig"]) == (one.name, {"relayout.json": digest})
        for follower, rank in ((held, 1), (relayout.Follower(root, 0), 0)):
            assert follower.update(step) == step
            assert_is_step(follower.tensors, weights_of(step), rank)


# What somebody may do to a root who has no key, or not this one.

Attack = Callable[[Path, "Keys"], object]


def edit_index(root: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the entries of an index, which nobody signs."""
    top = json.loads((root / "steps.json").read_bytes())
    change(top["steps"])
    (root / "steps.json").write_bytes(closed_index(top))


def of_index(change: Callable[[list[dict[str, Any]]], object]) -> Attack:
    return lambda root, stranger: edit_index(root, change)


def of_delta(change: Callable[[Path], object]) -> Attack:
    return lambda root, stranger: change(last_delta(root))


def last_delta(root: Path) -> Path:
    return root / names_of(str(root), "delta")[-1]


def by_another_key(root: Path, stranger: Keys) -> None:
    relayout.sign(last_delta(root), key=stranger.key)


def by_another_publisher(root: Path, stranger: Keys) -> None:
    """Who has other weights, and goes on from the step before."""
    other = root.parent / "of another"
    publisher = relayout.Publisher(other, config=CONFIG, tp=2, full_every=100, key=stranger.key)
    for step in range(1, NUM_STEPS + 1):
        publisher.publish(weights_of(step if step < NUM_STEPS else step + 1), step)
    shutil.rmtree(last_delta(root))
    shutil.copytree(last_delta(other), root / last_delta(other).name)
    entries = json.loads((other / "steps.json").read_bytes())["steps"]
    edit_index(root, lambda steps: steps[-1].update(entries[-1]))


def renamed(step: int, token: str) -> Attack:
    """The last delta is that of a step of this number."""

    def attack(root: Path, stranger: Keys) -> None:
        delta = last_delta(root).rename(root / f"delta-{step:09d}-{token}")
        stored = {"name": delta.name, "nbytes": 1}
        edit_index(root, lambda steps: steps[-1].update(step=step, delta=stored))

    return attack


def with_files_of_the_one_before(*names: str) -> Attack:
    """Files of the last delta are those of the one before; without names, all."""

    def attack(root: Path, stranger: Keys) -> None:
        before, last = (root / name for name in names_of(str(root), "delta")[-2:])
        if not names:
            shutil.rmtree(last)
            shutil.copytree(before, last)
        for name in names:
            shutil.copyfile(before / name, last / name)

    return attack


def set_entries(new: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    steps[:] = new


def swap(steps: list[dict[str, Any]], field: str) -> None:
    steps[-1][field], steps[-2][field] = steps[-2][field], steps[-1][field]


BY_NOBODY = r"model\.sig: (delta 3: )?no signature of a signer in "
ATTACKS: dict[str, tuple[Attack, str]] = {
    "no signature": (of_delta(lambda delta: (delta / "model.sig").unlink()), r"is not signed \(model.sig is missing\)"),
    "an empty signature": (of_delta(lambda delta: (delta / "model.sig").write_bytes(b"")), BY_NOBODY),
    "a damaged signature": (of_delta(lambda delta: flip(delta / "model.sig", 300)), BY_NOBODY),
    "by another key": (by_another_key, BY_NOBODY),
    "by another publisher": (by_another_publisher, BY_NOBODY),
    "the signature of the one before": (
        with_files_of_the_one_before("model.sig"),
        BY_NOBODY + ".*: relayout.json is not the one that was signed$",
    ),
    "the manifest of the one before": (
        with_files_of_the_one_before("relayout.json"),
        BY_NOBODY + ".*: relayout.json is not the one that was signed$",
    ),
    "manifest and signature of the one before": (
        with_files_of_the_one_before("relayout.json", "model.sig"),
        BY_NOBODY + ".*: 'delta-000000003-[0-9a-f]{8}' was signed, which is another step$",
    ),
    "all of the one before": (
        with_files_of_the_one_before(),
        BY_NOBODY + ".*: 'delta-000000003-[0-9a-f]{8}' was signed, which is another step$",
    ),
    "the result of the one before": (
        with_files_of_the_one_before(RESULT),
        f"{RESULT}: .*digest differs from the one in the delta's manifest",
    ),
    "digests of the one before": (
        with_files_of_the_one_before(DIGESTS),
        f"{DIGESTS}: (.*: )?(digests of tensors that changed differ from the manifest|[0-9]+ bytes long, expected)",
    ),
    "changes of the one before": (
        with_files_of_the_one_before(*CHANGES),
        r"\.safetensors\.delta: (.*: )?(its index differs from the manifest|[0-9]+ bytes long, expected)",
    ),
    "another step": (
        renamed(NUM_STEPS + 1, "00000000"),
        BY_NOBODY + ".*: 'delta-000000004-[0-9a-f]{8}' was signed, which is another step$",
    ),
    "another name": (
        renamed(NUM_STEPS, "00000000"),
        BY_NOBODY + ".*: 'delta-000000004-[0-9a-f]{8}' was signed, which is another step$",
    ),
    "another manifest": (
        of_delta(lambda delta: forge(delta / "relayout.json", lambda top: top.update(generator="another"))),
        BY_NOBODY + ".*: relayout.json is not the one that was signed$",
    ),
    "a forged piece": (
        of_delta(lambda delta: forge_pieces(delta, 0, lambda found: found.pop())),
        BY_NOBODY + ".*: relayout.json is not the one that was signed$",
    ),
    "a piece of other bytes": (of_delta(lambda delta: flip(delta / CHANGES[0], 600)), "does not match its digest"),
    "another number": (of_index(lambda steps: steps[-1].update(step=9)), "is not the name of what leads to its step"),
    "another content": (of_index(lambda steps: swap(steps, "content")), "the way to step 4 makes content"),
    "deltas swapped": (of_index(lambda steps: swap(steps, "delta")), "is not the name of what leads to its step"),
    "entries swapped": (of_index(lambda steps: steps.insert(2, steps.pop(1))), "applies to content"),
    "an entry less": (of_index(lambda steps: steps.pop(2)), "applies to content"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_was_not_signed_as_this_step_is_refused(
    chain: Path, stranger: Keys, policy: Path, tmp_path: Path, name: str
) -> None:
    held = relayout.Follower(chain, 0)
    assert held.update(NUM_STEPS - 2) == NUM_STEPS - 2
    shutil.copytree(chain, tmp_path / "true")
    attack, says = ATTACKS[name]
    attack(chain, stranger)
    for follower in (held, relayout.Follower(chain, 0)):
        with pytest.raises(RelayoutError, match=says):
            follower.update()
    if name != "a piece of other bytes":  # It is read when the tensors change, or by a load into them.
        assert_is_step(held.tensors, weights_of(NUM_STEPS - 2), 0)
    shutil.rmtree(chain)
    (tmp_path / "true").rename(chain)
    assert held.update() == NUM_STEPS
    assert_is_step(held.tensors, weights_of(NUM_STEPS), 0)


def of_full(change: Callable[[Path], object]) -> Attack:
    return lambda root, stranger: change(root / names_of(str(root), "full")[-1])


def older_in_its_place(root: Path, stranger: Keys) -> None:
    older, last = (root / name for name in names_of(str(root), "full"))
    shutil.rmtree(last)
    shutil.copytree(older, last)


def older_by_its_name(root: Path, stranger: Keys) -> None:
    """And the index says so."""
    content = relayout.Steps(root).entries()[0].content
    older_in_its_place(root, stranger)
    edit_index(root, lambda steps: steps[-1].update(content=content))


def full_renamed(root: Path, stranger: Keys) -> None:
    full = root / names_of(str(root), "full")[-1]
    full.rename(root / "full-000000009-00000000")
    edit_index(root, lambda steps: steps[-1].update(step=9, full={"name": "full-000000009-00000000", "nbytes": 1}))


ATTACKS_ON_FOLDERS: dict[str, tuple[Attack, str]] = {
    "no signature": (of_full(lambda full: (full / "model.sig").unlink()), r"is not signed \(model.sig is missing\)"),
    "by another key": (lambda root, stranger: resigned(root, stranger), BY_NOBODY),
    "an older one": (older_in_its_place, BY_NOBODY + ".*: 'full-000000001-[0-9a-f]{8}' was signed, which is another"),
    "an older one that the index has": (
        older_by_its_name,
        BY_NOBODY + ".*: 'full-000000001-[0-9a-f]{8}' was signed, which is another step$",
    ),
    "another step": (full_renamed, BY_NOBODY + ".*: 'full-000000004-[0-9a-f]{8}' was signed, which is another step$"),
    "another manifest": (
        of_full(lambda full: forge(full / "relayout.json", lambda top: top.update(generator="another"))),
        BY_NOBODY + ".*: relayout.json is not the one that was signed$",
    ),
    "another table": (of_full(lambda full: flip(full / "relayout.rank-0.json.zst", 100)), "is not the file that was"),
    "other digests": (of_full(lambda full: flip(full / "relayout.digests", 0)), "differs from the manifest"),
    "other chunks": (of_full(lambda full: flip(full / "relayout.chunks", 0)), "differs from the manifest"),
    "other weights": (of_full(lambda full: flip(full / "model-rank-0-part-0.safetensors", -1)), "do not match digest"),
}


def resigned(root: Path, stranger: Keys) -> None:
    full = root / names_of(str(root), "full")[-1]
    relayout.sign(full, key=stranger.key)


@pytest.mark.parametrize("name", ATTACKS_ON_FOLDERS)
def test_a_folder_that_was_not_signed_as_this_step_is_refused(
    tmp_path: Path, keys: Keys, stranger: Keys, policy: Path, name: str
) -> None:
    """Where no delta leads to it."""
    root = tmp_path / "steps"
    publish(root, keys.key)
    edit_index(root, lambda steps: steps[-1].update(delta=None))
    held = relayout.Follower(root, 0)
    assert held.update(2) == 2
    attack, says = ATTACKS_ON_FOLDERS[name]
    attack(root, stranger)
    late = relayout.Follower(root, 0)
    for follower in (held, late):
        with pytest.raises(RelayoutError, match=says):
            follower.update()
    assert late.tensors == {}
    for follower, step in ((late, 3), (held, 3), (held, 1)):
        assert follower.update(step) == step
        assert_is_step(follower.tensors, weights_of(step), 0)


def test_a_delta_that_is_not_signed_keeps_nobody_from_a_folder_that_is(
    tmp_path: Path, keys: Keys, policy: Path
) -> None:
    root = tmp_path / "steps"
    publish(root, keys.key)
    held = relayout.Follower(root, 0)
    held.update(3)
    (last_delta(root) / "model.sig").unlink()
    assert held.update() == NUM_STEPS
    assert_is_step(held.tensors, weights_of(NUM_STEPS), 0)


def test_an_older_index_takes_nobody_back_unless_told_to(chain: Path, keys: Keys, tmp_path: Path) -> None:
    """Who begins then has the step that is the newest there, under its own number. Without a policy all do."""
    newest = (chain / "steps.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAYOUT_TRUST", str(keys.policy))
        held = relayout.Follower(chain, 0)
        assert held.update() == NUM_STEPS
        edit_index(chain, lambda steps: steps.pop())
        for _ in range(2):
            says = f"its newest step is 3, after step {NUM_STEPS}: update\\(step=3\\) goes back$"
            with pytest.raises(PlanError, match=says):
                held.update()
            assert_is_step(held.tensors, weights_of(NUM_STEPS), 0)
            assert held.step == NUM_STEPS
        late = relayout.Follower(chain, 1)
        assert late.update() == 3
        assert_is_step(late.tensors, weights_of(3), 1)
        for step in (2, 3, 1):
            assert held.update(step) == step
            assert_is_step(held.tensors, weights_of(step), 0)
        (chain / "steps.json").write_bytes(newest)
        for follower, rank in ((held, 0), (late, 1)):
            assert follower.update() == NUM_STEPS
            assert_is_step(follower.tensors, weights_of(NUM_STEPS), rank)
    edit_index(chain, lambda steps: steps.pop())
    assert held.update() == 3
    assert_is_step(held.tensors, weights_of(3), 0)


@pytest.mark.parametrize("step", [1, 9])
def test_a_number_that_nobody_has_signed_is_no_step_though_its_content_is_known(
    chain: Path, policy: Path, step: int
) -> None:
    held = relayout.Follower(chain, 0)
    assert held.update(3) == 3
    content = relayout.Steps(chain).entries()[2].content
    full = {"name": f"full-{step:09d}-00000000", "nbytes": 1}
    edit_index(chain, lambda steps: steps.append({**steps[0], "step": step, "content": content, "full": full}))
    with pytest.raises(RelayoutError):
        held.update()
    assert held.step == 3


@pytest.mark.parametrize("full_every", [1, 100])
def test_a_step_without_a_change_is_one_if_it_is_signed(
    tmp_path: Path, keys: Keys, policy: Path, full_every: int
) -> None:
    """Though nothing of it need be read: its number does."""
    root = tmp_path / "steps"
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=full_every, key=keys.key)
    publisher.publish(weights_of(1), 1)
    held = relayout.Follower(root, 0)
    assert held.update() == 1
    publisher.publish(weights_of(1), 2)
    signatures = [*root.glob("*-000000002-*/model.sig")]
    assert signatures
    for path in signatures:
        path.rename(path.with_name("kept"))
    with pytest.raises(FormatError, match="is not signed"):
        held.update()
    assert held.step == 1
    for path in signatures:
        path.with_name("kept").rename(path)
    assert held.update() is None
    assert held.step == 2
    assert_is_step(held.tensors, weights_of(1), 0)


def test_an_older_index_takes_nobody_back_after_one_that_gives_its_step_another_number(
    chain: Path, policy: Path
) -> None:
    held = relayout.Follower(chain, 0)
    assert held.update() == NUM_STEPS
    entries = json.loads((chain / "steps.json").read_bytes())["steps"]
    one = {**entries[0], "content": entries[-1]["content"]}
    for steps in ([one], entries[:2]):
        edit_index(chain, partial(set_entries, steps))
        with suppress(RelayoutError):
            held.update()
        assert_is_step(held.tensors, weights_of(NUM_STEPS), 0)


# What is not followed: loads and commands by the same policy.


def test_deltas_of_a_root_are_read_under_a_policy_by_loads_and_commands(
    intact: Path, policy: Path, tmp_path: Path
) -> None:
    [full], deltas = ([intact / name for name in names_of(str(intact), kind)] for kind in ("full", "delta"))
    for number in (1, 3):
        expected = weights_of(1 + number)
        assert_is_step(relayout.load(full, 1, deltas=deltas[:number]), expected, 1)
        assert_is_step(dict(relayout.iter_load(full, 1, deltas=deltas[:number], trust=policy)), expected, 1)
        with relayout.safe_open(full, deltas=deltas[:number]) as opened:
            assert_is_step({name: opened.get_tensor(name) for name in opened.offset_keys()}, expected, 0, 1)
        tensors = relayout.load(full, 1, deltas=deltas[: number - 1])
        relayout.apply(deltas[number - 1], 1, tensors, base=[full, *deltas[: number - 1]])
        assert_is_step(tensors, expected, 1)
        relayout.apply_deltas(full, deltas[:number], tmp_path / f"{number}")
        with pytest.raises(FormatError, match="is not signed"):
            relayout.load(tmp_path / f"{number}", 1)


def _load(full: Path, deltas: list[Path], out: Path) -> None:
    relayout.load(full, 0, deltas=deltas)


def _iter_load(full: Path, deltas: list[Path], out: Path) -> None:
    dict(relayout.iter_load(full, 0, deltas=deltas))


def _safe_open(full: Path, deltas: list[Path], out: Path) -> None:
    with relayout.safe_open(full, deltas=deltas) as opened:
        opened.get_tensor("model.norm.weight")


def _apply(full: Path, deltas: list[Path], out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RELAYOUT_TRUST")
        tensors = relayout.load(full, 0, deltas=deltas[:-1])
    try:
        relayout.apply(deltas[-1], 0, tensors, base=[full, *deltas[:-1]])
    finally:
        assert_is_step(tensors, weights_of(NUM_STEPS - 1), 0)


def _apply_deltas(full: Path, deltas: list[Path], out: Path) -> None:
    relayout.apply_deltas(full, deltas, out)


WAYS = (_load, _iter_load, _safe_open, _apply, _apply_deltas)


@pytest.mark.parametrize("name", ["no signature", "by another key", "all of the one before", "another step"])
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__.lstrip("_") for way in WAYS])
def test_no_way_takes_a_delta_that_was_not_signed_as_this_step(
    chain: Path, stranger: Keys, policy: Path, tmp_path: Path, name: str, way: Callable[..., None]
) -> None:
    attack, says = ATTACKS[name]
    attack(chain, stranger)
    [full], deltas = ([chain / one for one in names_of(str(chain), kind)] for kind in ("full", "delta"))
    with pytest.raises(FormatError, match=says) as error:
        way(full, deltas, tmp_path / "out")
    assert error.value.code == "signature"
    assert not (tmp_path / "out").exists()


def test_a_delta_between_folders_is_signed_and_what_is_damaged_is_not(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        relayout.save(weights_of(step), tmp_path / f"{step}", config=CONFIG | {"step": step}, tp=2, threads=1)
    delta = tmp_path / "1-to-2"
    relayout.delta(tmp_path / "1", tmp_path / "2", delta)
    unsigned = files_in(str(delta))
    assert set(unsigned) == {
        *("relayout.json", DIGESTS, RESULT, *CHANGES),
        *(f"new/{name}" for name in ("config.json", "relayout.source.json.zst")),
    }
    for name, content in unsigned.items():
        flip(delta / name, len(content) // 2)
        with pytest.raises(RelayoutError):
            relayout.sign(delta, key=keys.key)
        (delta / name).unlink()
        with pytest.raises(RelayoutError):
            relayout.sign(delta, key=keys.key)
        (delta / name).write_bytes(content)
    assert files_in(str(delta)) == unsigned
    for _ in range(2):  # The second time in place of a signature.
        written = relayout.sign(delta, key=keys.key)
        files = files_in(str(delta))
        digest = hashlib.sha256(files["relayout.json"]).hexdigest()
        assert statement_of(files.pop("model.sig")) == ("1-to-2", {"relayout.json": digest})
        assert files == unsigned
        assert written.signature == str(delta / "model.sig")
        assert written.content == json.loads(files["relayout.json"])["makes"]
    relayout.sign(tmp_path / "1", key=keys.key)
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    assert_is_step(relayout.load(tmp_path / "1", 1, deltas=delta), weights_of(2), 1)
    tensors = relayout.load(tmp_path / "1", 1)
    relayout.apply(delta, 1, tensors, base=tmp_path / "1")
    assert_is_step(tensors, weights_of(2), 1)
    for rank in range(4):  # By the rules of the record, and with config.json.
        assert_is_step(relayout.load(tmp_path / "1", rank, tp=4, deltas=delta), weights_of(2), rank, 4)
    flip(delta / "new/config.json", 30)
    with pytest.raises(FormatError, match=r"new/config\.json: is not the file of the result"):
        relayout.load(tmp_path / "1", 0, tp=4, deltas=delta)
    delta.rename(tmp_path / "another name")  # Which is no name of a step.
    assert_is_step(relayout.load(tmp_path / "1", 1, deltas=tmp_path / "another name"), weights_of(2), 1)
    (tmp_path / "another name").rename(tmp_path / "delta-000000002-00000000")
    with pytest.raises(FormatError, match="'1-to-2' was signed, which is another step"):
        relayout.load(tmp_path / "1", 1, deltas=tmp_path / "delta-000000002-00000000")


@pytest.mark.parametrize("content", [None, b"{}"])
@pytest.mark.parametrize("name", ["config.json", "notes.txt"])
def test_a_delta_with_a_file_that_nothing_proves_is_not_signed(
    chain: Path, keys: Keys, name: str, content: bytes | None
) -> None:
    delta = last_delta(chain)
    (delta / "model.sig").unlink()
    if content is not None:
        (delta / "new" / name).write_bytes(content)
    forge(delta / "relayout.json", lambda top: top["others"].append(name))
    with pytest.raises(RelayoutError):
        relayout.sign(delta, key=keys.key)


VERIFIED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another config": (lambda folder: (folder / "config.json").write_text("{}"), "config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "a file more": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "a file more below": (lambda folder: put(str(folder), "more/notes.txt", b"mine"), "more/notes.txt"),
    "another hub index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json",
    ),
    "another record": (lambda folder: flip(folder / "relayout.source.json.zst", 100), "relayout.source.json.zst"),
    "another table": (lambda folder: flip(folder / "relayout.rank-1.json.zst", 100), "relayout.rank-1.json.zst"),
    "other digests": (lambda folder: flip(folder / "relayout.digests", -1), "relayout.digests"),
    "other chunks": (lambda folder: flip(folder / "relayout.chunks", -1), "relayout.chunks"),
    "another header": (
        lambda folder: flip(folder / "model-rank-1-part-0.safetensors", 600),
        "model-rank-1-part-0.safetensors",
    ),
    "other weights": (
        lambda folder: flip(folder / "model-rank-1-part-0.safetensors", -1),
        "model-rank-1-part-0.safetensors",
    ),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_of_a_folder_of_which_the_manifest_alone_is_signed_all_files_are_verified(
    intact: Path, keys: Keys, tmp_path: Path, name: str
) -> None:
    [one] = names_of(str(intact), "full")
    folder = Path(shutil.copytree(intact / one, tmp_path / one))
    assert set(statement_of((folder / "model.sig").read_bytes())[1]) == {"relayout.json"}
    found = relayout.verify(folder, trust=keys.policy)
    assert (found.ok, found.signer, found.has_signature) == (True, f"public_key {keys.public}", True)
    change, file = VERIFIED[name]
    change(folder)
    found = relayout.verify(folder, trust=keys.policy)
    assert {difference.file for difference in found.differences} == {file}


def test_a_folder_of_a_step_is_verified_as_that_step_by_its_signer(
    intact: Path, keys: Keys, stranger: Keys, tmp_path: Path
) -> None:
    [one] = names_of(str(intact), "full")
    with pytest.raises(FormatError, match=BY_NOBODY):
        relayout.verify(intact / one, trust=stranger.policy)
    with pytest.raises(FormatError, match=f"'{one}' was signed, which is another step$"):
        relayout.verify(shutil.copytree(intact / one, tmp_path / "full-000000002-00000000"), trust=keys.policy)
    assert relayout.verify(shutil.copytree(intact / one, tmp_path / "model"), trust=keys.policy).ok
