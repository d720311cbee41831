"""How threads, buffers and request sizes change a load to the device: the step `sweep`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench.drive import total_nbytes

import relayout
from gpu.loads import converted_of, measure, prepare
from gpu.results import Arguments
from relayout.errors import PlanError
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import LOCAL_COST

MIB = 2**20
THREADS = (8, 16, 4, 32, 2, 1)
MEMORY_MIB = (64, 256, 32, 512)
REQUEST_MIB = (8, 4, 16, 2, 32)


@dataclass(frozen=True)
class Setting:
    """What a load may use; the defaults are those of a load with eight processors."""

    threads: int = 8
    memory_mib: int = 128
    request_mib: int = 8
    """The largest request."""

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.memory_mib} MiB, requests {self.request_mib} MiB"


def main() -> None:
    arguments = Arguments.parse()
    results, device = arguments.results, arguments.device
    folder = converted_of(arguments.work, arguments.num_layers, 1)
    nbytes = total_nbytes(folder)
    if device.startswith("cuda"):
        torch.empty(1, device=device)
    wanted = ["pinned", "gds"] if device.startswith("cuda") else ["direct"]
    backends = [backend for backend in wanted if works(folder, device, backend)]
    first = Setting()
    settings = [replace(first, threads=threads) for threads in THREADS]
    settings += [replace(first, memory_mib=memory) for memory in MEMORY_MIB]
    settings += [replace(first, memory_mib=256, request_mib=request) for request in REQUEST_MIB]
    settings += [Setting(16, memory, request) for memory, request in product((256, 512), (4, 8, 16))]

    def once(setting: Setting, backend: str, *, cold: bool) -> dict[str, Any]:
        options = {"device": device, "backend": backend, "threads": setting.threads, "memory": setting.memory_mib * MIB}
        prepare([folder], cold=cold)
        with mock.patch.object(LocalStore, "cost", replace(LOCAL_COST, request_nbytes=setting.request_mib * MIB)):
            return measure(partial(relayout.load, folder, 0, **options), device, nbytes)  # type: ignore[arg-type]

    relayout.load(folder, 0, device=device)  # What is slow only once, such as the first pinned memory, is not measured.
    for turn, cold, backend in product((0, 1), (True, False), backends):
        for setting in dict.fromkeys(settings):
            key = f"{backend}, {'cold' if cold else 'warm'}, {setting}, turn {turn}"
            results.measure(key, partial(once, setting, backend, cold=cold))


def works(folder: Path, device: str, backend: str) -> bool:
    """Whether a backend loads here."""
    try:
        relayout.explain(folder, 0, device=device, backend=backend)
    except PlanError as error:
        print(error, flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
