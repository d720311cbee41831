"""The first start of an engine on a plain checkpoint: it is converted into a cache, from which later starts load."""

from __future__ import annotations

import re
from collections.abc import Collection
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING

from relayout.core.arguments import ranks_text
from relayout.engines.rank_weights import Folder, find_folder
from relayout.errors import PlanError
from relayout.storage.stores import find_input, scheme_of

if TYPE_CHECKING:
    from relayout.checkpoint.source import SourceCheckpoint
    from relayout.conversion.cached import CachedConversion, FindPlan
    from relayout.conversion.run import ConversionPlan
    from relayout.engines.rank_weights import EngineOptions
    from relayout.plans.plan import Plan

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)


def source_url(model: str, revision: str | None) -> str:
    """The folder or URL of a model as engines name it: a folder, a URL, or the id of a repository on the hub."""
    if not _REPOSITORY.fullmatch(model) or Path(model).exists():
        return model
    return f"hf://{model}" + (f"@{revision}" if revision else "")


def folder_of(source: str) -> Folder | None:
    """How a folder or URL was converted; None: it was not. What is on the hub by its id is the engine's to find.

    Raises:
        FormatError, PlanError: as `find_folder`.
    """
    return None if scheme_of(source) == "hf" else find_folder(source, "--load-format auto")


def loads_itself(source: str) -> bool:
    """Whether engines load a plain checkpoint there by their own loaders: a local folder, or one on the hub."""
    return scheme_of(source) in (None, "hf")


def first_start(
    source: str,
    num_ranks: int,
    options: EngineOptions,
    engine: str,
    logger: Logger,
    *,
    expert_parallel: bool = False,
    ranks: Collection[int] | None = None,
    observe: tuple[str, FindPlan] | None = None,
) -> CachedConversion | None:
    """The conversion of a plain checkpoint in the cache, made now if need be. Never raises.

    A start that would succeed without relayout must not fail with it: whatever is wrong with cache, plan or source is
    logged, and the engine's own loader takes the checkpoint.

    Args:
        source: a folder or URL.
        engine: its name, for messages.
        expert_parallel: whether experts are owned whole, in contiguous blocks over the ranks.
        ranks: those on this node, if others are elsewhere: only these are converted. None: all.
        observe: what the observed plan depends on, such as the engine's version, and what observes it, for models that
            no built-in plan is for.

    Returns:
        None: the engine loads the checkpoint itself.
    """
    from relayout.loader.sources.cached import cache_of

    cache = cache_of(options.cache)
    instead = f"{engine} loads it itself" if loads_itself(source) else "it is sliced while it is loaded"
    if cache is None:
        logger.info(
            "relayout: %s was not converted: %s. With a cache (RELAYOUT_CACHE=FOLDER) the first start converts it, and"
            " each rank of a later start reads only its own bytes",
            source, instead,
        )  # fmt: skip
        return None
    if num_ranks == 1 and scheme_of(source) is None:
        logger.info("relayout: %s is read whole by one rank: %s", source, instead)
        return None

    def on_miss(conversion: ConversionPlan) -> None:
        who = f"{num_ranks} ranks" if ranks is None else f"the ranks {ranks_text(ranks)} of {num_ranks}"
        logger.info("relayout: converting %s for %s into the cache %s", source, who, cache.folder)

    def find_plan(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        from relayout.conversion.cached import kept_plan
        from relayout.plans.planner import plan_for

        try:
            return plan_for(checkpoint, num_ranks, expert_parallel=expert_parallel)
        except PlanError as error:
            if observe is None or expert_parallel or error.code != "no_plan":
                raise
        name, plan_of = observe
        return kept_plan(checkpoint, num_ranks, cache, name, lambda: plan_of(checkpoint, num_ranks))

    try:
        from relayout.conversion.cached import cached_conversion

        store = find_input(source).snapshot()
        return cached_conversion(store, num_ranks, cache, find_plan, ranks=ranks, on_miss=on_miss)
    except Exception as error:
        logger.warning("relayout: %s cannot be kept in the cache %s: %s: %s", source, cache.folder, error, instead)
        return None
