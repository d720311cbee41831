"""Four processes that load different ranks of plain checkpoints as one group, and what each of them saw.

`main` with `FOLDER` in sys.argv: FOLDER has a checkpoint of each of `NAMES`, `wide`, and `foreign`, which differs from
`wide` in its values. They are put into a toy store, too: see `group_worker`.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from support.group_worker import NUM_MEMBERS, Seen, failure, forked, join
from support.page_cache import drop
from support.toy_store import shelf

from relayout.core.extents import BLOCK
from relayout.storage.stores import REGISTRY

NAMES = ("llama", "qwen3_moe", "phi3", "qwen2_tied")
"""Families: dense; experts; fused query, key and value; one tensor for embedding and head."""
RANGE_NBYTES = 16 * BLOCK


def main() -> None:
    folder = Path(sys.argv[1])
    REGISTRY["toy"] = "support.toy_store"
    for file in folder.glob("*/*.*"):
        shelf("group").write(f"{file.parent.name}/{file.name}", file.read_bytes())
    codes = forked(partial(_member, folder))
    assert codes == [0, 0, 0, -signal.SIGKILL], codes


def _member(folder: Path, number: int) -> None:
    import torch
    import torch.distributed as dist

    from relayout.loader.api import iter_load, load
    from relayout.loader.group import exchange
    from relayout.loader.group.plan import plan_exchange

    join(folder, number)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plan_small = partial(plan_exchange, most_nbytes=RANGE_NBYTES)
    exchange.plan_exchange = plan_small  # type: ignore[assignment]
    seen, wide = Seen(folder, number), str(folder / "wide")
    case = seen.case

    def together(path: str, rank: int = number, tp: int = NUM_MEMBERS, **options: Any) -> dict[str, Any]:
        return load(path, rank, tp=tp, **{"group": dist.group.WORLD, **options})

    def stream(path: str, rank: int, **options: Any) -> dict[str, Any]:
        return dict(iter_load(path, rank, **options))

    def failing(done: int, total: int) -> None:
        if done > total / 4:
            raise failure()

    for name in NAMES:
        case(name, together, str(folder / name))
        case(f"{name}, of a store", together, f"toy://group/{name}")
        case(f"{name}, two", together, str(folder / name), number % 2, 2, group=pairs[number // 2])
    done: list[tuple[int, int]] = []
    case("wide", together, "toy://group/wide", progress=lambda *told: done.append(told))
    seen.cases["progress"] = done
    case("some", together, "toy://group/wide", names=("**.0.mlp.**", "model.norm.weight"))
    case("ranks repeat", together, "toy://group/wide", number % 2, 2)
    case("the same rank", together, "toy://group/wide", 1, 2)
    case("all of it", together, "toy://group/wide", 0, 1)
    case("some ranks", together, "toy://group/wide", 2 * number, 8)
    case("direct", together, wide, backend="direct")
    exchange.plan_exchange = plan_exchange
    file = folder / "wide" / "model.safetensors"
    drop(file)
    dist.barrier()
    before = drive_nbytes()
    case("cold", together, wide)
    seen.cases["cold"]["drive"] = drive_nbytes() - before
    exchange.plan_exchange = plan_small  # type: ignore[assignment]

    case("another degree", together, wide, number % 2, 2 if number == 1 else 4)
    case("another checkpoint", together, str(folder / "foreign") if number == 2 else wide)
    case("a converted one", together, str(folder / "out") if number == 2 else wide, number % 2, 2)
    case("other names", together, wide, names="**.norm.weight" if number == 2 else None)
    case("no such rank", together, wide, 7 if number == 1 else number)
    case("verify", together, wide, verify=True)
    case("meta", together, wide, device="meta")
    case("into", together, wide, into={"model.norm.weight": torch.empty(0)})
    case("streamed", stream, wide, number, tp=NUM_MEMBERS, group=dist.group.WORLD)
    # Behind the header, the former are read by each member for itself, the latter to be exchanged.
    for kind in ("gate_proj", "down_proj"):
        seen.fault_of(2, after=2, times=None, error=failure)
        case(f"{kind} fails", together, "toy://group/wide", names=f"**.{kind}.weight")
    case("progress fails", together, "toy://group/wide", progress=failing if number == 1 else None)
    case("bad progress", together, "toy://group/wide", progress="a bar" if number == 2 else None)
    case("afterwards", together, "toy://group/wide")
    seen.fault_of(3, after=3, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
    case("killed", together, "toy://group/wide", names="**.down_proj.weight")


def drive_nbytes() -> int:
    """Bytes that this process has had drives read; 0 where the kernel does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
