"""`tools/run bench reuse`: what `copy --reuse` reads of a new version over a link, and how long it takes.

The link is a store in memory that lets bytes pass at a rate and counts them. Beside each figure is what has really
changed, what chunks on a fixed grid alone would save, and a patch by zstd, which needs both versions on one machine.

For a bucket that has the older version, the S3 server of the tests counts what is sent, and what it copies itself.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file
from support import s3_server
from support.toy_store import Shelf

import relayout
from relayout.checkpoint.converted import read_chunk_digests, read_manifest
from relayout.core.digests import BLAKE3_NBYTES
from relayout.storage import stores
from relayout.storage.cloud.store import CloudStore

TP, HIDDEN, HEAD, NEW_TOKENS = 8, 1024, 64, 64
VOCABULARY = 16_384
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (3 * HIDDEN, HIDDEN),
    "mlp.up_proj": (3 * HIDDEN, HIDDEN),
    "mlp.down_proj": (HIDDEN, 3 * HIDDEN),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "head_dim": HEAD,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": HIDDEN // HEAD // 2,
}
Elements = npt.NDArray[np.uint16]
LogLine = Callable[[str], None]


class _Far(Shelf):
    """Objects behind a link, which all requests share."""

    rate = 1e9 / 8
    """Bytes per second."""

    def __init__(self) -> None:
        super().__init__("bench")
        self._wire = threading.Lock()
        self._free_at = 0.0

    def _request(self, operation: str, name: str, nbytes: int = 0) -> None:
        super()._request(operation, name, nbytes)
        if operation == "read":
            with self._wire:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.rate
                passed_at = self._free_at
            time.sleep(max(0.0, passed_at - time.monotonic()))


FAR = _Far()


def offer(url: str) -> stores.Store:
    """The store of a URL `far://NAME`."""
    return CloudStore(FAR, url.removeprefix("far://"))


def random_elements(shape: tuple[int, ...], seed: int) -> Elements:
    """BF16 elements near zero, as those of weights are; no two tensors have equal ones."""
    normal = np.random.default_rng(seed).standard_normal(shape, np.float32) * 0.02
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def tensors_of(layers: int) -> dict[str, Elements]:
    """A model of Llama's shapes."""
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    return {name: random_elements(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def changes(old: Mapping[str, Elements], layers: int) -> Iterator[tuple[str, dict[str, Elements], int]]:
    """What changed, the new model, and the degree that it is converted for."""
    yield "nothing", dict(old), TP
    tuned = {f".layers.{layer}." for layer in range(0, layers, 2)}
    yield (
        f"{len(tuned)} of {layers} layers",
        {name: random_elements(t.shape, 1000 + n) if any(part in name for part in tuned) else t
         for n, (name, t) in enumerate(old.items())},
        TP,
    )  # fmt: skip
    rows = {name: random_elements((NEW_TOKENS, HIDDEN), 2000 + n) for n, name in enumerate(old)}
    grown = {n: np.concatenate([t, rows[n]]) if t.shape[0] == VOCABULARY else t for n, t in old.items()}
    yield f"{NEW_TOKENS} more tokens", grown, TP
    yield f"TP {TP} to TP {TP // 2}", dict(old), TP // 2
    yield "1 % of all elements", {name: _touched(t, 3000 + n) for n, (name, t) in enumerate(old.items())}, TP


def _touched(tensor: Elements, seed: int) -> Elements:
    return tensor ^ (np.random.default_rng(seed).random(tensor.shape) < 0.01).astype(np.uint16)


def measure(scratch: Path, layers: int, runs: int, rate: float, log_line: LogLine) -> Iterator[dict[str, Any]]:
    """Rows of the table, one for each change; `rate` is the link's, in bytes per second."""
    stores.REGISTRY["far"] = "bench.reuse"
    FAR.rate = rate
    before = tensors_of(layers)
    old = _convert(scratch / "old", before, TP)
    for what, after, tp in changes(before, layers):
        new = _convert(scratch / "new", after, tp)
        for path in new.iterdir():
            FAR.write(f"new/{path.name}", path.read_bytes())
        nbytes = sum(path.stat().st_size for path in new.iterdir())
        times: dict[str, list[float]] = {"full": [], "reuse": []}
        for _ in range(runs):
            for way, older in (("full", None), ("reuse", old)):
                FAR.log.clear()
                started = time.perf_counter()
                relayout.copy("far://new", scratch / "out", reuse=older)
                times[way].append(time.perf_counter() - started)
                _check_same(new, scratch / "out")
                shutil.rmtree(scratch / "out")
        yield {
            "change": what,
            "nbytes": nbytes,
            "new_share": _new_nbytes(before, after) / sum(tensor.nbytes for tensor in after.values()),
            "sent_share": FAR.read_nbytes / nbytes,
            "fixed_chunks_share": _new_chunks(old, new),
            "full_s": median(times["full"]),
            "reuse_s": median(times["reuse"]),
            "zstd": _patched(old, new, scratch / "patch") if tp == TP else None,
        }
        log_line(f"{what}: done")
        FAR.clear()
        shutil.rmtree(new)


def measure_bucket(scratch: Path, layers: int, log_line: LogLine) -> Iterator[dict[str, Any]]:
    """Rows of the table of copies into a bucket, one for each change.

    The model has four times as many layers as in the other table, and a quarter of the ranks: with smaller files, most
    equal ranges would be shorter than a part of an upload.
    """
    layers *= 4
    with s3_server.running() as server, environ(s3_server.environment(server)):
        server.checks_parts = True
        before = tensors_of(layers)
        old = _convert(scratch / "old-in-bucket", before, TP // 4)
        relayout.copy(old, "s3://bench/old")
        for what, after, tp in changes(before, layers):
            new = _convert(scratch / "new", after, tp // 4)
            server.requests.clear()
            server.copied_nbytes = 0
            done = relayout.copy(new, "s3://bench/new", reuse="s3://bench/old")
            _check_stored(server, new)
            nbytes = sum(path.stat().st_size for path in new.iterdir())
            sent_nbytes = sum(len(one.body) for one in server.requests if one.method in ("PUT", "POST"))
            if done.copied_nbytes != server.copied_nbytes:
                raise SystemExit(f"{done.copied_nbytes} bytes copied, the server has counted {server.copied_nbytes}")
            yield {
                "change": what.replace(f"TP {TP} to TP {TP // 2}", f"TP {TP // 4} to TP {TP // 8}"),
                "nbytes": nbytes,
                "new_share": _new_nbytes(before, after) / sum(tensor.nbytes for tensor in after.values()),
                "sent_share": sent_nbytes / nbytes,
                "copied_share": server.copied_nbytes / nbytes,
                "read_share": server.sent_nbytes / nbytes,
            }
            log_line(f"{what}, in a bucket: done")
            server.clear("bench", "new/")
            shutil.rmtree(new)


@contextmanager
def environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process until the end of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_stored(server: s3_server.Server, new: Path) -> None:
    stored = {
        name.removeprefix("new/"): server.objects["bench", name].content for name in server.names("bench", "new/")
    }
    if stored != {path.name: path.read_bytes() for path in new.iterdir()}:
        raise SystemExit("the copy in the bucket is another")


def _convert(folder: Path, tensors: Mapping[str, Elements], tp: int) -> Path:
    plain = folder.with_name("plain")
    plain.mkdir()
    save_file({name: tensor.view(np.float16) for name, tensor in tensors.items()}, plain / "model.safetensors")
    vocabulary = len(tensors["lm_head.weight"])
    (plain / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocabulary}))
    relayout.convert(plain, folder, tp=tp)
    shutil.rmtree(plain)
    return folder


def _check_same(new: Path, out: Path) -> None:
    names = sorted(path.name for path in new.iterdir())
    equal, *others = filecmp.cmpfiles(new, out, names, shallow=False)
    if any(others) or sorted(equal) != sorted(path.name for path in out.iterdir()):
        raise SystemExit(f"the copy is another: {others}")


def _new_nbytes(before: Mapping[str, Elements], after: Mapping[str, Elements]) -> int:
    """Bytes of rows that the older model does not have in the same tensor, at the same place."""
    total = 0
    for name, tensor in after.items():
        old = before[name]
        same = np.equal(tensor[: len(old)], old).reshape(len(old), -1).all(axis=1).sum()
        total += tensor.nbytes * (len(tensor) - int(same)) // len(tensor)
    return total


def _new_chunks(old: Path, new: Path) -> float:
    """Share of the chunks whose digest the older folder has nowhere: what a fixed grid alone would send."""
    digests = []
    for folder in (old, new):
        store = stores.find_store(folder)
        manifest = read_manifest(store)
        packed = b"".join(read_chunk_digests(store, manifest, number) for number in range(len(manifest.files)))
        digests.append([packed[at : at + BLAKE3_NBYTES] for at in range(0, len(packed), BLAKE3_NBYTES)])
    known = set(digests[0])
    return sum(digest not in known for digest in digests[1]) / len(digests[1])


def _patched(old: Path, new: Path, patch: Path) -> dict[str, float] | None:
    """Bytes of patches from the files of the same name, as a share of the new files, and the seconds they take."""
    if shutil.which("zstd") is None:
        return None
    nbytes = total = 0
    seconds = {"make": 0.0, "apply": 0.0}
    for path in new.glob("*.safetensors"):
        base = f"--patch-from={old / path.name}"
        made = patch.with_suffix(".made")
        for what, command in (("make", [path, "-o", patch]), ("apply", ["-d", patch, "-o", made])):
            started = time.perf_counter()
            subprocess.run(["zstd", "-q", "-f", "-1", "--long=31", "--memory=2048MB", base, *command], check=True)
            seconds[what] += time.perf_counter() - started
        if not filecmp.cmp(made, path, shallow=False):
            raise SystemExit(f"{path.name}: the patch makes another file")
        nbytes, total = nbytes + patch.stat().st_size, total + path.stat().st_size
    return {"sent_share": nbytes / total, "make_s": seconds["make"], "apply_s": seconds["apply"]}


def print_table(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """The rows."""
    table = Table(
        "changed", "new bytes", "read with --reuse", "fixed chunks alone", "zstd patch", "full copy / --reuse"
    )
    for row in rows:
        shares = [row["new_share"], row["sent_share"], row["fixed_chunks_share"]]
        zstd = "-" if row["zstd"] is None else f"{row['zstd']['sent_share']:.4f}"
        times = f"{row['full_s'] / row['reuse_s']:.1f}"
        table.add_row(row["change"], *(f"{share:.4f}" for share in shares), zstd, times)
    console.print(table)


def print_bucket_table(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """The rows of copies into a bucket."""
    table = Table("changed", "new bytes", "sent to the bucket", "copied by its server", "read from the bucket")
    for row in rows:
        shares = [row["new_share"], row["sent_share"], row["copied_share"], row["read_share"]]
        table.add_row(row["change"], *(f"{share:.4f}" for share in shares))
    console.print(table)
