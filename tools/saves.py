"""Measures `save_pretrained` of a sharded model against gathering it, saving it, and converting that.

Four processes with FSDP2 on this machine, the ways in turns. Memory is beyond what a process held before; of the first
process, which gathers, and of the others. Bytes are those that go to the drive.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from filecmp import cmp
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import relayout
from relayout.storage.system import peak_nbytes, proc_nbytes

NUM_PROCESSES, TP = 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of a Llama with 2048 columns, about 0.1 GB each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = (Path(folder), options.layers, options.turns)
        torch.multiprocessing.start_processes(member, given, NUM_PROCESSES, start_method="spawn")
        show(rows([json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(NUM_PROCESSES)]))


def member(number: int, folder: Path, num_layers: int, num_turns: int) -> None:
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    joined(number, folder)
    model = sharded(num_layers)

    def save(target: Path) -> None:
        relayout.transformers.save_pretrained(model, target / "out", tp=TP)

    def gather(target: Path) -> None:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if number == 0:
            model.save_pretrained(target / "plain", state_dict=whole)
            del whole
            relayout.convert(target / "plain", target / "out", tp=TP)
        distributed.barrier()

    ways: dict[str, Callable[[Path], None]] = {"relayout.save": save, "gather, save, convert": gather}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(num_turns):
        for way, work in ways.items():
            target = folder / f"{way}-{turn}"
            target.mkdir(exist_ok=True)
            found[way].append(measured(work, target))
        if number == 0:
            one, other = (folder / f"{way}-{turn}" / "out" for way in ways)
            for file in one.glob("*.safetensors"):
                assert cmp(file, other / file.name, shallow=False), file
            for way in ways:
                shutil.rmtree(folder / f"{way}-{turn}")
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def joined(number: int, folder: Path) -> None:
    """Become one of the processes."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=number, world_size=NUM_PROCESSES)


def config_of(num_layers: int) -> Any:
    """A Llama of about 0.1 GB for each layer."""
    import torch
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        dtype=torch.bfloat16,
    )


def sharded(num_layers: int) -> Any:
    """A model with random weights, of which no process ever has all."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(num_layers))
    mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def measured(work: Callable[[Path], None], target: Path) -> dict[str, float]:
    from torch import distributed

    distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before, started, cpu = proc_nbytes("self/status", "VmRSS") or 0, time.perf_counter(), time.process_time()
    written = written_nbytes()
    work(target)
    os.sync()
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "peak_nbytes": peak_nbytes() - before,
        "written_nbytes": written_nbytes() - written,
    }


def written_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def rows(members: list[dict[str, list[dict[str, float]]]]) -> dict[str, dict[str, float]]:
    """Of each way: medians over the turns, of the slowest process, and of all; the most memory beside in any turn."""
    found = {}
    for way in members[0]:
        turns = list(zip(*(one[way] for one in members), strict=True))
        found[way] = {
            "wall_s": median(max(one["wall_s"] for one in turn) for turn in turns),
            "cpu_s": median(sum(one["cpu_s"] for one in turn) for turn in turns),
            "first_nbytes": max(turn[0]["peak_nbytes"] for turn in turns),
            "others_nbytes": max(one["peak_nbytes"] for turn in turns for one in turn[1:]),
            "written_nbytes": median(sum(one["written_nbytes"] for one in turn) for turn in turns),
        }
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    table = Table(*("way", "seconds", "CPU seconds", "first process, MiB", "others, MiB", "written, GB"))
    for way, row in found.items():
        memory = [f"{row[key] / 2**20:.0f}" for key in ("first_nbytes", "others_nbytes")]
        table.add_row(way, f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}", *memory, f"{row['written_nbytes'] / 1e9:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
