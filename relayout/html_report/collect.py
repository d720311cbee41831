"""Collects what the page shows, as one JSON object: of a converted folder, or of a conversion that was planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from relayout.checkpoint.converted import check_lengths, check_present, read_manifest, read_record, read_table
from relayout.conversion.layout import Conversion
from relayout.conversion.stored import recorded_source, stored_conversion
from relayout.core.arguments import collapse_numbers
from relayout.core.slices import CutTensor, num_bytes
from relayout.format.index import RankTable
from relayout.storage.stores import Store

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
"""Kinds of tensors, by the names that model families use: only for colors and sums."""

_SCALES = re.compile(r"scale|zero|qzeros|g_idx|(^|\.)scales$|weight_shape|_scale_inv")
_EMBEDDING = re.compile(r"embed|(^|\.)wte|(^|\.)wpe|lm_head|shared_head\.head")
_EXPERT = re.compile(r"(^|\.)(experts|shared_experts?)(\.|_|$)")
_OUT = re.compile(r"(o_proj|out_proj|down_proj|c_proj|fc2|(^|\.)w2|(^|\.)wo|dense_4h_to_h|\.dense)(\.|_|$)")
_ATTENTION = re.compile(r"attn|attention|self_attn|mixer")
_MLP = re.compile(
    r"mlp|feed_forward|ffn|fc1|fc2|gate_proj|up_proj|down_proj|(^|\.)w[123]\.|dense_h_to_4h|dense_4h_to_h"
)


_MAX_PIECES = 8
"""Contiguous pieces of a slice in its whole tensor that the page draws one by one; more count as scattered."""


def of_converted(folder: Store) -> tuple[dict[str, Any], bytes]:
    """The object of a converted folder, and the digests of all slices, in the order of its files.

    Raises:
        FormatError: the folder is damaged, or a file is missing or truncated.
        PlanError: it lacks ranks.
    """
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
    return of_conversion(conversion) | facts, _digests(conversion, list(tables.values()))


def of_conversion(conversion: Conversion) -> dict[str, Any]:
    """The object of a conversion that was planned."""
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
    """Tensors that differ only in the numbers of their names."""
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
    """Sums of one rank."""
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


def _digests(conversion: Conversion, tables: Sequence[RankTable]) -> bytes:
    """Digests of the slices: file after file, in the order of each."""
    names = [tensor.name for tensor in conversion.source.tensors]
    of_holder = [dict(zip(table.names, table.digests, strict=True)) for table in tables]
    return b"".join(
        bytes.fromhex(of_holder[file.holder][names[t]]) for file in conversion.layout.files for t in file.tensors
    )


@lru_cache(maxsize=4096)
def kind_of(pattern: str, num_axes: int) -> int:
    """The kind of tensors of this name, whose numbers may be collapsed: position in `KINDS`."""
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
