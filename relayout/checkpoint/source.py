"""The catalogue: every tensor of a source checkpoint and where it is stored.

Reads directory entries, small JSON files and header bytes; never tensor data.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayout.checkpoint.config import Config, find_config
from relayout.checkpoint.shards import SINGLE_NAME, check_name, choose_shards, is_utf8
from relayout.core.extents import Extent
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME
from relayout.format.safetensors import LENGTH_NBYTES, Header, header_nbytes, parse_header
from relayout.storage.files import naming, open_regular, read_small
from relayout.storage.paths import is_member, member

_MAX_INDEX_NBYTES = 64 * 2**20
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".npz", ".npy"}
    | {".tflite", ".mlmodel", ".ot"}
)
_INDEX_SUFFIX = ".index.json"
_MAX_FOLDERS = 16
"""Named in a message."""
_MARKS = re.compile(r"[\x00-\x03]")
_ABOVE_MARKS = {mark: f"\3{chr(mark + 4)}" for mark in range(4)}
"""Writes the characters that `model_order` uses itself in another way, in the same order."""
_NUMBER = re.compile(r"\x02([0-9]+)(?=\x00)")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One shard."""

    name: str
    """File name in the checkpoint folder."""
    path: Path
    """Where it really lies, symbolic links resolved."""
    nbytes: int
    """Length of the whole file."""
    data_start: int
    """Absolute file offset of the data section."""
    header: bytes = field(repr=False)
    """The 8 + n bytes before the data section, as stored."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    """Position in `Catalogue.files`."""
    extent: Extent
    """Its bytes, at absolute file offsets."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A source checkpoint."""

    root: Path
    """The folder, or the single file, that was asked for."""
    files: tuple[SourceFile, ...]
    tensors: tuple[SourceTensor, ...]
    """In model order: by name, numbers compared as numbers."""
    metadata: Mapping[str, str]
    """`__metadata__` entries on which all shards agree."""
    config: Mapping[str, Any]
    """config.json; empty where there is none. Its quantization_config may come from a file of its own."""
    index: tuple[str, bytes] | None
    """Name and bytes of the index.json, where there is one."""
    side_files: tuple[str, ...]
    """Everything that goes along and is no weight, as paths relative to the folder."""
    left_out: tuple[str, ...]
    """What does not go along, each with the reason, for the person."""
    config_error: str | None = None
    """Why nothing can be planned by config.json, though it is there."""
    is_file: bool = False
    """Whether `root` is a file, and its side files lie beside it."""

    @property
    def folder(self) -> Path:
        """Where the side files lie."""
        return self.root.parent if self.is_file else self.root

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.extent.nbytes for tensor in self.tensors)

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None


def read_catalogue(source: Path) -> Catalogue:
    """Read the catalogue of a checkpoint folder, a Hugging Face cache snapshot, or one .safetensors file.

    Raises:
        FormatError: a file is missing, unreadable, damaged, or contradicts the index.
        PlanError: `source` is no checkpoint to convert.
    """
    try:
        if source.is_dir():
            return _read_folder(source)
        # Blobs of a hub cache have no suffix.
        is_file = source.suffix == ".safetensors" or (source.suffix == "" and source.is_file())
    except PermissionError as error:
        raise FormatError(f"{source}: cannot be read: {error.strerror}") from None
    if is_file:
        check_name(source)
        shard, header = read_shard(source, source.name)
        config = find_config(source.parent)
        return _assemble(
            source,
            [(shard, header)],
            named=None,
            config=config,
            index=None,
            # What it was planned by: the output is loaded at other degrees by the same.
            side_files=tuple(sorted(config.names)),
            left_out=[],
            is_file=True,
        )
    if os.path.lexists(source):
        raise PlanError(f"{source}: neither a folder nor a .safetensors file")
    raise PlanError(f"{source}: no such file or folder")


def read_shard(path: Path, name: str) -> tuple[SourceFile, Header]:
    """Read and prove the header of one safetensors file.

    Raises:
        FormatError: the file cannot be opened or is damaged.
        OSError: reading failed.
    """
    descriptor, status = open_regular(path)
    with naming(path), open(descriptor, "rb") as file:
        prefix = file.read(LENGTH_NBYTES)
        blob = prefix + file.read(header_nbytes(prefix, status.st_size, str(path)))
    header = parse_header(blob, status.st_size, str(path))
    return SourceFile(name, path.resolve(), status.st_size, header.data_start, blob), header


def model_order(name: str) -> str:
    """Sort key: by dotted part, numbers as numbers and before words, so that layer 2 comes before layer 10."""
    # One string, not a tuple of parts, of which a header may have millions. Each part begins with the mark of a number
    # or a word, and ends with what is below both.
    if _MARKS.search(name):
        name = name.translate(_ABOVE_MARKS)
    words = "\2" + name.replace(".", "\0\2") + "\0"
    return _NUMBER.sub(lambda found: f"\1{len(digits := found[1].lstrip('0')):04}{digits}", words)


def _read_folder(root: Path) -> Catalogue:
    if (root / MANIFEST_NAME).exists():
        raise PlanError(f"{root}: is a converted checkpoint already ({MANIFEST_NAME} lies in it)")
    names = sorted(entry.name for entry in os.scandir(root))
    shards = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    index_name = _find_index(root, names)
    left_out: list[str] = []
    named: dict[str, str] | None = None
    index: tuple[str, bytes] | None = None
    if index_name is not None:
        index = (index_name, read_small(member(root, index_name), _MAX_INDEX_NBYTES))
        named = parse_index(index[1], str(root / index_name))
        used = sorted(set(named.values()))
        left_out += [f"{name}: not named by {index_name}" for name in shards if name not in set(used)]
        check_name(root / index_name)
    else:
        used, left_out = choose_shards(root, shards)
    if not used:
        raise PlanError(f"{root}: holds no safetensors file{_elsewhere(root, names)}")
    for name in used:
        check_name(root / name)
    side_files, not_copied = _side_files(root)
    return _assemble(
        root,
        [read_shard(member(root, name), name) for name in used],
        named=named,
        config=find_config(root),
        index=index,
        side_files=side_files,
        left_out=left_out + not_copied,
    )


def _elsewhere(root: Path, names: list[str]) -> str:
    """Where the weights are, if they lie one folder deeper, as those of diffusers' pipelines do."""
    found = [
        name
        for name in names
        if not name.startswith(".")
        and any((root / name).glob("[!.]*.safetensors"))
        and not (root / name / MANIFEST_NAME).exists()
    ]
    if not found:
        return ""
    more = " ..." if len(found) > _MAX_FOLDERS else ""
    return f": they lie in folders in it, to be converted one by one: {', '.join(found[:_MAX_FOLDERS])}{more}"


def _find_index(root: Path, names: list[str]) -> str | None:
    if HUB_INDEX_NAME in names:
        return HUB_INDEX_NAME
    others = [name for name in names if name.endswith(".safetensors" + _INDEX_SUFFIX) and name[0] != "."]
    if others and SINGLE_NAME not in names:
        if len(others) > 1:
            raise PlanError(f"{root}: no {HUB_INDEX_NAME}, but several others: {', '.join(others)}")
        return others[0]
    return None


def parse_index(text: bytes, where: str) -> dict[str, str]:
    """Parse an index.json: tensor name -> file name. Of what it says of sizes nothing is believed, or needed.

    Raises:
        FormatError: it is none, or names something else than .safetensors files beside it.
    """
    weight_map = Fields(parse_object(text, where), where).object("weight_map")
    if not weight_map:
        raise FormatError(f"{where}: 'weight_map' is empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^./\\\0][^/\\\0]*\.safetensors", file):
            raise FormatError(f"{where}: tensor {shown(name)}: {shown(file)} is not the name of a .safetensors file")
    return dict(weight_map)


def _assemble(
    root: Path,
    shards: list[tuple[SourceFile, Header]],
    *,
    named: Mapping[str, str] | None,
    config: Config,
    index: tuple[str, bytes] | None,
    side_files: tuple[str, ...],
    left_out: list[str],
    is_file: bool = False,
) -> Catalogue:
    tensors: dict[str, SourceTensor] = {}
    for position, (shard, header) in enumerate(shards):
        elsewhere = 0
        for entry in header.tensors:
            if named is not None and named.get(entry.name, shard.name) != shard.name:
                elsewhere += 1
                continue
            if entry.name in tensors:
                other = shards[tensors[entry.name].file][0]
                raise FormatError(f"{shard.path}: tensor {entry.name!r} is in {other.name} as well")
            extent = Extent(header.data_start + entry.offset, entry.nbytes)
            tensors[entry.name] = SourceTensor(entry.name, entry.dtype, entry.shape, position, extent)
        if elsewhere:
            left_out.append(f"{shard.name}: {elsewhere} of its tensors: the index names them in other files")
    if named is not None:
        for name, file in named.items():
            if name not in tensors:
                raise FormatError(f"{root / file}: tensor {shown(name)}: named by the index, not in the file")
    first = dict(shards[0][1].metadata)
    return Catalogue(
        root=root,
        files=tuple(shard for shard, _ in shards),
        tensors=tuple(sorted(tensors.values(), key=lambda tensor: (model_order(tensor.name), tensor.name))),
        metadata={
            key: value for key, value in first.items() if all(header.metadata.get(key) == value for _, header in shards)
        },
        config=config.content,
        index=index,
        side_files=side_files,
        left_out=tuple(left_out),
        config_error=config.error,
        is_file=is_file,
    )


def _side_files(root: Path) -> tuple[tuple[str, ...], list[str]]:
    """Files that go along, and what does not, with the reason; names relative to `root`, sorted."""
    kept, left_out = [], []
    for path, reason in sorted(_walk(root, root)):
        name = path.relative_to(root).as_posix()
        is_part = path.parent == root and (path.suffix == ".safetensors" or name.endswith(_INDEX_SUFFIX))
        if reason is None and (path.suffix in _WEIGHT_SUFFIXES or name.endswith(_INDEX_SUFFIX)):
            reason = "weights that are not part of the model"
        elif reason is None and name.startswith("relayout."):
            reason = "a name that relayout uses itself"
        if reason is None:
            kept.append(name)
        elif not is_part:
            left_out.append(f"{name}: {reason}")
    return tuple(kept), left_out


def _walk(folder: Path, root: Path) -> Iterator[tuple[Path, str | None]]:
    """Everything below a folder that is not hidden: the path, and why it cannot go along, if it cannot."""
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if not is_utf8(entry.name):
            yield path, "its name is not UTF-8"
        elif entry.is_dir(follow_symlinks=False):
            if (path / MANIFEST_NAME).exists():
                yield path, "a converted checkpoint"
            else:
                yield from _walk(path, root)
        elif entry.is_symlink() and not is_member(root, path):
            yield path, "a link that leads out of the checkpoint"
        elif not path.is_file():
            yield path, "a link to a folder, or to nothing" if entry.is_symlink() else "not a regular file"
        elif not os.access(path, os.R_OK):
            raise FormatError(f"{path}: cannot be read: {os.strerror(errno.EACCES)}")
        else:
            yield path, None
