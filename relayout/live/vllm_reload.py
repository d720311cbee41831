"""Reload some modules of a live vLLM by vLLM's own layerwise reload, from tensors, as at the start.

vLLM moves the parameters of the modules to the meta device, buffers the arguments of its weight loaders, and counts
elements. A module with a full count is put into new memory, loaded, prepared for kernels, and copied to its old memory.
An error in the middle leaves a mixture of weights. Therefore each reload is rehearsed first: the same tensors are given
to the same loaders, no module is put into memory, and then every module, parameter and attribute is restored.

If each of q, k and v has its own tensor, such as a scale, vLLM expects the elements once, but counts them three times.
The count is then complete some elements too early, and later elements are lost or raise an error. Therefore small
tensors are given first (`RankWeights.small_first`): the last tensor of a module then has more elements than the excess
of the count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

from relayout.errors import PlanError, RelayoutError

if TYPE_CHECKING:
    import torch

    from relayout.live.staging import Modules


class _Some:
    """Modules in place of a model: during a reload, vLLM only calls `modules()`."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules."""
        return self._modules


def reload(
    model: torch.nn.Module, model_config: Any, modules: Modules, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Load modules again: quantized and rearranged as at the start, at the same memory addresses.

    Attention is always prepared again: some of it uses data derived from the weights of other layers.

    Args:
        modules: None: all.
        tensors: all tensors of these modules, as `rehearse` has received them.
    """
    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    chosen = _chosen(model, modules)
    with torch.no_grad(), _dtype_of(model_config), _zeros(), _with_defaults(layerwise):
        layerwise.initialize_layerwise_reload(chosen)
        model.load_weights(tensors)  # type: ignore[operator]
        layerwise.finalize_layerwise_reload(chosen, model_config)
        pack_tied(chosen)
        _pack_experts(chosen)


def rehearse(model: torch.nn.Module, modules: Modules, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Check that vLLM can load modules again from tensors. Nothing is loaded, and the model is unchanged.

    Args:
        modules, tensors: as of `reload`; large tensors need no values.
    """
    try:
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    except ImportError as error:
        raise PlanError(f"this vLLM cannot load modules again: {error}", code="unsupported") from error
    import torch

    names = {module: name for name, module in model.named_modules()}
    chosen = _chosen(model, modules)
    _check_released(chosen, modules, names)
    check_padding(model, modules)
    infos = {layer: layerwise.get_layerwise_info(layer) for layer in chosen.modules()}
    had = {layer: {id(one) for one in layer.parameters(recurse=False)} for layer in infos}
    with torch.no_grad(), _restored(model, infos), _untouched(model), _unprocessed(layerwise) as early:
        for layer in infos:
            _move_to_meta(layer, to_meta_tensor)
        layerwise.initialize_layerwise_reload(chosen)
        model._do_torchao_reload = False  # type: ignore[assignment]  # Otherwise `load_weights` prepares modules.
        try:
            model.load_weights(tensors)  # type: ignore[operator]
        except (RelayoutError, OSError, MemoryError):
            raise
        except Exception as error:
            what = f"its own reload of what it has made something else of fails: {type(error).__name__}: {error}"
            raise PlanError(f"vLLM cannot take these weights: {what}", code="unsupported") from error
        if modules is not None:  # Otherwise some modules load nothing, such as tables of positions.
            _check_loaded(infos, names, had)
        _check_sources(infos, names)
        for layer, loaded in early.items():
            if infos[layer].load_numel > loaded:
                _refuse(names[layer], "its own reload counts it as complete before its last tensor")


def _chosen(model: torch.nn.Module, modules: Modules) -> Any:
    """Return the modules and all attention; the model itself if `modules` is None."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    if modules is None:
        return model
    wanted = set(modules)
    return _Some([one for one in model.modules() if one in wanted or is_deferred_attention_layer(one)])


def _refuse(name: str, why: str) -> NoReturn:
    what = f"vLLM cannot load this module again: {why}; start the engine again"
    raise PlanError(what, tensor=name, code="unsupported")


@contextmanager
def _restored(model: torch.nn.Module, infos: Mapping[torch.nn.Module, Any]) -> Iterator[None]:
    """Restore all modules of a model, the attributes of their parameters, and vLLM's records, when the block ends."""
    kept: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        attributes, tensors = vars(module), (*module._parameters.values(), *module._buffers.values())
        held = {name: copy(one) for name, one in attributes.items() if name in _HELD}
        kept.append((attributes, dict(attributes), held))
        kept.extend((vars(one), dict(vars(one)), {}) for one in tensors if one is not None)
    kept.extend((vars(one), dict(vars(one)), {"loaded_weights": list(one.loaded_weights)}) for one in infos.values())
    try:
        yield
    finally:
        for attributes, were, held in kept:
            attributes.clear()
            attributes.update(were)
            for name, had in held.items():
                if isinstance(had, list):
                    attributes[name] = had
                    continue
                attributes[name].clear()
                attributes[name].update(had)


_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of a module that are dictionaries or sets, which are copied in addition to the references."""


def _untouched(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Raise PlanError before an operation writes to the memory that a model has now."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    live = {_number(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    class Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for position, key in _written(func):
                for tensor in tree_leaves(args[position] if position < len(args) else kwargs.get(key)):
                    if (number := _number(tensor)) is not None and number in live:
                        _refuse(live[number], "its class writes to it past its loader")
            return func(*args, **kwargs)

    return Untouched()  # type: ignore[no-untyped-call]


@cache
def _written(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operation of torch writes to."""
    arguments = enumerate(operation._schema.arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _number(tensor: Any) -> int | None:
    """Return the number of a tensor's storage; None: it has no memory."""
    import torch

    is_plain = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _unprocessed(layerwise: Any) -> Iterator[dict[torch.nn.Module, int]]:
    """Keep vLLM from preparing modules; record the number of elements each had when its count was full."""
    early: dict[torch.nn.Module, int] = {}
    process = layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: early.setdefault(layer, info.load_numel)
    try:
        yield early
    finally:
        layerwise._layerwise_process = process


def _move_to_meta(layer: torch.nn.Module, to_meta_tensor: Any) -> None:
    """Move tensors that vLLM's reload leaves in memory (biases) to the meta device: its loaders would write to them."""
    for tensors in (layer._parameters, layer._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None and not tensor.is_meta:
                tensors[name] = to_meta_tensor(tensor)


def _check_loaded(
    infos: Mapping[torch.nn.Module, Any], names: Mapping[torch.nn.Module, str], had: Mapping[torch.nn.Module, set[int]]
) -> None:
    """Check that each module was loaded: vLLM only logs a module without tensors, and leaves it unchanged.

    Two kinds of modules need not be loaded: attention, which is always prepared again, and modules that only share the
    parameters of loaded ones (a tied head).
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    left = {layer for layer, info in infos.items() if info.load_numel_total and info.load_numel <= 0}
    loaded = {one for layer in infos.keys() - left for one in had[layer]}
    for layer in left:
        if not (is_deferred_attention_layer(layer) or (had[layer] and had[layer] <= loaded)):
            _refuse(names[layer], "its own reload loads nothing into it")


def _check_sources(infos: Mapping[torch.nn.Module, Any], names: Mapping[torch.nn.Module, str]) -> None:
    """Check that the arguments of weight loaders have memory."""
    from torch.utils._pytree import tree_leaves

    for layer, info in infos.items():
        for _, given in info.loaded_weights:
            others = [one for key, one in given.arguments.items() if key != "param"]
            if any(getattr(one, "is_meta", False) for one in tree_leaves(others)):
                _refuse(names[layer], "its own reload makes it of a parameter of another module, which is empty then")


def _check_released(chosen: Any, modules: Modules, names: Mapping[torch.nn.Module, str]) -> None:
    """Check that modules still have the tensors they are prepared from: on AMX CPUs attention releases a weight."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for layer in modules or ():
        if any(one.is_meta for one in layer.parameters(recurse=False)):
            _refuse(names[layer], "it has no memory")
    for layer in filter(is_deferred_attention_layer, chosen.modules()):
        for name, child in layer.named_children():
            source = getattr(child, "base_layer", child)  # LoRA wraps it.
            weight = getattr(source, "weight", None)
            is_packed = getattr(source, "cpu_linear", linear) is not linear
            if weight is not None and not weight.numel() and not is_packed:
                _refuse(names[layer], f"it has released the weight of its {name}")


_defaults: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()
"""The values that vLLM gives parameters before they are loaded, by module and name."""
_MAX_DEFAULT_NBYTES = 2**16


def note_defaults(model: torch.nn.Module) -> None:
    """Record the values that parameters have before the load, where vLLM sets any. All other memory contains marks.

    If a checkpoint has no tensor for a parameter, such as an optional scale, this value remains. vLLM's reload
    allocates memory without it.
    """
    from relayout.engines.unwritten import unwritten

    marked = set(unwritten(model))
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        _defaults[module] = {
            name: one.detach().cpu().clone()
            for name, one in tensors.items()
            if one is not None
            and not one.is_meta
            and 0 < one.nbytes <= _MAX_DEFAULT_NBYTES
            and f"{prefix}.{name}".removeprefix(".") not in marked
        }


@contextmanager
def _dtype_of(model_config: Any) -> Iterator[None]:
    """Set torch's default dtype to that of the model, as in vLLM's first load, for scales created without a dtype."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _with_defaults(layerwise: Any) -> Iterator[None]:
    """Initialize parameters that vLLM's reload allocates with the values that they had before the first load."""
    original = layerwise.materialize_layer

    def materialize(layer: torch.nn.Module, info: Any) -> None:
        original(layer, info)
        names = {name for tensors in info.restore_metadata for name in tensors}  # All other parameters stay in memory.
        for name, default in _defaults.get(layer, {}).items():
            made = getattr(layer, name, None) if name in names else None
            if made is not None and (made.shape, made.dtype) == (default.shape, default.dtype):
                made.data.copy_(default)

    layerwise.materialize_layer = materialize
    try:
        yield
    finally:
        layerwise.materialize_layer = original


def _zeros() -> AbstractContextManager[Any]:
    """Zero memory that vLLM's reload allocates: it does not write padding, where the first load has zeros."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            return made.zero_() if func is torch.empty_strided else made

    return Zeros()


def loader_of(parameter: torch.Tensor) -> CodeType | None:
    """Return the code of the loader that fills a parameter: vLLM's reload repeats the calls of this code only."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Any = getattr(parameter, "weight_loader", default_weight_loader)
    while not isinstance(code := getattr(loader, "__code__", None), CodeType):
        inner = getattr(loader, "__wrapped__", None) or getattr(loader, "func", None)
        if inner is None:
            return None
        loader = inner
    return code


def check_padding(model: torch.nn.Module, modules: Collection[torch.nn.Module] | None) -> None:
    """Check that vLLM can prepare modules for kernels a second time.

    On a CPU it pads experts once, records their new size, and does not pad reloaded ones.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # Another version, with unknown behaviour.
        return
    for prefix, layer in model.named_modules():
        as_loaded = get_layerwise_info(layer).restore_metadata[0] if modules is None or layer in modules else {}
        for name, tensor in layer.named_parameters(recurse=False):
            was = as_loaded.get(name)
            if was is not None and tensor.device.type == "cpu" and _is_padded(was, tensor):
                what = f"was {list(was.shape)} and is padded to {list(tensor.shape)}: vLLM cannot reload this on a CPU"
                raise PlanError(f"{what}; start the engine again", tensor=f"{prefix}.{name}", code="unsupported")


def _is_padded(was: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if experts have become larger. A matrix packed into blocks has another number of axes."""
    return was.dim() == tensor.dim() == 3 and tensor.numel() > was.numel()


def _pack_experts(model: Any) -> None:
    """Pack experts for a CPU again: vLLM packs them when it creates their kernel, and it creates that only once.

    Seen in 0.32 and 0.33 (`UnquantizedFusedMoEMethod._setup_kernel`): its own reload leaves weights unpacked where the
    kernel reads packed ones.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        weight = getattr(layer, "w13_weight", None)
        if weight is not None and weight.device.type == "cpu" and "CPUUnquantizedExperts" in type(experts).__name__:
            experts.process_weights_after_loading(layer)


def pack_tied(model: Any) -> None:
    """Pack weights that two layers share for a CPU again: vLLM's reload packs them for one layer only."""
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    num_uses = Counter(id(layer.weight) for layer in packed)
    for layer in packed:
        if num_uses[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)
