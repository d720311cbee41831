"""Runs beside an engine: attempts to observe architectures that have no plan; a line of JSON for each.

`attempts ENGINE FOLDER RESULTS NAMES.json`: ENGINE is vllm or sglang, NAMES.json maps architectures to the types of
their models. For each, a small checkpoint is made: by transformers, if it has a class of this name, else from the
engine's own class (`class_made.py`). It is observed at TP 2 as `--plan ENGINE` does. An outcome is clean if every
tensor is loaded. Where a built-in plan matches the type of the model, its slices are compared with those observed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from engines.observing import class_configs, class_made, small_models
from engines.observing.forks import Report, Result, in_a_fork, write_results
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.errors import PlanError
from relayout.observe.observation import Observation, completed, observe, same_elements
from relayout.observe.ranks import ObservationJob, carry_out
from relayout.observe.tracing import LoadRecorder
from relayout.plans.family import find_family
from relayout.plans.planner import plan_by
from relayout.storage.stores import find_store

DEGREES = (2,)
TIMEOUT_S = 300
_BUILD_TIMEOUT_S = 180
_ONE_RANK = re.compile(r"(tensor.parallel|tp)\w*.{0,20}1 only|not support tensor.parallel", re.IGNORECASE)
"""In an engine's refusal: that its class has no tensor parallelism."""
_MAX_SUPPLIED = 60
"""The most keys that a configuration is given."""


class VllmLoads:
    """vLLM's class for a folder, on one rank."""

    def __init__(self, folder: Path) -> None:
        from relayout.observe import stubs, vllm

        self._vllm = vllm
        job = ObservationJob("vllm", str(folder), [], 1, trust_remote_code=True)
        self._config = vllm.configuration(job)
        stubs.fake_rank(0, 1, False)

    def build(self) -> torch.nn.Module:
        """Build the class."""
        model: torch.nn.Module = self._vllm.build(self._config, self._config.model_config)
        return model

    def load(self, model: torch.nn.Module, recorder: LoadRecorder, tensors: Any) -> None:
        """Load probes."""
        self._vllm.load(self._config, self._config.model_config, model, recorder, tensors, is_partial=True)


class SglangLoads:
    """SGLang's class for a folder, on one rank."""

    def __init__(self, folder: Path) -> None:
        from sglang.srt.configs.model_config import ModelConfig

        from relayout.observe import sglang, sglang_stubs

        self._sglang = sglang
        config = sglang.configuration(ObservationJob("sglang", str(folder), [], 1, trust_remote_code=True))
        sglang_stubs.start_rank(config, 0)
        self._model_config = ModelConfig.from_server_args(config)

    def build(self) -> torch.nn.Module:
        """Build the class."""
        model: torch.nn.Module = self._sglang.build(self._model_config, 0)
        return model

    def load(self, model: torch.nn.Module, recorder: LoadRecorder, tensors: Any) -> None:
        """Load probes."""
        self._sglang.load(self._model_config, model, recorder, tensors)


LOADS = {"vllm": VllmLoads, "sglang": SglangLoads}


def main() -> None:
    engine, folder, results, names = sys.argv[1:]
    wanted: dict[str, list[str]] = json.loads(Path(names).read_text())
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    module = import_module(f"relayout.observe.{engine}")
    module.start()
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2VLForConditionalGeneration"):
        warm_up(engine, name, Path(folder, "warm"))
    works = [
        (
            {"architecture": name, "engine": engine},
            partial(attempt, engine, name, tuple(types), Path(folder, name)),
            Path(folder, name),
        )
        for name, types in wanted.items()
    ]
    write_results(Path(results), works, TIMEOUT_S)


def warm_up(engine: str, name: str, folder: Path) -> None:
    """Import here, once, what each fork would import: that takes longer than to build a small model."""
    small_models.write(name, folder)
    tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in read_source(find_store(folder)).tensors]
    module: Any = import_module(f"relayout.observe.{engine}")
    job = ObservationJob(engine, str(folder), tensors, 2)
    config = module.configuration(job)
    if engine == "vllm":  # A process can be a rank of SGLang only once.
        module.observe_rank(job, config, 0)
    shutil.rmtree(folder)


def attempt(engine: str, name: str, types: tuple[str, ...], folder: Path, report: Report) -> Result:
    """Make a checkpoint and observe it."""
    folder.mkdir(parents=True, exist_ok=True)
    first: Result = {}
    if getattr(transformers, name, None) is not None:
        first = _observed({"by": "transformers", "step": "make"}, engine, folder, report, _write_by_transformers(name))
        if first["step"] == "done":
            return first
        for file in folder.iterdir():
            file.unlink()
    result = _observed({"by": "class", "step": "make"}, engine, folder, report, _write_by_class(engine, name, types))
    steps = ("make", "build", "name", "observe", "done")
    return max((result, first), key=lambda one: steps.index(one.get("step", "make")))


def _write_by_transformers(name: str) -> Any:
    def write(folder: Path, _result: Result, _report: Report) -> None:
        torch.Tensor.normal_ = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]  # Values do not matter.
        small_models.write(name, folder)

    return write


def _write_by_class(engine: str, name: str, types: tuple[str, ...]) -> Any:
    def write(folder: Path, result: Result, report: Report) -> None:
        result["model_type"] = class_configs.write(name, folder, types)
        for _ in range(_MAX_SUPPLIED):
            built = in_a_fork(partial(_make, engine, name, folder), _BUILD_TIMEOUT_S)
            result["step"] = built.get("step", "build")
            report(result)
            if "error" not in built:
                return
            if not class_configs.supply(folder, built["error"]):
                raise LookupError(built["error"])
        raise LookupError(f"the configuration lacks more than {_MAX_SUPPLIED} keys")

    return write


def _make(engine: str, name: str, folder: Path, report: Report) -> Result:
    """Build the class and write what it loads."""
    step = "build"
    try:
        report({"step": step})
        loads = LOADS[engine](folder)
        loads.build()
        step = "name"
        report({"step": step})
        return {"tensors": class_made.write(folder, loads, class_configs.names_of(name)), "step": step}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}{_where(error)}"[:900], "step": step}


def _where(error: BaseException) -> str:
    """The innermost line, in brackets."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    code = trace.tb_frame.f_code
    return f" ({Path(code.co_filename).name}, {code.co_name}, line {trace.tb_lineno})"


def _observed(result: Result, engine: str, folder: Path, report: Report, write: Any) -> Result:
    """Write a checkpoint, observe it, and compare it with the built-in plan."""
    try:
        write(folder, result, report)
        result["step"] = "observe"
        report(result)
        source, observed = _observe(engine, folder)
        result["tensors"] = len(source.tensors)
        result["model_type"] = source.config.get("model_type", "")
        refused = [found for found in observed.values() if isinstance(found, PlanError)]
        if refused and _ONE_RANK.search(str(refused[0])):
            # The engine serves it on one rank only.
            result["refused"] = str(refused[0])[:300]
            source, observed = _observe(engine, folder, (1,))
            refused = [found for found in observed.values() if isinstance(found, PlanError)]
        if refused:
            raise refused[0]
        unused = sorted(
            tensor.name
            for number, tensor in enumerate(source.tensors)
            if not any(part.is_held for part in next(iter(observed.values())).loaded_slices[number])
        )
        if unused:
            result["unused"] = unused[:5]
            raise LookupError(f"{len(unused)} tensors are not loaded, such as {unused[0]}")
        result |= {"degrees": list(observed), "builtin": _by_builtin_plan(source, observed), "step": "done"}
    except Exception as error:
        text = f"{type(error).__name__}: {error}{'' if isinstance(error, LookupError | PlanError) else _where(error)}"
        result["error"] = re.sub(r"/\S*/", "", text.replace(str(folder), ""))[:600]
    return result


def _observe(engine: str, folder: Path, degrees: tuple[int, ...] = DEGREES) -> tuple[SourceCheckpoint, dict[int, Any]]:
    module: Any = import_module(f"relayout.observe.{engine}")

    def run(jobs: Any) -> list[Any]:
        """Carry out each job in a fork, as the command does."""
        outcomes = []
        for job in jobs:
            found = in_a_fork(
                lambda _, job=job: {"result": carry_out(module, module.start(), ObservationJob(**job))}, TIMEOUT_S
            )
            outcomes.append(found.get("result", found))
        return outcomes

    while True:
        source = read_source(find_store(folder))
        results = dict(
            zip(degrees, observe(source, degrees, engine=engine, trust_remote_code=True, run=run), strict=True)
        )
        if not small_models.supply(folder, [str(result) for result in results.values()]):
            return source, results


def _by_builtin_plan(source: SourceCheckpoint, observed: dict[int, Observation]) -> dict[str, Any]:
    """The built-in plan of the type, and how many tensors it cuts otherwise; empty: there is no plan."""
    try:
        family = find_family(str(source.config.get("model_type", "")))
    except PlanError:
        return {}
    different: list[str] = []
    try:
        for degree, observation in observed.items():
            plan = plan_by(source, degree, family)
            different += [
                tensor.name
                for number, tensor in enumerate(source.tensors)
                if not same_elements(
                    plan.cut(number).slices,
                    completed(observation.loaded_slices[number], tensor.shape),
                    tensor.shape,
                )
            ]
    except PlanError as error:
        return {"plan": family.name, "error": str(error)[:200]}
    return {"plan": family.name, "different": len(different), "such_as": different[:2]}


if __name__ == "__main__":
    main()
