"""Runs in an environment that has vLLM: one update of a live model of its classes, and what vLLM's own reload makes.

`vllm_live JOBS.json [--stub-kernels]`: one process is all ranks, one after the other. `source` of a job is a folder
with `model-0`, `model-1`, `step-0` and `delta-1`. Prints a line of JSON for each, with the outcome:

- `equal`: all tensors of all modules are those of vLLM's own load of `model-1`;
- `refused`: before the commit, and all tensors are as before;
- `different`, `unusable` (an error in the commit): what must not be;
- `not loaded`: vLLM's own load of the model fails, or relayout has no plan for it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models import registry

from engines.comparing.jobs import Job, Tensors, run_jobs
from engines.comparing.vllm_updates import MEMORY, everything, loaded, stub_quantization
from relayout.errors import RelayoutError
from relayout.live.vllm_reload import rehearse, reload
from relayout.live.vllm_updates import LIVE
from relayout.observe.stubs import Unpinned, fake_rank

_PARTS = ("impl", "quant_method", "kernel", "scheme", "moe_kernel", "fused_experts")
"""Objects of modules that have tensors, too."""


def compare(job: Job, result: dict[str, Any]) -> None:
    """Update each rank, until one is not equal."""
    root = Path(job.source)
    if (root / "refused").exists():
        result.update(outcome="not loaded", why=(root / "refused").read_text().replace(f"{root}/", "")[:200])
        return
    released = _amx_kernel()
    if released is not None:
        released.uses_amx_bmm = not job.keeps_kv_b
    result["tensors"] = 0
    for rank in range(job.tp):
        outcome = _update(job, root, rank)
        result.update(outcome, tensors=result["tensors"] + outcome.get("tensors", 0))
        if outcome["outcome"] != "equal":
            break


def _update(job: Job, root: Path, rank: int) -> dict[str, Any]:
    try:
        fresh = _all(_started(job, root / "model-1", rank)[1])
        config, model = _started(job, root / "step-0", rank)
    except Exception as error:
        return {"outcome": "not loaded", "why": _said(error)}
    before, live = _all(model), LIVE.of(model)
    if live is None:
        return {"outcome": "not loaded", "why": "not by relayout"}
    is_begun = False
    try:
        with set_current_vllm_config(config), Unpinned():
            staged = live.stage([str(root / "delta-1")], live.content, MEMORY)
            live.check(model)
            live.check_base([staged])
            live.rehearse(staged, model, partial(rehearse, model))
            changed = _differing(before, _all(model))
            is_begun = True
            live.commit(staged, partial(reload, model, config.model_config))
    except Exception as error:
        differing = _differing(before, _all(model)) if not is_begun else []
        is_refused = isinstance(error, RelayoutError) and not is_begun and not differing
        return {
            "outcome": "refused" if is_refused else "unusable",
            "why": _said(error),
            "own_reload": _own_reload(job, root, rank, fresh),
        }
    differing = changed + _differing(fresh, _all(model))
    attested = live.attest().difference
    again_fresh = _all(_started(job, root / "model-1", rank)[1]) if differing else fresh
    undefined = set(_differing(fresh, again_fresh))
    differing = [name for name in differing if name not in undefined]
    if differing or attested:
        why = ", ".join(differing[:4]) or str(attested)
        return {"outcome": "different", "why": why, "own_reload": _own_reload(job, root, rank, fresh)}
    again = None if staged.modules is None else len(staged.modules)
    of_vllm = {"undefined": sorted(undefined)[:4]} if undefined else {}  # Two of its own loads differ there.
    return {"outcome": "equal", "modules_loaded_again": again, "tensors": len(fresh), **of_vllm}


def _started(job: Job, folder: Path, rank: int) -> tuple[Any, Any]:
    """A rank's model; with LoRA's wrappers, if the job says so."""
    import vllm.model_executor.layers.rotary_embedding as rope

    rope._ROPE_DICT.clear()  # Models share these.
    fake_rank(rank, job.tp, job.expert)
    config, model = loaded(job, folder, rank)
    if config.lora_config is not None:
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

        with set_current_vllm_config(config), Unpinned():
            manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), getattr(model, "embedding_modules", {}))
            manager.create_lora_manager(model, config)
    return config, model


def _own_reload(job: Job, root: Path, rank: int, fresh: Tensors) -> str:
    """What vLLM's own reload of the new model's source makes of the old one."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.reload import layerwise

    config, model = _started(job, root / "model-0", rank)
    source = _started(job, root / "model-1", rank)[0]
    try:
        with set_current_vllm_config(config), torch.no_grad(), Unpinned():
            layerwise.initialize_layerwise_reload(model)
            loader = DefaultModelLoader(source.load_config)
            model.load_weights(loader.get_all_weights(source.model_config, model))
            layerwise.finalize_layerwise_reload(model, config.model_config)
    except Exception as error:
        return _said(error)
    return ", ".join(_differing(fresh, _all(model))[:2]) or "equal"


def _all(model: Any) -> Tensors:
    """All tensors of modules and of the objects that compute for them, and what packed layers compute."""
    found = everything(model)
    for prefix, module in model.named_modules():
        for part in _PARTS:
            for name, value in vars(getattr(module, part, None) or module).items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    found[f"{prefix}.{part}.{name}"] = value.detach().clone()
    return found


def _differing(one: Tensors, other: Tensors) -> list[str]:
    names = {*one, *other}
    return sorted(name for name in names if name not in one or name not in other or not _same(one[name], other[name]))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta is other.is_meta
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()[:250]


def _amx_kernel() -> Any:
    """vLLM's kernel of latent attention for CPUs with AMX; None: there is none."""
    try:
        from vllm.v1.attention.backends.mla import amx_mla
    except ImportError:
        return None
    return next((one for one in vars(amx_mla).values() if isinstance(one, type) and "uses_amx_bmm" in vars(one)), None)


def main() -> None:
    torch.accelerator.empty_cache = lambda: None  # As vLLM's worker for CPUs does.
    registry._run_in_subprocess = lambda inspect: inspect()  # Another process for each class takes most of the time.
    if "--stub-kernels" in sys.argv:
        stub_quantization()
    run_jobs(compare)


if __name__ == "__main__":
    main()
