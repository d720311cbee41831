"""SGLang's table of n-grams in a file, with stubs for what 0.5.23 has in qwen4_exp and qwen4_exp_ple_table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fake_sglang import Engine
from support.fake_vllm import put_modules
from support.trees import content

import relayout
from relayout.storage.system import advise

LAYER = "model.layers.1.ple.ple_embedding."
SHARD = LAYER + "ngram_embedding.shard_{}.weight"
NORM = "model.norm.weight"
ROWS, SHARDS, WIDTH = 300, 4, 160


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ple") / "source"
    folder.mkdir()
    bits = np.random.default_rng(11)
    counts = [ROWS] * (SHARDS - 1) + [ROWS - 48]
    tensors = {
        SHARD.format(n): torch.from_numpy(bits.integers(0, 256, (c, WIDTH), np.uint8)) for n, c in enumerate(counts)
    }
    tensors = {name: tensor.view(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    tensors[NORM] = torch.from_numpy(bits.standard_normal(64, np.float32)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen4_exp_text"}))
    relayout.convert(folder, folder.parent / "tp2", tp=2)
    relayout.convert(folder, folder.parent / "tp1", tp=1)
    return folder


@pytest.fixture
def whole(source: Path) -> torch.Tensor:
    tensors = load_file(source / "model.safetensors")
    return torch.cat([tensors[SHARD.format(n)].view(torch.uint8) for n in range(SHARDS)])


class Prefetcher:
    """PleFilePrefetcher."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.advised: list[int] = []

    def _advise(self, pages: list[int]) -> None:
        self.advised += pages


@pytest.fixture
def made(sglang: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that SGLang has made for tables."""
    made: list[Path] = []

    def allocate_ple_host_table(
        shape: Any, dtype: torch.dtype, backend: str = "pinned", table_dir: str | None = None, tag: str | None = None
    ) -> torch.Tensor:
        path = tmp_path / f"ple_table_{tag}.bin"
        nbytes = int(np.prod(shape)) * dtype.itemsize
        path.write_bytes(bytes(nbytes))
        made.append(path)
        table = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8).view(dtype).view(*shape)
        table._sglang_ple_file_path = str(path)  # type: ignore[attr-defined]
        return table

    def make_ple_file_prefetcher(table: Any) -> Prefetcher | None:
        path = getattr(table, "_sglang_ple_file_path", None)
        return None if path is None else Prefetcher(path)

    functions = {
        "allocate_ple_host_table": allocate_ple_host_table,
        "make_ple_file_prefetcher": make_ple_file_prefetcher,
    }
    put_modules(monkeypatch, {"sglang.srt.models.qwen4_exp": functions, "sglang.srt.models": {}})
    return made


class Model(torch.nn.Module):
    """What Qwen4ExpPinnedHostEmbedding and its load_weights do with the table of a rank, and one other parameter."""

    def __init__(self, rank: int, tp: int, *, width: int = WIDTH, padding: int = 0) -> None:
        super().__init__()
        self.rank, self.tp, share = rank, tp, (ROWS * SHARDS - 48) // tp
        self.start, self.end = rank * share, (rank + 1) * share
        self.shape = (share + padding, width)
        self.given: list[str] = []

    def allocate(self) -> None:
        from sglang.srt.models import qwen4_exp

        rows = f"rows{self.start}-{self.end}"
        table = qwen4_exp.allocate_ple_host_table(
            shape=self.shape, dtype=torch.float8_e4m3fn, backend="file", table_dir=None, tag=rows
        )
        self.prefetcher = qwen4_exp.make_ple_file_prefetcher(table)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.norm = torch.nn.Parameter(torch.empty(64, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.given.append(name)
            if name == NORM:
                self.norm.data.copy_(tensor)
                continue
            first = int(name.split("shard_")[1].split(".")[0]) * ROWS
            low, high = max(first, self.start), min(first + tensor.shape[0], self.end)
            if low < high:
                self.table.data[low - self.start : high - self.start].copy_(tensor[low - first : high - first])


IN_FILE = {"ple_offload_embedding": True, "ple_offload_backend": "file"}


def start(sglang: Engine, folder: Path, rank: int, tp: int) -> Model:
    model = Model(rank, tp)
    sglang.load(folder, model, text_config=IN_FILE)
    return model


def bits(model: Model) -> torch.Tensor:
    return model.table.data.view(torch.uint8)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_table_is_mapped_where_it_is_stored_and_nothing_is_written(
    source: Path, sglang: Engine, made: list[Path], whole: torch.Tensor, tp: int
) -> None:
    folder = source.parent / f"tp{tp}"
    before = content(folder)
    for rank in range(tp):
        model = start(sglang, folder, rank, tp)
        assert made == []
        assert model.given == [NORM]
        assert torch.equal(bits(model), whole[model.start : model.end])
        # What its trimmer does: pages come back from the file.
        advise(bits(model).data_ptr(), bits(model).nbytes, 4)
        assert torch.equal(bits(model), whole[model.start : model.end])
        bits(model)[0] += 1  # A private copy of one page.
        assert content(folder) == before


def test_pages_are_prefetched_where_they_lie_in_the_file(source: Path, sglang: Engine, made: list[Path]) -> None:
    model = start(sglang, source.parent / "tp2", 1, 2)
    model.prefetcher._advise([0, 3])
    [path] = {Path(model.prefetcher.path)}
    offset = model.prefetcher.advised[0] * 4096
    assert model.prefetcher.advised == [offset // 4096, offset // 4096 + 3]
    assert path.read_bytes()[offset:] == bytes(memoryview(bits(model).numpy()).cast("B"))


def test_a_table_outlives_the_start_and_its_map_ends_with_it(source: Path, sglang: Engine, made: list[Path]) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(source.parent / "tp2"))

    before, model = maps(), start(sglang, source.parent / "tp2", 0, 2)
    assert maps() == before + 1
    del model
    assert maps() == before


@pytest.mark.parametrize("what", ["pinned", "verify", "padding", "width", "plain", "other degree", "two tables"])
def test_a_table_that_is_not_there_so_is_sglangs_to_make(
    source: Path, sglang: Engine, made: list[Path], whole: torch.Tensor, tmp_path: Path, what: str
) -> None:
    folder, options = source.parent / "tp2", {}
    if what == "plain":
        folder = source
    elif what == "two tables":  # Of which one is meant, nobody says.
        tensors = load_file(source / "model.safetensors")
        second = {
            name.replace("layers.1.", "layers.2."): one.clone() for name, one in tensors.items() if "shard" in name
        }
        shutil.copytree(source, tmp_path / "two")
        save_file({**tensors, **second}, tmp_path / "two" / "model.safetensors")
        relayout.convert(tmp_path / "two", tmp_path / "out", tp=2)
        folder = tmp_path / "out"
    elif what == "other degree":
        folder = source.parent / "tp1"
    elif what in ("padding", "width"):
        options = {"padding": 64} if what == "padding" else {"width": 2 * WIDTH}
    model, relayout_options = Model(0, 2, **options), {"verify": True} if what == "verify" else {}
    text = {**IN_FILE, "ple_offload_backend": "pinned"} if what == "pinned" else IN_FILE
    if what == "width":
        with pytest.raises(RuntimeError):  # As without relayout: SGLang's copy fails.
            sglang.load(folder, model, text_config=text, load_format="auto", **relayout_options)
    else:
        sglang.load(folder, model, text_config=text, load_format="auto", **relayout_options)
        assert torch.equal(bits(model)[: model.end], whole[: model.end])
    assert [path.name for path in made] == ["ple_table_rows0-576.bin"]
