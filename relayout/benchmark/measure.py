"""`bench`: plans the measurements of a checkpoint, carries them out, and sums them up."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import util
from itertools import cycle
from pathlib import Path

from relayout.benchmark.loaders import LOADERS, Loader, LoadJob, shards_of
from relayout.benchmark.machine import Machine, describe, direct_gb_per_s, num_cpus, prepare, total_nbytes
from relayout.benchmark.made import EMBEDDING_NBYTES, LAYER_NBYTES, layers_of, write_llama
from relayout.benchmark.run import Died, Measured, digest_of, load_together
from relayout.benchmark.verdict import RankLoads, Timing, verdict, warnings_of
from relayout.checkpoint.converted import check_present, is_converted, read_manifest, read_table
from relayout.checkpoint.source import read_source
from relayout.commands.convert import convert
from relayout.core.arguments import at_least_one, integer, size
from relayout.errors import PlanError, how_to_install
from relayout.format.index import MANIFEST_NAME, Manifest
from relayout.planning import default_output
from relayout.plans.planner import plan_for
from relayout.results import Result
from relayout.storage.stores import check_exists, find_store
from relayout.storage.system import available_nbytes

_PROCESS_NBYTES = 400 * 10**6
"""Memory of a process without tensors: Python and torch."""
_MADE_TP = 4
_MAX_RANKS = 64
"""The highest degree of a converted folder that is looked for beside the plain one."""
_LOAD_SECONDS, _GB_PER_S = 4.0, 1.0
"""What the estimate assumes that a process takes beside its load, and about how fast bytes come."""

_BUDGET_SECONDS = 120.0
"""What is measured if no number of runs is asked for ends after about this time."""
_RUNS, _LEAST_RUNS = 3, 2
"""Runs of each loader, if none are asked for: as many as time allows, but one shows no spread."""

Tell = Callable[[str], None]


class Counted:
    """Counts loads, tells of each with the time that is left, and says when the time is over."""

    def __init__(self, total: int, budget: float | None, tell: Tell) -> None:
        self.total, self.done = total, 0
        self._budget, self._tell, self._started = budget, tell, time.monotonic()

    def __call__(self, line: str) -> None:
        self.done += 1
        elapsed = time.monotonic() - self._started
        left = elapsed / self.done * (self.total - self.done)
        if self._budget is not None:
            left = min(left, max(0.0, self._budget - elapsed))
        self._tell(f"{self.done}/{self.total} {line}; about {_duration(left)} left")

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the time has passed."""
        return self._budget is not None and time.monotonic() - self._started > share * self._budget


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True, slots=True)
class Folders:
    """The checkpoint to be measured, plain and converted. At least one of the two exists."""

    source: Path | None
    converted: Path | None
    tp: int

    @property
    def source_files(self) -> list[Path]:
        """Weight files of the plain folder."""
        return [] if self.source is None else list(map(Path, shards_of(str(self.source))))

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the converted folder."""
        return None if self.converted is None else read_manifest(find_store(self.converted))

    def rank_files(self, ranks: Sequence[int]) -> list[Path]:
        """Files of these ranks in the converted folder; all files if it has another degree."""
        manifest = self.manifest
        if self.converted is None or manifest is None:
            return []
        holders = ranks if manifest.num_ranks == self.tp else manifest.holders
        indices = dict.fromkeys(index for holder in holders for index in manifest.holders[holder].files)
        return [self.converted / manifest.files[index].name for index in indices]

    @property
    def every_file(self) -> list[Path]:
        """All weight files."""
        return [*self.source_files, *self.rank_files(range(self.tp))]


@dataclass(frozen=True, slots=True, repr=False)
class Bench(Result):
    """What `bench` measured."""

    source: str | None
    converted: str | None
    tp: int
    runs: int
    machine: Machine
    drive_gb_per_s: float | None
    """GB/s (10^9 bytes) of direct reads, the median; None if the file system refuses them."""
    loads: tuple[RankLoads, ...]
    """One rank and all ranks at once, cold and warm, where that was possible."""
    left_out: tuple[str, ...]
    """What was not measured, and why."""
    warnings: tuple[str, ...]
    """Why the figures should not be trusted."""
    wrong: tuple[str, ...]
    """Loaders whose bytes differ from the others', and where."""
    verdict: str


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A planned benchmark."""

    folders: Folders
    runs: int
    budget: float | None
    """Seconds after which nothing more is begun that could be left out; None: everything is measured."""
    loaders: dict[str, Loader]
    left_out: tuple[str, ...]

    @property
    def droppable_nbytes(self) -> int:
        """Bytes of the files that `run(drop_caches=True)` drops from the page cache before each cold load."""
        return total_nbytes(self.folders.every_file)

    def run(
        self,
        *,
        drop_caches: bool,
        tell: Tell = lambda line: None,
        partly: Callable[[Bench], None] = lambda result: None,
    ) -> Bench:
        """Measure. Reads only.

        Args:
            drop_caches: drop these files, and no others, from the page cache before each cold load. Other processes
                that use them will wait for the drive. False: cold loads are not measured.
            tell: called with a line of text after each load.
            partly: called with what was measured by then, if an exception, such as that of a signal, ends it.

        Raises:
            FormatError, PlanError, OSError: the checkpoint cannot be read.
        """
        about = describe(self.folders.every_file[0].parent)
        states = ("cold", "warm") if drop_caches else ("warm",)
        idle = "memory that the host of a virtual machine has taken back: before each load, memory is touched and freed"
        found = Found([*self.left_out, idle], [], [])
        if not drop_caches:
            found.left_out.append(
                "cold loads: dropping the files from the page cache was not allowed (--yes allows it)"
            )
        groups = self._groups(states)
        counted = Counted(sum(len(group.names) for group in groups) * self.runs, self.budget, tell)
        tell(self._estimate(counted.total, len(states)))
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
        """What is loaded, in order: one rank and all at once, in each state of the page cache."""
        folders, tp = self.folders, self.folders.tp
        manifest = folders.manifest
        is_of_degree = manifest is not None and manifest.num_ranks == tp
        expected = expected_digests(folders.converted) if folders.converted and is_of_degree else None
        together = [[0], list(range(tp))][: 2 if tp > 1 else 1]
        return [RankGroup(folders, self.loaders, ranks, state, expected) for state in states for ranks in together]

    def _measure(self, group: RankGroup, found: Found, counted: Counted, share: float) -> None:
        """Measure a group, or say why not; it may take until this share of the time has passed."""
        why = group.too_large()
        if why is None and counted.is_over() and found.loads:
            why = f"{group.title}, {group.state}: the time is over (--runs {self.runs} measures everything)"
        if why is not None:
            found.left_out.append(why)
            counted.total -= len(group.names) * self.runs
            return
        if group.state == "cold":
            files = self.folders.rank_files(group.ranks) or self.folders.source_files
            found.limits.extend(filter(None, (direct_gb_per_s(files) for _ in range(self.runs))))
        group.measure(self.runs, counted, found.loads.append, is_over=lambda: counted.is_over(share))

    def _result(self, about: Machine, found: Found) -> Bench:
        folders, loads = self.folders, found.loads
        drive = statistics.median(found.limits) if found.limits else None
        return Bench(
            source=None if folders.source is None else str(folders.source),
            converted=None if folders.converted is None else str(folders.converted),
            tp=folders.tp,
            runs=self.runs,
            machine=about,
            drive_gb_per_s=drive,
            loads=tuple(loads),
            left_out=tuple(found.left_out),
            warnings=warnings_of(about, loads),
            wrong=tuple(line for group in loads for line in group.wrong()),
            verdict=verdict(about, loads, folders.tp, drive, is_converted=folders.converted is not None),
        )

    def _estimate(self, loads: int, num_states: int) -> str:
        """How many loads there will be, and roughly how long they take on an idle machine."""
        nbytes = len(self.loaders) * self.runs * num_states * 2 * self.droppable_nbytes
        seconds = loads * _LOAD_SECONDS * (1 + self.folders.tp / num_cpus() / 2) + nbytes / _GB_PER_S / 1e9
        if self.budget is not None and seconds > self.budget:
            what = f"up to {loads} loads, each in fresh processes: as many as fit into about {_duration(self.budget)}"
            return f"{what}; --runs {self.runs} makes all, about {_duration(seconds)} on an idle machine"
        return f"{loads} loads, each in fresh processes: about {_duration(seconds)} on an idle machine"


@dataclass(frozen=True, slots=True)
class Found:
    """What is known while a benchmark runs."""

    left_out: list[str]
    limits: list[float]
    """GB/s of direct reads."""
    loads: list[RankLoads]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that several loaders load from one state of the page cache."""

    folders: Folders
    loaders: dict[str, Loader]
    ranks: Sequence[int]
    state: str
    expected: Sequence[str] | None
    """Digest of each rank's tensors, by the converted folder's tables; None without such a folder."""
    registry: str = "relayout.benchmark.loaders"
    """The module whose `LOADERS` has the loaders."""
    devices: Sequence[str] = ("cpu",)
    """The ranks are loaded to these in turn."""
    limit: float = 900.0
    """Seconds that one load may take."""
    touched_nbytes: int = 0
    """Memory to touch before each load, if that is more than twice the tensors."""
    idle_seconds: float = 0.0
    """Seconds in which nothing is done before each load: the host of a virtual machine may take free memory back."""

    @property
    def title(self) -> str:
        tp = self.folders.tp
        return "whole model" if tp == 1 else f"all {tp} ranks at once" if len(self.ranks) > 1 else f"one rank of {tp}"

    def _files(self, loader: Loader) -> list[Path]:
        return self.folders.rank_files(self.ranks) if loader.reads_converted else self.folders.source_files

    def too_large(self) -> str | None:
        """The reason to skip this, too little memory; or None."""
        available, needed = available_nbytes(), self._tensors_nbytes * 11 // 10 + _PROCESS_NBYTES * len(self.ranks)
        if self.state == "warm":
            needed += max(total_nbytes(self._files(loader)) for loader in self.loaders.values())
        if needed <= available:
            return None
        cached = " with the files in the page cache" if self.state == "warm" else ""
        return (
            f"{self.title}, {self.state}: needs {needed / 1e9:.1f} GB of memory{cached},"
            f" {available / 1e9:.1f} GB are available"
        )

    @property
    def _tensors_nbytes(self) -> int:
        """How many bytes the tensors of all these ranks have, about."""
        folders = self.folders
        if folders.source is None:
            return total_nbytes(folders.rank_files(self.ranks))
        return -(-total_nbytes(folders.source_files) * len(self.ranks) // folders.tp)

    @property
    def names(self) -> list[str]:
        """Names of the loaders that can load these ranks."""
        return [name for name, loader in self.loaders.items() if len(self.ranks) > 1 or not loader.group]

    def measure(
        self,
        runs: int,
        tell: Tell,
        found: Callable[[RankLoads], None],
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run each loader `runs` times, in turns; each turn begins with another loader.

        Args:
            tell: called after each load.
            found: called with what was measured, also if an exception ends it.
            is_over: whether turns that are not needed are left out from now on.
        """
        names = self.names
        measured: dict[str, list[Measured]] = {name: [] for name in names}
        failures: dict[str, str] = {}
        try:
            for run in range(runs):
                if run >= _LEAST_RUNS and is_over():
                    break
                turn = run % len(names)
                for name in names[turn:] + names[:turn]:
                    if name not in failures:
                        tell(self._tried(name, measured, failures))
        finally:
            found(self._loads(measured, failures))

    def _tried(self, name: str, measured: dict[str, list[Measured]], failures: dict[str, str]) -> str:
        """Load once, and say how it went."""
        try:
            measured[name].append(self._load(name))
        except Died as died:
            failures[name] = str(died)
        said = failures.get(name) or f"{measured[name][-1].seconds:.2f} s"
        return f"{self.title}, {self.state}: {self.loaders[name].title}: {said}"

    def _loads(self, measured: Mapping[str, list[Measured]], failures: Mapping[str, str]) -> RankLoads:
        return RankLoads(
            title=self.title,
            num_ranks=len(self.ranks),
            state=self.state,
            timings=tuple(
                Timing(name, self.loaders[name].title, self.loaders[name].family, tuple(runs), failures.get(name))
                for name, runs in measured.items()
            ),
            expected=None if self.expected is None else tuple(self.expected[rank] for rank in self.ranks),
        )

    def _load(self, name: str) -> Measured:
        loader, folders, count = self.loaders[name], self.folders, len(self.ranks)
        memory = available_nbytes() // 2 // count
        source, converted = (str(folder or "") for folder in (folders.source, folders.converted))
        jobs = [
            LoadJob(self.registry, name, source, converted, folders.tp, rank, count, memory, device)
            for rank, device in zip(self.ranks, cycle(self.devices), strict=False)
        ]

        def ready() -> None:
            needed = 0 if self.idle_seconds else max(self.touched_nbytes, 2 * self._tensors_nbytes)
            prepare(self._files(loader), folders.every_file, cold=self.state == "cold", needed_nbytes=needed)
            time.sleep(self.idle_seconds)

        return load_together(jobs, loader, ready, limit=self.limit)


def plan_bench(
    path: str | os.PathLike[str],
    *,
    tp: int | None = None,
    against: str | os.PathLike[str] | None = None,
    runs: int | None = None,
) -> BenchPlan:
    """Plan a benchmark of a checkpoint. Reads headers only.

    Args:
        path: a converted folder, or a plain checkpoint, on a local file system.
        tp: the tensor-parallel degree. Default: that of the converted folder.
        against: the same checkpoint, plain if `path` is converted, else converted. Default: the folder beside it that
            `convert` would write, or would have read.
        runs: loads by each loader; medians count. Default: 3, or fewer as far as they would take over 2 minutes, and
            then what comes last is left out.

    Raises:
        FormatError: a file is damaged.
        PlanError: the folders are of different checkpoints, or not local; there is no plan for the checkpoint; or torch
            is not installed.
    """
    budget, runs = (_BUDGET_SECONDS, _RUNS) if runs is None else (None, at_least_one(runs, "runs"))
    tp = None if tp is None else at_least_one(tp, "tp")
    if util.find_spec("torch") is None:
        raise PlanError(f"loads need torch, which is not installed: {how_to_install('torch')}", code="unsupported")
    folders = _find_folders(path, tp, against)
    if folders.tp > 1 and folders.source is not None:
        plan_for(read_source(find_store(folders.source)), folders.tp)
    loaders, left_out = {}, []
    for name, loader in LOADERS.items():
        # A part is taken by get_slice, a whole model by load_file.
        if name == ("get_slice" if folders.tp == 1 else "load_file"):
            continue
        if loader.reads_converted:
            why = None if folders.converted is not None else "there is no converted folder"
        else:
            why = loader.absence() if folders.source is not None else "there is no plain folder"
        if why is None:
            loaders[name] = loader
        else:
            left_out.append(f"{loader.title}: {why}")
    return BenchPlan(folders, runs, budget, loaders, tuple(left_out))


@contextmanager
def made_checkpoint(
    folder: str | os.PathLike[str], nbytes: int | str, tp: int | None = None, tell: Tell = lambda line: None
) -> Iterator[Path]:
    """A checkpoint of Llama-3.1-8B shapes of about `nbytes`, and its conversion, in a temporary folder below `folder`.

    Yields:
        The plain folder, with the converted one beside it. Both are deleted when the block ends.

    Raises:
        PlanError: `folder` is not a folder, has a checkpoint, or has too little space.
        OSError: writing failed.
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
        tell(f"making a checkpoint of {total / 1e9:.1f} GB and converting it to {tp} ranks, below {parent}")
        write_llama(source, layers, shard_nbytes=10**9)
        convert(source, tp=tp)
        yield source


def _find_folders(path: str | os.PathLike[str], tp: int | None, against: str | os.PathLike[str] | None) -> Folders:
    store, folder, other = find_store(path), Path(path), None if against is None else Path(against)
    if store.path("") is None:
        raise PlanError("not on a local file system, whose page cache can be dropped", path=path, code="option")
    check_exists(store)
    if is_converted(store):
        folders = Folders(other or _source_beside(folder), folder, tp or 0)
    else:
        folders = Folders(folder, other or _converted_beside(folder, tp), tp or 0)
    manifest = folders.manifest
    if manifest is None and tp is None:
        what = f"no converted folder is beside it: set --tp N (relayout convert {folder} --tp N makes one)"
        raise PlanError(what, path=path, code="option")
    if manifest is None:
        return folders
    if folders.source is not None:
        nbytes = read_source(find_store(folders.source)).nbytes
        if manifest.source_nbytes != nbytes:  # The loads then compare all bytes.
            what = f"was converted from {manifest.source_nbytes} bytes of tensors, {folders.source} has {nbytes}"
            raise PlanError(what, path=folders.converted, code="option")
    if folders.converted is not None:
        check_present(find_store(folders.converted), manifest, range(manifest.num_ranks))
    return replace(folders, tp=tp or manifest.num_ranks)


def _source_beside(converted: Path) -> Path | None:
    stem, _, degree = converted.resolve().name.rpartition("-tp")
    source = converted.resolve().with_name(stem) if stem and degree.isdecimal() else None
    return source if source is not None and source.is_dir() else None


def _converted_beside(source: Path, tp: int | None) -> Path | None:
    """The folder that `convert` writes by default; with no degree, the one of the highest degree."""
    degrees = range(_MAX_RANKS, 0, -1) if tp is None else [tp]
    folders = (Path(default_output(source, degree)) for degree in degrees)
    return next((folder for folder in folders if (folder / MANIFEST_NAME).exists()), None)


def expected_digests(converted: str | os.PathLike[str]) -> list[str]:
    """Digest of each rank's tensors, by the tables of a converted folder or prefix."""
    store = find_store(converted)
    manifest = read_manifest(store)
    tables = [read_table(store, manifest, rank) for rank in range(manifest.num_ranks)]
    return [digest_of(zip(table.names, table.shapes, table.digests, strict=True)) for table in tables]
