"""The hostile checkpoints of tests/format/vectors, for readers in other languages, and the bases they are made from.

    tools/run vectors export DIR|FILE.zip    their files, and a list of them in JSON
    tools/run vectors rebase                 convert the plain base anew, when the format has changed
    tools/run vectors golden                 make the golden folder anew, when the format has changed

An export has `base/NAME/FILE` and, of each vector, the files that replace or join those of its base, as `NAME/FILE`.
What no archive can hold, links and FIFOs, a reader makes itself: `made` in the list.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from support import golden
from support.vector_edits import BASES, NAMES, base, changed_files, vectors

import relayout

app = typer.Typer(help=__doc__, add_completion=False)
_HOW_IT_IS_MADE = ("edit", "stale")
"""What the list of an export leaves out."""


@app.command()
def export(target: Annotated[Path, typer.Argument(metavar="DIR|FILE.zip", help="Must not exist.")]) -> None:
    """Write all vectors as files."""
    if target.exists():
        raise typer.BadParameter(f"{target} exists")
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, blob in _files():
                archive.writestr(name, blob)
        return
    for name, blob in _files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(blob)


def _files() -> Iterator[tuple[str, bytes]]:
    """Names and bytes of all that is exported."""
    for name in NAMES:
        yield from ((f"base/{name}/{file}", blob) for file, blob in base(name).items())
    yield "base/plan.toml", (BASES / "plan.toml").read_bytes()
    for vector in vectors():
        yield from ((f"{vector['name']}/{file}", blob) for file, blob in changed_files(vector).items())
    listed = [{key: value for key, value in vector.items() if key not in _HOW_IT_IS_MADE} for vector in vectors()]
    yield "vectors.json", json.dumps(listed, indent=1, ensure_ascii=False).encode()


@app.command()
def rebase() -> None:
    """Convert the plain base for two ranks, in the place of the converted ones."""
    for name, layout in (("converted", "ranks"), ("whole", "whole")):
        shutil.rmtree(BASES / name, ignore_errors=True)
        relayout.convert(BASES / "plain", BASES / name, tp=2, align=512, layout=layout)


@app.command("golden")
def make_golden() -> None:
    """Write the golden source, what relayout makes of it, roots of steps, and what each rank then holds."""
    golden.write_source(golden.SOURCE)
    golden.PLAN.write_text(golden.PLAN_TEXT)
    for layout in golden.LAYOUTS:
        shutil.rmtree(golden.FOLDER / layout, ignore_errors=True)
        golden.convert(golden.SOURCE, golden.FOLDER / layout, layout)
    shutil.rmtree(golden.STEPS, ignore_errors=True)
    golden.publish(golden.STEPS)
    (golden.STEPS / ".steps.json.relayout-lock").unlink()  # Of writers only.
    for made in (golden.TRAINED, golden.WHOLE_DELTA):
        shutil.rmtree(made, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        golden.publish_trained(golden.TRAINED, Path(work))
        golden.make_whole_delta(Path(work))
    golden.LIST.write_text(json.dumps(golden.listed(), indent=1) + "\n")


if __name__ == "__main__":
    app()
