"""A load that the members of a group share: each reads a part from the store, and all receive all parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from relayout.checkpoint.converted import check_chunk
from relayout.checkpoint.trust import policy_over
from relayout.core.digests import blake3_hex, xxh3_hex
from relayout.core.extents import Extent, Grid, Transfer, copy_runs
from relayout.core.workers import Stop, each
from relayout.errors import PlanError
from relayout.format.index import Read, chunks_over
from relayout.loader.backends.base import Allocation, Backend, Options, ReadJob, RunningJob, load_arena
from relayout.loader.backends.files import error_hints
from relayout.loader.group.collectives import Group
from relayout.loader.group.plan import Portion, PortionRound, assign_reads
from relayout.loader.requests import Budget
from relayout.loader.sources.checkpoint import LoadRequest
from relayout.loader.sources.rank import ArenaPlan, RankSource, StoredFile, TensorColumns
from relayout.loader.stream import PartCounter, Reader, TensorBatch, stream
from relayout.loader.tensors import make_views, to_device
from relayout.reporting import reporting
from relayout.storage.stores import Access, ReadableFile

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Sharing:
    """The division of a rank's reads among the members of a group."""

    group: Group
    what: str
    """Description of the load, for a person."""
    files: tuple[StoredFile, ...]
    """The files; with `verify` or a signature, they verify the chunks that are read."""
    grids: Sequence[Grid]
    """The best places to cut each file."""
    kind: str
    """The kind of the device."""
    verifies_received: bool
    """True if each member verifies the bytes that other members have read, as the checkpoint is signed."""

    @staticmethod
    def of(group: Group, source: RankSource, files: tuple[StoredFile, ...], options: Options) -> Sharing:
        """Share the reads of a source's files."""
        proofs = [file.digests for file in files if file.digests is not None]
        if len(proofs) < len(files):
            why = "group: iter_load shares converted checkpoints only: convert it, or use load"
            raise PlanError(why, path=str(source.store), code="unsupported")
        verifies_received = policy_over(source.store) is not None
        grids = [Grid()] * len(files)
        if options.verify or verifies_received:
            files = tuple(file.verified() for file in files)
            grids = [digests.grid for digests in proofs]
        what = f"rank {source.rank} of {source.num_ranks} of {source.store} to {options.kind}"
        what = f"{what}, signed" if verifies_received else what
        what = f"{what}, verified" if options.verify else what
        return Sharing(group, what, files, grids, options.kind, verifies_received)

    @property
    def is_sent(self) -> bool:
        """True if members exchange bytes.

        Signed checkpoints are exchanged in host memory only, where each member verifies them.
        """
        return not self.verifies_received or self.kind == "cpu"

    def portions(self, reads: Sequence[Read], start: int = 0) -> tuple[Portion, ...]:
        """Assign the reads that fill the arena from the offset `start` on to the members."""
        return assign_reads(reads, self.group.num_members, self.grids, start=start)

    def verify(
        self, reads: Sequence[Read], rounds: Sequence[PortionRound], memory: torch.Tensor, start: int, num_threads: int
    ) -> None:
        """Verify bytes that other members have read, if required; see `verify_received`. All members call this."""
        if self.verifies_received:
            with self.group.collective():
                verify_received(self.files, reads, rounds, memory.numpy().data, start, num_threads)

    def identity(self, *others: object) -> tuple[str, str]:
        """Return a description of the load, and a digest of the files and all else that members must agree on."""
        named = [(file.name, file.nbytes, file.digests and file.digests.tensors_digest) for file in self.files]
        return self.what, xxh3_hex(repr((named, self.kind, self.verifies_received, others)).encode())


class _SharedStream(Reader):
    """A stream that the members of a group share: each reads portions of each batch, and receives the others."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._rounds: dict[int, PortionRound] = {}

    def least(self, nbytes: int) -> int:
        return min(self._sharing.group.all_gather(nbytes))

    def reads_of(self, batch: TensorBatch) -> Sequence[Read]:
        portions = self._sharing.portions(batch.layout.reads, batch.start)
        self._rounds[batch.start] = PortionRound(self._sharing.group.index, portions)
        return self._rounds[batch.start].reads

    def collective(self, *, is_last: bool = False) -> AbstractContextManager[None]:
        return self._sharing.group.collective(is_last=is_last)

    def fill(self, batch: TensorBatch, memory: torch.Tensor) -> None:
        self._sharing.group.broadcast(self._rounds[batch.start].within(memory, batch.start))

    def verify(self, batch: TensorBatch, memory: torch.Tensor, num_threads: int) -> None:
        sent = self._rounds.pop(batch.start)
        self._sharing.verify(batch.layout.reads, [sent], memory, batch.start, num_threads)

    @property
    def may_discard(self) -> bool:
        return self._sharing.group.is_quiet()


def stream_together(
    prepare: Callable[[], tuple[RankSource, TensorColumns, Options]], group: Group
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one rank's tensors; all members of the group call this, too, and iterate at the same time.

    The last `next`, which ends the iteration, is part of the operation.

    Args:
        prepare: returns the source, the tensors and the options of this member.
    """
    with group.sharing_errors():
        with error_hints(), group.collective():
            source, contents, options = prepare()
            sharing = Sharing.of(group, source, contents.files, options)
            contents = replace(contents, files=sharing.files)
            tensors = stream(contents, options, _SharedStream(sharing) if sharing.is_sent else None)
            columns = [list(column) for column in (contents.names, contents.shapes, contents.reads)]
            identity = sharing.identity(columns, sharing.grids)
        check_same(group, identity, is_last=not sharing.is_sent)
        yield from tensors


def load_together(request: LoadRequest, process_group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Load one rank together with all other members of a group, which call this, too.

    All members load the same rank, unless the checkpoint is a plain one.
    """
    group = Group(process_group)
    with group.sharing_errors():
        with group.collective():
            options, source = request.options(), request.source()
            plan = source.arena(request.names)
            if source.is_unconverted:
                from relayout.loader.group.exchange import ExchangedLoad  # Imports planners.

                shared: SharedLoad = ExchangedLoad.of(group, source, plan, request.names, options)
            else:
                sharing = Sharing.of(group, source, plan.files, options)
                shared = (
                    _PortionedLoad.of(sharing, plan, options) if sharing.is_sent else _LoadAlone(sharing, plan, options)
                )
            mine = shared.identity()
        check_same(group, mine)
        return shared.load()


class SharedLoad(Protocol):
    """A load that all members of a group carry out."""

    def identity(self) -> tuple[str, str]:
        """Return a description of the load, and a digest of everything that members must agree on."""

    def load(self) -> dict[str, torch.Tensor]:
        """Load, together with the other members. Their `identity` must be equal.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `api.load`, on any member.
        """


@dataclass(frozen=True, slots=True)
class _LoadAlone:
    """A load in which each member reads all bytes.

    Used where bytes from other members could not be verified on arrival.
    """

    sharing: Sharing
    plan: ArenaPlan
    options: Options

    def identity(self) -> tuple[str, str]:
        return self.sharing.identity(self.plan.arena_nbytes, self.plan.reads)

    def load(self) -> dict[str, torch.Tensor]:
        with self.sharing.group.collective(is_last=True):
            return load_arena(self.plan, self.options)


@dataclass(frozen=True, slots=True)
class _PortionedLoad:
    """A load in rounds: each member reads portions, and sends them to the others."""

    sharing: Sharing
    plan: ArenaPlan
    options: Options
    backend: Backend[Any]
    budget: Budget
    portions: tuple[Portion, ...]

    @staticmethod
    def of(sharing: Sharing, plan: ArenaPlan, options: Options) -> _PortionedLoad:
        """Choose the backend, and assign the reads."""
        backend, budget = options.choose(sharing.files)
        return _PortionedLoad(sharing, plan, options, backend, budget, sharing.portions(plan.reads))

    def identity(self) -> tuple[str, str]:
        return self.sharing.identity(self.plan.arena_nbytes, self.portions)

    def load(self) -> dict[str, torch.Tensor]:
        group = self.sharing.group
        arena: Allocation[Any] | None = None
        running: RunningJob | None = None
        try:
            with reporting(self.options.progress, "loading", self.plan.nbytes) as report:
                rounds, stop = self._rounds(), Stop()
                starts, sizes = [each.portions[0].start for each in rounds], [each.nbytes for each in rounds]
                counter = PartCounter(starts, sizes, stop)
                with group.collective():
                    arena = self.backend.allocate(self.plan.arena_nbytes)
                    reads = tuple(read for each in rounds for read in each.reads)
                    job = ReadJob(self.sharing.files, reads, self.budget, counter.count, stop)
                    running = self.backend.start(arena, job)
                    base = arena.tensor()
                self._exchange(rounds, counter, running, base, report)
                self.sharing.verify(self.plan.reads, rounds, base, 0, self.budget.threads)
                with group.collective(is_last=True):
                    running.join()
                    return make_views(to_device(base, self.options.device), self.plan.tensors())
        except BaseException as error:
            if running is not None:
                running.cancel()
            group.fail(error)
            if arena is not None and group.is_quiet():
                arena.discard()
            raise

    def _rounds(self) -> list[PortionRound]:
        size = self.sharing.group.num_members
        groups = [self.portions[first : first + size] for first in range(0, len(self.portions), size)]
        return [PortionRound(self.sharing.group.index, portions) for portions in groups]

    def _exchange(
        self,
        rounds: Sequence[PortionRound],
        counter: PartCounter,
        running: RunningJob,
        base: torch.Tensor,
        report: Callable[[int], None],
    ) -> None:
        """Send the bytes that arrive, round by round."""
        done = 0
        for index, each_round in enumerate(rounds):
            with self.sharing.group.collective():
                if not counter.wait(index):
                    running.join()  # Raises the job's error.
                running.settle()
                self.sharing.group.broadcast(each_round.within(base))
            done += sum(portion.nbytes for portion in each_round.portions)
            report(done)


def check_same(group: Group, mine: tuple[str, str], *, is_last: bool = False) -> None:
    """Raise PlanError if another member loads something else than this one.

    Args:
        mine: description and digest of this member's load.
        is_last: as for `Group.all_gather`.
    """
    for member, (what, digest) in enumerate(group.all_gather(mine, is_last=is_last)):
        if digest != mine[1]:
            group.is_over = True  # All of them raise this error.
            other = what if what != mine[0] else "other tensors, or another version or conversion, of that"
            raise PlanError(
                f"group: member {group.index} loads {mine[0]}, member {member} {other};"
                " all members of a group must load the same",
                code="option",
            )


def verify_received(
    files: Sequence[StoredFile],
    reads: Sequence[Read],
    rounds: Sequence[PortionRound],
    memory: memoryview,
    start: int,
    num_threads: int,
) -> None:
    """Verify bytes that other members have read. The files verify the bytes that this member reads itself.

    A chunk that is complete in memory is hashed. For any other chunk, this member reads its bytes itself.

    Args:
        files: of a signed checkpoint.
        reads: reads that fill the memory, from the arena's offset `start` on.
        rounds: the rounds in which members have read the bytes.
    """
    received = _received_chunks(files, reads, rounds)
    needed = {part.file: files[part.file] for part in received}
    digests = {index: file.digests.chunk_digests() for index, file in needed.items() if file.digests is not None}
    with ExitStack() as stack:
        opened = {index: stack.enter_context(file.open(Access.BUFFERED)) for index, file in needed.items()}

        def verify(part: _ReceivedChunk) -> None:
            if not part.is_whole:
                part.fill(opened[part.file], memory, start)
                return
            file = needed[part.file]
            assert file.digests is not None
            digest = blake3_hex(part.view(memory, start))
            check_chunk(digest, digests[part.file], part.number, part.extent, file.where)

        each(verify, received, num_threads)


@dataclass(frozen=True, slots=True)
class _ReceivedChunk:
    """A chunk with some bytes in an arena that were read by other members."""

    file: int
    number: int
    extent: Extent
    pieces: Sequence[Transfer]
    """The transfers of the chunk's bytes from the file to the arena."""

    @property
    def is_whole(self) -> bool:
        """True if all bytes of the chunk are in the arena."""
        return sum(piece.total_nbytes for piece in self.pieces) == self.extent.nbytes

    def fill(self, opened: ReadableFile, memory: memoryview, start: int) -> None:
        """Read the chunk, which verifies it, into memory that begins at the arena's offset `start`."""
        mine = memoryview(bytearray(self.extent.nbytes))
        opened.read(self.extent.offset, mine)
        for piece in self.pieces:
            copy_runs(mine, memory, piece, -self.extent.offset, -start)

    def view(self, memory: memoryview, start: int) -> memoryview:
        """Return the chunk's bytes in memory that begins at the arena's offset `start`.

        They are copied to new memory if they are not contiguous.
        """
        if len(self.pieces) == 1 and self.pieces[0].count == 1:
            return memory[self.pieces[0].target - start : self.pieces[0].target_end - start]
        whole = memoryview(bytearray(self.extent.nbytes))
        for piece in self.pieces:
            copy_runs(memory, whole, piece.inverted(), -start, -self.extent.offset)
        return whole


def _received_chunks(
    files: Sequence[StoredFile], reads: Sequence[Read], rounds: Sequence[PortionRound]
) -> list[_ReceivedChunk]:
    """Return the chunks with bytes in the arena that this member has not read itself."""
    own = [
        (portion.start, portion.end)
        for each_round in rounds
        for portion in each_round.portions
        if portion.member == each_round.member
    ]
    chunks: dict[tuple[int, int, Extent], list[Transfer]] = defaultdict(list)
    for read in reads:
        digests, transfer = files[read.file].digests, read.transfer
        assert digests is not None
        span = Extent(transfer.source, transfer.source_end - transfer.source)
        for number, chunk, part in chunks_over(span, digests.data_start, files[read.file].nbytes, digests.chunk_nbytes):
            if pieces := transfer.clipped(part.offset, part.end):
                chunks[read.file, number, chunk] += pieces

    def is_own(piece: Transfer) -> bool:
        return any(low <= piece.target and piece.target_end <= high for low, high in own)

    return [_ReceivedChunk(*where, pieces) for where, pieces in chunks.items() if not all(map(is_own, pieces))]
