"""Runs in an environment that has an engine and model-signing: ways into the engine under a policy (RELAYOUT_TRUST).

`policy_ways ENGINE FOLDER`: the folder has what `support.signing.write_states` writes. Every load format of the engine,
and other ways, with each of these folders. Prints a line of JSON for each way: what was let in of what is not trusted,
what was refused without naming the policy, and whether what is signed was loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import TypeAlias

from support.signing import UNTRUSTED

from engines.comparing.jobs import Job, Tensors, held
from relayout import plugins
from relayout.errors import RelayoutError

HUB = "org/model"
Way: TypeAlias = Callable[[str, str, int], Tensors]
"""Given a folder, one that is signed, and a rank: what the model holds."""


def vllm_ways() -> dict[str, Way]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    from engines.comparing.vllm_classes import configuration
    from relayout.observe.stubs import Unpinned, fake_rank

    plugins.vllm()
    parallel_state._NODE_COUNT = 1  # There are no processes that could be counted.

    def load(folder: str, signed: str, rank: int, load_format: str = "auto", way: str = "start") -> Tensors:
        fake_rank(rank, 2, False)
        config = configuration(Job("llama", signed, signed, 2), signed, "auto")  # Of all, the configuration is equal.
        config.compilation_config.static_forward_context.clear()
        config.load_config.load_format = load_format
        named = copy(config.model_config)
        named.model = named.tokenizer = folder if way in ("start", "draft model") else signed
        named.runner_type = "draft" if way == "draft model" else named.runner_type
        dtype = set_default_torch_dtype(named.dtype)
        with set_current_vllm_config(config), dtype, torch.device("cpu"), Unpinned():
            loader = model_loader.get_model_loader(config.load_config)
            model = loader.create_model(vllm_config=config, model_config=named)
            if way == "side weights":
                model.secondary_weights = [DefaultModelLoader.Source(folder, None)]
            loader.load_weights(model, named)
            if way == "reload":
                named.model = folder
                model.load_weights(model_loader.get_model_loader(config.load_config).get_all_weights(named, model))
        return held(model)

    formats = {
        f"--load-format {name}": partial(load, load_format=name) for name in model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    }
    return formats | {way: partial(load, way=way) for way in ("draft model", "reload", "side weights")}


def sglang_ways() -> dict[str, Way]:
    import torch
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader as loaders
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    from engines.comparing.sglang_classes import fake_rank
    from relayout.observe.sglang_stubs import stub_rotary

    stub_rotary()
    from sglang.srt.plugins import HookRegistry

    plugins.sglang()
    HookRegistry.apply_hooks()

    def load(folder: str, signed: str, rank: int, load_format: str = "auto", way: str = "start") -> Tensors:
        arguments = ServerArgs(
            model_path=signed, tp_size=2, device="cpu", dtype="bfloat16", disable_cuda_graph=True,
            skip_tokenizer_init=True,
        )  # fmt: skip
        fake_rank(arguments, rank)
        named = ModelConfig.from_server_args(arguments)
        named.model_path = signed if way == "update" else folder
        named.is_draft_model = way == "draft model"
        config = LoadConfig(load_format=load_format, tp_rank=rank)
        loader = loaders.get_model_loader(config, named)
        with set_default_torch_dtype(named.dtype), torch.device("cpu"):
            model = loaders._initialize_model(named, config, loaders._get_quantization_config(named, config))
            loader.load_weights_only(model, loader._get_all_weights(named, model), torch.device("cpu"))
            if way == "update":  # As WeightUpdater does it.
                named.model_path = folder
                source = loaders.DefaultModelLoader.Source.init_new(named, model)
                loader.load_weights_only(model, loader._get_weights_iterator(source), torch.device("cpu"))
        return held(model)

    names = sorted({*LOAD_FORMAT_CHOICES, *(one.value for one in LoadFormat)})
    formats = {f"--load-format {name}": partial(load, load_format=name) for name in names}
    others = ("draft model", "update")
    return formats | {way: partial(load, way=way) for way in others}


def outcome(way: Way, folder: str, signed: str, policy: str) -> str:
    """Of both ranks."""
    for rank in range(2):
        try:
            way(folder, signed, rank)
        except RelayoutError as error:
            if policy not in str(error) and not folder.endswith("damaged"):
                return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            return "let in"
    return "refused"


def main() -> None:
    ways, root = {"vllm": vllm_ways, "sglang": sglang_ways}[sys.argv[1]](), Path(sys.argv[2])
    signed, policy = str(root / "signed"), str(root / "signer.toml")
    for name, way in ways.items():
        found = {state: outcome(way, str(root / state), signed, policy) for state in UNTRUSTED}
        found |= {HUB: outcome(way, HUB, signed, policy), "signed": outcome(way, signed, signed, policy)}
        print("RESULT", json.dumps({"way": name, **found}), flush=True)


if __name__ == "__main__":
    main()
