"""Fills models of transformers by `relayout.load(into=)`, and compares each tensor with its own `from_pretrained`.

Every family of the installed transformers that can be built with small sizes: saved and filled as it is, from the
checkpoint of its base and of its head, tied and untied, in BF16, with names of older releases, and from converted
folders. Each outcome is `equal`, or `refused` with the sentence; `different` and `failed` are bugs. A refusal is
`needless` where transformers fills all of the model from the same folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import relayout
from relayout.errors import RelayoutError

HEADS = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM", "MASKED_LM", "CTC", "IMAGE_CLASSIFICATION"),
    *("OBJECT_DETECTION", "SPEECH_SEQ_2_SEQ", "SEQUENCE_CLASSIFICATION", "PRETRAINING", "TEXT_TO_WAVEFORM"),
)
"""The mappings of transformers' auto classes that heads are taken from; of a family, the first one."""
MAX_ELEMENTS = 16 * 10**6
SECONDS = 240
"""The longest that a family may take."""
SIZES = {
    r"^(hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|projection_dim|width|hidden_dim|model_dim)$": 32,
    r"(^|_)(hidden_size|hidden_dim|embed_dim|projection_dim|proj_dim|lora_rank)$": 32,
    r"(^|_)(intermediate_size|intermediate_dim|ffn_dim|ffn_size|d_ff|n_inner|mlp_dim|ff_dim|feedforward_dim)$": 64,
    r"(?<!extract)(^|_)(layers|n_layer|depth|num_blocks|num_layers|n_layers)$": 2,
    r"(key_value_heads|kv_heads)$": 2,
    r"(^|_)(heads|n_head|n_heads|num_heads)$": 4,
    r"^(emb_dim)$": 32,
    r"^(head_dim|d_head|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|d_kv|attention_head_dim)$": 8,
    r"(^|_)vocab_size(_per_layer_input)?$": 120,
    r"(^|_)(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$": 4,
    r"(experts_per_tok|moe_k|moe_topk|num_experts_per_token)$": 2,
    r"^(n_group|topk_group)$": 1,
    r"(^|_)(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|max_seq_len)$": 64,
    r"(^|_)image_size$": 32,
    r"(^|_)patch_size$": 8,
}
"""Patterns in the names of sizes, and what a model is built with."""
LEFT = "out_features", "out_indices", "stage_names", "per_layer_config"
"""What follows from the number of layers."""


@dataclass(frozen=True)
class Outcome:
    """What became of one arrangement."""

    family: str
    arrangement: str
    outcome: str
    """equal, refused, needless, different, failed, or stock: transformers itself failed."""
    said: str = ""


@dataclass(frozen=True)
class Arrangement:
    """A model that is saved, and one that is filled with what was saved."""

    name: str
    source: type[Any]
    target: type[Any]
    is_tied: tuple[bool | None, bool | None] = (None, None)
    """Whether embedding and head are one in each of the two; None: as the configuration says."""
    dtype: str = "float32"
    rename: Callable[[str], str] | None = None
    """Makes other names of those that were saved."""
    tp: int | None = None
    """The degree of a conversion that is filled from; None: the plain folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types of transformers; default: all")
    parser.add_argument("--out", type=Path, help="where all outcomes go, as JSON")
    options = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = list[Outcome]()
    for family in options.families or families():
        found += tried(family)
        if options.out:
            options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
        last = Counter(one.outcome for one in found if one.family == family)
        print(f"{family}: {', '.join(f'{count} {outcome}' for outcome, count in last.items()) or 'not built'}")
        for one in found:
            if one.family == family and one.outcome in ("different", "failed", "needless"):
                print(f"    {one.outcome}: {one.arrangement}: {one.said}")
    show(found)


def show(found: list[Outcome]) -> None:
    """Print the table."""
    built = {one.family for one in found}
    print(f"\n{len(found)} arrangements of {len(built)} families")
    for outcome, count in Counter(one.outcome for one in found).most_common():
        print(f"{count:6} {outcome}")
    kinds = Counter(re.sub(r"'[^']*'( and \d+ more)?(, )?|/\S+|\[[^]]*\]|\d+", "…", one.said) for one in refused(found))
    for said, count in kinds.most_common():
        print(f"{count:6} refused: {said}")


def refused(found: list[Outcome]) -> list[Outcome]:
    return [one for one in found if one.outcome in ("refused", "needless")]


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def tried(family: str) -> list[Outcome]:
    """The outcomes of a family's arrangements, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(family, theirs))
    child.start()
    theirs.close()
    found = list[Outcome]()
    with contextlib.suppress(EOFError):
        while ours.poll(SECONDS):
            found.append(ours.recv())
    child.kill()
    child.join()
    return found


def send(family: str, pipe: Any) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        for outcome in outcomes(family):
            pipe.send(outcome)


def outcomes(family: str) -> Iterator[Outcome]:
    classes = classes_of(family)
    if not classes:
        return
    with tempfile.TemporaryDirectory() as place:
        for arrangement in arrangements(*classes):
            with tempfile.TemporaryDirectory(dir=place) as folder:
                try:
                    if (found := outcome(family, arrangement, Path(folder))) is not None:
                        yield found
                except Exception as error:
                    said = f"{type(error).__name__}: {str(error)[:300]}"
                    yield Outcome(family, arrangement.name, "failed", said)


def classes_of(family: str) -> tuple[Any, list[type[Any]]] | None:
    """A small configuration, and the classes of models that can be built with it: the base, and heads."""
    import transformers
    from transformers.models.auto import modeling_auto

    heads = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(family) for head in HEADS]
    names = [modeling_auto.MODEL_MAPPING_NAMES[family], *heads]
    plain = {name: None for one in names if one for name in ([one] if isinstance(one, str) else one)}
    try:
        config = small(transformers.AutoConfig.for_model(family))
        classes = [getattr(transformers, name) for name in plain]
        return config, [one for one in classes if is_small(one, config)][:2]
    except Exception:
        return None


def small(config: Any) -> Any:
    def shrunk(values: dict[str, Any]) -> dict[str, Any]:
        values = {key: value for key, value in values.items() if key not in LEFT}
        for key, value in list(values.items()):
            if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
                values[key] = shrunk(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                size = next((size for pattern, size in SIZES.items() if re.search(pattern, key)), value)
                values[key] = value % 100 if key.endswith("_token_id") or key.endswith("_token_index") else size
            elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
                values[key] = value[:2]
            elif isinstance(value, list | tuple) and all(type(one) is int and one >= 32 for one in value):
                values[key] = [one // 8 for one in value]
        return values

    return type(config).from_dict(shrunk(config.to_dict()))


def is_small(model_class: type[Any], config: Any) -> bool:
    """Whether a model can be built, and is not too large."""
    import torch

    try:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
    except Exception:
        return False
    return 0 < sum(one.numel() for one in model.state_dict().values()) <= MAX_ELEMENTS


def arrangements(config: Any, classes: list[type[Any]]) -> Iterator[Arrangement]:
    for one in classes:
        yield Arrangement(f"{one.__name__}", one, one)
        for name, rename in renamings(one).items():
            yield Arrangement(f"{one.__name__}, {name}", one, one, rename=rename)
    for source in classes:
        for target in classes:
            if source is not target:
                yield Arrangement(f"{target.__name__} from {source.__name__}", source, target)
    for one in classes[1:2]:
        yield Arrangement(f"{one.__name__}, BF16", one, one, dtype="bfloat16")
        for tp in (1, 2):
            yield Arrangement(f"{one.__name__}, tp {tp}", one, one, tp=tp)
        if hasattr(config.get_text_config(), "tie_word_embeddings") and getattr(one, "_tied_weights_keys", None):
            for pair in ((True, True), (True, False), (False, True), (False, False)):
                yield Arrangement("{}, tied {}, filled {}".format(one.__name__, *pair), one, one, is_tied=pair)
            for is_tied in (True, False):
                name = f"{one.__name__} from {classes[0].__name__}, tied {is_tied}"
                yield Arrangement(name, classes[0], one, is_tied=(is_tied, is_tied))


def renamings(model_class: type[Any]) -> dict[str, Callable[[str], str]]:
    """Names of older releases."""
    prefix = f"{model_class.base_model_prefix}."
    made: dict[str, Callable[[str], str]] = {
        "gamma": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ),
        "weight_g": lambda name: name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ),
    }
    if len(prefix) > 1:
        made["without prefix"] = lambda name: name.removeprefix(prefix)
        made["with prefix"] = lambda name: prefix + name.removeprefix(prefix)
    return made


def built(model_class: type[Any], config: Any, is_tied: bool | None, dtype: str, seed: int) -> Any:
    """A model with values of its own in each tensor of its state dict."""
    import torch

    config = copy.deepcopy(config)
    if is_tied is not None:
        for one in (config, config.get_text_config()):
            one.tie_word_embeddings = is_tied
    model = model_class._from_config(config, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.25)
            elif name.endswith("num_batches_tracked"):
                tensor.fill_(seed)
    return model


def outcome(family: str, one: Arrangement, folder: Path) -> Outcome | None:
    """Save, fill, and compare; None: the renaming changes nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    config = small(__import__("transformers").AutoConfig.for_model(family))
    model = built(one.target, config, one.is_tied[1], one.dtype, 2)

    def found(what: str, said: object = "") -> Outcome:
        return Outcome(family, one.name, what, str(said))

    try:
        built(one.source, config, one.is_tied[0], one.dtype, 1).save_pretrained(folder / "plain")
        if one.rename is not None:
            tensors = load_file(folder / "plain" / "model.safetensors")
            renamed = {one.rename(name): tensor for name, tensor in tensors.items()}
            if renamed.keys() == tensors.keys():
                return None
            save_file(renamed, folder / "plain" / "model.safetensors", {"format": "pt"})
        dtype = getattr(torch, one.dtype)
        want, report = one.target.from_pretrained(
            folder / "plain", config=copy.deepcopy(model.config), dtype=dtype, output_loading_info=True
        )
    except Exception as error:
        return found("stock", f"{type(error).__name__}: {str(error)[:200]}")
    is_whole = not any(report[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"))
    source = folder / "plain"
    if one.tp is not None:
        source = folder / "converted"
        try:
            relayout.convert(folder / "plain", source, tp=one.tp)
        except RelayoutError as error:
            return found("no plan", error)
    try:
        relayout.load(source, into=model)
    except RelayoutError as error:
        said = str(error).replace(str(folder), "")
        return found("failed" if "\n" in said else "needless" if is_whole else "refused", said)
    finally:
        shutil.rmtree(folder / "plain")
    if report["missing_keys"] or report["mismatched_keys"]:
        return found("different", f"filled, but transformers lacks {sorted(report['missing_keys'])[:3]}")
    stock, filled = want.state_dict(), model.state_dict()
    other = [name for name in stock.keys() | filled.keys() if not is_same(stock.get(name), filled.get(name))]
    return found("different" if other else "equal", sorted(other)[:3] if other else "")


def is_same(one: Any, other: Any) -> bool:
    import torch

    return one is not None and other is not None and torch.equal(one.double(), other.double())


if __name__ == "__main__":
    main()
