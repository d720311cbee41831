"""Runs in an environment that has vLLM: greedy tokens and their log-probabilities, as one line of JSON.

`vllm_tokens FOLDER SETTINGS`, which are those of `vllm.LLM`, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

FILLING_S = 300
PROMPTS = ([5, 6, 7], [100, 200, 300, 400, 500], [9] * 20)


def main() -> None:
    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[2])
    ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    model = LLM(
        sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        distributed_executor_backend="mp" if ranks > 1 else None,
        **settings,
    )
    outputs = model.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False),
    )
    first = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in first]
    result = {"tokens": tokens, "logprobs": [completion.cumulative_logprob for completion in first]}
    print("\nRESULT", json.dumps(result), flush=True)
    if folder := os.environ.get("RELAYOUT_CACHE"):
        _wait_until_filled(folder)


def _wait_until_filled(folder: str) -> None:
    """Wait for what a start converts into the cache: it ends with the engine."""
    from relayout import Cache

    ends = time.monotonic() + FILLING_S
    while (right := Cache(folder).try_filling()) is None and time.monotonic() < ends:
        time.sleep(0.2)
    if right is not None:
        os.close(right)


if __name__ == "__main__":
    main()
