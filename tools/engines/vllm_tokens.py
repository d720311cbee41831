"""Runs in an environment that has vLLM: greedy tokens and their log-probabilities, as one line of JSON.

`vllm_tokens.py FOLDER TP LOAD_FORMAT`
"""

from __future__ import annotations

import json
import sys

PROMPTS = ([5, 6, 7], [100, 200, 300, 400, 500], [9] * 20)


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, tp, load_format = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    model = LLM(
        folder,
        tensor_parallel_size=tp,
        load_format=load_format,
        model_loader_extra_config={"strict": True} if load_format == "relayout" else {},
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        distributed_executor_backend="mp" if tp > 1 else None,
    )
    outputs = model.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False),
    )
    first = [one.outputs[0] for one in outputs]
    tokens = [list(one.token_ids) for one in first]
    found = {"tokens": tokens, "logprobs": [one.cumulative_logprob for one in first]}
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
