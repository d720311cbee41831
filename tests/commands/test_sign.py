"""`sign`: only what is as it was written is signed, where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.signed_folders import FILES, by_other_digests, edit, flip, in_store
from support.signing import Keys, reference_accepts
from support.toy_store import shelf
from typer.testing import CliRunner

import relayout
from relayout import FormatError
from relayout.checkpoint.trust import trusted
from relayout.cli.app import app
from relayout.storage.stores import find_input


def test_a_store_is_signed_where_it_is(copy_of: Path, keys: Keys) -> None:
    url = in_store(copy_of, "signing")
    expected = (copy_of / "model.sig").read_bytes()
    shelf("signing").delete(["model/model.sig"])
    with pytest.raises(FormatError, match="is not signed"):
        relayout.load(url, 0, trust=keys.policy)
    relayout.sign(url, key=keys.key)
    (copy_of / "model.sig").write_bytes(shelf("signing").get("model/model.sig", 0, None, None).content())
    assert (copy_of / "model.sig").read_bytes() != expected  # ECDSA draws a number.
    assert reference_accepts(copy_of, keys)
    assert len(relayout.load(url, 0, trust=keys.policy)) > 5


def test_only_what_is_as_it_was_written_is_signed(copy_of: Path, keys: Keys) -> None:
    (copy_of / "model.sig").unlink()
    for name in [*FILES[:3], "relayout.chunks", "relayout.rank-0.json.zst"]:
        before = (copy_of / name).read_bytes()
        edit(copy_of, name, flip(0.9))
        with pytest.raises(FormatError):
            relayout.sign(copy_of, key=keys.key)
        (copy_of / name).write_bytes(before)
        assert not (copy_of / "model.sig").exists()


def test_a_changed_header_is_not_signed_and_not_handed_out(copy_of: Path, keys: Keys) -> None:
    """A space of it: nothing that is read of it has changed."""
    name = "model-rank-1-part-0.safetensors"
    start = 8 + int.from_bytes((copy_of / name).read_bytes()[:8], "little")
    edit(copy_of, name, lambda blob: blob[: start - 1] + b"\n" + blob[start:])
    store = trusted(find_input(copy_of), keys.policy)
    with store.open(name) as opened, pytest.raises(FormatError, match="its header does not match the manifest"):
        opened.read(0, memoryview(bytearray(16)))
    with pytest.raises(FormatError, match="its header does not match the manifest"):
        relayout.sign(copy_of, key=keys.key)


def test_what_cannot_be_named_or_is_no_file_is_not_signed(copy_of: Path, keys: Keys) -> None:
    (copy_of / "model.sig").unlink()
    for name, make, says in (
        (os.fsdecode(b"name-\xff"), Path.touch, "its name is not UTF-8"),
        ("pipe", os.mkfifo, "not a regular file"),
        ("folder", lambda path: path.symlink_to(copy_of.parent), "a link that leads out of the checkpoint"),
    ):
        make(copy_of / name)
        with pytest.raises(FormatError, match=says) as error:
            relayout.sign(copy_of, key=keys.key)
        assert error.value.code == "unsafe"
        (copy_of / name).unlink()
        assert not (copy_of / "model.sig").exists()


def test_digests_that_anybody_can_forge_are_not_signed_and_their_signature_counts_for_nothing(
    copy_of: Path, keys: Keys
) -> None:
    """The stock package signs them, which does not know what they are."""
    from model_signing.signing import Config

    (copy_of / "model.sig").unlink()
    by_other_digests(copy_of)
    with pytest.raises(FormatError, match="not a BLAKE3 digest"):
        relayout.sign(copy_of, key=keys.key)
    Config().use_elliptic_key_signer(private_key=keys.key).sign(copy_of, copy_of / "model.sig")
    with pytest.raises(FormatError, match="not a BLAKE3 digest"):
        relayout.load(copy_of, 0, trust=keys.policy)


def test_the_command_signs_and_verifies(copy_of: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy_of / "model.sig").unlink()
    words = ["verify", str(copy_of), "--trust", str(keys.policy)]
    assert CliRunner().invoke(app, words).exit_code == 2
    done = CliRunner().invoke(app, ["sign", str(copy_of), "--key", str(keys.key), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_files"] == len(FILES)
    assert CliRunner().invoke(app, words).exit_code == 0
    edit(copy_of, "tokenizer.json", flip(0.5))
    assert CliRunner().invoke(app, words).exit_code == 1
