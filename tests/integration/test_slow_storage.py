"""Loads from a slow FUSE file system, if mfusepy and fuse3 are installed: what comes over its link, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.loader_fixtures import assert_equal, mlp_model
from support.page_cache import opened
from support.slow_storage import Link, absence, slow_folder

import relayout
from relayout.loader.diagnose.doctor import diagnose
from relayout.storage.local.page_cache import resident_nbytes

pytestmark = pytest.mark.skipif(absence() is not None, reason=str(absence()))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("path", ["out", "model"])
def test_a_rank_moves_its_bytes_once_and_leaves_the_page_cache_as_it_was(
    tmp_path: Path, direct: bool, path: str
) -> None:
    (tmp_path / "files").mkdir()
    mlp_model(tmp_path / "files/model", width=8192)
    relayout.convert(tmp_path / "files/model", tmp_path / "files/out", tp=2)
    expected = relayout.load(tmp_path / "files/out", 1)
    with slow_folder(tmp_path / "files", tmp_path / "mount", Link(0.002, 1e9, 128 * 1024, direct)) as slow:
        before = slow.sent_nbytes()
        loaded = relayout.load(tmp_path / "mount" / path, 1, tp=2)
        moved = slow.sent_nbytes() - before
        found = diagnose(tmp_path / "mount/out", rank=1, device="cpu")
        for file in (tmp_path / "mount" / path).glob("*.safetensors"):
            with opened(file) as fd:
                assert (resident_nbytes(fd, 0, file.stat().st_size) or 0) < 2**18
    assert_equal(loaded, expected)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert nbytes <= moved < nbytes * (1.1 if path == "out" else 2.2) + 2**19
    assert found.network is not None
    assert 0.002 <= found.network.latency_seconds < 1
    assert found.ranks[0].backend == ("direct" if direct else "buffered")
