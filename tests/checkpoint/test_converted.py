"""What the records of a converted checkpoint prove of its files, before any weights are read."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.bits import flip, pattern
from support.conversions import Conversions
from support.holes import MIB, never_write

import relayout
from relayout.checkpoint.converted import (
    VerifiedFile,
    check_intact,
    find_signature,
    names_of_index,
    names_of_output,
    read_manifest,
)
from relayout.errors import FormatError, PlanError
from relayout.format.index import CHUNKS_NAME, DIGESTS_NAME, MANIFEST_NAME, SIGNATURE_NAME
from relayout.storage.stores import find_input


@pytest.fixture
def folder(conversions: Conversions, tmp_path: Path) -> Path:
    return shutil.copytree(conversions.at("llama", 2), tmp_path / "out")


def weights_of(folder: Path) -> list[str]:
    return [file.name for file in read_manifest(find_input(folder)).files]


def refuses(folder: Path, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        check_intact(find_input(folder))
    assert name in str(caught.value)


def test_a_conversion_is_intact_only_with_all_files_in_their_lengths(folder: Path) -> None:
    check_intact(find_input(folder))
    names = [*names_of_index(read_manifest(find_input(folder))), *weights_of(folder)]
    assert len(names) == 9
    for name in names:
        blob = (folder / name).read_bytes()
        (folder / name).unlink()
        refuses(folder, name)
        for other in (blob[:-2], blob + b" }"):
            (folder / name).write_bytes(other)
            refuses(folder, name)
        (folder / name).write_bytes(blob)
    check_intact(find_input(folder))


def test_small_files_are_intact_only_with_their_digests(folder: Path) -> None:
    names = [
        name for name in names_of_index(read_manifest(find_input(folder))) if name not in (CHUNKS_NAME, DIGESTS_NAME)
    ]
    assert len(names) == 5
    for name in names:
        place = (folder / name).stat().st_size // 2
        flip(folder / name, place)
        refuses(folder, name)
        flip(folder / name, place)
    check_intact(find_input(folder))


def test_a_weight_file_that_names_another_content_is_not_the_one_of_the_manifest(folder: Path) -> None:
    """As where files of two conversions were mixed up."""
    file = read_manifest(find_input(folder)).files[1]
    blob = (folder / file.name).read_bytes()
    assert blob.count(file.tensors_digest.encode()) == 1
    (folder / file.name).write_bytes(blob.replace(file.tensors_digest.encode(), file.tensors_digest[::-1].encode()))
    with pytest.raises(FormatError, match="tensors_digest in its header differs"):
        check_intact(find_input(folder))


def test_a_weight_file_whose_end_was_never_written_is_refused(folder: Path) -> None:
    for name in weights_of(folder):
        blob = (folder / name).read_bytes()
        never_write(folder / name, len(blob) // 2)
        with pytest.raises(FormatError, match=rf"{name}: bytes \d+ to {len(blob)} were never written: an unfinished"):
            check_intact(find_input(folder))
        (folder / name).write_bytes(blob)
    check_intact(find_input(folder))


def test_zeros_may_be_a_hole_and_only_chunks_with_holes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp --sparse=always`, and file systems that compress, store zeros."""
    (tmp_path / "model").mkdir()
    weights = {"a": pattern(8 * MIB), "zeros": np.zeros(4 * MIB, np.uint8)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    relayout.convert(tmp_path / "model", tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.safetensors")
    stored = file.read_bytes()
    start = file.stat().st_size - 4 * MIB
    assert not any(stored[start:])
    reads: list[int] = []
    read = VerifiedFile.read
    monkeypatch.setattr(
        VerifiedFile, "read", lambda self, offset, view: (reads.append(offset), read(self, offset, view))[1]
    )
    check_intact(find_input(tmp_path / "out"))
    assert not reads
    never_write(file, start)
    check_intact(find_input(tmp_path / "out"))
    assert reads
    assert min(reads) >= start


@pytest.mark.parametrize("shift", [-8, 8])
def test_a_data_section_that_begins_elsewhere_is_told(folder: Path, shift: int) -> None:
    path = folder / weights_of(folder)[0]
    blob = path.read_bytes()
    path.write_bytes((int.from_bytes(blob[:8], "little") + shift).to_bytes(8, "little") + blob[8:])
    with pytest.raises(FormatError, match="its data section starts at"):
        check_intact(find_input(folder))


def test_a_signature_of_another_manifest_is_a_strangers_file(folder: Path, conversions: Conversions) -> None:
    store, blob = find_input(folder), (folder / MANIFEST_NAME).read_bytes()
    for content, is_ours in ((blob, True), (b"another", False)):
        payload = b64encode(json.dumps({"digest": sha256(content).hexdigest()}).encode()).decode()
        signature = json.dumps({"dsseEnvelope": {"payload": payload}}).encode()
        (folder / SIGNATURE_NAME).write_bytes(signature)
        assert find_signature(store, blob) == (signature if is_ours else None)
        assert (SIGNATURE_NAME in names_of_output(store)) is is_ours
    with pytest.raises(PlanError, match=f"holds files that relayout did not write.*{SIGNATURE_NAME}"):
        relayout.convert(conversions.source("llama"), folder, tp=2, force=True)
    assert (folder / SIGNATURE_NAME).read_bytes() == signature
