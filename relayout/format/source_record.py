"""The source record: a description of the source checkpoint, with which it can be compared and restored. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from relayout.core.digests import xxh3_hex
from relayout.core.slices import BITS, Cut, num_bytes
from relayout.errors import FormatError, about, readable, shown
from relayout.format.fields import Fields, check_apart, check_name, check_path, dump_slice, parse_object, parse_slice
from relayout.format.index import FORMAT_VERSION, MANIFEST_NAME, RANKS, WHOLE_TENSORS
from relayout.format.manifest import check_version, compact_json, parse_shapes
from relayout.format.safetensors import LENGTH_NBYTES

_ORIGINS = ("builtin", "file", "transformers", "vllm", "sglang")
_MAX_RULES_NBYTES = 2**20
"""Maximum bytes of a plan as compact JSON. A plan file of 2^18 bytes and its base plan take less than half."""


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that was copied unchanged."""

    name: str
    """Path relative to the folder."""
    nbytes: int
    digest: str
    mode: int
    """Permission bits."""


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A shard of the source."""

    name: str
    """Path relative to the folder."""
    nbytes: int
    header: bytes
    """The bytes before its data section."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A digest of a whole file of a plain checkpoint, and where the digest is from."""

    name: str
    """Path relative to the folder."""
    digest: str
    """ALGORITHM:HEX, where the algorithm is "sha256", or "git-sha1": the blob id of git."""
    by: str
    """One of `VERIFIED_BY`."""


VERIFIED_BY = ("hub cache", "hub download", "SHA256SUMS", "model.sig")
"""Possible origins of a file's digest.

In this order: the name of its blob in the cache of the hub; the metadata that `hf download --local-dir` leaves; a list
of digests in the folder; a signature by a signer of the policy.
"""
_FILE_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """The plan by which the source was cut, and by which it is cut for other degrees."""

    name: str
    """Name of the built-in plan or the plan file, or the model type, or the engine's version and class."""
    origin: str
    """"builtin", "file", "transformers", "vllm" or "sglang"."""
    rules: Mapping[str, Any]
    """A JSON object with the keys of a plan file, for `plans.family.parse_rules`.

    It is empty for "vllm" and "sglang": the cuts were observed from the engine, at this degree only.
    """

    @property
    def full_name(self) -> str:
        """The plan as ORIGIN:NAME."""
        return f"{self.origin}:{self.name}"


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options that, with the source and the cuts of its tensors, decide which bytes a conversion writes."""

    num_ranks: int
    """The tensor-parallel degree."""
    plan: str
    """Full name of the plan, ORIGIN:NAME; "none" without a plan."""
    expert_parallel: bool
    """True if experts are held whole (expert parallel)."""
    alignment: int
    """Bytes."""
    max_part_nbytes: int
    """Approximate maximum bytes of a rank file."""
    dcp: bool
    """True if headers contain the metadata for PyTorch DCP."""
    layout: str
    """`RANKS` or `WHOLE_TENSORS`."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The source record; columns of equal length."""

    options: ConversionOptions
    plan: RecordedPlan | None
    """The plan by which the source was cut; None: one rank needs no plan."""
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    cuts: tuple[Cut, ...]
    cut_of: tuple[int, ...]
    """For each source tensor: position in `cuts`."""
    file_of: Sequence[int]
    """For each source tensor: position in `files`."""
    offsets: Sequence[int]
    """For each source tensor: absolute offset in its file."""
    files: tuple[RecordedFile, ...]
    index: tuple[str, bytes] | None
    """Name and bytes of the index.json; None if the source had none."""
    side_files: tuple[SideFile, ...]
    verified: tuple[FileDigest, ...] = ()
    """The digests with which whole shards were compared during the conversion; empty: none were known."""

    def cut(self, t: int) -> Cut:
        """Return the cut of a source tensor."""
        return self.cuts[self.cut_of[t]]


def dump_record(record: SourceRecord) -> bytes:
    """Serialize the source record, uncompressed. PlanError: it would be too large to be read again."""
    if record.plan is not None:
        readable(compact_json(record.plan.rules), _MAX_RULES_NBYTES, "the rules of a plan")
    top = {
        "relayout": FORMAT_VERSION,
        **asdict(record.options),
        "plan": None if record.plan is None else asdict(record.plan),
        "files": {
            "name": [file.name for file in record.files],
            "nbytes": [file.nbytes for file in record.files],
            # Valid UTF-8, or the header would not have been accepted.
            "header": [file.header[LENGTH_NBYTES:].decode() for file in record.files],
        },
        "index": None if record.index is None else {"name": record.index[0], "text": record.index[1].decode()},
        "side_files": {
            "name": [file.name for file in record.side_files],
            "nbytes": [file.nbytes for file in record.side_files],
            "digest": [file.digest for file in record.side_files],
            "mode": [file.mode for file in record.side_files],
        },
        "cuts": [list(map(dump_slice, cut.slices)) for cut in record.cuts],
        "tensors": {
            "name": record.names,
            "dtype": record.dtypes,
            "shape": record.shapes,
            "file": record.file_of,
            "offset": record.offsets,
            "cut": record.cut_of,
        },
    }
    if record.verified:
        names, digests, by = zip(*map(astuple, record.verified), strict=True)
        top["verified"] = {"name": names, "digest": digests, "by": by}
    return compact_json(top)


def conversion_digest(record: SourceRecord, digests: Sequence[str | None]) -> str | None:
    """Return the name of a conversion: a digest of its degree, weights and cuts; None if digests are unknown.

    Args:
        digests: of the source tensors.
    """
    if None in digests:
        return None
    cuts = [[dump_slice(part) for part in cut.slices] for cut in record.cuts]
    columns = (record.names, record.dtypes, record.shapes, digests, map(cuts.__getitem__, record.cut_of))
    top = {"num_ranks": record.options.num_ranks, "tensors": list(zip(*columns, strict=True))}
    return xxh3_hex(compact_json(top))


def parse_record(text: bytes, num_ranks: int, where: str) -> SourceRecord:
    """Parse the source record, given uncompressed. FormatError: it violates FORMAT.md."""
    with about(path=where):
        return _parse_record(Fields(parse_object(text, where)), num_ranks)


def _parse_record(top: Fields, num_ranks: int) -> SourceRecord:
    check_version(top.top)
    if top.size("num_ranks") != num_ranks:
        raise FormatError(f"is for {top.size('num_ranks')} ranks, {MANIFEST_NAME} for {num_ranks}", code="mismatch")
    tensors = Fields(top.object("tensors"))
    names = tensors.column("name", str)
    count = len(names)
    cuts = _parse_cuts(top, num_ranks)
    files = _parse_files(Fields(top.object("files")))
    index, plan = top.object_or_null("index"), _parse_plan(top.object_or_null("plan"))
    record = SourceRecord(
        options=_parse_options(top, plan),
        plan=plan,
        names=names,
        dtypes=tensors.column("dtype", str, count),
        shapes=parse_shapes(tensors.column("shape", list, count)),
        cuts=cuts,
        cut_of=tuple(tensors.positions("cut", count, len(cuts))),
        file_of=tensors.positions("file", count, len(files)),
        offsets=tensors.column("offset", int, count),
        files=files,
        index=None if index is None else _parse_index(Fields(index)),
        side_files=_parse_side_files(Fields(top.object("side_files"))),
        verified=_parse_verified(Fields(top.object("verified"))) if "verified" in top.top else (),
    )
    index_names = [] if record.index is None else [record.index[0]]
    known = {file.name for file in files}
    for one in record.verified:
        if one.name not in known:
            raise FormatError(f"verified: {shown(one.name)} is not a file of the source", code="field")
    _check_names([*(file.name for file in files), *(file.name for file in record.side_files), *index_names])
    _check_tensors(record)
    return record


def _parse_cuts(top: Fields, num_ranks: int) -> tuple[Cut, ...]:
    rows = top.top.get("cuts")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == num_ranks for row in rows):
        raise FormatError(f"'cuts' is missing or not a list of {num_ranks} slices each", code="field")
    return tuple(Cut(tuple(parse_slice(value) for value in row)) for row in rows)


def _parse_side_files(fields: Fields) -> tuple[SideFile, ...]:
    names = fields.column("name", str)
    count = len(names)
    sizes, modes = fields.column("nbytes", int, count), fields.column("mode", int, count)
    if modes and max(modes) > 0o777:
        raise FormatError("'mode' is not a list of permission bits", code="field")
    return tuple(map(SideFile, map(_path, names), sizes, fields.column("digest", str, count), modes))


def _parse_verified(fields: Fields) -> tuple[FileDigest, ...]:
    with about(part="verified"):
        names = fields.column("name", str)
        digests, by = fields.column("digest", str, len(names)), fields.column("by", str, len(names))
        for digest in digests:
            if not _FILE_DIGEST.fullmatch(digest):
                raise FormatError(f"{shown(digest)} is not a digest: expected ALGORITHM:HEX", code="field")
        for who in by:
            if who not in VERIFIED_BY:
                raise FormatError(f"by {shown(who)}, expected {' or '.join(VERIFIED_BY)}", code="field")
        return tuple(map(FileDigest, names, digests, by))


def _parse_index(fields: Fields) -> tuple[str, bytes]:
    return _path(fields.text("name")), fields.text("text").encode()


def _parse_plan(top: Mapping[str, Any] | None) -> RecordedPlan | None:
    if top is None:
        return None
    with about(part="plan"):
        fields = Fields(top)
        plan = RecordedPlan(fields.text("name"), fields.text("origin"), fields.object("rules"))
        if plan.origin not in _ORIGINS:
            raise FormatError(f"origin {shown(plan.origin)}, expected {' or '.join(_ORIGINS)}", code="field")
        if len(compact_json(plan.rules)) > _MAX_RULES_NBYTES:
            raise FormatError(f"rules of more than {_MAX_RULES_NBYTES} bytes", code="limit")
        return plan


def _parse_options(top: Fields, plan: RecordedPlan | None) -> ConversionOptions:
    if top.text("layout") not in (RANKS, WHOLE_TENSORS):
        raise FormatError(f"layout {shown(top.text('layout'))}, expected ranks or whole", code="field")
    if top.size("max_part_nbytes") < 1:
        raise FormatError("'max_part_nbytes' is 0, expected 1 or more", code="field")
    return ConversionOptions(
        num_ranks=top.size("num_ranks"),
        plan="none" if plan is None else plan.full_name,
        expert_parallel=top.flag("expert_parallel"),
        alignment=top.size("alignment"),
        max_part_nbytes=top.size("max_part_nbytes"),
        dcp=top.flag("dcp"),
        layout=top.text("layout"),
    )


def _check_names(names: Sequence[str]) -> None:
    check_apart(names)
    for name in names:
        if MANIFEST_NAME in name.split("/"):
            raise FormatError(f"{shown(name)} would turn the source into a converted folder", code="unsafe")


def _check_tensors(record: SourceRecord) -> None:
    if len(set(record.names)) != len(record.names):
        raise FormatError("a tensor name occurs twice", code="field")
    for name, dtype, shape, file, offset in zip(
        record.names, record.dtypes, record.shapes, record.file_of, record.offsets, strict=True
    ):
        check_name(name)
        nbytes = num_bytes(dtype, shape) if dtype in BITS else None
        if nbytes is None or offset + nbytes > record.files[file].nbytes:
            raise FormatError(
                f"{shown(dtype)} {shown(list(shape))} at {offset} is not in its file", tensor=name, code="field"
            )
    reach = [_reach(cut) for cut in record.cuts]
    for name, shape, cut in zip(record.names, record.shapes, record.cut_of, strict=True):
        for axis, end in reach[cut].items():
            if axis >= len(shape) or end > shape[axis]:
                raise FormatError(
                    f"{shown(list(shape))} has no slice up to {end} along dim {axis}", tensor=name, code="field"
                )


def _reach(cut: Cut) -> dict[int, int]:
    """Return the maximum end of slices along each axis."""
    ends: dict[int, int] = {}
    for part in cut.distinct:
        for axis, ranges in part.by_axis or ():
            end = max((start + length for start, length in ranges), default=0)
            ends[axis] = max(ends.get(axis, 0), end)
    return ends


def _parse_files(fields: Fields) -> tuple[RecordedFile, ...]:
    names = fields.column("name", str)
    sizes, headers = fields.column("nbytes", int, len(names)), fields.column("header", str, len(names))
    texts = (text.encode() for text in headers)
    return tuple(
        RecordedFile(_path(name), nbytes, len(text).to_bytes(LENGTH_NBYTES, "little") + text)
        for name, nbytes, text in zip(names, sizes, texts, strict=True)
    )


def _path(name: str) -> str:
    check_path(name)
    return name
