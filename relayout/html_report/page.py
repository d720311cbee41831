"""Writes the page: the template, its style and script, D3, and the compressed content, in one file."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import re
import stat
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from relayout.checkpoint.converted import is_converted
from relayout.checkpoint.source import read_source
from relayout.core.arguments import integer
from relayout.core.digests import DIGEST_NBYTES, digest_hex
from relayout.errors import PlanError
from relayout.html_report.collect import of_conversion, of_converted
from relayout.planning import default_output, plan_conversion
from relayout.results import Result
from relayout.storage.local.descriptors import OpenFolder, with_path
from relayout.storage.stores import Store, find_input

_MAX_DIGESTS_NBYTES = 9_500_000
"""Digests do not compress. If they have more bytes than this, the page has only the first bytes of each."""
_MARK = '<meta name="generator" content="relayout report">'
"""Ends the bytes that every page begins with: the proof that a file is one."""


@dataclass(frozen=True, slots=True, repr=False)
class PageWritten(Result):
    """What `report` has written."""

    output: str
    nbytes: int
    num_tensors: int
    num_ranks: int
    is_forecast: bool
    """Whether the page shows a conversion that has not been made."""


def report(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    tp: int | None = None,
    plan: str | os.PathLike[str] | None = None,
) -> PageWritten:
    """Write a page that shows every file, tensor and rank of a checkpoint. It needs no network. Reads no weights.

    Args:
        path: a converted folder; or a plain checkpoint, of which the page forecasts the conversion.
        output: the file to write; an older page is replaced, and nothing else. Default: `NAME-report.html` in the
            working folder, with the checkpoint's name, which replaces no page of another checkpoint.
        tp: the tensor-parallel degree, for a plain checkpoint.
        plan: for a plain checkpoint: a plan file, "transformers" or "vllm", as for `convert`; None: the built-in plan.

    Raises:
        FormatError: the checkpoint is damaged.
        PlanError: a degree is missing, or not possible; or `output` is something else than an older page, or would be
            a new file in the checkpoint's folder, or one that looks like a shard.
        OSError: the page cannot be written.

    Example:
        >>> import relayout
        >>> relayout.report("llama-3.1-8b-tp8", "page.html").num_ranks
        8
    """
    store = find_input(path)
    if is_converted(store):
        if tp is not None or plan is not None:
            raise PlanError("already converted: omit --tp and --plan", path=path, code="option")
        content, digests = of_converted(store)
    else:
        if tp is None:
            read_source(store)  # That there is no checkpoint comes first.
            raise PlanError("not converted: set --tp N, the number of ranks", path=path, code="option")
        tp = integer(tp, "tp")
        content, digests = of_conversion(plan_conversion(path, default_output(path, tp), tp=tp, plan=plan)), b""
    text = render(content, digests)
    target = Path(f"{_name(content)}-report.html" if output is None else output)
    _check_new(store, target)
    _write(target, text, _whose(content) if output is None else None)
    return PageWritten(
        output=str(target),
        nbytes=len(text),
        num_tensors=len(content["names"]),
        num_ranks=content["num_ranks"],
        is_forecast=not content["converted"],
    )


def _place(content: dict[str, Any]) -> Path:
    return Path(content["path"] if content["converted"] else content["source"])


def _name(content: dict[str, Any]) -> str:
    return _place(content).resolve().name or "checkpoint"


def _whose(content: dict[str, Any]) -> str:
    """What tells the pages of two checkpoints apart, without the folders above, which are nobody else's business."""
    return digest_hex(str(_place(content).resolve()).encode())


def render(content: dict[str, Any], digests: bytes) -> bytes:
    """The page, as bytes of UTF-8."""
    starts = range(0, len(digests), DIGEST_NBYTES)
    kept = next((n for n in (DIGEST_NBYTES, 8, 4) if 0 < len(starts) * n <= _MAX_DIGESTS_NBYTES), 0)
    short = b"".join(digests[at : at + kept] for at in starts)
    described = content | {"digest_nbytes": kept}
    packed = gzip.compress(json.dumps(described, separators=(",", ":")).encode(), 9, mtime=0)
    parts = {
        "TITLE": html.escape(_name(content)),
        "CHECKPOINT": _whose(content),
        "STYLE": _file("page.css"),
        "D3": _file("d3.min.js"),
        "D3_LICENSE": _file("D3_LICENSE"),
        "SCRIPT": _file("page.js"),
        "CONTENT": base64.b64encode(packed).decode(),
        "DIGESTS": base64.b64encode(short).decode(),
    }
    # At once: what is filled in may have names of parts in it.
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _file("page.html")).encode()


def _check_new(store: Store, target: Path) -> None:
    """Check that a new page would not be taken for a part of a checkpoint."""
    checkpoint = store.path("")
    if os.path.lexists(target):
        return
    if target.suffix == ".safetensors":
        raise PlanError("a page is no safetensors file; choose another -o", path=target, code="option")
    if checkpoint is not None and target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise PlanError("is inside the checkpoint's folder; choose another -o", path=target, code="option")


def _write(target: Path, text: bytes, whose: str | None) -> None:
    """Write the page. It may replace an older one, which its first bytes prove, and nothing else.

    Args:
        whose: not even one of another checkpoint than this.
    """
    name = target.name or "."
    with with_path(target), OpenFolder(target.parent) as folder:
        status = folder.status(name)
        if status is not None and not (stat.S_ISREG(status.st_mode) and _is_page(folder, name)):
            raise PlanError("exists and is not a relayout report; choose another -o", path=target, code="exists")
        if status is not None and whose is not None and not _is_page(folder, name, _of(whose)):
            what = "exists and is the page of another checkpoint, or degree; name this one with -o"
            raise PlanError(what, path=target, code="exists")
        folder.write(name, text, replace=status is not None)


def _of(whose: str) -> str:
    return f'\n<meta name="checkpoint" content="{whose}">'


def _is_page(folder: OpenFolder, name: str, more: str = "") -> bool:
    template = _file("page.html")
    head = (template[: template.index(_MARK) + len(_MARK)] + more).encode()
    with open(folder.open(name, os.O_RDONLY), "rb") as file:
        return file.read(len(head)) == head


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")
