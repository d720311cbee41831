"""vLLM's own way to load a model again, layer by layer, for some of its modules: from tensors, as at the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING, Any

from relayout.errors import PlanError

if TYPE_CHECKING:
    import torch


class _Some:
    """Modules in the place of a model: vLLM asks one for its modules, and for nothing else, while it reloads."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> list[torch.nn.Module]:
        """The modules."""
        return self._modules


def reload(
    model: torch.nn.Module,
    model_config: Any,
    modules: frozenset[str] | None,
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Load modules again: they are quantized and rearranged as at the start, and stay where they are in memory.

    Attention is made ready again in any case: some computes with what it has made of the weights of other layers.

    Args:
        modules: their names; None: all.
        tensors: all that these modules are made of.
    """
    import torch
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    chosen: Any = model
    if modules is not None:
        named = model.named_modules()
        chosen = _Some([one for name, one in named if name in modules or is_deferred_attention_layer(one)])
    had = {name: {id(one) for one in layer.parameters(recurse=False)} for name, layer in model.named_modules()}
    with torch.no_grad(), _zeros():
        initialize_layerwise_reload(chosen)
        model.load_weights(tensors)  # type: ignore[operator]
        _check_loaded(model, modules or frozenset(), had)
        finalize_layerwise_reload(chosen, model_config)
        pack_tied(chosen)
        _pack_experts(chosen)


def _zeros() -> AbstractContextManager[Any]:
    """Let memory that vLLM's reload makes be zero: it leaves padding as it finds it, where the first load has zeros."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            return made.zero_() if func is torch.empty_strided else made

    return Zeros()


def _check_loaded(model: torch.nn.Module, modules: frozenset[str], had: dict[str, set[int]]) -> None:
    """Check that something was loaded into each module: vLLM only logs that, and leaves it as it was.

    Args:
        had: the parameters of each module before: one that has no others than those of loaded ones, a tied head, need
            not be loaded by itself.

    Raises:
        PlanError: nothing was.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    left = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer) if name in modules else None
        if info is not None and getattr(info, "load_numel_total", None) and info.load_numel <= 0:
            left.add(name)
    loaded = {one for name in modules - left for one in had.get(name, ())}
    for name in sorted(left):
        if not (had[name] and had[name] <= loaded):
            raise PlanError(f"vLLM's own reload has loaded nothing into {name}", code="unsupported")


def loader_of(parameter: torch.Tensor) -> CodeType | None:
    """The code of what fills a parameter: vLLM's reload carries out its calls again, and nothing else."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Any = getattr(parameter, "weight_loader", default_weight_loader)
    while not isinstance(code := getattr(loader, "__code__", None), CodeType):
        inner = getattr(loader, "__wrapped__", None) or getattr(loader, "func", None)
        if inner is None:
            return None
        loader = inner
    return code


def check_padding(model: torch.nn.Module, modules: frozenset[str] | None) -> None:
    """Check that vLLM can make modules ready for kernels a second time.

    On a CPU it pads experts once, notes their new size, and does not pad what it reloads.

    Raises:
        PlanError: it cannot.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # Another version, of which this is not known.
        return
    for prefix, layer in model.named_modules():
        as_loaded = get_layerwise_info(layer).restore_metadata[0] if modules is None or prefix in modules else {}
        for name, tensor in layer.named_parameters(recurse=False):
            was = as_loaded.get(name)
            if was is not None and tensor.device.type == "cpu" and tensor.dim() == 3 and tensor.numel() > was.numel():
                what = f"was {list(was.shape)} and is padded to {list(tensor.shape)}: vLLM cannot reload this on a CPU"
                raise PlanError(f"{what}; start the engine again", tensor=f"{prefix}.{name}", code="unsupported")


def _pack_experts(model: Any) -> None:
    """Pack experts for a CPU again: vLLM does so when it makes their kernel, and it makes that once.

    Seen in 0.32 and 0.33 (`UnquantizedFusedMoEMethod._setup_kernel`): its own reload leaves weights as they are stored
    where the kernel reads packed ones.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        weight = getattr(layer, "w13_weight", None)
        if weight is not None and weight.device.type == "cpu" and "CPUUnquantizedExperts" in type(experts).__name__:
            experts.process_weights_after_loading(layer)


def pack_tied(model: Any) -> None:
    """Pack weights for a CPU again that a layer shares with another: vLLM's reload does so for the other alone."""
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    num_uses = Counter(id(layer.weight) for layer in packed)
    for layer in packed:
        if num_uses[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)
