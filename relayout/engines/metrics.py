"""What an operator sees of a load: one line of the log, and counters in the engine's Prometheus registry.

Engines serve `/metrics` from another process than those that load. prometheus_client adds up what processes count if
they have `PROMETHEUS_MULTIPROC_DIR`, which engines set or take over; without it the counters stay in this process.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logging import Logger

    from relayout.engines.rank_weights import Report


def publish(report: Report, logger: Logger) -> None:
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
