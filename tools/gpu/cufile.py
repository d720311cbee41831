"""Loads by cuFile with the product's own backends, and the facts of a machine on which they depend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import relayout
from gpu.loads import prepare, timed
from relayout.errors import PlanError
from relayout.loader.backends import cufile
from relayout.storage.system import filesystem_of


def facts(folder: Path) -> dict[str, Any]:
    """Return what decides whether cuFile, and GPUDirect Storage, can be used here."""
    device = folder.stat().st_dev
    entry = cufile.UDEV / f"b{os.major(device)}:{os.minor(device)}"
    paths = (cufile.NVIDIA_FS, cufile.KERNEL_MODULES, cufile.CONFIG, entry)
    found: dict[str, Any] = {str(path): path.exists() for path in paths}
    found |= {"torch": torch.__version__, "file_system": filesystem_of(folder).kind, "is_likely": cufile.is_likely()}
    for library in (cufile.Bindings, cufile.Torch):
        try:
            found[library.name] = library().name == library.name
        except Exception as error:
            found[library.name] = f"{type(error).__name__}: {error}"[:200]
    return found


def load(folder: Path, backend: str, device: str) -> dict[str, Any]:
    """Load a folder by cuFile, in a process of its own; count its reads, and compare all bytes with a load to the host.

    A refusal is a result. Where no udev runs, the entry of the drive is written for the time of the load: cuFile
    registers no file without it.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_load, args=(str(folder), backend, device, sender))
    process.start()
    sender.close()
    try:
        # cuFile may hang, where /proc/modules is missing and the product does not see it.
        found: dict[str, Any] = receiver.recv() if receiver.poll(60) else {"error": "hangs, or was killed"}
    except EOFError:
        found = {"error": "ended without a result"}
    process.kill()
    process.join()
    return found


def _load(folder: str, backend: str, device: str, sender: Any) -> None:
    calls = {"reads": 0, "nbytes": 0}
    own = cufile.Handle.read

    def counted(self: cufile.Handle, target: torch.Tensor, offset: int) -> int:
        count = own(self, target, offset)
        calls["reads"] += 1
        calls["nbytes"] += count
        return count

    cufile.Handle.read = counted  # type: ignore[method-assign]
    expected = relayout.load(folder, 0)
    prepare([Path(folder)], cold=True)  # Bytes in the page cache go through pinned memory.
    with udev_entry(Path(folder)) if device != "cpu" else nullcontext("not asked for") as written:
        try:
            told = relayout.explain(folder, 0, device=device, backend=backend)
            tensors, spent = timed(lambda: relayout.load(folder, 0, device=device, backend=backend))
        except (PlanError, OSError) as error:
            sender.send({"refused": str(error), "udev": written})
            return
    wrong = [name for name, tensor in tensors.items() if not _same(tensor, expected[name])]
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    found = spent | {"gds": told.gds, "reason": told.reason, "wrong": wrong, "total_nbytes": nbytes, "udev": written}
    sender.send(found | {"cufile": calls, "equal": not wrong})


@contextmanager
def udev_entry(folder: Path) -> Iterator[str]:
    """Have the entry of the drive that udev would have written, while no udev runs; yields whose entry there is."""
    device = folder.stat().st_dev
    entry = cufile.UDEV / f"b{os.major(device)}:{os.minor(device)}"
    if entry.exists() or cufile.UDEV.exists():
        yield "udev's own" if entry.exists() else "none, though udev runs"
        return
    try:
        entry.parent.mkdir(parents=True)
        entry.write_text(f"I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE={filesystem_of(folder).kind}\n")
    except OSError as error:
        yield f"none: {error}"
        return
    try:
        yield "written by this step"
    finally:
        entry.unlink()
        entry.parent.rmdir()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
