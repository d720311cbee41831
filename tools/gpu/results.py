"""Results that are kept as they come: a line of JSON for each, by a key; what is there is not measured again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Results:
    """A file of results."""

    def __init__(self, path: Path, part: str | None = None) -> None:
        """Read the rows of a part, or of a file without parts; a last line that was cut off is dropped."""
        self._path = path
        self._part = {} if part is None else {"part": part}
        self.rows: dict[str, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        kept = text[: text.rfind("\n") + 1]
        if kept != text:
            path.write_text(kept)
        for line in kept.splitlines():
            row = json.loads(line)
            if row.get("part") == part:
                self.rows[row["key"]] = row

    def measure(self, key: str, what: Callable[[], dict[str, Any]]) -> None:
        """Measure what is not there yet; an error is a result."""
        if key in self.rows:
            return
        started = time.monotonic()
        try:
            result = what()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        row = self.rows[key] = {**self._part, "key": key, **result, "took_s": round(time.monotonic() - started, 2)}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a step that measures."""

    results: Results
    work: Path
    """The folder of checkpoints."""
    num_layers: int
    """Of the checkpoint that is loaded."""
    device: str

    @staticmethod
    def parse() -> Arguments:
        """From the command line."""
        file, work, num_layers, device = sys.argv[1:]
        return Arguments(Results(Path(file)), Path(work), int(num_layers), device)
