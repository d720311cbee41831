"""Chooses the .safetensors files that are the model in a folder without an index."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence

from relayout.errors import FormatError, PlanError, shown
from relayout.storage.protocols import Store

SINGLE_NAME = "model.safetensors"

# As huggingface_hub writes them (`serialization/_base.py`: "-{idx+1:05d}-of-{nb_shards:05d}"), but also counted from 0
# or with more digits. Names with fewer digits may mean something else, such as epoch-3-of-10.
_NUMBERED = re.compile(r"((?P<stem>.*)[-_.])?(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})(?P<rest>\..*)?\.safetensors")
_CONSOLIDATED = re.compile(r"consolidated([-.].*)?\.safetensors")


def choose_shards(root: Store, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the .safetensors files of a folder into those of the model and those left out, each with the reason.

    Raises:
        FormatError: a file of a numbered set is missing, or there are two sets.
    """
    if SINGLE_NAME in names:
        used, reason = [SINGLE_NAME], f"{SINGLE_NAME} is the model"
    else:
        # Mistral publishes the same weights as consolidated*.safetensors and as model-*.safetensors.
        model = next(
            (name for name in names if (match := _NUMBERED.fullmatch(name)) and match["stem"] == "model"), None
        )
        used = [name for name in names if model is None or not _CONSOLIDATED.fullmatch(name)]
        reason = f"{model} and the other files of its set are the model"
    _check_complete(root, used)
    return used, [f"{name}: {reason}" for name in names if name not in set(used)]


def other_shards(name: str) -> list[str]:
    """What a single file leaves out: the rest of the numbered set that it belongs to."""
    match = _NUMBERED.fullmatch(name)
    if match is None or int(match["count"]) == 1:
        return []
    return [f"the other {int(match['count']) - 1} files of its set: name the folder to have all of them"]


def _check_complete(root: Store, names: Sequence[str]) -> None:
    """Check that each numbered set is complete: without an index, nothing else lists the model's tensors."""
    sets: defaultdict[tuple[str, str], list[re.Match[str]]] = defaultdict(list)
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        sets[match["stem"], match["rest"]].append(match)
    for matches in sets.values():
        first = matches[0]
        count = int(first["count"])
        other = next((match[0] for match in matches if int(match["count"]) != count), None)
        if other is not None:
            what = f"{first[0]} and {other} belong to different models, and there is no index to choose one"
            raise FormatError(what, path=str(root), code="mismatch")
        _check_set(root, first, {int(match["number"]) for match in matches})


def _check_set(root: Store, first: re.Match[str], numbers: set[int]) -> None:
    count, start = int(first["count"]), 0 if 0 in numbers else 1
    expected = range(start, start + count)
    num_missing = count - sum(number in expected for number in numbers)
    if num_missing:
        missing = str(next(number for number in expected if number not in numbers)).zfill(len(first["number"]))
        name = first[0][: first.start("number")] + missing + first[0][first.end("number") :]
        others = f" (and {num_missing - 1} others)" if num_missing > 1 else ""
        what = f"is missing{others}: {first[0]} is one of {count} files, and there is no index"
        raise FormatError(what, path=root.location(name), code="missing")


def check_name(root: Store, name: str) -> None:
    """Check that a file name can be stored in the source record, which is JSON.

    Raises:
        PlanError: the name is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        what = f"the file name {shown(os.fsencode(name))} is not UTF-8; rename the file"
        raise PlanError(what, path=str(root), code="unsupported") from None
