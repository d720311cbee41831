"""A package called sglang, for a process of its own: as much of it as observing asks for, and a class with its layers.

Its class is that of `fake_vllm_package`, loaded as SGLang does it: scalars are filled in, and layers load by threads.
"""

from __future__ import annotations

MODULES = {
    "__init__": '__version__ = "0.0.fake"',
    "srt/__init__": "",
    "srt/configs/__init__": "",
    "srt/configs/load_config": """
        from types import SimpleNamespace
        class LoadConfig(SimpleNamespace):
            pass
    """,
    "srt/configs/model_config": """
        import json
        from pathlib import Path
        import torch
        class ModelConfig:
            dtype = torch.bfloat16
            @classmethod
            def from_server_args(cls, arguments, is_draft_model=False):
                made = cls()
                made.hf_config = json.loads(Path(arguments.model_path, "config.json").read_text())
                if is_draft_model and not made.hf_config.get("has_draft"):
                    raise ValueError("no draft model")
                made.is_draft_model = is_draft_model
                return made
    """,
    "srt/distributed/__init__": "",
    "srt/distributed/parallel_state": """
        import torch.distributed as dist
        def init_distributed_environment(backend, world_size, rank, local_rank, distributed_init_method):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        def initialize_model_parallel(backend):
            global group
            group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")  # Which would wait for others.
    """,
    "srt/layers/__init__": "",
    "srt/layers/dp_attention": "def initialize_dp_attention(server_args): pass",
    "srt/layers/moe/__init__": "",
    "srt/layers/moe/utils": "def initialize_moe_config(): pass",
    "srt/layers/rotary_embedding/__init__": "",
    "srt/layers/rotary_embedding/factory": """
        def get_rope(head_size, rotary_dim):
            raise RuntimeError("this machine has no kernel for it")
    """,
    "srt/models/__init__": "",
    "srt/models/registry": """
        class ModelRegistry:
            @staticmethod
            def get_supported_archs():
                import sglang.srt.models.odd
    """,
    "srt/models/odd": """
        import concurrent.futures
        import torch
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.rotary_embedding.factory import get_rope
        class OddForCausalLM(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
                self.rank, self.tp = (parallel_state.group.rank(), parallel_state.group.size())
                self.config, hidden = config, config["hidden_size"]
                self.rope = get_rope(4, 4)
                self.rope.cos_sin_cache.to("cpu")
                for name, shape in (
                    ("table", (64, hidden)), ("qkv", (3 * hidden // self.tp, hidden)), ("odd", (3, hidden)),
                    ("out", (hidden, hidden // self.tp)), ("scale", ()), ("expert_scales", (2,)),
                ):
                    setattr(self, name, torch.nn.Parameter(torch.empty(shape), requires_grad=False))
            def load_weights(self, weights):
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    futures = [pool.submit(self.load, name, tensor) for name, tensor in weights]
                    concurrent.futures.wait(futures)
                    [future.result() for future in futures]
                self.post_load_weights()
            def load(self, name, tensor):
                if name == "embed.weight":
                    self.table.copy_(tensor)
                elif name == "qkv.weight":
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
                    self.scale.data.fill_(tensor.item())
                elif name == "expert.scale":
                    self.expert_scales.data[1] = tensor.view(())
                elif name == "sum":
                    self.scale.data.fill_(tensor.sum())
            def post_load_weights(self):
                assert self.scale.item() > 0
        class OddForCausalLMNextN(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
                self.norm = torch.nn.Parameter(torch.empty(5), requires_grad=False)
            def load_weights(self, weights):
                for name, tensor in weights:
                    if name == "unused":
                        self.norm.copy_(tensor)
    """,
    "srt/model_loader/__init__": "",
    "srt/model_loader/utils": """
        from contextlib import nullcontext
        def set_default_torch_dtype(dtype):
            return nullcontext()
    """,
    "srt/model_loader/loader": """
        from sglang.srt.models.odd import OddForCausalLM, OddForCausalLMNextN
        def _get_quantization_config(model_config, load_config):
            return None
        def _initialize_model(model_config, load_config, quantization):
            return (OddForCausalLMNextN if model_config.is_draft_model else OddForCausalLM)(model_config.hf_config)
        class DefaultModelLoader:
            @staticmethod
            def load_weights_only(model, weights, target_device):
                model.load_weights(weights)
    """,
    "srt/runtime_context": """
        from types import SimpleNamespace
        SpawnRanks = SimpleNamespace
        def publish(arguments, role, ranks):
            assert (role, arguments.device) == ("scheduler", "cpu") and 0 <= ranks.world_rank < arguments.tp_size
    """,
    "srt/server_args": """
        import json
        from pathlib import Path
        class ServerArgs:
            def __init__(self, model_path, tp_size, ep_size, trust_remote_code, device, attention_backend, **settings):
                self.attention_backend = attention_backend
                self.model_path, self.tp_size, self.device = model_path, tp_size, device
                config = json.loads(Path(model_path, "config.json").read_text())
                assert ep_size == 1 and trust_remote_code == config.get("is_trusted", False)
                assert list(Path(model_path).glob("*.safetensors"))
                self.num_heads = config["num_attention_heads"]
            def resolve_once(self):
                if self.num_heads % self.tp_size:
                    raise ValueError(f"heads must be divisible by tensor parallel size ({self.tp_size})")
                if self.attention_backend is None:
                    raise AssertionError("One of the attention backends ['fa3'] is required, but got intel_amx")
    """,
}
