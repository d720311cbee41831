"""The table of vLLM's architectures: which were converted as vLLM's own class takes them, and why others were not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Found = Mapping[str, Any]

_MAX_CELL = 110
"""Characters of a reason."""

_HEAD = """# Plans observed from vLLM

Made by `tools/run engines --observe`; vLLM {vllm}, transformers {transformers}. For each architecture in the registry
of vLLM that transformers has a class for: a small checkpoint with the names of the hub is made, converted with `--plan
vllm` at TP 2 and 4, and loaded through the class and loader of vLLM from the source and from the converted folder.
*Same*: every parameter and buffer of every rank has the same bits, and no tensor was read whole. *Replicated*: what
ranks hold more than once at TP 4, of the bytes of the source. Small checkpoints are made of a configuration's defaults,
with small numbers; where that fails, nothing is known of the architecture itself.

"""


def read(file: Path) -> list[dict[str, Any]]:
    """Results; of an architecture the last one."""
    found = {}
    for line in file.read_text().splitlines():
        one = json.loads(line)
        one.pop("trace", None)
        found[one["architecture"]] = one
    return list(found.values())


def render(results: Sequence[Found], versions: Mapping[str, str]) -> str:
    """As Markdown."""
    text = _HEAD.format(**versions)
    for section in ("text", "multimodal"):
        mine = [one for one in results if one["section"] == section]
        made = [one for one in mine if not _has_no_class(one)]
        same = [one for one in made if _is_same(one)]
        modules = {one["module"] for one in same}
        text += (
            f"## {section.capitalize()}: {len(same)} of {len(made)} architectures the same ({len(modules)} modules)\n\n"
        )
        text += "| architecture | module | parameters at TP 2, 4 | replicated |\n|---|---|---|---|\n"
        for one in same:
            degrees = one["degrees"]
            counts = ", ".join(f"{degrees[tp]['parameters']:,}" for tp in ("2", "4"))
            text += (
                f"| {one['architecture']} | {one['module']} | {counts} | {100 * degrees['4']['replicated']:.1f} % |\n"
            )
        text += "\nNot:\n\n| architecture | at | because |\n|---|---|---|\n"
        for one in made:
            if not _is_same(one):
                text += f"| {one['architecture']} | {one['step']} | {_brief(one['error'])} |\n"
        absent = ", ".join(one["architecture"] for one in mine if _has_no_class(one))
        text += f"\nWithout a class in transformers, so that nothing could be made here: {absent or 'none'}.\n\n"
    return text.rstrip() + "\n"


def _has_no_class(found: Found) -> bool:
    return str(found.get("error", "")).startswith("LookupError")


def _is_same(found: Found) -> bool:
    return found.get("step") == "done" and "error" not in found


def _brief(error: str) -> str:
    text = re.sub(r"\s+", " ", error).removeprefix("PlanError: ").removeprefix("--plan vllm: ")
    return text.replace("|", "/")[:_MAX_CELL]
