"""Joins a kit on the GPU machine, and runs the step `engine` there: `python3 tools/gpu/join.py FOLDER [--out DIR]`.

Needs Python's standard library only. Called from the project's root once for each piece. Pieces are kept in HOME; the
last call checks their digests, unpacks them, and registers relayout's plugins for vLLM. With `--out` it then runs
`gpu.engine`, whose arguments may follow after `--`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with one piece, as `--step kit` has written it")
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir(), "relayout-kit"))
    parser.add_argument("--out", type=Path, help="folder of results; without it, only join")
    parser.add_argument("rest", nargs="*", help="arguments of gpu.engine, after --")
    options = parser.parse_args()
    site = options.home / "site"
    if not (site / "joined").exists():
        started = time.monotonic()
        if missing := keep(options.folder, options.home):
            print(f"kit: still to come: {', '.join(missing)}")
            return
        unpack(options.home, site)
        register(site)
        (site / "joined").touch()
        print(f"kit: unpacked in {time.monotonic() - started:.1f} s", flush=True)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "tests", site, options.home / "unpacker")))
    environment = {**os.environ, "PYTHONPATH": path}
    if options.out is None:
        print(f"kit: PYTHONPATH={path}")
        return
    command = [sys.executable, "-P", "-m", "gpu.engine", str(options.out.absolute()), *options.rest]
    sys.exit(subprocess.run(command, env=environment).returncode)


def keep(folder: Path, home: Path) -> list[str]:
    """Copy a piece to the others, and return the names of those that are missing."""
    pieces = home / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (pieces / file.name).write_bytes(file.read_bytes())
    count = len(json.loads((pieces / "kit.json").read_text())["pieces"])
    return [name for name in (f"piece-{number}" for number in range(1, count + 1)) if not (pieces / name).exists()]


def unpack(home: Path, site: Path) -> None:
    """Unpack all pieces into `site`, after their digests were compared."""
    digests = json.loads((home / "pieces" / "kit.json").read_text())["pieces"]
    joined = home / "joined"
    with joined.open("wb") as file:
        for number, digest in enumerate(digests, 1):
            piece = (home / "pieces" / f"piece-{number}").read_bytes()
            if hashlib.sha256(piece).hexdigest() != digest:
                raise SystemExit(f"kit: piece {number} is damaged: carry it again")
            file.write(piece)
    with zipfile.ZipFile(home / "pieces" / "unpacker.zip") as archive:
        archive.extractall(home / "unpacker")
    sys.path.insert(0, str(home / "unpacker"))
    import zstandard

    with (
        joined.open("rb") as packed,
        zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(packed) as reader,
        tarfile.open(fileobj=reader, mode="r|") as archive,
    ):
        archive.extractall(site, filter="data")
    joined.unlink()


def register(site: Path) -> None:
    """Write the metadata by which vLLM finds relayout's plugin; relayout itself is imported from its tree."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [line for name, of in groups.items() for line in (f"[{name}]", *(f"{k} = {v}" for k, v in of.items()))]
    folder = site / "safetensors_relayout-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors-relayout\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
