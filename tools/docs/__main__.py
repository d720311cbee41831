"""Builds the documents as a site with search and an API reference, into build/docs/site. A broken link is an error.

The first run makes an environment of its own, .venv/docs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from docs.pages import ROOT, pages

_DOCS, _ENVIRONMENT = ROOT / "docs", ROOT / ".venv" / "docs"


def main() -> int:
    argparse.ArgumentParser(prog="docs", description=__doc__).parse_args()
    return build(pages(), ROOT / "build" / "docs")


def build(contents: Iterable[tuple[str, bytes]], out: Path) -> int:
    """Write the pages to `out`/pages and the site to `out`/site, in place of older ones; returns 1 on any warning."""
    python, sources = environment(), out / "pages"
    shutil.rmtree(sources, ignore_errors=True)
    for page, content in contents:
        (sources / page).parent.mkdir(parents=True, exist_ok=True)
        (sources / page).write_bytes(content)
    shutil.copy(_DOCS / "site.css", sources)
    # Not with --quiet: it would make warnings no errors.
    command = [python, "-m", "mkdocs", "build", "--strict", "-f", _DOCS / "mkdocs.yml", "-d", out / "site"]
    built = subprocess.run(command, env={**os.environ, "RELAYOUT_PAGES": str(sources), "NO_MKDOCS_2_WARNING": "1"})
    if built.returncode == 0:
        print(f"to read it: python3 -m http.server -d {out / 'site'}")  # Search needs a server.
    return built.returncode


def environment() -> str:
    """The Python of an environment with the extra `docs`; made where it is not there, or the extra has changed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    python, stamp = _ENVIRONMENT / "bin" / "python", _ENVIRONMENT / "relayout-stamp"
    wanted = "\n".join(extras["docs"])
    if not stamp.exists() or stamp.read_text() != wanted:
        if not stamp.exists() and any(_ENVIRONMENT.glob("*")):
            sys.exit(f"docs: {_ENVIRONMENT} was not made by tools/docs, which erases only what it made: move it away")
        print(f"docs: making {_ENVIRONMENT} (once; a minute, 100 MB)", file=sys.stderr)
        shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
        _ENVIRONMENT.mkdir(parents=True)
        stamp.write_text("")  # It is ours from now on, also if this is interrupted.
        subprocess.run([sys.executable, "-m", "venv", _ENVIRONMENT], check=True)
        install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([python, *install, *extras["docs"]], check=True)
        stamp.write_text(wanted)
    return str(python)


if __name__ == "__main__":
    sys.exit(main())
