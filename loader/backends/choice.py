"""Chooses the backend of a load, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relayout.errors import PlanError
from relayout.loader.backends.cuda import CudaLane, DeviceBackend
from relayout.loader.backends.files import Access
from relayout.loader.backends.host import HostBackend
from relayout.loader.backends.mapped import MappedBackend
from relayout.loader.budgets import HOST_BUFFERS, MAX_BUFFERS
from relayout.loader.sources.contents import StoredFile
from relayout.loader.tensors import check_mode

if TYPE_CHECKING:
    import torch

    from relayout.loader.backends.cufile import GdsState

BACKENDS = ("auto", "direct", "buffered", "mapped", "pinned", "gds")


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that a load takes."""

    backend: HostBackend | MappedBackend | DeviceBackend
    reason: str
    """For a person."""
    gds: GdsState | None = None
    """What is known of GPUDirect Storage; None where nobody asked."""

    @property
    def max_buffers(self) -> int:
        """Bytes of buffers that it takes by default, at most."""
        return MAX_BUFFERS if isinstance(self.backend, DeviceBackend) else HOST_BUFFERS


def choose(name: str, device: str | torch.device, files: Sequence[StoredFile]) -> Choice:
    """The backend of that name, or, for "auto", the one for tensors on `device` that come from `files`.

    Raises:
        PlanError: there is no such backend, or it cannot work here.
    """
    if name not in BACKENDS:
        raise PlanError(f"backend {name!r}, expected one of {', '.join(BACKENDS)}")
    device = settled(device)
    kind = str(device).partition(":")[0]
    if name in ("pinned", "gds") and kind != "cuda":
        raise PlanError(f"backend {name!r} loads to a CUDA device, not to {str(device)!r}")
    if name == "mapped" and kind != "cpu":
        raise PlanError(f"backend 'mapped' has tensors in host memory, not on {str(device)!r}")
    if name == "mapped":
        return Choice(MappedBackend(), "asked for: pages of the files are read when a tensor is first used")
    if name in ("direct", "buffered"):
        copied = "" if kind == "cpu" else f", then copied to {device} in one piece"
        how = "past the page cache" if name == "direct" else "through the page cache"
        return Choice(HostBackend(Access(name)), f"asked for: read {how}{copied}")
    if kind != "cuda":
        reason = "threads read directly where the file system takes it, and from the page cache what is there"
        copied = "" if kind == "cpu" else f"; then copied to {device} in one piece"
        return Choice(HostBackend(Access.AUTO), reason + copied)
    return _choose_cuda(name, device, files)


def _choose_cuda(name: str, device: str | torch.device, files: Sequence[StoredFile]) -> Choice:
    import torch

    from relayout.loader.backends.cufile import find_cufile, is_likely

    target = torch.device(device)
    assert target.index is not None  # A thread of its own would have another default.

    def make_lane(nbytes: int) -> CudaLane:
        return CudaLane(target, nbytes)

    if name == "pinned":
        return Choice(DeviceBackend(Access.AUTO, make_lane), "asked for: read into pinned memory, copied from there")
    cufile, state = None, None
    if files and (name == "gds" or is_likely()):
        cufile, state = find_cufile(files[0].path)
    if cufile is not None and state is not None:
        asked = "asked for" if name == "gds" else "available"
        return Choice(DeviceBackend(Access.AUTO, make_lane, cufile), f"{state.path} is {asked}: {state.reason}", state)
    why = state.reason if state is not None else "neither nvidia-fs nor PCI P2PDMA is set up"
    if name == "gds":
        raise PlanError(f"backend 'gds': GPUDirect Storage is not available: {why}")
    reason = f"no GPUDirect Storage ({why}): read into pinned memory, copied from there"
    return Choice(DeviceBackend(Access.AUTO, make_lane), reason, state)


def settled(device: str | torch.device) -> str | torch.device:
    """The device with its number: "cuda" is the one that is the caller's default now.

    Raises:
        PlanError: torch says why it cannot be used; or as `tensors.check_mode`.
    """
    check_mode()
    if str(device) == "cpu":  # Without torch, which may not be imported yet.
        return "cpu"
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from None
