"""`report`: writes one self-contained HTML page with the location of every rank's bytes.

The content is one JSON object that describes a converted folder or a planned conversion. The page consists of a
template, its style and script, D3, and this object, compressed.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from relayout.checkpoint.converted import (
    check_lengths,
    check_present,
    is_converted,
    read_digests,
    read_manifest,
    read_record,
    read_table,
)
from relayout.checkpoint.source import read_source
from relayout.conversion.layout import Conversion
from relayout.conversion.planning import default_output, plan_conversion
from relayout.conversion.sidecar import recorded_source, stored_conversion
from relayout.core.arguments import collapse_numbers, integer, path_text
from relayout.core.digests import XXH3_NBYTES, pack_digests, xxh3_hex
from relayout.core.slices import CutTensor, num_bytes
from relayout.errors import PlanError
from relayout.html_report.measured import read_bench
from relayout.reporting import Result
from relayout.storage.local.descriptors import OpenFolder, with_path
from relayout.storage.stores import Store, find_input

KINDS = (
    "embedding, head",
    "attention in (q, k, v)",
    "attention out",
    "MLP in (gate, up)",
    "MLP out (down)",
    "experts in",
    "experts out",
    "scales, zeros",
    "norms, biases, other",
)
"""Kinds of tensors, recognized by the names that model families use. Only for colors and sums."""

_SCALES = re.compile(r"scale|zero|qzeros|g_idx|(^|\.)scales$|weight_shape|_scale_inv")
_EMBEDDING = re.compile(r"embed|(^|\.)wte|(^|\.)wpe|lm_head|shared_head\.head")
_EXPERT = re.compile(r"(^|\.)(experts|shared_experts?)(\.|_|$)")
_OUT = re.compile(r"(o_proj|out_proj|down_proj|c_proj|fc2|(^|\.)w2|(^|\.)wo|dense_4h_to_h|\.dense)(\.|_|$)")
_ATTENTION = re.compile(r"attn|attention|self_attn|mixer")
_MLP = re.compile(
    r"mlp|feed_forward|ffn|fc1|fc2|gate_proj|up_proj|down_proj|(^|\.)w[123]\.|dense_h_to_4h|dense_4h_to_h"
)

_MAX_PIECES = 8
"""Largest number of contiguous pieces of a slice that the page draws one by one. More count as scattered."""
_MAX_DIGESTS_NBYTES = 9_500_000
"""Largest size of all digests, in bytes. They do not compress, so beyond this they are shortened or omitted."""
_MARK = '<meta name="generator" content="relayout report">'
"""End of the bytes that every page begins with. These bytes identify a file as a page of relayout."""


@dataclass(frozen=True, slots=True, repr=False)
class ReportResult(Result):
    """Result of `report`."""

    output: str
    nbytes: int
    num_tensors: int
    num_ranks: int
    is_forecast: bool
    """True if the page shows a planned conversion that has not been carried out."""


def report(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    tp: int | None = None,
    plan: str | os.PathLike[str] | None = None,
    bench: str | os.PathLike[str] | None = None,
) -> ReportResult:
    """Write a page that shows every file, tensor and rank of a checkpoint. It needs no network. Reads no weights.

    Args:
        path: a converted folder; or a plain checkpoint, for a forecast of its conversion.
        output: the file to write. Only an older page is replaced. Default: `NAME-report.html` in the working folder,
            with the checkpoint's name; a page of another checkpoint is then not replaced.
        tp: the tensor-parallel degree, for a plain checkpoint.
        plan: for a plain checkpoint: a plan file, "transformers", "vllm" or "sglang", as for `convert`. None: the
            built-in plan.
        bench: a file with the output of `relayout bench --json` for this checkpoint; the page shows its times.

    Raises:
        FormatError: the checkpoint or the file of `bench` is damaged.
        PlanError: `bench` is about another checkpoint; or the degree is missing or not possible; or `output` exists and
            is not an older page; or `output` would be a new file in the checkpoint's folder, or has the name of a
            shard.
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
            read_source(store)  # A missing checkpoint is reported first.
            raise PlanError("not converted: set --tp N, the number of ranks", path=path, code="option")
        tp = integer(tp, "tp")
        content, digests = of_conversion(plan_conversion(path, default_output(path, tp), tp=tp, plan=plan)), b""
    content["measured"] = None if bench is None else read_bench(bench, _folders(content))
    text = render(content, digests)
    page = None if output is None else path_text(output, "output", "the path of a file")
    target = Path(f"{_name(content)}-report.html" if page is None else page)
    _check_new(store, target)
    _write(target, text, _whose(content) if output is None else None)
    return ReportResult(
        output=str(target),
        nbytes=len(text),
        num_tensors=len(content["names"]),
        num_ranks=content["num_ranks"],
        is_forecast=not content["converted"],
    )


def _place(content: dict[str, Any]) -> Path:
    return Path(content["path"] if content["converted"] else content["source"])


def _folders(content: dict[str, Any]) -> list[Path]:
    """Return the folders that a measurement of this checkpoint may name: itself, and a converted folder's source."""
    return [_place(content), *([Path(content["source"])] if content["converted"] else [])]


def _name(content: dict[str, Any]) -> str:
    return _place(content).resolve().name or "checkpoint"


def _whose(content: dict[str, Any]) -> str:
    """Return a digest that distinguishes the pages of two checkpoints without revealing the folders above them."""
    return xxh3_hex(str(_place(content).resolve()).encode())


def render(content: dict[str, Any], digests: bytes) -> bytes:
    """Return the page as bytes of UTF-8."""
    starts = range(0, len(digests), XXH3_NBYTES)
    kept = next((n for n in (XXH3_NBYTES, 8, 4) if 0 < len(starts) * n <= _MAX_DIGESTS_NBYTES), 0)
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
    # All parts are filled in at once, because a filled-in part may contain the names of parts.
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _file("page.html")).encode()


def _check_new(store: Store, target: Path) -> None:
    """Raise PlanError if a new page could be mistaken for a part of a checkpoint."""
    checkpoint = store.path("")
    if os.path.lexists(target):
        return
    if target.suffix == ".safetensors":
        raise PlanError("a report cannot be a .safetensors file; choose another -o", path=target, code="option")
    if checkpoint is not None and target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise PlanError("is inside the checkpoint's folder; choose another -o", path=target, code="option")


def _write(target: Path, text: bytes, whose: str | None) -> None:
    """Write the page. It replaces only an older page, which is identified by its first bytes.

    Args:
        whose: if set, only a page of this checkpoint is replaced.
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


def of_converted(folder: Store) -> tuple[dict[str, Any], bytes]:
    """Return the object of a converted folder, and the digests of all slices in the order of its files."""
    manifest = read_manifest(folder)
    record = read_record(folder, manifest)
    check_present(folder, manifest, range(manifest.num_ranks))
    check_lengths(folder, manifest, manifest.holders)
    tables = {holder: read_table(folder, manifest, holder) for holder in manifest.holders}
    conversion = stored_conversion(folder, manifest, tables, record, recorded_source(folder, record))
    facts = {
        "converted": True,
        "generator": manifest.generator,
        "model_type": manifest.model_type,
        "reads": [len(entry.reads) for entry in manifest.holders.values()],
    }
    named = {
        holder: dict(zip(table.names, read_digests(folder, manifest, holder), strict=True))
        for holder, table in tables.items()
    }
    return of_conversion(conversion) | facts, _digests(conversion, named)


def of_conversion(conversion: Conversion) -> dict[str, Any]:
    """Return the object of a planned conversion."""
    source, layout, options = conversion.source, conversion.layout, conversion.options
    num_ranks = options.num_ranks
    groups: dict[tuple[str, CutTensor], int] = {}
    group_of = [
        groups.setdefault((collapse_numbers(tensor.name), cut), len(groups))
        for tensor, cut in zip(source.tensors, conversion.cut, strict=True)
    ]
    orders: dict[tuple[int, ...], int] = {}
    files = [
        {
            "name": file.name,
            "holder": file.holder,
            "order": orders.setdefault(file.tensors, len(orders)),
            "start": file.data_start,
            "nbytes": file.nbytes,
        }
        for file in layout.files
    ]
    counts = Counter(group_of)
    described = [_group(pattern, cut, counts[index]) for (pattern, cut), index in groups.items()]
    return {
        "path": str(conversion.output),
        "source": str(source.root),
        "converted": False,
        "generator": None,
        "model_type": source.model_type,
        "reads": None,
        "num_ranks": num_ranks,
        "plan": options.plan,
        "layout": options.layout,
        "alignment": options.alignment,
        "kinds": KINDS,
        "groups": described,
        "names": [tensor.name for tensor in source.tensors],
        "group": group_of,
        "shard": [tensor.file for tensor in source.tensors],
        "offset": [tensor.extent.offset for tensor in source.tensors],
        "shards": [{"name": file.name, "nbytes": file.nbytes, "start": file.data_start} for file in source.files],
        "orders": [list(order) for order in orders],
        "files": files,
        "ranks": [_rank(described, rank) for rank in range(num_ranks)],
        "whole_nbytes": sum(file.nbytes - file.data_start for file in source.files),
    }


def _group(pattern: str, cut: CutTensor, count: int) -> dict[str, Any]:
    """Return the description of tensors with names that differ only in numbers."""
    held = [_slice(cut, index) for index in range(len(cut.cut.distinct))]
    return {
        "pattern": pattern,
        "kind": kind_of(pattern, len(cut.shape)),
        "count": count,
        "dtype": cut.dtype,
        "shape": cut.shape,
        "nbytes": num_bytes(cut.dtype, cut.shape) or 0,
        "slices": held,
        "which": cut.cut.which,
    }


def _slice(cut: CutTensor, index: int) -> dict[str, Any]:
    part, transfers = cut.cut.distinct[index], cut.transfers[index]
    is_near = all(transfer.count == 1 for transfer in transfers) and len(transfers) <= _MAX_PIECES
    return {
        "shape": cut.shapes[index],
        "nbytes": cut.sizes[index],
        "words": part.in_words(cut.shape),
        "is_whole": part.is_whole,
        "is_held": part.is_held,
        "pieces": [[transfer.source, transfer.nbytes] for transfer in transfers] if is_near else None,
        "runs": sum(transfer.count for transfer in transfers),
        "holders": len(cut.cut.holders[index]),
    }


def _rank(groups: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return the sums of one rank."""
    needed = by_rows = shared = num_tensors = 0
    for group in groups:
        part, count = group["slices"][group["which"][rank]], group["count"]
        if not part["is_held"]:
            continue
        num_tensors += count
        needed += part["nbytes"] * count
        shared += part["nbytes"] * count if part["holders"] > 1 else 0
        by_rows += (part["nbytes"] if part["pieces"] is not None else group["nbytes"]) * count
    return {"num_tensors": num_tensors, "nbytes": needed, "by_rows_nbytes": by_rows, "shared_nbytes": shared}


def _digests(conversion: Conversion, of_holder: Mapping[int, Mapping[str, str]]) -> bytes:
    """Return the digests of slices, file after file, in the order of each; `of_holder`: holder -> name -> digest."""
    names, files = [tensor.name for tensor in conversion.source.tensors], conversion.layout.files
    return pack_digests(of_holder[file.holder][names[t]] for file in files for t in file.tensors)


@lru_cache(maxsize=4096)
def kind_of(pattern: str, num_axes: int) -> int:
    """Return the position in `KINDS` for tensors of this name; numbers in the name may be collapsed."""
    last = pattern.rpartition(".")[2]
    if _SCALES.search(last):
        return 7
    if _EXPERT.search(pattern) and num_axes > 1 and last != "bias":
        return 6 if _OUT.search(pattern) else 5
    if num_axes < 2 or "norm" in pattern or "router" in pattern or pattern.endswith(".gate.weight"):
        return 8
    if _EMBEDDING.search(pattern):
        return 0
    if _MLP.search(pattern):
        return 4 if _OUT.search(pattern) else 3
    if _ATTENTION.search(pattern):
        return 2 if _OUT.search(pattern) else 1
    return 8
