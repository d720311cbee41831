"""A backend of verl's checkpoint engine: an actor publishes its weights as steps, and rollouts read them.

    checkpoint_engine:
      backend: relayout
      custom_backend_module: relayout_verl
      engine_kwargs: {relayout: {root: /shared/run-7, config: /models/llama-3.1-8b, tp: 8}}

An example for verl 1dda039b (August 2026), not part of the package: put its folder on the PYTHONPATH of verl's
processes, or copy it to one that is there. `engine_kwargs.relayout` has the root and arguments of `relayout.Publisher`.

verl's interface has whole tensors on both sides: the first process of the actor collects them in host memory and
publishes them, and each rollout worker reads all of them. Other readers may follow the root, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from relayout import PlanError, Publisher, Steps, safe_open
from relayout.format.steps_index import PublishedStep

_POLL_SECONDS = 0.2


@CheckpointEngineRegistry.register("relayout")
class RelayoutCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A process of an actor or of a rollout. verl calls the methods in the order in which they are here."""

    def __init__(
        self, bucket_size: int, root: str, is_master: bool = False, wait_seconds: float = 1800, **options: Any
    ) -> None:
        """Take the options of verl's configuration.

        Args:
            bucket_size: verl's, and not used here.
            root: a folder that all processes can reach, or the URL of a prefix of a bucket.
            is_master: True in the first process of the actor.
            wait_seconds: seconds that a rollout waits for a step.
            options: arguments of `relayout.Publisher`.
        """
        self._root, self._wait_seconds = root, wait_seconds
        self._publisher = Publisher(root, **options) if is_master else None
        self._before: tuple[str, ...] | None = None
        """Names of the newest step before this update."""

    def prepare(self) -> tuple[str, ...]:
        """Return the names of the newest step. A name is used once."""
        return _names(Steps(self._root).newest())

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[tuple[str, ...]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Send all processes the newest step that the first process of the actor found."""
        return {"before": [metadata[0]] * actor_wg_world_size}, {"before": [metadata[0]] * rollout_world_size}

    def init_process_group(self, before: tuple[str, ...]) -> None:
        """Note the newest step before this update."""
        self._before = before

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publish the weights of an actor; errors as of `publish`. Every process runs the generator to its end."""
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
        """Yield the weights of the next step that is published, on this process's GPU, if it has one.

        Raises:
            PlanError: no step is published in time.
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
        """Wait for a step other than the newest one before this update."""
        until = time.monotonic() + self._wait_seconds
        while time.monotonic() < until:
            newest = Steps(self._root).newest()
            if newest is not None and _names(newest) != self._before:
                return newest
            await asyncio.sleep(_POLL_SECONDS)
        what = f"no step was published in {self._wait_seconds} s: see the log of the actor's first process"
        raise PlanError(what, path=self._root, code="missing")

    def finalize(self) -> None:
        """Do nothing: only the publisher keeps anything between updates."""


def _names(entry: PublishedStep | None) -> tuple[str, ...]:
    return () if entry is None else tuple(one.name for one in entry.stored)
