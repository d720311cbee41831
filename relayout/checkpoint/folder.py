"""Classifies the files of a checkpoint folder: config.json, shards of the model, files to copy, files to leave out."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from relayout.errors import FormatError, MissingPathError, PlanError, about, did_you_mean, shown
from relayout.format.fields import check_depth, decode, refuse_surrogates
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME, RANK_FILE
from relayout.publish.output import left_of, refuse_unfinished
from relayout.storage.stores import Entry, Kind, Store, if_there

_MAX_CONFIG_NBYTES = 16 * 2**20
CONFIG_NAME = "config.json"
_QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
"""Alternative files with quantization_config: (quantization method, key or None for the whole file)."""


@dataclass(frozen=True, slots=True)
class Config:
    """The model configuration of a checkpoint folder."""

    content: Mapping[str, Any]
    """config.json, completed by quantization_config from other files; empty if there is no config.json."""
    names: tuple[str, ...]
    """Names of the files that were read."""


def check_exists(store: Store) -> None:
    """Raise MissingPathError if nothing exists at the store's own path or prefix."""
    if store.kind() is Kind.NOTHING:
        raise MissingPathError(explain_missing(store), path=str(store))


def explain_missing(store: Store) -> str:
    """Return the message for a store of `Kind.NOTHING`: the reason, and possibly a remedy."""
    path = store.path("")
    if path is None:
        return "no objects with this prefix"
    from relayout.storage.web.hub import advice_on_model  # Only for errors.

    return f"no such file or folder{left_of(path) or _similar(path)}{advice_on_model(str(path))}"


def _similar(path: Path) -> str:
    """Return the end of a message about a path that does not exist: a similar name in the same folder."""
    try:
        with os.scandir(path.parent) as listed:
            names = [entry.name for entry in islice(listed, _MAX_GLANCED) if entry.name[0] != "."]
        return did_you_mean(path.name, names)
    except OSError:
        return ""


def refuse_incomplete(folder: Store, names: Iterable[str]) -> None:
    """Raise an error for an incomplete output: a folder with some output files, but no manifest.

    Rank files without a manifest are not a plain checkpoint either.
    """
    refuse_unfinished(folder)
    if any(map(RANK_FILE.fullmatch, names)):
        what = (
            "is missing next to rank files: copy the complete converted folder again; for vLLM's sharded state, which"
            " has such file names too, name the checkpoint that it was saved from"
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
    """Parse a JSON object as leniently as transformers: NaN is accepted, and the last of equal keys counts."""
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
"""Advice for a folder that has only weights of another format, by their suffix."""
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".npz", ".npy"}
    | {".tflite", ".mlmodel", ".ot"}
)
_INDEX_SUFFIX = ".index.json"
_MAX_FOLDERS = 16
"""Maximum number of folders that a message lists."""
_SNAPSHOT = re.compile(r"(.+/)?snapshots/[^/]+")
"""The folder of a snapshot in the hub's cache, relative to a folder above it."""
_TO_SNAPSHOTS = re.compile(r"([^/]+/)?snapshots(/[^/]+)?")
"""The folders between a hub cache, or a repository in it, and the files of its snapshots."""
_MAX_GLANCED = 2000
"""Maximum number of entries that are listed of a folder that is not a checkpoint, to identify its content."""


def glance(root: Store) -> list[Entry]:
    """Return some entries of a folder that is not a checkpoint, of its subfolders, and of hub snapshots in it."""

    def is_near(folder: str) -> bool:
        return folder != "blobs" and ("/" not in folder or _TO_SNAPSHOTS.fullmatch(folder) is not None)

    entries: list[Entry] = []
    with suppress(OSError):  # A listing error would hide the actual problem.
        entries.extend(islice(root.walk(is_near), _MAX_GLANCED))
    return entries


def choose_shards(root: Store, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the .safetensors files of a folder into those of the model and those left out, each with the reason."""
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
    """Return a text about the rest of the numbered set that a single file belongs to; empty without such a set."""
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
    """Raise PlanError unless a file name is UTF-8: the source record contains it, and is JSON."""
    try:
        name.encode()
    except UnicodeEncodeError:
        what = f"the file name {shown(os.fsencode(name))} is not UTF-8; rename the file"
        raise PlanError(what, path=str(root), code="unsupported") from None


def advice_without_shards(entries: Sequence[Entry]) -> str:
    """Return advice if subfolders contain weights, as in a diffusers pipeline, or weights have another format."""
    if snapshots := advice_on_snapshots(entries):
        return snapshots
    converted = _converted_folders(entries)
    folders = sorted(
        {
            entry.name.partition("/")[0]
            for entry in entries
            if not entry.is_folder and entry.name.count("/") == 1 and entry.name.endswith((".safetensors", ".distcp"))
        }
        - converted
    )
    if not folders:
        suffixes = ((entry.name, PurePosixPath(entry.name).suffix) for entry in entries)
        found = next((f"; found {name}: {_ADVICE[suffix]}" for name, suffix in suffixes if suffix in _ADVICE), "")
        return found or "; `hf download ORG/MODEL --local-dir FOLDER` downloads a model"
    return f"; name one of its subfolders: {_first_of(folders)}"


def advice_on_snapshots(entries: Iterable[Entry]) -> str:
    """Return the advice to name a snapshot, for a folder above snapshots, as in the hub's cache; else empty."""
    folders = {entry.name.rpartition("/")[0] for entry in entries if not entry.is_folder}
    found = sorted(name for name in folders if _SNAPSHOT.fullmatch(name))
    return f"; name a snapshot in it: {_first_of(found)}" if found else ""


def _first_of(folders: Sequence[str]) -> str:
    return ", ".join(folders[:_MAX_FOLDERS]) + (" ..." if len(folders) > _MAX_FOLDERS else "")


def _converted_folders(entries: Sequence[Entry]) -> set[str]:
    """Return the subfolders that are converted checkpoints."""
    return {entry.name.rpartition("/")[0] for entry in entries if entry.name.endswith("/" + MANIFEST_NAME)}


WEIGHTS_OF_TRANSFORMERS = "transformers_weights"
"""The field of config.json by which transformers 5 selects the file or index (`modeling_utils.py`)."""


def chosen_by_transformers(root: Store, names: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Return the file or index of a folder that transformers loads; None if engines load the same.

    transformers takes the file that config.json names, else model.safetensors, and only then the index. Engines begin
    with the index (vLLM and SGLang, `filter_duplicate_safetensors_files`).
    """
    named = config.get(WEIGHTS_OF_TRANSFORMERS)
    if named is None:
        return SINGLE_NAME if SINGLE_NAME in names else None
    if isinstance(named, str) and re.fullmatch(r"[^./\\\0][^/\\\0]*\.safetensors(\.index\.json)?", named):
        return named
    what = f"{WEIGHTS_OF_TRANSFORMERS} is {shown(named)}, expected a .safetensors file of the folder, or an index"
    raise FormatError(f"{what}; to load another file, give its path", path=root.location(CONFIG_NAME), code="field")


def find_index(root: Store, names: list[str]) -> str | None:
    """Return the name of the index, or None; raise PlanError if there are several without the usual name."""
    if HUB_INDEX_NAME in names:
        return HUB_INDEX_NAME
    others = [name for name in names if name.endswith(".safetensors" + _INDEX_SUFFIX) and name[0] != "."]
    if others and SINGLE_NAME not in names:
        if len(others) > 1:
            what = f"several index files, but no {HUB_INDEX_NAME}: {', '.join(others)}"
            raise PlanError(what, path=str(root))
        return others[0]
    return None


@dataclass(frozen=True, slots=True)
class SideFiles:
    """All files next to and below the weights of a checkpoint folder."""

    kept: tuple[str, ...] = ()
    """Files that a conversion copies unread, as paths relative to the folder."""
    left_out: tuple[str, ...] = ()
    """Files and folders that a conversion does not copy, each with the reason, as text for the user."""


def find_side_files(root: Store) -> SideFiles:
    """List the files next to the weights, also in subfolders.

    Raises:
        FormatError: a file cannot be read; or there are more files, or deeper folders, than a listing may have.
        PlanError: a copied file names one that is not copied.
    """
    entries = sorted(root.walk(lambda folder: _why_folder_stays(folder) is None), key=lambda one: one.name.split("/"))
    kept, left_out = [], dict[str, str]()
    for entry in _without_converted(entries):
        name = entry.name
        reason = _why_folder_stays(name) if entry.is_folder else entry.refusal or _why_file_stays(name)
        if reason is not None:
            left_out[name] = reason
        elif not entry.is_folder:
            if _is_readable(root, name):
                kept.append(name)
            else:
                left_out[name] = "vanished while the folder was listed"
    _check_named(root, kept, left_out)
    texts = (f"{name}: {_with_size(root, name, why)}" for name, why in left_out.items() if not _is_part(name))
    return SideFiles(tuple(kept), tuple(texts))


_OTHER_FORMAT = "the model's weights in another format"
_TRAINING_STATE = "the state of a training"
_FOLDERS_THAT_STAY = {
    **dict.fromkeys(("original", "onnx", "openvino", "coreml"), _OTHER_FORMAT),
    **dict.fromkeys(("wandb", "runs", "mlruns", "lightning_logs", "tensorboard"), "the logs of a training"),
    "__pycache__": "compiled from the .py files",
}
"""Top-level folders with files that are not copied. `original` is that of Meta's repositories on the hub."""
_CHECKPOINT_OF_TRAINING = re.compile(r"(checkpoint-|global_step)[0-9]+")
"""The names of transformers' Trainer and of DeepSpeed."""
_OWN_WEIGHTS = re.compile(
    r"((diffusion_)?pytorch_model|model|tf_model|flax_model|rust_model|openvino_model|consolidated)([-_.].*)?"
)
"""Weight files that are the model itself in another format or precision."""
_OTHER_FORMATS = frozenset({".gguf", ".ggml", ".h5", ".msgpack", ".ot", ".tflite", ".mlmodel"})
"""Formats in which only whole models are published."""
_HUB_CACHE = re.compile(r"(.*/)?(models|datasets|spaces)--[^/]+")
"""A repository in a cache of the hub."""
_TRAINING_FILES = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args)([-_.].*)?")


def _why_folder_stays(name: str) -> str | None:
    """Return the reason why no file of a folder is copied with the model; None if its files are copied."""
    if _HUB_CACHE.fullmatch(name):
        return "a repository in a cache of the hub"
    if "/" in name:
        return None
    return _TRAINING_STATE if _CHECKPOINT_OF_TRAINING.fullmatch(name) else _FOLDERS_THAT_STAY.get(name)


def _why_file_stays(name: str) -> str | None:
    """Return the reason why a file is not copied with the model; None if it is copied.

    Weights in a subfolder are parts of the model that its own code or another file names: the modules of
    sentence-transformers, adapters, a speech tokenizer. At the top level, a second copy of the model's weights is
    common, published or left behind by a training.
    """
    suffix = PurePosixPath(name).suffix
    if name.startswith("relayout."):
        return "a name reserved for relayout"
    if suffix == ".distcp":
        return _TRAINING_STATE
    if "/" in name or not (suffix in _WEIGHT_SUFFIXES or name.endswith(_INDEX_SUFFIX)):
        return None
    if suffix == ".safetensors":  # FORMAT.md, section 2: an output has no others at the top level.
        return "weights that are not part of the model"
    if name.endswith(_INDEX_SUFFIX) or suffix in _OTHER_FORMATS or _OWN_WEIGHTS.fullmatch(name):
        return _OTHER_FORMAT
    return _TRAINING_STATE if _TRAINING_FILES.fullmatch(name) else None


def _is_part(name: str) -> bool:
    """Return True if a file is already classified when the checkpoint itself is read."""
    return "/" not in name and name.endswith((".safetensors", _INDEX_SUFFIX))


def _is_readable(root: Store, name: str) -> bool:
    """Check that a local file can be opened; return False if it no longer exists."""
    if root.cost.is_remote:
        return True
    file = if_there(lambda: root.open(name))
    if file is not None:
        file.close()
    return file is not None


def _with_size(root: Store, name: str, reason: str) -> str:
    """Return a reason, with the size if the file has weights that are left out."""
    is_weights = reason in (_OTHER_FORMAT, _TRAINING_STATE) and PurePosixPath(name).suffix in _WEIGHT_SUFFIXES
    status = root.stat(name) if is_weights else None
    return reason if status is None else f"{reason} ({status.nbytes:,} bytes)"


def _check_named(root: Store, kept: Sequence[str], left_out: Mapping[str, str]) -> None:
    """Raise PlanError if a copied file names one that is not copied."""
    named = {_MODULES_NAME: _module_folders(root)} if _MODULES_NAME in kept else {}
    for file in kept:
        above, _, name = file.rpartition("adapter_config.json")
        if not name and (not above or above.endswith("/")):
            named[file] = {f"{above}{ADAPTER_WEIGHTS}", f"{above}adapter_model.bin"}
    for file, places in named.items():
        for name, reason in left_out.items():
            if any(name == place or name.startswith(f"{place}/") or place.startswith(f"{name}/") for place in places):
                what = f"does not go along ({reason}), but {file} names it: move one of the two out of the folder"
                raise PlanError(what, path=root.location(name), code="unsupported")


ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The name of an adapter's weight file, as PEFT writes it (`peft/utils/constants.py`)."""
_MODULES_NAME = "modules.json"


def _module_folders(root: Store) -> set[str]:
    """Return the folders of a sentence-transformers model's modules; empty if the file is not a list of modules."""
    try:
        modules = json.loads(decode(root.read(_MODULES_NAME, _MAX_CONFIG_NBYTES)))
    except (FormatError, ValueError, RecursionError):  # An engine that reads the file raises the error.
        return set()
    places = (one.get("path") for one in modules if isinstance(one, dict)) if isinstance(modules, list) else ()
    return {place.strip("/") for place in places if isinstance(place, str) and place.strip("/")}


def _without_converted(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries, with one refused entry in place of each subfolder that is a converted checkpoint."""
    converted = _converted_folders(entries)
    reported: set[str] = set()
    for entry in entries:
        parents = (str(parent) for parent in reversed(PurePosixPath(entry.name).parents))
        outermost = entry.name if entry.name in converted else next((one for one in parents if one in converted), None)
        if outermost is None:
            yield entry
        elif outermost not in reported:
            reported.add(outermost)
            yield Entry(outermost, "a converted checkpoint")
