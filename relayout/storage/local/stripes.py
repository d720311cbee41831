"""The number of server objects that a file of Lustre is striped over, from its extended attribute `lustre.lov`.

The attribute is little-endian: `lov_mds_md_v1`, `_v3` and `lov_comp_md_v1` of Lustre's `lustre_user.h` and
`lustre_idl.h` (2.16), as `lov_lsm_pack` of the client writes them. A plain layout stripes all of a file alike. A
composite one (progressive layouts, mirrors) has components, each with the extent of the file that it is for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

_ATTRIBUTE = "lustre.lov"
_PLAIN = frozenset({0x0BD10BD0, 0x0BD30BD0})
"""LOV_USER_MAGIC_V1 and LOV_USER_MAGIC_V3."""
_COMPOSITE = 0x0BD60BD0
"""LOV_USER_MAGIC_COMP_V1."""
_RAID0 = 0x1
"""LOV_PATTERN_RAID0, in the bits of `_PATTERN_MASK`: data in objects. Others keep it on the metadata server, in
parities, or in an archive."""
_PATTERN_MASK = 0x80000105
"""LOV_PATTERN_F_RELEASED, LOV_PATTERN_MDT, LOV_PATTERN_PARITY and LOV_PATTERN_RAID0."""
_INIT, _STALE = 0x10, 0x1
"""LCME_FL_INIT: the component has objects. LCME_FL_STALE: of a mirror that is out of date, which is not read."""
_MAGIC = struct.Struct("<I")
_LAYOUT = struct.Struct("<4xI16x4xH2x")
"""Pattern and stripe count of a plain layout."""
_HEADER = struct.Struct("<14xH16x")
"""Number of components of a composite layout."""
_COMPONENT = struct.Struct("<4xIQQI20x")
"""Flags, start and end of the extent, and where the component's own layout begins in the attribute."""


def num_stripes(path: Path, nbytes: int) -> int | None:
    """Return the number of objects on Lustre's servers over which most of a file is striped.

    Args:
        nbytes: the length of the file.

    Returns:
        None: the file is not on Lustre, or has no objects there, or the attribute has a form that is not known.
    """
    try:
        attribute = os.getxattr(path, _ATTRIBUTE)
    except (AttributeError, OSError):  # AttributeError: only Linux has it.
        return None
    try:
        nbytes_of = dict[int, int]()
        for stripes, start, end in _components(attribute, nbytes):
            nbytes_of[stripes] = nbytes_of.get(stripes, 0) + max(0, min(end, nbytes) - start)
    except struct.error:
        return None
    return max(nbytes_of, key=lambda stripes: (nbytes_of[stripes], stripes), default=None)


def _components(attribute: bytes, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Stripe count and extent of each component whose objects are read. struct.error: the attribute is too short."""
    [magic] = _MAGIC.unpack_from(attribute)
    if magic in _PLAIN:
        yield from ((stripes, 0, nbytes) for stripes in _stripes(attribute, 0))
    elif magic == _COMPOSITE:
        [num_components] = _HEADER.unpack_from(attribute)
        for index in range(num_components):
            flags, start, end, offset = _COMPONENT.unpack_from(attribute, _HEADER.size + index * _COMPONENT.size)
            if flags & _INIT and not flags & _STALE:
                yield from ((stripes, start, end) for stripes in _stripes(attribute, offset))


def _stripes(attribute: bytes, offset: int) -> Iterator[int]:
    """Yield the stripe count of the layout at an offset; nothing if its data is stored outside objects."""
    pattern, count = _LAYOUT.unpack_from(attribute, offset)
    if pattern & _PATTERN_MASK == _RAID0 and count:
        yield count
