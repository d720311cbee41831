"""Runs in an environment that has vLLM: what one load of a rank costs, by vLLM's own classes, as a line of JSON.

`vllm_load FOLDER TP RANK FORMAT OPTIONS`, the last as JSON. One process is the rank; a stand-in takes the place of
the others.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engines.comparing.jobs import Job
from engines.comparing.vllm_classes import configuration
from relayout.observe.stand_ins import fake_rank


def main() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    folder, tp, rank, load_format = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    fake_rank(rank, tp, expert=False)
    job = Job("load", folder, folder, tp)
    config = configuration(job, folder, load_format, **json.loads(sys.argv[5]))
    config.parallel_config.rank = rank
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        model = initialize_model(vllm_config=config, model_config=config.model_config)
        loader = get_model_loader(config.load_config)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak is counted anew.
        started, cpu = time.perf_counter(), time.process_time()
        loader.load_weights(model, config.model_config)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        peak = _status("VmHWM")
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    held = sum(parameter.nbytes for parameter in model.parameters())
    result = {"seconds": seconds, "cpu_s": cpu, "beyond_parameters_nbytes": peak - before - held}
    print("RESULT", json.dumps({**result, "parameters_nbytes": held, "digest": digest.hexdigest()}), flush=True)


def _status(field: str) -> int:
    """Bytes."""
    match: Any = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024


if __name__ == "__main__":
    main()
