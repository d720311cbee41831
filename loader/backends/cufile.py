"""cuFile, NVIDIA's GPUDirect Storage: direct reads from a drive into GPU memory, with evidence that they are direct.

Where it does not support a drive, file system or GPU, cuFile silently reads through host memory ("compat mode").
relayout uses compat mode only if the caller asks for it by name, and never reports it as GPUDirect Storage. The driver
is then told to read everything through host memory (`force_compat_mode`), so that the name is true on each machine.
For all other callers, relayout detects compat mode in this way:

- A driver that was opened with compat mode disabled rejects a file, at registration, that it could only read through
host memory. This setting overrides the environment and cufile.json, applies to the whole process, and must be made
before the
  driver opens (cufile.h of 1.20; not available before 1.14). A driver that fails to open loses the setting, and the
  next call of any kind opens the driver again, in compat mode (seen with 1.15 and 1.20). So the settings are read back
  after each registration, which also detects a driver that other code opened in compat mode. A driver with
  `force_compat_mode` accepts changes of the other settings while it is open, and goes on reading through host memory
  (seen with 1.15 and 1.20); that setting stays on, so it counts by itself.
- nvidia-fs is loaded if `NVIDIA_FS` has a `devcount`; cuFile looks there too. Without nvidia-fs, only PCI P2PDMA is
left
  (cuFile logs "nvidia_fs not loaded, operating on P2P mode"); with it, a file may be read either way.

Not detected: short reads that cufile.json sends through host memory whatever else is set (`posix_gds_min_kb` of Lustre
and BeeGFS; cuFile API reference, "cuFile Compatibility Mode"), and reads of holes under P2PDMA.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayout.storage.system import filesystem_of

if TYPE_CHECKING:
    import torch

NVIDIA_FS = Path("/proc/driver/nvidia-fs")
KERNEL_MODULES = Path("/proc/modules")
CONFIG = Path("/etc/cufile.json")

UDEV = Path("/run/udev/data")
"""Folder of udev with the properties of each device: `bMAJOR:MINOR` of a drive has its file system.

cuFile registers no file of a drive without an entry, in compat mode either (5027; 1.15 and 1.20). Containers and small
virtual machines often have none.
"""

_ALLOW_COMPAT, _FORCE_COMPAT = 1, 2
_THROUGH_HOST = {
    _ALLOW_COMPAT: "allow_compat_mode",
    _FORCE_COMPAT: "force_compat_mode",
    12: "posix_io_mode",
    13: "gds_fallback_io",
}
"""Settings that allow reads through host memory: `CUFileBoolConfigParameter_t` in cufile.h, and their usual names."""

_MARKS = (0xFF, 0x00)
"""Values to which the last byte of the target is set before a read, which must overwrite it.

Few weights end in the first value: in 16-bit floats it is a byte of a NaN.
"""

# In the texts of errors.
_ALREADY_OPEN = "(5026)"  # CU_FILE_DRIVER_ALREADY_OPEN
_NOT_REGISTERED = "(5027)"  # CU_FILE_HANDLE_NOT_REGISTERED

_opening = threading.Lock()
"""Lock to hold from making settings until the driver is open."""
_opened_by: int | None = None
"""Process ID of the process that has used cuFile; None: cuFile has not been used."""
_thread = threading.local()


def _after_fork() -> None:
    """Replace the lock: a thread that held it in the parent does not exist in the child."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Bindings:
    """cuFile's functions through `cuda.bindings.cufile`, a dependency of CUDA builds of torch since 2.13.

    Any exception means failure.
    """

    name = "cuda.bindings.cufile"

    def __init__(self) -> None:
        self._module: Any = import_module(self.name)

    def get_parameter_bool(self, param: int) -> bool:
        return bool(self._module.get_parameter_bool(param))

    def set_parameter_bool(self, param: int, value: bool) -> None:
        self._module.set_parameter_bool(param, value)

    def open_driver(self) -> None:
        self._module.driver_open()

    def register(self, arena: torch.Tensor) -> None:
        self._module.buf_register(arena.data_ptr(), arena.numel(), 0)

    def deregister(self, arena: torch.Tensor) -> None:
        self._module.buf_deregister(arena.data_ptr())

    def open(self, path: Path, fd: int) -> Any:
        """Register a file, and return the handle for `read` and `close`."""
        # CUfileDescr_t: CU_FILE_HANDLE_TYPE_OPAQUE_FD, the descriptor in a union with a pointer, no fs_ops.
        descriptor = ctypes.create_string_buffer(struct.pack("i4xi4xP", 1, fd, 0))
        return int(self._module.handle_register(ctypes.addressof(descriptor)))

    def read(self, file: Any, target: torch.Tensor, offset: int, base: int) -> int:
        """Fill `target`, inside the memory that was registered at `base`, and return the number of bytes read."""
        count = int(self._module.read(file, base, target.numel(), offset, target.data_ptr() - base))
        if count < 0:  # The bindings raise on -1 only.
            raise self._module.cuFileError(-count)
        return count

    def close(self, file: Any) -> None:
        self._module.handle_deregister(file)


class Torch(Bindings):
    """cuFile's functions through `torch.cuda.gds`, where the bindings are missing.

    As of torch 2.15, a read holds the GIL and does not report how many bytes it read. torch passes the address of the
    piece, not of the arena, so that registering may have no effect.
    """

    name = "torch.cuda.gds"

    def get_parameter_bool(self, param: int) -> bool:
        value = ctypes.c_bool(True)
        self._call("cuFileGetParameterBool", param, ctypes.byref(value))
        return value.value

    def set_parameter_bool(self, param: int, value: bool) -> None:
        self._call("cuFileSetParameterBool", param, ctypes.c_bool(value))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function that torch does not expose, in the library that torch has loaded."""
        try:
            function = getattr(ctypes.CDLL("libcufile.so.0", mode=os.RTLD_NOLOAD), name)
        except OSError:
            raise RuntimeError("torch was built without GDS (libcufile.so.0 is not loaded)") from None
        function.restype = ctypes.c_uint64  # CUfileError_t: two ints, the first of them cuFile's.
        if code := function(*arguments) & 0xFFFFFFFF:
            raise RuntimeError(f"cuFile error ({code})")

    def open_driver(self) -> None:
        """Do nothing: torch opens the driver when the first file is registered."""

    def register(self, arena: torch.Tensor) -> None:
        self._module.gds_register_buffer(_storage(arena))

    def deregister(self, arena: torch.Tensor) -> None:
        self._module.gds_deregister_buffer(_storage(arena))

    def open(self, path: Path, fd: int) -> Any:
        return self._module.GdsFile(str(path), os.O_RDONLY)

    def read(self, file: Any, target: torch.Tensor, offset: int, base: int) -> int:
        """Fill `target`, and detect short reads, which most versions of torch do not report.

        A read fills its target from the front, so that a short read leaves the last byte unchanged. That byte is set to
        a mark before the read. If it still has the mark afterwards, the file may contain the same byte there: a second
        read with the opposite mark decides. A file that was truncated is detected by its length.
        """
        nbytes = min(target.numel(), os.fstat(file.fd).st_size - offset)
        if nbytes <= 0:
            return 0
        target = target[:nbytes]
        for mark in _MARKS:
            target[-1:] = mark
            _settle(target)
            file.load_storage(_storage(target), offset)  # Newer versions of torch raise an error for a short read.
            is_filled = int(target[-1]) != mark
            if os.fstat(file.fd).st_size < offset + nbytes:
                raise RuntimeError("the file became shorter while it was read")
            if is_filled:
                return nbytes
        raise RuntimeError(f"read fewer than {nbytes} bytes")

    def close(self, file: Any) -> None:
        """Do nothing: the `__del__` of the file closes it."""


class CuFile:
    """An open cuFile driver: it reads by direct memory access or not at all; in compat mode, through host memory."""

    def __init__(self, library: Bindings, *, compat: bool = False) -> None:
        """Open the driver. It stays open, as other code of the process may use it.

        Args:
            library: cuFile's functions.
            compat: read in compat mode, through host memory, instead of refusing it.
        """
        self.name = library.name
        self.compat = compat
        """True if it reads through host memory, in compat mode."""
        self._library = library
        self._arenas: dict[int, int] = {}
        """Bytes of each registered arena, by its address."""
        with _opening:
            _prepare(library, compat)
            try:
                library.open_driver()
            except Exception as error:
                if _ALREADY_OPEN not in str(error):
                    raise _as_os_error(error) from None

    def register(self, arena: torch.Tensor) -> bool:
        """Pin an arena (1-D, uint8), once, before the first read into it.

        Waits for all work that is queued on the GPU: reads are not ordered with streams. Returns False if the arena
        cannot be pinned, as on a GPU with a small BAR1. Reads then go through cuFile's own buffers on the GPU.
        """
        with _on_device(arena, wait=True):
            try:
                self._library.register(arena)
            except Exception:
                return False
        self._arenas[arena.data_ptr()] = arena.numel()
        return True

    def deregister(self, arena: torch.Tensor) -> None:
        """Undo `register`, whatever it returned. Call this before the memory is freed, or nvidia-fs may deadlock."""
        if self._arenas.pop(arena.data_ptr(), None) is not None:
            try:
                with _on_device(arena):
                    self._library.deregister(arena)
            except Exception as error:
                raise _as_os_error(error) from None

    def open(self, path: Path) -> Handle:
        """Open a file and register it."""
        fd = _open_direct(path)
        try:
            with _opening:
                # Repeated, because a registration opens the driver if it is not open.
                _prepare(self._library, self.compat)
                try:
                    file = self._library.open(path, fd)
                except Exception as error:
                    raise _as_os_error(error, path, reason=_unknown_to_udev(error, fd)) from None
            handle = Handle(self._library, self._arenas, path, fd, file)
        except BaseException:
            os.close(fd)
            raise
        if refused := self._refused():
            handle.close()
            raise OSError(errno.EOPNOTSUPP, refused, str(path))
        return handle

    def _refused(self) -> str | None:
        """Return why reads of the open driver would not be what this driver stands for; None: they are."""
        if self.compat:
            # Other code has opened the driver, perhaps with GPUDirect Storage.
            is_forced = self._is_on(_FORCE_COMPAT, otherwise=False)
            return None if is_forced else "cuFile is open in this process without force_compat_mode"
        for param, name in _THROUGH_HOST.items():
            # Older versions do not have all of these settings.
            if self._is_on(param, otherwise=param == _ALLOW_COMPAT):
                return f"cuFile may read through host memory: {name} is on"
        return None

    def _is_on(self, param: int, *, otherwise: bool) -> bool:
        try:
            return self._library.get_parameter_bool(param)
        except Exception:
            return otherwise


@dataclass(slots=True)
class Handle:
    """A file that is registered with cuFile."""

    library: Bindings
    arenas: dict[int, int]
    path: Path
    fd: int
    file: Any

    def read(self, target: torch.Tensor, offset: int) -> int:
        """Fill `target` (1-D, uint8) from byte `offset` of the file; several threads may do so at once.

        Returns the number of bytes read: fewer than requested at the end of the file, and perhaps elsewhere.

        Raises:
            OSError: the read failed.
        """
        address = target.data_ptr()
        arenas = list(self.arenas.items())  # cuFile identifies an arena by its start address.
        base = next((start for start, nbytes in arenas if start <= address < start + nbytes), address)
        try:
            with _on_device(target):
                return self.library.read(self.file, target, offset, base)
        except Exception as error:
            raise _as_os_error(error, self.path, offset) from None

    def close(self) -> None:
        """Close the file. No thread may be reading it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            file, self.file = self.file, None
            try:
                self.library.close(file)
            finally:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class FoundCuFile:
    """A cuFile driver that was found to read a file."""

    driver: CuFile
    path: str | None
    """"GDS" (nvidia-fs is loaded) or "P2PDMA" (without it). None: compat mode."""
    reason: str
    """Reason for the choice, one line for a person."""


def is_likely() -> bool:
    """Return True if opening cuFile is worthwhile; opening it disables compat mode for the whole process."""
    return (NVIDIA_FS / "devcount").exists() or bool(os.environ.get("CUFILE_USE_PCIP2PDMA"))


def find_cufile(path: Path, *, compat: bool = False) -> FoundCuFile | str:
    """Return a driver that reads `path`, and files on the same file system, by cuFile, or why none exists.

    The driver is tested by registering `path`. With `compat`, it reads through host memory.
    """
    import torch

    file_system = filesystem_of(path).kind
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not KERNEL_MODULES.exists():
        # The file is missing in some sandboxes. cuFile then tries to read its lines forever: when the driver opens in
        # compat mode (1.15, 1.20), or when a file is registered (1.20).
        return f"{KERNEL_MODULES} is missing, without which cuFile hangs"
    has_nvidia_fs = (NVIDIA_FS / "devcount").exists()
    is_missing = not compat and not has_nvidia_fs
    reasons = [f"the kernel module nvidia-fs is not loaded ({NVIDIA_FS} is missing)"] if is_missing else []
    library: Bindings
    try:
        library = Bindings()
    except Exception as error:  # Any: numpy, a dependency, may be missing or of another version.
        reasons.append(f"{Bindings.name} cannot be imported: {_summary(error)}")
        library = Torch()
    try:
        # If this fails, do not try the other module: it would open the same library again, in compat mode.
        driver = CuFile(library, compat=compat)
        driver.open(path).close()
    except OSError as error:
        refused = f" (file system {file_system})" if error.filename else ""
        return "; ".join([*reasons, _summary(error) + refused])
    if compat:
        reasons.append(f"cuFile reads files on {file_system} in compat mode, through host memory")
        return FoundCuFile(driver, None, "; ".join(reasons))
    reasons.append(f"cuFile takes files on {file_system} with compat mode refused")
    return FoundCuFile(driver, "GDS" if has_nvidia_fs else "P2PDMA", "; ".join(reasons))


def _prepare(library: Bindings, compat: bool) -> None:
    """Make the settings of a driver that is not open yet."""
    global _opened_by
    if _opened_by not in (None, os.getpid()):
        raise OSError(errno.EOPNOTSUPP, "cuFile does not work in a process that was forked after its first use")
    _opened_by = os.getpid()
    config = ""
    with suppress(OSError):
        config = Path(os.environ.get("CUFILE_ENV_PATH_JSON", CONFIG)).read_text("utf-8", "replace")
    if not re.search(r'^(?!\s*//).*"dir"\s*:', config, re.MULTILINE):
        # Else cuFile writes cufile.log into the working directory. Its log settings have no effect (1.15, 1.20).
        os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)
    try:
        for param in (_ALLOW_COMPAT, _FORCE_COMPAT)[: 2 if compat else 1]:
            library.set_parameter_bool(param, compat)
    except Exception as error:
        if _ALREADY_OPEN not in str(error):
            what = "asked for" if compat else "refused"
            raise OSError(errno.EOPNOTSUPP, f"compat mode cannot be {what}: {_summary(error)}") from None


@contextmanager
def _on_device(tensor: torch.Tensor, *, wait: bool = False) -> Iterator[None]:
    """Make the tensor's CUDA context current, as cuFile requires; with `wait`, wait for work queued on the device."""
    if not tensor.is_cuda:  # cuFile reads into host memory, too.
        yield
        return
    import torch

    with torch.cuda.device(tensor.device):
        # A new thread has device 0, but no context. torch does not make a context current if the thread already has the
        # right device.
        if wait or getattr(_thread, "device", None) != tensor.device:
            torch.cuda.synchronize()
            _thread.device = tensor.device
        yield


def _settle(tensor: torch.Tensor) -> None:
    """Wait for work on the current stream, as cuFile does not wait for it."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()


def _storage(tensor: torch.Tensor) -> Any:
    start = tensor.storage_offset()
    return tensor.untyped_storage()[start : start + tensor.numel()]  # A view.


def _open_direct(path: Path) -> int:
    if not stat.S_ISREG(path.stat().st_mode):  # Opening a FIFO would block.
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


def _unknown_to_udev(error: Exception, fd: int) -> str:
    """Return why cuFile has refused a file, if udev has no entry of its drive."""
    device = os.fstat(fd).st_dev
    entry = UDEV / f"b{os.major(device)}:{os.minor(device)}"
    if _NOT_REGISTERED not in str(error) or entry.exists():
        return ""
    return f": udev has no entry of its drive ({entry} is missing)"


def _as_os_error(error: Exception, path: Path | None = None, offset: int | None = None, *, reason: str = "") -> OSError:
    error.__traceback__ = None  # Its frames would keep a GdsFile, and so a file, open.
    code, text = errno.EIO, _summary(error)
    if match := re.match(r"(\d+) is not a valid OpError", text):  # The form in which the bindings report an errno.
        code, text = int(match[1]), os.strerror(int(match[1]))
    where = "" if offset is None else f" at byte {offset}"
    return OSError(code, f"cuFile: {text}{where}{reason}", *([str(path)] if path else []))


def _summary(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    # One sentence is enough; the second of 5001 is "Set allow_compat_mode to true ...".
    return re.split(r"\n|\. ", text)[0] or type(error).__name__
