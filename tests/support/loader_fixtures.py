"""What the tests of the loader share: checkpoints, cold files, what may not be left behind, children, a fake device."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from examples import own_backend
from safetensors import safe_open
from safetensors.torch import save_file
from support import prestarted
from support.fake_cuda import FakeCuFile, Lanes
from support.models import as_integers
from support.page_cache import drop
from support.patience import PATIENCE

import relayout
from relayout.loader.backends import base
from relayout.loader.backends.base import REGISTRY
from relayout.loader.backends.cuda import DeviceBackend
from relayout.loader.sources.rank import StoredFile

Array = npt.NDArray[Any]

BLOCK = 4096
MIB = 2**20

LITTLE = 2 * MIB
"""The fewest bytes in flight that may be asked for: the tensors of `converted` then come in many parts."""
IN_FLIGHT = 8 * MIB
"""A quarter of `wide`."""

# Where processors are few, torch's own threads mostly wait for each other.
torch.set_num_threads(1)
HOST = ("auto", "direct", "buffered")
DEVICE = ("pinned", "gds")
REGISTRY["toy"] = "cpu", own_backend.offer  # All that is needed for it to be taken as any other.
OWN = (*HOST, *DEVICE)
"""The package's own: of others, an error's frames keep what they refer to."""
WAYS = (*OWN, "toy")
by_two_ways = pytest.mark.parametrize("way", ["auto", "gds"], indirect=True)
"""For options, which no backend sees: by one to host memory, and by the one to a device that has all its branches."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What to give as `backend`; for the ways to a device, a fake one takes the place of what would be chosen."""
    if request.param not in DEVICE:
        yield request.param
    else:
        yield from fake_device(monkeypatch, request.param)


def fake_device(
    monkeypatch: pytest.MonkeyPatch, name: str, lanes: Lanes | None = None, cufile: FakeCuFile | None = None
) -> Iterator[str]:
    """Let loads go to the fake device; yields what to give as `backend`.

    Files lie in the page cache in part, so that each of the two ways that `gds` has is taken.
    """
    with lanes or Lanes() as lanes:
        cufile = cufile or FakeCuFile() if name == "gds" else None

        def backend_for(options: base.Options, files: Sequence[StoredFile]) -> DeviceBackend:
            for path in filter(None, (file.path for file in files)):
                with suppress(FileNotFoundError):
                    cache_in_part(path)
            # As `offer_gds` has it.
            is_shown = not any(file.is_verified for file in options.verified_files(files))
            return DeviceBackend("cpu", lanes.make, cufile if is_shown else None)

        monkeypatch.setattr(DeviceBackend, "max_buffer_nbytes", 8 * MIB)
        monkeypatch.setattr(base.Options, "backend_for", backend_for)
        yield "auto"
        assert (lanes.in_flight, lanes.held) == (0, 0)
        if cufile is not None:
            cufile.assert_restored()


def write_model(folder: Path, sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], seed: int = 0) -> Path:
    """A checkpoint in one file, of random bytes, that the plan for Llama cuts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(dtype, shape, generator) for name, (dtype, shape) in sizes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator).bool()
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def mlp_model(folder: Path, num_layers: int = 4, width: int = 1024, seed: int = 0) -> Path:
    """Layers of an MLP whose slices fill whole blocks, norms of odd sizes, an empty tensor, and equal ones."""
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for layer in range(num_layers):
        start = f"model.layers.{layer}"
        sizes |= {
            f"{start}.mlp.gate_proj.weight": (torch.bfloat16, (width, 256)),
            f"{start}.mlp.up_proj.weight": (torch.bfloat16, (width, 257)),
            f"{start}.mlp.down_proj.weight": (torch.float32, (65 + layer, width)),
            f"{start}.input_layernorm.weight": (torch.bfloat16, (101 + 2 * layer,)),
            f"{start}.post_attention_layernorm.weight": (torch.uint8, (3 + layer,)),
        }
    sizes["model.norm.weight"] = (torch.float32, (0,))
    folder = write_model(folder, sizes, seed)
    whole = {**whole_tensors(folder)}
    # Tied: the same bytes under two names.
    whole["model.embed_tokens.weight"] = whole["lm_head.weight"] = torch.arange(200 * 33).reshape(200, 33)
    save_file({name: tensor.clone() for name, tensor in whole.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An `mlp_model`."""
    return mlp_model(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="session")
def converted(model: Path) -> Path:
    """The same, converted for two ranks, of several files each."""
    relayout.convert(model, model.parent / "out", tp=2, max_part_nbytes=MIB)
    return model.parent / "out"


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted: tensors of about 2 MiB, all of whole blocks, so that a request brings nothing but what is yielded."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {f"t.{n:02}": (torch.uint8, (2 * MIB // 4096 + n % 5 - 2, 4096)) for n in range(16)}
    relayout.convert(write_model(folder / "source", sizes), folder / "out")
    return folder / "out"


def whole_tensors(folder: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """Every tensor of a folder's files, by the stock package, in the order of the files' bytes."""
    found = {}
    for file in sorted(folder.glob(pattern)):
        with safe_open(file, framework="pt") as stock:
            found |= {name: stock.get_tensor(name) for name in stock.offset_keys()}
    assert found
    return found


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor | Array]) -> None:
    """The same names and, bit by bit, the same tensors."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        other = expected[name]
        if isinstance(other, torch.Tensor):
            assert tensor.dtype == other.dtype, name
            other = as_integers(other)
        mine = as_integers(tensor.detach())
        if not np.array_equal(mine, other):
            np.testing.assert_array_equal(mine, other, err_msg=name)  # It says where.


def extents(file: Path) -> dict[str, tuple[int, int]]:
    """Where a file's tensors begin and end, in file order, read out of the header by hand."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {name: (8 + length + one["data_offsets"][0], 8 + length + one["data_offsets"][1]) for name, one in ordered}


def forget(*files: Path) -> None:
    """Have none of these files in the page cache."""
    for file in files:
        drop(file)


def cache_in_part(file: Path, stretch: int = 3 * MIB // 2) -> None:
    """Leave every other stretch of a file in the page cache, from the second on."""
    forget(file)
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # No more than what is read here.
    for offset in range(stretch, os.fstat(fd).st_size, 2 * stretch):
        os.pread(fd, stretch, offset)
    os.close(fd)


def open_files() -> dict[str, str]:
    """This process's descriptors and what they are of; sockets aside, which clients of stores close when they like."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # That of the list itself.
            found[fd] = str(Path("/proc/self/fd", fd).readlink())
    return {fd: what for fd, what in found.items() if not what.startswith("socket:")}


def loader_threads() -> list[str]:
    """The threads of the loader, by name."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("relayout")]


@dataclass(frozen=True)
class Holdings:
    """What this process holds that a load must give back."""

    descriptors: int
    threads: int
    mapped_files: int
    """Mappings of rank files."""
    large: int
    """Bytes in memory of anonymous mappings, heaps and stacks aside, that are at least as large as was asked for."""


_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) *(.*)\n(?:[A-Z].*\n)*?Rss: +(\d+) kB$", re.MULTILINE)
"""Of smaps: where a mapping begins and ends, inode, file, and how much of it is in memory."""


def num_threads() -> int:
    """As the kernel counts them."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def other_threads() -> int:
    """How many threads are not Python's: the fewest in a while, as the kernel lists one for a while that has ended."""
    end, fewest = time.monotonic() + 0.2, num_threads()
    while time.monotonic() < end:
        fewest = min(fewest, num_threads() - threading.active_count())
        time.sleep(0.01)
    return fewest


def holdings(large: int, others: int) -> Holdings:
    """Count them, when the kernel does not list threads any more that Python has joined; `others` are not Python's."""
    end = time.monotonic() + PATIENCE
    while num_threads() > threading.active_count() + others and time.monotonic() < end:
        time.sleep(0.0005)
    mapped_files = total = 0
    for start, end_of, inode, name, kib in _MAPPING.findall(Path("/proc/self/smaps").read_text()):
        length = int(end_of, 16) - int(start, 16)
        mapped_files += "model-rank" in name
        if inode == "0" and not name and length >= large:
            total += int(kib) * 1024
    return Holdings(len(open_files()), num_threads(), mapped_files, total)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No thread and no open file more than there was."""
    before = open_files()
    assert loader_threads() == []
    yield
    assert loader_threads() == []
    assert open_files().items() <= before.items()


def child(
    script: str,
    *arguments: object,
    imports: str = prestarted.LOADER,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run Python code in a process of its own, which has imported some modules; what it prints, as JSON."""
    done = prestarted.run(*arguments, script=script, imports=imports, env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MEASURE = """
import json, os, sys
from pathlib import Path
import torch, relayout

def drive_nbytes():
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])

def forget(folder):
    for file in Path(folder).iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
"""
"""The start of a script that measures what it reads from the drive."""


def skip_unless_drives_are_counted(nbytes: int) -> None:
    """Skip where all of a load came from nowhere, as far as the system tells: from a file system in memory, say."""
    if not nbytes:
        pytest.skip("the system does not count what is read from this file system")


def readahead(path: Path) -> int:
    """Bytes that the kernel may read ahead of who reads through the page cache, for files at `path`."""
    device = os.stat(path).st_dev  # noqa: PTH116
    drive = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for place in (drive, drive.parent):  # A partition's queue is its drive's.
        with suppress(OSError):
            return int((place / "queue" / "read_ahead_kb").read_text()) * 1024
    return 128 * 1024
