"""Tells the files of a checkpoint folder: config.json, shards of the model, what goes along, what is left out."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import decode
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME, RANK_FILE
from relayout.format.safetensors import check_depth, refuse_surrogates
from relayout.storage.stores import Entry, Store

_MAX_CONFIG_NBYTES = 16 * 2**20
CONFIG_NAME = "config.json"
_QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
"""Files that hold a quantization_config instead of config.json: (quantization method, key or None for the whole)."""


@dataclass(frozen=True, slots=True)
class Config:
    """The model configuration of a checkpoint folder."""

    content: Mapping[str, Any]
    """config.json, completed by quantization_config from other files; empty if there is no config.json."""
    names: tuple[str, ...]
    """Names of the files that were read."""


def refuse_rank_files(folder: Store, names: Iterable[str]) -> None:
    """Raise FormatError if some of these files have slices: without the manifest they would be taken for tensors."""
    if any(map(RANK_FILE.fullmatch, names)):
        what = (
            "is missing beside rank files: copy all of the converted folder again; if these are vLLM's sharded state,"
            " which has such names, too, give the checkpoint that it was made from"
        )
        raise FormatError(what, path=folder.location(MANIFEST_NAME), code="missing")


def find_config(folder: Store) -> Config:
    """Read the configuration. FormatError: a file is not a JSON object."""
    names: list[str] = []
    config = _read_object(folder, CONFIG_NAME, names)
    nested = config.get("text_config")
    inside = nested.get("quantization_config") if isinstance(nested, dict) else None
    quantization = config.get("quantization_config") or config.get("compression_config") or inside
    for name, (method, key) in _QUANTIZATION_FILES.items():
        if not quantization:
            parsed = _read_object(folder, name, names)
            own = parsed.get(key) if key else parsed
            quantization = {"quant_method": method} | own if isinstance(own, dict) and own else None
    return Config(config | {"quantization_config": quantization} if quantization else config, tuple(names))


def _read_object(folder: Store, name: str, names: list[str]) -> dict[str, Any]:
    """Parse a JSON object; empty if the file does not exist."""
    if folder.stat(name) is None:
        return {}
    names.append(name)
    return parse_config(folder.read(name, _MAX_CONFIG_NBYTES), folder.location(name))


def parse_config(blob: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object as leniently as transformers: NaN is accepted, and the last of equal keys counts.

    Raises:
        FormatError: the bytes are not a JSON object.
    """
    with about(path=where):
        text = decode(blob)
        check_depth(text)
        try:
            parsed = json.loads(text)
        except ValueError as error:  # ValueError: a JSONDecodeError, or an integer with too many digits.
            raise FormatError(f"not valid JSON: {error}", code="syntax") from None
        refuse_surrogates(text, parsed)
        if not isinstance(parsed, dict):
            raise FormatError(f"a JSON {type(parsed).__name__}, expected an object", code="field")
        return parsed


SINGLE_NAME = "model.safetensors"

# As huggingface_hub writes them (`serialization/_base.py`: "-{idx+1:05d}-of-{nb_shards:05d}"), but also counted from 0
# or with more digits. Names with fewer digits may mean something else, such as epoch-3-of-10.
_NUMBERED = re.compile(r"((?P<stem>.*)[-_.])?(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})(?P<rest>\..*)?\.safetensors")
_CONSOLIDATED = re.compile(r"consolidated([-.].*)?\.safetensors")

_TO_SAVE = "load the model and save it with save_pretrained, which writes safetensors"
_ADVICE = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _TO_SAVE),
    ".gguf": f"convert the safetensors files it was made from, or, with from_pretrained(gguf_file=...), {_TO_SAVE}",
}
"""What to do with a folder that has weights of another format only, by their suffix."""
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".npz", ".npy"}
    | {".tflite", ".mlmodel", ".ot"}
)
_INDEX_SUFFIX = ".index.json"
_MAX_HEAD_NBYTES = 64 * 2**20
"""The largest `.pt` file beside the shards that goes along, unread: some engines load a model's further layers from
such, as vLLM does `sparse_linear.pt` and `colbert_linear.pt` of BGE-M3. What a training leaves is mostly larger."""
_MAX_FOLDERS = 16
"""The most folders that a message lists."""
_SNAPSHOT = re.compile(r"(.+/)?snapshots/[^/]+")
"""The folder of a snapshot in the hub's cache, seen from a folder above it."""


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
    return [f"the other {int(match['count']) - 1} files of its set: give their folder"]


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
            what = f"{first[0]} and {other} belong to different models, and no index selects one"
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
    """Raise PlanError unless a file name is UTF-8: the source record, which has it, is JSON."""
    try:
        name.encode()
    except UnicodeEncodeError:
        what = f"the file name {shown(os.fsencode(name))} is not UTF-8; rename the file"
        raise PlanError(what, path=str(root), code="unsupported") from None


def advice_without_shards(entries: Sequence[Entry]) -> str:
    """Advice if subfolders contain weights, as in a diffusers pipeline, or weights are stored otherwise."""
    if snapshots := advice_on_snapshots(entries):
        return snapshots
    converted = _converted_folders(entries)
    folders = sorted(
        {
            entry.name.partition("/")[0]
            for entry in entries
            if not entry.is_folder and entry.name.count("/") == 1 and entry.name.endswith(".safetensors")
        }
        - converted
    )
    if not folders:
        suffixes = ((entry.name, PurePosixPath(entry.name).suffix) for entry in entries)
        found = next((f"; found {name}: {_ADVICE[suffix]}" for name, suffix in suffixes if suffix in _ADVICE), "")
        return found or "; `hf download ORG/MODEL --local-dir FOLDER` downloads a model"
    return f"; name one of its subfolders: {_first_of(folders)}"


def advice_on_snapshots(entries: Iterable[Entry]) -> str:
    """Advice for a folder above snapshots, as in the hub's cache: these are the checkpoints. Empty for another one."""
    folders = {entry.name.rpartition("/")[0] for entry in entries if not entry.is_folder}
    found = sorted(name for name in folders if _SNAPSHOT.fullmatch(name))
    return f"; name a snapshot in it: {_first_of(found)}" if found else ""


def _first_of(folders: Sequence[str]) -> str:
    return ", ".join(folders[:_MAX_FOLDERS]) + (" ..." if len(folders) > _MAX_FOLDERS else "")


def _converted_folders(entries: Sequence[Entry]) -> set[str]:
    """Subfolders that are converted checkpoints."""
    return {entry.name.rpartition("/")[0] for entry in entries if entry.name.endswith("/" + MANIFEST_NAME)}


def find_index(root: Store, names: list[str]) -> str | None:
    """The name of the index, or None. PlanError: there are several, none of them with the usual name."""
    if HUB_INDEX_NAME in names:
        return HUB_INDEX_NAME
    others = [name for name in names if name.endswith(".safetensors" + _INDEX_SUFFIX) and name[0] != "."]
    if others and SINGLE_NAME not in names:
        if len(others) > 1:
            what = f"several index files, but no {HUB_INDEX_NAME}: {', '.join(others)}"
            raise PlanError(what, path=str(root))
        return others[0]
    return None


def find_side_files(root: Store, entries: Sequence[Entry]) -> tuple[tuple[str, ...], list[str]]:
    """Files that a conversion copies, and texts for those that it does not copy."""
    kept, left_out = [], []
    for entry in _without_converted([entry for entry in entries if not entry.is_folder]):
        name, reason = entry.name, entry.refusal
        suffix = PurePosixPath(name).suffix
        is_part = "/" not in name and (suffix == ".safetensors" or name.endswith(_INDEX_SUFFIX))
        if reason is None and not entry.is_readable:
            raise FormatError(f"cannot be read: {os.strerror(errno.EACCES)}", path=root.location(name))
        is_weights = suffix in _WEIGHT_SUFFIXES or name.endswith(_INDEX_SUFFIX)
        if reason is None and is_weights and not _is_head(root, name):
            reason = "weights that are not part of the model"
        elif reason is None and name.startswith("relayout."):
            reason = "a name reserved for relayout"
        if reason is None:
            kept.append(name)
        elif not is_part:
            left_out.append(f"{name}: {reason}")
    return tuple(kept), left_out


def _is_head(root: Store, name: str) -> bool:
    status = root.stat(name) if name.endswith(".pt") and "/" not in name else None
    return status is not None and status.nbytes <= _MAX_HEAD_NBYTES


def _without_converted(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries, with one refused entry in place of each subfolder that is a converted checkpoint."""
    converted = _converted_folders(entries)
    reported: set[str] = set()
    for entry in entries:
        parents = (str(parent) for parent in reversed(PurePosixPath(entry.name).parents))
        outermost = next((parent for parent in parents if parent in converted), None)
        if outermost is None:
            yield entry
        elif outermost not in reported:
            reported.add(outermost)
            yield Entry(outermost, "a converted checkpoint")
