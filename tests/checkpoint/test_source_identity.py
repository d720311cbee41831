"""Which checkpoints are the same: told by their bytes, whatever their names, lengths, headers and times are."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from relayout.checkpoint.source import (
    SourceCheckpoint,
    SourceFile,
    SourceIdentity,
    SourceTensor,
    identity_of,
    is_unchanged,
    location_of,
    read_source,
    samples_of,
)
from relayout.core.arguments import collapse_numbers
from relayout.core.extents import Extent
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import FileStat

NUM_PAIRS = int(os.environ.get("RELAYOUT_PAIRS", "20"))
SHAPES = {
    "embed.weight": (700, 64),
    **{f"layers.{layer}.{name}": (64, 192) for layer in range(3) for name in ("q_proj", "up_proj")},
    **{f"layers.{layer}.norm": (64,) for layer in range(3)},
}
Tensors = dict[str, np.ndarray]


def write(folder: Path, tensors: Tensors) -> SourceIdentity:
    """Two shards; all times are the same."""
    folder.mkdir(exist_ok=True)
    for number in (0, 1):
        path = folder / f"model-{number}.safetensors"
        save_file(dict(sorted(tensors.items())[number::2]), path)
        os.utime(path, (1, 1))
    return identity_of(read_source(LocalStore(folder)))


def model(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in SHAPES.items()}


def drawn(tensors: Tensors, seed: int) -> Tensors:
    """One tensor has other values."""
    name = random.Random(seed).choice(sorted(tensors))
    return tensors | {name: model(seed + 1)[name]}


def scaled(tensors: Tensors, seed: int) -> Tensors:
    """One tensor is scaled by so little that some elements keep their bits."""
    name = random.Random(seed).choice(sorted(tensors))
    return tensors | {name: (tensors[name] * np.float32(1.001)).astype(np.float16)}


def merged(tensors: Tensors, seed: int) -> Tensors:
    """An adapter of rank 1 is merged into all q_proj."""
    rng = np.random.default_rng(seed)
    of = [name for name in tensors if name.endswith("q_proj")]
    added = {name: np.outer(*(rng.standard_normal(n) for n in SHAPES[name])) * 0.01 for name in of}
    return tensors | {name: (tensors[name] + added[name]).astype(np.float16) for name in of}


def last_rows(tensors: Tensors, seed: int) -> Tensors:
    """New words at the end of the vocabulary."""
    rows = tensors["embed.weight"].copy()
    rows[-4:] = np.random.default_rng(seed).standard_normal((4, 64))
    return tensors | {"embed.weight": rows}


@pytest.mark.parametrize("change", [drawn, scaled, merged, last_rows])
def test_models_that_differ_in_a_tensor_have_other_contents(
    tmp_path: Path, change: Callable[[Tensors, int], Tensors]
) -> None:
    """By the samples alone: `content` knows no path and no time. In turns at one path and at another."""
    for seed in range(NUM_PAIRS):
        tensors = model(seed)
        one = write(tmp_path / "one", tensors)
        other = write(tmp_path / ("one", "other")[seed % 2], change(tensors, seed))
        assert one.content != other.content, seed
        assert one.here != other.here


def test_a_copy_has_the_same_content_and_another_place(tmp_path: Path) -> None:
    one = write(tmp_path / "one", model(1))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for path in (tmp_path / "two").iterdir():
        os.utime(path)
    two = identity_of(read_source(LocalStore(tmp_path / "two")))
    assert (one.content == two.content, one.place == two.place, one.here == two.here) == (True, False, False)


def test_a_file_that_was_replaced_is_told_by_its_place(tmp_path: Path) -> None:
    """Of equal bytes and times."""
    one, two = (write(tmp_path / "one", model(1)) for _ in range(2))
    assert (one.content == two.content, one.place == two.place) == (True, False)


def test_a_file_that_was_rewritten_in_place_is_told_by_a_time_that_nobody_can_set(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    before = path.stat()
    known = location_of(path)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # The clock of the file system is coarse.
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert location_of(path) != known


@pytest.mark.parametrize(("kind", "is_kept"), [("ext4", True), ("nfs4", True), ("fuse.sshfs", False), ("vfat", False)])
def test_inodes_count_where_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_kept: bool
) -> None:
    """Some file systems number their files anew at each mount."""
    monkeypatch.setattr("relayout.checkpoint.source._kind_at", lambda folder, device: kind)
    assert (tmp_path.stat().st_ino in location_of(tmp_path)) == is_kept


class Server(LocalStore):
    """Vouches for nothing, and gives each file a word of its own for the version."""

    version = "Mon"

    def path(self, name: str) -> Path | None:
        return None

    def stat(self, name: str) -> FileStat | None:
        status = LocalStore.stat(self, name)
        return status and replace(status, version=self.version)


def test_another_version_on_a_server_and_another_index_are_other_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the samples say."""
    write(tmp_path, model(1))
    found = {identity_of(read_source(Server(tmp_path))).content for _ in range(2)}
    monkeypatch.setattr(Server, "version", "Tue")
    found.add(identity_of(read_source(Server(tmp_path))).content)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(SHAPES))}
    for total in (1, 2):
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        found.add(identity_of(read_source(Server(tmp_path))).content)
    assert len(found) == 4


def test_the_same_word_of_a_server_at_another_address_is_no_proof(tmp_path: Path) -> None:
    """Its version may be a time, which two models have in common; what vouches for the bytes counts anywhere."""
    for name in ("one", "other"):
        write(tmp_path / name, model(1))
    one, again, other = (identity_of(read_source(Server(tmp_path / name))).content for name in ("one", "one", "other"))
    assert one == again != other


@pytest.mark.parametrize("is_remote", [False, True])
def test_samples_are_bounded_and_no_small_kind_is_left_out(monkeypatch: pytest.MonkeyPatch, is_remote: bool) -> None:
    """A server has each as a request."""
    monkeypatch.setattr(LocalStore, "cost", SimpleNamespace(is_remote=is_remote))
    layers = range(58)
    names = [f"layers.{n}.experts.{e}.{part}" for n in layers for e in range(256) for part in ("gate", "up", "down")]
    names += [f"layers.{n}.{part}" for n in layers for part in ("q_proj", "router", "norm")] + ["embed"]
    tensors = [SourceTensor(name, "BF16", (2**19,), 0, Extent(n * 2**20, 2**20)) for n, name in enumerate(names)]
    file = SourceFile("model.safetensors", 2**20 * len(names), 0, b"")
    [samples] = samples_of(SourceCheckpoint(LocalStore(Path()), (file,), tuple(tensors)), [0]).values()
    kinds = Counter(collapse_numbers(names[sample.offset // 2**20]) for sample in samples)
    assert len(samples) <= (512 if is_remote else 16_384)
    assert all(sample.nbytes == 4096 for sample in samples)
    assert all(sample.offset // 2**20 == (sample.end - 1) // 2**20 for sample in samples), "each is of one tensor"
    small = [kinds[kind] for kind in ("layers.*.q_proj", "layers.*.router", "layers.*.norm", "embed")]
    assert min(kinds[f"layers.*.experts.*.{part}"] for part in ("gate", "up", "down")) > (80 if is_remote else 5000)
    assert min(small[:3]) > 80 if is_remote else small[:3] == [232] * 3
    assert small[3] == 4


def test_at_the_end_another_version_on_a_server_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file there has a place on this machine."""
    write(tmp_path, model(1))
    checkpoint = read_source(Server(tmp_path))
    checkpoint = replace(checkpoint, files=tuple(replace(file, version=Server.version) for file in checkpoint.files))
    before = identity_of(checkpoint)
    assert is_unchanged(checkpoint, before)
    monkeypatch.setattr(Server, "version", "Tue")
    assert not is_unchanged(checkpoint, before)


def test_at_the_end_nothing_is_read_again_of_a_drive_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write in place, with the times set back, is seen by the ctime; on others' file systems samples are read."""
    write(tmp_path, model(1))
    checkpoint = read_source(LocalStore(tmp_path))
    before = identity_of(checkpoint)
    read: list[int] = []
    true_samples = samples_of

    def counted(of: SourceCheckpoint, files: list[int]) -> object:
        read.extend(files)
        return true_samples(of, files)

    monkeypatch.setattr("relayout.checkpoint.source.samples_of", counted)
    for kind, num_files in (("ext4", 0), ("xfs", 0), ("nfs4", 2), ("fuse.sshfs", 2)):
        monkeypatch.setattr("relayout.checkpoint.source._kind_at", lambda folder, device, kind=kind: kind)
        again = read_source(LocalStore(tmp_path))
        known = identity_of(again)
        read.clear()
        assert is_unchanged(again, known)
        assert identity_of(again) is known
        assert len(read) == num_files, kind
    monkeypatch.setattr("relayout.checkpoint.source._kind_at", lambda folder, device: "ext4")
    path = min(tmp_path.glob("*.safetensors"))
    status, content = path.stat(), path.read_bytes()
    while path.stat().st_ctime_ns == status.st_ctime_ns:  # The clock of the file system is coarse.
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not is_unchanged(checkpoint, before)
