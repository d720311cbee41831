"""`relayout.rows`: rows of a table by number, beside torch's indexing of the table that the stock reader reads."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.bits import flip
from support.page_cache import drop

import relayout
from relayout.errors import FormatError, PlanError
from relayout.loader import rows as module
from relayout.loader.sources.rank import StoredFile
from relayout.storage.local.batched import BatchedReads
from relayout.storage.system import resident_nbytes

SHARD = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
TABLE = SHARD.format("#")
ROWS = (700, 700, 700, 588)
"""Rows of the shards, a multiple of 128 together. They have 40 bytes: no block has a whole number of them."""
DEGREE = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a table in shards, an embedding, and a matrix that is cut by columns."""
    folder = tmp_path_factory.mktemp("rows") / "source"
    folder.mkdir()
    bits = np.random.default_rng(7)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(bits.integers(0, 256, (*shape[:-1], 2 * shape[-1]), np.uint8)).view(torch.bfloat16)

    tensors = {SHARD.format(n): tensor(count, 20) for n, count in enumerate(ROWS)}
    tensors |= {"model.embed_tokens.weight": tensor(1000, 24), "model.norm.weight": tensor(24)}
    tensors["model.layers.0.mlp.shared_expert.down_proj.weight"] = tensor(16, 64)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen4_exp_text"}))
    return folder


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    relayout.convert(source, source.parent / "out", tp=DEGREE)
    return source.parent / "out"


@pytest.fixture(scope="module")
def table(source: Path) -> torch.Tensor:
    """The table as the stock reader has it, whose bits are compared."""
    tensors = load_file(source / "model.safetensors")
    return torch.cat([tensors[SHARD.format(n)] for n in range(len(ROWS))])


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.fixture(params=["together", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the system reads many ranges by one call, or each by a call of its own."""
    if request.param == "one by one":

        def refused(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EAGAIN, "fs.aio-max-nr")

        monkeypatch.setattr(BatchedReads, "read", refused)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_rank_reads_its_rows_by_their_numbers_in_the_whole_table(
    converted: Path, table: torch.Tensor, is_cached: bool
) -> None:
    for rank in range(DEGREE):
        files = sorted(converted.glob(f"model-rank-{rank}-*"))
        with relayout.open_rows(converted, rank, TABLE) as opened:
            assert opened.shape == (sum(ROWS), 20)
            assert opened.held == ((rank * 1344, (rank + 1) * 1344),)
            for file in files:
                drop(file) if not is_cached else file.read_bytes()
            ids = torch.from_numpy(np.random.default_rng(rank).integers(*opened.held[0], 3000))
            assert_bits(opened.rows(ids), table[ids])
            assert_bits(opened.rows(torch.arange(*opened.held[0])), table[slice(*opened.held[0])])


@settings(max_examples=30)
@given(ids=st.lists(st.integers(1344, 2687), max_size=40), depth=st.sampled_from([1, 3, 64]))
def test_any_rows_in_any_order_and_twice(converted: Path, table: torch.Tensor, ids: list[int], depth: int) -> None:
    assert_bits(relayout.rows(converted, 1, TABLE, ids, depth=depth), table[ids])


def test_whole_tables_are_read_from_all_ranks_and_from_plain_checkpoints(
    source: Path, converted: Path, table: torch.Tensor
) -> None:
    ids = torch.randint(0, len(table), (5, 7), generator=torch.Generator().manual_seed(1))
    for path, rank, options in ((converted, None, {}), (converted, 0, {"tp": 1}), (source, None, {})):
        assert_bits(relayout.rows(path, rank, TABLE, ids, **options), table[ids])
    assert_bits(relayout.rows(converted, 1, TABLE, [672], tp=4), table[[672]])  # Another degree.


@pytest.mark.filterwarnings("ignore:.*plain checkpoint")
def test_a_single_tensor_is_a_table(source: Path, converted: Path) -> None:
    name = "model.embed_tokens.weight"
    whole = load_file(source / "model.safetensors")[name]
    with relayout.open_rows(converted, 1, name) as opened:
        assert opened.held == ((512, 1000),)
        assert_bits(opened.rows(np.array([999, 512], np.uint16)), whole[[999, 512]])
    assert_bits(relayout.rows(source, 1, name, 700, tp=2), whole[700])


def test_a_batch_has_a_limit(converted: Path, table: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that occur in two batches, and blocks that two batches share, are read twice."""
    reads: list[int] = []
    ordinary = BatchedReads.read

    def counted(queue: BatchedReads, fd: int, addresses: Any, offsets: Any, sizes: Any) -> Any:
        reads.append(int(sizes.sum()))
        return ordinary(queue, fd, addresses, offsets, sizes)

    monkeypatch.setattr(module, "_MAX_BATCH_NBYTES", 50_000)
    monkeypatch.setattr(BatchedReads, "read", counted)
    ids = np.random.default_rng(3).integers(0, 1344, 2000)
    assert_bits(relayout.rows(converted, 0, TABLE, ids), table[ids])
    assert max(reads) <= 50_000
    assert len(reads) > 300


def test_each_block_is_read_once(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbors are one read: all rows of a rank are one."""
    reads: list[list[int]] = []
    ordinary = BatchedReads.read

    def counted(queue: BatchedReads, fd: int, addresses: Any, offsets: Any, sizes: Any) -> Any:
        reads.append(sizes.tolist())
        return ordinary(queue, fd, addresses, offsets, sizes)

    monkeypatch.setattr(BatchedReads, "read", counted)
    with relayout.open_rows(converted, 0, TABLE) as opened:
        for file in converted.glob("model-rank-0-*"):
            drop(file)
        opened.rows(range(1344))
        opened.rows([0, 1, 1343, 1, 0])
        fd = os.open(sorted(converted.glob("model-rank-0-*"))[-1], os.O_RDONLY)
        try:
            assert resident_nbytes(fd, 4096, 1344 * 40) == 0  # The page cache is as it was.
        finally:
            os.close(fd)
    assert reads == [[57344], [4096, 4096]]


def test_rows_go_into_memory_of_the_caller(converted: Path, table: torch.Tensor) -> None:
    out = torch.empty((2, 2, 20), dtype=torch.bfloat16)
    found = relayout.rows(converted, 0, TABLE, [[3, 5], [5, 3]], out=out)
    assert found is out
    assert_bits(out, table[[3, 5, 5, 3]].reshape(2, 2, 20))
    wrong = [out[:, :1], out.float(), torch.empty((2, 2, 20, 2), dtype=torch.bfloat16)[..., 0]]
    for other in wrong:
        with pytest.raises(
            PlanError, match=r"out: .*expected a contiguous tensor, torch.bfloat16 \[2, 2, 20\], on the CPU"
        ):
            relayout.rows(converted, 0, TABLE, [[3, 5], [5, 3]], out=other)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1344], "ids: no row 1344, expected 0 to 1343"),
        ([5, -1], "ids: no row -1, expected 0 to 1343"),
        ([2**62], "ids: no row 4611686018427387904, "),
        ([1.0], "ids: 'float64', expected integers"),
        ([True], "ids: 'bool', expected integers"),
        (np.array([2**63], np.uint64), "ids: 'uint64', expected integers"),
    ],
)
def test_rows_that_the_rank_does_not_hold_are_refused_before_any_is_read(
    converted: Path, ids: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.RowReader, "_read", lambda *_: pytest.fail("rows were read"))
    with pytest.raises(PlanError, match=says):
        relayout.rows(converted, 0, TABLE, ids)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.embed_tokens", "no tensor matches 'model.embed_tokens'"),
        ("model.**", "expected one tensor, or a pattern with one # for the shards of a table"),
        (SHARD.format("#").replace("1", "#"), "expected one tensor, or a pattern with one #"),
        (["model.norm.weight"], "expected one tensor, or a pattern"),
        ("model.layers.0.mlp.shared_expert.down_proj.weight", "its rows are not stored in one piece"),
    ],
)
def test_what_is_no_table_is_refused(converted: Path, name: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        relayout.rows(converted, 0, name, [0])


def test_no_rows_are_read_as_no_rows(converted: Path) -> None:
    assert relayout.rows(converted, 0, TABLE, []).shape == (0, 20)
    assert relayout.rows(converted, 0, TABLE, np.zeros((0, 3), np.int64)).shape == (0, 3, 20)


@pytest.mark.usefixtures("way")
def test_a_file_that_was_truncated_while_it_was_open_is_an_error(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "copy")
    with relayout.open_rows(tmp_path / "copy", 0, TABLE) as opened:
        os.truncate(sorted((tmp_path / "copy").glob("model-rank-0-*"))[-1], 8192)
        with pytest.raises(FormatError, match=r"copy/model-rank-0-part-\d.safetensors: .*ends at byte 8192"):
            opened.rows(range(1344))


def test_a_file_of_another_conversion_is_refused(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "copy")
    flip(sorted((tmp_path / "copy").glob("model-rank-0-*"))[-1], 60)
    with pytest.raises(FormatError):
        relayout.rows(tmp_path / "copy", 0, TABLE, [0])


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is proven as it is read, as under a policy: nothing of it is read by its descriptor."""
    ordinary = module.RowReader.__init__

    def init(reader: Any, name: Any, runs: Any, files: tuple[StoredFile, ...], depth: int) -> None:
        ordinary(reader, name, runs, tuple(file.verified() for file in files), depth)

    monkeypatch.setattr(module.RowReader, "__init__", init)


@pytest.mark.usefixtures("verified")
def test_bytes_that_are_to_be_proven_are(converted: Path, table: torch.Tensor, tmp_path: Path) -> None:
    ids = [7, 1343, 500, 7]
    assert_bits(relayout.rows(converted, 0, TABLE, ids), table[ids])
    shutil.copytree(converted, tmp_path / "copy")
    flip(sorted((tmp_path / "copy").glob("model-rank-0-*"))[-1], 4096 + 500 * 40)
    with pytest.raises(FormatError, match="digest"):
        relayout.rows(tmp_path / "copy", 0, TABLE, ids)
