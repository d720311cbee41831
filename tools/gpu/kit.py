"""The kit of the step `engine`: a vLLM for a GPU machine without a network, in pieces that a call can carry.

`tools/run gpu --step kit --out .kit` downloads the wheels of vLLM and of what it needs, and packs them. Left out is all
that bf16 models on a Hopper GPU do not need. The largest part is code for other GPUs, in the section `.nv_fatbin` of
the libraries: it is overwritten with zeros, which cost nothing when compressed. The driver finds the code of its GPU by
headers, and they are unchanged.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = "3.12"
"""Of the GPU machine."""
SM = 90
"""Compute capability of the GPU: H100 and H200."""
CALL_NBYTES = 64 * 2**20
"""Of the files that a call carries: the project's own, and a piece of the kit."""
_SPARE_NBYTES = 2**19
VLLM = "vllm==0.32.0"
"""Pins torch 2.13. Its libraries need only symbols of torch's stable ABI, which the machine's torch 2.11 has."""
UNPACKER = "zstandard==0.25.0"
"""Lies next to the pieces, because it unpacks them; without its second backend, which is half of it."""
_SECOND_BACKEND = re.compile(r"cffi|\.pyi$")
OTHERS = """
    annotated-types==0.8.0 apache-tvm-ffi==0.1.10 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
    compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 distro==1.9.0 docstring-parser==0.18.0 fastapi==0.136.3
    fastsafetensors==0.5.0 gguf==0.19.0 httpcore2==2.16.2 httpx2==2.16.2 ijson==3.6.0 interegular==0.3.3
    jiter==0.19.0 jmespath==1.1.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2
    llguidance==1.7.6 lm-format-enforcer==0.11.3 loguru==0.7.3 mcp-types==2.3.0 mcp==2.3.0 mistral-common==1.13.1
    model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai-harmony==0.0.8 openai==3.57.0
    opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 orjson==3.13.0
    partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pycountry==26.2.16
    pydantic-core==2.50.5 pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 pydantic==2.14.4
    python-dotenv==1.2.4 python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0
    rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 sse-starlette==3.7.0 starlette==1.10.0 truststore==0.10.5
    typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.7 xxhash==4.1.0
"""
"""Packages that importing and starting vLLM and relayout needs, and that the machine's image lacks.

torch, transformers, triton, numba, numpy and safetensors are in the image, and must not be in the kit.
"""
_LEFT_OUT = re.compile(
    r"vllm/vllm-rs|vllm/_(qutlass|rust)|_vllm_fa2_C|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/"
    r"|vllm/kernels/helion/configs|/fused_moe/configs/(?!.*H[12]00)|pycountry/locales|mistral_common/data/"
    r"|/instrumentator/static/|/tests?/|\.pyi$|\.data/|dist-info/(licenses|LICENSE)|vllm-[^/]*dist-info/RECORD"
)
"""Files without which vLLM serves a bf16 model. RECORD of other packages stays: xgrammar reads its own."""
_GLIBC = (17, 24, 26, 27, 28, 31, 34)
_FATBIN_MAGIC = 0xBA55ED50
_CODE = 2
"""The kind of an entry of a fat binary that has machine code; 1 is PTX."""


def make_kit(out: Path, wheels: Path, piece_nbytes: int, level: int = 15) -> list[Path]:
    """Download, prune and pack, and return the folders to carry, one for each call.

    Args:
        out: the folder of the kit, replaced if it is one.
        wheels: keeps the downloads.
        piece_nbytes: bytes that a call has room for, as `room` returns them.
        level: of zstd.
    """
    files = dict(contents(download(wheels, [VLLM, *OTHERS.split()])))
    unpacker = unpacker_of(*download(wheels, [UNPACKER]))
    packed = pack(files, level)
    check(packed, files)
    total = sum(map(len, files.values()))
    print(f"{len(files)} files, {total / 2**20:.0f} MiB, packed {len(packed) / 2**20:.1f} MiB", flush=True)
    return write_pieces(out, packed, unpacker, piece_nbytes)


def room(root: Path) -> int:
    """Return the bytes that a call has left for a piece, next to the files of the checkout, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    paths = {root / name for name in listed.stdout.decode().split("\0") if name}
    return CALL_NBYTES - _SPARE_NBYTES - sum(path.lstat().st_size for path in paths if path.is_file())


def unpacker_of(wheel: Path) -> bytes:
    """Return a zip file with what joins need of the wheel of zstandard."""
    slim = io.BytesIO()
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for name in archive.namelist():
            if name.startswith("zstandard/") and not name.endswith("/") and not _SECOND_BACKEND.search(name):
                made.writestr(name, archive.read(name))
    return slim.getvalue()


def download(folder: Path, requirements: Iterable[str]) -> list[Path]:
    """Return the wheels of these requirements for the machine's Python, without their dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(requirements)
    if missing := [one for one in wanted if not _found(folder, one)]:
        platforms = [f"manylinux_2_{number}_x86_64" for number in _GLIBC]
        platforms += [f"manylinux{year}_x86_64" for year in (1, 2010, 2014)]
        options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
        options += [word for platform in platforms for word in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *missing]
        subprocess.run(command, check=True)
    return [_found(folder, one)[0] for one in wanted]


def _found(folder: Path, requirement: str) -> list[Path]:
    name, _, version = requirement.partition("==")
    return sorted(folder.glob(f"{re.sub('[-.]+', '_', name)}-{version}-*.whl"))


def contents(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield path and bytes of each file that the kit has of these wheels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith("/") and not _LEFT_OUT.search(name):
                    stored = archive.read(name)
                    yield name, prune(stored) if name.endswith(".so") else stored


@dataclass(frozen=True)
class Entry:
    """One program of a fat binary."""

    kind: int
    arch: int
    start: int
    """Offset of its bytes in the file, behind its header."""
    end: int

    @property
    def is_kept(self) -> bool:
        """True if it is machine code of the GPU."""
        return self.kind == _CODE and self.arch == SM


def prune(library: bytes) -> bytes:
    """Return an ELF library of the same length, without code for other GPUs."""
    section = _section(library, b".nv_fatbin")
    if section is None:
        return library
    pruned = bytearray(library)
    for entry in entries(library, *section):
        if not entry.is_kept:
            pruned[entry.start : entry.end] = bytes(entry.end - entry.start)
    return bytes(pruned)


def entries(library: bytes, start: int, end: int) -> Iterator[Entry]:
    """Yield the programs of all fat binaries in a section.

    A fat binary: magic number (u32), version (u16), length of its header (u16), length of what follows (u64). An entry:
    kind, version (u16), length of its header (u32), of its bytes (u64); at byte 28 the compute capability (u32).
    """
    while start + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", library, start)
        if magic != _FATBIN_MAGIC:
            start += 8
            continue
        at, start = start + header, start + header + length
        while at < start:
            kind, _, head, nbytes = struct.unpack_from("<HHIQ", library, at)
            (arch,) = struct.unpack_from("<I", library, at + 28)
            yield Entry(kind, arch, at + head, at + head + nbytes)
            at += head + nbytes


def _section(library: bytes, name: bytes) -> tuple[int, int] | None:
    """Return the offsets of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    for row in rows:
        at = rows[of_names][4] + row[0]
        if library[at : library.index(b"\0", at)] == name:
            return row[4], row[4] + row[5]
    return None


def pack(files: dict[str, bytes], level: int) -> bytes:
    """Return a tar archive compressed with zstd; libraries come first, since they resemble each other."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(level, window_log=27, enable_ldm=True, threads=-1)
    packed = io.BytesIO()
    with (
        zstandard.ZstdCompressor(compression_params=parameters).stream_writer(packed, closefd=False) as writer,
        tarfile.open(fileobj=writer, mode="w|") as archive,
    ):
        for name in sorted(files, key=lambda name: (not name.endswith(".so"), name)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o755 if ".so" in name else 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return packed.getvalue()


def check(packed: bytes, files: dict[str, bytes]) -> None:
    """Unpack in memory, and raise SystemExit unless all files are in the archive, with their bytes."""
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(io.BytesIO(packed))
    left = dict(files)
    with reader, tarfile.open(fileobj=reader, mode="r|") as archive:
        for entry in archive:
            stream = archive.extractfile(entry)
            if stream is None or stream.read() != left.pop(entry.name, None):
                raise SystemExit(f"kit: {entry.name} differs after packing")
    if left:
        raise SystemExit(f"kit: {len(left)} files are missing after packing, such as {min(left)}")


def write_pieces(out: Path, packed: bytes, unpacker: bytes, piece_nbytes: int) -> list[Path]:
    """Write a folder for each call: a piece, the digests of all pieces, and in the first one the unpacker."""
    if out.exists() and not (out / "1" / "kit.json").exists() and any(out.iterdir()):
        raise SystemExit(f"kit: {out} is not a kit: it is not replaced")
    first = piece_nbytes - len(unpacker)
    if first <= 0:
        raise SystemExit(f"kit: a call has room for {piece_nbytes} bytes only: the checkout is too large")
    pieces = [packed[:first], *(packed[at : at + piece_nbytes] for at in range(first, len(packed), piece_nbytes))]
    digests = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    shutil.rmtree(out, ignore_errors=True)
    folders = []
    for number, piece in enumerate(pieces, 1):
        folder = out / str(number)
        folder.mkdir(parents=True)
        (folder / f"piece-{number}").write_bytes(piece)
        (folder / "kit.json").write_text(json.dumps({"vllm": VLLM, "pieces": digests}))
        folders.append(folder)
    (folders[0] / "unpacker.zip").write_bytes(unpacker)
    return folders


def calls(folders: list[Path]) -> Iterator[str]:
    """Yield, for a person, what to carry to the machine and to run there, call by call."""
    for number, folder in enumerate(folders, 1):
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        command = f"python3 tools/gpu/join.py {folder}"
        if number == len(folders):
            command += " --out $OUT"
        yield f"call {number} of {len(folders)}: carry {folder} ({size:.1f} MiB), run: {command}"
