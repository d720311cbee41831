"""Runs in an environment that has vLLM: data-parallel replicas in vLLM's own groups, by its own loader and relayout's.

`vllm_replicas SOURCE CONVERTED TP`: two replicas of TP processes each, on gloo. Prints a line of JSON: what differs
between the two ways to load, and how many have read for each process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from typing import Any

import torch

from engines.comparing.jobs import Job, held, note_differences, nothing_found
from engines.comparing.vllm_classes import configuration, load

NUM_REPLICAS = 2


def main() -> None:
    source, converted, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["VLLM_DIST_IDENT"] = f"replicas-{port}"  # Its executors set this for their workers.
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    jobs = [(source, converted, tp, port, replica, rank) for replica in range(NUM_REPLICAS) for rank in range(tp)]
    processes = [context.Process(target=_process, args=(results, *job)) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    rows = sorted((results.get() for _ in processes), key=lambda result: (result["replica"], result["rank"]))
    print("RESULT", json.dumps(rows), flush=True)


def _process(results: Any, source: str, converted: str, tp: int, port: int, replica: int, rank: int) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
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
    results.put(row)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


if __name__ == "__main__":
    main()
