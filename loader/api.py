"""`load`: one rank's tensors, from a converted checkpoint, or a plain one sliced on the fly."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relayout.errors import PlanError
from relayout.folder import check_owner, check_rank, read_manifest, read_table
from relayout.index import MANIFEST_NAME
from relayout.loader.arena import HostArena, allocate
from relayout.loader.backends import Backend, Filling, StoredFile, choose_backend
from relayout.loader.tensors import arena_tensor, check_device, is_cpu, make_views

if TYPE_CHECKING:
    import torch


def load(
    path: str | os.PathLike[str],
    rank: int,
    *,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    tp: int | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of one tensor-parallel rank.

    All tensors are views of one allocation, at addresses that are multiples of 16 bytes; every byte has arrived when
    the call returns. On another device than the CPU, the allocation is copied there in one piece.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint.
        rank: from 0.
        device: where the tensors shall lie.
        backend: "direct" reads past the page cache, "buffered" through it; "auto" reads directly where the file
            system takes it.
        tp: for a plain checkpoint, the tensor-parallel degree to slice at, which is slower than loading a converted
            one; for a converted one not needed, and checked if given.

    Returns:
        Tensor names of the source checkpoint, and this rank's slice of each.

    Raises:
        FormatError: a file is damaged, missing, or of another conversion.
        PlanError: the rank does not exist, or the request makes no sense for this folder.
        OSError: a read failed, or "direct" was asked for where the file system refuses it.
    """
    chosen = choose_backend(backend)
    if device != "cpu":
        check_device(device)  # Before anything is read for a device that is not there.
    path = Path(path)
    if (path / MANIFEST_NAME).exists():
        return _load_converted(path, rank, tp, device, chosen)
    if not path.exists():
        raise PlanError(f"{path}: no such file or folder")
    if tp is None:
        raise PlanError(f"{path}: not converted ({MANIFEST_NAME} is missing); say tp=N to slice it while loading")
    return _load_plain(path, rank, tp, device, chosen)


def _load_converted(
    folder: Path, rank: int, tp: int | None, device: str | torch.device, backend: Backend
) -> dict[str, torch.Tensor]:
    manifest = read_manifest(folder)
    if tp is not None and tp != manifest.num_ranks:
        raise PlanError(f"{folder}: converted for tp={manifest.num_ranks}, asked for tp={tp}")
    check_rank(rank, manifest.num_ranks)
    entry = manifest.ranks[rank]
    arena = allocate(entry.arena_nbytes)
    files = [StoredFile(folder / file.name, file.nbytes) for file in entry.files]
    # Where everything goes is known already: read while the table is parsed and torch, perhaps, imported.
    filling = backend.start(arena.view, files, entry.reads)
    try:
        check_owner(folder, manifest, rank)
        table = read_table(folder, manifest, rank)
    except BaseException:
        filling.cancel()
        raise
    return _finish(arena, filling, device, table.names, table.dtypes, table.shapes, table.arena_offsets)


def _load_plain(
    source: Path, rank: int, tp: int, device: str | torch.device, backend: Backend
) -> dict[str, torch.Tensor]:
    # The planner is needed for this only.
    from relayout.loader.plain import plan_plain_rank

    check_rank(rank, tp)
    if tp > 1:
        warnings.warn(
            f"{source}: a plain checkpoint, sliced while it is loaded; `relayout convert {source} --tp {tp}` once"
            " makes every later load faster",
            stacklevel=3,
        )
    planned = plan_plain_rank(source, rank, tp)
    arena = allocate(planned.arena_nbytes)
    filling = backend.start(arena.view, planned.files, planned.reads)
    return _finish(arena, filling, device, planned.names, planned.dtypes, planned.shapes, planned.arena_offsets)


def _finish(
    arena: HostArena,
    filling: Filling,
    device: str | torch.device,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Make the views while bytes arrive, and wait for the last one."""
    try:
        base = arena_tensor(arena)
        if is_cpu(device):
            views = make_views(base, names, dtypes, shapes, offsets)
            filling.join()
            return views
        filling.join()
    except BaseException:
        filling.cancel()
        raise
    return make_views(base.to(device), names, dtypes, shapes, offsets)
