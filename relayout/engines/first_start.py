"""The first start of an engine on a plain checkpoint: it is converted into a cache, from which later starts load.

A remote checkpoint is streamed into the cache, and loaded from there. A local checkpoint is loaded by the engine
itself, as fast as without relayout; then a low-priority process converts it while the engine serves. The conversion
begins when all processes of the machine have loaded: each holds a shared lock of the cache while it loads.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING

from relayout.cache.folder import Cache, cache_of
from relayout.core.arguments import ranks_text
from relayout.core.workers import PIPE, QUIET, Child, start_child
from relayout.errors import PlanError
from relayout.storage.local.descriptors import FileLock
from relayout.storage.stores import find_input, scheme_of

if TYPE_CHECKING:
    from relayout.cache.conversions import CachedConversion
    from relayout.checkpoint.source import SourceCheckpoint
    from relayout.conversion.layout import Conversion
    from relayout.engines.rank_weights import EngineOptions
    from relayout.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class DeferredConversion:
    """A conversion into the cache that starts when the engine has loaded the checkpoint."""

    source: str
    arguments: tuple[str, ...]
    """The arguments of `relayout cache`."""
    cache: Cache
    logger: Logger
    load_lock: FileLock | None
    """The shared lock that makes conversions wait for this load. Released with the load, this object, or the process.
    """

    def start(self) -> None:
        """Start the conversion in a process of its own, unless one already fills this cache. Never raises.

        The process converts once no other process of the machine is loading, and ends with this process. The next start
        continues an unfinished conversion.
        """
        if self.load_lock is not None:
            self.load_lock.close()
        right: FileLock | None = None
        try:
            right = self.cache.try_filling()
            if right is None:
                return
            # The child holds the lock, too, while it runs, even if this process is killed.
            child = start_child(
                "relayout", "cache", *self.arguments, stdin=PIPE, stdout=QUIET, stderr=PIPE, pass_fds=(right.fd,)
            )
            try:
                threading.Thread(target=self._watch, args=(child, right), name="relayout-cache", daemon=True).start()
            except RuntimeError:  # Too many threads.
                assert child.stdin is not None
                child.stdin.close()  # Ends the child.
                raise
        except Exception as error:
            if right is not None:
                right.close()
            self.logger.warning("relayout: %s is not converted into the cache: %s", self.source, error)
            return
        self.logger.info(
            "relayout: %s is being converted into the cache %s, at low priority: later starts load from there",
            self.source, self.cache.folder,
        )  # fmt: skip

    def _watch(self, child: Child, right: FileLock) -> None:
        assert child.stderr is not None
        with right:
            words = child.stderr.read().decode(errors="replace").strip()
            status = child.wait()
        if status == 0:
            self.logger.info("relayout: %s is in the cache %s", self.source, self.cache.folder)
        else:
            said = [line for line in words.splitlines() if not line.startswith("relayout: next: ")]
            why = said[-1] if said else f"exit status {child.returncode}"
            self.logger.warning("relayout: %s was not converted into the cache: %s", self.source, why)


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """A conversion of a plain checkpoint that an engine would load if a cache had it."""

    source: str
    """A folder or URL."""
    num_ranks: int
    expert_parallel: bool = False
    """True if experts are owned whole, in contiguous blocks over the ranks."""
    ranks: Collection[int] | None = None
    """The ranks on this node, if some ranks run on other nodes: only these are converted. None: all."""
    observe: str | None = None
    """The engine that plans are observed from if no built-in plan fits the model. None: plans are not observed."""

    @property
    def is_local(self) -> bool:
        """True if the checkpoint is on a drive, where the engine loads it as fast as without relayout."""
        return scheme_of(self.source) is None

    def find(self, cache: Cache, logger: Logger) -> CachedConversion | None:
        """Return the conversion; a remote checkpoint is converted now. None: a local one is not in the cache yet."""
        from relayout.cache.conversions import NoCachedPlan, cached_conversion, find_conversion, plan_in

        def on_miss(conversion: Conversion) -> None:
            who = "" if self.ranks is None else f"the ranks {ranks_text(self.ranks)} of "
            logger.info(
                "relayout: converting %s for %s%d ranks into the cache %s",
                self.source, who, self.num_ranks, cache.folder,
            )  # fmt: skip

        def find_plan(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
            owned = self.expert_parallel
            return plan_in(
                cache, checkpoint, num_ranks, expert_parallel=owned, observe=self.observe, only_kept=self.is_local
            )

        store = find_input(self.source).snapshot()
        if not self.is_local:
            return cached_conversion(store, self.num_ranks, cache, find_plan, ranks=self.ranks, on_miss=on_miss)
        with suppress(NoCachedPlan):
            return find_conversion(store, self.num_ranks, cache, find_plan, ranks=self.ranks)
        return None

    def deferred(self, cache: Cache, logger: Logger) -> DeferredConversion:
        """Return the background conversion to start after the load."""
        folder, model = (str(Path(path).absolute()) for path in (cache.folder, self.source))
        arguments = ["add", model, "--tp", str(self.num_ranks), "--folder", folder, "--background"]
        arguments += ["--expert-parallel"] if self.expert_parallel else []
        arguments += ["--ranks", ranks_text(self.ranks)] if self.ranks is not None else []
        arguments += ["--observe", self.observe] if self.observe is not None else []
        return DeferredConversion(self.source, tuple(arguments), cache, logger, cache.register_load())


def first_start(
    wanted: ConversionRequest, options: EngineOptions, otherwise: str, logger: Logger
) -> CachedConversion | DeferredConversion | None:
    """Return a plain checkpoint's conversion in the cache, or the conversion to start after the engine's load.

    A start that would succeed without relayout must not fail with it: an error of cache, plan or source is logged, and
    the engine's own loader takes the checkpoint. Only a wrong option is an error.

    Args:
        otherwise: how the checkpoint is loaded without a cache, for messages.

    Raises:
        PlanError: the option `cache` is a folder inside the checkpoint.
    """
    cache, source = cache_of(options.cache), wanted.source
    if cache is None:
        logger.warning(
            "relayout: %s was not converted: %s. With a cache (RELAYOUT_CACHE=FOLDER) the first start converts it, and"
            " each rank of a later start reads only its own bytes",
            source, otherwise,
        )  # fmt: skip
        return None
    inside = options.cache is not None and wanted.is_local
    if inside and Path(str(options.cache)).resolve().is_relative_to(Path(source).resolve()):
        what = "the option cache: is inside the model's folder; choose another"
        raise PlanError(what, path=options.cache, code="option")
    if wanted.num_ranks == 1 and wanted.is_local:
        logger.info("relayout: %s is read whole by one rank: %s", source, otherwise)
        return None
    try:
        return wanted.find(cache, logger) or wanted.deferred(cache, logger)
    except Exception as error:
        logger.warning("relayout: %s cannot be kept in the cache %s: %s: %s", source, cache.folder, error, otherwise)
        return None
