"""Conversions of only some ranks: the same files as of a conversion of all, from only the bytes that these need."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.conversions import Conversions, grouped
from support.local_stores import read_source
from support.models import expected_slice, read_tensors
from support.planning import conversion_of, plan_of
from support.profile import sample

import relayout
from relayout.conversion.copy_plan import CopyPlan, Target, run_copy_steps
from relayout.conversion.jobs import UnitJob, commit_jobs, run_job, unit_jobs
from relayout.conversion.layout import Conversion
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.storage.local.store import InputFile

TP = 4
NAMES = sample(
    ["llama", "phi3", "gpt2", "falcon_40b", "deepseek_v3", "gpt_oss_mxfp4", "llama4", "awq_moe"],
    ["llama", "phi3", "gpt2", "gpt_oss_mxfp4"],
)


def files_of(folder: Path, *patterns: str) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for pattern in patterns for path in folder.glob(pattern)}
    assert found
    return found


@pytest.mark.parametrize("name", grouped(NAMES))
def test_the_files_are_those_of_a_conversion_of_all_ranks(conversions: Conversions, tmp_path: Path, name: str) -> None:
    layout = ("whole", "ranks")[NAMES.index(name) % 2]
    tp, source = conversions.largest(name), conversions.source(name)
    all_ranks, out = tmp_path / "all", tmp_path / "some"
    relayout.convert(source, all_ranks, tp=tp, layout=layout, max_part_nbytes=20_000, threads=1)
    ranks = range(tp // 2, tp)
    done = relayout.convert(source, out, tp=tp, layout=layout, max_part_nbytes=20_000, threads=1, ranks=ranks)
    assert done.ranks == tuple(ranks)
    own = [f"*-rank-{rank}-*" for rank in ranks] + [f"relayout.rank-{rank}.json.zst" for rank in ranks]
    shared = ["model-0*", "relayout.whole*", "model.safetensors.index.json"] if layout == "whole" else []
    assert files_of(out, "*-rank-*", "relayout.rank-*", *shared) == files_of(all_ranks, *own, *shared)
    report = relayout.verify(out, source=source)
    assert not report.differences
    assert report.compared_with_source
    assert report.ranks == tuple(ranks)
    for rank in ranks:
        mine, other = relayout.load(out, rank, verify=True), relayout.load(all_ranks, rank)
        assert mine.keys() == other.keys()
        assert all(mine[key].equal(other[key]) or mine[key].isnan().any() for key in mine)


def test_each_rank_loads_its_slices_and_others_are_missing(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.convert(llama, out, tp=TP, ranks="1,3")
    whole = read_tensors(llama)
    for rank in (1, 3):
        found = read_tensors(out, f"model-rank-{rank}-*")
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert np.array_equal(found[name], expected_slice(name, tensor, rank, TP)), (rank, name)
    lacks = "of 4 ranks it has only 1,3, and lacks"
    for rank, wanted in ((0, "0-1,3"), (2, "1-3")):
        with pytest.raises(PlanError, match=f"{lacks} {rank}: `relayout copy FROM TO --ranks {wanted}`") as raised:
            relayout.load(out, rank)
        assert raised.value.code == "missing"
    relayout.convert(llama, tmp_path / "all", tp=TP)
    relayout.copy(tmp_path / "all", out, ranks=wanted, force=True)  # As the last message says.
    for rank in (1, 2, 3):
        assert relayout.load(out, rank).keys() == whole.keys()
    relayout.convert(llama, out, tp=TP, ranks="1,3", force=True)
    with pytest.raises(PlanError, match=f"{lacks} 0,2"):
        relayout.restore(out, tmp_path / "restored")
    with pytest.raises(PlanError, match=f"{lacks} 0,2"):
        relayout.safe_open(out)
    with pytest.raises(PlanError, match=r"of 4 ranks the folder has only 1,3"):
        relayout.load(out, 0, tp=2)
    assert not (tmp_path / "restored").exists()


def test_another_degree_is_loaded_where_its_ranks_are_there(llama: Path, tmp_path: Path) -> None:
    """Rank 1 of 2 has what the ranks 2 and 3 of 4 have."""
    out = tmp_path / "out"
    relayout.convert(llama, out, tp=TP, ranks=[2, 3])
    found = relayout.load(out, 1, tp=2)
    relayout.convert(llama, tmp_path / "two", tp=2)
    expected = relayout.load(tmp_path / "two", 1)
    names = [name for name in expected if "embed_tokens" not in name and "lm_head" not in name]
    assert len(names) > 20
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in names)


def test_only_what_the_ranks_need_is_read(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of column-parallel tensors, rounded out to blocks: from a source of which the rest is another."""
    read: list[tuple[str, int, int]] = []
    true_read = InputFile.read

    def noting(self: InputFile, offset: int, view: memoryview) -> None:
        true_read(self, offset, view)
        read.append((self.path.name, offset, view.nbytes))

    monkeypatch.setattr("relayout.checkpoint.source.samples_of", lambda *_: {})
    monkeypatch.setattr(InputFile, "read", noting)
    source = read_source(llama)
    relayout.convert(llama, tmp_path / "out", tp=TP, ranks=[1], threads=1, memory="4MiB")
    shards = {file.name for file in source.files}
    covered = {name: np.zeros(2**24, bool) for name in shards}
    for name, offset, nbytes in read:
        if name in shards:
            covered[name][offset : offset + nbytes] = True
    some = 0
    for tensor in source.tensors:
        if not tensor.name.endswith(("up_proj.weight", "gate_proj.weight", "q_proj.weight")):
            continue
        file, quarter = source.files[tensor.file].name, tensor.extent.nbytes // TP
        mine = covered[file][tensor.extent.offset + quarter : tensor.extent.offset + 2 * quarter]
        assert mine.all()
        rest = covered[file][tensor.extent.offset + 2 * quarter + 4096 : tensor.extent.end - 4096]
        some += not rest.any()
    assert some >= 3


def test_an_interrupted_conversion_of_some_ranks_resumes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the digests of tensors of which not all was read, which stay unknown."""
    out, last = tmp_path / "out", sorted(llama.glob("*.safetensors"))[-2]
    true_read = InputFile.read

    def failing(self: InputFile, offset: int, view: memoryview) -> None:
        if self.path == last and offset >= 4096:  # Behind its header.
            raise OSError(errno.EIO, "no longer", str(self.path))
        true_read(self, offset, view)

    monkeypatch.setattr("relayout.checkpoint.source.samples_of", lambda *_: {})
    with monkeypatch.context() as patch:
        patch.setattr(InputFile, "read", failing)
        with pytest.raises(OSError, match="no longer"):
            relayout.convert(llama, out, tp=TP, ranks=[2], threads=1, max_part_nbytes=20_000)
    with pytest.raises(PlanError, match="holds an interrupted attempt, with other options"):
        relayout.convert(llama, out, tp=TP, ranks=[1], max_part_nbytes=20_000)
    done = relayout.convert(llama, out, tp=TP, ranks=[2], max_part_nbytes=20_000)
    assert 0 < done.resumed_nbytes < done.source_nbytes
    relayout.convert(llama, tmp_path / "all", tp=TP, max_part_nbytes=20_000)
    assert files_of(out, "*.safetensors") == files_of(tmp_path / "all", "*-rank-2-*")
    assert not relayout.verify(out, source=llama).differences


def test_jobs_convert_some_ranks(llama: Path, tmp_path: Path) -> None:
    options = {"tp": TP, "ranks": [1, 2], "max_part_nbytes": 20_000}
    jobs = unit_jobs(relayout.plan_conversion(llama, tmp_path / "jobs", **options))
    assert len(jobs) > 2
    jobs = [UnitJob.from_json(json.loads(json.dumps(job.as_json()))) for job in jobs]
    for job in reversed(jobs):
        run_job(job)
    commit_jobs(jobs)
    relayout.convert(llama, tmp_path / "one", **options)
    assert files_of(tmp_path / "jobs", "*") == files_of(tmp_path / "one", "*")


ROWS = 16
KINDS: dict[str, Callable[[int, int], Slice]] = {
    "rows": lambda rank, width: Slice.along(0, [(4 * rank, 4)]),
    "columns": lambda rank, width: Slice.along(1, [(width // TP * rank, width // TP)]),
    "shared": lambda rank, width: Slice.along(0, [(rank // 2 * 8, 8)]),
    # Held part by part, stored group by group.
    "interleaved": lambda rank, width: Slice.along(0, [(4 * rank + at, 1) for at in (0, 2, 1, 3)]),
    "owned": lambda rank, width: WHOLE if rank == 1 else NOT_HELD,
    "whole": lambda rank, width: WHOLE,
}
"""What a rank of four holds of a tensor of 16 rows."""


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Kind and width of each tensor."""
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=10))
    return [(kind, TP * draw(st.sampled_from([1, 2, 4, 7, 16]))) for kind in kinds]


@settings(max_examples=25)
@given(
    model=models(),
    ranks=st.sets(st.integers(0, TP - 1), min_size=1),
    max_part_nbytes=st.sampled_from([300, 2000, 10**6]),
)
def test_some_ranks_get_what_they_get_of_all_and_only_the_rows_that_they_need_are_read(
    tmp_path_factory: pytest.TempPathFactory, model: list[tuple[str, int]], ranks: set[int], max_part_nbytes: int
) -> None:
    folder = tmp_path_factory.mktemp("some")
    arrays = {
        f"{t:02}": ((np.arange(ROWS * width) + 1) * (2654435761 + t) >> 7).astype(np.uint16).reshape(ROWS, width)
        for t, (_, width) in enumerate(model)
    }
    save_file(arrays, folder / "model.safetensors")
    slices = [tuple(KINDS[kind](rank, width) for rank in range(TP)) for kind, width in model]
    conversion = conversion_of(read_source(folder), plan_of("x", TP, slices), 512, max_part_nbytes=max_part_nbytes)
    written: list[dict[str, bytearray]] = []
    for one in (conversion, conversion.only(ranks)):
        files = {file.name: bytearray(file.nbytes) for file in one.layout.files}
        written.append(files)

        def put(target: Target, view: memoryview, address: int, one: Conversion = one, files: Any = files) -> None:
            files[one.layout.files[target.file].name][target.offset : target.offset + view.nbytes] = view

        plan = CopyPlan(one, chunk_nbytes=4096, small_nbytes=600)
        steps = [step for unit in range(len(one.layout.units)) for step in plan.steps(unit)]
        digests = run_copy_steps(one, steps, put, threads=1)
    own = {name for name in written[0] if any(f"-rank-{rank}-" in name for rank in ranks)}
    assert written[1] == {name: written[0][name] for name in own}
    for t, tensor in enumerate(conversion.source.tensors):
        needed = np.zeros((ROWS, tensor.extent.nbytes // ROWS), int)
        for part in (slices[t][rank] for rank in ranks if slices[t][rank].is_held):
            for start, length in part.ranges_along(0) or [(0, ROWS)]:
                needed[start : start + length] = 1
        read = np.zeros(tensor.extent.nbytes, int)
        for extent in (extent for step in steps for other, extent in step.tensors if other == t):
            read[extent.offset - tensor.extent.offset : extent.end - tensor.extent.offset] += 1
        assert np.array_equal(read.reshape(ROWS, -1), needed)
        is_known = t in digests and digests[t].source is not None
        assert is_known == bool(needed.all())
