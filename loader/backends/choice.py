"""Chooses the backend of a load and says why. Holds the registry of backends, and what "auto" tries."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from relayout.errors import PlanError
from relayout.loader.backends import host
from relayout.loader.backends.base import Choice, Factory, Request
from relayout.loader.sources.stored import StoredFile
from relayout.loader.tensors import check_mode
from relayout.storage.protocols import Access, Refusal

if TYPE_CHECKING:
    import torch


def _cuda(factory: str) -> Factory:
    """A factory of `cuda`, which is imported on first use: most loads need only `host`."""
    return lambda request: getattr(import_module("relayout.loader.backends.cuda"), factory)(request)


REGISTRY: dict[str, Factory] = {
    "auto": host.factory(Access.AUTO),
    "direct": host.factory(Access.DIRECT),
    "buffered": host.factory(Access.BUFFERED),
    "pinned": _cuda("offer_pinned"),
    "gds": _cuda("offer_gds"),
}
"""The factory of each backend."""

_AUTO = {"cuda": ("gds", "pinned")}
"""Which backends "auto" tries for a kind of device, the best first; for other kinds, its own."""


def check_name(name: str) -> None:
    """Raise PlanError unless there is a backend of that name."""
    if name not in REGISTRY:
        raise PlanError(f"backend {name!r}, expected one of {', '.join(REGISTRY)}", code="option")


def choose(name: str, device: str | torch.device, files: Sequence[StoredFile]) -> Choice:
    """The backend of that name; for "auto", the best one for these files and this device.

    Raises:
        PlanError: there is no backend of that name, or it cannot be used here.
    """
    check_name(name)
    request = Request(resolve_device(device), files, is_by_name=name != "auto")
    refusals: list[str] = []
    for tried in (name,) if request.is_by_name else _AUTO.get(request.kind, (name,)):
        offer = REGISTRY[tried](request)
        if not isinstance(offer, Refusal):
            state = ["experimental: never tested on a GPU"] if offer.backend.is_experimental else []
            return Choice(offer.backend, "; ".join([*refusals, offer.reason, *state]), offer.gds)
        refusals.append(offer.reason)
    raise PlanError("; ".join(refusals), code="unsupported")


def resolve_device(device: str | torch.device) -> str | torch.device:
    """The device with its index: "cuda" is the current CUDA device; the CPU is always "cpu".

    Raises:
        PlanError: torch cannot use the device; or as `tensors.check_mode`.
    """
    check_mode()
    if str(device) == "cpu":  # Saves the import of torch.
        return "cpu"
    import torch

    try:
        resolved: torch.device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"device {str(device)!r}: {str(error).splitlines()[0]}", code="option") from None
    return "cpu" if resolved.type == "cpu" else resolved
