"""Which .safetensors files of a folder are the model, where no index says so. Pure."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence

from relayout.errors import FormatError, PlanError, shown
from relayout.storage.protocols import Store

SINGLE_NAME = "model.safetensors"

# As huggingface_hub writes them (`serialization/_base.py`: "-{idx+1:05d}-of-{nb_shards:05d}"), and those who count from
# 0, or write more digits. With fewer digits it may be something else, such as epoch-3-of-10.
_NUMBERED = re.compile(r"((?P<stem>.*)[-_.])?(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})(?P<rest>\..*)?\.safetensors")
_CONSOLIDATED = re.compile(r"consolidated([-.].*)?\.safetensors")


def choose_shards(root: Store, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that are the model, and what is left out, each with the reason; `names` are all in the folder.

    Raises:
        FormatError: one of a numbered set is missing.
    """
    if SINGLE_NAME in names:
        used, reason = [SINGLE_NAME], f"{SINGLE_NAME} is the model"
    else:
        # Mistral's own names and transformers' for the same weights.
        model = next(
            (name for name in names if (match := _NUMBERED.fullmatch(name)) and match["stem"] == "model"), None
        )
        used = [name for name in names if model is None or not _CONSOLIDATED.fullmatch(name)]
        reason = f"{model} and those that go with it are the model"
    _check_complete(root, used)
    return used, [f"{name}: {reason}" for name in names if name not in set(used)]


def _check_complete(root: Store, names: Sequence[str]) -> None:
    """Each numbered set must be there as a whole: nothing else tells what tensors a model has."""
    sets: defaultdict[tuple[str, str], list[re.Match[str]]] = defaultdict(list)
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        sets[match["stem"], match["rest"]].append(match)
    for matches in sets.values():
        first = matches[0]
        count = int(first["count"])
        other = next((match[0] for match in matches if int(match["count"]) != count), None)
        if other is not None:
            raise FormatError(
                f"{first[0]} and {other} are of two models, and no index says which one it is",
                path=str(root),
                code="mismatch",
            )
        _check_set(root, first, {int(match["number"]) for match in matches})


def _check_set(root: Store, first: re.Match[str], numbers: set[int]) -> None:
    count, start = int(first["count"]), 0 if 0 in numbers else 1
    expected = range(start, start + count)
    num_missing = count - sum(number in expected for number in numbers)
    if num_missing:
        missing = str(next(number for number in expected if number not in numbers)).zfill(len(first["number"]))
        name = first[0][: first.start("number")] + missing + first[0][first.end("number") :]
        others = f" (and {num_missing - 1} others)" if num_missing > 1 else ""
        raise FormatError(
            f"is missing{others}: {first[0]} is one of {count}, and no index says otherwise",
            path=root.where(name),
            code="missing",
        )


def check_name(root: Store, name: str) -> None:
    """Refuse a name that the record of a conversion, which is JSON, cannot hold.

    Raises:
        PlanError: it is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise PlanError(
            f"{shown(os.fsencode(name))}: its name is not UTF-8: rename it", path=str(root), code="unsupported"
        ) from None
