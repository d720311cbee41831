"""One peer loads one rank once, in this process: started by tools/bench, told to go through stdin, answers in JSON."""

from __future__ import annotations

import json
import mmap
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

NUM_THREADS = 8


@dataclass(frozen=True)
class Job:
    """What to load."""

    peer: str
    source: str
    """The plain checkpoint."""
    converted: str
    """The same, converted for `tp` ranks."""
    tp: int
    rank: int

    @property
    def shards(self) -> list[Path]:
        """The plain checkpoint's files."""
        return sorted(Path(self.source).glob("*.safetensors"))

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[int, slice] | None:
        """Axis and elements that the rank holds of a Llama tensor; None: all of it."""
        if self.tp == 1 or "norm" in name:
            return None
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        size = shape[axis] // self.tp
        return axis, slice(self.rank * size, (self.rank + 1) * size)

    def narrow(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor, in memory of its own."""
        cut = self.cut(name, tuple(tensor.shape))
        if cut is not None:
            axis, part = cut
            tensor = tensor.narrow(axis, part.start, part.stop - part.start)
        return tensor.clone(memory_format=torch.contiguous_format)


Tensors = dict[str, torch.Tensor]


def relayout(job: Job) -> Tensors:
    """relayout.load of the converted folder."""
    from relayout.loader import load

    return load(job.converted, job.rank)


def safetensors_get_slice(job: Job) -> Tensors:
    """safe_open and get_slice, each slice cloned so that its bytes are in memory."""
    return dict(_get_slices(job))


def safetensors_load_file(job: Job) -> Tensors:
    """load_file, then narrow."""
    return {name: job.narrow(name, tensor) for shard in job.shards for name, tensor in load_file(shard).items()}


def threaded_clone(job: Job) -> Tensors:
    """load_file and narrow, shards in a pool of threads (as vLLM's multi-threaded iterator does)."""

    def one(shard: Path) -> Tensors:
        return {name: job.narrow(name, tensor) for name, tensor in load_file(shard).items()}

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return {name: tensor for tensors in pool.map(one, job.shards) for name, tensor in tensors.items()}


def map_populate(job: Job) -> Tensors:
    """Shards brought into the page cache by MAP_POPULATE, several at once, then get_slice (as SGLang's prefetch)."""

    def one(shard: Path) -> None:
        with shard.open("rb") as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ).close()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(one, job.shards))
    return dict(_get_slices(job))


def fastsafetensors(job: Job) -> Tensors:
    """fastsafetensors without GPUDirect Storage, on the CPU."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(shard) for shard in job.shards], nogds=True, device="cpu") as opened:
        return {name: job.narrow(name, opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118


def runai_streamer(job: Job) -> Tensors:
    """Run:ai model streamer, its default concurrency."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(shard) for shard in job.shards])
        return {name: job.narrow(name, tensor) for name, tensor in streamer.get_tensors()}


PEERS: dict[str, Callable[[Job], Tensors]] = {
    peer.__name__: peer
    for peer in (
        relayout,
        safetensors_get_slice,
        safetensors_load_file,
        threaded_clone,
        map_populate,
        fastsafetensors,
        runai_streamer,
    )
}


def _get_slices(job: Job) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in job.shards:
        with safe_open(shard, framework="pt") as stock:
            for name in stock.keys():  # noqa: SIM118 (it is no mapping)
                part = stock.get_slice(name)
                cut = job.cut(name, tuple(part.get_shape()))
                if cut is None:
                    tensor = part[:]
                else:
                    axis, mine = cut
                    tensor = part[:, mine] if axis else part[mine]
                yield name, tensor.clone(memory_format=torch.contiguous_format)


def _import_peer(peer: str) -> None:
    """Import what the peer needs, so that no import is timed."""
    modules = {
        "relayout": ["relayout.loader", "relayout.folder", "relayout.strided"],
        "fastsafetensors": ["fastsafetensors"],
        "runai_streamer": ["runai_model_streamer"],
    }
    for module in modules.get(peer, []):
        __import__(module)


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def _drive_nbytes() -> int:
    """Bytes that this process has had read from drives."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _expected_digests(job: Job) -> dict[str, str]:
    import relayout.folder

    folder = Path(job.converted)
    table = relayout.folder.read_table(folder, relayout.folder.read_manifest(folder), job.rank)
    return dict(zip(table.names, table.digests, strict=True))


def main() -> None:
    """See the module."""
    job = Job(**json.loads(sys.argv[1]))
    _import_peer(job.peer)
    expected = _expected_digests(job)
    peer = PEERS[job.peer]
    print("ready", flush=True)
    sys.stdin.readline()
    rss, drive, cpu = _status("VmRSS"), _drive_nbytes(), time.process_time()
    started = time.monotonic()
    tensors = peer(job)
    ended = time.monotonic()
    answer = {
        "started": started,
        "ended": ended,
        "cpu_seconds": time.process_time() - cpu,
        "peak_nbytes": _status("VmHWM") - rss,
        "drive_nbytes": _drive_nbytes() - drive,
        "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    }
    found = {
        name: xxhash.xxh3_128_hexdigest(tensor.flatten().view(torch.uint8).numpy()) for name, tensor in tensors.items()
    }
    answer["equal"] = found == expected
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
