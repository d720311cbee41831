"""Access to cuFile, against a library that is made up here: device memory is host memory, reads are reads of files.

It keeps the real one's ways, as observed with libcufile 1.15 and 1.20: what a failed opening of the driver does to its
settings, that anything else opens it once more, what numbers handles have, which errors are raised and which returned.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.cuda.gds
from support.loader_fixtures import open_files

from relayout.loader.backends import cufile
from relayout.loader.backends.cufile import Bindings, CuFile, FoundCuFile, Torch, find_cufile

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="cuFile is for Linux")

Bytes = npt.NDArray[np.uint8]

NBYTES = 300_001
ALLOW_COMPAT, FORCE_COMPAT, POSIX_IO, GDS_FALLBACK = 1, 2, 12, 13
CODES = {
    5001: "DRIVER_NOT_INITIALIZED",
    5008: "IO_NOT_SUPPORTED",
    5020: "DIO_NOT_SET",
    5022: "INVALID_VALUE",
    5023: "MEMORY_ALREADY_REGISTERED",
    5024: "MEMORY_NOT_REGISTERED",
    5026: "DRIVER_ALREADY_OPEN",
    5027: "HANDLE_NOT_REGISTERED",
    5036: "GPU_MEMORY_PINNING_FAILED",
}
"""As cufile.h has them."""


class cuFileError(Exception):
    """Like the one of the bindings, which cannot be made of an errno."""

    def __init__(self, status: int, cu_err: int | None = None) -> None:
        if status not in CODES:
            raise ValueError(f"{status} is not a valid OpError")
        self.status = status
        self.cuda_error = cu_err
        super().__init__(f"{CODES[status]} ({status}): the library's words. And some advice")


class HandleUnion(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class Descriptor(ctypes.Structure):
    """`CUfileDescr_t`, written down from cufile.h."""

    _fields_ = (("type", ctypes.c_int), ("handle", HandleUnion), ("fs_ops", ctypes.c_void_p))


class Library:
    """libcufile by the functions of `cuda.bindings.cufile`."""

    cuFileError = cuFileError

    def __init__(self) -> None:
        self.configured = {ALLOW_COMPAT: True, FORCE_COMPAT: False, POSIX_IO: False, GDS_FALLBACK: False}
        """The configuration file's, or cuFile's own."""
        self.direct = True
        """Whether anything can be read without compat mode."""
        self.knows_drive = True
        """Whether udev has an entry of the file's drive."""
        self.supports: Callable[[int], bool] = lambda fd: True
        """Whether that file can be."""
        self.pins = True
        self.most = 2**40
        """Bytes that a read gives at most."""
        self.raises: Callable[[], Exception] | None = None
        self.returns: int | None = None
        """What reads do instead."""
        self.on_read: Callable[[], None] = lambda: None
        self.torch_tells = False
        """Whether torch is a newer one, which does not keep short reads to itself."""
        self.opening_seconds = 0.0

        self.staged: dict[int, bool] = {}
        self.settings: dict[int, bool] | None = None
        """Of the driver, if it is open."""
        self.handles: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.reads: list[tuple[int, int]] = []
        """Base addresses and offsets from them."""

    def get_parameter_bool(self, param: int) -> bool:
        if param not in self.configured:
            raise cuFileError(5022)
        return (self.staged.get(param, False) if self.settings is None else self.settings[param]) is True

    def set_parameter_bool(self, param: int, value: bool) -> None:
        self.calls.append("set_parameter_bool")
        if self.settings is not None:
            if not self.settings[FORCE_COMPAT]:
                raise cuFileError(5026)
            self.settings[param] = value  # Accepted, and of no effect on reads: seen with 1.15 and 1.20.
            return
        self.staged[param] = value
        time.sleep(self.opening_seconds)

    def driver_open(self) -> None:
        self.calls.append("driver_open")
        if self.settings is not None:
            return
        settings = self.configured | self.staged
        self.staged.clear()
        time.sleep(self.opening_seconds)
        if not self.direct and not settings[ALLOW_COMPAT]:
            raise cuFileError(5001)
        self.settings = settings

    def handle_register(self, descr: int) -> int:
        self.calls.append("handle_register")
        self.driver_open()
        assert self.settings is not None
        descriptor = Descriptor.from_address(descr)
        assert (descriptor.type, descriptor.fs_ops) == (1, None)
        fd: int = descriptor.handle.fd
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise cuFileError(5020)
        if not self.knows_drive:
            raise cuFileError(5027)
        is_compat = self.settings[ALLOW_COMPAT] or self.settings[FORCE_COMPAT]
        if not (self.direct and self.supports(fd)) and not is_compat:
            raise cuFileError(5008)
        number = -6_076_574_521_278_595_068 + fd
        self.handles[number] = fd
        return number

    def handle_deregister(self, fh: int) -> None:
        del self.handles[fh]

    def read(self, fh: int, buf_ptr_base: int, size: int, file_offset: int, buf_ptr_offset: int) -> int:
        if self.raises is not None:
            raise self.raises()
        if self.returns is not None:
            return self.returns
        if fh not in self.handles:
            raise cuFileError(5027)
        self.reads.append((buf_ptr_base, buf_ptr_offset))
        # Another file description, without O_DIRECT.
        with open(f"/proc/self/fd/{self.handles[fh]}", "rb") as file:
            file.seek(file_offset)
            stored = file.read(min(size, self.most))
        ctypes.memmove(buf_ptr_base + buf_ptr_offset, stored, len(stored))
        self.on_read()
        return len(stored)

    def buf_register(self, buf_ptr_base: int, length: int, flags: int) -> None:
        assert flags == 0
        if not self.pins:
            raise cuFileError(5036)
        if buf_ptr_base in self.registered:
            raise cuFileError(5023)
        self.registered[buf_ptr_base] = length

    def buf_deregister(self, buf_ptr_base: int) -> None:
        if self.registered.pop(buf_ptr_base, None) is None:
            raise cuFileError(5024)


def with_torch_errors(function: Callable[..., Any], prefix: str) -> Callable[..., Any]:
    """The function as torch's C++ calls it."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except cuFileError as error:
            message = f"{prefix} failed: {error}"
        raise RuntimeError(message)  # Out here it has no context, as none from C++ has.

    return call


def put_behind_torch(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `torch.cuda.gds` use the library: its Python code stays, the C functions behind it are replaced."""

    def register_handle(fd: int) -> int:
        descriptor = Descriptor(1, HandleUnion(fd=fd), None)
        return library.handle_register(ctypes.addressof(descriptor))

    def load(handle: int, storage: torch.UntypedStorage, offset: int) -> None:
        count = library.read(handle, storage.data_ptr(), storage.nbytes(), offset, 0)
        if count < storage.nbytes() and library.torch_tells:
            raise RuntimeError(f"cuFileRead read {count} of {storage.nbytes()} bytes\nbacktrace")

    functions: dict[str, tuple[str, Callable[..., Any]]] = {
        "_gds_register_handle": ("cuFileHandleRegister", register_handle),
        "_gds_deregister_handle": ("cuFileHandleDeregister", library.handle_deregister),
        "_gds_load_storage": ("cuFileRead", load),
        "_gds_register_buffer": (
            "cuFileBufRegister",
            lambda storage: library.buf_register(storage.data_ptr(), storage.nbytes(), 0),
        ),
        "_gds_deregister_buffer": (
            "cuFileBufDeregister",
            lambda storage: library.buf_deregister(storage.data_ptr()),
        ),
    }
    for name, (real, function) in functions.items():
        assert hasattr(torch._C, name)
        monkeypatch.setattr(torch._C, name, with_torch_errors(function, real))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with a GPU, whose nvidia-fs is in the folder given back; not a file descriptor more in the end."""
    place = tmp_path / "machine"
    place.mkdir()
    (place / "modules").write_text("nvidia 1 0 - Live 0x0\n")
    monkeypatch.setattr(cufile, "KERNEL_MODULES", place / "modules")
    monkeypatch.setattr(cufile, "UDEV", place / "udev")
    monkeypatch.setattr(cufile, "CONFIG", place / "cufile.json")
    monkeypatch.setattr(cufile, "NVIDIA_FS", place / "nvidia-fs")
    monkeypatch.setattr(cufile, "_opened_by", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"):
        monkeypatch.setenv(name, "")  # What the code sets is undone, too.
        monkeypatch.delenv(name)
    before = open_files()
    yield place
    assert open_files().items() <= before.items()  # Another test's may have been closed late.


def load_nvidia_fs(machine: Path) -> None:
    (machine / "nvidia-fs").mkdir()
    (machine / "nvidia-fs" / "devcount").write_text("1\n")


@pytest.fixture
def stored() -> Bytes:
    return np.random.default_rng(7).integers(1, 256, NBYTES, dtype=np.uint8)  # No zeros.


@pytest.fixture
def path(tmp_path: Path, stored: Bytes) -> Path:
    path = tmp_path / "model-rank-0-part-0.safetensors"
    stored.tofile(path)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system of temporary files refuses direct I/O: {error}")
    return path


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The module that cuFile is reached by. What `CuFile` does with either is tested with one of them."""
    return str(getattr(request, "param", "bindings"))


@pytest.fixture
def library(kind: str, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The one behind the module; where that is torch's, the bindings are not installed."""
    library = Library()
    put_behind_torch(library, monkeypatch)
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", library if kind == "bindings" else None)
    for name in ("get_parameter_bool", "set_parameter_bool"):
        monkeypatch.setattr(Torch, name, lambda self, *args, name=name: getattr(library, name)(*args))
    return library


only_torch = pytest.mark.parametrize("kind", ["torch"])
by_both = pytest.mark.parametrize("kind", ["bindings", "torch"])


def driver_of(kind: str) -> CuFile:
    return CuFile(Bindings() if kind == "bindings" else Torch())


@pytest.fixture
def driver(kind: str, library: Library) -> CuFile:
    return driver_of(kind)


def arena_of(nbytes: int) -> torch.Tensor:
    """Zeros, inside a larger allocation."""
    return torch.zeros(nbytes + 8192, dtype=torch.uint8)[4096 : 4096 + nbytes]


def found_at(path: Path) -> FoundCuFile:
    found = find_cufile(path)
    assert isinstance(found, FoundCuFile), found
    return found


def reason_at(path: Path) -> str:
    """Why nothing was found."""
    found = find_cufile(path)
    assert isinstance(found, str), found
    return found


# Reading.


@by_both
@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "refuses to be pinned"])
@pytest.mark.parametrize(
    ("offset", "nbytes", "place"),
    [(8192, 65536, 4096), (12345, 777, 9), (0, NBYTES, 0)],
)
def test_bytes_arrive_where_they_belong_and_nowhere_else(
    driver: CuFile, library: Library, path: Path, stored: Bytes, pins: bool, offset: int, nbytes: int, place: int
) -> None:
    arena = arena_of(NBYTES + 100)
    library.pins = pins
    assert driver.register(arena) is pins
    handle = driver.open(path)
    assert handle.read(arena[place : place + nbytes], offset) == nbytes
    handle.close()
    handle.close()  # Once is enough.
    assert not library.handles
    driver.deregister(arena)
    expected = np.zeros(NBYTES + 100, np.uint8)
    expected[place : place + nbytes] = stored[offset : offset + nbytes]
    np.testing.assert_array_equal(arena.numpy(), expected)


@by_both
@pytest.mark.parametrize("torch_tells", [True, False])
def test_a_read_ends_where_the_file_ends(
    driver: CuFile, library: Library, path: Path, stored: Bytes, torch_tells: bool
) -> None:
    library.torch_tells = torch_tells
    arena = arena_of(4096)
    handle = driver.open(path)
    assert handle.read(arena, NBYTES - 1000) == 1000
    assert handle.read(arena[2000:], NBYTES) == handle.read(arena[2000:], NBYTES + 5000) == 0
    handle.close()
    np.testing.assert_array_equal(arena[:1000].numpy(), stored[-1000:])
    assert not arena[1000:].any()


def test_the_bindings_tell_how_much_a_short_read_has_read(
    driver: CuFile, library: Library, path: Path, stored: Bytes
) -> None:
    library.most = 7000
    arena = arena_of(NBYTES)
    handle = driver.open(path)
    counts: list[int] = []
    while sum(counts) < NBYTES:
        counts.append(handle.read(arena[sum(counts) :], sum(counts)))
    handle.close()
    assert counts == [7000] * 42 + [6001]
    np.testing.assert_array_equal(arena.numpy(), stored)


@only_torch
@pytest.mark.parametrize("torch_tells", [True, False])
@pytest.mark.parametrize("most", [0, 4095])
@pytest.mark.parametrize("before", [0x00, 0xFF])
def test_a_short_read_by_torch_never_goes_unnoticed(
    driver: CuFile, library: Library, path: Path, torch_tells: bool, most: int, before: int
) -> None:
    library.most, library.torch_tells = most, torch_tells
    handle = driver.open(path)
    with pytest.raises(OSError, match=r"cuFile: .*read .* 4096 bytes at byte 8192") as caught:
        handle.read(arena_of(4096).fill_(before), 8192)
    handle.close()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert "backtrace" not in str(caught.value)


@only_torch
@pytest.mark.parametrize("last", [0x00, 0xFF])
def test_a_full_read_by_torch_is_right_whatever_its_last_byte_is(
    driver: CuFile, library: Library, path: Path, stored: Bytes, last: int
) -> None:
    stored[8191] = last
    stored.tofile(path)
    arena = arena_of(8192)
    handle = driver.open(path)
    assert handle.read(arena, 0) == 8192
    handle.close()
    np.testing.assert_array_equal(arena.numpy(), stored[:8192])
    assert len(library.reads) == (2 if last == 0xFF else 1)  # As of a mark that may be data.


@only_torch
def test_a_file_that_shrinks_while_torch_reads_it_is_noticed(driver: CuFile, library: Library, path: Path) -> None:
    handle = driver.open(path)
    library.on_read = lambda: os.truncate(path, 10_000)
    with pytest.raises(OSError, match="became shorter while it was read at byte 8192") as caught:
        handle.read(arena_of(4096), 8192)
    handle.close()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


@by_both
def test_many_threads_read_one_file_at_once(driver: CuFile, path: Path, stored: Bytes) -> None:
    arena = arena_of(NBYTES)
    driver.register(arena)
    handle = driver.open(path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: handle.read(arena[at : at + 4096], at), range(0, NBYTES, 4096)))
    handle.close()
    np.testing.assert_array_equal(arena.numpy(), stored)


INVALID = r"INVALID_VALUE \(5022\): the library's words at byte 4096"


@pytest.mark.parametrize(
    ("kind", "raises", "returns", "code", "message"),
    [
        ("bindings", lambda: cuFileError(5022), None, errno.EIO, f"cuFile: {INVALID}"),
        ("bindings", None, -5022, errno.EIO, f"cuFile: {INVALID}"),
        ("bindings", None, -28, errno.ENOSPC, r"cuFile: No space left on device at byte 4096"),
        ("bindings", RuntimeError, None, errno.EIO, r"cuFile: RuntimeError at byte 4096"),
        ("torch", lambda: cuFileError(5022), None, errno.EIO, f"cuFile: cuFileRead failed: {INVALID}"),
    ],
)
def test_a_failed_read_is_an_oserror_that_says_what_and_where(
    driver: CuFile,
    library: Library,
    path: Path,
    raises: Callable[[], Exception] | None,
    returns: int | None,
    code: int,
    message: str,
) -> None:
    handle = driver.open(path)
    library.raises, library.returns = raises, returns
    with pytest.raises(OSError, match=message) as caught:
        handle.read(arena_of(4096), 4096)
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
    assert "advice" not in str(caught.value)
    handle.close()


def test_what_is_no_file_is_refused_and_not_waited_for(driver: CuFile, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        driver.open(tmp_path / "fifo")
    for look in (driver.open, find_cufile):
        with pytest.raises(FileNotFoundError):
            look(tmp_path / "nothing")


# Pinned memory.


def test_an_arena_is_pinned_once_and_reads_into_it_name_where_it_starts(
    driver: CuFile, library: Library, path: Path
) -> None:
    both = arena_of(104_096)
    arena, behind = both[:100_000], both[100_000:]
    assert driver.register(arena)
    assert library.registered == {arena.data_ptr(): 100_000}
    handle = driver.open(path)
    for piece in (arena[:4096], arena[50_000:60_000], arena[99_999:], behind):
        handle.read(piece, 0)
    driver.deregister(arena)
    handle.read(arena[50_000:60_000], 0)
    handle.close()
    assert library.registered == {}
    start = arena.data_ptr()
    assert library.reads == [(start, 0), (start, 50_000), (start, 99_999), (start + 100_000, 0), (start + 50_000, 0)]


# What passes as GPUDirect Storage.


@pytest.mark.parametrize(
    ("nvidia_fs", "expected"), [("loaded", "GDS"), ("without devices", "P2PDMA"), ("none", "P2PDMA")]
)
def test_a_file_that_is_taken_with_compat_mode_refused_is_read_directly(
    library: Library, kind: str, path: Path, machine: Path, nvidia_fs: str, expected: str
) -> None:
    if nvidia_fs == "loaded":
        load_nvidia_fs(machine)
    elif nvidia_fs == "without devices":
        (machine / "nvidia-fs").mkdir()
    found = found_at(path)
    assert found.path == expected
    assert found.driver.name == ("cuda.bindings.cufile" if kind == "bindings" else "torch.cuda.gds")
    assert "compat mode refused" in found.reason
    assert ("nvidia-fs is not loaded" in found.reason) is (expected != "GDS")
    assert library.settings == {ALLOW_COMPAT: False, FORCE_COMPAT: False, POSIX_IO: False, GDS_FALLBACK: False}
    assert library.calls[0] == "set_parameter_bool"
    assert not library.handles


def test_a_machine_without_direct_ways_has_none(library: Library, path: Path, machine: Path) -> None:
    library.direct = False
    assert reason_at(path) == (
        f"the kernel module nvidia-fs is not loaded ({machine / 'nvidia-fs'} is missing); "
        "cuFile: DRIVER_NOT_INITIALIZED (5001): the library's words"
    )
    # Any further call, by torch's module, too, would have opened the driver in compat mode.
    assert library.calls == ["set_parameter_bool", "driver_open"]
    assert library.settings is None


@by_both
def test_a_driver_that_someone_opened_in_compat_mode_does_not_pass(library: Library, path: Path, machine: Path) -> None:
    load_nvidia_fs(machine)
    library.supports = lambda fd: False
    library.driver_open()
    assert "cuFile may read through host memory: allow_compat_mode is on" in reason_at(path)
    assert not library.handles


@pytest.mark.parametrize(
    ("setting", "name"),
    [(FORCE_COMPAT, "force_compat_mode"), (POSIX_IO, "posix_io_mode"), (GDS_FALLBACK, "gds_fallback_io")],
)
def test_a_configuration_that_goes_through_host_memory_does_not_pass(
    library: Library, kind: str, path: Path, setting: int, name: str
) -> None:
    library.configured[setting] = True
    with pytest.raises(OSError, match=f"may read through host memory: {name} is on") as caught:
        driver_of(kind).open(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EOPNOTSUPP, str(path))
    del caught
    assert not library.handles


def test_an_older_library_passes_if_it_can_tell_of_compat_mode(library: Library, path: Path) -> None:
    del library.configured[POSIX_IO], library.configured[GDS_FALLBACK]
    assert found_at(path).path == "P2PDMA"
    library.configured = {}
    assert "allow_compat_mode is on" in reason_at(path)


def test_a_library_that_cannot_refuse_compat_mode_is_not_opened(
    library: Library, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(param: int, value: bool) -> None:
        raise RuntimeError("function cuFileSetParameterBool is not found")

    monkeypatch.setattr(library, "set_parameter_bool", missing)
    assert reason_at(path).endswith("compat mode cannot be refused: function cuFileSetParameterBool is not found")
    assert library.calls == []


def test_a_file_system_that_is_not_supported_is_named(library: Library, path: Path, machine: Path) -> None:
    load_nvidia_fs(machine)
    library.supports = lambda fd: False
    reason = reason_at(path)
    assert "IO_NOT_SUPPORTED (5008): the library's words" in reason
    assert "nvidia-fs" not in reason
    named = subprocess.run(["stat", "--file-system", "--format=%T", path], capture_output=True, text=True, check=True)
    # GNU stat calls them so.
    others = {"ext4": "ext2/ext3", "overlay": "overlayfs"}
    kind = reason.removesuffix(")").rpartition("(file system ")[2]
    assert others.get(kind, kind) == named.stdout.strip()


@by_both
def test_a_drive_that_udev_does_not_know_is_named(library: Library, path: Path, machine: Path) -> None:
    library.knows_drive = False
    device = path.stat().st_dev
    entry = machine / "udev" / f"b{os.major(device)}:{os.minor(device)}"
    assert f"udev has no entry of its drive ({entry} is missing)" in reason_at(path)
    entry.parent.mkdir()
    entry.touch()
    reason = reason_at(path)
    assert "HANDLE_NOT_REGISTERED (5027)" in reason
    assert "udev has no entry" not in reason


# Compat mode, for callers that ask for it.


@by_both
@pytest.mark.parametrize("direct", [True, False])
def test_compat_mode_that_is_asked_for_is_forced_and_is_not_called_gpudirect_storage(
    library: Library, path: Path, stored: Bytes, machine: Path, direct: bool
) -> None:
    library.direct = direct
    load_nvidia_fs(machine)
    found = find_cufile(path, compat=True)
    assert isinstance(found, FoundCuFile), found
    assert (found.path, found.driver.compat) == (None, True)
    assert found.reason.endswith(" in compat mode, through host memory")
    assert library.settings == {ALLOW_COMPAT: True, FORCE_COMPAT: True, POSIX_IO: False, GDS_FALLBACK: False}
    arena = arena_of(NBYTES)
    handle = found.driver.open(path)
    assert handle.read(arena, 0) == NBYTES
    handle.close()
    np.testing.assert_array_equal(arena.numpy(), stored)
    # For the whole process: nobody else gets it unasked.
    assert "cuFile may read through host memory: force_compat_mode is on" in reason_at(path)


@by_both
@pytest.mark.parametrize("allows", [True, False])
def test_compat_mode_is_not_taken_from_a_driver_that_may_read_directly(
    library: Library, path: Path, allows: bool
) -> None:
    library.set_parameter_bool(ALLOW_COMPAT, allows)
    library.driver_open()
    refused = find_cufile(path, compat=True)
    assert isinstance(refused, str)
    assert "cuFile is open in this process without force_compat_mode" in refused
    assert not library.handles


def test_a_library_without_these_settings_has_no_compat_mode_to_ask_for(
    library: Library, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(param: int, value: bool) -> None:
        raise RuntimeError("function cuFileSetParameterBool is not found")

    monkeypatch.setattr(library, "set_parameter_bool", missing)
    refused = find_cufile(path, compat=True)
    assert str(refused).endswith("compat mode cannot be asked for: function cuFileSetParameterBool is not found")
    assert library.calls == []


def test_a_driver_that_is_open_already_is_no_error(
    library: Library, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def driver_open() -> None:
        raise cuFileError(5026)

    found_at(path)
    monkeypatch.setattr(library, "driver_open", driver_open)
    monkeypatch.setattr(library, "handle_register", lambda descr: 5)
    monkeypatch.setattr(library, "handle_deregister", lambda fh: None)
    found_at(path)


@only_torch
def test_no_attempt_of_torchs_module_leaves_a_driver_in_compat_mode(
    driver: CuFile, library: Library, path: Path
) -> None:
    library.direct = False
    for _ in range(3):
        with pytest.raises(OSError, match="DRIVER_NOT_INITIALIZED"):
            driver.open(path)
        assert library.settings is None


def test_threads_that_look_at_once_do_not_open_compat_mode_for_each_other(library: Library, path: Path) -> None:
    library.direct = False
    library.opening_seconds = 0.01
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: find_cufile(path), range(8)))
    assert [type(one) for one in found] == [str] * 8
    assert library.settings is None


def test_a_forked_process_does_not_use_its_parents_driver(library: Library, path: Path) -> None:
    found_at(path)
    child = os.fork()
    if child == 0:
        num_calls = len(library.calls)
        os._exit(0 if "forked" in str(find_cufile(path)) and len(library.calls) == num_calls else 1)
    assert os.waitpid(child, 0)[1] == 0


# Where there is no cuFile.


def test_without_a_gpu_or_where_cufile_would_hang_nothing_is_tried(
    library: Library, path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "modules").unlink()
    assert reason_at(path) == f"{machine / 'modules'} is missing, without which cuFile hangs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason_at(path) == "no CUDA device"
    assert library.calls == []


def test_where_nothing_offers_cufile_the_reason_names_both(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", None)
    if Path("/proc/self/maps").read_text().count("libcufile"):
        pytest.skip("this torch has cuFile")
    reason = reason_at(path)
    assert "cuda.bindings.cufile cannot be imported: " in reason
    assert "torch was built without GDS (libcufile.so.0 is not loaded)" in reason


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        (None, {}, os.devnull),
        ('{"logging": {\n  // "dir": "/var/log",\n  "level": "ERROR"}}', {}, os.devnull),
        ('{"logging": {\n  "dir": "/var/log"}}', {}, None),
        ('{"logging": {"dir": "/var/log"}}', {}, None),
        (None, {"CUFILE_LOGFILE_PATH": "/var/log/mine"}, "/var/log/mine"),
        ('{"logging": {"dir": "/var/log"}}', {"CUFILE_ENV_PATH_JSON": "other.json"}, os.devnull),
    ],
)
def test_no_log_appears_in_the_working_directory_and_the_users_choice_is_kept(
    library: Library,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str | None,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    if config is not None:
        (machine / "cufile.json").write_text(config)
    (machine / "other.json").write_text('{"logging": {}}')
    for name, value in environment.items():
        monkeypatch.setenv(name, str(machine / value) if value.endswith("json") else value)
    CuFile(Bindings())
    assert os.environ.get("CUFILE_LOGFILE_PATH") == expected


# The made-up library against the real one.


@pytest.fixture
def real() -> Any:
    return pytest.importorskip("cuda.bindings.cufile", reason="cuda.bindings is missing", exc_type=ImportError)


@pytest.mark.parametrize(
    "name",
    [
        *("driver_open", "handle_register", "handle_deregister", "read", "buf_register", "buf_deregister"),
        *("get_parameter_bool", "set_parameter_bool"),
    ],
)
def test_the_made_up_functions_have_the_real_ones_parameters(real: Any, name: str) -> None:
    expected = inspect.signature(getattr(real, name)).parameters
    assert list(inspect.signature(getattr(Library(), name)).parameters) == list(expected)


def test_the_made_up_errors_are_the_real_ones(real: Any) -> None:
    assert {code: real.OpError(code).name for code in CODES} == CODES
    assert str(real.cuFileError(5008)).startswith("IO_NOT_SUPPORTED (5008): ")
    assert real.cuFileError(5008).status == cuFileError(5008).status == 5008
    for make in (real.cuFileError, cuFileError):
        with pytest.raises(ValueError, match=r"^28 is not a valid OpError"):
            make(28)


def test_the_settings_numbers_and_the_descriptor_are_the_real_ones(real: Any) -> None:
    names = {name: int(number) for name, number in real.BoolConfigParameter.__members__.items()}
    assert names["PROPERTIES_ALLOW_COMPAT_MODE"] == ALLOW_COMPAT
    assert names["FORCE_COMPAT_MODE"] == FORCE_COMPAT
    assert names.get("PROPERTIES_POSIX_IO_MODE", POSIX_IO) == POSIX_IO
    assert names.get("GDS_FALLBACK_IO", GDS_FALLBACK) == GDS_FALLBACK
    assert int(real.FileHandleType.OPAQUE_FD) == 1
    if hasattr(real, "descr_dtype"):
        fields = {name: offset for name, (_, offset, *_) in real.descr_dtype.fields.items()}
        ours = {name: getattr(Descriptor, name).offset for name in ("type", "handle", "fs_ops")}
        assert (fields, real.descr_dtype.itemsize) == (ours, ctypes.sizeof(Descriptor))
