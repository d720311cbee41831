"""A real vLLM on several nodes, each of which has a folder of some ranks only, at the same path.

All nodes are this machine, which needs root: each has its own mounts, and its own shared memory, by which vLLM tells
nodes apart. They have one rank each, as vLLM takes a machine without GPUs for one device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from support.seaweedfs import free_ports

import relayout
from engines.cases import converted_of, source_of
from engines.environments import Environment
from engines.starts.starting import end, start

TP = 4
_FAMILY = "llama"
RANKS = ("0-1", "2-3")
"""Of each folder."""
_NODE = ("unshare", "--mount", "sh", "-c")
_MOUNTS = 'mount -t tmpfs none /dev/shm && mount --bind "$0" "$1" && shift && exec "$@"'
_LOADED = "relayout: rank "


def load_on_nodes(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whether the tokens from folders of some ranks are those of vLLM's own load, and how many ranks each had."""
    if not fnmatch(_FAMILY, only):
        return
    folder = work / "nodes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = source_of(_FAMILY, work, wide=True)
    parts = [folder / f"ranks-{ranks}" for ranks in RANKS]
    for part, ranks in zip(parts, RANKS, strict=True):
        relayout.copy(converted_of(source, TP), part, ranks=ranks)
    seen = [part for part in parts for _ in range(TP // len(parts))]
    own = _start(environment, [source] * TP, {}, folder / "own")
    ours = _start(environment, seen, {"load_format": "relayout"}, folder / "relayout")
    loaded = [(folder / f"relayout/{rank}.log").read_text().count(_LOADED) for rank in range(TP)]
    result: dict[str, Any] = {"same": "error" not in own and own == ours, "loaded": loaded}
    for there in (own, ours):
        if "error" in there:
            result.setdefault("error", there["error"])
    yield f"{_FAMILY}, tp {TP}", result


def _start(environment: Environment, folders: Sequence[Path], settings: dict[str, Any], work: Path) -> dict[str, Any]:
    """What a vLLM generates whose nodes see one folder each."""
    model, [port] = work / "model", free_ports(1)
    model.mkdir(parents=True)
    settings = settings | {
        "tensor_parallel_size": TP,
        "nnodes": len(folders),
        "master_addr": "127.0.0.1",
        "master_port": port,
    }

    nodes = [
        environment.with_variables(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="INFO",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_CPU_OMP_THREADS_BIND=str(rank % (os.cpu_count() or 1)),
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(len(folders))
    ]
    insides = [[*_NODE, _MOUNTS, folder, model] for folder in folders]
    with ExitStack() as stack:
        for rank in range(1, len(folders)):
            log = stack.enter_context((work / f"{rank}.log").open("w"))
            own = json.dumps(settings | {"node_rank": rank})
            worker = subprocess.Popen(
                [*insides[rank], *nodes[rank].command("starts.vllm_tokens", model, own)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=nodes[rank].variables,
                cwd=work,
                start_new_session=True,
            )
            stack.callback(worker.wait)
            stack.callback(end, worker.pid)  # It does not end with the first node.
        return start(nodes[0], model, settings | {"node_rank": 0}, work / "0.log", inside=insides[0]).result
