"""What is no file of the checkpoint itself is not read: links that lead out of it, devices, FIFOs."""

from __future__ import annotations

import builtins
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.errors import FormatError, PlanError
from relayout.storage.local.store import LocalStore, is_inside, resolve_inside
from relayout.storage.stores import Entry

RANK_FILE = "model-rank-0-part-0.safetensors"
TABLE, RECORD, MANIFEST = "relayout.rank-0.json.zst", "relayout.source.json.zst", "relayout.json"


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("members") / "out"
    relayout.convert(llama, folder, tp=2)
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A place beside the checkpoint, with what its owner would not give away."""
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside"


def move_out(folder: Path, name: str, outside: Path) -> None:
    """Let a file of the checkpoint lie elsewhere, with a link in its place."""
    shutil.move(folder / name, outside / name)
    (folder / name).symlink_to(outside / name)


def hub_copy(folder: Path, cache: Path) -> Path:
    """The folder as huggingface_hub lays it out in its cache."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_links_stay_in_the_folder_or_lead_to_the_blobs_of_a_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "models--a--b" / "snapshots" / "1"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "x").symlink_to("../y")
    (root / "blob").symlink_to("../../blobs/0")
    (root / "sub" / "blob").symlink_to("../../../blobs/0")
    (root / "other revision").symlink_to("../2/x")
    (root / "other repository").symlink_to("../../../models--c--d/blobs/0")
    (root / "below blobs").symlink_to("../../blobs/0/1")
    (root / "blobs").symlink_to("../../blobs")
    (root / "absolute").symlink_to("/etc/hostname")
    (root / "loop").symlink_to("loop")
    inside = {
        name: is_inside(root, root / name)
        for name in (
            "sub/x",
            "blob",
            "sub/blob",
            "other revision",
            "other repository",
            "below blobs",
            "blobs",
            "absolute",
        )
    }
    assert [name for name, is_inside in inside.items() if is_inside] == ["sub/x", "blob", "sub/blob"]
    (tmp_path / "link").symlink_to(root)
    assert is_inside(tmp_path / "link", tmp_path / "link" / "blob"), "the folder itself may be given as a link"
    assert resolve_inside(root, "loop") == root / "loop", "what it leads to is nothing, and opening it tells that"
    shared = f"ab{'0' * 62}"
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for number, target in enumerate([f"ab/{shared}", f"cd/{shared}", f"ab/{shared}/x", "ab/x", "x"]):
        (tmp_path / "models--a--b" / "blobs" / f"link-{number}").symlink_to(f"../../blobs/{target}")
        (root / f"shared-{number}").symlink_to(f"../../blobs/link-{number}")
    assert [is_inside(root, root / f"shared-{number}") for number in range(5)] == [True, False, False, False, False]
    assert is_inside(root / "sub", root / "sub" / "blob"), "a repository may hold several checkpoints"
    assert not is_inside(root / "sub", root / "sub" / "x")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "blob").symlink_to("../blobs/0")
    assert not is_inside(plain, plain / "blob"), "not in a snapshot"


def test_only_a_repository_of_the_hub_has_blobs_outside(tmp_path: Path) -> None:
    root = tmp_path / "backups" / "snapshots" / "1"
    root.mkdir(parents=True)
    (root / "x").symlink_to("../../blobs/id_rsa")
    assert not is_inside(root, root / "x")


def test_the_blobs_of_a_cache_may_lie_on_another_drive(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    root = repository / "snapshots" / "1"
    root.mkdir(parents=True)
    drive = tmp_path / "drive" / "models--a--b" / "blobs"
    drive.mkdir(parents=True)
    (repository / "blobs").symlink_to(drive)
    (root / "sub").mkdir()
    for number, nbytes in enumerate((40, 64)):
        (drive / ("0a" * (nbytes // 2))).write_text("1")
        (root / f"x{number}").symlink_to(f"../../blobs/{'0a' * (nbytes // 2)}")
        (root / "sub" / f"x{number}").symlink_to(f"../../../blobs/{'0a' * (nbytes // 2)}")
        assert is_inside(root, root / f"x{number}")
        assert is_inside(root, root / "sub" / f"x{number}")


HASH = "0a" * 32


@pytest.mark.parametrize(
    ("blobs", "name"),
    [
        ("home/.ssh", "id_rsa"),
        ("home/.ssh", HASH),  # Named as a blob, in a folder that is not one of blobs.
        ("home/blobs", HASH),
        ("home/models--c--d/blobs", "id_rsa"),
        ("home/models--c--d/blobs", HASH[:-1]),
        ("home/models--c--d/blobs", HASH.upper()),
        ("home/models--c--d/blobs", f"{HASH[:2]}/{HASH}"),
        ("home/models--c--d/blobs", "link"),  # To a file elsewhere, by a name of a blob.
    ],
)
def test_a_link_in_place_of_the_blobs_leads_to_nothing_but_blobs(
    llama: Path, tmp_path: Path, blobs: str, name: str
) -> None:
    snapshot = tmp_path / "download" / "models--a--b" / "snapshots" / "1"
    shutil.copytree(llama, snapshot)
    secret = tmp_path / blobs / name
    if name == "link":
        (tmp_path / "home" / "secret").parent.mkdir(parents=True)
        (tmp_path / "home" / "secret").write_text("PRIVATE")
        secret = secret.with_name(HASH)
        secret.parent.mkdir(parents=True)
        secret.symlink_to(tmp_path / "home" / "secret")
    else:
        secret.parent.mkdir(parents=True)
        secret.write_text("PRIVATE")
    (snapshot.parents[1] / "blobs").symlink_to(tmp_path / blobs)
    (snapshot / "sub").mkdir()
    for file, below in (("notes.txt", "blobs"), ("sub/notes.txt", "../blobs"), ("around.txt", "blobs/../blobs")):
        (snapshot / file).symlink_to(f"../../{below}/{secret.relative_to(tmp_path / blobs)}")
    done = relayout.convert(snapshot, tmp_path / "out", tp=2)
    left_out = {f"{file}: a link that leads out of the checkpoint" for file in ("notes.txt", "sub/notes.txt")}
    assert left_out <= set(done.left_out)
    assert not any(b"PRIVATE" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(snapshot / "notes.txt")
    with pytest.raises(FormatError, match=r"config\.json: a symbolic link that leads out of the checkpoint"):
        relayout.inspect(snapshot)


def test_links_from_a_snapshot_reach_nothing_around_its_blobs(tmp_path: Path) -> None:
    root = tmp_path / "models--a--b" / "snapshots" / "1"
    root.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / HASH).write_text("PRIVATE")
    (root / "x").symlink_to(f"../../blobs/../../{HASH}")
    (root / "y").symlink_to(f"../../../{HASH}")
    (tmp_path / "models--c--d" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--c--d" / "snapshots" / "1").symlink_to(tmp_path)  # A snapshot that is itself a link.
    other = tmp_path / "models--c--d" / "snapshots" / "1"
    (tmp_path / "z").symlink_to(tmp_path.parent / HASH)
    assert [is_inside(root, root / "x"), is_inside(root, root / "y"), is_inside(other, other / "z")] == [False] * 3


def test_who_trusts_links_may_say_so(
    llama: Path, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older downloads left them: a folder of links into a cache elsewhere."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    for path in list(folder.iterdir()):
        move_out(folder, path.name, outside)
    with pytest.raises(FormatError, match="or set RELAYOUT_FOLLOW_LINKS=1 if you trust it"):
        relayout.inspect(folder)
    monkeypatch.setenv("RELAYOUT_FOLLOW_LINKS", "1")
    relayout.convert(folder, tmp_path / "out", tp=2)
    assert relayout.verify(tmp_path / "out", source=llama).ok


@pytest.mark.parametrize("kind", ["plain", "converted"])
def test_a_snapshot_in_the_hubs_cache_is_read_like_a_folder(
    kind: str, llama: Path, converted: Path, tmp_path: Path
) -> None:
    snapshot = hub_copy(llama if kind == "plain" else converted, tmp_path / "cache")
    found, expected = (relayout.load(folder, 1, tp=2) for folder in (snapshot, converted))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    if kind == "plain":
        relayout.convert(snapshot, tmp_path / "out", tp=2)
        assert relayout.verify(tmp_path / "out", source=snapshot).ok
        assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    else:
        assert relayout.verify(snapshot, source=llama).ok
        relayout.restore(snapshot, tmp_path / "back")
        assert relayout.load(snapshot, 0, tp=1).keys() == relayout.load(tmp_path / "back", 0, tp=1).keys()


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, out: relayout.load(path, 0),
    "load buffered": lambda path, out: relayout.load(path, 0, backend="buffered", verify=True),
    "load some": lambda path, out: relayout.load(path, 0, names=["**norm**"]),
    "load at another degree": lambda path, out: relayout.load(path, 0, tp=1),
    "iter_load": lambda path, out: list(relayout.iter_load(path, 0)),
    "open": lambda path, out: relayout.open(path, 0).__enter__(),
    "safe_open": lambda path, out: [
        whole.get_tensor(name) for whole in [relayout.safe_open(path).__enter__()] for name in relayout.load(path, 0)
    ],
    "restore": lambda path, out: relayout.restore(path, out),
}


@pytest.mark.parametrize("name", [RANK_FILE, TABLE, RECORD, MANIFEST])
def test_a_converted_folder_whose_file_lies_elsewhere_is_refused(
    name: str, converted: Path, outside: Path, tmp_path: Path
) -> None:
    readers = ("restore", "safe_open", "load at another degree") if name == RECORD else READERS
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    for reader in readers:
        READERS[reader](folder, tmp_path / "first")
    move_out(folder, name, outside)
    for reader in readers:
        with pytest.raises(
            FormatError, match=rf"{name}: a symbolic link that leads out of the checkpoint, to .*outside/{name}"
        ):
            READERS[reader](folder, tmp_path / "back")
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", [RANK_FILE, TABLE, RECORD, "config.json"])
def test_verification_tells_of_files_that_lie_elsewhere(
    name: str, converted: Path, outside: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    move_out(folder, name, outside)
    told = [one for one in relayout.verify(folder).differences if "leads out of the checkpoint" in one.what]
    assert [one.file for one in told] == [name]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_source_whose_file_lies_elsewhere_is_refused(name: str, outside: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard, tensor in zip(shards, "ab", strict=True):
        save_file({tensor: np.arange(9)}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {{"a": "{shards[0]}", "b": "{shards[1]}"}}}}'
    )
    (folder / "config.json").write_text("{}")
    relayout.convert(folder, tmp_path / "first")
    move_out(folder, name, outside)
    result = CliRunner().invoke(app, ["convert", str(folder), "--tp", "1", "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert f"{name}: a symbolic link that leads out of the checkpoint" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model", "outside"]


def test_a_side_file_that_lies_elsewhere_is_not_given_away(llama: Path, outside: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (outside / "id_rsa").write_text("secret")
    (folder / "tokenizer.json").symlink_to(outside / "id_rsa")
    (folder / "sub").symlink_to(outside)
    summary = relayout.convert(folder, tmp_path / "out")
    assert "tokenizer.json: a link that leads out of the checkpoint" in summary.left_out
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())


@pytest.mark.parametrize("name", [RANK_FILE, TABLE, RECORD, MANIFEST])
@pytest.mark.parametrize("what", ["fifo", "folder", "device"])
def test_what_is_no_file_is_not_opened(
    name: str, what: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a device may do something already: rewind a tape, start a watchdog."""
    folder = tmp_path / "out"
    shutil.copytree(converted, folder)
    (folder / name).unlink()
    if what == "fifo":
        os.mkfifo(folder / name)
    elif what == "folder":
        (folder / name).mkdir()
    else:
        try:
            os.mknod(folder / name, 0o020666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("devices are made by root only")
    opened = []
    open_fd, open_file = os.open, builtins.open

    def watched(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(path))
        return open_fd(path, *args, **kwargs)

    def watched_file(path: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(builtins, "open", watched_file)
    for reader in READERS.values():
        try:
            reader(folder, tmp_path / "back")
        except FormatError as error:
            assert f"{name}: not a regular file" in str(error)  # noqa: PT017
        else:
            assert name == RECORD
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
    monkeypatch.undo()
    assert any(path.endswith(".json") or path.endswith(".zst") for path in opened) or name == MANIFEST
    assert str(folder / name) not in opened


def test_a_file_of_slices_is_no_checkpoint(converted: Path, tmp_path: Path) -> None:
    """Its tensors would be taken for whole ones."""
    shutil.copytree(converted, tmp_path / "out")
    (tmp_path / "sharded").mkdir()  # As vLLM's save_sharded_state writes it.
    shutil.copy(converted / RANK_FILE, tmp_path / "sharded")
    for file in (tmp_path / "out" / RANK_FILE, tmp_path / "sharded" / RANK_FILE):
        for call in (
            relayout.load,
            lambda path: relayout.load(path, 0),
            lambda path: relayout.load(path, 0, tp=1),
            lambda path: dict(relayout.iter_load(path)),
            relayout.open,
            relayout.safe_open,
            lambda path: relayout.convert(path, tmp_path / "new", tp=1),
        ):
            with pytest.raises(PlanError, match=f"{RANK_FILE}: has slices of tensors, as its name says: give the"):
                call(file)
    for call in (relayout.load, relayout.inspect, relayout.verify, relayout.safe_open):
        with pytest.raises(FormatError, match=r"is missing next to rank files: copy .*; for vLLM's"):
            call(tmp_path / "sharded")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_converted_is_said_to_be_so_whatever_is_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked = []

    def walk(self: LocalStore, enter: object) -> Iterator[Entry]:
        for number in range(10**6):
            walked.append(number)
            yield Entry(f"{number}.txt")

    calls = (relayout.verify, relayout.files, lambda path: relayout.copy(path, tmp_path / "new"))
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "walk", walk)
            with pytest.raises(FormatError, match="not a converted folder"):
                call(tmp_path)
    assert len(walked) < 10**4

    def fail(self: LocalStore, enter: object) -> Iterator[Entry]:
        raise PermissionError(errno.EACCES, "Permission denied", "private")

    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "walk", fail)
            with pytest.raises(FormatError, match="not a converted folder"):
                call(tmp_path)
