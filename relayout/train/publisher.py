"""Publish the steps of a training run: deltas with the changes since the last step, and periodic folders."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.delta import DELTA_OUTPUT
from relayout.checkpoint.shards import DEFAULT_SHARD_NBYTES
from relayout.checkpoint.signing import signed, signer_of
from relayout.conversion.layout import Conversion
from relayout.conversion.planning import CutOptions, PlanOptions
from relayout.conversion.run import Summary
from relayout.conversion.sidecar import other_names
from relayout.core.arguments import at_least_one, folder_text, integer, takes
from relayout.errors import PlanError, RelayoutError, shown
from relayout.format.delta import CHANGED_DIGESTS_NAME, NEW, NEW_MANIFEST_NAME, delta_name
from relayout.format.fields import MAX_SIZE
from relayout.format.index import MANIFEST_NAME, SIGNATURE_NAME
from relayout.format.manifest import content_of
from relayout.format.steps_index import (
    DELTA,
    FULL,
    GRACE_SECONDS,
    PublishedStep,
    Retention,
    StepsIndex,
    Stored,
    step_name,
)
from relayout.loader.group.collectives import Group
from relayout.publish.output import Output, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress
from relayout.storage.stores import Store, find_store
from relayout.train.changing import ImageUpdater
from relayout.train.comparing import RetainedStep, StepOutput
from relayout.train.group_save import GroupSave, PlannedSave
from relayout.train.repository import StepRepository
from relayout.train.save import DEFAULT_THREADS, HeldTensors, SaveRequest, check_floating, holding, start

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

DEFAULT_STEP_PART_NBYTES = 2**29
"""The default size of a part in bytes: the changes in its files are in memory."""

_RESERVED_NBYTES = 2**16
"""Bytes of a full index that are reserved for the next publisher, which must announce its files before shortening it.
"""

Made = TypeVar("Made")


class Publisher:
    """Publishes steps to a repository, for readers that follow (`relayout.Follower`, or an engine).

    The first step of a publisher is a whole converted folder. After that a step is a delta, computed from memory: the
    weights that this process holds are compared with the previous step, which is kept, and only differences are sent
    and written. Every `full_every` steps, and whenever the deltas since the last folder together reach `full_share` of
    its size, a folder is written in addition. Readers see a step when it is complete; published data never changes.

    One publisher works at a repository at a time. Another publisher takes over with its first step; then the next step
    of the older one fails, but only that one. A killed publisher leaves a repository that the next one continues. Not
    thread-safe.

    Example:
        >>> import relayout, torch
        >>> publisher = relayout.Publisher("steps", config={"model_type": "llama"}, tp=2)
        >>> publisher.publish({"model.norm.weight": torch.ones(64)}, step=1).step
        1
    """

    @takes(CutOptions, PlanOptions)
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
        full_every: int = 100,
        full_share: float = 1.0,
        keep: int = 100,
        keep_seconds: int = 24 * 3600,
        grace_seconds: int = GRACE_SECONDS,
        keep_in: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        chain: Sequence[str | os.PathLike[str]] = (),
        max_part_nbytes: int | str = DEFAULT_STEP_PART_NBYTES,
        max_shard_size: int | str = DEFAULT_SHARD_NBYTES,
        threads: int = DEFAULT_THREADS,
        progress: Progress = None,
        **options: Unpack[CutOptions],
    ) -> None:
        """Take the options; nothing is read or written yet.

        Args:
            root: the folder of the steps, which is created if needed, or the URL of a prefix of a bucket.
            full_every: the largest number of steps from one folder to the next.
            full_share: a folder is written when the deltas since the last one reach this share of its bytes.
            keep: number of steps that can be read, in addition to the earlier steps that they are based on.
            keep_seconds: steps that are younger than this number of seconds can also be read.
            grace_seconds: data that is not kept any more is deleted when a later step is published and this publisher
                has seen it retired for this number of seconds. Readers have this time to finish reading.
            keep_in: a folder on a local drive for the bytes of the last step. Default: host memory. Space per member of
                a group of N: 1/N of the size of the weight files, up to the same again for whole tensors that it
                digests, and up to the same again for its parts of tensors that other members write. Without a group:
                the size of the weight files.
            key, certificate, chain: sign each step, as `relayout.sign` does: its relayout.json, which contains the
                digests of all other files. Every member of a group reads these files. Default: steps are not signed.
            max_part_nbytes: as for `relayout.save`. In addition to the last step, the encoded changes of a part are in
                memory, for each rank that this process writes files of.
            config, dtype, group, max_shard_size, threads, progress: as for `relayout.save`.
            options: as for `relayout.convert`.

        Raises:
            PlanError: an option has an invalid value.
        """
        check_floating(dtype)
        self._root = StepRepository.at(root)
        self._config, self._dtype, self._group = config, dtype, group
        self._full_every = at_least_one(full_every, "full_every")
        if isinstance(full_share, bool) or not isinstance(full_share, int | float):
            raise PlanError(f"full_share: {shown(full_share)} is not a number", code="option")
        self._full_share = full_share
        self._retention = Retention(at_least_one(keep, "keep"), integer(keep_seconds, "keep_seconds"))
        self._grace_seconds = integer(grace_seconds, "grace_seconds")
        self._saving = SaveRequest(
            output=self._root.location,
            max_shard_size=max_shard_size,
            threads=at_least_one(threads, "threads"),
            progress=progress,
            max_part_nbytes=max_part_nbytes,
            **options,
        )
        if key is None and (certificate is not None or chain):
            raise PlanError("certificate and chain need a key", code="option")
        self._signer = None if key is None else signer_of(key, certificate, chain)
        kept_in = folder_text(keep_in, "keep_in")
        self._kept = RetainedStep(None if kept_in is None else Path(kept_in))
        self._layout: object = None
        """The properties that must be equal for a delta: names, dtypes, shapes, cuts and locations of all tensors."""
        self._known: set[str] = set()
        """Names that may be last in the index. These are the names of this publisher's last step, or those in the index
        at its start, and all names that it has announced since. Other names belong to another publisher.
        """
        self._since_full = 0
        """Steps since the last folder."""
        self._share = 0.0
        """The bytes of the deltas since the last folder, as a share of that folder's bytes."""

    def publish(self, weights: Any, step: int) -> PublishedStep:
        """Publish the current weights; all members of the group together. They must not change meanwhile.

        Args:
            weights: a model of transformers, as for `relayout.transformers.save_pretrained`; or tensors by name, as for
                `relayout.save`.
            step: the number of the step, from 0. A training run that returns to an earlier checkpoint publishes a
                number again: readers of this number get its latest version, and readers of the newest step get the most
                recently published one.

        Returns:
            The step as readers see it.

        Raises:
            FormatError, PlanError, OSError: as `relayout.save`; or the root is a file or a checkpoint. Readers see the
                earlier steps; the next step that succeeds is a whole folder.
            FileExistsError: another publisher has taken over this repository. This one may take it back, by the next
                call.
        """
        published = list[PublishedStep]()

        def prepare() -> tuple[SaveRequest, Callable[[bool], HeldTensors]]:
            number = integer(step, "step")
            if not 0 <= number <= MAX_SIZE:  # Otherwise no reader could parse the index.
                raise PlanError(f"step: {number}, expected 0 to {MAX_SIZE}", code="option")

            def carry_out(save: PlannedSave) -> Summary:
                place = self._announce(save, number)
                make = partial(ImageUpdater, save, self._kept, self._saving.threads)
                summary = GroupSave(save, place, make, is_last=False).carry_out(self._saving.progress)
                published.append(self._move(place))
                return summary

            saving = replace(self._saving, instead=carry_out, what=f"step {number}")
            return saving, self._held_by(weights)

        try:
            start(prepare, self._of(weights), background=False)
            return published[0]
        except BaseException:
            self._kept.forget()
            raise

    def _held_by(self, weights: Any) -> Callable[[bool], HeldTensors]:
        """Return a function that returns the tensors that this process contributes to a save."""
        if isinstance(weights, Mapping):
            return holding(weights, self._config, self._dtype)
        from relayout.train.transformers import holding_model

        return holding_model(weights, self._dtype, int(self._saving.max_shard_size))

    def _of(self, weights: Any) -> ProcessGroup | None:
        """Return the group that saves weights."""
        if isinstance(weights, Mapping):
            return self._group
        from relayout.train.transformers import group_of

        return group_of(self._group)

    def _announce(self, save: PlannedSave, step: int) -> _StepDestination:
        """Decide which outputs are written, and announce their names in the index, before any of them exists."""
        planned, group = save.planned, save.group
        cuts = [(one.cut, one.dtype, one.shape) for one in planned.cut]
        held = [(one.name, parts.cut) for one, parts in zip(planned.source.tensors, save.holders.parts, strict=True)]
        layout = (planned.layout, cuts, held)
        if layout != self._layout:
            self._kept.forget()
        base = self._kept.content
        # From here on this step replaces the retained one.
        self._kept.content, self._layout = None, layout
        if len(set(group.all_gather(base))) > 1:
            base = None  # A member failed alone: its retained data belongs to no step, or to another one.
        names = _by_first(group, lambda: self._announced(step, base))
        return _StepDestination(self._root, step, names, planned, self._kept, self._saving.threads, group, self._signer)

    def _announced(self, step: int, base: str | None) -> dict[str, str]:
        """Return the names of a step's outputs, by kind, after adding them to the index.

        Args:
            base: the content of the step that all members retain; None: there is none.
        """
        token, names, is_known = os.urandom(4).hex(), dict[str, str](), bool(self._known)
        is_due = self._since_full + 1 >= self._full_every or self._share >= self._full_share

        def announce(index: StepsIndex) -> StepsIndex:
            if not is_known:
                self._known.update(index.last_names)
            elif not self._known.issuperset(index.last_names):
                self._known.clear()  # The next call takes the root back.
                raise _taken_over(self._root)
            has_delta = base is not None and bool(index.entries) and index.entries[-1].content == base
            kinds = [*([DELTA] if has_delta else []), *([FULL] if is_due or not has_delta else [])]
            names.clear()
            names.update((kind, step_name(kind, step, token)) for kind in kinds)
            self._known.update(names.values())  # Now: the answer to the write may be lost.
            return index.announced(names.values(), int(time.time()), self._grace_seconds)

        self._prune()  # Before anything is written: the step may need the space.
        self._root.make()
        self._root.move(announce)
        return names

    def _move(self, done: _StepDestination) -> PublishedStep:
        """Make a completely written step visible to readers."""

        def move() -> PublishedStep:
            entry = done.entry()
            index = self._root.move(partial(_published, entry, done, self._retention), _RESERVED_NBYTES)
            self._known = set(done.names.values()) & index.names
            if not self._known:
                raise _taken_over(done.root)
            return entry

        entry = _by_first(done.group, move, is_last=True)
        self._kept.content = entry.content
        self._since_full = 0 if entry.full is not None else self._since_full + 1
        changed = 0 if entry.delta is None else entry.delta.nbytes
        self._share = 0.0 if entry.full is not None else self._share + changed / max(1, done.planned.layout.nbytes)
        return entry

    def _prune(self) -> None:
        """Delete retired folders and deltas with an expired grace period."""
        try:
            self._root.prune()
        except (RelayoutError, OSError) as error:  # A step can be published all the same.
            getLogger("relayout").warning("relayout: %s: not all that is retired was deleted: %s", self._root, error)


def _taken_over(root: StepRepository) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "another publisher has taken over", str(root))


def _by_first(group: Group, make: Callable[[], Made], *, is_last: bool = False) -> Made:
    """Run `make` on the first member of a group, and return its result on all; all raise its error."""
    made = make() if group.index == 0 else None
    return cast("Made", group.all_gather(made, is_last=is_last)[0])


def _published(entry: PublishedStep, done: _StepDestination, retention: Retention, index: StepsIndex) -> StepsIndex:
    """Return the index with one more step. If another publisher has begun meanwhile, mark the files for deletion.

    Their names may have left the index already, if this process was suspended for longer than the grace period and then
    wrote them.
    """
    if not index.names.isdisjoint(done.names.values()):
        return index  # It was written, and the answer was lost.
    if set(index.pending) != set(done.names.values()):
        return index.abandoned(done.names.values(), entry.time)
    return index.published(entry, retention)


@dataclass(slots=True)
class _StepDestination:
    """The location of a step to publish: a `Destination` for a delta, a folder, or both."""

    root: StepRepository
    step: int
    names: Mapping[str, str]
    """The names of the outputs, by kind."""
    planned: Conversion
    kept: RetainedStep
    threads: int
    group: Group
    signer: Any
    """The signer, see `signing.signer_of`; None: nothing is signed."""
    delta_nbytes: int = 0

    def entry(self) -> PublishedStep:
        """Return the entry that readers will see."""
        nbytes = {FULL: self.planned.layout.nbytes, DELTA: self.delta_nbytes}
        stored = {kind: Stored(name, nbytes[kind]) for kind, name in self.names.items()}
        content = content_of(self.kept.manifest)
        return PublishedStep(self.step, content, stored.get(FULL), stored.get(DELTA), int(time.time()))

    def check(self, source: Store) -> None:
        """Do nothing: these names are unique."""

    @contextmanager
    def begin(self, work: OutputSpec, *, gathers: bool = False) -> Iterator[Output]:
        """Begin the outputs, which are published at the end of the block."""
        with ExitStack() as stack:
            output = self._output(work, stack, partial(StoreDestination.begin, gathers=gathers))
            yield output
        self.delta_nbytes = output.delta_nbytes

    @contextmanager
    def begin_part(self, work: OutputSpec) -> Iterator[Output]:
        """Begin parts of the outputs."""
        with ExitStack() as stack:
            yield self._output(work, stack, StoreDestination.begin_part)

    def _output(
        self,
        work: OutputSpec,
        stack: ExitStack,
        begun: Callable[[StoreDestination, OutputSpec], AbstractContextManager[Output]],
    ) -> StepOutput:
        delta = full = None
        if DELTA in self.names:
            place = find_store(self.root.path(self.names[DELTA]))
            delta = stack.enter_context(begun(StoreDestination(place, DELTA_OUTPUT), self._delta_work(work)))
        if FULL in self.names:
            place = find_store(self.root.path(self.names[FULL]))
            full = stack.enter_context(begun(StoreDestination(place, CONVERTED), work))
        files = [file.name for file in self.planned.layout.files]
        sign = None if self.signer is None else self._sign
        return StepOutput(self.kept, files, self.threads, delta=delta, full=full, sign=sign)

    def _sign(self, kind: str, manifest: bytes) -> bytes:
        """Return model.sig of a folder or a delta with this relayout.json."""
        return signed(self.signer, self.names[kind], {MANIFEST_NAME: sha256(manifest).hexdigest()})

    def _delta_work(self, work: OutputSpec) -> OutputSpec:
        """Return the description of the delta, for a folder described by `work`."""
        names = [NEW + name for name in other_names(self.planned)]
        names += [delta_name(file.name) for file in self.planned.layout.files]
        names += [NEW_MANIFEST_NAME, CHANGED_DIGESTS_NAME, SIGNATURE_NAME, MANIFEST_NAME]
        return replace(work, what=f"what changed up to step {self.step}", weights=(), others=names)
