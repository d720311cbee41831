"""One process with vLLM: `python -P -m gpu.vllm_start JOB`, with a job in JSON; prints a line RESULT for each call.

Jobs are made by `gpu.engine`. A job with `rank` loads with vLLM's classes and no engine; all others start an engine,
and carry out calls one after the other. An error is a result of its call.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS = ([5, 6, 7], [100, 200, 300, 400, 500], [9] * 20)
_NUM_TOKENS = 24
_KV_CACHE_NBYTES = 2**30
_SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "seed": 0,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "enable_prefix_caching": False,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    started = time.monotonic()
    import vllm

    tell("imported", {"vllm": vllm.__version__, "seconds": round(time.monotonic() - started, 2)})
    (_loads if "rank" in job else _serve)(job)


def tell(key: str, values: dict[str, Any]) -> None:
    print("\nRESULT", json.dumps({"key": key} | values), flush=True)


def attempt(key: str, call: Callable[[], dict[str, Any]]) -> None:
    started = time.monotonic()
    try:
        found = call()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    tell(key, found | {"call_s": round(time.monotonic() - started, 3)})


def _serve(job: dict[str, Any]) -> None:
    from vllm import LLM

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    settings = _SETTINGS | job["settings"]
    if job["device"] == "cuda":
        settings |= {"kv_cache_memory_bytes": _KV_CACHE_NBYTES, "gpu_memory_utilization": 0.3}
    if job.get("updates"):
        from vllm.config import WeightTransferConfig

        settings["weight_transfer_config"] = WeightTransferConfig(backend="relayout")
    if settings.get("node_rank"):
        _second_node(settings)
        return
    started = time.monotonic()
    engine = Engine(LLM(**settings))
    tell("started", {"seconds": round(time.monotonic() - started, 2)})
    for key, name, *arguments in job["calls"]:
        attempt(key, lambda name=name, arguments=arguments: getattr(engine, name)(*arguments))  # type: ignore[misc]


def _second_node(settings: dict[str, Any]) -> None:
    """Run the workers of the second node, until this process is ended."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**settings).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


class Engine:
    """The calls that a job may have, by their names."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def tokens(self) -> dict[str, Any]:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [one.outputs[0] for one in self._model.generate(prompts, asked, use_tqdm=False)]
        return {
            "tokens": [list(one.token_ids) for one in outputs],
            "logprobs": [one.cumulative_logprob for one in outputs],
        }

    def digests(self) -> dict[str, Any]:
        return {"digests": self._model.collective_rpc(digests_in_worker)}

    def fresh(self, path: str, load_format: str, cold: bool) -> dict[str, Any]:
        (found,) = self._model.collective_rpc(fresh_in_worker, args=(path, load_format, cold))
        return dict(found)

    def update(self, source: str, step: int) -> dict[str, Any]:
        started = time.monotonic()
        self._model.start_weight_update()
        self._model.update_weights({"update_info": {"source": source, "step": step}})
        while any(one["is_staging"] for one in self._model.collective_rpc("relayout_state")):
            time.sleep(0.005)
        staged = time.monotonic()
        self._model.finish_weight_update()
        return {"staging_s": staged - started, "pause_s": time.monotonic() - staged}

    def attest(self) -> dict[str, Any]:
        found = self._model.collective_rpc("relayout_attest")
        return {"attest": [one | {"unverified": len(one.get("unverified", ()))} for one in found]}

    def flip(self) -> dict[str, Any]:
        self._model.collective_rpc(flip_in_worker)
        return {"flipped": "model.norm.weight"}

    def sleep(self, level: int) -> dict[str, Any]:
        started = time.monotonic()
        self._model.sleep(level=level)
        slept = time.monotonic()
        self._model.wake_up()
        return {"sleep_s": slept - started, "wake_s": time.monotonic() - slept}

    def reload(self) -> dict[str, Any]:
        """Load the weights again, as level 2 of sleep needs it."""
        self._model.collective_rpc("reload_weights")
        return {}


def digests_of(model: Any) -> dict[str, str]:
    """Return the digest of every parameter as the kernels have it, with its shape."""
    import torch
    from blake3 import blake3

    found = {}
    for name, parameter in model.named_parameters():
        memory = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        found[name] = f"{tuple(parameter.shape)} {blake3(memory, max_threads=blake3.AUTO).hexdigest()[:32]}"
    return found


def digests_in_worker(worker: Any) -> dict[str, str]:
    return digests_of(worker.get_model())


def flip_in_worker(worker: Any) -> None:
    import torch

    worker.get_model().get_parameter("model.norm.weight").data.view(torch.int16)[0] ^= 1


def fresh_in_worker(worker: Any, path: str, load_format: str, cold: bool) -> dict[str, Any]:
    return fresh(worker.vllm_config, path, load_format, cold)


def fresh(config: Any, path: str, load_format: str, cold: bool) -> dict[str, Any]:
    """Load one more model next to a live one; return seconds of `load_weights` and `load_model`, and digests."""
    import torch
    from vllm.config import set_current_vllm_config

    from gpu.loads import prepare

    config = copy.copy(config)
    config.compilation_config = copy.copy(config.compilation_config)
    # A layer registers itself by its name: the live model's must not be in the way.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.model_config, config.load_config = copy.copy(config.model_config), copy.copy(config.load_config)
    config.model_config.model = path
    config.load_config.load_format, config.load_config.model_loader_extra_config = load_format, {}
    config.weight_transfer_config = None
    prepare([Path(path)], cold=cold)
    found: dict[str, Any] = {}
    with set_current_vllm_config(config):
        model = _load(config, found)
    found["nbytes"] = sum(parameter.nbytes for parameter in model.parameters())
    found["digests"] = [digests_of(model)]
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _load(config: Any, found: dict[str, Any]) -> Any:
    """Load a model, and note the seconds of both methods."""
    from vllm.model_executor.model_loader import get_model_loader

    from gpu.loads import timed

    loader = get_model_loader(config.load_config)
    own = loader.load_weights

    def load_weights(*arguments: Any, **options: Any) -> Any:
        made, found["load_weights"] = timed(lambda: own(*arguments, **options))
        return made

    loader.load_weights = load_weights
    load_model = partial(loader.load_model, vllm_config=config, model_config=config.model_config)
    model, found["load_model"] = timed(load_model)
    return model


def _loads(job: dict[str, Any]) -> None:
    """Load as one rank, with vLLM's classes and loaders, without a group."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from relayout.observe.stubs import fake_rank

    load_general_plugins()
    if job["device"] == "cpu":  # As vLLM's worker for CPUs does.
        torch.accelerator.empty_cache = lambda: None
    rank, tp = job["rank"], job["tp"]
    settings = {key: value for key, value in _SETTINGS.items() if key != "disable_log_stats"} | job["settings"]
    settings |= {"tensor_parallel_size": tp, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    config = EngineArgs(**settings).create_engine_config()
    fake_rank(rank, tp, False)
    config.parallel_config.rank = rank
    for key, _, path, load_format, cold in job["calls"]:
        attempt(key, lambda arguments=(path, load_format, cold): fresh(config, *arguments))  # type: ignore[misc]


if __name__ == "__main__":
    main()
