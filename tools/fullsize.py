"""Plans conversions of full-size models: true headers, holes for data, so that terabytes take no room.

Prints one row for each model as Markdown: what it is, how long `relayout convert --dry-run` takes, the memory it takes,
and what each rank would hold.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names, as in tests/support/hub_models.py; default is all")
    parser.add_argument("--folder", type=Path, help="where the sparse files go; default is a temporary folder")
    arguments = parser.parse_args()
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
