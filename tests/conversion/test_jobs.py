"""relayout.conversion.jobs: units that processes convert apart, twice or in part make the folder that one run makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from support import prestarted, s3_server
from support.bits import flip
from support.loader_fixtures import MIB, mlp_model
from support.patience import PATIENCE, in_time
from support.profile import sample
from support.remote import HEADER
from support.toy_store import shelf

import relayout
from relayout.conversion import jobs
from relayout.conversion.jobs import UnitJob, commit_jobs, run_job, unit_jobs
from relayout.conversion.planning import plan_conversion
from relayout.errors import FormatError, PlanError
from relayout.plans.family import Family, builtin_text
from relayout.storage.stores import find_store

OPTIONS: dict[str, Any] = {"tp": 4, "max_part_nbytes": MIB // 3}
WITHOUT_VLLM = """
import json, sys
# Importing fails.
sys.modules |= dict.fromkeys(("vllm", "relayout.observe.observation", "relayout.conversion.planning"))
from relayout.conversion import jobs
for job in json.load(sys.stdin):
    jobs.run_job(jobs.UnitJob.from_json(job), threads=1)
"""
CONVERT_ONE = """
import json, os, signal, sys
from relayout.conversion import jobs, run
left, put = [int(sys.argv[2])], run.FileSink.put
def dying(self, *args):
    put(self, *args)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
run.FileSink.put = dying
jobs.run_job(jobs.UnitJob.from_json(json.loads(sys.argv[1])), threads=1)
"""


def jobs_of(source: Path | str, output: Path | str, *, force: bool = False, **options: Any) -> list[UnitJob]:
    """A job for each unit of a conversion."""
    return unit_jobs(plan_conversion(source, output, **options), force=force)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlp_model(tmp_path_factory.mktemp("jobs") / "source")


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, bytes]:
    """What one run writes, file by file."""
    relayout.convert(source, source.parent / "expected", **OPTIONS)
    return content(str(source.parent / "expected"))


everywhere = pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
"""For what each kind of store does in its own way. tests/storage kills and doubles writers at each request."""


@pytest.fixture(params=sample(["local", "s3"], ["local"]))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Below which outputs are made."""
    if request.param == "local":
        return str(tmp_path)
    pytest.importorskip("obstore", reason="the client of object stores")
    for variable, value in s3_server.environment(s3_server.shared()).items():
        monkeypatch.setenv(variable, value)
    s3_server.shared().clear(tmp_path.name)
    return f"s3://{tmp_path.name}"


def content(path: str) -> dict[str, bytes]:
    """All files of an output, by name."""
    store = find_store(path)
    return {entry.name: store.read(entry.name, 2**30) for entry in store.walk() if not entry.is_folder}


def beside(place: str) -> list[str]:
    """What an output has left beside it."""
    if place.startswith("s3://"):
        server, name = s3_server.shared(), place.removeprefix("s3://")
        uploads = [upload for upload in server.uploads.values() if upload[0] == name]
        hidden = [key for key in server.names(name) if not key.startswith("out/") or key.startswith("out/.")]
        return hidden + list(map(str, uploads))
    return [entry.name for entry in Path(place).iterdir() if entry.name != "out"]


def assert_published(place: str, expected: dict[str, bytes]) -> None:
    assert content(f"{place}/out") == expected
    assert beside(place) == []


@everywhere
def test_jobs_that_were_sent_as_json_in_any_order_and_twice_make_what_one_run_makes(
    source: Path, expected: dict[str, bytes], place: str
) -> None:
    all_jobs = jobs_of(source, f"{place}/out", **OPTIONS)
    assert len(all_jobs) > 3
    assert [(job.unit, job.num_units) for job in all_jobs] == [(unit, len(all_jobs)) for unit in range(len(all_jobs))]
    sent = [UnitJob.from_json(json.loads(json.dumps(job.as_json()))) for job in all_jobs]
    assert sent == all_jobs
    records = [run_job(job, threads=2) for job in reversed(sent)]
    whole = sum(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())
    assert sum(record.read_nbytes for record in records) == whole
    again = run_job(sent[1])
    assert (again.read_nbytes, again.source_nbytes > 0) == (0, True)
    summary = commit_jobs(sent)
    assert (summary.num_ranks, summary.written_nbytes > 0) == (4, True)
    assert_published(place, expected)
    if ":" not in place:
        assert relayout.verify(f"{place}/out", source=source).ok


def test_a_plan_travels_with_the_jobs_which_plan_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "mine.toml"
    plan.write_text(builtin_text("llama"))
    relayout.convert(source, tmp_path / "expected", plan=plan, **OPTIONS)
    by_file = plan_conversion(source, plan=plan, **OPTIONS).plan
    plan.unlink()
    observed = Mock(return_value=replace(by_file, name="vllm:x", family=Family("x", "vllm")))
    monkeypatch.setattr("relayout.observe.observation.observed_plan", observed)
    all_jobs = jobs_of(source, tmp_path / "out", plan="vllm", **OPTIONS)
    messages = json.dumps([job.as_json() for job in all_jobs])
    subprocess.run([sys.executable, "-c", WITHOUT_VLLM], input=messages, text=True, check=True)
    commit_jobs(all_jobs)
    assert observed.call_count == 1
    files, expected = content(str(tmp_path / "out")), content(str(tmp_path / "expected"))
    weights = [name for name in expected if name.startswith("model-")]
    assert weights
    assert all(files[name] == expected[name] for name in weights)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [started.result(PATIENCE) for started in [threads.submit(call) for call in calls]]


def test_units_of_all_threads_at_once(source: Path, expected: dict[str, bytes], place: str) -> None:
    all_jobs = jobs_of(source, f"{place}/out", **OPTIONS)
    at_once(*(lambda job=job: run_job(job, threads=1) for job in [*all_jobs, *all_jobs[:2]]))  # type: ignore[misc]
    commit_jobs(all_jobs)
    assert_published(place, expected)


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_what_a_killed_process_leaves_is_never_taken_for_done(
    source: Path, expected: dict[str, bytes], tmp_path: Path, writes: int
) -> None:
    all_jobs = jobs_of(source, tmp_path / "out", **OPTIONS)
    killed = prestarted.run(json.dumps(all_jobs[1].as_json()), writes, script=CONVERT_ONE)
    assert killed.returncode == -signal.SIGKILL
    assert beside(str(tmp_path)) == [".out.relayout-partial"]
    with pytest.raises(PlanError, match="no unit of this conversion is done"):
        commit_jobs(all_jobs)
    for job in all_jobs:
        if job.unit != 1:
            run_job(job)
    with pytest.raises(PlanError, match=f"1 of {len(all_jobs)} units are not done: 1"):
        commit_jobs(all_jobs)
    assert run_job(all_jobs[1]).read_nbytes > 0
    commit_jobs(all_jobs)
    assert_published(str(tmp_path), expected)


@everywhere
def test_a_late_double_changes_nothing(
    source: Path, expected: dict[str, bytes], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began before the output was published, and ends after."""
    all_jobs = jobs_of(source, f"{place}/out", **OPTIONS)
    is_late, may_end, finish = threading.Event(), threading.Event(), jobs.HeaderWriter.write

    def write(self: Any, unit: int, *others: Any) -> None:
        if threading.current_thread().name == "late":
            is_late.set()
            may_end.wait(60)
        finish(self, unit, *others)

    monkeypatch.setattr(jobs.HeaderWriter, "write", write)
    errors: list[BaseException] = []

    def late() -> None:
        try:
            run_job(all_jobs[0])
        except (PlanError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=late, name="late")
    thread.start()
    in_time(is_late.wait)
    for job in all_jobs:
        run_job(job)
    commit_jobs(all_jobs)
    may_end.set()
    in_time(thread.join)
    assert_published(place, expected)
    [error] = errors
    # An object store may say, too, that the upload is gone.
    assert "://" in place or str(error).endswith("is complete already; --force replaces it")


def test_once_published_units_are_refused(source: Path, expected: dict[str, bytes], place: str) -> None:
    all_jobs = jobs_of(source, f"{place}/out", **OPTIONS)
    for job in all_jobs:
        run_job(job)
    commit_jobs(all_jobs)
    with pytest.raises(PlanError, match="already holds"):
        run_job(all_jobs[0])
    with pytest.raises(PlanError, match="already holds"):
        commit_jobs(all_jobs)
    assert_published(place, expected)
    forced = jobs_of(source, f"{place}/out", force=True, **OPTIONS)
    for job in forced:
        assert run_job(job).read_nbytes
    commit_jobs(forced)
    assert_published(place, expected)


@everywhere
def test_other_options_do_not_mix(source: Path, expected: dict[str, bytes], place: str) -> None:
    all_jobs = jobs_of(source, f"{place}/out", **OPTIONS)
    others = jobs_of(source, f"{place}/out", **{**OPTIONS, "align": 8192})
    if place.startswith("s3://"):
        for job in all_jobs[:-1]:
            run_job(job)
        with pytest.raises(PlanError, match="out: is claimed by a conversion of"):
            run_job(others[0])
    else:
        for job in others[:-1] + all_jobs[:-1]:
            run_job(job)
    with pytest.raises(PlanError, match=f"1 of {len(all_jobs)} units are not done: {len(all_jobs) - 1}"):
        commit_jobs(all_jobs)
    run_job(all_jobs[-1])
    commit_jobs(all_jobs)
    assert_published(place, expected)


def test_a_source_that_changes_is_refused(source: Path, tmp_path: Path) -> None:
    mine = mlp_model(tmp_path / "source")
    all_jobs = jobs_of(mine, tmp_path / "out", **OPTIONS)
    for job in all_jobs:
        run_job(job)
    shard = mine / "model.safetensors"
    os.utime(shard, (1, 1))
    run_job(all_jobs[0])  # Copies on other machines have other times.
    flip(shard, -1)
    os.utime(shard, (1, 1))
    with pytest.raises(FormatError, match="has changed since the job was made"):
        run_job(all_jobs[0])
    with pytest.raises(FormatError, match="has changed since the job was made"):
        commit_jobs(all_jobs)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_what_its_record_says_is_made_again(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    all_jobs = jobs_of(source, tmp_path / "out", **OPTIONS)
    for job in all_jobs:
        run_job(job)
    [file] = (tmp_path / ".out.relayout-partial").glob("work-*/output/model-rank-2-part-1.safetensors")
    blob = bytearray(file.read_bytes())
    blob[200] ^= 1
    file.write_bytes(blob)
    with pytest.raises(PlanError, match=f"1 of {len(all_jobs)} units are not done: 1"):
        commit_jobs(all_jobs)
    file.write_bytes(blob[:-1])
    with pytest.raises(PlanError, match=f"1 of {len(all_jobs)} units are not done: 1"):
        commit_jobs(all_jobs)
    assert not (tmp_path / "out").exists()
    assert [run_job(job).read_nbytes > 0 for job in all_jobs] == [job.unit == 1 for job in all_jobs]
    commit_jobs(all_jobs)
    assert_published(str(tmp_path), expected)


def test_a_commit_that_was_interrupted_is_done_again(
    source: Path, expected: dict[str, bytes], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_jobs = jobs_of(source, f"{place}/out", **OPTIONS)
    for job in all_jobs:
        run_job(job)
    with monkeypatch.context() as patch:
        patch.setattr("relayout.conversion.sidecar.dump_manifest", lambda manifest: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            commit_jobs(all_jobs)
    commit_jobs(all_jobs)
    assert_published(place, expected)


def test_each_source_byte_is_read_once(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """From an object store to an object store, beside the headers, which each job reads."""
    there = shelf(tmp_path.name)
    there.clear()
    for file in source.iterdir():
        there.write(f"source/{file.name}", file.read_bytes())
    where = there.root
    all_jobs = jobs_of(f"{where}/source", f"{where}/out", **OPTIONS)
    before = there.read_nbytes
    jobs_of(f"{where}/source", f"{where}/other", **OPTIONS)
    to_plan = there.read_nbytes - before
    before = there.read_nbytes
    for job in all_jobs:
        run_job(job)
    weights = sum(record.source_nbytes for record in map(run_job, all_jobs))
    read = there.read_nbytes - before - 2 * len(all_jobs) * to_plan
    assert weights <= read <= 1.05 * weights + HEADER * len(all_jobs) * len(list(source.glob("*.safetensors")))
    commit_jobs(all_jobs)
    found = content(f"{where}/out")
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} <= {"relayout.source.json.zst", "relayout.json"}


def test_a_unit_that_is_not_there_is_refused(source: Path, tmp_path: Path) -> None:
    all_jobs = jobs_of(source, tmp_path / "out", **OPTIONS)
    with pytest.raises(PlanError, match="unit 99, expected 0 to"):
        jobs.convert_unit(all_jobs[0].planned(), 99)


def test_a_source_that_changes_while_a_unit_is_read_leaves_no_record(tmp_path: Path) -> None:
    """Or it would be believed as soon as the source has its old time again."""
    source = mlp_model(tmp_path / "source")
    path = source / "model.safetensors"
    status = path.stat()
    [job, *_] = jobs_of(source, tmp_path / "out", **OPTIONS)

    def change(done: int, total: int) -> None:
        if done == total:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))

    with pytest.raises(FormatError, match="has changed while it was read"):
        run_job(job, progress=change)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run_job(job).read_nbytes > 0


def test_a_job_that_is_planned_otherwise_now_is_refused(source: Path, tmp_path: Path) -> None:
    [job, *_] = jobs_of(source, tmp_path / "out", **OPTIONS)
    changed = job.as_json()
    changed["options"]["alignment"] = 512
    with pytest.raises(PlanError, match="unit 0: this version of relayout would convert differently"):
        run_job(UnitJob.from_json(changed))
    assert not (tmp_path / "out").exists()


def test_one_process_takes_over_the_units_of_others(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    all_jobs = jobs_of(source, tmp_path / "out", **OPTIONS)
    for job in all_jobs[1:3]:
        run_job(job)
    with pytest.raises(PlanError, match="holds an interrupted attempt, with other options or of another source"):
        relayout.convert(source, tmp_path / "out", **{**OPTIONS, "align": 8192})
    done = relayout.convert(source, tmp_path / "out", **OPTIONS)
    assert done.resumed_nbytes == sum(job.source_nbytes for job in all_jobs[1:3])
    assert_published(str(tmp_path), expected)
