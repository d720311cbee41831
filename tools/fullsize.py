"""Plans conversions of full-size models: true headers, holes for data, so that terabytes take no room.

Prints one row for each model as Markdown: what it is, how long `relayout convert --dry-run` takes, the memory it takes,
and what each rank would hold. `--sizing` instead writes the sizes of three models for 8 and for 16 ranks to
tools/results/sizing.json, from which `tools/run documents` makes the table of docs/guides/FLEET.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.hub_models import MODELS, Model

SIZING = Path(__file__).parent / "results" / "sizing.json"
SIZED = ("Llama-3.1-70B", "Llama-3.1-405B", "Kimi-K2-Instruct")
DEGREES = (8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names, as in tests/support/hub_models.py; default is all")
    parser.add_argument("--folder", type=Path, help="where the sparse files go; default is a temporary folder")
    parser.add_argument("--sizing", action="store_true", help=f"write {SIZING.relative_to(Path(__file__).parents[1])}")
    arguments = parser.parse_args()
    if arguments.sizing:
        SIZING.write_text(json.dumps(sizes(arguments.folder), indent=1) + "\n")
        return
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        parser.error(f"no model {min(unknown)!r}, there are: {', '.join(MODELS)}")
    print("| model | tensors | GB | ranks | GB a rank | replicated | tail | seconds | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        for name in arguments.models or MODELS:
            folder = Path(scratch) / name
            MODELS[name].write(folder)
            print(row(MODELS[name], *dry_run(folder, MODELS[name].tp)), flush=True)
            shutil.rmtree(folder)


def sizes(scratch: Path | None) -> list[dict[str, Any]]:
    """Return one object for each model and degree: bytes of the source, of the output, and of the largest rank."""
    found = []
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for name in SIZED:
            MODELS[name].write(Path(folder) / name)
            for tp in DEGREES:
                planned, _, peak = dry_run(Path(folder) / name, tp)
                found.append(
                    {
                        "model": name,
                        "tp": tp,
                        "source_nbytes": planned["source_nbytes"],
                        "written_nbytes": planned["written_nbytes"],
                        "rank_nbytes": max(planned["rank_nbytes"]),
                        "planning_peak_nbytes": peak,
                    }
                )
            shutil.rmtree(Path(folder) / name)
    return found


_MEASURED = """
import sys
from relayout.cli.app import main
try:
    main()
finally:
    [peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(peak, file=sys.stderr)
"""


def dry_run(folder: Path, tp: int) -> tuple[dict[str, Any], float, int]:
    """What `relayout convert --dry-run` says, the seconds it took, and its peak resident bytes."""
    command = [sys.executable, "-c", _MEASURED, "convert", str(folder), "--tp", str(tp), "--dry-run", "--json"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{folder.name}: {done.stderr}")
    return json.loads(done.stdout), seconds, int(done.stderr.split()[-1]) * 1024


def row(model: Model, planned: dict[str, Any], seconds: float, peak: int) -> str:
    """A row of the table."""
    total, ranks = planned["source_nbytes"], planned["rank_nbytes"]
    low, high = (f"{nbytes / 1e9:.3g}" for nbytes in (min(ranks), max(ranks)))
    cells = (
        f"{model.name} ({model.config['model_type']})",
        f"{planned['num_tensors']:,}",
        f"{total / 1e9:.4g}",
        str(planned["num_ranks"]),
        low if low == high else f"{low} to {high}",
        f"{100 * planned['replicated_nbytes'] / total:.2f} %",
        f"{100 * planned['tail_nbytes'] / sum(ranks):.2f} %",
        f"{seconds:.1f}",
        f"{peak / 1e6:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
