"""Checkpoints of more files than a process may hold open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import relayout
from relayout.errors import FormatError
from relayout.loader.backends import files as files_module
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.sources.rank import StoredFile
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Access

NUM_FILES = 150
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint of many files, as the stock package writes them."""
    folder, places = tmp_path_factory.mktemp("many") / "model", {}
    folder.mkdir()
    for number in range(NUM_FILES):
        name = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        tensors = {f"t{number}.{part}": np.arange(number, number + 900, dtype=np.float32) + part for part in range(3)}
        save_file(tensors, folder / name)
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_a_checkpoint_of_more_files_than_may_be_open_is_loaded(many: Path, tmp_path: Path) -> None:
    script = """
import resource, sys, numpy, relayout
from pathlib import Path
from safetensors.numpy import load_file
source, work = Path(sys.argv[1]), Path(sys.argv[2])
relayout.load(source)  # What is imported late is imported now.
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
expected = {}
for file in source.glob("*.safetensors"):
    expected |= load_file(file)
into = {name: tensor.clone() * 0 for name, tensor in relayout.load(source).items()}
relayout.load(source, into=into)
calls = [
    relayout.load(source),
    relayout.load(source, backend="buffered"),
    {name: mapped.get_tensor(name) for mapped in [relayout.open(source).__enter__()] for name in expected},
    dict(relayout.iter_load(source)),
    into,
    relayout.load(source, names="t1**"),
]
opened = relayout.safe_open(source).__enter__()
calls.append({name: opened.get_tensor(name) for name in expected})
relayout.convert(source, work / "out", tp=1)
calls.append(relayout.load(work / "out", 0))
for found in calls:
    print(len(found), all(numpy.array_equal(found[name].numpy(), expected[name]) for name in found))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(many), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    some = sum(f"t{number}".startswith("t1") for number in range(NUM_FILES)) * 3
    assert done.stdout.splitlines() == [f"{3 * NUM_FILES} True"] * 5 + [f"{some} True"] + [f"{3 * NUM_FILES} True"] * 2


def expected_of(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def opened(path: Path) -> dict[str, object]:
    with relayout.open(path) as checkpoint:
        return {name: checkpoint.get_tensor(name).clone() for name in checkpoint.offset_keys()}


LOADS: dict[str, Callable[[Path], dict[str, object]]] = {
    "auto": relayout.load,
    "buffered": lambda path: relayout.load(path, backend="buffered"),
    "direct": lambda path: relayout.load(path, backend="direct"),
    "open": opened,
    "iter_load": lambda path: dict(relayout.iter_load(path)),
    "sliced": lambda path: relayout.load(path, 0, tp=1, threads=8),
}


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("how", LOADS)
def test_threads_share_the_few_files_that_may_be_open(
    many: Path, how: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_max_open", lambda: most)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # Runs are copied from mapped pages.
    expected, found = expected_of(many), LOADS[how](many)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(np.asarray(found[name]), expected[name]) for name in expected)


@pytest.mark.parametrize("how", LOADS)
def test_a_converted_folder_is_proven_when_its_files_are_opened_again(
    llama: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayout.convert(llama, tmp_path / "out", tp=1, max_part_nbytes=20_000)
    expected = relayout.load(llama)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    monkeypatch.setattr(files_module, "_max_open", lambda: 2)
    found = LOADS[how](tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].float(), expected[name].float()) for name in expected)


def test_a_file_that_was_replaced_while_it_was_closed_is_not_mixed_with_others(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []
    for file in sorted(many.glob("*.safetensors"))[:5]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
        status = LocalStore(tmp_path).stat(file.name)
        assert status is not None
        stored.append(StoredFile(LocalStore(tmp_path), file.name, status.nbytes, version=status.version))
    monkeypatch.setattr(files_module, "_max_open", lambda: 2)
    descriptors = Path("/proc/self/fd")
    num_open = len(list(descriptors.iterdir())) if descriptors.exists() else None
    with ReadableFiles(stored, Access.BUFFERED) as files:
        if num_open is not None:
            assert len(list(descriptors.iterdir())) == num_open + 2
        view = memoryview(bytearray(stored[0].nbytes))
        files.read(0, 0, view)
        assert view == (tmp_path / stored[0].name).read_bytes()
        os.utime(tmp_path / stored[1].name, ns=(0, 0))
        with pytest.raises(FormatError, match="has changed since it was last checked"):
            files.read(1, 0, view)
        (tmp_path / stored[2].name).unlink()
        with pytest.raises(FormatError, match="is missing"):
            files.read(2, 0, view)
        files.read(0, 0, view)
    if num_open is not None:
        assert len(list(descriptors.iterdir())) == num_open
