"""A process that loads by the real libcufile and the fake driver: `-m support.cufile_worker SRC MACHINE OUT NAME...`.

Loads the folder SRC with each backend NAME, one after the other, into memory that libcufile takes for a GPU's. Prints a
line of JSON after RESULT for each; OUT/NAME.safetensors has the tensors. `support.fake_driver` starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.fake_cuda import Lanes
from support.page_cache import drop

import relayout
from relayout.loader.backends import base, cuda, cufile

READ = {"cufile": 0, "registered": 0}
"""Bytes that cuFile has read, and the number of arenas that it has pinned."""


class LoadCounter(cufile.Bindings):
    """The real functions, counted."""

    def read(self, file: Any, target: torch.Tensor, offset: int, base: int) -> int:
        count = super().read(file, target, offset, base)
        READ["cufile"] += count
        return count

    def register(self, arena: torch.Tensor) -> None:
        super().register(arena)
        READ["registered"] += 1


def main() -> None:
    source, machine, out = map(Path, sys.argv[1:4])
    cufile.KERNEL_MODULES, cufile.UDEV = machine / "proc/modules", machine / "run/udev/data"
    cufile.Bindings = LoadCounter  # type: ignore[misc]
    torch.cuda.is_available = lambda: True
    with Lanes() as lanes:
        cuda._lanes_of = lambda device: lanes.make  # type: ignore[assignment, return-value]
        for name in ("gds", "cufile-compat"):
            base.REGISTRY[name] = None, base.REGISTRY[name][1]  # The memory is the host's for torch.
        for name in sys.argv[4:]:
            print("RESULT", json.dumps(load(source, out, name)), flush=True)


def load(source: Path, out: Path, name: str) -> dict[str, Any]:
    for file in source.glob("*.safetensors"):  # Bytes in the page cache go through pinned memory.
        drop(file)
    READ.update(cufile=0, registered=0)
    try:
        told = relayout.explain(source, 0, backend=name)
        tensors = relayout.load(source, 0, backend=name)
    except (relayout.PlanError, OSError) as error:
        return {"refused": str(error)}
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, out / f"{name}.safetensors")
    return {"backend": told.backend, "gds": told.gds, "reason": told.reason, "in_place": told.zero_copy_nbytes, **READ}


if __name__ == "__main__":
    main()
