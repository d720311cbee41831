"""Published times of fleet starts, and what the simulation says of the same. What is not published is named.

The factor between the two is what to expect of any other figure of the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.simulation import GLOBAL, ONE_READER, RANGES, Fleet, simulate


@dataclass(frozen=True)
class Published:
    """A time that somebody else has measured."""

    what: str
    seconds: float
    way: str
    fleet: Fleet
    assumed: str
    """What is not published."""

    @property
    def simulated(self) -> float:
        """Seconds until the last rank is ready."""
        return simulate(self.way, self.fleet).last


PUBLISHED = (
    Published(
        "run:ai streamer, Llama-3-8B (15 GB) from S3, concurrency 32, one GPU",
        4.88,
        RANGES,
        Fleet(
            1,
            15e9,
            storage=1e12,
            nic=5e9,
            num_ranks=1,
            reader=5e9,
            latency=0.1,
            connection=0.625e9,
            concurrency=32,
            replicated=0,
        ),
        "NIC 40 Gb/s, 0.1 s latency, 5 Gb/s a connection, requests of 8 MiB",
    ),
    Published(
        "run:ai streamer in vLLM, Kimi-K2.5 (620 GB), storage where fio reads 40 GB/s",
        40.0,
        ONE_READER,
        Fleet(1, 620e9, storage=40e9, nic=50e9, num_ranks=8, reader=1.7 * 2**30),
        "nothing: 1.7 GiB/s a rank is published, too",
    ),
    Published(
        "ModelExpress, DeepSeek-V3 (681 GB) from GPU to GPU, 8 x 112 Gb/s",
        15.0,
        RANGES,
        Fleet(1, 681e9, storage=112e9, nic=112e9, num_ranks=8, reader=14e9),
        "that the NICs are the limit",
    ),
    Published(
        "checkpoint-engine, Kimi-K2 (1,030 GB) to 256 H20, broadcast",
        16.0,
        GLOBAL,
        Fleet(32, 1030e9, storage=1e15, nic=100e9, num_ranks=8, reader=1e12),
        "NICs of 8 x 100 Gb/s; the model is in host memory",
    ),
    Published(
        "relayout, one rank of TP 8 (372 MB) from a store on loopback",
        0.65,
        RANGES,
        Fleet(1, 371.8e6, storage=1.2e9, nic=1e12, num_ranks=1, reader=0.72e9, replicated=0),
        "nothing: client and server were measured apart",
    ),
)
"""With their sources in `relayout/conversion/CLUSTERS.md`."""

WITHIN = 2.6
"""The factor within which the simulation reproduces all of them."""
