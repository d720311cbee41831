"""relayout.plan, families, globs and sizes: who holds what, written down by hand from the rules of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayout.catalogue import Catalogue, SourceTensor
from relayout.errors import FormatError, PlanError
from relayout.extents import Extent
from relayout.families import Rule, builtin_families, find_family, parse_family, read_family
from relayout.globs import collapse_numbers, compile_glob
from relayout.plan import Plan, even_ranges, make_plan, plan_for, vocabulary_ranges
from relayout.sizes import parse_size
from relayout.slicing import WHOLE

Shapes = Mapping[str, tuple[int, ...]]


def catalogue(shapes: Shapes, **config: Any) -> Catalogue:
    """A checkpoint of BF16 tensors, none of which is stored anywhere."""
    return Catalogue(
        root=Path("checkpoint"),
        files=(),
        tensors=tuple(SourceTensor(name, "BF16", shape, 0, Extent(0, 0)) for name, shape in shapes.items()),
        metadata={},
        config=config,
        index=None,
        side_files=(),
        left_out=(),
    )


def shapes_of(plan: Plan, shapes: Shapes, rank: int) -> dict[str, tuple[int, ...]]:
    return {name: slices[rank].shape(shape) for (name, shape), slices in zip(shapes.items(), plan.slices, strict=True)}


def held(plan: Plan, tensor: int = 0) -> list[tuple[int, int]]:
    """(start, length) of each rank, for a tensor of which each holds one range."""
    found = []
    for part in plan.slices[tensor]:
        assert part.ranges is not None
        [one] = part.ranges
        found.append(one)
    return found


# Ranges.


@pytest.mark.parametrize(
    ("dim", "num_ranks", "expected"),
    [
        (12, 1, [(0, 12)]),
        (12, 2, [(0, 6), (6, 6)]),
        (12, 4, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (3, 3, [(0, 1), (1, 1), (2, 1)]),
        (14336, 8, [(rank * 1792, 1792) for rank in range(8)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_even_cuts(dim: int, num_ranks: int, expected: list[tuple[int, int]]) -> None:
    assert even_ranges(dim, dim, num_ranks, "here") == expected


@pytest.mark.parametrize(
    ("kv_heads", "num_ranks", "heads_of_ranks"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 4)]),
        (8, 8, [(head, 1) for head in range(8)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (2, 8, [(0, 1)] * 4 + [(1, 1)] * 4),
        (1, 3, [(0, 1)] * 3),
        (4, 8, [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (3, 1)]),
        (3, 6, [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]),
    ],
)
def test_kv_heads_are_divided_or_repeated_on_neighbouring_ranks(
    kv_heads: int, num_ranks: int, heads_of_ranks: list[tuple[int, int]]
) -> None:
    ranges = even_ranges(kv_heads * 128, kv_heads, num_ranks, "here", replicate=True)
    assert ranges == [(first * 128, count * 128) for first, count in heads_of_ranks]


@pytest.mark.parametrize(
    ("kv_heads", "num_ranks", "replicate", "fitting"),
    [
        (8, 3, True, "1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64"),
        (8, 12, True, "1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64"),
        (8, 16, False, "1, 2, 4, 8"),
        (28, 8, False, "1, 2, 4, 7, 14, 28"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_degrees_that_fit(
    kv_heads: int, num_ranks: int, replicate: bool, fitting: str
) -> None:
    message = (
        rf"^here has {kv_heads} heads of 128 elements, not a multiple of {num_ranks} "
        rf"\(degrees that fit this tensor: {fitting}\)$"
    )
    with pytest.raises(PlanError, match=message):
        even_ranges(kv_heads * 128, kv_heads, num_ranks, "here", replicate=replicate)


@pytest.mark.parametrize(
    ("dim", "num_ranks", "expected"),
    [
        # A multiple of 64 x ranks: nothing special.
        (128256, 2, [(0, 64128), (64128, 64128)]),
        # Padded to 1024 for the split: 128 each, the last holds 104.
        (1000, 8, [(128 * rank, 128) for rank in range(7)] + [(896, 104)]),
        (1000, 4, [(0, 256), (256, 256), (512, 256), (768, 232)]),
        # GPT-2: padded to 50304.
        (50257, 4, [(0, 12576), (12576, 12576), (25152, 12576), (37728, 12529)]),
        (50257, 8, [(6288 * rank, 6288) for rank in range(7)] + [(44016, 6241)]),
        # 50304 is no multiple of 5: padded to 50560, a multiple of 64 x 5.
        (50257, 5, [(0, 10112), (10112, 10112), (20224, 10112), (30336, 10112), (40448, 9809)]),
        # 1024 is no multiple of 7: padded to 1344; the last rank holds nothing.
        (1000, 7, [(0, 192), (192, 192), (384, 192), (576, 192), (768, 192), (960, 40), (1000, 0)]),
        # Smaller than the padding: 16 each.
        (100, 8, [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16), (80, 16), (96, 4), (100, 0)]),
        (10, 4, [(0, 10), (10, 0), (10, 0), (10, 0)]),
        (64, 1, [(0, 64)]),
        (63, 1, [(0, 63)]),
    ],
)
def test_vocabulary_cuts(dim: int, num_ranks: int, expected: list[tuple[int, int]]) -> None:
    assert vocabulary_ranges(dim, num_ranks) == expected


@given(dim=st.integers(0, 5000), num_ranks=st.integers(1, 96))
@settings(deadline=None)
def test_vocabulary_ranges_partition_the_axis_in_equal_shares_but_for_the_end(dim: int, num_ranks: int) -> None:
    ranges = vocabulary_ranges(dim, num_ranks)
    assert len(ranges) == num_ranks
    assert [row for start, length in ranges for row in range(start, start + length)] == list(range(dim))
    share = ranges[0][1]
    num_full = dim // share if dim else 0
    assert [length for _, length in ranges] == ([share] * num_full + [dim - num_full * share] + [0] * num_ranks)[
        :num_ranks
    ]
    if dim > share:
        assert share * num_ranks % 64 == 0
        assert dim <= share * num_ranks < dim + 64 * num_ranks


@given(groups=st.integers(1, 24), share=st.integers(1, 5), group=st.integers(1, 7))
def test_even_ranges_partition_the_axis(groups: int, share: int, group: int) -> None:
    ranges = even_ranges(groups * share * group, groups * share, groups, "here")
    assert [i for start, length in ranges for i in range(start, start + length)] == list(range(groups * share * group))
    assert {length for _, length in ranges} == {share * group}


@given(
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    queries_per_kv_head=st.sampled_from([1, 2, 4, 7]),
    num_ranks=st.sampled_from([2, 3, 4, 6, 8, 16]),
    head_dim=st.sampled_from([1, 3, 16]),
)
@settings(max_examples=200, deadline=None)
def test_every_rank_holds_the_kv_heads_that_its_query_heads_use(
    kv_heads: int, queries_per_kv_head: int, num_ranks: int, head_dim: int
) -> None:
    heads = kv_heads * queries_per_kv_head
    attention = "model.layers.0.self_attn."
    source = catalogue(
        {attention + "q_proj.weight": (heads * head_dim, 5), attention + "k_proj.weight": (kv_heads * head_dim, 5)},
        model_type="llama",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        with pytest.raises(PlanError, match=rf"{attention}[qk]_proj.weight.* not a multiple of {num_ranks}"):
            plan_for(source, num_ranks)
        return
    plan = plan_for(source, num_ranks)
    queries = [range(start, start + length) for start, length in held(plan, 0)]
    keys = [range(start, start + length) for start, length in held(plan, 1)]
    assert sorted(row for rows in queries for row in rows) == list(range(heads * head_dim))
    for query_rows, key_rows in zip(queries, keys, strict=True):
        used = {row // head_dim // queries_per_kv_head for row in query_rows}
        assert set(key_rows) == {head * head_dim + i for head in used for i in range(head_dim)}


# Real models: facts from their published configurations.

LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN_2_5_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN_3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "vocab_size": 32768,
}


def real_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by the names in its published index."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.v_proj.weight": (key, hidden),
    }
    if config["model_type"] == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (key,),
            "self_attn.v_proj.bias": (key,),
        }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return {
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        **{
            f"model.layers.{number}.{name}": shape
            for number in range(config["num_hidden_layers"])
            for name, shape in layer.items()
        },
        "model.norm.weight": (hidden,),
    }


@pytest.mark.parametrize(
    ("config", "num_tensors", "num_ranks", "family", "expected"),
    [
        (
            LLAMA_3_1_8B,
            291,
            8,
            "llama",
            {
                "lm_head.weight": (16032, 4096),
                "embed_tokens.weight": (16032, 4096),
                "q_proj.weight": (512, 4096),
                "k_proj.weight": (128, 4096),
                "v_proj.weight": (128, 4096),
                "o_proj.weight": (4096, 512),
                "gate_proj.weight": (1792, 4096),
                "up_proj.weight": (1792, 4096),
                "down_proj.weight": (4096, 1792),
                "input_layernorm.weight": (4096,),
                "post_attention_layernorm.weight": (4096,),
                "norm.weight": (4096,),
            },
        ),
        (
            QWEN_2_5_7B,
            339,
            4,
            "llama",
            {
                "lm_head.weight": (38016, 3584),
                "embed_tokens.weight": (38016, 3584),
                "q_proj.weight": (896, 3584),
                "q_proj.bias": (896,),
                "k_proj.weight": (128, 3584),
                "k_proj.bias": (128,),
                "v_proj.weight": (128, 3584),
                "v_proj.bias": (128,),
                "o_proj.weight": (3584, 896),
                "gate_proj.weight": (4736, 3584),
                "up_proj.weight": (4736, 3584),
                "down_proj.weight": (3584, 4736),
                "input_layernorm.weight": (3584,),
                "post_attention_layernorm.weight": (3584,),
                "norm.weight": (3584,),
            },
        ),
        (
            QWEN_3_8B,
            399,
            16,  # Two ranks share a KV head.
            "qwen3",
            {
                "lm_head.weight": (9496, 4096),
                "embed_tokens.weight": (9496, 4096),
                "q_proj.weight": (256, 4096),
                "q_norm.weight": (128,),
                "k_proj.weight": (128, 4096),
                "k_norm.weight": (128,),
                "v_proj.weight": (128, 4096),
                "o_proj.weight": (4096, 256),
                "gate_proj.weight": (768, 4096),
                "up_proj.weight": (768, 4096),
                "down_proj.weight": (4096, 768),
                "input_layernorm.weight": (4096,),
                "post_attention_layernorm.weight": (4096,),
                "norm.weight": (4096,),
            },
        ),
        (
            MISTRAL_7B,
            291,
            2,
            "llama",
            {
                "lm_head.weight": (16384, 4096),
                "embed_tokens.weight": (16384, 4096),
                "q_proj.weight": (2048, 4096),
                "k_proj.weight": (512, 4096),
                "v_proj.weight": (512, 4096),
                "o_proj.weight": (4096, 2048),
                "gate_proj.weight": (7168, 4096),
                "up_proj.weight": (7168, 4096),
                "down_proj.weight": (4096, 7168),
                "input_layernorm.weight": (4096,),
                "post_attention_layernorm.weight": (4096,),
                "norm.weight": (4096,),
            },
        ),
    ],
    ids=["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "Mistral-7B-v0.3"],
)
def test_a_rank_of_a_real_model_holds_what_the_engines_cut_out(
    config: dict[str, Any],
    num_tensors: int,
    num_ranks: int,
    family: str,
    expected: dict[str, tuple[int, ...]],
) -> None:
    shapes = real_shapes(config)
    assert len(shapes) == num_tensors
    plan = plan_for(catalogue(shapes, **config), num_ranks)
    assert (plan.name, plan.num_ranks, len(plan.slices)) == (family, num_ranks, num_tensors)
    for rank in range(num_ranks):
        found = shapes_of(plan, shapes, rank)
        assert found == {name: expected[".".join(name.split(".")[-2:])] for name in shapes}


MODEL_TYPES = [model_type for family in builtin_families() for model_type in family.model_types]


def test_there_are_built_in_plans_and_each_model_type_is_in_just_one() -> None:
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma2"} <= set(MODEL_TYPES)
    assert len(set(MODEL_TYPES)) == len(MODEL_TYPES)
    assert [find_family(model_type).name for model_type in ("qwen2", "qwen3")] == ["llama", "qwen3"]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_built_in_plan_cuts_the_same_axes_as_the_plan_of_transformers(model_type: str) -> None:
    """transformers names modules, and leaves the vocabulary to the model class."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plan = plan_for(catalogue(shapes, **config.to_dict()), 2)
    assert config.base_model_tp_plan
    styles = {f"model.{pattern}": style for pattern, style in config.base_model_tp_plan.items()}

    def expected_axis(name: str) -> int | None:
        module, kind = name.rsplit(".", 1)
        style = next((style for pattern, style in styles.items() if fnmatchcase(module, pattern)), "")
        if style == "rowwise":
            return 1 if kind == "weight" else None
        return 0 if style == "colwise" or module in ("model.embed_tokens", "lm_head") else None

    axes = {
        name: None if slices[0].is_whole else slices[0].axis for name, slices in zip(shapes, plan.slices, strict=True)
    }
    assert axes == {name: expected_axis(name) for name in shapes}
    assert sum(axis is not None for axis in axes.values()) >= 1 + 2 * 7


# Requests that cannot be carried out.

SMALL: dict[str, tuple[int, ...]] = {"model.layers.0.mlp.up_proj.weight": (18944, 3584)}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def test_an_axis_that_does_not_divide_is_named_with_the_degrees_that_fit() -> None:
    message = (
        r"^tensor 'model.layers.0.mlp.up_proj.weight': axis 0 of \[18944, 3584\] has 18944 elements, "
        r"not a multiple of 3 \(degrees that fit this tensor: 1, 2, 4, 8, 16, 32, 37, 64\)$"
    )
    with pytest.raises(PlanError, match=message):
        plan_for(catalogue(SMALL, model_type="llama"), 3)


def test_heads_that_do_not_divide_are_named_with_their_tensor() -> None:
    message = (
        r"^tensor 'model.layers.0.self_attn.o_proj.weight': axis 1 of \[3584, 3584\] has 28 heads of 128 elements, "
        r"not a multiple of 8 \(degrees that fit this tensor: 1, 2, 4, 7, 14, 28\)$"
    )
    shapes = {"model.layers.0.self_attn.o_proj.weight": (3584, 3584)}
    with pytest.raises(PlanError, match=message):
        plan_for(catalogue(shapes, **QWEN_2_5_7B), 8)


@pytest.mark.parametrize("num_ranks", [-1, 0, 1025])
def test_a_degree_out_of_bounds_is_refused(num_ranks: int) -> None:
    with pytest.raises(PlanError, match=f"^{num_ranks} ranks, expected 1 to 1024$"):
        plan_for(catalogue(SMALL, model_type="llama"), num_ranks)


def test_an_unknown_model_type_is_named_and_the_ways_out() -> None:
    with pytest.raises(
        PlanError, match=r"no built-in plan for model type 'gpt_neox': .*--plan FILE.*built in: .*llama"
    ):
        plan_for(catalogue(SMALL, model_type="gpt_neox"), 2)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["llama"]}])
def test_a_checkpoint_without_model_type_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"config.json names no model_type: .*--plan FILE"):
        plan_for(catalogue(SMALL, **config), 2)


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt_neox"}, {"quantization_config": {"quant_method": "awq"}}])
def test_one_rank_needs_no_plan_and_holds_everything(config: dict[str, Any]) -> None:
    plan = plan_for(catalogue({"whatever": (3, 5), "scalar": ()}, **config), 1)
    assert plan == Plan("none", 1, ((WHOLE,), (WHOLE,)))


@pytest.mark.parametrize(
    ("quantisation", "method"), [({"quant_method": "awq", "bits": 4}, "awq"), ({"bits": 4}, "None"), ("fp8", "fp8")]
)
def test_a_quantised_checkpoint_is_refused_by_the_built_in_plans(quantisation: Any, method: str) -> None:
    with pytest.raises(PlanError, match=rf"weights are quantised \({method}\); plan 'llama' .*--plan FILE"):
        plan_for(catalogue(SMALL, model_type="llama", quantization_config=quantisation), 2)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.gate.weight", "h.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"],
)
def test_a_tensor_that_no_rule_names_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"^tensor '{name}': no rule of plan 'llama' names it$"):
        plan_for(catalogue({**SMALL, name: (8, 8)}, model_type="llama"), 2)


def test_a_tensor_without_the_axis_that_its_rule_cuts_is_refused() -> None:
    shapes = {"model.layers.0.self_attn.o_proj.weight": (64,)}
    with pytest.raises(PlanError, match=r"'model.layers.0.self_attn.o_proj.weight': shape \[64\] has no axis 1, which"):
        plan_for(catalogue(shapes, **LLAMA_3_1_8B), 2)


@pytest.mark.parametrize("value", [None, 0, -8, True, "8", 8.0, [8]])
def test_a_count_of_heads_that_is_no_positive_whole_number_is_refused(value: Any) -> None:
    source = catalogue({Q_PROJ: (64, 64)}, model_type="llama", num_attention_heads=value)
    with pytest.raises(PlanError, match=rf"'{Q_PROJ}': axis 0 .* config.json has no positive num_attention_heads"):
        plan_for(source, 2)


def test_without_kv_heads_every_head_has_its_own() -> None:
    source = catalogue({Q_PROJ.replace("q_proj", "k_proj"): (64, 8)}, model_type="llama", num_attention_heads=4)
    assert held(plan_for(source, 4)) == [(0, 16), (16, 16), (32, 16), (48, 16)]


@pytest.mark.parametrize(
    ("dim", "config", "message"),
    [
        (60, {"num_attention_heads": 8}, "60 elements are not 8 heads, which config.json declares"),
        (64, {"num_attention_heads": 8, "head_dim": 16}, "64 elements are not 8 heads of 16 elements, which config"),
        (64, {"num_attention_heads": 4, "head_dim": 8}, "64 elements are not 4 heads of 8 elements, which config"),
    ],
)
def test_a_shape_that_contradicts_the_configuration_is_refused(dim: int, config: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=rf"^tensor '{Q_PROJ}': axis 0 of \[{dim}, 8\]: {message}"):
        plan_for(catalogue({Q_PROJ: (dim, 8)}, model_type="llama", **config), 2)


# Plan files.


def write_plan(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_plan_file_is_used_in_place_of_the_built_in_one(tmp_path: Path) -> None:
    path = write_plan(
        tmp_path,
        """
        [sizes]
        heads = "n_head"
        [cut]
        "h.*.attn.{q,k}" = { columns = "heads" }
        "h.0.**" = "whole"
        "**" = { rows = "even" }
        """,
    )
    shapes = {"h.0.attn.q": (3, 8), "h.0.mlp.up": (3, 3), "wte": (6, 2), "h.1.attn.k": (1, 8)}
    plan = plan_for(catalogue(shapes, model_type="llama", n_head=2), 2, path)
    assert plan.name == path.name
    assert shapes_of(plan, shapes, 1) == {
        "h.0.attn.q": (3, 4),
        "h.0.mlp.up": (3, 3),
        "wte": (3, 2),
        "h.1.attn.k": (1, 4),
    }
    assert [part.starts(2) for part in plan.slices[0]] == [[0, 0], [0, 4]]


def test_a_plan_file_may_cut_quantised_weights(tmp_path: Path) -> None:
    path = write_plan(tmp_path, '[cut]\n"**" = { rows = "even" }')
    source = catalogue({"w": (4, 2)}, quantization_config={"quant_method": "fp8"})
    assert held(plan_for(source, 2, path)) == [(0, 2), (2, 2)]


def test_the_first_rule_that_matches_counts() -> None:
    family = parse_family('[cut]\n"a.*" = "whole"\n"a.b" = { rows = "even" }\n"**" = { columns = "even" }', "x", "x")
    assert [family.rule(name) for name in ("a.b", "a.b.c")] == [Rule("a.*", None, "even"), Rule("**", 1, "even")]
    assert parse_family('[cut]\n"a" = "whole"', "x", "x").rule("b") is None


def test_a_unit_whose_size_the_plan_does_not_name_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path, '[cut]\n"**" = { rows = "kv_heads" }')
    with pytest.raises(PlanError, match=r"cut by kv_heads, but config.json has no positive a key for 'kv_heads' in"):
        plan_for(catalogue({"w": (8, 2)}, num_key_value_heads=4), 2, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cut", "not valid TOML"),
        ('[cut]\n"a" = "whole"\n"a" = "whole"', "not valid TOML"),
        ("", r"a plan has a table \[cut\]"),
        ("[sizes]\nheads = 'n'", r"a plan has a table \[cut\]"),
        ("[cut]", r"a plan has a table \[cut\]"),
        ("cut = 'whole'", r"a plan has a table \[cut\]"),
        ("sizes = 3\n[cut]\nx = 'whole'", r"a plan has a table \[cut\]"),
        ("[cuts]\nx = 'whole'", "unknown key 'cuts', expected model_types, sizes, cut"),
        ("[cut]\nx = 'whole'\n[options]", "unknown key 'options'"),
        ("[cut]\nx = 'all'", "cut 'x': 'all' is not \"whole\" or"),
        ("[cut]\nx = 1", "cut 'x': 1 is not"),
        ("[cut]\nx = ['whole']", r"cut 'x': \['whole'\] is not"),
        ("[cut]\nx = {}", "cut 'x': {} is not"),
        ("[cut]\nx = { rows = 'head' }", r"cut 'x': {'rows': 'head'} is not .*even\|heads\|kv_heads\|vocabulary"),
        ("[cut]\nx = { row = 'even' }", "cut 'x': {'row': 'even'} is not"),
        ("[cut]\nx = { rows = 'even', columns = 'even' }", "cut 'x': .* is not"),
        ("[cut]\nx = { rows = ['even'] }", "cut 'x': .* is not"),
        ("[cut]\nx.y = { rows = 'even' }", "cut 'x': .* is not"),
        ("model_types = 3\n[cut]\nx = 'whole'", "model_types is not a string or a list of strings"),
        ("[sizes]\nheads = [1]\n[cut]\nx = 'whole'", "sizes.heads is not a string or a list of strings"),
        (b"[cut]\n'gr\xf6\xdfe' = 'whole'", "not UTF-8 at byte 9"),
    ],
)
def test_a_bad_plan_file_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = write_plan(tmp_path, text)
    with pytest.raises(FormatError, match=f"mine.toml: {message}") as caught:
        plan_for(catalogue(SMALL), 2, path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_plan_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot be read: |not a regular file"):
        plan_for(catalogue(SMALL), 2, tmp_path / name)


@pytest.mark.parametrize("family", builtin_families(), ids=lambda family: str(family.name))
def test_a_built_in_plan_can_be_given_as_a_file_too(family: Any) -> None:
    import relayout

    read = read_family(Path(relayout.__file__).parent / "plans" / f"{family.name}.toml")
    assert read.rules == family.rules
    assert read.rules


def test_making_a_plan_of_one_rank_does_not_look_at_the_rules() -> None:
    family = parse_family('[cut]\n"a" = "whole"', "x", "x")
    assert make_plan(catalogue({"b": (3,)}), 1, family) == Plan("none", 1, ((WHOLE,),))


# Patterns and sizes.


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.b", ["a.b"], ["a_b", "a.b.c", "x.a.b", "a.b\n", "A.b"]),
        ("a.*.c", ["a.0.c", "a.b-1.c", "a.\n.c"], ["a..c", "a.b.b.c", "a.c"]),
        ("a*c", ["abc"], ["ac", "a.c"]),
        ("a.**", ["a.", "a.b", "a.b.c", "a.b\nc"], ["a", "ab"]),
        ("**.w", [".w", "a.b.w"], ["w", "a.ww"]),
        ("**", ["", "a", "a.b\nc"], []),
        ("l.{q,k}.w", ["l.q.w", "l.k.w"], ["l.v.w", "l.q,k.w", "l.qk.w"]),
        ("l.{q}", ["l.q"], ["l.{q}"]),
        ("l.{a.b,*}", ["l.a.b", "l.*"], ["l.axb", "l.c"]),
        ("a{b", ["a{b"], ["ab"]),
        ("a+(b)[c]|d", ["a+(b)[c]|d"], ["aab", "d"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = compile_glob(pattern)
    assert [name for name in matching + others if compiled.match(name)] == matching


@given(st.text(st.characters(exclude_characters="*{"), max_size=8), st.text(max_size=8))
def test_a_pattern_without_wildcards_means_just_itself(name: str, other: str) -> None:
    assert compile_glob(name).match(name)
    assert bool(compile_glob(name).match(other)) == (name == other)


@pytest.mark.parametrize(
    ("name", "collapsed"),
    [
        ("model.layers.12.mlp.experts.7.w1", "model.layers.*.mlp.experts.*.w1"),
        ("0.a.0", "*.a.*"),
        ("10.20.30", "*.*.*"),
        ("w1.x2.3d.d3", "w1.x2.3d.d3"),
        ("", ""),
        ("7", "*"),
    ],
)
def test_names_of_all_layers_collapse_to_one_pattern(name: str, collapsed: str) -> None:
    assert collapse_numbers(name) == collapsed
    assert compile_glob(collapsed).match(name)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("64K", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        (" 64 kib ", 65536),
        ("64KB", 64000),
        ("2M", 2097152),
        ("2MiB", 2097152),
        ("2mb", 2000000),
        ("48GB", 48 * 10**9),
        ("48G", 48 * 2**30),
        ("1TiB", 2**40),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "K", "-1", "+1", "1.5G", "4 096", "12XB", "1KiBB", "0x10", "1e9", "one", "²", "1i"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is not a size; write bytes, or a number with K, KiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
