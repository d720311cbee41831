"""What a real vLLM of two ranks says of folders that cannot be loaded: it ends, with one clear line of each rank."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import relayout
from engines.cases import Run, converted_of, source_of
from engines.environments import Environment
from engines.starts.starting import start

LLAMA = Run("llama")


@dataclass(frozen=True)
class Failure:
    """A folder, how it is damaged, and what must be said of it."""

    name: str
    damage: Callable[[Path, Path], object]
    """Of the folder; the other one is of another model."""
    says: str
    """A pattern, in one line of each rank that it concerns."""
    num_ranks: int = 2
    """That say so."""
    options: tuple[tuple[str, object], ...] = ()
    """For relayout."""
    run: Run = LLAMA
    degree: int = 2
    """Of the folder."""


def _truncate(folder: Path, _other: Path) -> None:
    for file in folder.glob("model-rank-*"):
        os.truncate(file, file.stat().st_size // 2)


def _flip(folder: Path, _other: Path) -> None:
    for file in folder.glob("model-rank-*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def _remove(pattern: str) -> Callable[[Path, Path], object]:
    return lambda folder, _other: [file.unlink() for file in folder.glob(pattern)]


def _take(pattern: str) -> Callable[[Path, Path], object]:
    return lambda folder, other: [shutil.copy(file, folder) for file in other.glob(pattern)]


def _keep_rank_0(folder: Path, _other: Path) -> None:
    whole = folder.rename(folder.with_name(f"{folder.name}-whole"))
    relayout.copy(whole, folder, ranks=[0])
    shutil.rmtree(whole)


FAILURES = (
    Failure("a rank file is missing", _remove("model-rank-1-*"), r"model-rank-1-part-0\.safetensors", 1),
    Failure("rank files are half copied", _truncate, r"model-rank-\d-part-0\.safetensors: .*bytes"),
    Failure("the folder is of another node", _keep_rank_0, "of 2 ranks it has only 0, and lacks 1: `relayout copy", 1),
    Failure("rank tables are missing", _remove("relayout.rank-*"), r"relayout\.rank-\d\.json\.zst"),
    Failure("the manifest is missing", _remove("relayout.json"), r"relayout\.json: is missing beside files of ranks"),
    Failure("rank files are another model's", _take("model-rank-*"), r"model-rank-\d-part-0\.safetensors"),
    # Here vLLM has its own words.
    Failure("config.json is another model's", _take("config.json"), "Following weights were not initialized"),
    Failure("a byte is damaged", _flip, "damaged: tensor '.*': its bytes have digest", options=(("verify", True),)),
    Failure(
        "experts are owned at another degree",
        _remove("nothing"),
        "was converted with --expert-parallel for 4 ranks: run vLLM with",
        run=Run("qwen3_moe", expert=True),
        degree=4,
    ),
)


def fail(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is wrong, how vLLM ended) of each whose name matches."""
    for failure in FAILURES:
        if not fnmatch(failure.name, only):
            continue
        run, folder = failure.run, work / "failures" / failure.name.replace(" ", "-")
        source, other = (source_of(family, work, wide=True) for family in (run.family, "qwen3"))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(converted_of(source, failure.degree, expert=run.expert), folder)
        failure.damage(folder, converted_of(other, failure.degree))
        settings = {"load_format": "relayout", "model_loader_extra_config": dict(failure.options)}
        ended = start(environment, folder, run.settings | settings, work / f"{failure.name}.log")
        lines: dict[str, str] = {}
        for line in ended.lines:
            # vLLM tells of an exception where it was raised, by rank, and then of its consequences.
            match = re.match(r"\((Worker\S*) pid=.*?((?:\w+\.)*\w+Error: .*)", line)
            if match and re.search(failure.says, match[2]):
                lines.setdefault(match[1], match[2].replace(f"{folder.parent}/", ""))
        is_expected = ended.code not in (0, None) and len(lines) == failure.num_ranks
        yield (
            failure.name,
            {"as_expected": is_expected, "code": ended.code, "seconds": round(ended.seconds), "said": lines},
        )
