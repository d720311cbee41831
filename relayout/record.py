"""The source record: what the source checkpoint was, so that it can be compared, and given back. Pure.

Its digest names the conversion: it covers every source tensor's digest, how each was cut, and the options.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from relayout.catalogue import Catalogue
from relayout.index import FORMAT_VERSION
from relayout.layout import Layout
from relayout.plan import Plan
from relayout.slicing import Slice


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that was copied as it is."""

    name: str
    """Path relative to the folder."""
    nbytes: int
    digest: str
    mode: int
    """Permission bits."""


def dump_record(
    catalogue: Catalogue,
    plan: Plan,
    layout: Layout,
    max_part_nbytes: int,
    digests: Sequence[str],
    side_files: Sequence[SideFile],
) -> bytes:
    """Serialise the source record, uncompressed."""
    cuts: dict[tuple[Slice, ...], int] = {}
    cut_of = [cuts.setdefault(slices, len(cuts)) for slices in plan.slices]
    tensors = catalogue.tensors
    top = {
        "relayout": FORMAT_VERSION,
        "num_ranks": plan.num_ranks,
        "plan": plan.name,
        "alignment": layout.alignment,
        "max_part_nbytes": max_part_nbytes,
        "files": {
            "name": [file.name for file in catalogue.files],
            "nbytes": [file.nbytes for file in catalogue.files],
            # Valid UTF-8, or the header would not have been accepted.
            "header": [file.header[8:].decode() for file in catalogue.files],
        },
        "index": None
        if catalogue.index is None
        else {"name": catalogue.index[0], "text": catalogue.index[1].decode()},
        "side_files": {
            "name": [file.name for file in side_files],
            "nbytes": [file.nbytes for file in side_files],
            "digest": [file.digest for file in side_files],
            "mode": [file.mode for file in side_files],
        },
        "cuts": [[None if part.is_whole else [part.axis, part.ranges] for part in slices] for slices in cuts],
        "tensors": {
            "name": [tensor.name for tensor in tensors],
            "dtype": [tensor.dtype for tensor in tensors],
            "shape": [tensor.shape for tensor in tensors],
            "file": [tensor.file for tensor in tensors],
            "offset": [tensor.extent.offset for tensor in tensors],
            "digest": digests,
            "cut": cut_of,
        },
    }
    return json.dumps(top, ensure_ascii=False, separators=(",", ":")).encode()
