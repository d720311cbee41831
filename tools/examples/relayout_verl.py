"""verl: the weights of an actor go to rollouts as steps of a root, which other readers may follow, too.

`backend=relayout` and `custom_backend_module=relayout_verl` of `checkpoint_engine`, with the root and arguments of
`relayout.Publisher` in `engine_kwargs.relayout`. verl's interface has whole tensors on both sides: the first process of
the actor collects them in host memory and publishes them, and each rollout worker reads all of them. Importing this
module needs verl.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from relayout.errors import PlanError
from relayout.format.steps import PublishedStep
from relayout.loader.view import safe_open
from relayout.steps.follower import Steps
from relayout.steps.publisher import Publisher

_POLL_SECONDS = 0.2


@CheckpointEngineRegistry.register("relayout")
class RelayoutCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A process of an actor or of a rollout. verl calls the methods in the order in which they are here."""

    def __init__(
        self, bucket_size: int, root: str, is_master: bool = False, wait_seconds: float = 1800, **options: Any
    ) -> None:
        """Take what verl's configuration says.

        Args:
            bucket_size: verl's, which nothing here needs.
            root: a folder that all can reach, or the URL of a prefix of a bucket.
            is_master: whether this is the first process of the actor.
            wait_seconds: how long a rollout waits for a step.
            options: arguments of `relayout.Publisher`.
        """
        self._root, self._wait_seconds = root, wait_seconds
        self._publisher = Publisher(root, **options) if is_master else None
        self._before: tuple[str, ...] | None = None
        """The names of the step that was there before this update."""

    def prepare(self) -> tuple[str, ...]:
        """The names of the newest step, none of which is ever used again."""
        return _names(Steps(self._root).newest())

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[tuple[str, ...]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """All are told what the first process of the actor has found: what it will replace."""
        return {"before": [metadata[0]] * actor_wg_world_size}, {"before": [metadata[0]] * rollout_world_size}

    def init_process_group(self, before: tuple[str, ...]) -> None:
        """Note what was there before."""
        self._before = before

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publish the weights of an actor, of which every process carries out the generator; errors as of `publish`."""
        if self._publisher is None:
            for _ in weights:
                pass
            return None
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        newest = Steps(self._root).newest()
        step = global_steps if global_steps is not None else 0 if newest is None else newest.step + 1
        entry = await asyncio.to_thread(self._publisher.publish, tensors, step)
        return {"relayout/nbytes": float(sum(one.nbytes for one in entry.stored))}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """The weights of the step that is published meanwhile, on this process's GPU, if it has one.

        Raises:
            PlanError: none is published in time.
            FormatError, OSError: as `relayout.safe_open`.
        """
        import torch

        entry, steps = await self._published(), Steps(self._root)
        chain = steps.chain(step=entry.content)
        assert chain is not None
        assert chain.full is not None
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        with safe_open(
            steps.path(chain.full), device=device, deltas=[steps.path(name) for name in chain.deltas]
        ) as whole:
            for name in whole.keys():  # noqa: SIM118 (it is no mapping)
                yield name, whole.get_tensor(name)

    async def _published(self) -> PublishedStep:
        """Wait for a step that was not there before."""
        until = time.monotonic() + self._wait_seconds
        while time.monotonic() < until:
            newest = Steps(self._root).newest()
            if newest is not None and _names(newest) != self._before:
                return newest
            await asyncio.sleep(_POLL_SECONDS)
        what = f"no step was published in {self._wait_seconds} s: see the log of the actor's first process"
        raise PlanError(what, path=self._root, code="missing")

    def finalize(self) -> None:
        """Do nothing: nothing is held between updates but what the publisher keeps."""


def _names(entry: PublishedStep | None) -> tuple[str, ...]:
    return () if entry is None else tuple(one.name for one in entry.stored)
