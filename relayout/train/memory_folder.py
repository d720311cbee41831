"""The checkpoint folder that tensors in memory would be saved as: its shards, their headers, its index, and its bytes.

A save converts this folder, which is never written or parsed. All files other than shards come from the argument
`config`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relayout.checkpoint.folder import (
    CONFIG_NAME,
    check_exists,
    find_config,
    find_side_files,
    parse_config,
)
from relayout.checkpoint.shards import METADATA, MemoryShard
from relayout.checkpoint.source import MAX_INDEX_NBYTES, SourceCheckpoint, SourceFile, SourceTensor
from relayout.core.extents import Extent
from relayout.core.slices import TensorHead
from relayout.errors import FormatError, PlanError, warn
from relayout.format.index import HUB_INDEX_NAME
from relayout.format.manifest import MAX_TABLE_NBYTES
from relayout.loader.held import HeldTensor
from relayout.storage.stores import (
    LOCAL_COST,
    Access,
    Enter,
    Entry,
    FileStat,
    Kind,
    Modes,
    ReadableFile,
    ReadOnlyStore,
    RequestCost,
    Store,
    entered,
    everywhere,
    find_input,
    read_whole,
)

Fill = Callable[[str, Extent, memoryview], None]
"""Fills memory with an extent of a shard, given by name. It does not change bytes of the header, or after the shard's
end."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFolder(ReadOnlyStore):
    """A folder to convert. Thread-safe, if `fill` is."""

    files: Mapping[str, bytes]
    """Small files."""
    shards: Mapping[str, MemoryShard]
    fill: Fill
    version: str
    """The version of all files."""

    @property
    def cost(self) -> RequestCost:
        return LOCAL_COST

    def __str__(self) -> str:
        return "tensors in memory"

    def location(self, name: str) -> str:
        return f"{self}: {name}"

    def parent(self) -> tuple[Store, str]:
        return self, ""

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        return entered((*self.files, *self.shards), enter)

    def stat(self, name: str) -> FileStat | None:
        if name in self.files:
            return FileStat(len(self.files[name]), self.version, vouched=self.version)
        shard = self.shards.get(name)
        return None if shard is None else FileStat(shard.nbytes, self.version, Modes().file, self.version)

    def read(self, name: str, limit: int) -> bytes:
        return read_whole(self.open(name), self.location(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        stat = self.stat(name)
        if stat is None:
            raise FormatError("no such file", path=self.location(name), code="missing")
        stat.check(self.location(name), nbytes, version)
        return _MemoryFile(self, name, stat)


class _MemoryFile(ReadableFile):
    def __init__(self, folder: MemoryFolder, name: str, stat: FileStat) -> None:
        self._folder = folder
        self._name = name
        self._stat = stat

    @property
    def nbytes(self) -> int:
        return self._stat.nbytes

    @property
    def version(self) -> str:
        return self._stat.version

    @property
    def alignment(self) -> int:
        return 1

    def fileno(self) -> int | None:
        return None

    def read(self, offset: int, view: memoryview) -> None:
        shard = self._folder.shards.get(self._name)
        head = self._folder.files[self._name] if shard is None else shard.header
        known = memoryview(head)[offset : offset + view.nbytes]
        view[: known.nbytes] = known
        if shard is not None and known.nbytes < view.nbytes:
            self._folder.fill(self._name, Extent(offset, view.nbytes), view)

    def close(self) -> None:
        pass


def checkpoint_of(folder: MemoryFolder, heads: Sequence[TensorHead]) -> SourceCheckpoint:
    """Return the checkpoint that `read_source` would find in a folder.

    Args:
        heads: of all tensors, in model order, to which the shards' positions refer.
    """
    shards = sorted(folder.shards.values(), key=lambda shard: shard.name)
    extents: dict[int, tuple[int, Extent]] = {}
    for number, shard in enumerate(shards):
        for t, start, end in zip(shard.tensors, shard.starts, shard.starts[1:], strict=False):
            extents[t] = number, Extent(start, end - start)
    index = folder.files.get(HUB_INDEX_NAME)
    return SourceCheckpoint(
        root=folder,
        files=tuple(
            SourceFile(shard.name, shard.nbytes, len(shard.header), shard.header, folder.version) for shard in shards
        ),
        tensors=tuple(SourceTensor(head.name, head.dtype, head.shape, *extents[t]) for t, head in enumerate(heads)),
        metadata=METADATA,
        config=find_config(folder).content,
        index=None if index is None else (HUB_INDEX_NAME, index),
        side=None,
    )


def files_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the small files next to the weights, by name. Warn about larger ones, such as weights in subfolders."""
    if isinstance(config, Mapping):
        try:
            return {CONFIG_NAME: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
        except (TypeError, ValueError) as error:
            raise PlanError(f"config cannot be written as JSON: {error}", code="option") from error
    folder = find_input(config)
    check_exists(folder)
    if folder.kind() is Kind.FILE:
        beside, name = folder.parent()
        return {CONFIG_NAME: beside.read(name, MAX_TABLE_NBYTES)}
    return {name: content for name in find_side_files(folder).kept if (content := _small(folder, name)) is not None}


def _small(folder: Store, name: str) -> bytes | None:
    """Return the content of a small file; None, with a warning, if it is too large to be held in memory."""
    with folder.open(name) as file:
        if file.nbytes <= MAX_TABLE_NBYTES:
            return read_whole(file, folder.location(name), MAX_TABLE_NBYTES)
        what = f"{file.nbytes:,} bytes, limit {MAX_TABLE_NBYTES:,} for a file that is saved with the weights"
        warn(f"{folder.location(name)}: {what}: it is left out")
        return None


def check_names(
    names: Iterable[str], content: bytes, config: Mapping[str, Any] | str | os.PathLike[str] | None
) -> None:
    """Check that no tensor has merged experts, as in models of transformers 5, if the checkpoint names each expert.

    Some checkpoints have merged experts: the index of the folder `config` then names them. If this process has not
    imported transformers, no experts can have been merged, and nothing is checked.

    Args:
        names: of the tensors.
        content: of config.json.
    """
    mapping = sys.modules.get("transformers.conversion_mapping")
    if mapping is None:
        return
    whole = parse_config(content, CONFIG_NAME)
    model_types = [one.get("model_type") for one in (whole, whole.get("text_config")) if isinstance(one, dict)]
    endings = tuple(
        target
        for model_type in model_types
        if isinstance(model_type, str)
        for conversion in mapping.get_checkpoint_conversion_mapping(model_type) or ()
        if any(isinstance(step, mapping.MergeModulelist) for step in getattr(conversion, "operations", ()))
        for target in conversion.target_patterns
    )
    merged = next((name for name in names if name.endswith(endings)), None)
    if merged is not None and merged not in _names_in_index(config):
        what = "has the experts that transformers has merged, and the checkpoint has them one by one"
        how = "`relayout.transformers.save_pretrained(model, ...)` writes the names of the hub"
        more = f"if the hub has this name, let config be a folder whose {HUB_INDEX_NAME} has it"
        raise PlanError(f"{what}: {how}; {more}", tensor=merged, code="unsupported")


def second_names(
    held: Mapping[str, HeldTensor], content: bytes, config: Mapping[str, Any] | str | os.PathLike[str] | None
) -> frozenset[str]:
    """Return the names to leave out: further names of an embedding, if config.json has `tie_word_embeddings`.

    Two names are one embedding if they share memory; values are not compared. A name in the index of the folder
    `config` is kept. Of all names of one embedding, the first is kept, as in the checkpoints that transformers writes.

    Args:
        content: of config.json.
    """
    whole = parse_config(content, CONFIG_NAME)
    parts = [one for one in (whole, whole.get("text_config")) if isinstance(one, dict)]
    if not any(one.get("tie_word_embeddings") is True for one in parts):
        return frozenset()
    vocabularies = [one.get("vocab_size") for one in parts]
    known = set[tuple[object, ...]]()
    second = []
    for name, one in held.items():
        if len(one.head.shape) == 2 and one.head.shape[0] in vocabularies:
            second += [name] if one.memory in known else []
            known.add(one.memory)
    named = _names_in_index(config) if second else ()
    return frozenset(name for name in second if name not in named)


def _names_in_index(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Container[str]:
    """Return the tensors that the index in a folder names; none without a folder or an index."""
    folder = None if config is None or isinstance(config, Mapping) else find_input(config)
    if folder is None or folder.kind() is Kind.FILE or folder.stat(HUB_INDEX_NAME) is None:
        return ()
    index = folder.read(HUB_INDEX_NAME, MAX_INDEX_NBYTES)
    named = parse_config(index, folder.location(HUB_INDEX_NAME)).get("weight_map")
    return named if isinstance(named, dict) else ()
