"""Runs in an environment that has SGLang: its own `WeightUpdater`, on weights that change, without and with relayout.

`sglang_updates ROOT`: ROOT has what `update_sglang` of `engines` makes. One process is all ranks, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engines.comparing.jobs import Tensors, held, note_differences, nothing_found
from engines.comparing.sglang_classes import fake_rank
from relayout.observe.sglang_stubs import stub_rotary

TP = 2
CASES = (
    ("a delta", "delta-1", "model-1"),
    ("the next delta", "delta-2", "model-2"),
    ("a folder", "step-0", "model-0"),
    ("a step of a root", "root#11", "model-1"),
    ("a root", "root", "model-2"),
    ("a delta for something else", "delta-1", "model-2"),
    ("a folder with a wrong bit", "damaged-folder", "model-2"),
    ("a folder of another model", "other-model", "model-2"),
    ("a folder that lacks a tensor", "lacks-tp2", "model-2"),
    ("a plain checkpoint", "model-1", "model-1"),
    ("a root after a plain checkpoint", "root", "model-2"),
)
"""What is asked for, one after the other, and the source of what the engine must then have."""


class Live:
    """A rank of SGLang that has loaded a folder, as its model runner keeps it."""

    def __init__(self, path: Path, rank: int, *, tp: int = TP, **options: Any) -> None:
        """Start, with options of relayout."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.model_loader.utils import set_default_torch_dtype
        from sglang.srt.server_args import ServerArgs

        weight_updater.get_available_gpu_memory = lambda *_args, **_named: 0.0
        arguments = ServerArgs(
            model_path=str(path), tp_size=tp, device="cpu", dtype="bfloat16", disable_cuda_graph=True,
            skip_tokenizer_init=True,
        )  # fmt: skip
        fake_rank(arguments, rank)
        config = ModelConfig.from_server_args(arguments)
        extra = {"relayout": options} if options else {}
        load_config = LoadConfig(
            load_format="auto", tp_rank=rank, draft_model_idx=None, model_loader_extra_config=extra
        )
        # Only now are these hooked, if the plugin is there.
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model, get_model_loader

        loader = get_model_loader(load_config, config)
        device = torch.device("cpu")
        with set_default_torch_dtype(config.dtype), device:
            model = _initialize_model(config, load_config, _get_quantization_config(config, load_config))
            loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), device)
        self.model = model
        self.num_loads = 0
        """How often it has loaded since."""
        load = model.load_weights

        def counted(weights: Any) -> Any:
            self.num_loads += 1
            return load(weights)

        model.load_weights = counted
        self.updater = weight_updater.WeightUpdater(
            tp_rank=rank, device="cpu", gpu_id=0, model_config=config, custom_weight_loaders={},
            get_model=lambda: model, update_model_fields=lambda *_args, **_named: None,
            recapture_cuda_graph=lambda: None, get_model_runner=lambda: None,
        )  # fmt: skip

    def held(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in held(self.model).items()}

    def update(self, path: Path | str) -> tuple[bool, str]:
        try:
            answer: tuple[bool, str] = self.updater.update_weights_from_disk(str(path), "auto")
        except Exception as error:
            return False, f"RAISED, which ends SGLang: {type(error).__name__}: {error}"
        return answer


def from_half_a_folder(root: Path, wanted: list[dict[str, Tensors]]) -> dict[str, Any]:
    """How many of a model's tensors are still what they were, after an update whose second file is truncated."""
    live = Live(root / "model-0", 0)
    done, answer = live.update(root / "truncated")
    now = live.held()
    old = sum(torch.equal(now[name], tensor) for name, tensor in wanted[0]["model-0"].items())
    return {"done": done, "tensors": len(now), "still_old": old, "answer": answer.replace(f"{root}/", "")[:160]}


def outcomes(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What becomes of each case, in all ranks; before that, of SGLang alone."""
    from sglang.srt.plugins import load_plugins

    wanted = [{f"model-{n}": Live(root / f"model-{n}", rank).held() for n in range(3)} for rank in range(TP)]
    yield "a truncated file, SGLang alone", from_half_a_folder(root, wanted)
    load_plugins()
    import relayout.live.sglang_updates as updates

    updates._group = lambda: None  # The ranks are not there at the same time.
    for mode, options in (("", {}), ("live: ", {"live": True})):
        found = {case: {**nothing_found(), "answers": [], "loads": 0} for case, _, _ in CASES}
        for rank in range(TP):
            live = Live(root / "step-0", rank, **options)
            memory = {name: tensor.data_ptr() for name, tensor in held(live.model).items()}
            for case, path, source in CASES:
                before = live.num_loads
                done, answer = live.update(root / path)
                found[case]["answers"].append(f"{done}: {answer.replace(f'{root}/', '')[:160]}")
                found[case]["loads"] += live.num_loads - before
                note_differences(found[case], rank, wanted[rank][source], live.held())
                now = held(live.model)
                found[case]["moved"] = sum(tensor.data_ptr() != memory[name] for name, tensor in now.items())
        yield from ((mode + case, outcome) for case, outcome in found.items())


def main() -> None:
    stub_rotary()
    root = Path(sys.argv[1])
    print("RESULT", json.dumps(dict(outcomes(root))), flush=True)


if __name__ == "__main__":
    main()
