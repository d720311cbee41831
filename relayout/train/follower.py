"""Follows the steps of a root: reads which there are, and keeps the tensors of one rank at the newest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from relayout.errors import PlanError
from relayout.format.steps import Chain, PublishedStep
from relayout.loader.api import load
from relayout.loader.in_place import apply, as_loaded
from relayout.loader.sources.checkpoint import Asked
from relayout.train.root import GRACE_SECONDS, Root

if TYPE_CHECKING:
    import torch


class Steps:
    """The steps that a `relayout.Publisher` has published to a root. Thread-safe; every call reads the index anew.

    Example:
        >>> import relayout
        >>> relayout.Steps("nothing-there").entries()
        ()
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Take the folder of the steps, or its URL; nothing is read yet."""
        self._root = Root.at(root)

    def entries(self) -> tuple[PublishedStep, ...]:
        """The steps that can be read, in the order in which they were published.

        Raises:
            FormatError: the index is damaged.
            OSError: it cannot be read.
        """
        return self._root.read().entries

    def newest(self) -> PublishedStep | None:
        """The step that was published last; None: there is none yet. Errors as of `entries`."""
        return next(reversed(self.entries()), None)

    def path(self, name: str) -> str:
        """The path or URL of a folder or a delta of an entry or a chain."""
        return self._root.path(name)

    def chain(self, have: int | str | None = None, step: int | str | None = None) -> Chain | None:
        """The shortest way to a step: a folder, deltas, or both.

        Args:
            have: the number of the step that the reader has, or the digest of its relayout.json. A step that is not
                here any more is as None: nothing.
            step: the number of the step that it wants, or that digest. Default: the newest.

        Returns:
            None: there is no step yet.

        Raises:
            PlanError: the step is not there.
            FormatError, OSError: as of `entries`.
        """
        return self._root.chain(have, step)

    def prune(self, grace_seconds: int = GRACE_SECONDS) -> list[str]:
        """Delete what no step needs any more, and what killed publishers left; publishers do it after each step.

        Args:
            grace_seconds: what is no longer needed stays so long, for readers of an older index, by the clock of this
                object. What was retired before it looked first stays a day longer, as clocks of machines may differ
                by that. 0: no reader is left, and all that is retired is deleted.

        Returns:
            The names of what was deleted.

        Raises:
            PlanError: some of it has files of somebody else, which stay. All else is deleted.
            FormatError, OSError: the index is damaged, or some of it cannot be deleted. As above.
        """
        return self._root.prune(grace_seconds)


class Follower:
    """The tensors of one rank, at the newest step of a root whenever `update` is called. Not thread-safe.

    Example:
        >>> import relayout, torch
        >>> publisher = relayout.Publisher("followed", config={"model_type": "llama"}, tp=2)
        >>> _ = publisher.publish({"model.norm.weight": torch.ones(64)}, step=1)
        >>> follower = relayout.Follower("followed", rank=0)
        >>> follower.update()
        1
        >>> sorted(follower.tensors)
        ['model.norm.weight']
    """

    def __init__(self, root: str | os.PathLike[str], rank: int, *, threads: int | None = None) -> None:
        """Take a root, and a rank at the degree of its folders, from 0; nothing is read yet.

        Args:
            threads: as for `relayout.load`.
        """
        self._root, self._rank, self._threads = Root.at(root), rank, threads
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by name, in host memory. `update` changes them where they are."""
        self.content: str | None = None
        """Digest of relayout.json of the step that they are of; None: nothing is loaded."""
        self.step: int | None = None
        """The number of that step."""

    def update(self, step: int | None = None) -> int | None:
        """Go to the newest step, or to another one: by deltas in place, or by a load into the tensors that are there.

        Returns:
            The number of the step if the tensors have changed; None: they are what they were.

        Raises:
            FormatError: what was published is damaged.
            PlanError: the root has no step, or not that one.
            OSError: as `relayout.load`. If tensors were changed in part, the next call loads all of them.
        """
        return self._root.with_chain(self._go, self.content, step)

    def _go(self, chain: Chain) -> int | None:
        if chain.content == self.content:
            self.step = chain.step
            return None
        self._root.check(chain)
        deltas = [self._root.path(name) for name in chain.deltas]
        had, self.content = self.content, None
        if chain.full is not None:
            self.tensors = self._loaded(self._root.path(chain.full), deltas)
        else:
            for delta in deltas:
                apply(delta, self._rank, self.tensors, threads=self._threads)
        assert had is not None or chain.full is not None
        self.content, self.step = chain.content, chain.step
        return chain.step

    def _loaded(self, full: str, deltas: list[str]) -> dict[str, torch.Tensor]:
        """The tensors of a folder and deltas, in the memory of those of now that have the same shape and dtype.

        A wider dtype has all values, too, but the next delta would not fit its bytes: that tensor is made again.
        """
        options: dict[str, Any] = {"deltas": deltas, "threads": self._threads}
        if self.tensors:
            rank = Asked(path=full, rank=self._rank, deltas=deltas).source().columns()
            kept = as_loaded(self.tensors, rank)
            try:
                if kept:
                    return load(full, self._rank, into=kept, names="**", **options)
            except PlanError as error:
                if error.code != "option":  # As are tensors that share memory.
                    raise
        return load(full, self._rank, **options)
