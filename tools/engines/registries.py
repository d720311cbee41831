"""Reads which architectures releases of the engines register, and the types of their models, from wheels.

Nothing of a wheel is imported or unpacked: the registries are literals in its code. `tools/run engines --step
registries` downloads the wheels of `RELEASES` once and writes `tools/results/registries.json`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from engines.environments import ROOT

RESULTS = ROOT / "tools" / "results" / "registries.json"

RELEASES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("0.33.0", "0.28.0", "0.23.0", "0.17.0"),
    "sglang": ("0.5.23", "0.5.16", "0.5.12", "0.5.8"),
}
"""The newest release of each engine, and older ones, by which an architecture is new."""
TRANSFORMERS = "5.23.0"
"""The release whose types of models are read."""

_OF_VLLM = "vllm/model_executor/models/registry.py"
_OF_SGLANG = "sglang/srt/models/"
_CONFIGS = ("vllm/transformers_utils/configs/", "sglang/srt/configs/")
_AUTO = tuple(
    f"transformers/models/auto/{name}.py" for name in ("auto_mappings", "configuration_auto", "modeling_auto")
)

_GENERATING = ("text_generation", "multimodal", "transformers_supported")
"""Sections of vLLM's registry with models that generate text."""
_NOT_GENERATING = re.compile(
    r".*(NextN|MTP|Eagle|DFlash|DSpark|Dspark|Draft|Assistant|Reward|Classification|Embedding|Bert|Contriever|VisionModel).*"
    r"|Transformers.*"
)
"""Architectures of SGLang, which has no sections, that draft, embed or classify; and its backends for all others."""

_TYPES: Mapping[str, tuple[str, ...]] = {
    "DeepseekV32ForCausalLM": ("deepseek_v32",),
    "DeepseekV41ForCausalLM": ("deepseek_v41",),
    "DeepseekV4ForConditionalGeneration": ("deepseek_v4_vl",),
    "Glm5NextForCausalLM": ("glm5_next",),
    "KimiK25ForConditionalGeneration": ("kimi_k25",),
    "KimiK3ForCausalLM": ("kimi_k3",),
    "KimiK3ForConditionalGeneration": ("kimi_k3",),
    "LongcatFlashForCausalLM": ("longcat_flash",),
    "LongcatFlashNgramForCausalLM": ("longcat_flash",),
    "MiMoV2ForCausalLM": ("mimo_v2",),
    "MiMoV2OmniForCausalLM": ("mimo_v2",),
    "MiniMaxM3SparseForCausalLM": ("minimax_m3",),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl",),
    "MistralLarge3ForCausalLM": ("mistral_large_3",),
    "Qwen2_5OmniModel": ("qwen2_5_omni",),
    "Step3p5ForCausalLM": ("step3p5",),
    "Step3p7ForConditionalGeneration": ("step3p7",),
}
"""Types of models, from the hub, where the names in the packages do not lead to them."""


def is_generating(architecture: str, section: str) -> bool:
    """Return True if the architecture generates text.

    Args:
        architecture: its name.
        section: of vLLM's registry; empty if only SGLang registers it.
    """
    return section in _GENERATING if section else _NOT_GENERATING.fullmatch(architecture) is None


def of_vllm(wheel: ZipFile) -> dict[str, tuple[str, str]]:
    """Return section and module of each architecture that a release of vLLM registers."""
    found = {}
    for node in ast.parse(wheel.read(_OF_VLLM)).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if not isinstance(target, ast.Name) or not isinstance(node.value, ast.Dict):  # type: ignore[union-attr]
            continue
        section = re.fullmatch(r"_([A-Z_]+)_MODELS", target.id)
        if section is None or re.search(r"BACKEND|PREVIOUSLY|OOT", target.id):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):  # type: ignore[union-attr]
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                found.setdefault(str(key.value), (section[1].lower(), str(ast.literal_eval(value.elts[0]))))
    return found


def of_sglang(wheel: ZipFile) -> dict[str, tuple[str, str]]:
    """Return the module of each architecture that a release of SGLang registers, by what it assigns to `EntryClass`."""
    found = {}
    for name in wheel.namelist():
        if name.startswith(_OF_SGLANG) and name.endswith(".py"):
            module = name.removeprefix(_OF_SGLANG).removesuffix(".py")
            found.update(dict.fromkeys(_entry_classes(ast.parse(wheel.read(name))), ("", module)))
    return found


def _entry_classes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        added: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "EntryClass" for target in targets) and node.value:
                added = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            added = node.args if getattr(node.func.value, "id", "") == "EntryClass" else []
        yield from (name.id for value in added for name in ast.walk(value) if isinstance(name, ast.Name))


def types_of_transformers(wheel: ZipFile) -> dict[str, set[str]]:
    """Return the types of models of each architecture in the mappings of transformers."""

    def is_class(name: Any) -> bool:
        return isinstance(name, str) and re.search(r"For[A-Z]|Model\b", name) is not None

    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in set(_AUTO) & set(wheel.namelist()):
        for node in ast.walk(ast.parse(wheel.read(file))):
            if isinstance(node, ast.Tuple) and len(node.elts) == 2:
                try:
                    model_type, classes = ast.literal_eval(node)
                except ValueError:
                    continue
                if is_class(model_type):
                    continue  # The two classes of one type.
                for cls in filter(is_class, classes if isinstance(classes, tuple) else (classes,)):
                    found[cls].add(str(model_type))
    return found


def types_of_engine(wheel: ZipFile) -> dict[str, set[str]]:
    """Return the types of an engine's own classes of configurations, by the name without `Config`, in lower case."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in wheel.namelist():
        if file.startswith(_CONFIGS) and file.endswith(".py"):
            for node in ast.walk(ast.parse(wheel.read(file))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    found[_stem(node.name)].update(_model_type(node))
    return found


def _model_type(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "model_type" for target in targets):
            value = node.value  # type: ignore[union-attr]
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
                yield value.value


def _stem(name: str) -> str:
    return re.sub(r"(For\w+|Model|LMHeadModel|Config)$", "", name).lower().replace("_", "")


def read(wheels: Mapping[str, Path]) -> dict[str, Any]:
    """Return what is in the wheels, as JSON.

    Args:
        wheels: by requirement, of all `RELEASES` and of transformers.
    """
    with ZipFile(wheels[f"transformers=={TRANSFORMERS}"]) as wheel:
        types = types_of_transformers(wheel)
    own: defaultdict[str, set[str]] = defaultdict(set)
    architectures: dict[str, dict[str, Any]] = {}
    for engine, versions in RELEASES.items():
        registries = []
        for version in versions:
            with ZipFile(wheels[f"{engine}=={version}"]) as wheel:
                registries.append(of_vllm(wheel) if engine == "vllm" else of_sglang(wheel))
                if version == versions[0]:
                    for stem, found in types_of_engine(wheel).items():
                        own[stem] |= found
        for name, (section, module) in registries[0].items():
            since = next((number for number, old in enumerate(registries) if name not in old), len(versions)) - 1
            row = architectures.setdefault(name, {"section": section})
            row[engine] = {"module": module, "since": versions[since] if since < len(versions) - 1 else ""}
    for name, row in architectures.items():
        found = types.get(name, set()) | {*_TYPES.get(name, ())}
        row["model_types"] = sorted(found or own.get(_stem(name), set()))
    return {"releases": RELEASES, "transformers": TRANSFORMERS, "architectures": architectures}


def write(home: Path) -> None:
    """Download the wheels that are not in the folder yet, and write the results."""
    wanted = [f"{engine}=={version}" for engine, versions in RELEASES.items() for version in versions]
    wheels = {one: _wheel(one, home / "wheels") for one in (*wanted, f"transformers=={TRANSFORMERS}")}
    RESULTS.write_text(json.dumps(read(wheels), indent=1, sort_keys=True) + "\n")


def _wheel(requirement: str, folder: Path) -> Path:
    pattern = f"{requirement.replace('==', '-')}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        subprocess.run(command, check=True)
    return next(folder.glob(pattern))
