"""Makes a small real checkpoint, converts, verifies and loads it, and proves each rank against stock safetensors."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

import relayout
from relayout.benchmark.machine import cpu_seconds, describe, forget
from relayout.benchmark.verdict import Measurement, RankLoads, Timing, warnings_of

TP = 4
CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=32000,
    tie_word_embeddings=False,
)


def main() -> int:
    argparse.ArgumentParser(prog="demo", description=__doc__).parse_args()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="relayout-demo-", dir=os.environ.get("RELAYOUT_DEMO_DIR")) as folder:
        source, converted = Path(folder) / "llama", Path(folder) / f"llama-tp{TP}"
        machine = describe(Path(folder))
        console.print(f"Works in {folder}, deleted at the end; RELAYOUT_DEMO_DIR says where. Takes some 20 s.")
        console.print("[bold]1.[/] make a Llama of random weights with transformers: the folder llama")
        transformers.logging.disable_progress_bar()
        AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(source, max_shard_size="200MB")
        model = relayout.inspect(source)
        console.print(f"   {model.num_tensors} tensors, {decimal(model.nbytes)} in {model.num_files} files")

        console.print(f"[bold]2.[/] relayout convert llama --tp {TP}")
        summary = relayout.convert(source, converted, tp=TP)
        console.print(
            f"   {summary.num_files} rank files, {decimal(summary.written_nbytes)} in {summary.seconds:.2f} s"
        )

        console.print(f"[bold]3.[/] relayout verify llama-tp{TP} --source llama")
        report = relayout.verify(converted, source=source)
        console.print(f"   {report.num_tensors} slices compared, {len(report.differences)} differences")

        console.print(
            "[bold]4.[/] load each rank from a cold cache: with relayout.load, and cut from the source by safetensors"
        )
        relayout.load(converted, 0)  # So that no import is timed.
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("rank", "bytes", "relayout.load", "safetensors get_slice", "faster", "equal"):
            table.add_column(heading, justify="right")
        all_equal = report.ok
        ours, stock = list[Measurement](), list[Measurement]()
        for rank in range(TP):
            mine, measured = timed(converted.iterdir(), partial(relayout.load, converted, rank))
            ours.append(measured)
            theirs, measured = timed(source.iterdir(), partial(reference_slices, source, rank))
            stock.append(measured)
            equal = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
            all_equal &= equal
            table.add_row(
                str(rank),
                decimal(ours[-1].nbytes),
                f"{ours[-1].seconds:.3f} s",
                f"{stock[-1].seconds:.3f} s",
                f"{stock[-1].seconds / ours[-1].seconds:.1f}x",
                "yes" if equal else "[red]NO[/]",
            )
        table.add_section()
        totals = [sum(one.seconds for one in runs) for runs in (ours, stock)]
        times = [f"{seconds:.3f} s" for seconds in totals]
        table.add_row("all", decimal(report.nbytes), *times, f"{totals[1] / totals[0]:.1f}x", "")
        console.print(table)
        timings = [("relayout.load", "relayout", ours), ("safetensors get_slice", "safetensors", stock)]
        runs = tuple(Timing(title, title, family, tuple(each), None) for title, family, each in timings)
        for warning in warnings_of(machine, [RankLoads("ranks one after another", 1, "cold", runs, None)]):
            console.print(f"[yellow]warning:[/] {warning}")
    console.print("[bold green]every rank is equal, bit for bit[/]" if all_equal else "[bold red]a rank differs[/]")
    console.print("Next: . .venv/bin/activate; relayout inspect YOUR_MODEL (README.md, Quick start)")
    return 0 if all_equal else 1


def timed(
    files: Iterable[Path], load: Callable[[], dict[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], Measurement]:
    """Load from a cold page cache; the tensors, and what that took."""
    forget(files)
    (busy, cpus), own, started = cpu_seconds(), time.process_time(), time.perf_counter()
    tensors = load()
    seconds, own, busy = time.perf_counter() - started, time.process_time() - own, cpu_seconds()[0] - busy
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    others = min(1.0, max(0.0, busy - own) / (seconds * cpus))
    return tensors, Measurement(seconds, own, nbytes, 0, 0, others, ())


def reference_slices(source: Path, rank: int) -> dict[str, torch.Tensor]:
    """A rank's slices by the stock package, every byte brought into memory."""
    slices = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stock:
            for name in stock.keys():  # noqa: SIM118 (it is no mapping)
                part = stock.get_slice(name)
                if "norm" in name:
                    slices[name] = part[:].clone()
                    continue
                axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                size = part.get_shape()[axis] // TP
                mine = slice(rank * size, (rank + 1) * size)
                slices[name] = (part[:, mine] if axis else part[mine]).clone()
    return slices


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
