"""`tools/run fleet document | chart PNG | loopback`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleet import loopback, tables
from fleet.simulation import EVERY_RANK, GROUP, PIECE_NBYTES, RANGES, Fleet, simulate

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def document() -> None:
    """Write the tables into CLUSTERS.md."""
    tables.DOCUMENT.write_text(tables.document())


@app.command()
def chart(path: Annotated[Path, typer.Argument(help="PNG to write.")]) -> None:
    """Draw seconds over nodes."""
    tables.draw(path)


@app.command(name="loopback")
def real() -> None:
    """Start a small fleet over real sockets, and compare with the simulation."""
    for way in (EVERY_RANK, RANGES, GROUP):
        for num_nodes in (1, 3, 6):
            fleet = loopback_fleet(num_nodes)
            rounds = loopback.rounds_of(fleet, PIECE_NBYTES)
            seconds, nbytes = loopback.measure(way, fleet, rounds)
            expected = simulate(way, fleet)
            print(
                f"{way:24} {num_nodes} nodes: {seconds:6.2f} s measured, {expected.last:6.2f} s simulated;"
                f" {nbytes / 1e6:6.1f} MB left the storage, {expected.storage_nbytes / 1e6:6.1f} simulated"
            )


def loopback_fleet(num_nodes: int) -> Fleet:
    """A fleet that one processor can be: 20 MB/s of storage, 10 MB/s a node."""
    return Fleet(
        num_nodes,
        6e6,
        storage=20e6,
        nic=10e6,
        num_ranks=2,
        replicated=0,
        latency=0.02,
        concurrency=1,
        request_nbytes=6e6,
    )


app()
