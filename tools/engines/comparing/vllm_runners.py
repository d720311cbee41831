"""Runs in an environment that has vLLM: updates through its own worker for GPUs and each of its two model runners.

`vllm_runners JOBS.json`: `source` of a job is a folder with `step-0` and deltas, for one rank. Worker, runners and the
allocator of the sleep mode are vLLM's own classes; attributes that only a GPU fills are stubs. Prints a line of
JSON for each job, with whether each statement below holds, for each runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from vllm import device_allocator
from vllm.device_allocator import AllocationData, cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from engines.comparing.jobs import Job, run_jobs
from engines.comparing.vllm_updates import everything, loaded
from relayout.live.vllm_updates import LIVE, register
from relayout.observe.stubs import Unpinned, fake_rank

RUNNERS: dict[str, Any] = {"V1": GPUModelRunnerV1, "V2": GPUModelRunnerV2}


def compare(job: Job, result: dict[str, Any]) -> None:
    """Update a worker of each runner, let it sleep and wake up, and let an update fail."""
    root = Path(job.source)
    for name, runner in RUNNERS.items():
        fake_rank(0, 1, job.expert)
        with world_of_one(), sleeping_memory():
            result[name] = outcomes(job, root, runner, name == "V2")


def outcomes(job: Job, root: Path, runner: Any, is_v2: bool) -> dict[str, bool]:
    """Whether each statement holds, in this order."""
    worker = worker_with(job, root, runner, is_v2)
    model, found = worker.get_model(), dict[str, bool]()
    first, second = (str(root / f"delta-{step}") for step in (1, 2))
    _, fresh = loaded(job, root / "step-1", 0)

    worker.sleep(level=1)
    found["an update is refused while weights are asleep"] = "asleep" in said_by(update, worker, first)
    found["attest does not read sleeping memory"] = "asleep" in worker.relayout_attest().get("error", "")
    worker.wake_up(["kv_cache"])
    found["it is refused while only other memory is awake"] = "asleep" in said_by(update, worker, first)
    worker.wake_up(["weights"])

    found["a delta after a sleep of level 1 is taken"] = not said_by(update, worker, first)
    found["the model is equal to a fresh load"] = same(everything(fresh), everything(model))
    found["caches of the runner are reset"] = caches_are_reset(worker.model_runner, is_v2)

    for what, lose in (
        ("a sleep of level 2", lambda: (worker.sleep(level=2), worker.wake_up())),
        ("a discard of weights", lambda: (worker.discard(("weights",)), worker.wake_up())),
        ("reset_weights", worker.reset_weights),
    ):
        lose()
        found[f"a delta after {what} is refused"] = "loaded again by others" in said_by(update, worker, second)
        found[f"a folder after {what} is taken"] = not said_by(update, worker, str(root / "step-1"))
    worker.discard(("kv_cache",))
    worker.wake_up()
    found["a delta after a discard of other memory is taken"] = not said_by(update, worker, second)

    with mock.patch.object(LIVE.of(model), "commit", side_effect=OSError("the store is gone")):
        found["a failed commit is an error"] = "the store is gone" in said_by(update, worker, str(root / "step-0"))
    nothing = mock.MagicMock(total_num_scheduled_tokens=0)
    found["no step is computed after it"] = "start the engine again" in said_by(worker.execute_model, nothing)
    if is_v2:  # vLLM then raises the error of `execute_model`.
        found["nothing is sampled after it"] = worker.sample_tokens(None) is None
    return found


def worker_with(job: Job, root: Path, runner: Any, is_v2: bool) -> Any:
    """vLLM's worker with one of its runners, whose model was loaded from the first step."""
    config, model = loaded(job, root / "step-0", 0)
    worker: Any = object.__new__(Worker)
    worker.vllm_config, worker.model_config, worker.parallel_config = (
        config,
        config.model_config,
        config.parallel_config,
    )
    worker.use_v2_model_runner, worker.device, worker.rank = is_v2, torch.device("cpu"), 0
    worker.speculative_config = worker.profiler = worker.weight_transfer_engine = None
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker._pp_send_work, worker._sleep_mode_backend = [], CuMemBackend()
    worker._sleep_saved_buffers, worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}, {}
    worker.synchronize_device = lambda: None
    made = worker.model_runner = object.__new__(runner)
    made.model, made.vllm_config, made.lora_config = model, config, None
    made.encoder_cache, made.pooling_runner, made.late_interaction_runner = (mock.MagicMock() for _ in range(3))
    made.mm_budget, made.eplb, made.speculator, made.execute_model_state = (
        mock.MagicMock(),
        mock.MagicMock(),
        None,
        None,
    )
    with mock.patch.object(runner, "load_model"), Unpinned():  # Done above.
        worker.load_model()
    return worker


def update(worker: Any, source: str) -> None:
    """Change weights as vLLM's engine does."""
    with Unpinned():
        worker.start_weight_update()
        worker.update_weights({"source": source})
        worker.finish_weight_update()


def said_by(function: Callable[..., object], *arguments: object) -> str:
    """The error of a call, or nothing."""
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
    return ""


def same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal, bit by bit."""
    bits = {name: tensor.contiguous().view(torch.uint8) for name, tensor in found.items() if tensor.dim()}
    return expected.keys() == found.keys() and all(
        torch.equal(expected[name].contiguous().view(torch.uint8), one) for name, one in bits.items()
    )


def caches_are_reset(runner: Any, is_v2: bool) -> bool:
    """Whether what was computed with the old weights is dropped, by the runner's own methods."""
    cache = runner.encoder_cache
    of_v2 = (cache.reset_mm_cache, cache.reset_encoder_cache, runner.pooling_runner.clear)
    of_v1 = (cache.clear, runner.mm_budget.reset_cache, runner.late_interaction_runner.clear)
    return all(method.called for method in (of_v2 if is_v2 else of_v1))


@contextmanager
def world_of_one() -> Iterator[None]:
    """A process group, which updates need, of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = mock.MagicMock(cpu_group=distributed.group.WORLD)
    try:
        with mock.patch.object(parallel_state, "get_world_group", return_value=group):
            yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def sleeping_memory() -> Iterator[None]:
    """vLLM's allocator for sleep mode with an allocation of each kind, over a driver that maps nothing."""
    allocator = cumem.CuMemAllocator()
    for number, tag in enumerate(("weights", "kv_cache")):
        allocator.pointer_to_data[number] = AllocationData((0, 2**21, number, 0), tag)
    driver = ("create_and_map", "unmap_and_release", "libcudart")
    accelerator = {"synchronize": lambda *_: None, "get_memory_info": lambda: (0, 0), "empty_cache": lambda: None}
    with (
        mock.patch.multiple(cumem, **{name: mock.MagicMock() for name in driver}, PIN_MEMORY=False),
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(cumem.CuMemAllocator, "instance", allocator),
        mock.patch.object(device_allocator, "get_mem_allocator_instance", return_value=allocator),
    ):
        yield


def main() -> None:
    register()
    run_jobs(compare)


if __name__ == "__main__":
    main()
