"""Follow the steps of a repository: list the steps, and keep the tensors of one rank at the newest step."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.delta import RankState, read_deltas, signed_content
from relayout.checkpoint.trust import check_signers, policy_of
from relayout.errors import FormatError, PlanError
from relayout.format.steps_index import Chain, PublishedStep
from relayout.loader.api import load
from relayout.loader.in_place import as_loaded, change_by
from relayout.loader.sources.checkpoint import LoadRequest
from relayout.loader.sources.rank import RankSource
from relayout.train.repository import StepRepository

if TYPE_CHECKING:
    import torch


class Steps:
    """The steps that a `relayout.Publisher` has published. Thread-safe; every call reads the index anew.

    Example:
        >>> import relayout
        >>> relayout.Steps("nothing-there").entries()
        ()
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Take the folder of the steps, or its URL; nothing is read yet."""
        self._root = StepRepository.at(root)

    def entries(self) -> tuple[PublishedStep, ...]:
        """Return the steps that can be read, in the order in which they were published.

        Raises:
            FormatError: the index is damaged.
            OSError: it cannot be read.
        """
        return self._root.read().entries

    def newest(self) -> PublishedStep | None:
        """Return the step that was published last; None: none was published. Errors as of `entries`."""
        return next(reversed(self.entries()), None)

    def path(self, name: str) -> str:
        """Return the path or URL of a folder or a delta, from its name in an entry or a chain."""
        return self._root.path(name)

    def chain(self, have: int | str | None = None, step: int | str | None = None) -> Chain | None:
        """Return the shortest chain to a step: a folder, deltas, or both.

        Args:
            have: the number of the step that the reader has, or the digest of its relayout.json. None, or a step
                that the index no longer has: the reader has nothing.
            step: the requested step, as its number or the digest of its relayout.json. Default: the newest.

        Returns:
            None: no step was published.

        Raises:
            PlanError: the step is not in the index.
            FormatError, OSError: as of `entries`.
        """
        return self._root.chain(have, step)

    def prune(self, grace_seconds: int | None = None) -> list[str]:
        """Delete files that no step needs, and remains of killed publishers; publishers do this after each step.

        Args:
            grace_seconds: retired files are kept for this many seconds, for readers of an older index, by the clock of
                this object. Files that were retired before this object first read the index are kept a day longer:
                clocks of machines may differ by a day. Default: the time that the publisher has promised readers. 0:
                delete all retired files; the caller ensures that no reader needs them.

        Returns:
            The names of the deleted folders and deltas.

        Raises:
            PlanError: some folders contain files not written by relayout. These files are kept, everything else is
                deleted.
            FormatError, OSError: the index is damaged; or some files cannot be deleted, and all others are deleted.
        """
        return self._root.prune(grace_seconds)


class Follower:
    """The tensors of one rank, at the newest step of a repository after each call of `update`. Not thread-safe.

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
        """Take a step repository, and a rank at the degree of its folders, from 0; nothing is read yet.

        Args:
            threads: as for `relayout.load`.
        """
        self._root, self._rank, self._threads = StepRepository.at(root), rank, threads
        self._state: RankState | None = None
        """Table and digests of the tensors; None: nothing is loaded, or the tensors were changed only in part."""
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by name, in host memory. `update` changes them in place."""
        self.step: int | None = None
        """The number of the step that was reached last; None: no step was."""

    @property
    def content(self) -> str | None:
        """The content of the loaded step, see `manifest.content_of`; None: nothing is loaded."""
        return None if self._state is None else self._state.content

    def update(self, step: int | None = None) -> int | None:
        """Update to the newest step, or to another one: by deltas in place, or by a load into the existing tensors.

        Returns:
            The number of the step if the tensors have changed; None: they are unchanged.

        Raises:
            FormatError: published files are damaged, or not signed as the policy (RELAYOUT_TRUST) requires.
            PlanError: the repository has no step, or not that one; or under a policy, its newest step is older than the
                loaded one.
            OSError: as `relayout.load`. If only some of the tensors were changed, the next call loads all of them.
        """
        check_signers(self._root.location)
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
            source = LoadRequest(path=self._root.path(chain.full), rank=self._rank, deltas=deltas).source()
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
        """Check that a chain leads to the content in the index. Raise FormatError if not."""
        if content != chain.content:
            what = f"the way to step {chain.step} makes content {content}, the index of steps says {chain.content}"
            raise FormatError(what, path=str(self._root), code="mismatch")

    def _loaded(self, full: str, deltas: list[str], source: RankSource) -> dict[str, torch.Tensor]:
        """Load a folder and deltas, into the memory of the present tensors that have the same shape and dtype.

        A present tensor of a wider dtype is not reused: it could hold all values, but the next delta would not fit its
        bytes.
        """
        options: dict[str, Any] = {"deltas": deltas, "threads": self._threads, "verify": True}
        if self.tensors:
            kept = as_loaded(self.tensors, source.columns())
            try:
                if kept:
                    return load(full, self._rank, into=kept, names="**", **options)
            except PlanError as error:
                if error.code != "option":  # Also raised for tensors that share memory.
                    raise
        return load(full, self._rank, **options)
