"""Sizes and times of all that a folder and a delta have beside the weights, for a mixture of 256 experts.

No weights are read or written: the shards are holes, and digests are random, as those of weights are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from relayout.conversion.copy_plan import TensorDigests, WrittenDigests
from relayout.conversion.layout import Conversion
from relayout.conversion.planning import plan_conversion
from relayout.conversion.sidecar import HeaderWriter, write_sidecar
from relayout.core.digests import BLAKE3_NBYTES, XXH3_NBYTES
from relayout.format.delta import ChangedDigests, DeltaManifest, dump_delta
from relayout.format.index import MANIFEST_NAME, Manifest, num_chunks
from relayout.format.manifest import (
    MAX_RECORD_NBYTES,
    SOURCE_RECORD_NAME,
    compress,
    content_of,
    decompress,
    parse_manifest,
)
from relayout.format.rank_table import parse_table
from relayout.format.safetensors import LENGTH_NBYTES
from relayout.format.source_record import parse_record
from relayout.storage.stores import WritableFile

Value = TypeVar("Value")

LAYERS, DENSE_LAYERS, EXPERTS, HIDDEN, BLOCK = 61, 3, 256, 7168, 128
"""Of DeepSeek-V3 (config.json of deepseek-ai/DeepSeek-V3)."""
CONFIG = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": DENSE_LAYERS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
}
_SHARD_NBYTES = 4_300_000_000
_NUM_RUNS = 5


def tensors(layers: int = LAYERS) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor."""

    def quantized(name: str, rows: int, columns: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield f"{name}.weight", "F8_E4M3", (rows, columns)
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))

    def mlp(name: str, width: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for part, rows, columns in (
            ("gate_proj", width, HIDDEN),
            ("up_proj", width, HIDDEN),
            ("down_proj", HIDDEN, width),
        ):
            yield from quantized(f"{name}.{part}", rows, columns)

    yield "model.embed_tokens.weight", "BF16", (129280, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, width in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            yield f"{at}.{name}.weight", "BF16", (width,)
        for name, width in (("q_a_layernorm", 1536), ("kv_a_layernorm", 512)):
            yield f"{at}.self_attn.{name}.weight", "BF16", (width,)
        for name, rows, columns in (
            ("q_a_proj", 1536, HIDDEN),
            ("q_b_proj", 24576, 1536),
            ("kv_a_proj_with_mqa", 576, HIDDEN),
            ("kv_b_proj", 32768, 512),
            ("o_proj", HIDDEN, 16384),
        ):
            yield from quantized(f"{at}.self_attn.{name}", rows, columns)
        if layer < DENSE_LAYERS:
            yield from mlp(f"{at}.mlp", 18432)
            continue
        yield f"{at}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
        yield from mlp(f"{at}.mlp.shared_experts", 2048)
        for expert in range(EXPERTS):
            yield from mlp(f"{at}.mlp.experts.{expert}", 2048)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (129280, HIDDEN)


def write_holes(folder: Path, layers: int = LAYERS) -> Path:
    """Write the checkpoint, with holes in the place of weights."""
    sizes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    shards: list[tuple[dict[str, Any], int]] = [({}, 0)]
    for name, dtype, shape in tensors(layers):
        top, end = shards[-1]
        nbytes = sizes[dtype]
        for size in shape:
            nbytes *= size
        if end and end + nbytes > _SHARD_NBYTES:
            shards.append(({}, 0))
            top, end = shards[-1]
        top[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        shards[-1] = top, end + nbytes
    for number, (top, end) in enumerate(shards, 1):
        text = json.dumps({"__metadata__": {"format": "pt"}} | top, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        with (folder / f"model-{number:05}-of-{len(shards):06}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(LENGTH_NBYTES, "little") + text)
            file.truncate(LENGTH_NBYTES + len(text) + end)
    return folder


class _Small:
    """An output that keeps what is put, and nothing of the weights."""

    mark = ""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        """Do nothing."""

    def write(self, name: str, nbytes: int) -> WritableFile:
        raise AssertionError(name)

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        """Do nothing."""

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        self.files[name] = b"".join(pieces)

    def kept(self, part: str) -> bytes | None:
        return None

    def keep(self, part: str, notes: bytes) -> None:
        """Do nothing."""


def small_files(conversion: Conversion) -> dict[str, bytes]:
    """All files of the folder but those with weights, by name."""
    random = {
        t: TensorDigests(os.urandom(XXH3_NBYTES).hex(), tuple(os.urandom(XXH3_NBYTES).hex() for _ in cut.cut.distinct))
        for t, cut in enumerate(conversion.cut)
    }
    chunks = {
        number: os.urandom(BLAKE3_NBYTES * num_chunks(file.data_start, file.nbytes, 2**20))
        for number, file in enumerate(conversion.layout.files)
    }
    output, written = _Small(), WrittenDigests(random, chunks)
    headers = HeaderWriter(output, conversion)
    for unit in range(len(conversion.layout.units)):
        headers.write(unit, written)
    write_sidecar(output, conversion, written, headers.files)
    return output.files


def measure(scratch: Path, degrees: Iterable[int], part_nbytes: Iterable[int]) -> list[dict[str, Any]]:
    """Sizes in bytes, and seconds, at each degree and size of parts."""
    source = write_holes(scratch / "source")
    rows = []
    for num_ranks in degrees:
        for max_part_nbytes in part_nbytes:
            conversion = plan_conversion(source, scratch / "out", tp=num_ranks, max_part_nbytes=max_part_nbytes)
            rows.append(_row(conversion, small_files(conversion), max_part_nbytes))
    return rows


def _row(conversion: Conversion, files: dict[str, bytes], max_part_nbytes: int) -> dict[str, Any]:
    blob = files[MANIFEST_NAME]
    manifest, parse_seconds = timed(lambda: parse_manifest(blob, "manifest"))
    table, record = manifest.holders[0].table, files[SOURCE_RECORD_NAME]
    text = decompress(record, "record", MAX_RECORD_NBYTES)
    return {
        "tensors": len(conversion.source.tensors),
        "tp": conversion.plan.num_ranks,
        "part_nbytes": max_part_nbytes,
        "files": len(manifest.files),
        "manifest_nbytes": len(blob),
        "table_nbytes": len(files[table]),
        "head_nbytes": len(blob) + len(files[table]),
        "record_nbytes": len(record),
        "record_expanded_nbytes": len(text),
        "chunks_nbytes": len(files["relayout.chunks"]),
        "digests_nbytes": len(files.get("relayout.digests", b"")),
        "delta_fixed_nbytes": fixed_nbytes(manifest, blob),
        "parse_manifest_s": parse_seconds,
        "parse_table_s": timed(lambda: parse_table(files[table], manifest, 0, "table"))[1],
        "parse_record_s": timed(lambda: parse_record(text, conversion.plan.num_ranks, "record"))[1],
    }


def fixed_nbytes(manifest: Manifest, blob: bytes) -> int:
    """Bytes of a delta in which no weight has changed, and only the manifest has."""
    nothing = ChangedDigests(0, content_of(b""))
    delta = DeltaManifest(
        "relayout", content_of(blob), content_of(blob), (), (nothing,) * (len(manifest.holders) + 1), ()
    )
    return len(dump_delta(delta)) + len(compress(blob))


def timed(call: Callable[[], Value]) -> tuple[Value, float]:
    """What a call returns, and the median of its seconds."""
    seconds = []
    for _ in range(_NUM_RUNS):
        started = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - started)
    return found, median(seconds)


def print_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each measurement."""
    table = Table(
        "TP", "files", "manifest", "table", "head of a load", "record", "chunks", "digests", "delta, fixed", "parse"
    )
    for row in rows:
        sizes = [
            f"{row[f'{what}_nbytes'] / 1e6:,.3f} MB"
            for what in ("manifest", "table", "head", "record", "chunks", "digests", "delta_fixed")
        ]
        parse = " ".join(f"{row[f'parse_{what}_s']:.2f}" for what in ("manifest", "table", "record"))
        table.add_row(str(row["tp"]), str(row["files"]), *sizes, f"{parse} s")
    console.print(table)
