"""relayout.checkpoint.recorded_digests: as the hub's library, git and sha256sum write them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support.downloads import SHARD, Downloads, downloads

from relayout.checkpoint.recorded_digests import grouped, hex_of, parse_sums, recorded_digests, to_hash
from relayout.errors import FormatError
from relayout.format.source_record import FileDigest
from relayout.storage.reading import hash_files
from relayout.storage.stores import find_input

__all__ = ["downloads"]


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def found(folder: Path) -> dict[str, str]:
    """The hash of each file by the digest that is known of it, from hash_files; and that it is the known one."""
    store = find_input(folder)
    known = recorded_digests(store, names_of(folder))
    hashed = hash_files([to_hash(store, one, (folder / one.name).stat().st_size) for one in known], 2, num_streams=3)
    assert [digests[-1] for digests in hashed] == list(map(hex_of, known))
    return {one.name: one.digest for one in known}


def test_what_the_hubs_library_has_downloaded_has_the_hashes_of_sha256sum_and_git(downloads: Downloads) -> None:
    expected = {}
    for path in sorted(downloads.snapshot.iterdir()):
        is_large = path.name.endswith(".safetensors")
        command = ["sha256sum", path] if is_large else ["git", "hash-object", "--no-filters", path]
        value = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        expected[path.name] = f"{'sha256' if is_large else 'git-sha1'}:{value}"
    assert len(expected) == 4
    assert found(downloads.snapshot) == found(downloads.local) == expected
    for folder, by in ((downloads.snapshot, "hub cache"), (downloads.local, "hub download")):
        assert {one.by for one in recorded_digests(find_input(folder), names_of(folder))} == {by}


def test_a_blob_that_repositories_share_and_a_blobs_folder_elsewhere_keep_their_names(
    downloads: Downloads, tmp_path: Path
) -> None:
    before = found(downloads.snapshot)
    repository = downloads.snapshot.parents[1]
    moved = tmp_path / "drive" / repository.name
    moved.mkdir(parents=True)
    shutil.move(repository / "blobs", moved / "blobs")
    (repository / "blobs").symlink_to(moved / "blobs")
    assert found(downloads.snapshot) == before
    blob = next(path for path in (moved / "blobs").iterdir() if len(path.name) == 64)
    shared = repository.parent / "blobs" / blob.name[:2] / blob.name
    shared.parent.mkdir(parents=True)
    shutil.move(blob, shared)
    blob.symlink_to(shared)
    assert found(downloads.snapshot) == before


@pytest.mark.parametrize(
    "target", ["another name", "the file itself", "no hash", "a folder above", "another repository"]
)
def test_a_link_to_anything_but_a_blob_of_the_repository_states_nothing(downloads: Downloads, target: str) -> None:
    link = downloads.snapshot / SHARD
    blob, repository = link.resolve(), downloads.snapshot.parents[1]
    other = repository.with_name("models--org--other")
    (other / "blobs").mkdir(parents=True)
    shutil.copy(blob, other / "blobs" / blob.name)
    shutil.copy(blob, repository / "blobs" / "weights")
    shutil.copy(blob, repository / blob.name)
    shutil.copy(blob, downloads.snapshot / blob.name)
    link.unlink()
    if target == "the file itself":
        shutil.copy(blob, link)
    else:
        link.symlink_to(
            {
                "another name": blob.name,
                "no hash": "../../blobs/weights",
                "a folder above": f"../../{blob.name}",
                "another repository": other / "blobs" / blob.name,
            }[target]
        )
    assert SHARD not in {one.name for one in recorded_digests(find_input(downloads.snapshot), [SHARD])}


def test_outside_of_a_cache_a_link_to_a_name_like_a_hash_states_nothing(downloads: Downloads, tmp_path: Path) -> None:
    shutil.copytree(downloads.snapshot.parents[1], tmp_path / "somewhere", symlinks=True)
    [copy] = (tmp_path / "somewhere" / "snapshots").iterdir()
    assert names_of(copy) == names_of(downloads.snapshot)
    assert recorded_digests(find_input(copy), names_of(copy)) == []


def test_a_file_that_was_changed_after_its_download_has_no_digest_as_for_the_hubs_library(downloads: Downloads) -> None:
    from huggingface_hub._local_folder import read_download_metadata

    store, path = find_input(downloads.local), downloads.local / "config.json"
    for seconds in (-3600.0, 0.5, 2.0, 3600.0):
        metadata = downloads.local / ".cache/huggingface/download/config.json.metadata"
        since = float(metadata.read_text().split("\n")[2])
        os.utime(path, (time.time(), since + seconds))
        theirs = read_download_metadata(downloads.local, "config.json")
        ours = recorded_digests(store, ["config.json"])
        assert [hex_of(one) for one in ours] == ([] if theirs is None else [theirs.etag]), seconds
        assert bool(ours) is (seconds < 1)


@pytest.mark.parametrize(
    "text", ["", "x\ny\nz\n", "{commit}\n../../etag\n9e9\n", "{commit}\n{etag}\nsoon\n", "{etag}\n"]
)
def test_metadata_that_the_hubs_library_would_not_take_states_nothing(downloads: Downloads, text: str) -> None:
    metadata = downloads.local / f".cache/huggingface/download/{SHARD}.metadata"
    commit, etag, _ = metadata.read_text().split("\n")[:3]
    metadata.write_text(text.format(commit=commit, etag=etag))
    assert recorded_digests(find_input(downloads.local), [SHARD]) == []


NAMES = ["a b.txt", "with\nline", "back\\slash", "below/ä", "*star"]


@pytest.mark.parametrize("options", [[], ["--binary"], ["--tag"], ["--text"]])
def test_what_sha256sum_writes_is_read(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "below").mkdir()
    for number, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(b"%d" % number)
    done = subprocess.run(["sha256sum", *options, "--", *NAMES], cwd=tmp_path, capture_output=True, check=True)
    plain = [name for name in NAMES if "\n" not in name]
    if any("\n" in name for name in NAMES):  # No file of a checkpoint has such a name.
        with pytest.raises(FormatError, match="is not a file inside the folder"):
            list(parse_sums(done.stdout, "SHA256SUMS"))
    done = subprocess.run(["sha256sum", *options, "--", *plain], cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "SHA256SUMS").write_bytes(done.stdout)
    known = recorded_digests(find_input(tmp_path), [])
    assert [one.name for one in known] == plain
    assert {one.by for one in known} == {"SHA256SUMS"}
    check = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, capture_output=True)
    assert check.returncode == 0
    assert found(tmp_path) == {one.name: one.digest for one in known}


ZEROS = "0" * 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{ZEROS}  /etc/passwd", "line 1: '/etc/passwd' is not a file inside the folder"),
        (f"{ZEROS}  ../model.safetensors", "is not a file inside the folder"),
        (f"{ZEROS}  a/../../b", "is not a file inside the folder"),
        (f"{ZEROS}  a//b", "is not a file inside the folder"),
        (f"\\{ZEROS}  a\\nb", "is not a file inside the folder"),
        (f"SHA256 (../x) = {ZEROS}", "is not a file inside the folder"),
        (f"{ZEROS}  a\n{'1' * 64}  ./a", "line 2: 'a' is listed twice"),
        (f"{ZEROS[1:]}  a", "line 1 is not what sha256sum writes"),
        (f"{ZEROS} a", "line 1 is not what sha256sum writes"),
        (f"MD5 (a) = {ZEROS}", "line 1 is not what sha256sum writes"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_list_that_says_something_else_is_an_error(tmp_path: Path, text: str | bytes, says: str) -> None:
    (tmp_path / "SHA256SUMS").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FormatError, match=f"SHA256SUMS: .*{says}|SHA256SUMS: {says}"):
        recorded_digests(find_input(tmp_path), [])


def test_a_list_that_leads_out_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "list").write_text(f"{ZEROS}  a\n")
    (tmp_path / "folder" / "SHA256SUMS").symlink_to(tmp_path / "list")
    with pytest.raises(FormatError, match="a symbolic link that leads out of the checkpoint"):
        recorded_digests(find_input(tmp_path / "folder"), [])


def test_digests_of_one_hash_are_taken_once() -> None:
    one, same = FileDigest("a", f"sha256:{ZEROS}", "hub cache"), FileDigest("a", f"sha256:{ZEROS}", "SHA256SUMS")
    other = FileDigest("a", f"sha256:{'1' * 64}", "SHA256SUMS")
    assert grouped([one, other, same]) == [[one, same], [other]]
