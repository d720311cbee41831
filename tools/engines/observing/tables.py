"""The table of vLLM's architectures: which were converted as vLLM's own class takes them, and why others were not.

Also what plans say otherwise than was observed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.observed_slices import Checkpoint
from support.plan_comparing import differences_of_chosen

from relayout.errors import PlanError

Found = Mapping[str, Any]

_MAX_CELL = 110
"""Characters of a reason."""

_HEAD = """# Plans observed from vLLM

Made by `tools/run engines --step observe`; vLLM {vllm}, transformers {transformers}. For each architecture in the
registry of vLLM that transformers has a class for: a small checkpoint with the names of the hub is made, converted with
`--plan vllm` at TP 2 and 4, and loaded through the class and loader of vLLM from the source and from the converted
folder. *Same*: every parameter and buffer of every rank has the same bits, and no tensor was read whole. *Replicated*:
what ranks hold more than once at TP 4, of the bytes of the source. *Plan*: the built-in one, where the folder that it
makes is the same, too; no vLLM is needed for it. *only observed*: there is none, `--plan vllm` is the way. Small
checkpoints are made of a configuration's defaults, with small numbers; where that fails, nothing is known of the
architecture itself. *As X*: made by X of transformers, which has its names. What vLLM builds or looks for on a GPU
only, such as kernels and some backends of attention, is replaced by stubs, which do not touch parameters.

"""

_PARTS = """Vision and audio parts are cut as vLLM cuts them by default (`mm_encoder_tp_mode="weights"`): layers of its
parallel classes are, and whatever else it has whole on every rank is replicated, because each rank loads it:
convolutions of patches and spectrograms, tables of positions, norms, most projectors and Q-Formers, and towers that
are transformers' own modules or are written with plain layers (Gemma 3n and 4, Granite Speech, Audio Flamingo 3,
Qwen2 Audio, Dots 3 Note). In these small models such parts weigh much more than in those of the hub, where a projector
is a few per cent of the bytes. With `mm_encoder_tp_mode="data"` vLLM wants these parts whole: tensors that were cut
are then read whole, from the files of all ranks, which is slow, and is reported.

"""
"""Above the table of multimodal architectures."""


def read(file: Path) -> list[dict[str, Any]]:
    """Results; of an architecture the last one."""
    results = {}
    for line in file.read_text().splitlines():
        result = json.loads(line)
        result.pop("trace", None)
        results[result["architecture"]] = result
    return list(results.values())


def render(results: Sequence[Found], builtin: Mapping[str, Found], versions: Mapping[str, str]) -> str:
    """As Markdown.

    Args:
        results: of `registry.py`.
        builtin: by architecture what `registry.py` has found of the built-in plan.
        versions: of vllm and transformers.
    """
    text = _HEAD.format(**versions)
    for section in ("text", "multimodal"):
        mine = [result for result in results if result["section"] == section]
        made = [result for result in mine if not _has_no_class(result)]
        same = [result for result in made if _is_same(result)]
        modules = {result["module"] for result in same}
        text += (
            f"## {section.capitalize()}: {len(same)} of {len(made)} architectures the same ({len(modules)} modules)\n\n"
        )
        text += _PARTS if section == "multimodal" else ""
        verified = sum(_is_proven(builtin.get(result["architecture"], {})) for result in same)
        text += f"{verified} of them by a built-in plan.\n\n"
        text += "| architecture | module | parameters at TP 2, 4 | replicated | plan |\n|---|---|---|---|---|\n"
        for result in same:
            degrees = result["degrees"]
            counts = ", ".join(f"{degrees[tp]['parameters']:,}" for tp in ("2", "4"))
            replicated = f"{100 * degrees['4']['replicated']:.1f} %"
            plan = _plan_of(builtin.get(result["architecture"], {}))
            name, by = result["architecture"], result.get("by", result["architecture"])
            name += f" (as {by})" if by != name else ""
            text += f"| {name} | {result['module']} | {counts} | {replicated} | {plan} |\n"
        if len(same) < len(made):
            text += "\nNot:\n\n| architecture | at | because |\n|---|---|---|\n"
        for result in made:
            if not _is_same(result):
                text += f"| {result['architecture']} | {result['step']} | {_brief(result['error'])} |\n"
        absent = ", ".join(result["architecture"] for result in mine if _has_no_class(result))
        text += f"\nWithout a class in transformers, so that nothing could be made here: {absent or 'none'}.\n\n"
    return text.rstrip() + "\n"


def render_comparison(checkpoints: Sequence[Checkpoint]) -> str:
    """What built-in plans have otherwise than was observed, as Markdown."""
    wrong: dict[tuple[str, str, str], list[str]] = {}
    compared = {checkpoint.name for checkpoint in checkpoints}
    without = []
    for checkpoint in checkpoints:
        try:
            for difference in differences_of_chosen(checkpoint):
                names = wrong.setdefault((checkpoint.name, difference.what, str(list(difference.dims))), [])
                names.extend({re.sub(r"shard_\d+", "shard_*", difference.pattern)} - set(names))
        except PlanError:
            without.append(checkpoint.name)
    of_tables = sum(name.startswith("family:") for name in compared)
    of_forms = sum(name.startswith("form:") for name in compared)
    degrees = sorted({degree for checkpoint in checkpoints for degree in checkpoint.observed})
    sizes = {checkpoint.root.partition(", ")[2] for checkpoint in checkpoints}
    counts = f"{len(compared) - of_tables - of_forms} architectures, in up to {len(sizes)} sizes, of {of_tables} tables"
    ranks = ", ".join(map(str, degrees))
    text = f"""## Plans compared with what was observed

Made by `tools/run engines --step plans`: small checkpoints of {counts}
that plans were written from by hand, and of {of_forms} quantized forms of these, were observed at {ranks} ranks, where
vLLM accepts them. The slices of all
tensors were compared with those of the built-in plan. The tests do so again, without vLLM. No plan has another slice.
Of some parts beside the language model, whose numbers a plan does not know, and of tables that several tensors
continue, ranks hold the whole, where vLLM takes a part of this dimension, or (without one) whole tensors of some:

| architecture | dimension | tensors |
|---|---|---|
"""
    for (name, what, dims), patterns in sorted(wrong.items()):
        assert what == "more", (name, what, patterns)
        text += "".join(f"| {name} | {dims.strip('[]')} | `{pattern}` |\n" for pattern in sorted(patterns))
    return text + f"\nObserved, and without a built-in plan: {', '.join(sorted(set(without)))}.\n"


def _is_proven(result: Found) -> bool:
    degrees = [degree for degree in result.values() if isinstance(degree, dict)]
    return (
        bool(degrees)
        and "error" not in result
        and not any(degree["different"] or degree["whole_reads"] for degree in degrees)
    )


def _plan_of(result: Found) -> str:
    if not result:
        return "only observed"
    return f"`{result['plan']}`" if _is_proven(result) else f"`{result['plan']}` differs"


def _has_no_class(result: Found) -> bool:
    return str(result.get("error", "")).startswith("LookupError")


def _is_same(result: Found) -> bool:
    return result.get("step") == "done" and "error" not in result


def _brief(error: str) -> str:
    text = re.sub(r"\s+", " ", error).removeprefix("PlanError: ").removeprefix("--plan vllm: ")
    return text.replace("|", "/")[:_MAX_CELL]
