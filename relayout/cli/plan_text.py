"""Text output of `plans --check`: where there is a draft, all of it is a valid plan file, with the rest as comments."""

from __future__ import annotations

import textwrap

from relayout.commands.plan_check import PlanCheck
from relayout.errors import escape_controls

_WIDTH = 80


def print_check(found: PlanCheck) -> None:
    """Print the result of `plans --check`."""
    mark = "" if found.draft is None else "# "
    model = "no model_type in config.json" if found.model_type is None else f"model type {found.model_type}"
    lines = [f"{found.path}: {found.num_tensors:,} tensors, {model}, {_plan(found)}"]
    missing = sum(kind.count for kind in found.kinds)
    if found.ok:
        lines.append("every tensor has a rule")
    elif found.draft is not None:
        lines.append(f"{missing:,} tensors of {len(found.kinds)} kinds have no rule:")
        for kind in found.kinds:
            shape = " x ".join(map(str, kind.shape)) or "scalar"
            lines.append(f"  {kind.count:>6,}  {kind.pattern}  ({shape})")
    if found.draft_error is not None:
        lines.append(found.draft_error)
    lines += [
        f"check {kind.pattern}: cut evenly, but config.json has {kind.num_heads} heads of keys and values: is it by"
        ' = "kv_heads"?'
        for kind in found.kinds
        if kind.num_heads is not None
    ]
    lines += _degrees(found)
    if not found.ok:
        lines += _ways(found)
    for line in lines:
        indent = " " * 10 if line.startswith("  ") else "  "
        wrapped = textwrap.wrap(
            escape_controls(line),
            _WIDTH,
            initial_indent=mark,
            subsequent_indent=mark + indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        print("\n".join(wrapped))
    if found.draft is not None:
        print(f"\n{found.draft}", end="")
    print(end="", flush=True)


def _plan(found: PlanCheck) -> str:
    return "no plan is built in for it" if found.plan is None else f"plan {found.plan}"


def _degrees(found: PlanCheck) -> list[str]:
    what = "the draft" if found.draft is not None else "the plan"
    good = [str(degree) for degree, refusal in found.degrees.items() if refusal is None]
    bad = {str(degree): refusal for degree, refusal in found.degrees.items() if refusal is not None}
    lines = [f"{what} can be applied at --tp {', '.join(good)}"] if good else []
    if bad:
        first = next(iter(bad))
        lines.append(f"not at --tp {', '.join(bad)}; at {first}: {bad[first]}")
    return lines


def _ways(found: PlanCheck) -> list[str]:
    here = "vLLM is installed here" if found.has_vllm else "where vLLM is installed"
    return [
        f"{here}: `relayout convert SRC --tp N --plan vllm` cuts as its own weight loaders do, and"
        " `relayout plans --observe SRC` writes that as a plan",
        "`relayout plans --check SRC --plan FILE` checks a plan of yours",
    ]
