"""Jobs run in forks of one process: results in the order of ranks, and errors that name the engine's code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.format.fields import dump_slice
from relayout.observe import ranks
from relayout.observe.ranks import ObservationJob, failure, rank_result, run_here

TENSORS = [("a", "F32", (8, 2)), ("b", "F32", (3,))]
JOB = {"engine": "vllm", "folder": "nowhere", "tensors": TENSORS}


class _OddEngine(ModuleType):
    """Observes an engine whose rank `r` of `n` has rows `r * 8 / n`, and the process that observed it."""

    INSTALL = "buy one"

    def start(self) -> str:
        return "1.0"

    def configuration(self, job: ObservationJob) -> Any:
        if job.tp == 3:
            raise ValueError("8 rows\nare not divisible by 3")
        return {"rows": 8 // job.tp}

    def observe_rank(self, job: ObservationJob, config: Any, rank: int) -> dict[str, Any]:
        if job.tp == 8 and rank == 5:
            os._exit(1)
        if job.tp == 4 and rank > 1:
            return {"error": f"rank {rank} has no kernel"}
        rows = Slice.along(0, ((rank * config["rows"], config["rows"]),))
        return rank_result(job, {"a": rows, "b": WHOLE}, f"Odd of {os.getpid()}")


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> _OddEngine:
    engine = _OddEngine("relayout.observe.vllm")
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    return engine


@pytest.mark.usefixtures("odd")
def test_each_rank_is_a_process_of_its_own_and_results_are_in_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks.os, "cpu_count", lambda: 2)
    refused, done, kernel, ended = run_here([{**JOB, "tp": tp} for tp in (3, 2, 4, 8)])
    assert refused == {"error": "vLLM refuses its config.json: ValueError: 8 rows are not divisible by 3"}
    assert done["version"] == "1.0"
    assert done["model_class"] != f"Odd of {os.getpid()}"
    halves = [Slice.along(0, ((first, 4),)) for first in (0, 4)]
    assert done["ranks"] == [[dump_slice(half), dump_slice(WHOLE)] for half in halves]
    assert kernel == {"error": "rank 2 has no kernel"}
    assert ended == {"error": "rank 5: the process ended"}


def test_an_engine_that_cannot_be_imported_is_an_error(odd: _OddEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> str:
        raise ImportError("no such thing")

    monkeypatch.setattr(odd, "start", start, raising=False)
    assert run_here([{**JOB, "tp": 2}]) == [{"error": "vLLM cannot be imported (no such thing): buy one"}]


def test_slices_are_in_the_order_of_the_jobs_tensors() -> None:
    job = ObservationJob(**JOB, tp=2)
    result = rank_result(job, {"b": WHOLE, "c": WHOLE, "a": NOT_HELD}, "Odd")
    assert result == {"loaded": [dump_slice(NOT_HELD), dump_slice(WHOLE)], "model_class": "Odd"}


def test_a_failure_names_the_innermost_place_in_the_engines_own_code(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        file = tmp_path / f"{engine}.py"
        file.write_text("class Layer:\n    def load(self):\n        return helper()\n")
        module: dict[str, Any] = {"__name__": f"{engine}.layers", "helper": lambda: [][1]}
        exec(compile(file.read_text(), str(file), "exec"), module)
        with pytest.raises(IndexError) as caught:
            module["Layer"]().load()
        place = f" ({engine}.layers, Layer.load, line 3: return helper())"
        text = "rank 0 of 2: IndexError: list index out of range"
        assert failure(caught.value, "rank 0 of 2", engine) == {"error": text + place}
        assert failure(caught.value, "rank 0 of 2", "other") == {"error": text}
