"""relayout.verify_source: plain checkpoints, intact, damaged in one bit, and with what a stranger puts there."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.downloads import SHARD, Downloads, downloads, rot
from support.signed_folders import copy_of, keys, signed, source
from support.signing import Keys, make_keys

import relayout
from relayout.cli.command import Line, Listing
from relayout.cli.render import source_verification
from relayout.commands.verify_source import SourceVerification, is_unconverted
from relayout.errors import FormatError, PlanError
from relayout.storage.stores import find_input

__all__ = ["copy_of", "downloads", "keys", "signed", "source"]


def text_of(result: SourceVerification) -> str:
    blocks = list(source_verification(result))
    lines = [f"{block.label} {block.text}" for block in blocks if isinstance(block, Line)]
    return "\n".join([*lines, *(f"{x.label} {text}" for x in blocks if isinstance(x, Listing) for text in x.texts)])


def add_sums(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    done = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True)
    (folder / "SHA256SUMS").write_bytes(done.stdout)


def sums_check(folder: Path) -> bool:
    """What `sha256sum --check` says of the same folder."""
    command = ["sha256sum", "--check", "--strict", "--status", "SHA256SUMS"]
    return subprocess.run(command, cwd=folder, check=False).returncode == 0


WAYS: dict[str, Callable[[Downloads, Path], tuple[Path, str]]] = {}


def way(by: str) -> Callable[[Callable[[Downloads, Path], Path]], None]:
    def add(make: Callable[[Downloads, Path], Path]) -> None:
        WAYS[by] = lambda downloads, tmp_path: (make(downloads, tmp_path), by)

    return add


@way("hub cache")
def _(downloads: Downloads, tmp_path: Path) -> Path:
    return downloads.snapshot


@way("hub download")
def _(downloads: Downloads, tmp_path: Path) -> Path:
    return downloads.local


@way("SHA256SUMS")
def _(downloads: Downloads, tmp_path: Path) -> Path:
    shutil.copytree(downloads.snapshot, tmp_path / "copied")
    add_sums(tmp_path / "copied")
    return tmp_path / "copied"


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("name", [SHARD, "config.json", "model.safetensors.index.json"])
def test_one_flipped_bit_is_named_wherever_it_is(downloads: Downloads, tmp_path: Path, by: str, name: str) -> None:
    folder, _ = WAYS[by](downloads, tmp_path)
    before = relayout.verify_source(folder)
    assert (before.ok, before.is_verified, before.unknown, before.num_tensors) == (True, True, (), 18)
    assert {one.by for one in before.verified} == {by}
    assert before.nbytes == sum(path.stat().st_size for path in folder.iterdir() if path.name in names(before))
    assert text_of(before).startswith(f"verified {folder}: 2 shards, every byte, by {by} (sha256)\n")
    for offset in (0, 1, 60) if name != SHARD else (0, 100, 20_000, -1):
        rot((folder / name).resolve(), offset)
        after = relayout.verify_source(folder)
        assert not after.ok
        assert not after.is_verified
        assert name in {difference.file for difference in after.differences}
        assert name not in names(after)
        assert any("damaged, or replaced" in difference.what for difference in after.differences)
        assert "verified" not in text_of(after)
        rot((folder / name).resolve(), offset)
    assert relayout.verify_source(folder) == before


def names(result: SourceVerification) -> set[str]:
    return {one.name for one in result.verified}


def test_without_a_digest_nothing_is_called_verified(downloads: Downloads, tmp_path: Path) -> None:
    shutil.copytree(downloads.snapshot, tmp_path / "plain")
    result = relayout.verify_source(tmp_path / "plain")
    assert (result.ok, result.is_verified, result.verified, result.nbytes) == (True, False, (), 0)
    assert result.unknown == tuple(sorted(path.name for path in (tmp_path / "plain").iterdir()))
    assert text_of(result).startswith(f"no digest known {tmp_path / 'plain'}: of its shards")
    assert "verified" not in text_of(result)


def test_a_shard_of_which_no_digest_is_known_is_named(downloads: Downloads) -> None:
    link = downloads.snapshot / SHARD
    blob = link.resolve()
    link.unlink()
    shutil.copy(blob, link)
    result = relayout.verify_source(downloads.snapshot)
    assert (result.ok, result.is_verified, result.unknown) == (True, False, (SHARD,))
    text = text_of(result)
    assert text.startswith(f"verified in part {downloads.snapshot}: 1 of 2 shards, by hub cache (sha256)\n")
    assert f"no digest known {SHARD}" in text


def test_a_blob_with_another_name_than_its_hash_is_a_difference(downloads: Downloads) -> None:
    link = downloads.snapshot / SHARD
    blob = link.resolve()
    renamed = blob.with_name("f" * 64)
    blob.rename(renamed)
    link.unlink()
    link.symlink_to(f"../../blobs/{renamed.name}")
    [difference] = relayout.verify_source(downloads.snapshot).differences
    assert difference.file == SHARD
    assert difference.what.startswith(f"sha256 is {blob.name}, {'f' * 64} by hub cache")


def test_a_link_to_the_blob_of_another_shard_is_found_by_the_index(downloads: Downloads) -> None:
    """The blob is intact: its name says nothing about which file it is."""
    link = downloads.snapshot / SHARD
    link.unlink()
    link.symlink_to((downloads.snapshot / SHARD.replace("00002-of", "00001-of")).readlink())
    result = relayout.verify_source(downloads.snapshot)
    assert not result.ok
    assert "is named by the index, but not in the file" in str(result.differences[0])


@pytest.mark.parametrize("target", ["outside", "a folder", "nothing", "itself"])
def test_a_link_that_leads_elsewhere_is_a_difference(downloads: Downloads, tmp_path: Path, target: str) -> None:
    link = downloads.snapshot / SHARD
    (tmp_path / "blobs").mkdir()
    outside = tmp_path / "blobs" / link.resolve().name
    shutil.copy(link.resolve(), outside)
    link.unlink()
    link.symlink_to({"outside": outside, "a folder": "..", "nothing": "../../blobs/none", "itself": SHARD}[target])
    result = relayout.verify_source(downloads.snapshot)
    assert not result.ok
    assert SHARD in {difference.file for difference in result.differences}
    assert SHARD not in names(result)


def test_a_list_with_more_and_with_fewer_files_than_there_are(downloads: Downloads, tmp_path: Path) -> None:
    folder, _ = WAYS["SHA256SUMS"](downloads, tmp_path)
    assert sums_check(folder)
    (folder / "config.json").unlink()
    (folder / "notes.txt").write_text("of somebody else")
    result = relayout.verify_source(folder)
    assert not sums_check(folder)
    assert [str(difference) for difference in result.differences] == ["config.json: is missing, and in SHA256SUMS"]
    assert result.unknown == ("notes.txt",)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../model.safetensors\n")
    with pytest.raises(FormatError, match="is not a file inside the folder"):
        relayout.verify_source(folder)


def test_a_list_that_contradicts_the_hub_is_a_difference(downloads: Downloads) -> None:
    (downloads.snapshot / "SHA256SUMS").write_text(f"{'0' * 64}  {SHARD}\n")
    result = relayout.verify_source(downloads.snapshot)
    assert [difference.file for difference in result.differences] == [SHARD]
    assert f"{'0' * 64} by SHA256SUMS" in result.differences[0].what
    assert not result.is_verified


def test_headers_and_index_are_checked_without_a_digest(downloads: Downloads, tmp_path: Path) -> None:
    shutil.copytree(downloads.snapshot, tmp_path / "plain")
    index = tmp_path / "plain" / "model.safetensors.index.json"
    top = json.loads(index.read_text())
    top["weight_map"]["model.more.weight"] = SHARD
    index.write_text(json.dumps(top))
    [difference] = relayout.verify_source(tmp_path / "plain").differences
    assert (difference.file, difference.tensor) == (SHARD, "model.more.weight")
    index.unlink()
    with (tmp_path / "plain" / SHARD).open("r+b") as file:
        file.truncate(30_000)
    assert [each.file for each in relayout.verify_source(tmp_path / "plain").differences] == [SHARD]


def test_one_file_is_verified_by_itself(downloads: Downloads) -> None:
    rot((downloads.snapshot / SHARD.replace("00002-of", "00001-of")).resolve())
    result = relayout.verify_source(downloads.snapshot / SHARD)
    assert (result.is_verified, names(result), result.shards) == (True, {SHARD}, (SHARD,))


def test_a_signature_counts_under_a_policy_and_lists_all_files(source: Path, keys: Keys, tmp_path: Path) -> None:
    from model_signing.signing import Config

    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    with pytest.raises(FormatError, match="is not signed"):
        relayout.verify_source(folder, trust=keys.policy)
    Config().use_elliptic_key_signer(private_key=keys.key).sign(folder, tmp_path / "model.sig")
    shutil.move(tmp_path / "model.sig", folder / "model.sig")
    unproven = relayout.verify_source(folder)
    assert (unproven.ok, unproven.is_verified, unproven.has_signature, unproven.signer) == (True, False, True, None)
    assert "its signature was not checked" in text_of(unproven)
    result = relayout.verify_source(folder, trust=keys.policy)
    assert (result.is_verified, result.signer, result.unknown) == (True, f"public_key {keys.public}", ())
    assert {one.by for one in result.verified} == {"model.sig"}
    with pytest.raises(FormatError, match="another key signed it"):
        relayout.verify_source(folder, trust=make_keys(tmp_path, "stranger").policy)
    (folder / "notes.txt").write_text("of somebody else")
    assert [str(one) for one in relayout.verify_source(folder, trust=keys.policy).differences] == [
        "notes.txt: is not signed"
    ]
    (folder / "notes.txt").unlink()
    shard = next(folder.glob("*.safetensors"))
    rot(shard)
    assert [one.file for one in relayout.verify_source(folder, trust=keys.policy).differences] == [shard.name]
    limited = tmp_path / "limited.toml"
    limited.write_text(f'[[signer]]\npublic_key = "{keys.public}"\ncontent = ["00"]\n')
    with pytest.raises(FormatError, match="names contents of converted checkpoints"):
        relayout.verify_source(folder, trust=limited)


def test_only_plain_checkpoints_are_taken(copy_of: Path, source: Path, tmp_path: Path) -> None:
    assert is_unconverted(find_input(source))
    (tmp_path / "empty").mkdir()
    without = tmp_path / "without"
    shutil.copytree(copy_of, without)
    (without / "relayout.json").unlink()
    for folder in (copy_of, without, tmp_path / "empty", tmp_path / "none"):
        assert not is_unconverted(find_input(folder))
        with pytest.raises(PlanError, match="is not a plain checkpoint"):
            relayout.verify_source(folder)
