"""The report of a load, and how an operator sees it: a line of the log, and counters in the Prometheus registry.

Engines serve `/metrics` from another process than those that load. prometheus_client adds up what processes count if
they have `PROMETHEUS_MULTIPROC_DIR`, which engines set or take over; without it the counters stay in this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from relayout.storage.system import describe_pages

if TYPE_CHECKING:
    from logging import Logger


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load has done."""

    rank: int
    num_ranks: int
    num_tensors: int = 0
    """Tensors that the engine was given."""
    nbytes: int = 0
    """Bytes of the rank's slices."""
    seconds: float = 0.0
    """Seconds from the first to the last tensor, with what the engine did between them."""
    backend: str = "auto"
    cache: str = "none"
    """Whether the rank's files were in a cache on the drive: "hit", "miss", or "none": it has no cache."""
    num_whole: int = 0
    """Whole tensors that had to be read from the files of all ranks."""
    whole_nbytes: int = 0
    memory: int = 0
    """The most bytes that the load was allowed to take beside the engine's tensors."""
    page_cache_nbytes: int | None = None
    """Bytes of the files that the page cache has more, or less, than before; None: unknown."""
    num_readers: int = 1
    """Replicas that have read the slices together, each a part of them; 1: this process alone."""
    unused: tuple[str, ...] = ()
    """Tensors whose slice was read, and that nothing has been asked of yet."""

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9)
        cached = self.page_cache_nbytes
        page_cache = "" if cached is None else f", page cache {cached / 1e9:+.3f} GB"
        together = f", read once for {self.num_readers} replicas" if self.num_readers > 1 else ""
        return (
            f"relayout: rank {self.rank} of {self.num_ranks}: {self.nbytes / 1e9:.3f} GB in {self.seconds:.2f} s"
            f" ({rate / 1e9:.2f} GB/s), {self.num_tensors} tensors, backend {self.backend},"
            f" cache {self.cache}, {self.num_whole} whole tensors read ({self.whole_nbytes / 1e9:.3f} GB),"
            f" at most {self.memory / 2**20:.0f} MiB beside the tensors{page_cache}{together}"
            f", {describe_pages()}"
        )


def publish(report: LoadReport, logger: Logger) -> None:
    """Log a load, and count it where prometheus_client is installed. Never raises: a load does not fail for it."""
    logger.info("%s", report)
    try:
        for counter, amount in zip(_counters(), (1, report.nbytes, report.seconds), strict=True):
            counter.labels(report.backend, report.cache).inc(amount)
    except ImportError:
        pass
    except Exception as error:  # PROMETHEUS_MULTIPROC_DIR that cannot be written, or counters of somebody else.
        logger.warning("relayout: the load is not counted by Prometheus: %s", error)


@cache
def _counters() -> tuple[Any, ...]:
    from prometheus_client import Counter

    labels = ("backend", "cache")
    return (
        Counter("relayout_loads_total", "Loads of one rank's weights.", labels),
        Counter("relayout_loaded_bytes_total", "Bytes of the ranks' slices.", labels),
        Counter("relayout_load_seconds_total", "From the first tensor of a load to its last.", labels),
    )
