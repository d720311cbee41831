"""Checkpoints written by other people's tools, and what a rank should hold of them, by numpy alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 heads, 2 KV heads, a vocabulary that is no multiple of 64, biases, several shards; written by transformers."""
    from transformers import LlamaConfig

    return save_pretrained(
        tmp_path_factory.mktemp("llama") / "llama",
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    )


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases on q, k, v, and tied embeddings: no lm_head."""
    from transformers import Qwen2Config

    return save_pretrained(tmp_path_factory.mktemp("qwen2") / "qwen2", Qwen2Config(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No biases, in one shard."""
    from transformers import MistralConfig

    return save_pretrained(
        tmp_path_factory.mktemp("mistral") / "mistral", MistralConfig(**SIZES, head_dim=16), max_shard_size="1GB"
    )


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}


def save_pretrained(folder: Path, config: Any, max_shard_size: str = "300KB") -> Path:
    """A model of random BF16 weights, every one of them, as transformers writes it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # Norms would be all ones, biases all zeros.
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def read_tensors(folder: Path, pattern: str = "*.safetensors") -> dict[str, Array]:
    """Every tensor of a folder's files, by the stock safetensors package, as integers of the element's size."""
    import torch
    from safetensors import safe_open

    tensors = {}
    for file in sorted(folder.glob(pattern)):
        with safe_open(file, framework="pt") as stock:
            for name in stock.keys():  # noqa: SIM118 (it is no mapping)
                tensors[name] = as_integers(stock.get_tensor(name))
    assert tensors, f"no tensors in {folder}"
    assert torch  # The stock reader needs it imported.
    return tensors


def as_integers(tensor: Any) -> Array:
    """A torch tensor's bits as a numpy array of unsigned integers of the same shape."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    result: Array = tensor.contiguous().view(kinds[tensor.element_size()]).numpy()
    return result


def expected_slice(name: str, whole: Array, rank: int, tp: int, *, heads: int = 8, kv_heads: int = 2) -> Array:
    """What `rank` of `tp` holds of a Llama-shaped model's tensor, written down from the engines' rules."""
    last = name.rsplit(".", 2)[-2]
    if tp == 1:
        return whole
    if last in ("embed_tokens", "lm_head"):
        padded = -(-whole.shape[0] // 64) * 64
        return whole[rank * padded // tp : (rank + 1) * padded // tp]
    if last in ("k_proj", "v_proj"):
        by_head = whole.reshape(kv_heads, -1, *whole.shape[1:])
        mine = by_head[[rank * kv_heads // tp]] if tp > kv_heads else np.split(by_head, tp)[rank]
        return mine.reshape(-1, *whole.shape[1:])
    if last in ("q_proj", "gate_proj", "up_proj"):
        return np.split(whole, tp, axis=0)[rank]
    if last in ("o_proj", "down_proj") and name.endswith(".weight"):
        return np.split(whole, tp, axis=1)[rank]
    assert "norm" in last or name.endswith(("o_proj.bias", "down_proj.bias")), name
    return whole


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """What mount(8) puts at a new folder; the test skips where it cannot be had."""
    place.mkdir(exist_ok=True)
    if os.getuid() or not sys.platform.startswith("linux"):
        pytest.skip("mounting takes a superuser of Linux")
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mounted_tmpfs(place: Path, size: str) -> AbstractContextManager[Path]:
    """A file system of that size (as mount writes it), at a new folder; the test skips where it cannot be had."""
    return mounted(place, "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs")
