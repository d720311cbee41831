"""slime: what it writes for its engines becomes a step, and its folder a root from which engines take that step.

`--update-weight-transport disk --custom-update-weight-post-write-path relayout_slime.published`. After each sync
slime has a whole Hugging Face checkpoint in `UPDATE_WEIGHT_DISK_DIR/weight_vNNNNNN`, which all its engines then load by
SGLang's `update_weights_from_disk`. Its tensors are published to the root `UPDATE_WEIGHT_DISK_DIR/relayout-steps`, as
a delta or as a converted folder, and links to what a reader needs of it are put into the checkpoint. An SGLang with
relayout reads that root, each rank its slices; any other one the checkpoint. slime deletes it with the links.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from relayout.checkpoint.folder import CONFIG_NAME
from relayout.errors import PlanError
from relayout.format.steps import PublishedStep, StepsIndex
from relayout.steps.follower import Steps
from relayout.steps.publisher import Publisher
from relayout.steps.root import Root

OPTIONS = "relayout_publisher"
"""The arguments of `relayout.Publisher` in the file of slime's `--custom-config-path`."""
_ROOT = "relayout-steps"
_DELTA = "delta_encoding"
"""A name in the index of a checkpoint that has only what changed, as slime's delta mode writes it."""


def published(args: Any, version_dir: str, rollout_engines: object) -> None:
    """Publish what slime has written; slime calls this in every process of the trainer, and the first one does it.

    Args:
        args: slime's. `relayout_publisher`, if it is there, has arguments of `relayout.Publisher`.
        version_dir: the checkpoint.

    Raises:
        FormatError, PlanError, OSError: as `relayout.Publisher.publish`; or slime runs in its delta mode.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    folder = Path(version_dir)
    version = folder.name.removeprefix("weight_v")
    if not version.isdecimal() or _is_delta(folder):
        what = "is no whole checkpoint of slime: use --update-weight-mode full; relayout makes the deltas"
        raise PlanError(what, path=version_dir, code="unsupported")
    root = Path(args.update_weight_disk_dir, _ROOT)
    options = {"tp": args.sglang_tp_size} | dict(getattr(args, OPTIONS, None) or {})
    publisher = _publisher(str(root), (folder / CONFIG_NAME).read_text("utf-8"), json.dumps(options, sort_keys=True))
    step = publisher.publish(_tensors(folder), int(version))
    link_step(root, step, folder)


def _is_delta(folder: Path) -> bool:
    indexes = [json.loads(index.read_text("utf-8")) for index in folder.glob("*.safetensors.index.json")]
    return any(_DELTA in index.get("metadata", {}) for index in indexes)


@cache
def _publisher(root: str, config: str, options: str) -> Publisher:
    """The publisher of a root, which has the last step; another one begins with a folder."""
    return Publisher(root, config=json.loads(config), **json.loads(options))


def _tensors(folder: Path) -> Mapping[str, Any]:
    """The tensors of a checkpoint. safetensors maps its files: they are read when they are converted."""
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    return tensors


def link_step(root: Path, step: PublishedStep, folder: Path) -> None:
    """Make a folder a root that has one step of another root, by links, and what leads to it.

    The folder may be one already: of an earlier step, or of a call that failed halfway. Links to the same root are made
    again, and the index is replaced as a whole: a reader has the older step or this one.

    Raises:
        FileExistsError: something else has the name of a link.
    """
    entries = Steps(root).entries()
    end = next(i for i in reversed(range(len(entries))) if entries[i].content == step.content)
    first = max(i for i in range(end + 1) if entries[i].full is not None)
    needed = (replace(entries[first], delta=None), *(replace(one, full=None) for one in entries[first + 1 : end + 1]))
    index = StepsIndex(needed)
    for name in sorted(index.names):
        target = Path(os.path.relpath(root / name, folder))
        try:
            (folder / name).symlink_to(target)
        except FileExistsError:  # A name is used once in a root: the same link leads to the same files.
            if not (folder / name).is_symlink() or (folder / name).readlink() != target:
                raise
    Root.at(folder).move(lambda _: index)
