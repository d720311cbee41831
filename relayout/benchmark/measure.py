"""`bench`: plans the measurements of a checkpoint, carries them out, and summarizes them.

The checkpoint exists already, or it is created for this purpose: it then has the names and shapes of Llama-3.1-8B, and
bytes that depend on their position.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path

import numpy as np

from relayout.benchmark.loaders import LOADERS, Loader
from relayout.benchmark.machine import (
    DriveLimit,
    Machine,
    describe,
    device_title,
    devices_of,
    drive_limit,
    num_cpus,
    total_nbytes,
)
from relayout.benchmark.run import Folders, LogLine, RankGroup, digest_of
from relayout.benchmark.verdict import RankLoads, verdict, warnings_of
from relayout.checkpoint.converted import check_present, is_converted, read_digests, read_manifest, read_table
from relayout.checkpoint.folder import check_exists
from relayout.checkpoint.source import read_source
from relayout.commands.convert import convert
from relayout.conversion.planning import default_output
from relayout.core.arguments import at_least_one, folder_text, integer, size
from relayout.core.slices import num_bytes
from relayout.errors import PlanError, how_to_install
from relayout.format.index import MANIFEST_NAME
from relayout.format.safetensors import TensorEntry, build_header
from relayout.plans.planner import plan_for
from relayout.reporting import Result
from relayout.storage.stores import find_store

_MADE_TP = 4
_MAX_RANKS = 64
"""Highest degree of a converted folder that is searched for next to the plain one."""
_LOAD_SECONDS, _GB_PER_S = 4.0, 1.0
"""Assumptions for the estimate: seconds per process in addition to its load, and the approximate read speed."""

_BUDGET_SECONDS = 120.0
"""Approximate limit of the measurement, in seconds, if the caller does not set a number of runs."""
_RUNS = 3
"""Runs of each loader if the caller does not set a number and time allows."""

LAYER_NBYTES, EMBEDDING_NBYTES = 436_224_000, 2_101_355_000
"""Bytes of the tensors of one layer, and of embedding and head together."""
POOL_NBYTES = 64 * 2**20 + 4093  # Not a multiple of a page, so that no two layers hold the same bytes.
VOCAB_SIZE = 128256
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LAYER = {
    "input_layernorm": (4096,),
    "mlp.down_proj": (4096, 14336),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "post_attention_layernorm": (4096,),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "self_attn.q_proj": (4096, 4096),
    "self_attn.v_proj": (1024, 4096),
}

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, and shape of a tensor."""


class LoadCounter:
    """Counts loads, reports each one with the remaining time, and checks the time budget."""

    def __init__(self, total: int, budget: float | None, log_line: LogLine) -> None:
        self.total, self.done = total, 0
        self._budget, self._log_line, self._started = budget, log_line, time.monotonic()

    def __call__(self, line: str) -> None:
        self.done += 1
        elapsed = time.monotonic() - self._started
        left = elapsed / self.done * (self.total - self.done)
        if self._budget is not None:
            left = min(left, max(0.0, self._budget - elapsed))
        self._log_line(f"{self.done}/{self.total} {line}; about {_duration(left)} left")

    def is_over(self, share: float = 1.0) -> bool:
        """Return True if this share of the time budget has passed."""
        return self._budget is not None and time.monotonic() - self._started > share * self._budget


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True, slots=True, repr=False)
class Bench(Result):
    """Result of `bench`."""

    source: str | None
    converted: str | None
    tp: int
    runs: int
    machine: Machine
    devices: tuple[str, ...]
    """Names of the devices that were loaded to."""
    drive_gb_per_s: float | None
    """Median speed of direct reads, in GB/s (10^9 bytes). None: the file system does not support them."""
    drive_by: str | None
    """The program that measured it; see `machine.DriveLimit`."""
    loads: tuple[RankLoads, ...]
    """Results for one rank and for all ranks at once, cold and warm, if they were possible."""
    left_out: tuple[str, ...]
    """Measurements that were left out, each with the reason."""
    warnings: tuple[str, ...]
    """Reasons why the figures are not reliable."""
    wrong: tuple[str, ...]
    """Loaders with wrong bytes, and the loads in which these were found."""
    verdict: str


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A planned benchmark, ready to run."""

    folders: Folders
    runs: int
    budget: float | None
    """Time budget in seconds, after which optional measurements are left out. None: everything is measured."""
    loaders: dict[str, Loader]
    left_out: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    """Devices that ranks are loaded to, in rotation."""

    @property
    def droppable_nbytes(self) -> int:
        """Bytes of the files that `run(drop_caches=True)` drops from the page cache before each cold load."""
        return total_nbytes(self.folders.every_file)

    def run(
        self,
        *,
        drop_caches: bool,
        log_line: LogLine = lambda line: None,
        partly: Callable[[Bench], None] = lambda result: None,
    ) -> Bench:
        """Carry out the measurements. Files are only read.

        Args:
            drop_caches: drop the checkpoint's files, and no others, from the page cache before each cold load. Other
                processes that use them will wait for the drive. False: cold loads are not measured.
            tell: called with a line of text after each load.
            partly: called with the results so far if an exception ends the measurement, such as one raised by a signal.

        Raises:
            FormatError, PlanError, OSError: the checkpoint cannot be read.
        """
        about = describe(self.folders.every_file[0].parent)
        states = ("cold", "warm") if drop_caches else ("warm",)
        idle = "memory that the host of a virtual machine has taken back: before each load, memory is touched and freed"
        found = BenchResults([*self.left_out, idle], [], [])
        if not drop_caches:
            found.left_out.append(
                "cold loads: dropping the files from the page cache was not allowed (--yes allows it)"
            )
        groups = self._groups(states)
        counted = LoadCounter(sum(len(group.names) for group in groups) * self.runs, self.budget, log_line)
        log_line(self._estimate(counted.total, len(states)))
        try:
            for done, group in enumerate(groups, 1):
                self._measure(group, found, counted, done / len(groups))
        except BaseException:
            if counted.done:
                found.left_out.append(f"stopped after {counted.done} of {counted.total} loads")
                partly(self._result(about, found))
            raise
        return self._result(about, found)

    def _groups(self, states: Sequence[str]) -> list[RankGroup]:
        """Return the groups of loads, in order: one rank and all at once, in each state of the page cache."""
        folders, tp = self.folders, self.folders.tp
        manifest = folders.manifest
        is_of_degree = manifest is not None and manifest.num_ranks == tp
        expected = expected_digests(folders.converted) if folders.converted and is_of_degree else None
        together = [[0], list(range(tp))][: 2 if tp > 1 else 1]
        return [
            RankGroup(folders, self.loaders, ranks, state, expected, devices=self.devices)
            for state in states
            for ranks in together
        ]

    def _measure(self, group: RankGroup, found: BenchResults, counted: LoadCounter, share: float) -> None:
        """Measure a group until this share of the time budget is used, or append the reason for leaving it out."""
        why = group.too_large()
        if why is None and counted.is_over() and found.loads:
            why = f"{group.title}, {group.state}: the time is over (--runs {self.runs} measures everything)"
        if why is not None:
            found.left_out.append(why)
            counted.total -= len(group.names) * self.runs
            return
        if group.state == "cold":
            files = self.folders.rank_files(group.ranks) or self.folders.source_files
            found.limits.extend(filter(None, (drive_limit(files) for _ in range(self.runs))))
        group.measure(self.runs, counted, found.loads.append, is_over=lambda: counted.is_over(share))

    def _result(self, about: Machine, found: BenchResults) -> Bench:
        folders, loads = self.folders, found.loads
        drive = statistics.median(limit.gb_per_s for limit in found.limits) if found.limits else None
        return Bench(
            source=None if folders.source is None else str(folders.source),
            converted=None if folders.converted is None else str(folders.converted),
            tp=folders.tp,
            runs=self.runs,
            machine=about,
            devices=tuple(map(device_title, self.devices)),
            drive_gb_per_s=drive,
            drive_by=found.limits[0].by if found.limits else None,
            loads=tuple(loads),
            left_out=tuple(found.left_out),
            warnings=warnings_of(about, loads),
            wrong=tuple(line for group in loads for line in group.wrong()),
            verdict=verdict(about, loads, folders.tp, drive, is_converted=folders.converted is not None),
        )

    def _estimate(self, loads: int, num_states: int) -> str:
        """Return a line with the number of loads, and their approximate time on an idle machine."""
        nbytes = len(self.loaders) * self.runs * num_states * 2 * self.droppable_nbytes
        seconds = loads * _LOAD_SECONDS * (1 + self.folders.tp / num_cpus() / 2) + nbytes / _GB_PER_S / 1e9
        if self.budget is not None and seconds > self.budget:
            what = f"up to {loads} loads, each in fresh processes: as many as fit into about {_duration(self.budget)}"
            return f"{what}; --runs {self.runs} makes all, about {_duration(seconds)} on an idle machine"
        return f"{loads} loads, each in fresh processes: about {_duration(seconds)} on an idle machine"


@dataclass(frozen=True, slots=True)
class BenchResults:
    """Results collected while a benchmark runs."""

    left_out: list[str]
    limits: list[DriveLimit]
    loads: list[RankLoads]


def plan_bench(
    path: str | os.PathLike[str],
    *,
    tp: int | None = None,
    against: str | os.PathLike[str] | None = None,
    runs: int | None = None,
    device: str = "cpu",
) -> BenchPlan:
    """Plan a benchmark of a checkpoint. Reads headers only.

    Args:
        path: a converted folder, or a plain checkpoint, on a local file system.
        tp: the tensor-parallel degree. Default: that of the converted folder.
        against: the same checkpoint, plain if `path` is converted, otherwise converted. Default: the folder next to
            `path` that `convert` would write, or has converted.
        runs: number of loads by each loader, for medians. Default: 3, or fewer if these would take more than 2 minutes;
            the last measurements may then be left out.
        device: where tensors are loaded to: "cpu"; "cuda", which is all CUDA devices, one rank after the other; or one
            of them, such as "cuda:1".

    Raises:
        FormatError: a file is damaged.
        PlanError: the folders belong to different checkpoints, or are not local; or no plan for the checkpoint exists;
            or torch is not installed, or cannot use the device.
    """
    budget, runs = (_BUDGET_SECONDS, _RUNS) if runs is None else (None, at_least_one(runs, "runs"))
    tp = None if tp is None else at_least_one(tp, "tp")
    if util.find_spec("torch") is None:
        raise PlanError(f"loads need torch, which is not installed: {how_to_install('torch')}", code="unsupported")
    devices = devices_of(device)
    kind = devices[0].partition(":")[0]
    folders = _find_folders(path, tp, against)
    if folders.tp > 1 and folders.source is not None:
        plan_for(read_source(find_store(folders.source)), folders.tp)
    loaders, left_out = {}, []
    for name, loader in LOADERS.items():
        # A part of a model is loaded by get_slice, and a whole model by load_file.
        if name == ("get_slice" if folders.tp == 1 else "load_file"):
            continue
        if loader.reads_converted:
            why = None if folders.converted is not None else "there is no converted folder"
        else:
            why = loader.absence(kind) if folders.source is not None else "there is no plain folder"
        if why is None:
            loaders[name] = loader
        else:
            left_out.append(f"{loader.title}: {why}")
    return BenchPlan(folders, runs, budget, loaders, tuple(left_out), devices)


@contextmanager
def made_checkpoint(
    folder: str | os.PathLike[str], nbytes: int | str, tp: int | None = None, log_line: LogLine = lambda line: None
) -> Iterator[Path]:
    """Write a checkpoint of Llama-3.1-8B shapes of about `nbytes`, and its conversion, in a temporary folder.

    Args:
        folder: the temporary folder is created inside this folder.

    Yields:
        The plain folder, with the converted one next to it. Both are deleted when the block ends.
    """
    parent, wanted = Path(folder), size(nbytes, "size")
    tp = _MADE_TP if tp is None else integer(tp, "tp")
    if not parent.is_dir() or is_converted(find_store(parent)) or any(parent.glob("*.safetensors")):
        what = "is not a folder, or has a checkpoint: with a size, expected a folder on the drive to measure"
        raise PlanError(what, path=folder, code="option")
    layers = layers_of(wanted)
    total = EMBEDDING_NBYTES + layers * LAYER_NBYTES
    if shutil.disk_usage(parent).free < 2.2 * total:
        raise PlanError(
            f"needs {2.2 * total / 1e9:.0f} GB for a checkpoint and its conversion", path=folder, code="space"
        )
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=parent) as scratch:
        source = Path(scratch) / "made"
        log_line(f"making a checkpoint of {total / 1e9:.1f} GB and converting it to {tp} ranks, below {parent}")
        write_llama(source, layers, shard_nbytes=10**9)
        convert(source, tp=tp)
        yield source


def layers_of(nbytes: float) -> int:
    """Return the number of layers of a checkpoint of about this many bytes."""
    return max(1, round((nbytes - EMBEDDING_NBYTES) / LAYER_NBYTES))


def write_llama(
    folder: Path,
    num_layers: int,
    shard_nbytes: int = 5 * 10**9,
    vocab_size: int = VOCAB_SIZE,
    *,
    holes: bool = False,
) -> int:
    """Write a Llama-3.1-8B-shaped checkpoint; return the bytes of its tensors (5.6 GB at 8 layers).

    With `holes`, the tensors are holes of the files, for the caller to fill.
    """

    def tensors() -> Iterator[Tensor]:
        yield "lm_head.weight", "BF16", (vocab_size, 4096)
        yield "model.embed_tokens.weight", "BF16", (vocab_size, 4096)
        for layer in sorted(range(num_layers), key=str):
            for name, shape in _LAYER.items():
                yield f"model.layers.{layer}.{name}.weight", "BF16", shape
        yield "model.norm.weight", "BF16", (4096,)

    pool = b"" if holes else np.random.default_rng(0).bytes(POOL_NBYTES)
    config = _CONFIG | {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    return write_checkpoint(folder, tensors(), config, shard_nbytes, pool)


def write_checkpoint(
    folder: Path, tensors: Iterable[Tensor], config: Mapping[str, object], shard_nbytes: int, pool: bytes = b""
) -> int:
    """Write a checkpoint with one or more shards; return the bytes of its tensors.

    Args:
        pool: bytes that are repeated to fill the tensors. Empty: the tensors are holes.
    """
    folder.mkdir(parents=True)
    shards: list[list[TensorEntry]] = [[]]
    offset = position = total = 0
    for name, dtype, shape in tensors:
        nbytes = num_bytes(dtype, shape)
        assert nbytes is not None
        if shards[-1] and offset + nbytes > shard_nbytes:
            shards.append([])
            offset = 0
        shards[-1].append(TensorEntry(name, dtype, shape, offset, nbytes))
        offset += nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor.name: file for tensor in shard}
        left = sum(tensor.nbytes for tensor in shard)
        total += left
        with (folder / file).open("wb") as stream:
            stream.write(build_header(shard, {"format": "pt"}, 8))
            stream.truncate(stream.tell() + left)
            while pool and left:
                left -= (count := stream.write(pool[position % len(pool) :][:left]))
                position += count
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return total


def _find_folders(path: str | os.PathLike[str], tp: int | None, against: str | os.PathLike[str] | None) -> Folders:
    beside = folder_text(against, "against")
    store, folder, other = find_store(path), Path(path), None if beside is None else Path(beside)
    if store.path("") is None:
        raise PlanError("not on a local file system, whose page cache can be dropped", path=path, code="option")
    check_exists(store)
    if is_converted(store):
        folders = Folders(other or _find_source(folder), folder, tp or 0)
    else:
        folders = Folders(folder, other or _find_converted(folder, tp), tp or 0)
    manifest = folders.manifest
    if manifest is None and tp is None:
        what = f"there is no converted folder next to it: set --tp N (relayout convert {folder} --tp N makes one)"
        raise PlanError(what, path=path, code="option")
    if manifest is None:
        return folders
    if folders.source is not None:
        nbytes = read_source(find_store(folders.source)).nbytes
        if manifest.source_nbytes != nbytes:  # If the sizes are equal, the loads will compare all bytes.
            what = f"was converted from {manifest.source_nbytes} bytes of tensors, {folders.source} has {nbytes}"
            raise PlanError(what, path=folders.converted, code="option")
    if folders.converted is not None:
        check_present(find_store(folders.converted), manifest, range(manifest.num_ranks))
    return replace(folders, tp=tp or manifest.num_ranks)


def _find_source(converted: Path) -> Path | None:
    stem, _, degree = converted.resolve().name.rpartition("-tp")
    source = converted.resolve().with_name(stem) if stem and degree.isdecimal() else None
    return source if source is not None and source.is_dir() else None


def _find_converted(source: Path, tp: int | None) -> Path | None:
    """Return the folder that `convert` writes by default. Without a degree: the existing one of the highest degree."""
    degrees = range(_MAX_RANKS, 0, -1) if tp is None else [tp]
    folders = (Path(default_output(source, degree)) for degree in degrees)
    return next((folder for folder in folders if (folder / MANIFEST_NAME).exists()), None)


def expected_digests(converted: str | os.PathLike[str]) -> list[str]:
    """Return the digest of each rank's tensors, from the tables of a converted folder or prefix."""
    store = find_store(converted)
    manifest = read_manifest(store)
    tables = [read_table(store, manifest, rank) for rank in range(manifest.num_ranks)]
    digests = [read_digests(store, manifest, rank) for rank in range(manifest.num_ranks)]
    return [
        digest_of(zip(table.names, table.shapes, of_rank, strict=True))
        for table, of_rank in zip(tables, digests, strict=True)
    ]
