"""Chooses the backend of a load, and says why: the registry of backends, and what "auto" tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayout.errors import PlanError
from relayout.loader.backends import cuda, host, mapped
from relayout.loader.backends.base import Choice, Factory, Refusal, Request
from relayout.loader.sources.contents import StoredFile
from relayout.loader.tensors import check_mode
from relayout.storage.protocols import Access

if TYPE_CHECKING:
    import torch

REGISTRY: dict[str, Factory] = {
    "auto": host.factory(Access.AUTO),
    "direct": host.factory(Access.DIRECT),
    "buffered": host.factory(Access.BUFFERED),
    "mapped": mapped.offer,
    "pinned": cuda.offer_pinned,
    "gds": cuda.offer_gds,
}
"""What makes the backend of each name."""

_AUTO = {"cuda": ("gds", "pinned")}
"""For a kind of device, what "auto" tries, the best first; its own backend for the others."""


def choose(name: str, device: str | torch.device, files: Sequence[StoredFile]) -> Choice:
    """The backend of that name, or, for "auto", the best for tensors on `device` that come from `files`.

    Raises:
        PlanError: there is no such backend, or it cannot work here.
    """
    if name not in REGISTRY:
        raise PlanError(f"backend {name!r}, expected one of {', '.join(REGISTRY)}", code="option")
    request = Request(resolve_device(device), files, is_by_name=name != "auto")
    refusals: list[str] = []
    for tried in (name,) if request.is_by_name else _AUTO.get(request.kind, (name,)):
        found = REGISTRY[tried](request)
        if not isinstance(found, Refusal):
            return Choice(found.backend, "; ".join([*refusals, found.reason]), found.gds)
        refusals.append(found.reason)
    raise PlanError("; ".join(refusals), code="unsupported")


def resolve_device(device: str | torch.device) -> str | torch.device:
    """The device with its number: "cuda" is the one that is the caller's default now; the CPU is always "cpu".

    Raises:
        PlanError: torch says why it cannot be used; or as `tensors.check_mode`.
    """
    check_mode()
    if str(device) == "cpu":  # Without torch, which may not be imported yet.
        return "cpu"
    import torch

    try:
        found: torch.device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"device {str(device)!r}: {str(error).splitlines()[0]}", code="option") from None
    return "cpu" if found.type == "cpu" else found
