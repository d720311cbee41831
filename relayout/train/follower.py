"""Follows the steps of a root: reads which there are, and keeps the tensors of one rank at the newest."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.delta import RankState, read_deltas, signed_content
from relayout.checkpoint.trust import check_place, policy_of
from relayout.errors import FormatError, PlanError
from relayout.format.steps import Chain, PublishedStep
from relayout.loader.api import load
from relayout.loader.in_place import as_loaded, change_by
from relayout.loader.sources.checkpoint import Asked
from relayout.loader.sources.rank import RankSource
from relayout.train.root import Root

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

    def prune(self, grace_seconds: int | None = None) -> list[str]:
        """Delete what no step needs any more, and what killed publishers left; publishers do it after each step.

        Args:
            grace_seconds: what is no longer needed stays so long, for readers of an older index, by the clock of this
                object. What was retired before it looked first stays a day longer, as clocks of machines may differ
                by that. Default: what the publisher has promised readers. 0: no reader is left, and all that is retired
                is deleted.

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
        self._state: RankState | None = None
        """What is known of the tensors; None: nothing is loaded, or they were changed in part."""
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by name, in host memory. `update` changes them where they are."""
        self.step: int | None = None
        """The number of the step that was reached last; None: no step was."""

    @property
    def content(self) -> str | None:
        """The content of that step, see `manifest.content_of`; None: nothing is loaded."""
        return None if self._state is None else self._state.content

    def update(self, step: int | None = None) -> int | None:
        """Go to the newest step, or to another one: by deltas in place, or by a load into the tensors that are there.

        Returns:
            The number of the step if the tensors have changed; None: they are what they were.

        Raises:
            FormatError: what was published is damaged, or not signed as the policy (RELAYOUT_TRUST) wants it.
            PlanError: the root has no step, or not that one; or under a policy, the newest step is before the one that
                is loaded.
            OSError: as `relayout.load`. If tensors were changed in part, the next call loads all of them.
        """
        check_place(self._root.location)
        return self._root.with_chain(partial(self._go, is_newest=step is None), self.content, step)

    def _go(self, chain: Chain, *, is_newest: bool) -> int | None:
        policy, had = policy_of(None), self._state
        if policy is not None and is_newest and self.step is not None and chain.step < self.step:
            what = f"its newest step is {chain.step}, after step {self.step}: update(step={chain.step}) goes back"
            raise PlanError(what, path=str(self._root), code="mismatch")
        if chain.content == self.content:
            if policy is not None and chain.step != self.step:
                self._check(chain, signed_content(self._root.path(chain.target), policy))
            self.step = chain.step
            return None
        deltas = [self._root.path(name) for name in chain.deltas]
        if chain.full is not None:
            source = Asked(path=self._root.path(chain.full), rank=self._rank, deltas=deltas).source()
            state = RankState.of(source.store, self._rank)
            self._check(chain, state.content)
            self._state = None
            self.tensors = self._loaded(self._root.path(chain.full), deltas, source)
        else:
            assert had is not None
            found = list(read_deltas(deltas, policy))
            self._check(chain, found[-1].manifest.makes)
            self._state = None
            # After an error all tensors are loaded again: so they need not be compared before they change.
            state = change_by(found, had, self.tensors, f"step {self.step}", self._threads, compare_first=False)
        self._state, self.step = state, chain.step
        return chain.step

    def _check(self, chain: Chain, content: str) -> None:
        """Check that what a way leads to is what the index says. FormatError: it is not."""
        if content != chain.content:
            what = f"the way to step {chain.step} makes content {content}, the index of steps says {chain.content}"
            raise FormatError(what, path=str(self._root), code="mismatch")

    def _loaded(self, full: str, deltas: list[str], source: RankSource) -> dict[str, torch.Tensor]:
        """The tensors of a folder and deltas, in the memory of those of now that have the same shape and dtype.

        A wider dtype has all values, too, but the next delta would not fit its bytes: that tensor is made again.
        """
        options: dict[str, Any] = {"deltas": deltas, "threads": self._threads, "verify": True}
        if self.tensors:
            kept = as_loaded(self.tensors, source.columns())
            try:
                if kept:
                    return load(full, self._rank, into=kept, names="**", **options)
            except PlanError as error:
                if error.code != "option":  # As are tensors that share memory.
                    raise
        return load(full, self._rank, **options)
