"""The vectors of vectors/*.toml: checkpoints that strangers might send, each a base and a few edits of its files.

An edit names a `file` of the checkpoint, there or not (a plan begins as base/plan.toml), and has one of these:

    set = POINTER, value = CONTENT        a field of its JSON anew, or one more; the value is JSON text
    remove = POINTER                      a field or an item less
    find = CONTENT, put = CONTENT         what stands there, once, is replaced
    at = OFFSET, drop = NBYTES, put = CONTENT   bytes are replaced
    keep = NBYTES                         the rest is cut off; below 0: so many bytes
    prepend = CONTENT, append = CONTENT   joins what is there
    content = CONTENT                     the whole file
    header = CONTENT, data = CONTENT      a safetensors file; `length`, if that in front of the header lies

POINTER is a JSON pointer (RFC 6901). CONTENT is text, or a list of texts and of these: `{ hex = "..." }`,
`{ repeat = [CONTENT, times] }`, `{ file = NAME }`, a file of the bases as it is stored (of the plain one or the
converted one, or BASE/NAME), `{ text = NAME }`, what is compressed in one, `{ field = POINTER, of = NAME }`, a field of
one, `{ bytes = [START, END], of = NAME }`, some bytes of one, `{ blake3 = CONTENT }`, a BLAKE3 digest in JSON, and
`{ encoding = "utf-16-le", of = CONTENT }`. A file *.zst is edited as the text in it and compressed anew, but for edits
with `stored = true`.

Digests in front of what is wrong are made truthful, so that the check is reached that the vector is meant for: those of
record, tables and manifest. `stale` names those that are not: "record", "tables". A manifest that is edited as text
stays as it is.

What is no file is `made`: name -> `fifo`, `socket`, `folder`, `nothing`, `hole NBYTES`, or `link TARGET`. A link's
target may be {self}, the link, or {outside}, a copy of the file that lies outside of the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

FOLDER = Path(__file__).parents[1] / "format" / "vectors"
BASES = FOLDER / "base"
INDEX, CONFIG, MANIFEST = "model.safetensors.index.json", "config.json", "relayout.json"
TABLES, RECORD = ["relayout.rank-0.json.zst", "relayout.rank-1.json.zst"], "relayout.source.json.zst"
WHOLE_TABLE = "relayout.whole.json.zst"
NAMES = ("plain", "converted", "whole")
"""Of the bases: a source, and what is made of it for two ranks, in both layouts."""

Vector = Mapping[str, Any]


@cache
def vectors() -> list[dict[str, Any]]:
    """All of them, in the order of the lists; a list's `defaults` are what its vectors do not say themselves."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
        found += [{**listed["defaults"], **one} for one in listed["vector"]]
    return found


@cache
def base(name: str) -> Mapping[str, bytes]:
    """The files of a base."""
    return {path.name: path.read_bytes() for path in sorted((BASES / name).iterdir())}


def laid_out(vector: Vector, place: Path) -> Path:
    """The vector's checkpoint, in a folder of that name."""
    folder = place / "checkpoint"
    folder.mkdir()
    for name, blob in {**base(vector["base"]), **changed_files(vector)}.items():
        (folder / name).write_bytes(blob)
    for name, kind in vector.get("made", {}).items():
        _make(folder / name, kind, place)
    return folder


def changed_files(vector: Vector) -> dict[str, bytes]:
    """The files of a vector that differ from its base's, or join them."""
    before, edits = base(vector["base"]), vector.get("edit", [])
    files = dict(before)
    for edit in edits:
        name = edit["file"]
        files[name] = _edited(files[name] if name in files else _of_a_base(name), edit)
    changed = {name for name, blob in files.items() if blob != before.get(name)}
    is_rewritten = any(edit["file"] == MANIFEST and not edit.keys() & {"set", "remove"} for edit in edits)
    if any(name.startswith("relayout.") and name.endswith((".json", ".zst")) for name in changed) and not is_rewritten:
        _sign(files, changed, vector.get("stale", []))
    return {name: blob for name, blob in files.items() if blob != before.get(name)}


# Edits.


def _edited(blob: bytes, edit: Mapping[str, Any]) -> bytes:
    if edit["file"].endswith(".zst") and not edit.get("stored"):
        return _compress(_changed(_decompress(blob) if blob else b"", edit, _compact))
    return _changed(blob, edit, _manifest_text if edit["file"] == MANIFEST else _indented)


def _changed(blob: bytes, edit: Mapping[str, Any], dump: Callable[[Any], bytes]) -> bytes:
    """The bytes after one edit; `dump` makes JSON text of the file's style."""
    match edit:
        case {"set": pointer, "value": value}:
            return dump(_with_field(json.loads(blob), pointer, json.loads(content(value))))
        case {"remove": pointer}:
            return dump(_with_field(json.loads(blob), pointer))
        case {"find": old, "put": new}:
            assert blob.count(content(old)) == 1, f"{old!r} does not stand there once"
            return blob.replace(content(old), content(new))
        case {"at": offset, "drop": nbytes, "put": new}:
            return blob[:offset] + content(new) + blob[offset + nbytes :]
        case {"keep": nbytes}:
            return blob[:nbytes]
        case {"prepend": more}:
            return content(more) + blob
        case {"append": more}:
            return blob + content(more)
        case {"content": whole}:
            return content(whole)
        case {"header": header}:
            return file_of(content(header), content(edit.get("data", "")), edit.get("length"))
    raise AssertionError(edit)


def _with_field(top: Any, pointer: str, *value: Any) -> Any:
    """The object with the one value at the pointer, or with nothing there."""
    *way, last = _parts(pointer)
    place = _field(top, way)
    if isinstance(place, list):
        place[int(last) : int(last) + 1] = value
    elif value:
        [place[last]] = value
    else:
        del place[last]
    return top


def _parts(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _field(top: Any, way: Sequence[str]) -> Any:
    for part in way:
        top = top[int(part)] if isinstance(top, list) else top[part]
    return top


def content(what: Any) -> bytes:
    """The bytes that a CONTENT stands for."""
    match what:
        case str():
            return what.encode()
        case list():
            return b"".join(map(content, what))
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case {"repeat": [one, times]}:
            return content(one) * int(times)
        case {"file": name}:
            return _of_a_base(name)
        case {"text": name}:
            return _decompress(_of_a_base(name)) if name.endswith(".zst") else _of_a_base(name)
        case {"field": pointer, "of": name}:
            return json.dumps(_field(json.loads(content({"text": name})), _parts(pointer))).encode()
        case {"bytes": [start, end], "of": name}:
            return _of_a_base(name)[start:end]
        case {"blake3": what}:
            return json.dumps(blake3(content(what)).hexdigest()).encode()
        case {"encoding": encoding, "of": text}:
            return content(text).decode().encode(encoding)
    raise AssertionError(what)


def file_of(header: bytes, rest: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file, if need be with a false length of its header."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + rest


@cache
def _of_a_base(name: str) -> bytes:
    """A file of one of the bases, or the plan; nothing, if there is none."""
    places = (BASES / "plain" / name, BASES / "converted" / name, BASES / name)
    return next((place.read_bytes() for place in places if place.is_file()), b"")


def _indented(top: Any) -> bytes:
    return json.dumps(top, indent=2).encode()


def _manifest_text(top: Any) -> bytes:
    return (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()


def _compact(top: Any) -> bytes:
    return json.dumps(top, ensure_ascii=False, separators=(",", ":")).encode()


def _compress(text: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(text)


def _decompress(stored: bytes) -> bytes:
    """What a reader gets of a frame that may be cut off or a bomb, bit by bit; nothing of what is no frame."""
    frame, pieces = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj(), []
    with suppress(zstandard.ZstdError):
        for start in range(0, len(stored), 1024):
            if frame.eof:
                break
            pieces.append(frame.decompress(stored[start : start + 1024]))
    return b"".join(pieces)


# Digests.


def _sign(files: dict[str, bytes], changed: Container[str], stale: Container[str]) -> None:
    """Make true what the sidecar says of the files that were changed."""
    manifest = json.loads(files[MANIFEST])
    if RECORD in changed and "record" not in stale:
        manifest["source"]["record_digest"] = blake3(files[RECORD]).hexdigest()
    for rank, name in enumerate((*TABLES, WHOLE_TABLE)):
        if name in changed and "tables" not in stale:
            entry = manifest["whole"] if name == WHOLE_TABLE else manifest["ranks"][rank]
            entry["table_digest"] = blake3(files[name]).hexdigest()
    manifest.pop("self_digest", None)
    before = _manifest_text(manifest).removesuffix(b"\n}\n") + b",\n  "
    files[MANIFEST] = before + f'"self_digest": "{blake3(before).hexdigest()}"\n}}\n'.encode()


# What is no file.


def _make(path: Path, kind: str, place: Path) -> None:
    """Put a thing in the place of a file."""
    outside = place / "outside" / path.name
    if "{outside}" in kind:
        outside.parent.mkdir()
        shutil.copyfile(path, outside)
    path.unlink(missing_ok=True)
    match kind.split():
        case ["fifo"]:
            os.mkfifo(path)
        case ["folder"]:
            path.mkdir()
        case ["nothing"]:
            pass
        case ["hole", nbytes]:
            path.touch()
            os.truncate(path, int(nbytes))
        case ["socket"]:
            # The name of a socket has about 100 bytes at most.
            here = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
        case ["link", target]:
            path.symlink_to(target.format(self=path.name, outside=outside))
        case _:
            raise AssertionError(kind)
