"""Signed folders: stock model_signing accepts them, and with a policy nothing else is handed out."""

from __future__ import annotations

import base64
import gc
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from support.loader_fixtures import assert_equal, mlp_model
from support.models import Array, as_integers, expected_slice, read_tensors
from support.page_cache import drop
from support.rebuilding import edit_table
from support.remote import HEAD
from support.signed_folders import FILES, NUM_RANKS, by_other_digests, edit, flip, in_store, make_signed, sealed
from support.signing import UNTRUSTED, Keys, make_keys, reference_accepts, write_states
from support.toy_store import shelf

import relayout
from relayout import FormatError, PlanError
from relayout.checkpoint import trust as trust_module
from relayout.checkpoint.trust import trusted
from relayout.cli.command import Line
from relayout.cli.render import verification
from relayout.engines.load import find_folder
from relayout.errors import RelayoutError
from relayout.storage.local.store import InputFile
from relayout.storage.stores import LOCAL_COST, Access, find_input


def assert_rank(loaded: dict[str, Any], whole: dict[str, Array], rank: int, tp: int) -> None:
    assert loaded.keys() == whole.keys()
    for name, tensor in loaded.items():
        assert np.array_equal(as_integers(tensor), expected_slice(name, whole[name], rank, tp, kv_heads=4)), name


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WAYS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "load": lambda folder, policy: relayout.load(folder, 1, trust=policy),
    "buffered": lambda folder, policy: relayout.load(folder, 1, trust=policy, backend="buffered", verify=True),
    "iter_load": lambda folder, policy: dict(relayout.iter_load(folder, 1, trust=policy)),
    "open": lambda folder, policy: {
        name: view.get_tensor(name) for view in [relayout.open(folder, 1, trust=policy)] for name in view.offset_keys()
    },
}


def test_verify_says_whose_signature_was_proven_and_that_one_was_not(
    source: Path, signed: Path, keys: Keys, tmp_path: Path
) -> None:
    relayout.convert(source, tmp_path / "unsigned", tp=NUM_RANKS)
    said = []
    cases: list[tuple[Path, Path | None, list[int] | None]]
    cases = [(signed, keys.policy, None), (signed, keys.policy, [1]), (signed, None, None)]
    for folder, trust, ranks in [*cases, (tmp_path / "unsigned", None, None)]:
        found = relayout.verify(folder, trust=trust, ranks=ranks)
        assert found.ok
        lines = [block.text for block in verification(found, has_source=False) if isinstance(block, Line)]
        said.append((found.signer, found.has_signature, lines[1:]))
    signer = f"public_key {keys.public}"
    assert said == [
        (signer, True, [f"by {signer}: all signed files unchanged"]),
        (signer, True, [f"by {signer}: the signed files of rank 1 of {NUM_RANKS} unchanged"]),
        (None, True, ["its signature was not checked: --trust POLICY does that"]),
        (None, False, []),
    ]


@pytest.mark.parametrize("layout", ["ranks", "whole"])
def test_what_is_signed_is_loaded(source: Path, keys: Keys, tmp_path: Path, layout: str) -> None:
    folder = make_signed(source, tmp_path / "model", keys, layout=layout)
    whole = read_tensors(source)
    assert reference_accepts(folder, keys)
    assert relayout.verify(folder, source=source, trust=keys.policy).ok
    for way in WAYS.values():
        assert_rank(way(folder, keys.policy), whole, 1, NUM_RANKS)
    for tp in (1, 4):
        assert_rank(relayout.load(folder, 0, tp=tp, trust=keys.policy), whole, 0, tp)
    with relayout.safe_open(folder, trust=keys.policy) as view:
        assert_rank({name: view.get_tensor(name) for name in view.offset_keys()}, whole, 0, 1)
    relayout.restore(folder, tmp_path / "restored", trust=keys.policy)
    assert content(tmp_path / "restored") == content(source)


API: dict[str, Callable[[Path, Path], object]] = {
    **{name: lambda folder, out, way=way: way(folder, None) for name, way in WAYS.items()},
    "load at another degree": lambda folder, out: [relayout.load(folder, rank, tp=4) for rank in range(4)],
    "load with a cache": lambda folder, out: relayout.load(folder, 1, tp=2, cache=out),
    "safe_open": lambda folder, out: [relayout.safe_open(folder).get_tensor(name) for name in read_tensors(folder)],
    "restore": lambda folder, out: relayout.restore(folder, out),
    "copy": lambda folder, out: relayout.copy(folder, out),
    "load with a delta": lambda folder, out: relayout.load(folder, 1, deltas=folder),
    "apply": lambda folder, out: relayout.apply(folder, 1, {}, base=folder),
    "apply_deltas": lambda folder, out: relayout.apply_deltas(folder, folder, out),
    "an engine": lambda folder, out: [find_folder(str(folder), "stock"), relayout.load(folder, 1)],
}


@pytest.mark.parametrize("way", API)
def test_no_way_through_the_api_lets_in_what_is_not_signed(
    source: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    write_states(source, tmp_path, keys)
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    let_in = []
    for state in UNTRUSTED:
        with suppress(RelayoutError):
            API[way](tmp_path / state, tmp_path / f"out of {state}")
            let_in.append(state)
    assert not let_in
    assert not list(tmp_path.glob("out of *"))


# What somebody may do to a folder who has no key. `other` is the folder of another model, signed by the same signer.

Attack = Callable[[Path, Path, Keys], None]


def manifest_edit(change: Callable[[dict[str, Any]], object]) -> Attack:
    def attack(folder: Path, other: Path, keys: Keys) -> None:
        top = json.loads((folder / "relayout.json").read_bytes())
        change(top)
        (folder / "relayout.json").write_bytes(sealed(top))

    return attack


def signature_edit(change: Callable[[dict[str, Any]], object]) -> Attack:
    def attack(folder: Path, other: Path, keys: Keys) -> None:
        bundle = json.loads((folder / "model.sig").read_bytes())
        change(bundle)
        (folder / "model.sig").write_text(json.dumps(bundle))

    return attack


def payload_edit(change: Callable[[dict[str, Any]], object]) -> Attack:
    def on_bundle(bundle: dict[str, Any]) -> None:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        change(statement)
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()

    return signature_edit(on_bundle)


def put_in(*names: str) -> Attack:
    def attack(folder: Path, other: Path, keys: Keys) -> None:
        for name in names:
            assert (folder / name).read_bytes() != (other / name).read_bytes(), name
            shutil.copyfile(other / name, folder / name)

    return attack


def forged(folder: Path, other: Path, keys: Keys) -> None:
    """Weights changed, and every digest of the folder with them."""
    name = "model-rank-0-part-0.safetensors"
    edit(folder, name, flip(0.9))
    edit(folder, "relayout.chunks", lambda blob: bytes(len(blob)))
    top = json.loads((folder / "relayout.json").read_bytes())
    chunks = b""
    for file in top["files"]:
        blob, start = (folder / file["name"]).read_bytes(), file["data_start"]
        pieces = range(start, len(blob), top["chunk_nbytes"])
        part = b"".join(blake3(blob[at : at + top["chunk_nbytes"]]).digest() for at in pieces)
        file["chunks_digest"] = blake3(part).hexdigest()
        chunks += part
    (folder / "relayout.chunks").write_bytes(chunks)
    (folder / "relayout.json").write_bytes(sealed(top))


def signed_by_another(folder: Path, other: Path, keys: Keys) -> None:
    stranger = make_keys(folder.parent, "stranger")
    forged(folder, other, keys)
    relayout.sign(folder, key=stranger.key)
    assert reference_accepts(folder, stranger)


def signed_by_another_in_its_name(folder: Path, other: Path, keys: Keys) -> None:
    hint = json.loads((folder / "model.sig").read_bytes())["verificationMaterial"]
    signed_by_another(folder, other, keys)
    signature_edit(lambda bundle: bundle.update(verificationMaterial=hint))(folder, other, keys)


def downgraded(folder: Path, other: Path, keys: Keys) -> None:
    by_other_digests(folder)


def chunk_digests_of_other_chunks(folder: Path, other: Path, keys: Keys) -> None:
    edit(folder, "relayout.chunks", lambda blob: blob[32:64] + blob[:32] + blob[64:])


ATTACKS: dict[str, Attack] = {
    "another version": manifest_edit(lambda top: top.update(relayout=2)),
    "another plan": manifest_edit(lambda top: top.update(plan="builtin:qwen2")),
    "another digest of a file": manifest_edit(lambda top: top["files"][0].update(chunks_digest="0" * 64)),
    "another digest of a rank": manifest_edit(lambda top: top["ranks"][1].update(table_digest="0" * 64)),
    "unknown field": manifest_edit(lambda top: top.update(x_unknown=1)),
    "white space": lambda folder, other, keys: edit(folder, "relayout.json", lambda blob: blob + b" "),
    "no signature": lambda folder, other, keys: (folder / "model.sig").unlink(),
    "no manifest": lambda folder, other, keys: (folder / "relayout.json").unlink(),
    "empty signature": lambda folder, other, keys: edit(folder, "model.sig", lambda blob: b""),
    "no JSON": lambda folder, other, keys: edit(folder, "model.sig", lambda blob: b"\xff\xfe" + blob),
    "deep JSON": lambda folder, other, keys: edit(folder, "model.sig", lambda blob: b"[" * 100_000),
    "a list": lambda folder, other, keys: edit(folder, "model.sig", lambda blob: b"[]"),
    "signature of the other": put_in("model.sig"),
    "manifest of the other": put_in("relayout.json"),
    "rank file of the other": put_in("model-rank-1-part-0.safetensors"),
    "another table": lambda folder, other, keys: edit_table(folder, lambda top: top.update(x_unknown=1)),
    "digests of the other": put_in("relayout.digests"),
    "record of the other": put_in("relayout.source.json.zst"),
    "chunks of the other": put_in("relayout.chunks"),
    "side file of the other": put_in("tokenizer.json"),
    "all but the signature of the other": put_in(
        "relayout.json", "relayout.chunks", "relayout.digests", "relayout.source.json.zst"
    ),
    "forged": forged,
    "signed by another": signed_by_another,
    "signed by another in its name": signed_by_another_in_its_name,
    "downgraded": downgraded,
    "chunk digests exchanged": chunk_digests_of_other_chunks,
    "signature: of nothing": signature_edit(lambda bundle: bundle["dsseEnvelope"].update(signatures=[])),
    "signature: no envelope": signature_edit(lambda bundle: bundle.pop("dsseEnvelope")),
    "signature: no key": signature_edit(lambda bundle: bundle.pop("verificationMaterial")),
    "signature: media type": signature_edit(lambda bundle: bundle.update(mediaType="text/plain")),
    "signature: payload type": signature_edit(lambda bundle: bundle["dsseEnvelope"].update(payloadType="text/plain")),
    "signature: another payload": signature_edit(lambda bundle: bundle["dsseEnvelope"].update(payload="e30=")),
    "payload: the same again": payload_edit(lambda statement: statement.update(x=1)),
    "payload: subject": payload_edit(lambda statement: statement["subject"][0].update(name="x")),
    "payload: predicate type": payload_edit(lambda statement: statement.update(predicateType="x")),
    "payload: no files": payload_edit(lambda statement: statement["predicate"].update(resources=[])),
    "payload: digest": payload_edit(lambda statement: statement["predicate"]["resources"][0].update(digest="0" * 64)),
    "payload: shards": payload_edit(lambda statement: statement["predicate"]["serialization"].update(method="shards")),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_before_a_tensor_is_returned(
    copy_of: Path, source: Path, other: Path, keys: Keys, tmp_path: Path, attack: str
) -> None:
    (tmp_path / "source").symlink_to(source)
    ATTACKS[attack](copy_of, other, keys)
    refused(copy_of, keys, tmp_path)


def other_weights(blob: bytes) -> bytes:
    start = 8 + int.from_bytes(blob[:8], "little")
    return blob[:start] + bytes(byte ^ 1 for byte in blob[start:])


@pytest.fixture(scope="module")
def other(source: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal names, other weights, signed by the same signer."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(source, folder / "source")
    for path in (folder / "source").glob("*.safetensors"):
        edit(path.parent, path.name, other_weights)
    (folder / "source" / "tokenizer.json").write_text('{"model": "other"}')
    return make_signed(folder / "source", folder / "model", keys)


def refused(folder: Path, keys: Keys, tmp_path: Path) -> None:
    """All of a folder is read: it is refused, here as by the stock verifier."""
    assert not reference_accepts(folder, keys)
    with pytest.raises(RelayoutError):
        relayout.restore(folder, tmp_path / "restored", trust=keys.policy)
    assert not (tmp_path / "restored").exists()
    with suppress(RelayoutError):
        assert not relayout.verify(folder, trust=keys.policy).ok


PLACES = [0, 0.5, 1]
"""In a file."""


def test_the_files_are_those_that_are_flipped(signed: Path) -> None:
    assert sorted(path.name for path in signed.iterdir()) == sorted([*FILES, "model.sig"])


@pytest.mark.parametrize(
    ("name", "place"),
    # Of a rank file and the manifest all places; of each other file one.
    sorted({*zip(FILES, cycle(PLACES)), *product(["model-rank-1-part-0.safetensors", "relayout.json"], PLACES)}),
)
def test_a_flipped_bit_is_refused_anywhere(
    copy_of: Path, source: Path, keys: Keys, tmp_path: Path, name: str, place: float
) -> None:
    edit(copy_of, name, flip(place))
    # In a header or the index for stock loaders, which `restore` does not read.
    if (place == 0 and name.startswith("model-rank")) or name.endswith(".index.json"):
        assert not reference_accepts(copy_of, keys)
        assert not relayout.verify(copy_of, trust=keys.policy).ok
        relayout.restore(copy_of, tmp_path / "restored", trust=keys.policy)
        assert content(tmp_path / "restored") == content(source)
    else:
        refused(copy_of, keys, tmp_path)
    own = ("rank-1", "relayout.json")  # All that rank 1 needs, and relayout.chunks, of which it needs a part.
    for way in WAYS.values():
        if any(part in name for part in own):
            with pytest.raises(FormatError):
                way(copy_of, keys.policy)
        elif name != "relayout.chunks":
            assert_rank(way(copy_of, keys.policy), read_tensors(source), 1, NUM_RANKS)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "relayout.chunks", "relayout.source.json.zst"])
def test_a_missing_file_is_refused(copy_of: Path, keys: Keys, tmp_path: Path, name: str) -> None:
    (copy_of / name).unlink()
    found = relayout.verify(copy_of, trust=keys.policy).differences
    assert [(each.file, each.what) for each in found] == [(name, "cannot be read: No such file or directory")]
    refused(copy_of, keys, tmp_path)


def test_a_file_that_was_added_is_not_there(copy_of: Path, source: Path, keys: Keys) -> None:
    """It would say how weights are quantized, and another degree would be cut by it."""
    (copy_of / "quantize_config.json").write_text('{"bits": 4}')
    assert not reference_accepts(copy_of, keys)
    report = relayout.verify(copy_of, trust=keys.policy)
    says = "quantize_config.json: is not signed; if it belongs there, relayout sign signs the folder again"
    assert [str(each) for each in report.differences] == [says]
    assert report.culprit == "others"
    assert_rank(relayout.load(copy_of, 0, tp=1, trust=keys.policy), read_tensors(source), 0, 1)


def test_a_config_that_was_removed_is_no_other_config(copy_of: Path, keys: Keys) -> None:
    (copy_of / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config\.json: is missing, and was signed"):
        relayout.load(copy_of, 0, tp=4, trust=keys.policy)


def test_a_file_that_changes_while_it_is_read_is_refused(
    copy_of: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two reads of it, with its length and time as they were: the proof is of the bytes in memory."""
    path = copy_of / "model-rank-1-part-0.safetensors"
    status, read = path.stat(), InputFile.read
    num_reads = 0

    def read_then_change(file: InputFile, offset: int, view: memoryview) -> None:
        nonlocal num_reads
        read(file, offset, view)
        if file.path == path:
            num_reads += 1
            if num_reads == 1:
                blob = bytearray(path.read_bytes())
                blob[5000] ^= 1
                path.write_bytes(blob)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    monkeypatch.setattr(InputFile, "read", read_then_change)
    with pytest.raises(FormatError, match="do not match digest"):
        relayout.load(copy_of, 1, trust=keys.policy, backend="buffered")
    assert num_reads > 1


def test_a_store_that_lies_is_refused(copy_of: Path, source: Path, keys: Keys) -> None:
    url = in_store(copy_of, "lying")
    assert_rank(relayout.load(url, 1, trust=keys.policy), read_tensors(source), 1, NUM_RANKS)
    for name in ("model-rank-1-part-1.safetensors", "relayout.rank-1.json.zst", "relayout.json", "model.sig"):
        shelf("lying").put(f"model/{name}", flip(0.7)((copy_of / name).read_bytes()))
        with pytest.raises(FormatError):
            relayout.load(url, 1, trust=keys.policy)
        shelf("lying").put(f"model/{name}", (copy_of / name).read_bytes())


def test_each_rank_reads_its_own_bytes_once(keys: Keys, tmp_path: Path) -> None:
    """Where `model_signing verify` reads all of them for each; from a drive directly, as without a policy."""
    folder = tmp_path / "out"
    mlp_model(tmp_path / "source", num_layers=8)
    relayout.convert(tmp_path / "source", folder, tp=4)
    relayout.sign(folder, key=keys.key)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    small = sum(path.stat().st_size for path in folder.iterdir()) - weights
    url = in_store(folder, "counted")
    before = shelf("counted").read_nbytes
    for rank in range(4):
        expected = relayout.load(folder, rank)
        assert_equal(relayout.load(url, rank, trust=keys.policy, threads=1), expected)
        for path in folder.glob("*.safetensors"):
            drop(path)
        assert_equal(relayout.load(folder, rank, trust=keys.policy), expected)
    assert weights < shelf("counted").read_nbytes - before <= weights + 4 * (small + HEAD)


def test_of_files_that_are_in_memory_none_stays_open(copy_of: Path, keys: Keys) -> None:
    """They are opened for direct reads first, and then for reads through the page cache."""
    store = trusted(find_input(copy_of), keys.policy)
    gc.disable()
    try:
        before = len([*Path("/proc/self/fd").iterdir()])
        for path in copy_of.glob("*.safetensors"):
            path.read_bytes()
            store.open(path.name, access=Access.AUTO).close()
        assert len([*Path("/proc/self/fd").iterdir()]) <= before  # Garbage of other tests may be closed meanwhile.
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*loading again")
def test_a_cache_that_lies_is_not_believed_and_has_the_truth_again(
    copy_of: Path, source: Path, keys: Keys, tmp_path: Path
) -> None:
    url, cache = in_store(copy_of, "cached"), tmp_path / "cache"
    shelf("cached").cost = replace(LOCAL_COST, is_remote=True)
    for _ in range(2):
        assert_rank(relayout.load(url, 1, trust=keys.policy, cache=cache), read_tensors(source), 1, NUM_RANKS)
    for name in ("model-rank-1-part-0.safetensors", "relayout.chunks", "relayout.rank-1.json.zst"):
        [path] = cache.rglob(name)
        before = path.read_bytes()
        path.write_bytes(flip(0.5)(before)[::-1] if name == "relayout.chunks" else flip(0.5)(before))
        assert_rank(relayout.load(url, 1, trust=keys.policy, cache=cache), read_tensors(source), 1, NUM_RANKS)
        assert path.read_bytes() == before


def test_a_plain_checkpoint_is_refused(
    source: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in (
        lambda: relayout.load(source, 0, tp=2, trust=keys.policy),
        lambda: relayout.load(source, 0, tp=2, trust=keys.policy, cache=tmp_path / "cache"),
        lambda: relayout.open(source, 0, tp=1, trust=keys.policy),
        lambda: relayout.safe_open(source, trust=keys.policy),
    ):
        with pytest.raises(FormatError, match="is not signed") as error:
            way()
        assert error.value.code == "signature"


def test_a_delta_that_is_not_signed_is_refused(
    signed: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = tmp_path / "delta"
    relayout.delta(signed, signed, delta)
    tensors = relayout.load(signed, 0)
    ways: list[Callable[[], object]] = [
        lambda: relayout.load(signed, 0, trust=keys.policy, deltas=delta),
        lambda: relayout.safe_open(signed, trust=keys.policy, deltas=delta),
    ]
    by_environment: list[Callable[[], object]] = [
        lambda: relayout.apply(delta, 0, tensors, base=signed),
        lambda: relayout.apply_deltas(signed, delta, tmp_path / "made", force=True),
    ]

    def refuse(calls: list[Callable[[], object]], match: str) -> None:
        for call in calls:
            with pytest.raises(FormatError, match=match) as error:
                call()
            assert error.value.code == "signature"

    refuse(ways, r"delta: is not signed \(model.sig is missing\)")
    relayout.sign(delta, key=make_keys(tmp_path, "stranger").key)
    refuse(ways, "delta/model.sig: no signature of a signer")
    with monkeypatch.context() as patch:
        patch.setenv("RELAYOUT_TRUST", str(keys.policy))
        refuse(by_environment, "delta/model.sig: no signature of a signer")
        relayout.sign(delta, key=keys.key)
        for call in [*ways, *by_environment]:
            call()
    edit(delta, "relayout.json", lambda blob: blob + b" ")
    refuse(ways, "relayout.json is not the one that was signed")


def test_the_environment_names_a_policy_for_everything(
    signed: Path, source: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = make_keys(tmp_path, "stranger")
    monkeypatch.setenv("RELAYOUT_TRUST", str(stranger.policy))
    for way in (
        lambda: relayout.load(signed, 0),
        lambda: next(relayout.iter_load(signed, 0)),
        lambda: relayout.open(signed, 0),
        lambda: relayout.safe_open(signed),
        lambda: relayout.restore(signed, tmp_path / "restored"),
        lambda: relayout.copy(signed, tmp_path / "copied"),
        lambda: relayout.verify(signed),
        lambda: find_folder(str(signed), "stock"),
        lambda: find_folder(str(source), "stock"),
    ):
        with pytest.raises(FormatError) as error:
            way()
        assert error.value.code == "signature"
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    assert len(relayout.load(signed, 0)) > 5
    found = find_folder(str(signed), "stock")
    assert found is not None
    assert found.num_ranks == NUM_RANKS
    monkeypatch.setenv("RELAYOUT_TRUST", "")
    with pytest.raises(PlanError, match="RELAYOUT_TRUST is empty"):
        relayout.load(signed, 0)


def test_side_files_are_proven_before_an_engine_loads(
    copy_of: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYOUT_TRUST", str(keys.policy))
    with monkeypatch.context() as patch:
        patch.setattr(trust_module, "_MAX_SMALL_NBYTES", 1)  # Weights in a subfolder may have any length.
        assert find_folder(str(copy_of), "stock") is not None
    edit(copy_of, "tokenizer.json", flip(0.5))
    with pytest.raises(FormatError, match=r"tokenizer\.json: is not the file that was signed"):
        find_folder(str(copy_of), "stock")


def test_a_copy_of_all_ranks_keeps_its_signature_and_is_replaced_with_it(
    signed: Path, other: Path, keys: Keys, tmp_path: Path
) -> None:
    for _ in range(2):
        relayout.copy(signed, tmp_path / "copied", trust=keys.policy, force=True)
    assert content(tmp_path / "copied") == content(signed)
    shutil.copy(other / "model.sig", tmp_path / "copied")  # Of another manifest.
    with pytest.raises(PlanError, match=r"holds files that relayout did not write.*model\.sig"):
        relayout.copy(signed, tmp_path / "copied", force=True)
    (tmp_path / "copied" / "model.sig").write_text("notes of mine")
    with pytest.raises(PlanError, match=r"holds files that relayout did not write.*model\.sig"):
        relayout.copy(signed, tmp_path / "copied", force=True)
    with pytest.raises(PlanError, match=r"model\.sig: exists and is not a signature"):
        relayout.sign(tmp_path / "copied", key=keys.key)
    assert (tmp_path / "copied" / "model.sig").read_text() == "notes of mine"
    relayout.copy(signed, tmp_path / "one", ranks=[0], trust=keys.policy)
    assert not (tmp_path / "one" / "model.sig").exists()  # It would be of another manifest.
    relayout.sign(tmp_path / "one", key=keys.key)
    assert len(relayout.load(tmp_path / "one", 0, trust=keys.policy)) > 5


def test_the_files_of_some_ranks_are_enough_for_them(signed: Path, source: Path, keys: Keys, tmp_path: Path) -> None:
    """As a tool copies them, by the names that `files` gives: with the whole manifest, and its signature."""
    (tmp_path / "one").mkdir()
    for file in relayout.files(signed, ranks=[1]).files:
        shutil.copyfile(signed / file.name, tmp_path / "one" / file.name)
    assert (tmp_path / "one" / "model.sig").exists()
    assert not (tmp_path / "one" / "model-rank-0-part-0.safetensors").exists()
    assert_rank(relayout.load(tmp_path / "one", 1, trust=keys.policy), read_tensors(source), 1, NUM_RANKS)
    with pytest.raises(FormatError, match="is missing"):
        relayout.load(tmp_path / "one", 0, trust=keys.policy)


def test_a_signature_by_the_stock_package_counts(copy_of: Path, source: Path, keys: Keys) -> None:
    from model_signing import hashing
    from model_signing.signing import Config

    (copy_of / "model.sig").unlink()
    signer = Config().use_elliptic_key_signer(private_key=keys.key)
    signer.sign(copy_of, copy_of.parent / "model.sig")
    shutil.move(copy_of.parent / "model.sig", copy_of / "model.sig")
    assert_rank(relayout.load(copy_of, 1, trust=keys.policy), read_tensors(source), 1, NUM_RANKS)
    other = hashing.Config().use_shard_serialization().set_ignored_paths(paths=[copy_of / "model.sig"])
    blake = hashing.Config().use_file_serialization(hashing_algorithm="blake2")
    for hashed in (other, blake.set_ignored_paths(paths=[copy_of / "model.sig"])):
        signer.set_hashing_config(hashed).sign(copy_of, copy_of / "model.sig")
        with pytest.raises(FormatError, match="other digests are signed"):
            relayout.load(copy_of, 1, trust=keys.policy)


def test_a_weight_file_that_the_signer_left_out_is_not_there(copy_of: Path, keys: Keys) -> None:
    """The manifest, which is signed, proves its bytes; the signer did not want it."""
    from model_signing import hashing
    from model_signing.signing import Config

    left_out = hashing.Config().set_ignored_paths(
        paths=[copy_of / "model.sig", copy_of / "model-rank-1-part-0.safetensors"]
    )
    signer = Config().use_elliptic_key_signer(private_key=keys.key)
    signer.set_hashing_config(left_out).sign(copy_of, copy_of / "model.sig")
    assert len(relayout.load(copy_of, 0, trust=keys.policy)) > 5
    store = trusted(find_input(copy_of), keys.policy)
    with pytest.raises(FormatError, match="is not signed"):
        store.open("model-rank-1-part-0.safetensors")


def test_a_certificate_counts_if_the_policy_has_its_root(copy_of: Path, keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--chain needs --certificate"):
        relayout.sign(copy_of, key=keys.key, chain=[keys.root])
    relayout.sign(copy_of, key=keys.key, certificate=keys.certificate, chain=[keys.root])
    stranger = make_keys(tmp_path, "stranger")
    for root, counts in ((keys.root, True), (stranger.root, False)):
        (tmp_path / "policy.toml").write_text(f'[[signer]]\ncertificates = ["{root}"]\n')
        if counts:
            assert len(relayout.load(copy_of, 0, trust=tmp_path / "policy.toml")) > 5
        else:
            with pytest.raises(FormatError, match="no signature of a signer"):
                relayout.load(copy_of, 0, trust=tmp_path / "policy.toml")
    with pytest.raises(FormatError, match="no signature of a signer"):
        relayout.load(copy_of, 0, trust=keys.policy)  # Which trusts the bare key.


def test_a_policy_names_places_and_contents(signed: Path, keys: Keys, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    content = blake3((signed / "relayout.json").read_bytes()).hexdigest()
    stranger = make_keys(tmp_path, "stranger")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to(signed)
    (tmp_path / "link").symlink_to(signed.parent)
    for more, counts in (
        (f'prefixes = ["{signed.parent}"]', True),
        (f'prefixes = ["{tmp_path}/link"]', True),
        (f'prefixes = ["{signed}"]', True),
        (f'prefixes = ["s3://models", "{signed}x", "{signed.parent}/../signed"]', False),
        (f'content = ["{content}"]', True),
        ('content = ["00"]', False),
        (f'[[signer]]\npublic_key = "{stranger.public}"', True),
    ):
        policy.write_text(f'[[signer]]\npublic_key = "{keys.public}"\n{more}\n')
        if counts:
            assert len(relayout.load(signed, 0, trust=policy)) > 5, more
        else:
            with pytest.raises(RelayoutError, match="policy"):
                relayout.load(signed, 0, trust=policy)
    policy.write_text(f'[[signer]]\npublic_key = "{keys.public}"\nprefixes = ["{tmp_path}/models"]\n')
    with pytest.raises(PlanError, match="has no signer for this place"):
        relayout.load(tmp_path / "models" / "link", 0, trust=policy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected"),
        ("[[signer]]", "a signer needs public_key, or certificates, or identity and issuer"),
        ("signer = 5", "expected"),
        ("[[signer]]\npublic_key = 5", "public_key is 5, expected a text"),
        ('[[signer]]\npublic_keys = "x"', "a signer has no 'public_keys'; did you mean 'public_key'"),
        ('[[signer]]\npublic_key = "x"\nidentity = "y"', "a signer needs"),
        ('[[signer]]\npublic_key = "x"\nprefixes = "y"', "prefixes is 'y', expected texts in a list"),
        ("[[signer]]\ncertificates = []", "certificates is .*, expected texts in a list"),
        ('[[signer]]\nidentity = "x"', "a signer needs"),
        ('other = 1\n[[signer]]\npublic_key = "x"', "and nothing else"),
        ("[[signer", "not a policy"),
        ("[[signer]]\n" + "a." * 257 + "b = 1", "a line with more than 256 dots"),
        pytest.param("#" * (2**20 + 1), "more than 1048576 bytes", id="a large file"),
    ],
)
def test_a_policy_that_says_something_else_is_no_policy(signed: Path, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(PlanError, match=says):
        relayout.load(signed, 0, trust=tmp_path / "policy.toml")


def test_a_policy_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.toml: the trust policy does not exist$"):
        relayout.load(tmp_path, 0, trust=tmp_path / "none.toml")
