"""The first start of an engine on a plain checkpoint: it is converted into a cache, from which later starts load.

What must be downloaded is streamed into the cache, and loaded from there. What is on a drive the engine loads itself,
as fast as without relayout; then a process of low priority converts it while the engine goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING

from relayout.core.arguments import ranks_text
from relayout.core.workers import PIPE, QUIET, Child, start_child
from relayout.engines.folders import WeightsPlace
from relayout.errors import PlanError
from relayout.storage.cache_folder import Cache, cache_of
from relayout.storage.local.lock_file import HeldLock
from relayout.storage.stores import find_input, scheme_of

if TYPE_CHECKING:
    from relayout.checkpoint.source import SourceCheckpoint
    from relayout.conversion.cached import CachedConversion, Observer
    from relayout.conversion.layout import Conversion
    from relayout.engines.rank_weights import EngineOptions
    from relayout.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Filling:
    """A conversion into the cache that is to begin when the engine has loaded the checkpoint."""

    source: str
    arguments: tuple[str, ...]
    """The arguments of `relayout cache`."""
    cache: Cache
    logger: Logger

    def start(self) -> None:
        """Start it in a process of its own, unless one already fills this cache. Never raises.

        It ends with this process. The next start continues what was not finished.
        """
        right: HeldLock | None = None
        try:
            right = self.cache.try_filling()
            if right is None:
                return
            # The child holds it, too, for as long as it runs, also if this process is killed.
            child = start_child(
                "relayout", "cache", *self.arguments, stdin=PIPE, stdout=QUIET, stderr=PIPE, pass_fds=(right.fd,)
            )
            try:
                threading.Thread(target=self._watch, args=(child, right), name="relayout-cache", daemon=True).start()
            except RuntimeError:  # Too many threads.
                assert child.stdin is not None
                child.stdin.close()  # Ends it.
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

    def _watch(self, child: Child, right: HeldLock) -> None:
        assert child.stderr is not None
        with right:
            words = child.stderr.read().decode(errors="replace").strip()
            status = child.wait()
        if status == 0:
            self.logger.info("relayout: %s is in the cache %s", self.source, self.cache.folder)
        else:
            why = words.splitlines()[-1] if words else f"exit status {child.returncode}"
            self.logger.warning("relayout: %s was not converted into the cache: %s", self.source, why)


def first_start(
    source: str,
    num_ranks: int,
    options: EngineOptions,
    engine: str,
    logger: Logger,
    *,
    expert_parallel: bool = False,
    ranks: Collection[int] | None = None,
    observe: Callable[[], Observer] | None = None,
) -> tuple[CachedConversion | None, Filling | None]:
    """The conversion of a plain checkpoint in the cache, or how it gets there.

    A start that would succeed without relayout must not fail with it: whatever is wrong with cache, plan or source is
    logged, and the engine's own loader takes the checkpoint. Only a wrong option is an error.

    Args:
        source: a folder or URL.
        engine: its name, for messages.
        expert_parallel: whether experts are owned whole, in contiguous blocks over the ranks.
        ranks: those on this node, if others are elsewhere: only these are converted. None: all.
        observe: returns what finds plans for models that no built-in plan is for.

    Returns:
        The conversion; None: the engine loads the checkpoint itself. And what it starts then, when it has loaded.

    Raises:
        PlanError: the option `cache` is a folder inside the checkpoint.
    """
    cache = cache_of(options.cache)
    is_readable = WeightsPlace(source).has_engines_loader
    instead = f"{engine} loads it itself" if is_readable else "it is sliced while it is loaded"
    if cache is None:
        logger.info(
            "relayout: %s was not converted: %s. With a cache (RELAYOUT_CACHE=FOLDER) the first start converts it, and"
            " each rank of a later start reads only its own bytes",
            source, instead,
        )  # fmt: skip
        return None, None
    is_local = scheme_of(source) is None
    if options.cache is not None and is_local and Path(options.cache).resolve().is_relative_to(Path(source).resolve()):
        raise PlanError(
            "the option cache: is inside the model's folder; choose another", path=options.cache, code="option"
        )
    if num_ranks == 1 and is_local:
        logger.info("relayout: %s is read whole by one rank: %s", source, instead)
        return None, None

    def on_miss(conversion: Conversion) -> None:
        who = f"{num_ranks} ranks" if ranks is None else f"the ranks {ranks_text(ranks)} of {num_ranks}"
        logger.info("relayout: converting %s for %s into the cache %s", source, who, cache.folder)

    def find_plan(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        return plan_in(
            cache, checkpoint, num_ranks, expert_parallel=expert_parallel, observe=observe, only_kept=is_local
        )

    try:
        from relayout.conversion.cached import NotKept, cached_conversion, find_conversion, plan_in

        store = find_input(source).snapshot()
        if not is_local:
            return cached_conversion(store, num_ranks, cache, find_plan, ranks=ranks, on_miss=on_miss), None
        with suppress(NotKept):
            if (found := find_conversion(store, num_ranks, cache, find_plan, ranks=ranks)) is not None:
                return found, None
    except Exception as error:
        logger.warning("relayout: %s cannot be kept in the cache %s: %s: %s", source, cache.folder, error, instead)
        return None, None
    folder, model = (str(Path(path).absolute()) for path in (cache.folder, source))
    arguments = ["add", model, "--tp", str(num_ranks), "--folder", folder, "--background"]
    arguments += ["--expert-parallel"] if expert_parallel else []
    arguments += ["--ranks", ranks_text(ranks)] if ranks is not None else []
    arguments += ["--observe"] if observe is not None else []
    return None, Filling(source, tuple(arguments), cache, logger)
