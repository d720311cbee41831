"""Find the elements that changed since the last step, and send them to the members that write them.

**Problem.** A training step often changes few elements of the weights, and a delta should cost only these. But the
process that holds a part of a tensor is rarely the one that writes the rank files containing it. Sending all weights to
the writers at each step would cost as much as a full save.

**Idea.** A process that writes weight files, or computes the digest of a whole tensor, keeps *images*: the bytes of
these files and tensors as of the last step. A member of a group compares its part of a tensor with the last step's
bytes: with its own images if these contain the whole part, otherwise with a copy of the part that it keeps. Only
elements that differ are sent to the images of all members, in rounds; in a block where more than 1/`_DENSE` differ,
whole runs are sent. The receiver applies them to its image. The XOR of old and new bytes goes into the delta, and the
changed chunks, slices and tensors are digested again. Unchanged data is not sent or written, and, with one exception
(see below), not digested. When a folder is written, no element is assumed to be equal: all elements are sent and
compared with the images.

**Invariants.**
- After a step, the images equal the weights of that step on all members, and each kept digest belongs to the bytes of
  the images.
- All members use the same layout and hold the same parts as at the last step. Otherwise the step is a whole folder.
- All members call the same methods in the same order. The exchange of a window (consecutive tensors) ends for all
members in the same round, when each has sent its last block.
- Chunks of a file are encoded once, after the last window of tensors that overlaps them.

**What can go wrong.** An error in the middle leaves images that mix two steps. The publisher then forgets all of them
(`RetainedStep.forget`), so the next step is a folder. Weights that change while they are read make a step inconsistent;
the caller must prevent this. A changed element that is not found would be missing from every later delta. A tensor that
is held whole by the member that digests it is therefore digested from the weights themselves, and each step with a
folder sends and compares everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from relayout.conversion.changes import EncodedPiece, element_widths
from relayout.conversion.copy_plan import TensorDigests, WrittenDigests
from relayout.conversion.layout import Conversion, RankFile
from relayout.core.digests import EMPTY_DIGEST, blake3_hex, xxh3_hex
from relayout.core.extents import Bytes, Extent, Transfer, copy_runs, split
from relayout.core.slices import BITS, CutTensor
from relayout.core.workers import each
from relayout.format.delta import encode
from relayout.format.index import DIGESTED_NBYTES, chunks_of
from relayout.loader.group.all_to_all import AllToAll, round_nbytes
from relayout.publish.output import Output
from relayout.train.comparing import RetainedStep, StepOutput
from relayout.train.group_save import PlannedSave, Shares, are_overlapping

_BLOCK_NBYTES = 2**19
"""Bytes that one thread compares at a time: both versions fit in the cache of a core."""
_DENSE = 8
"""Send whole runs when more than 1/`_DENSE` of a block's elements changed."""
_SOURCE = -1
"""Stands in place of a slice for the whole tensor."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Route:
    """The destination of a part that this member holds."""

    member: int
    which: int
    """The slice, or `_SOURCE`."""
    transfers: tuple[Transfer, ...]
    """The copies from the bytes of the part to those of the slice."""

    def clipped(self, extent: Extent) -> Iterator[Transfer]:
        """Yield the copies that read from some bytes of the part."""
        return chain.from_iterable(one.clipped(extent.offset, extent.end) for one in self.transfers)


_Block = tuple[int, Extent]
"""A tensor, and some bytes of the part of it that a member holds."""
_NONE = np.empty(0, np.uint32)
_NUM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a slice: either runs of equal length, or single elements, given by offsets from the first one."""

    tensor: int
    which: int
    """The slice, or `_SOURCE`."""
    start: int
    """Byte offset in the slice of the first element."""
    count: int
    """Number of runs, or of single elements."""
    nbytes: int
    """Bytes of a run; 0: the elements are single."""
    stride: int
    """Bytes from one run to the next in the slice."""
    indices: npt.NDArray[np.uint32]
    """Offsets of single elements from the first, in elements, ascending."""
    values: Bytes
    """The elements, contiguous."""

    @property
    def head(self) -> list[int]:
        """The piece's header in a message."""
        return [self.tensor, self.which, self.start, self.count, self.nbytes, self.stride]

    def end(self, width: int) -> int:
        """Return the byte offset in the slice of the end of the last element."""
        if self.nbytes:
            return self.start + (self.count - 1) * self.stride + self.nbytes
        return self.start + (int(self.indices[-1]) + 1) * width

    def put(self, memory: Bytes, start: int, width: int, xor: Bytes | None = None, xor_start: int = 0) -> None:
        """Write the elements to memory, the first one at `start`, and their XOR with the old bytes to `xor`."""
        if self.nbytes:
            shape, strides = (self.count, self.nbytes), (self.stride, 1)
            target, values = np.ndarray(shape, np.uint8, memory.data, start, strides), self.values.reshape(shape)
            if xor is not None:
                np.bitwise_xor(target, values, out=np.ndarray(shape, np.uint8, xor.data, xor_start, strides))
            target[...] = values
            return
        length = (int(self.indices[-1]) + 1) * width
        target, values = memory[start : start + length].view(f"<u{width}"), self.values.view(f"<u{width}")
        if xor is not None:
            xor[xor_start : xor_start + length].view(f"<u{width}")[self.indices] = target[self.indices] ^ values
        target[self.indices] = values


class _Pending:
    """A weight file while its image changes: window by window from front to back, and in any order within a window."""

    def __init__(self, file: RankFile, image: Bytes, cut: Sequence[CutTensor], *, is_compared: bool) -> None:
        """Begin a file of a layout, with the cut of each tensor. If `is_compared`, record the changes as an XOR."""
        self.file, self.image = file, image
        sizes = {t: cut[t].rank_nbytes(file.holder) for t in file.tensors}
        self.widths = element_widths(
            (offset, cut[t].dtype) for t, offset in zip(file.tensors, file.offsets, strict=True) if sizes[t]
        )
        self.chunks = list(chunks_of(file.data_start, file.nbytes, DIGESTED_NBYTES))
        self._ends = {t: offset + sizes[t] for t, offset in zip(file.tensors, file.offsets, strict=True)}
        self._start = self._end = file.data_start
        self._xor: Bytes | None = np.empty(0, np.uint8) if is_compared else None
        """The XOR of old and new bytes from `_start` on, the first byte of the first incomplete chunk."""
        self._changed: set[int] = set()
        """Numbers of chunks in which elements may have changed."""

    def reach(self, window: Iterable[int]) -> None:
        """Extend the XOR memory to the end of a window's tensors."""
        self._end = max([self._end, *(self._ends[t] for t in window if t in self._ends)])
        if self._xor is not None:
            longer = np.zeros(self._end - self._start, np.uint8)
            longer[: len(self._xor)] = self._xor
            self._xor = longer

    def change(self, offset: int, piece: _Piece, width: int) -> None:
        """Change elements of a slice that begins at `offset`."""
        low, high = offset + piece.start, offset + piece.end(width)
        first, last = ((place - self.file.data_start) // DIGESTED_NBYTES for place in (low, high - 1))
        self._changed.update(range(first, last + 1))
        piece.put(self.image, low, width, self._xor, low - self._start)

    def complete(self) -> list[tuple[int, Bytes | None]]:
        """Return number and XOR of each changed chunk that is now complete. The memory is reused by the next call."""
        done = [number for number in sorted(self._changed) if self.chunks[number].end <= self._end]
        self._changed.difference_update(done)
        if self._xor is None:
            return [(number, None) for number in done]
        xor, start = self._xor, self._start
        whole = (self._end - self.file.data_start) // DIGESTED_NBYTES * DIGESTED_NBYTES
        self._start = max(start, self.file.data_start + whole)
        self._xor = xor[self._start - start :].copy()
        return [
            (number, xor[extent.offset - start : extent.end - start])
            for number, extent in ((number, self.chunks[number]) for number in done)
        ]


class ImageUpdater:
    """Updates the images of all members to the weights that the members hold now; see `group_save.FileMaker`."""

    def __init__(self, save: PlannedSave, kept: RetainedStep, threads: int, shares: Shares, output: Output) -> None:
        """Take part.

        Args:
            kept: the last step, if its layout and the parts that the members held are the same as now; otherwise empty.
            output: a `StepOutput`. If it writes a folder, everything is sent.
        """
        assert isinstance(output, StepOutput)
        self._save, self._kept, self._threads, self._output = save, kept, threads, output
        self._planned, self._me = save.planned, save.group.index
        self._messages = AllToAll(save.group)
        self._shares, self._own = shares, shares[save.group.index]
        self._hashers = save.hashers()
        self._places = _files_of_slices(self._own, self._planned)
        self._composed = cache(_composed)
        self._routes = {t: self._routes_of(t) for t in save.held}
        self._slices: set[tuple[int, int]] = set()
        """Slices written by this member that have changed, by tensor and position."""
        self._sources: set[int] = set()
        """Whole tensors kept by this member that have changed."""
        if not kept.is_there:
            self._begin()

    def _begin(self) -> None:
        """Allocate the images and copies."""
        kept, files = self._kept, () if self._own is None else self._own.layout.files
        kept.files = kept.memories({file.name: file.nbytes for file in files})
        kept.chunks = {file.name: [b""] * file.num_chunks for file in files}
        digested = [t for t, member in self._hashers.items() if member == self._me and not self._has_whole(member, t)]
        kept.sources = kept.memories({t: self._planned.source.tensors[t].extent.nbytes for t in digested})
        kept.parts = kept.memories({t: self._held_nbytes(t) for t in self._routes if self._needs_copy(t)})
        kept.is_there = True

    def _has_whole(self, member: int, t: int) -> bool:
        cut = self._save.holders.parts[t].cut
        return cut.distinct[cut.which[member]].is_whole

    def _held_nbytes(self, t: int) -> int:
        parts = self._save.holders.parts[t]
        return parts.sizes[parts.cut.which[self._me]]

    def _needs_copy(self, t: int) -> bool:
        """Return True if a tensor's part is sent, and this member's own images do not contain the whole part."""
        mine = [route for route in self._routes[t] if route.member == self._me and route.which != _SOURCE]
        nbytes = sum(part.total_nbytes for route in mine for part in route.transfers)
        has_all = nbytes == self._held_nbytes(t) and not are_overlapping(self._planned.cut[t])
        return bool(self._routes[t]) and not has_all

    def _width(self, t: int) -> int:
        return max(1, BITS[self._planned.cut[t].dtype] // 8)

    def _routes_of(self, t: int) -> list[_Route]:
        """Return the destinations of this member's part of a tensor."""
        parts, cut = self._save.holders.parts[t], self._planned.cut[t]
        mine, hasher = parts.cut.which[self._me], self._hashers.get(t)
        routes = []
        for member, share in enumerate(self._shares if parts.sizes[mine] else ()):
            if self._save.holders.sender(t, mine, member) != self._me:
                continue
            if share is not None:
                wanted = dict.fromkeys(cut.cut.which[rank] for rank in share.ranks)
                routes += [_Route(member, which, self._composed(parts, mine, cut, which)) for which in wanted]
            if member == hasher and not self._has_whole(member, t):
                back = tuple(part.inverted() for part in parts.transfers[mine])
                routes.append(_Route(member, _SOURCE, back))
        return [route for route in routes if route.transfers]

    def unit(self, unit: int) -> WrittenDigests:
        pending = {}
        if self._own is not None:
            files = (self._own.layout.files[number] for number in self._own.layout.files_of_unit[unit])
            for file in files:
                image, is_compared = self._kept.files[file.name], self._output.makes_delta
                pending[file.name] = _Pending(file, image, self._planned.cut, is_compared=is_compared)
        for window in self._windows(self._planned.layout.units[unit]):
            for one in pending.values():
                one.reach(window)
            self._exchange(window, pending)
            self._complete(pending)
        return self._written(unit)

    def _windows(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield windows: consecutive tensors that together fit one round of all members, or one larger tensor."""
        limit = self._save.group.num_members * round_nbytes(self._save.group.num_members)
        window, nbytes = list[int](), 0
        for t in order:
            size = self._planned.source.tensors[t].extent.nbytes
            if window and nbytes + size > limit:
                yield window
                window, nbytes = [], 0
            window.append(t)
            nbytes += size
        yield window

    def _exchange(self, window: Sequence[int], pending: Mapping[str, _Pending]) -> None:
        """Find the changes in some tensors, and apply them at their destinations, together with all other members."""
        limit, batches, room = round_nbytes(self._save.group.num_members), [list[_Block]()], 0
        for t in window:
            for extent in split(Extent(0, self._held_nbytes(t) if self._routes.get(t) else 0), _BLOCK_NBYTES):
                if room + extent.nbytes > limit:
                    batches.append([])
                    room = 0
                batches[-1].append((t, extent))
                room += extent.nbytes
        is_over = False
        while not is_over:
            batch = batches.pop(0) if batches else []
            found = list(chain.from_iterable(each(self._changed, batch, self._threads)))
            arrived, is_over = self._swap(found, is_last=not batches)
            arrived += [piece for member, piece in found if member == self._me]
            each(partial(self._put, pending), arrived, self._threads)

    def _put(self, pending: Mapping[str, _Pending], piece: _Piece) -> None:
        t, width = piece.tensor, self._width(piece.tensor)
        if piece.which == _SOURCE:
            piece.put(self._kept.sources[t], piece.start, width)
            self._sources.add(t)
            return
        for name, offset in self._places[t, piece.which]:
            pending[name].change(offset, piece, width)
        self._slices.add((t, piece.which))

    def _changed(self, block: _Block) -> list[tuple[int, _Piece]]:
        """Return the changes in a block of this member's part, for each member that needs them."""
        t, extent = block
        data, width = self._save.held[t].bytes_of(extent), self._width(t)
        elements, copy = data.view(f"<u{width}"), self._kept.parts.get(t)
        if self._output.makes_folder:
            if copy is not None:
                copy[extent.offset : extent.end] = data
            return list(self._runs(t, extent, data))
        if copy is None:
            indices = self._indices_by_images(t, extent, data)
        else:
            last = copy[extent.offset : extent.end].view(elements.dtype)
            indices = np.flatnonzero(elements != last)
            last[indices] = elements[indices]
        if _DENSE * len(indices) > len(elements):
            return list(self._runs(t, extent, data))
        return list(self._singles(t, extent, elements, indices)) if len(indices) else []

    def _indices_by_images(self, t: int, extent: Extent, data: Bytes) -> Indices:
        """Return the indices of elements of a block that differ from this member's images."""
        width, found = self._width(t), [np.empty(0, np.int64)]
        for route in self._routes[t]:
            if route.member != self._me or route.which == _SOURCE:
                continue
            name, offset = self._places[t, route.which][0]
            for part in route.clipped(extent):
                start = part.source - extent.offset
                mine = _elements(data, start, part, part.source_stride, width)
                theirs = _elements(self._kept.files[name], offset + part.target, part, part.target_stride, width)
                differing = np.flatnonzero(mine != theirs)
                if part.count > 1:
                    row, column = np.divmod(differing, part.nbytes // width)
                    differing = row * (part.source_stride // width) + column
                found.append(differing + start // width)
        return np.sort(np.concatenate(found)) if len(found) > 2 else found[-1]

    def _runs(self, t: int, extent: Extent, data: Bytes) -> Iterator[tuple[int, _Piece]]:
        """Yield all elements of a block."""
        for route in self._routes[t]:
            for part in route.clipped(extent):
                start = part.source - extent.offset
                values = data[start : start + part.nbytes]
                if part.count > 1:
                    values = np.empty(part.total_nbytes, np.uint8)
                    copy_runs(data, values, part.packed(0), -extent.offset)
                stride = part.target_stride or part.nbytes
                yield route.member, _Piece(t, route.which, part.target, part.count, part.nbytes, stride, _NONE, values)

    def _singles(
        self, t: int, extent: Extent, elements: npt.NDArray[Any], indices: Indices
    ) -> Iterator[tuple[int, _Piece]]:
        """Yield some elements of a block."""
        width = self._width(t)
        for route in self._routes[t]:
            for part in route.transfers:
                start, end = ((place - extent.offset) // width for place in (part.source, part.source_end))
                low, high = np.searchsorted(indices, (start, end))
                if low == high:
                    continue
                chosen, target = indices[low:high], indices[low:high] - start
                if part.count > 1:
                    row, column = np.divmod(target, part.source_stride // width)
                    inside = column < part.nbytes // width
                    chosen, target = chosen[inside], (row * (part.target_stride // width) + column)[inside]
                if len(target):
                    first, values = int(target[0]), elements[chosen].view(np.uint8)
                    offsets = (target - first).astype(np.uint32)
                    begin = part.target + first * width
                    yield route.member, _Piece(t, route.which, begin, len(target), 0, 0, offsets, values)

    def _swap(self, found: Sequence[tuple[int, _Piece]], *, is_last: bool) -> tuple[list[_Piece], bool]:
        """Send pieces to the other members. Return the received ones, and True if it was every member's last round."""
        group = self._save.group
        sent = [
            _message([piece for other, piece in found if other == member != group.index])
            for member in range(group.num_members)
        ]
        sizes = [sum(map(len, parts)) for parts in sent]
        asked = group.all_gather((sizes, is_last))

        def fill(messages: Sequence[Bytes]) -> None:
            for message, parts in zip(messages, sent, strict=True):
                np.concatenate(parts, out=message)

        received = self._messages.exchange(sizes, [of_member[group.index] for of_member, _ in asked], fill)
        pieces = [piece for message in received for piece in _pieces_in(message, self._width)]
        return pieces, all(last for _, last in asked)

    def _complete(self, pending: Mapping[str, _Pending]) -> None:
        """Digest slices and chunks that have changed, and encode chunks that cannot change any more."""
        kept, output = self._kept, self._output

        def hashed(key: tuple[int, int]) -> str:
            name, offset = self._places[key][0]
            return xxh3_hex(kept.files[name][offset : offset + self._planned.cut[key[0]].sizes[key[1]]].data)

        def finish(one: tuple[_Pending, int, Bytes | None]) -> EncodedPiece:
            file, number, xor = one
            extent = file.chunks[number]
            encoded = b"" if xor is None else encode(xor, file.widths.of(extent))
            return EncodedPiece(1 + number, encoded, blake3_hex(file.image[extent.offset : extent.end].data))

        changed = sorted(self._slices)
        kept.slices |= dict(zip(changed, each(hashed, changed, self._threads), strict=True))
        self._slices.clear()
        done = [(file, number, xor) for file in pending.values() for number, xor in file.complete()]
        for (file, number, _), piece in zip(done, each(finish, done, self._threads), strict=True):
            kept.chunks[file.file.name][number] = bytes.fromhex(piece.content)
            if piece.encoded:
                output.changed(file.file.name, piece)

    def _written(self, unit: int) -> WrittenDigests:
        if self._own is None:
            return WrittenDigests()
        own, which_of = self._own, self._planned.cut

        def digest(t: int, rank: int) -> str:
            return self._kept.slices.get((t, which_of[t].cut.which[rank]), EMPTY_DIGEST)

        tensors = {
            t: TensorDigests(None, tuple(digest(t, ranks[0]) for ranks in own.cut[t].cut.holders))
            for t in self._planned.layout.units[unit]
        }
        numbers = own.layout.files_of_unit[unit]
        return WrittenDigests(
            tensors, {number: b"".join(self._kept.chunks[own.layout.files[number].name]) for number in numbers}
        )

    def source_digests(self) -> dict[int, str]:
        kept, mine = self._kept, [t for t, member in self._hashers.items() if member == self._me]

        def digest(t: int) -> str:
            if t not in kept.sources:  # From the held tensor: this verifies that no change was missed.
                return self._save.held[t].digest().hex()
            return xxh3_hex(kept.sources[t].data) if t in self._sources else kept.source_digests[t]

        kept.source_digests |= dict(zip(mine, each(digest, mine, self._threads), strict=True))
        return {t: kept.source_digests[t] for t in mine}


def _files_of_slices(own: Conversion | None, planned: Conversion) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the locations (file, offset) of the slices that a member writes, by tensor and number of the slice."""
    indices: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for file in () if own is None else own.layout.files:
        for t, offset in zip(file.tensors, file.offsets, strict=True):
            indices.setdefault((t, planned.cut[t].cut.which[file.holder]), []).append((file.name, offset))
    return indices


def _composed(parts: CutTensor, part: int, cut: CutTensor, which: int) -> tuple[Transfer, ...]:
    """Return the transfers from a part that a member holds to a slice."""
    pairs = ((held, wanted) for held in parts.transfers[part] for wanted in cut.transfers[which])
    return tuple(one for held, wanted in pairs for one in held.onto(wanted))


def _elements(memory: Bytes, start: int, part: Transfer, stride: int, width: int) -> npt.NDArray[Any]:
    """Return the runs of a transfer, which begin at `start`, as elements."""
    shape = (part.count, part.nbytes // width)
    return np.ndarray(shape, f"<u{width}", memory.data, start, (stride or part.nbytes, width))


def _message(pieces: Sequence[_Piece]) -> list[Bytes]:
    """Return the parts of a message, in order."""
    heads = np.array([[len(pieces), 0, 0, 0, 0, 0], *(piece.head for piece in pieces)], np.int64)
    content = (part for piece in pieces for part in (piece.indices.view(np.uint8), piece.values))
    return [heads.view(np.uint8).ravel(), *content]


def _pieces_in(message: Bytes, width: Callable[[int], int]) -> Iterator[_Piece]:
    row = _NUM_FIELDS * 8
    position = row * (1 + int(message[:8].view(np.int64)[0]))
    for head in message[row:position].view(np.int64).reshape(-1, _NUM_FIELDS).tolist():
        t, which, start, count, nbytes, stride = head
        num_indices, size = (0, count * nbytes) if nbytes else (4 * count, count * width(t))
        indices = message[position : position + num_indices].view(np.uint32)
        position += num_indices
        yield _Piece(t, which, start, count, nbytes, stride, indices, message[position : position + size])
        position += size
