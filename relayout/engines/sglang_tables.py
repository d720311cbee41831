"""SGLang's n-gram table in a file: a private map of the rank's rows at their location in the converted folder.

With `--ple-offload-backend file`, SGLang 0.5.23 (`srt/models/qwen4_exp_ple_table.py`) creates a file for the table,
maps it, and writes all of it at each start. A converted folder stores a rank's rows as one aligned run (`table = true`
in a plan). This run is mapped instead, copy-on-write, and the table's shards are left out of the load: nothing is
written, and pages are read when the kernel accesses rows. SGLang itself creates a table that is stored differently.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import Logger
from typing import TYPE_CHECKING, Any

from relayout.core.extents import align_up
from relayout.errors import RelayoutError
from relayout.storage.system import advise, map_file, unmap

if TYPE_CHECKING:
    import torch

    from relayout.loader.rows import RowReader

_SHARD = re.compile(r"(.*\.ngram_embedding\.shard_)[0-9]+(\.weight)")
_ROWS = re.compile(r"rows([0-9]+)-([0-9]+)")
"""The tag of a table: the range of the vocabulary's rows that the rank holds, without padding."""
_RANDOM = 1
"""MADV_RANDOM of `asm-generic/mman-common.h`, which SGLang's own map also uses."""
_ALLOCATE, _PREFETCHER = "allocate_ple_host_table", "make_ple_file_prefetcher"


def is_in_file(model_config: Any) -> bool:
    """Return True if SGLang is configured to keep a model's n-gram tables in files."""
    config: Any = getattr(model_config, "hf_text_config", None)
    return bool(getattr(config, "ple_offload_embedding", False)) and config.ple_offload_backend == "file"


class MappedTables:
    """The tables of one model that are mapped while it is created."""

    def __init__(self, path: str, rank: int, num_ranks: int, logger: Logger) -> None:
        """Map the tables of a converted folder; `rank` is the rank that the engine loads."""
        self._path, self._rank, self._num_ranks, self._logger = path, rank, num_ranks, logger
        self.names: set[str] = set()
        """Tensors that are mapped, and that the engine is not given."""

    @contextmanager
    def replacing(self, module: Any) -> Iterator[None]:
        """Map tables where `sglang.srt.models.qwen4_exp` allocates them, inside the block."""
        allocate, prefetcher = getattr(module, _ALLOCATE), getattr(module, _PREFETCHER)

        def allocate_here(
            shape: Sequence[int], dtype: torch.dtype, *args: Any, tag: str | None = None, **rest: Any
        ) -> Any:
            table = self._map(tuple(map(int, shape)), dtype, tag)
            return allocate(shape, dtype, *args, tag=tag, **rest) if table is None else table

        setattr(module, _ALLOCATE, allocate_here)
        setattr(module, _PREFETCHER, lambda table: _shifted(prefetcher(table), table))
        try:
            yield
        finally:
            setattr(module, _ALLOCATE, allocate)
            setattr(module, _PREFETCHER, prefetcher)

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype, tag: str | None) -> torch.Tensor | None:
        """Return the table of these rows, mapped; None: the folder does not store it as one run, or has two of them."""
        from relayout.loader.rows import open_rows
        from relayout.loader.sources.checkpoint import LoadRequest

        rows = _ROWS.fullmatch(tag or "")
        if rows is None:
            return None
        start, end = int(rows[1]), int(rows[2])
        try:
            source = LoadRequest(path=self._path, rank=self._rank, tp=self._num_ranks).source()
            names = [name for name in source.columns().names if _SHARD.fullmatch(name)]
            found = []
            for pattern in dict.fromkeys(_SHARD.sub(r"\1#\2", name) for name in names):
                with open_rows(self._path, self._rank, pattern, tp=self._num_ranks) as table:
                    fits = (end - start, *table.shape[1:]) == shape and table.dtype == dtype
                    if fits and table.held == ((start, end),):
                        found.append((pattern, _mapped(table, shape)))
        except (RelayoutError, OSError) as error:
            self._logger.warning("relayout: the table of n-grams is not mapped, SGLang makes it: %s", error)
            return None
        pattern, mapped = found[0] if len(found) == 1 else ("", None)
        if mapped is None:
            self._logger.info("relayout: %s has no single run of the table %s: SGLang makes it", self._path, tag)
            return None
        self.names |= {name for name in names if _SHARD.sub(r"\1#\2", name) == pattern}
        what = "relayout: table of n-grams mapped from %s: %.3f GB. Nothing of it has been read or written yet."
        self._logger.info(what, vars(mapped)["_sglang_ple_file_path"], mapped.nbytes / 1e9)
        return mapped


def _mapped(table: RowReader, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Map the rows that a rank holds; None if they are not one run of whole pages, or may not be mapped."""
    import torch

    run = table.run
    # The last page has no content after the run.
    if run is None or run.offset % mmap.PAGESIZE or run.offset + run.nbytes != run.file.nbytes:
        return None
    # Private: SGLang maps it to write to it, which must not change the folder.
    nbytes = align_up(run.nbytes, mmap.PAGESIZE)
    address = map_file(run.fd, run.offset, nbytes, flags=mmap.MAP_PRIVATE, writable=True)
    memory = (ctypes.c_char * run.nbytes).from_address(address)
    weakref.finalize(memory, unmap, address, nbytes)
    advise(address, nbytes, _RANDOM)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(table.dtype).view(shape)
    tensor._sglang_ple_file_path = str(run.file.path)  # type: ignore[attr-defined]  # For its prefetcher and trimmer.
    tensor._relayout_offset = run.offset  # type: ignore[attr-defined]
    return tensor


def _shifted(prefetcher: Any, table: Any) -> Any:
    """Return a prefetcher that counts pages from the start of the file, for a table that begins inside a file."""
    pages = getattr(table, "_relayout_offset", 0) // mmap.PAGESIZE
    if prefetcher is not None and pages:
        ordinary: Callable[[list[int]], None] = prefetcher._advise
        prefetcher._advise = lambda wanted: ordinary([page + pages for page in wanted])
    return prefetcher
