"""What a caller asks of a load; a load into a new arena; advice on errors."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from relayout.core.arguments import integer, size
from relayout.errors import PlanError, warn
from relayout.loader.backends.base import Backend, ReadJob, choose, kind_of, resolve_device
from relayout.loader.budgets import Budget, plan_budget
from relayout.loader.sources.checkpoint import changed_rank, find_rank
from relayout.loader.sources.rank import ArenaPlan, Names, RankSource, StoredFile, cost_of
from relayout.loader.tensors import make_views, to_device
from relayout.reporting import Progress, reporting
from relayout.storage.stores import RequestError
from relayout.storage.system import advice_on_limit

if TYPE_CHECKING:
    import torch

    from relayout.cache.folder import CacheOption
    from relayout.checkpoint.delta import Paths
    from relayout.checkpoint.trust import Trust
    from relayout.storage.stores import Store

_NO_ANSWER = {errno.ENOTCONN, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.ETIMEDOUT)}
"""The system's errors for a server that does not answer; macOS has no EREMOTEIO."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to load: what a caller asked for, checked."""

    device: str | torch.device = "cpu"
    backend: str = "auto"
    verify: bool = False
    threads: int | None = None
    memory: int | None = None
    """Bytes."""
    progress: Progress = None

    @property
    def kind(self) -> str:
        """The kind of the device: "cpu", "cuda" or another of torch's."""
        return kind_of(self.device)

    def choose(self, files: Sequence[StoredFile]) -> tuple[Backend[Any], Budget]:
        """The backend for these files, and its budget.

        Raises:
            PlanError: the device is "meta"; or as `backends.base.choose` and `budgets.plan_budget`.
        """
        backend = choose(self.backend, self.device, self.proving(files))
        if self.kind == "meta":
            raise PlanError("device 'meta': its tensors have no memory to load into", code="option")
        return backend, plan_budget(self.threads, self.memory, backend.max_buffer_nbytes, cost_of(files))

    def proving(self, files: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
        """The files as they are read: with `verify`, their bytes are proven."""
        return tuple(file.proven() for file in files) if self.verify else tuple(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a caller asks of a load, as given: nothing is checked or read yet. `relayout.load` explains the fields."""

    path: str | os.PathLike[str] | Store
    rank: int
    device: str | torch.device = "cpu"
    backend: str = "auto"
    names: Names = None
    verify: bool = False
    threads: int | None = None
    memory: int | str | None = None
    progress: Progress = None
    into: Mapping[str, torch.Tensor] | None = None
    tp: int | None = None
    cache: CacheOption = None
    deltas: Paths = ()
    trust: Trust = None
    is_shared: bool = False
    """Whether the members of a group share the load."""

    def options(self) -> Options:
        """How to load.

        Raises:
            PlanError: the device cannot be used, `threads` is not an integer, `memory` is not a size, or a group cannot
                do this.
        """
        if self.is_shared and self.into is not None:
            raise PlanError("group cannot be combined with into: a group loads into new memory", code="option")
        if self.is_shared and self.cache:
            what = "group cannot be combined with cache: members share the reads of a rank, a cache fetches all of it"
            raise PlanError(what, code="option")
        if find_spec("torch") is None:  # Before anything is read.
            raise no_torch()
        return Options(
            device=resolve_device(self.device),
            backend=self.backend,
            verify=self.verify,
            threads=None if self.threads is None else integer(self.threads, "threads"),
            memory=None if self.memory is None else size(self.memory, "memory"),
            progress=self.progress,
        )

    def source(self) -> RankSource:
        """Find the rank; what a cache lacks of it is fetched now.

        Raises:
            FormatError, OSError: as `find_rank`, and `changed_rank` of deltas.
            PlanError: the same; or `verify` is set and the checkpoint is a plain one.
        """
        cache = "" if self.is_shared else self.cache
        found = find_rank(self.path, self.rank, tp=self.tp, cache=cache, progress=self.progress, trust=self.trust)
        if self.deltas:
            found = changed_rank(found, self.tp, self.deltas)
        if self.verify and found.is_plain:
            what = "cannot be verified: only converted checkpoints have digests"
            raise PlanError(what, path=str(found.store), code="unsupported")
        return found


def warn_if_slow(source: RankSource) -> None:
    """Warn, at the line that called relayout, if there is a faster way to load."""
    if source.slow_because is not None:
        warn(source.slow_because)


def load_arena(plan: ArenaPlan, options: Options) -> dict[str, torch.Tensor]:
    """Load tensors into a new arena."""
    backend, budget = options.choose(plan.files)
    job = ReadJob(options.proving(plan.files), plan.reads, budget)
    with reporting(options.progress, "loading", plan.nbytes) as report:
        arena = backend.allocate(plan.arena_nbytes)
        try:
            running = backend.start(arena, job)
            try:
                tensors = plan.tensors()
                if backend.device != options.device:
                    running.join(report)
                    return make_views(to_device(arena.tensor(), options.device), tensors)
                views = make_views(arena.tensor(), tensors)
                running.join(report)
                return views
            except BaseException:
                running.cancel()
                raise
        except BaseException:
            arena.discard()
            raise


@contextmanager
def error_hints() -> Iterator[None]:
    """Add a hint to errors of the system that have one."""
    try:
        yield
    except Exception as error:
        better = _with_hint(error)
        if better is None:
            raise
        raise better from (None if isinstance(error, ModuleNotFoundError) else error)


def no_torch() -> ModuleNotFoundError:
    """The error of a load without torch."""
    return ModuleNotFoundError("torch is not installed, but loading needs it: pip install torch", name="torch")


def _with_hint(error: Exception) -> Exception | None:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return no_torch()
    if isinstance(error, MemoryError) and not str(error):
        return MemoryError(f"no memory is left for a load's own objects, beside tensors and buffers{_limit()}")
    if not isinstance(error, OSError) or isinstance(error, RequestError):  # Which says itself what to do.
        return None
    hint = _hint(error.errno)
    if hint is None or str(error.strerror).endswith(hint):
        return None
    return OSError(error.errno, f"{error.strerror}; {hint}", error.filename)


def _hint(code: int | None) -> str | None:
    match code:
        case errno.EMFILE:
            return advice_on_limit()
        case errno.ENFILE:
            return "the system has too many files open: see fs.file-max"
        case errno.EACCES | errno.EPERM:
            return f"check the permissions of file and folders (user {os.geteuid()})"
        case errno.EIO:
            return "the drive or file system failed: see dmesg, then restore the file and run relayout verify"
        case errno.ESTALE:
            return "the network file system has replaced the file: mount it again, or load again"
        case errno.ENOMEM:
            return "the system has no memory for the request: load with fewer threads, or raise ulimit -l"
        case errno.EAGAIN:
            return "a limit of this process or user is reached: load with fewer threads, or raise ulimit -u or -l"
    return "the network file system does not answer" if code in _NO_ANSWER else None


def _limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f": this process may have {limit} bytes (ulimit -v)"
