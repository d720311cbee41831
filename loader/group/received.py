"""The proof of bytes that other members have read and sent: by the digests of chunks, in the memory they arrived in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

from relayout.checkpoint.converted import check_chunk
from relayout.core.extents import Extent, Transfer, copy_runs
from relayout.core.workers import each
from relayout.format.index import Read, chunks_over
from relayout.loader.group.assign import Round
from relayout.loader.sources.stored import StoredFile
from relayout.storage.protocols import Access


def prove_received(
    files: Sequence[StoredFile],
    reads: Sequence[Read],
    rounds: Sequence[Round],
    memory: memoryview,
    start: int,
    num_threads: int,
) -> None:
    """Prove what others have read; what this member has read is proven already, as its files prove what they read.

    A chunk of which all bytes are there is hashed. Of any other chunk this member reads its bytes itself.

    Args:
        files: of a signed checkpoint.
        reads: that fill the memory, from the arena's offset `start` on.
        rounds: in which members have read them.

    Raises:
        FormatError: the bytes are not those that were signed.
        OSError: a read failed.
    """
    own = [
        (portion.start, portion.end)
        for each_round in rounds
        for portion in each_round.portions
        if portion.member == each_round.member
    ]
    chunks: dict[tuple[int, int, Extent], list[Transfer]] = defaultdict(list)
    for read in reads:
        proof, transfer = files[read.file].proof, read.transfer
        assert proof is not None
        span = Extent(transfer.source, transfer.source_end - transfer.source)
        for number, chunk, part in chunks_over(span, proof.data_start, files[read.file].nbytes, proof.chunk_nbytes):
            pieces = transfer.clipped(part.offset, part.end)
            if pieces:
                chunks[read.file, number, chunk] += pieces
    received = [
        (*where, pieces)
        for where, pieces in chunks.items()
        if not all(any(low <= piece.target and piece.target_end <= high for low, high in own) for piece in pieces)
    ]
    needed = {file: files[file].proof for file, *_ in received}
    digests = {file: proof.chunk_digests() for file, proof in needed.items() if proof is not None}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(files[file].open(Access.BUFFERED)) for file in needed}

        def prove(item: tuple[int, int, Extent, list[Transfer]]) -> None:
            file, number, chunk, pieces = item
            if sum(piece.total_nbytes for piece in pieces) < chunk.nbytes:
                mine = memoryview(bytearray(chunk.nbytes))
                opened[file].read(chunk.offset, mine)
                for piece in pieces:
                    copy_runs(mine, memory, piece, -chunk.offset, -start)
                return
            whole = memory[pieces[0].target - start : pieces[0].target_end - start]
            if pieces[0].count > 1 or len(pieces) > 1:
                whole = memoryview(bytearray(chunk.nbytes))
                for piece in pieces:
                    copy_runs(memory, whole, piece.inverted(), -start, -chunk.offset)
            proof = needed[file]
            assert proof is not None
            check_chunk(proof.digest.hex(whole), digests[file], number, chunk, files[file].where)

        each(prove, received, num_threads)
