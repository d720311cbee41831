"""A package called vllm, for a process of its own: as much of it as observing asks for, and a class with its layers."""

from __future__ import annotations

MODULES = {
    "__init__": '__version__ = "0.0.fake"',
    "config": """
        from contextlib import nullcontext
        def set_current_vllm_config(config):
            return nullcontext()
        from types import SimpleNamespace
        class VllmConfig:
            def _validate_v1_model_runner(self):
                raise ValueError("this machine has no runner for it")
        class SpeculativeConfig:
            def __init__(self, target_model_config, **settings):
                if not target_model_config.hf_config.get("has_draft"):
                    raise ValueError("no draft model")
                hf_config = {**target_model_config.hf_config, "is_draft": True}
                self.draft_model_config = SimpleNamespace(**{**vars(target_model_config), "hf_config": hf_config})
    """,
    "distributed/__init__": "from vllm.distributed import parallel_state",
    "distributed/parallel_state": "_TP = _WORLD = _EP = None",
    "engine/__init__": "",
    "engine/arg_utils": """
        import json
        import sys
        from pathlib import Path
        from types import SimpleNamespace
        import torch
        from vllm.config import VllmConfig
        class EngineArgs:
            def __init__(self, model, tensor_parallel_size, enable_expert_parallel, trust_remote_code, **settings):
                self.config = json.loads(Path(model, "config.json").read_text())
                self.tp = tensor_parallel_size
                assert trust_remote_code == self.config.get("is_trusted", False)
                assert list(Path(model).glob("*.safetensors"))
            def create_engine_config(self):
                if "vllm.model_executor.models.odd" in sys.modules:
                    raise OSError("Can't load image processor")
                if self.config["num_attention_heads"] % self.tp:
                    raise ValueError(f"heads must be divisible by tensor parallel size ({self.tp})")
                VllmConfig()._validate_v1_model_runner()
                return SimpleNamespace(
                    model_config=SimpleNamespace(
                        hf_config=self.config, dtype=torch.bfloat16, quantization=None, model="model"
                    ),
                    parallel_config=SimpleNamespace(),
                    compilation_config=SimpleNamespace(static_forward_context={}),
                    load_config=None,
                )
    """,
    "platforms/__init__": """
        class Platform:
            def get_attn_backend_cls(self):
                raise NotImplementedError
            @classmethod
            def get_device_capability(cls, device_id=0):
                return None
        current_platform = Platform()
    """,
    "platforms/interface": """
        from typing import NamedTuple
        class DeviceCapability(NamedTuple):
            major: int
            minor: int
    """,
    "utils/__init__": "",
    "utils/torch_utils": """
        from contextlib import nullcontext
        def set_default_torch_dtype(dtype):
            return nullcontext()
    """,
    "model_executor/__init__": "",
    "model_executor/model_loader/__init__": "",
    "model_executor/model_loader/default_loader": """
        class DefaultModelLoader:
            def __init__(self, load_config):
                pass
            def load_weights(self, model, model_config):
                loaded = model.load_weights(self.get_all_weights(model_config, model))
                if loaded is not None:
                    self.track_weights_loading(model, loaded, quantized=False)
            def track_weights_loading(self, model, loaded, quantized):
                if missing := {name for name, _ in model.named_parameters()} - loaded:
                    raise ValueError(f"not in the checkpoint: {missing}")
    """,
    "model_executor/model_loader/utils": """
        from vllm.model_executor.models.odd import OddDraft, OddForCausalLM
        def get_model_architecture(model_config):
            return OddForCausalLM, "OddForCausalLM"
        def initialize_model(vllm_config, model_config):
            return (OddDraft if model_config.hf_config.get("is_draft") else OddForCausalLM)(model_config.hf_config)
    """,
    "model_executor/layers/__init__": "",
    "model_executor/layers/fused_moe/__init__": "",
    "model_executor/layers/fused_moe/oracle/__init__": "",
    "model_executor/layers/fused_moe/oracle/mxfp4": """
        from enum import Enum
        Mxfp4MoeBackend = Enum("Mxfp4MoeBackend", "MARLIN")
        def select_deepseek_v4_mxfp4_moe_backend(config):
            raise NotImplementedError("No MXFP4 MoE backend supports the deployment configuration.")
    """,
    "model_executor/models/__init__": "",
    "model_executor/models/registry": "",
    "model_executor/models/odd": """
        import torch
        from vllm.distributed import parallel_state
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import select_deepseek_v4_mxfp4_moe_backend
        from vllm.platforms import current_platform
        class OddForCausalLM(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
                self.rank, self.tp = parallel_state._TP.rank, parallel_state._TP.world_size
                self.config, hidden = config, config["hidden_size"]
                self.table = torch.nn.Parameter(torch.empty(64, hidden), requires_grad=False)
                self.qkv = torch.nn.Parameter(torch.empty(3 * hidden // self.tp, hidden), requires_grad=False)
                self.out = torch.nn.Parameter(torch.empty(hidden, hidden // self.tp), requires_grad=False)
                self.odd = torch.nn.Parameter(torch.empty(3, hidden), requires_grad=False)
                self.tower = torch.nn.Linear(256, 256).to(device="cpu", dtype=torch.bfloat16)
                self.backend, _ = select_deepseek_v4_mxfp4_moe_backend(config)
                assert current_platform.get_device_capability().major == 9
            def load_weights(self, weights):
                for name, tensor in weights:
                    if name == "embed.weight":
                        self.table.copy_(tensor)
                    elif name == "qkv.weight":  # Heads of q, k, v one after the other; turned into all q, all k, all v.
                        heads, width = self.config["num_attention_heads"], tensor.shape[1]
                        by_part = tensor.view(heads, 3, -1, width).transpose(0, 1).reshape(3, -1, width)
                        share = by_part.shape[1] // self.tp
                        self.qkv.copy_(by_part.narrow(1, self.rank * share, share).reshape(self.qkv.shape))
                    elif name == "out.weight":
                        share = self.out.shape[1]
                        self.out.copy_(tensor.narrow(1, self.rank * share, share))
                    elif name == "odd.weight":
                        self.odd.copy_(tensor.narrow(0, self.rank, 3))
                    elif name == "scale":
                        self.table.mul_(tensor.sum())
        class OddDraft(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
                self.norm, self.gate = (torch.nn.Parameter(torch.empty(5), requires_grad=False) for _ in range(2))
            def load_weights(self, weights):
                names = {"unused": "norm", "gate": "gate"}
                found = [(names[name], tensor) for name, tensor in weights if name in names]
                for name, tensor in found:
                    getattr(self, name).copy_(tensor)
                return {name for name, _ in found}
    """,
}
