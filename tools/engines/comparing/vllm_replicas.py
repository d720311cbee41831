"""Runs in an environment that has vLLM: data-parallel replicas in vLLM's own groups, by its own loader and relayout's.

`vllm_replicas SOURCE CONVERTED TP STEPS`: two replicas of TP processes each, on gloo. STEPS has `step-0` and `step-1`,
converted for TP ranks, and `delta-1` between them. Prints a line of JSON: what differs between the two ways to load,
how many have read for each process, and what differs after all have taken the delta, by vLLM's weight transfer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engines.comparing.jobs import Job, held, note_differences, nothing_found
from engines.comparing.vllm_classes import configuration, load
from engines.comparing.vllm_updates import everything
from relayout.errors import PlanError
from relayout.observe.stubs import Unpinned

NUM_REPLICAS = 2


def main() -> None:
    source, converted, tp, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["VLLM_DIST_IDENT"] = f"replicas-{port}"  # Its executors set this for their workers.
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    jobs = [
        (source, converted, steps, tp, port, replica, rank) for replica in range(NUM_REPLICAS) for rank in range(tp)
    ]
    processes = [context.Process(target=_process, args=(results, *job)) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    rows = sorted((results.get() for _ in processes), key=lambda result: (result["replica"], result["rank"]))
    print("RESULT", json.dumps(rows), flush=True)


def _process(
    results: Any, source: str, converted: str, steps: str, tp: int, port: int, replica: int, rank: int
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None
    job = Job("replicas", source, converted, tp)

    def configured(path: str, load_format: str, **extra: Any) -> Any:
        config = configuration(job, path, load_format, **extra)
        parallel = config.parallel_config
        parallel.data_parallel_size, parallel.data_parallel_rank = NUM_REPLICAS, replica
        parallel.data_parallel_master_ip, parallel.data_parallel_master_port = "127.0.0.1", port
        parallel._data_parallel_master_port_list = [port]
        parallel.rank = rank
        return config

    config = configured(source, "auto")
    with set_current_vllm_config(config):
        method = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(tp, rank, method, rank, "gloo")
        parallel_state.initialize_model_parallel(tp, 1, backend="gloo")
    own, _ = load(config, config.model_config)
    row: dict[str, Any] = {"replica": replica, "rank": rank}
    for way, options in (("shared", {}), ("alone", {"share": False})):
        config = configured(converted, "relayout", **options)
        seen = nothing_found()
        ours, weights = load(config, config.model_config)
        note_differences(seen, rank, held(own), held(ours))
        report = weights.report()
        row[way] = seen | {"num_readers": report.num_readers, "whole_reads": report.num_whole}
    row["live"] = _update(configured, Path(steps), rank)
    results.put(row)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _update(configured: Callable[..., Any], steps: Path, rank: int) -> dict[str, Any]:
    """Let all replicas take a delta: what differs from a load of the step, and what is proven."""
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import get_model_loader

    def loaded(folder: Path) -> tuple[Any, Any]:
        config = configured(str(folder), "relayout")
        config.weight_transfer_config = WeightTransferConfig(backend="relayout")
        config.compilation_config.static_forward_context.clear()
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with set_current_vllm_config(config), Unpinned():
            return config, get_model_loader(config.load_config).load_model(config, config.model_config)

    config, model = loaded(steps / "step-0")
    with set_current_vllm_config(config), Unpinned():
        made = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, torch.device("cpu"), model
        )
        made.start_weight_update()
        made.update_weights({"source": str(steps / "delta-1")})
        seen = nothing_found()
        try:
            made.finish_weight_update()
        except PlanError as error:  # On a CPU, experts that vLLM has padded.
            return seen | {"refused": str(error), "content": made.state()["content"]}
        attested = made.attest()
    _, fresh = loaded(steps / "step-1")
    note_differences(seen, rank, everything(fresh), everything(model))
    state = {"verified": attested["verified"], "unverified": len(attested["unverified"])}
    return seen | state | {"difference": attested["difference"], "content": made.state()["content"]}


if __name__ == "__main__":
    main()
