"""Runs in an environment that has vLLM: models of its own classes whose weights change, beside models loaded anew.

`vllm_updates JOBS.json [--unpacked] [--stub-kernels]`: one process is all ranks, one after the other. `source` and
`converted` of a job are a folder with `step-0`, `step-1` ... and the deltas between them. Prints a line of JSON for
each: which slices have views, which modules vLLM loads again, what differs after the last delta, and whether one wrong
bit is found.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.config import WeightTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from engines.comparing.jobs import Job, Tensors, note_differences, run_jobs
from engines.comparing.vllm_classes import configuration
from relayout.live.vllm_reload import rehearse, reload
from relayout.live.vllm_updates import FORMAT, LIVE
from relayout.observe.stubs import StubGroup, Unpinned, fake_rank, stub_kernels

MEMORY = 2**32


def compare(job: Job, result: dict[str, Any]) -> None:
    """Change the weights of each rank by all deltas, and load the rank anew from the last step."""
    root = Path(job.source)
    deltas = [str(root / f"delta-{number}") for number in range(1, len(list(root.glob("delta-*"))) + 1)]
    for rank in range(job.tp * job.stages):
        fake_rank(rank % job.tp, job.tp, job.expert)
        config, model = loaded(job, root / "step-0", rank)
        live = LIVE.of(model)
        assert live is not None, "nothing was recorded"
        sizes = dict(zip(live.first.columns.names, live.first.columns.sizes(), strict=True))
        views, again = live.recorded.views, live.recorded.reloaded
        result["views"], result["loaded_again"] = kinds(views), kinds(again)
        result["modules"] = kinds({module for of in again.values() for module in of})
        result["unknown"] = kinds([name for name, of in again.items() if not of])
        result["nbytes"] = [sum(sizes.get(name, 0) for name in names) for names in (views, again)]
        assert live.attest().difference is None
        with set_current_vllm_config(config), Unpinned():
            staged = live.stage(deltas, live.content, MEMORY)
            live.check(model)
            live.rehearse(staged, model, partial(rehearse, model))
            live.commit(staged, partial(reload, model, config.model_config))
        attested = live.attest()
        result["verified"], result["attested"] = attested.verified, attested.difference
        _, fresh = loaded(job, root / f"step-{len(deltas)}", rank)
        note_differences(result, rank, everything(fresh), everything(model))
        if views:
            result["wrong_bit_found"] = finds_wrong_bit(live, model)


def loaded(job: Job, folder: Path, rank: int) -> tuple[Any, Any]:
    """A rank's model, ready for kernels, by relayout."""
    from vllm.model_executor.model_loader import get_model_loader

    config = configuration(job, str(folder), "auto")
    config.weight_transfer_config = WeightTransferConfig(backend=FORMAT)
    config.parallel_config.rank = rank
    if job.stages > 1:  # There are no processes for them.
        parallel_state._PP = StubGroup(rank // job.tp, job.stages)
        config.parallel_config.pipeline_parallel_size = job.stages
    config.compilation_config.static_forward_context.clear()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # Memory that nobody writes to is the same each time.
    with set_current_vllm_config(config), Unpinned():
        return config, get_model_loader(config.load_config).load_model(config, config.model_config)


def kinds(names: Any) -> dict[str, int]:
    """How many names there are of each kind: without numbers."""
    return dict(sorted(Counter(re.sub(r"\.\d+(?=\.|$)", "", name) for name in names).items()))


def everything(model: Any) -> Tensors:
    """All tensors that modules have; and what packed layers compute, whose weights are nowhere else."""
    found: Tensors = {}
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                found[f"{prefix}.{name}"] = value.detach().clone()
        size = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
        if getattr(module, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear and size:
            probe = torch.linspace(-1, 1, 4 * size, dtype=torch.bfloat16).view(4, size)
            found[f"{prefix}()"] = module.cpu_linear(probe, module.weight, None)
    return found


def finds_wrong_bit(live: Any, model: Any) -> bool:
    """Whether a bit that is flipped in a parameter is found, and only as long as it is wrong."""
    name = sorted(live.recorded.views)[-1]
    view = live.recorded.views[name][0]
    [memory] = {
        tensor.untyped_storage()
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.untyped_storage()._cdata == view.memory
    } or [None]
    numbers = torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),), (1,))
    place = view.target * view.itemsize
    numbers[place] ^= 1
    is_found = live.attest().difference == name
    numbers[place] ^= 1
    return is_found and live.attest().difference is None


def main() -> None:
    torch.accelerator.empty_cache = lambda: None  # As vLLM's worker for CPUs does.
    if "--unpacked" in sys.argv:
        leave_unpacked()
    if "--stub-kernels" in sys.argv:
        stub_quantization()
    run_jobs(compare)


def leave_unpacked() -> None:
    """Let vLLM compute with weights as they are stored, on a CPU: it has no option for that."""
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers

    operations._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *arguments: False


def stub_quantization() -> None:
    """Let vLLM make quantized weights ready where it has no kernels for them: nothing computes with them here."""
    import vllm._custom_ops as operations
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    stub_kernels()
    made = MagicMock(__name__="stub")
    chosen = (mxfp4.Mxfp4MoeBackend.EMULATION, made)
    replaced = {"select_mxfp4_moe_backend": lambda *_, **__: chosen, "make_mxfp4_moe_kernel": lambda *_, **__: made}
    for module in [one for name, one in sys.modules.items() if name.startswith("vllm.")]:
        vars(module).update({name: function for name, function in replaced.items() if name in vars(module)})
    operations.scaled_fp8_quant = lambda tensor, scale: (
        (tensor.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
        scale,
    )


if __name__ == "__main__":
    main()
