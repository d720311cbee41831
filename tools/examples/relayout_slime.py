"""A hook of slime: publishes each checkpoint that slime writes for its engines as a step.

    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir /shared/run-7
    --custom-update-weight-post-write-path relayout_slime.published

An example for slime 624b824a (August 2026), not part of the package: put its folder on slime's PYTHONPATH, or copy it
to one that is there.

After each sync slime has a whole Hugging Face checkpoint in `UPDATE_WEIGHT_DISK_DIR/weight_vNNNNNN`, which all its
engines then load by SGLang's `update_weights_from_disk`. The hook publishes its tensors to
`UPDATE_WEIGHT_DISK_DIR/relayout-steps`, as a delta or as a converted folder, and puts links to the files that lead to
the step into the checkpoint. An SGLang with relayout follows the links, and each rank reads its slices; an SGLang
without relayout reads the checkpoint. slime deletes the checkpoint with the links.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from relayout import PlanError, Publisher, Steps
from relayout.format.steps_index import PublishedStep, StepsIndex
from relayout.train.repository import StepRepository

OPTIONS = "relayout_publisher"
"""Name of the arguments of `relayout.Publisher` in the file of slime's `--custom-config-path`."""
_ROOT = "relayout-steps"
_DELTA = "delta_encoding"
"""Name in the index of a checkpoint that slime wrote in its delta mode."""


def published(args: Any, version_dir: str, rollout_engines: object) -> None:
    """Publish a checkpoint; slime calls this in every process of the trainer, and the first one publishes.

    Args:
        args: slime's arguments. `relayout_publisher` may have arguments of `relayout.Publisher`.
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
    publisher = _publisher(str(root), (folder / "config.json").read_text("utf-8"), json.dumps(options, sort_keys=True))
    step = publisher.publish(_tensors(folder), int(version))
    link_step(root, step, folder)


def _is_delta(folder: Path) -> bool:
    indexes = [json.loads(index.read_text("utf-8")) for index in folder.glob("*.safetensors.index.json")]
    return any(_DELTA in index.get("metadata", {}) for index in indexes)


@cache
def _publisher(root: str, config: str, options: str) -> Publisher:
    """Return the publisher of a root. It keeps the last step; a new publisher begins with a folder."""
    return Publisher(root, config=json.loads(config), **json.loads(options))


def _tensors(folder: Path) -> Mapping[str, Any]:
    """Map the tensors of a checkpoint. Their bytes are read when they are converted."""
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    return tensors


def link_step(root: Path, step: PublishedStep, folder: Path) -> None:
    """Make a folder a root with one step of another root, by links to all files that lead to this step.

    The folder may have links of an earlier step, or of a call that failed halfway. The index is replaced as a whole: a
    reader has the earlier step or this one.

    Raises:
        FileExistsError: a file or another link has the name of a link.
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
    StepRepository.at(folder).move(lambda _: index)
