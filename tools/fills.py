"""Measures ways to fill a sharded model from a checkpoint on a drive: relayout, and what PyTorch and transformers have.

Processes of FSDP2 on this machine, the ways in turns, each from nothing to a filled model, with a cold page cache.
Memory is the most that a process has at once, with its shards: of its own, and pages of files, which processes of one
machine share. Bytes are those that drives have read for all processes. Every shard is compared with those of the other
ways.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.drive import machine
from saves import config_of
from support.group_worker import forked, join

import relayout
from relayout.benchmark.machine import forget, total_nbytes
from relayout.storage.system import proc_nbytes

RESULTS = Path(__file__).parent / "results" / "fills.json"
TP = 8
MESHES = {"FSDP2": lambda count: (count,), "two replicas, FSDP2": lambda count: (2, count // 2)}
_SAMPLE_SECONDS = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of a Llama with 2048 columns, about 0.1 GB each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args()
    import torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama  # noqa: F401 (once, before the processes are forked)

    import relayout.loader.sharded

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        assert forked(lambda _: write(place, options.layers), 1) == [0]
        relayout.convert(place / "plain", place / "converted", tp=TP)
        nbytes = total_nbytes(place.glob("plain/*.safetensors"))
        for mesh in MESHES:
            for count in options.processes:
                turns = [{way: measured(place, count, mesh, way) for way in WAYS} for _ in range(options.turns)]
                rows += [row(count, mesh, way, nbytes, [turn[way] for turn in turns]) for way in WAYS]
                results = {"machine": machine(place), "nbytes": nbytes, "turns": options.turns, "rows": rows}
                options.out.write_text(json.dumps(results, indent=1) + "\n")


def write(place: Path, num_layers: int) -> None:
    """A checkpoint with random weights, of several files."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config_of(num_layers)).save_pretrained(place / "plain", max_shard_size="400MB")


def measured(place: Path, count: int, mesh: str, way: str) -> list[dict[str, float]]:
    """What each of new processes takes. Their shards are those of the first way that was measured."""
    meet = place / f"{count}-{mesh}"
    meet.mkdir(exist_ok=True)
    (meet / "rendezvous").unlink(missing_ok=True)
    forget(place.glob("*/*.safetensors"))
    assert forked(partial(member, place, meet, count, mesh, way), count) == [0] * count, f"{way} failed"
    return [json.loads((meet / f"{number}.json").read_text()) for number in range(count)]


def member(place: Path, meet: Path, count: int, mesh_name: str, way: str, number: int) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["LOCAL_WORLD_SIZE"] = str(count)  # As torchrun does.
    join(meet, number, count)
    shape = MESHES[mesh_name](count)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    distributed.barrier()
    with most_memory() as peaks:
        before, started = read_nbytes(), time.perf_counter()
        model = WAYS[way](place, mesh)
        seconds = time.perf_counter() - started
    own, mapped = peaks()
    found = {"seconds": seconds, "read_nbytes": read_nbytes() - before, "own_nbytes": own, "mapped_nbytes": mapped}
    (meet / f"{number}.json").write_text(json.dumps(found))
    digest, first = str(digest_of(model)), meet / f"digest-{number}"
    if not first.exists():
        first.write_text(digest)
    assert first.read_text() == digest, f"{way}: other shards"
    distributed.barrier()


@contextmanager
def most_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Sample what this process has in memory; yields what returns the most, beyond what it had before.

    That is memory of its own, and pages of files.
    """
    before, most, is_over = in_memory(), [0, 0], threading.Event()

    def sample() -> None:
        while not is_over.wait(_SAMPLE_SECONDS):
            most[:] = map(max, most, in_memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield lambda: (max(0, most[0] - before[0]), max(0, most[1] - before[1]))
    finally:
        is_over.set()
        sampler.join()


def in_memory() -> tuple[int, int]:
    anonymous, shared, files = (proc_nbytes("self/status", f"Rss{kind}") or 0 for kind in ("Anon", "Shmem", "File"))
    return anonymous + shared, files


def read_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def digest_of(model: Any) -> int:
    import torch
    import xxhash

    running = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        running.update(name.encode())
        running.update(parameter.to_local().detach().contiguous().view(-1).view(torch.uint8).numpy())
    return running.intdigest()


def shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def empty(place: Path, mesh: Any) -> Any:
    """The model in shards, with memory that has anything in it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / "plain"), dtype=torch.bfloat16)
    return shard(model, mesh).to_empty(device="cpu")


def by_relayout(kind: str, is_alone: bool, place: Path, mesh: Any) -> Any:
    from torch import distributed

    model = empty(place, mesh)
    relayout.load(place / kind, into=model, group=None if is_alone else distributed.group.WORLD)
    return model


def by_dcp(place: Path, mesh: Any) -> Any:
    from torch.distributed import checkpoint

    model = empty(place, mesh)
    checkpoint.load(model.state_dict(), storage_reader=checkpoint.HuggingFaceStorageReader(str(place / "plain")))
    return model


def by_from_pretrained(place: Path, mesh: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return shard(AutoModelForCausalLM.from_pretrained(place / "plain", dtype="auto"), mesh)


def by_broadcast(place: Path, mesh: Any) -> Any:
    from safetensors.torch import load_file
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model, whole = empty(place, mesh), {}
    if distributed.get_rank() == 0:
        for file in sorted(place.glob("plain/*.safetensors")):
            whole |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return model


WAYS: dict[str, Callable[[Path, Any], Any]] = {
    "`relayout.load`, group, plain": partial(by_relayout, "plain", False),
    "`relayout.load`, group, converted": partial(by_relayout, "converted", False),
    "`relayout.load`, each alone, plain": partial(by_relayout, "plain", True),
    "DCP's `HuggingFaceStorageReader`": by_dcp,
    "broadcast from the first process": by_broadcast,
    "`from_pretrained`, `fully_shard`": by_from_pretrained,
}


def row(count: int, mesh: str, way: str, nbytes: int, turns: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of the turns."""

    def mib(key: str, members: slice) -> int:
        return round(median(max(one[key] for one in turn[members]) for turn in turns) / 2**20)

    return {
        "processes": count,
        "mesh": mesh,
        "way": way,
        "seconds": round(median(max(one["seconds"] for one in turn) for turn in turns), 2),
        "read": round(median(sum(one["read_nbytes"] for one in turn) for turn in turns) / nbytes, 2),
        "first_mib": mib("own_nbytes", slice(1)),
        "others_mib": mib("own_nbytes", slice(1, None)),
        "mapped_mib": mib("mapped_nbytes", slice(None)),
    }


if __name__ == "__main__":
    main()
