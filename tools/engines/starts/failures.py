"""What a real vLLM of two ranks says of folders that cannot be loaded: it ends, with one clear line of each rank."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from engines.cases import Run, converted_of, source_of
from engines.environments import Environment
from engines.starts.starting import start


@dataclass(frozen=True)
class Failure:
    """A folder, what is done to it, and what must be said of it."""

    name: str
    damage: Callable[[Path, Path], None]
    """Of the folder; the other one is of another model."""
    says: str
    """A pattern, in one line of each rank that it concerns."""
    num_ranks: int = 2
    """That say so."""
    options: tuple[tuple[str, object], ...] = ()
    """For relayout."""


def _truncate(folder: Path, _other: Path) -> None:
    for file in folder.glob("model-rank-*"):
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)


def _flip(folder: Path, _other: Path) -> None:
    for file in folder.glob("model-rank-*"):
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            [byte] = opened.read(1)
            opened.seek(-1, 1)
            opened.write(bytes([byte ^ 1]))


def _remove(pattern: str) -> Callable[[Path, Path], None]:
    def remove(folder: Path, _other: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return remove


def _take(pattern: str) -> Callable[[Path, Path], None]:
    def take(folder: Path, other: Path) -> None:
        for file in other.glob(pattern):
            shutil.copy(file, folder)

    return take


FAILURES = (
    Failure("a rank file is missing", _remove("model-rank-1-*"), r"model-rank-1-part-0\.safetensors", 1),
    Failure("rank files are half copied", _truncate, r"model-rank-\d-part-0\.safetensors: .*bytes"),
    Failure("rank tables are missing", _remove("relayout.rank-*"), r"relayout\.rank-\d\.json\.zst"),
    Failure("the manifest is missing", _remove("relayout.json"), r"relayout\.json: is missing beside files of ranks"),
    Failure("rank files are another model's", _take("model-rank-*"), r"model-rank-\d-part-0\.safetensors"),
    # Here vLLM has its own words.
    Failure("config.json is another model's", _take("config.json"), "Following weights were not initialized"),
    Failure("a byte is damaged", _flip, "damaged: tensor '.*': its bytes have digest", options=(("verify", True),)),
)


def fail(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is wrong, what was found) of each whose name matches."""
    run = Run("llama")
    whole, other = (converted_of(source_of(family, work, wide=True), run.tp) for family in (run.family, "qwen3"))
    for failure in FAILURES:
        folder = work / "failures" / failure.name.replace(" ", "-")
        if fnmatch(failure.name, only):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            failure.damage(folder, other)
            yield failure.name, _outcome(environment, folder, run.settings, failure, work)
    failure = Failure(
        "experts are owned at another degree",
        _remove(""),
        "was converted with --expert-parallel for 4 ranks: run vLLM with",
    )
    if fnmatch(failure.name, only):
        run = Run("qwen3_moe", expert=True)
        wrong = converted_of(source_of(run.family, work, wide=True), 4, expert=True)
        yield failure.name, _outcome(environment, wrong, run.settings, failure, work)


def _outcome(
    environment: Environment, folder: Path, settings: dict[str, Any], failure: Failure, work: Path
) -> dict[str, Any]:
    settings = settings | {"load_format": "relayout", "model_loader_extra_config": dict(failure.options)}
    done = start(environment, folder, settings, work / f"{failure.name}.log")
    lines: dict[str, str] = {}
    for line in done.lines:
        # vLLM tells of an exception where it was raised, by rank, and then of its consequences.
        match = re.match(r"\((Worker\S*) pid=.*?((?:\w+\.)*\w+Error: .*)", line)
        if match and re.search(failure.says, match[2]):
            lines.setdefault(match[1], match[2].replace(f"{folder.parent}/", ""))
    return {
        "as_expected": done.code not in (0, None) and len(lines) == failure.num_ranks,
        "code": done.code,
        "seconds": round(done.seconds),
        "said": lines,
    }
