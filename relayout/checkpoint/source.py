"""Reads a source checkpoint: every tensor with its location, and the identity of the checkpoint.

Reads directory entries, small JSON files and header bytes. Two checkpoints are the same only if their bytes are.
Fine-tunes share names, lengths and headers, and often modification times. A file's content is proven by a value for
which its store vouches (`FileStat.vouched`), else by samples: blocks of its tensors, the only data that is read here.
Samples prove nothing about the bytes between them. So on one machine the identity also includes the location of each
local file. STORES.md describes the strength and cost of these proofs.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import xxhash

from relayout.checkpoint.dcp_folder import is_dcp, read_dcp
from relayout.checkpoint.folder import (
    SINGLE_NAME,
    Config,
    SideFiles,
    advice_without_shards,
    check_exists,
    check_name,
    choose_shards,
    chosen_by_transformers,
    find_config,
    find_index,
    find_side_files,
    glance,
    other_shards,
    refuse_incomplete,
)
from relayout.checkpoint.shards import model_order
from relayout.core.arguments import collapse_numbers
from relayout.core.digests import xxh3_hex
from relayout.core.extents import BLOCK, Extent
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import LFS_POINTER, Fields, check_apart, check_path, parse_object
from relayout.format.index import MANIFEST_NAME, RANK_FILE
from relayout.format.manifest import compact_json
from relayout.format.safetensors import LENGTH_NBYTES, Header, header_nbytes, parse_header
from relayout.storage.stores import (
    FileStat,
    Kind,
    ReadableFile,
    Store,
    nowhere,
    unversioned,
)
from relayout.storage.system import filesystem_of

MAX_INDEX_NBYTES = 2**28


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One shard (a safetensors file of the source)."""

    name: str
    """File name in the checkpoint folder."""
    nbytes: int
    """Length of the whole file."""
    data_start: int
    """Absolute file offset of the data section."""
    header: bytes = field(repr=False)
    """The 8 + n bytes before the data section, as stored."""
    version: str | None = None
    """`FileStat.version` when the header was read; None for a file that is still to be written."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    """Position in `SourceCheckpoint.files`."""
    extent: Extent
    """The tensor's bytes, at absolute file offsets."""


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A source checkpoint: its files, tensors in model order, and configuration."""

    root: Store
    """The folder or single file that the caller gave."""
    files: tuple[SourceFile, ...]
    tensors: tuple[SourceTensor, ...]
    """All tensors in model order: by name, numbers compared as numbers."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`__metadata__` entries on which all shards agree."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json; empty if there is none. Its quantization_config may come from another file."""
    index: tuple[str, bytes] | None = None
    """Name and bytes of the index.json; None if there is none."""
    side: SideFiles | None = field(default_factory=SideFiles)
    """The side files, if known; None: all folders must be listed to find them, see `side_files`."""
    skipped: tuple[str, ...] = ()
    """Top-level files and tensors outside the model, each with the reason, as text for the user."""
    is_file: bool = False
    """True if `root` is a single file; its side files are in the same folder."""
    identities: list[SourceIdentity] = field(init=False, default_factory=list, compare=False, repr=False)
    """Cached result of `identity_of`, at most one: computing it costs many small reads."""
    sides: list[SideFiles] = field(init=False, default_factory=list, compare=False, repr=False)
    """Cached result of `_side`, at most one."""

    @property
    def folder(self) -> Store:
        """The folder of all files."""
        return self.root.parent()[0] if self.is_file else self.root

    @property
    def side_files(self) -> tuple[str, ...]:
        """Files besides the weights that a conversion copies, as paths relative to the folder.

        The first access lists all folders. Loads and engines do not access it. For errors see `find_side_files`.
        """
        return self._side.kept

    @property
    def left_out(self) -> tuple[str, ...]:
        """Files that a conversion does not copy, each with the reason, as text for the user; see `side_files`."""
        return (*self.skipped, *self._side.left_out)

    @property
    def _side(self) -> SideFiles:
        if self.side is not None:
            return self.side
        if not self.sides:
            self.sides.append(self._find_side())
        return self.sides[0]

    def _find_side(self) -> SideFiles:
        found = find_side_files(self.folder)
        names = [*(file.name for file in self.files), *found.kept, *([] if self.index is None else [self.index[0]])]
        with about(path=str(self.root)):
            for name in found.kept:
                check_path(name)  # Before a byte is copied: a store may list names that no folder can have.
            check_apart(names)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.extent.nbytes for tensor in self.tensors)

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None


def read_source(store: Store, *, by_transformers: bool = False) -> SourceCheckpoint:
    """Read a checkpoint folder, a Hugging Face cache snapshot, a folder of torch DCP, or one .safetensors file.

    Only the names in the folder itself are listed, not its subfolders.

    Args:
        by_transformers: if a folder has several models, select the one that transformers loads instead of the one that
            engines load; see `chosen_by_transformers`.

    Raises:
        FormatError: a file is missing, unreadable, damaged, or contradicts the index.
        PlanError: `store` is not a checkpoint that can be converted.
    """
    try:
        kind = store.kind()
        if kind is Kind.FOLDER:
            return _read_folder(store, by_transformers)
    except PermissionError as error:
        failed = str(store) if error.filename is None else os.fsdecode(error.filename)
        raise FormatError(f"cannot be read: {error.strerror}", path=failed) from None
    folder, name = store.parent()
    # Blobs of a hub cache have no suffix.
    if name.endswith(".safetensors") or (kind is Kind.FILE and "." not in name):
        return _read_file(store, folder, name)
    check_exists(store)
    raise PlanError("neither a folder nor a .safetensors file", path=str(store))


def _read_file(store: Store, folder: Store, name: str) -> SourceCheckpoint:
    check_name(folder, name)
    if RANK_FILE.fullmatch(name):
        what = f"has slices of tensors, as its name says: give the converted folder, {folder}"
        raise PlanError(what, path=str(store), code="option")
    config = find_config(folder)
    return _assemble(
        store,
        [read_shard(folder, name)],
        config=config,
        # Planning used these files. Loading the output at another degree needs them again.
        side=SideFiles(tuple(sorted(config.names))),
        skipped=other_shards(name),
        is_file=True,
    )


def read_shard(folder: Store, name: str) -> tuple[SourceFile, Header]:
    """Read and validate the header of one safetensors file.

    Raises:
        FormatError: the file cannot be opened or is damaged.
        OSError: reading failed.
    """
    where = folder.location(name)
    with folder.open(name) as file:
        prefix = _read(file, 0, min(len(LFS_POINTER), file.nbytes))
        with about(path=where):
            end = LENGTH_NBYTES + header_nbytes(prefix, file.nbytes)
        blob = prefix[:end] + _read(file, len(prefix), max(0, end - len(prefix)))
        header = parse_header(blob, file.nbytes, where)
        return SourceFile(name, file.nbytes, header.data_start, blob, file.version), header


def _read_shard(folder: Store, name: str, index_name: str | None) -> tuple[SourceFile, Header]:
    """Read the header of a file that an index names; otherwise as `read_shard`."""
    try:
        return read_shard(folder, name)
    except FormatError as error:
        if error.code == "missing" and index_name is not None:
            error.amend(what=f"is missing, but {index_name} names it: is the download complete?")
        raise


def _read(file: ReadableFile, offset: int, nbytes: int) -> bytes:
    piece = bytearray(nbytes)
    file.read(offset, memoryview(piece))
    return bytes(piece)


def _read_folder(root: Store, by_transformers: bool) -> SourceCheckpoint:
    # Folders are included: they may have the name of a file.
    names = sorted(entry.name for entry in root.walk(nowhere))
    if MANIFEST_NAME in names:
        what = (
            f"is already a converted checkpoint (contains {MANIFEST_NAME}): relayout.load(..., tp=N) loads it at"
            " another degree; or convert its source, which `relayout restore` writes"
        )
        raise PlanError(what, path=str(root), code="exists")
    refuse_incomplete(root, names)
    if is_dcp(names):
        folder = read_dcp(root)
        source = _read_folder(folder, by_transformers)
        return replace(source, skipped=(*source.skipped, *folder.left_out))
    shards = [name for name in names if name.endswith(".safetensors")]
    config = find_config(root)
    chosen = chosen_by_transformers(root, names, config.content) if by_transformers else None
    index_name = find_index(root, names) if chosen is None else None
    if chosen is not None and not chosen.endswith(".safetensors"):
        index_name = chosen
    index: tuple[str, bytes] | None = None
    named: dict[str, str] | None = None
    if index_name is None and chosen is not None:
        used, left_out = [chosen], [f"{name}: {chosen} is the model" for name in shards if name != chosen]
    elif index_name is None:
        used, left_out = choose_shards(root, shards)
    else:
        check_name(root, index_name)
        index = index_name, root.read(index_name, MAX_INDEX_NBYTES)
        named = parse_index(index[1], root.location(index_name))
        used_names = set(named.values())
        used = sorted(used_names)
        left_out = [
            f"{name}: not named by {index_name}{_OF_TRANSFORMERS if name == SINGLE_NAME else ''}"
            for name in shards
            if name not in used_names
        ]
    if not used:
        what = f"contains no safetensors file{advice_without_shards(glance(root))}"
        raise PlanError(what, path=str(root), code="missing")
    for name in used:
        check_name(root, name)
    names_in_use = [*used, *([] if index_name is None else [index_name])]
    with about(path=str(root)):
        for name in names_in_use:
            check_path(name)
        check_apart(names_in_use)
    return _assemble(
        root,
        each(partial(_read_shard, root, index_name=index_name), used, root.cost.num_opens),
        named=named,
        config=config,
        index=index,
        side=None,
        skipped=left_out,
    )


_OF_TRANSFORMERS = ", which engines load; transformers loads this file instead"


def parse_index(text: bytes, where: str) -> dict[str, str]:
    """Parse an index.json: tensor name -> file name. Ignores its sizes.

    Raises:
        FormatError: the text is not an index, or names other files than .safetensors files in its folder.
    """
    with about(path=where):
        weight_map = Fields(parse_object(text, where)).object("weight_map")
        if not weight_map:
            raise FormatError("'weight_map' is empty", code="field")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not re.fullmatch(r"[^./\\\0][^/\\\0]*\.safetensors", file):
                raise FormatError(f"{shown(file)} is not the name of a .safetensors file", tensor=name, code="field")
    return dict(weight_map)


def _assemble(
    root: Store,
    shards: list[tuple[SourceFile, Header]],
    *,
    config: Config,
    side: SideFiles | None,
    named: Mapping[str, str] | None = None,
    index: tuple[str, bytes] | None = None,
    skipped: Sequence[str] = (),
    is_file: bool = False,
) -> SourceCheckpoint:
    folder = root.parent()[0] if is_file else root
    if folder.cost.needs_digests:
        what = (
            "a plain checkpoint in a registry: its digests are of whole files, so no part can be verified; download it"
            " with a tool that verifies them (oras pull, modctl pull), and name the folder"
        )
        raise FormatError(what, path=str(root), code="digest")
    for shard, _ in shards:
        if shard.version == "":
            raise unversioned(folder.location(shard.name))
    tensors, elsewhere = _collect_tensors(folder, shards, named, index)
    return SourceCheckpoint(
        root=root,
        files=tuple(shard for shard, _ in shards),
        tensors=tuple(sorted(tensors, key=lambda tensor: (model_order(tensor.name), tensor.name))),
        metadata=agreed_metadata([header.metadata for _, header in shards]),
        config=config.content,
        index=index,
        side=side,
        skipped=(*skipped, *elsewhere),
        is_file=is_file,
    )


def agreed_metadata(shards: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries of `__metadata__` on which all shards agree, in the order of the first."""
    first = shards[0] if shards else {}
    return {key: value for key, value in first.items() if all(shard.get(key) == value for shard in shards)}


def _collect_tensors(
    folder: Store,
    shards: list[tuple[SourceFile, Header]],
    named: Mapping[str, str] | None,
    index: tuple[str, bytes] | None,
) -> tuple[Iterable[SourceTensor], list[str]]:
    """Return the tensors of all shards, and a text for each shard with tensors that `named` assigns elsewhere."""
    tensors: dict[str, SourceTensor] = {}
    skipped = []
    for position, (shard, header) in enumerate(shards):
        if (part := _part_in(header)) is not None:
            what = (
                "a part of a tensor, saved by PyTorch's HuggingFaceStorageWriter: consolidate the folder first"
                " (enable_consolidation=True, or torch's consolidate_safetensors_files)"
            )
            raise PlanError(what, path=folder.location(shard.name), tensor=part, code="unsupported")
        elsewhere = 0
        for entry in header.tensors:
            if named is not None and named.get(entry.name, shard.name) != shard.name:
                elsewhere += 1
                continue
            if entry.name in tensors:
                other = shards[tensors[entry.name].file][0]
                raise FormatError(
                    f"is also in {other.name}", path=folder.location(shard.name), tensor=entry.name, code="mismatch"
                )
            extent = Extent(header.data_start + entry.offset, entry.nbytes)
            tensors[entry.name] = SourceTensor(entry.name, entry.dtype, entry.shape, position, extent)
        if elsewhere:
            skipped.append(f"{shard.name}: the index assigns {elsewhere} of its tensors to other files")
    for name, file in (named or {}).items():
        if name not in tensors:
            what = "is named by the index, but not in the file"
            if index is not None:
                what += f": download the file again, or, if the model has no such tensor, remove it from {index[0]}"
            raise FormatError(what, path=folder.location(file), tensor=name, code="mismatch")
    return tensors.values(), skipped


def _part_in(header: Header) -> str | None:
    """Return a tensor whose part in this file does not begin at its first element; None: all begin there.

    HuggingFaceStorageWriter writes where each part begins, also for whole tensors (torch 2.13,
    `torch/distributed/checkpoint/filesystem.py`: `DCP_SHARDING_INFO` in `__metadata__`). Text of another form is no
    evidence.
    """
    starts: Mapping[str, Any] = {}
    with suppress(FormatError):
        starts = parse_object(header.metadata.get("DCP_SHARDING_INFO", "{}").encode(), "DCP_SHARDING_INFO")
    for entry in header.tensors:
        start = starts.get(entry.name)
        offsets = start.get("saved_offsets") if isinstance(start, dict) else None
        if isinstance(offsets, list) and any(offsets):
            return entry.name
    return None


_NUM_BLOCKS = 4
"""Number of blocks read of a large tensor: one in each third, at an offset derived from its name, and the last."""
_WHOLE_NBYTES = _NUM_BLOCKS * BLOCK
"""Tensors up to this size are read whole."""
_RUN, _NUM_THREADS = 16, 8
"""Samples that one thread reads in a row, and number of threads."""
_MADE_UP_INODES = ("fuse", "vfat", "exfat", "msdos")
"""File systems that number their files anew at each mount, or while they are mounted."""
_OWN_DRIVES = ("ext", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay")
"""Prefixes of file systems on which only this machine's kernel writes: each write changes the ctime."""


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The identity of a checkpoint."""

    content: str
    """Digest of names, lengths, headers, index, and proofs of the bytes. Copies on other machines have the same."""
    place: str
    """Digest of path, inode, length and times (of modification, and of the inode's change) of each local file."""

    @property
    def here(self) -> str:
        """Digest of content and place: the identity for data that is kept on this machine."""
        return xxh3_hex(compact_json([self.content, self.place]))


def identity_of(checkpoint: SourceCheckpoint) -> SourceIdentity:
    """Return the identity of a checkpoint, with its files as they were at the first call; see `is_unchanged`.

    Raises:
        FormatError: a file is missing, or was truncated.
        OSError: a read failed.
    """
    if not checkpoint.identities:
        checkpoint.identities.append(_identity_now(checkpoint))
    return checkpoint.identities[0]


def is_unchanged(checkpoint: SourceCheckpoint, before: SourceIdentity) -> bool:
    """Return True if the files still have this identity; for errors see `identity_of`.

    Usually no file is read. Each file must have the version that its header was read from, as for all reads. A local
    file must also have the same location, which includes its ctime; each write changes the ctime. On file systems of
    other machines, which may report any ctime, samples are read again.
    """
    folder, files = checkpoint.folder, checkpoint.files
    if any(_status(folder, file.name).version != file.version for file in files if file.version):
        return False
    paths = [path for file in files if (path := folder.path(file.name)) is not None]
    if all(_kind_of(path).startswith(_OWN_DRIVES) for path in paths):
        return xxh3_hex(compact_json(_locations(checkpoint))) == before.place
    return _identity_now(checkpoint) == before


def max_samples(*stores: Store) -> int:
    """Return the maximum number of samples that are read to compare these stores: for a server each is a request."""
    return 512 if any(store.cost.is_remote for store in stores) else 16_384


def _locations(checkpoint: SourceCheckpoint) -> list[list[object] | None]:
    """Return the place of each local file; None for a file on a server."""
    return [location_of(path) if (path := checkpoint.folder.path(file.name)) else None for file in checkpoint.files]


def _identity_now(checkpoint: SourceCheckpoint) -> SourceIdentity:
    folder, files = checkpoint.folder, checkpoint.files
    statuses = [_status(folder, file.name) for file in files]
    places = _locations(checkpoint)
    # A file with another length than its header requires has another content in any case.
    unknown = [i for i, one in enumerate(statuses) if one.vouched is None and one.nbytes == files[i].nbytes]
    sampled = _hashed(checkpoint, samples_of(checkpoint, unknown))
    contents = []
    for i, (file, status) in enumerate(zip(files, statuses, strict=True)):
        name = os.fsencode(file.name).hex()  # The name need not be UTF-8.
        proof: object = status.vouched or sampled.get(i)
        if status.vouched is None and places[i] is None:
            # A server's version of a file proves nothing, but another version means another file.
            proof = [proof, folder.location(file.name), status.version]
        contents.append([name, status.nbytes, xxh3_hex(file.header), proof])
    # One tensor may lie in several files: the index selects one.
    tensors = [[tensor.name, tensor.file, tensor.extent.offset, tensor.extent.nbytes] for tensor in checkpoint.tensors]
    index = None if checkpoint.index is None else xxh3_hex(checkpoint.index[1])
    content = xxh3_hex(compact_json([contents, tensors, index]))
    return SourceIdentity(content, xxh3_hex(compact_json(places)))


def location_of(path: Path) -> list[object]:
    """Return the values that distinguish a local file from all others on this machine.

    Device numbers are left out: those of network and overlay file systems differ after each mount.
    """
    status = path.stat()
    real = Path(os.path.realpath(path))
    inode = None if _kind_of(path).startswith(_MADE_UP_INODES) else status.st_ino
    return [os.fsencode(real).hex(), inode, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _kind_of(path: Path) -> str:
    """Return the kind of a file's file system."""
    return _kind_at(Path(os.path.realpath(path)).parent, path.stat().st_dev)


@lru_cache(maxsize=64)
def _kind_at(folder: Path, device: int) -> str:
    """Return the kind of a folder's file system, valid as long as the same device is mounted there."""
    return filesystem_of(folder).kind


def samples_of(checkpoint: SourceCheckpoint, files: Collection[int]) -> dict[int, list[Extent]]:
    """Return the extents to read of each of these files, in rising order. Equal headers give equal extents.

    Each kind of tensors (names that differ in numbers only) gets an equal share of the samples. The unused part of a
    share goes to larger kinds. If a kind has more tensors than its share, their names decide which are left out.
    """
    wanted, kinds = set(files), defaultdict[str, list[tuple[int, SourceTensor]]](list)
    for tensor in checkpoint.tensors:
        if tensor.file in wanted and tensor.extent.nbytes:
            kinds[collapse_numbers(tensor.name)].append((_seed(tensor.name), tensor))
    left = max_samples(checkpoint.folder)
    samples: dict[int, list[Extent]] = {index: [] for index in files}
    for done, members in enumerate(sorted(kinds.values(), key=len)):
        members.sort(key=lambda member: member[0])
        share = min(len(members) * _NUM_BLOCKS, left // (len(kinds) - done))
        for number in range(share):
            seed, tensor = members[number % len(members)]
            samples[tensor.file].extend(_block(tensor.extent, seed, number // len(members)))
        left -= share
    return {index: sorted(extents) for index, extents in samples.items()}


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def _block(extent: Extent, seed: int, number: int) -> Iterator[Extent]:
    """Yield the block with this number of a tensor; none if block 0 is the whole tensor."""
    if extent.nbytes <= _WHOLE_NBYTES:
        if number == 0:
            yield extent
    elif number == _NUM_BLOCKS - 1:
        yield Extent(extent.end - BLOCK, BLOCK)
    else:
        third = extent.nbytes // (_NUM_BLOCKS - 1)
        yield Extent(extent.offset + number * third + (seed >> 16 * number) % (third - BLOCK), BLOCK)


def _hashed(checkpoint: SourceCheckpoint, samples: Mapping[int, Sequence[Extent]]) -> dict[int, str]:
    """Return the digest of each file's samples."""
    runs = [
        (index, extents[first : first + _RUN])
        for index, extents in samples.items()
        for first in range(0, len(extents), _RUN)
    ]

    def read(run: tuple[int, Sequence[Extent]]) -> bytes:
        index, extents = run
        file, digest, buffer = checkpoint.files[index], xxhash.xxh3_128(), bytearray(_WHOLE_NBYTES)
        with checkpoint.folder.open(file.name, file.nbytes) as opened:
            for extent in extents:
                view = memoryview(buffer)[: extent.nbytes]
                opened.read(extent.offset, view)
                digest.update(view)
        return digest.digest()

    digests: dict[int, bytes] = dict.fromkeys(samples, b"")
    for (index, _), digest in zip(runs, each(read, runs, _NUM_THREADS), strict=True):
        digests[index] += digest
    return {index: xxh3_hex(found) for index, found in digests.items()}


def _status(folder: Store, name: str) -> FileStat:
    status = folder.stat(name)
    if status is None:
        raise FormatError("is missing", path=folder.location(name), code="missing")
    return status
