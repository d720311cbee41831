"""Child processes: how they are started, and what a forked one has to forget.

A child imports what its parent does, and nothing from the working folder, which may be an untrusted checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Child: TypeAlias = subprocess.Popen[bytes]
PIPE, QUIET, WITH_STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT
_POLL_SECONDS = 0.5


def start_child(module: str, *arguments: str, environment: Mapping[str, str] | None = None, **streams: Any) -> Child:
    """Start `python -m MODULE ARGUMENTS` in a session of its own; Python code is started in no other way.

    Args:
        environment: of the child, but for what would let it import from the working folder; None: this process's.
        streams: `stdin`, `stdout`, `stderr` and `bufsize`, as for `subprocess.Popen`.
    """
    command = [sys.executable, "-P", *_inherited_flags(), "-m", module, *arguments]
    safe = _safe_environment(os.environ if environment is None else environment)
    return subprocess.Popen(command, env=safe, start_new_session=True, **streams)


def _inherited_flags() -> list[str]:
    """What isolates this process isolates its children."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [flag for flag, is_set in {**flags, "-S": sys.flags.no_site}.items() if is_set]


def _safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, but nothing is imported from the working folder or relative to it, also not by children of children."""
    safe = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP")}
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if Path(folder).is_absolute() and not _is_working_folder(folder)]
    return {**safe, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})}


def _is_working_folder(folder: str) -> bool:
    with suppress(OSError):
        return Path(folder).samefile(".")
    return False


def wait_for_child(child: Child, log: Path, silence_seconds: float) -> int | None:
    """Wait for a child as long as its log grows; then, and after an error here, end it and all that it has started.

    Returns:
        Its exit status; None: it wrote nothing for `silence_seconds`.
    """
    nbytes, since = 0, time.monotonic()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_SECONDS)
            now = time.monotonic()
            if (size := log.stat().st_size) != nbytes:
                nbytes, since = size, now
            elif now - since > silence_seconds:
                return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class Forked(Protocol):
    """An object with locks or threads."""

    def after_fork(self) -> None:
        """Replace locks and forget threads. Called in a forked child, which has a single thread."""


_known: set[weakref.ref[Any]] = set()


def remake_in_child(instance: Forked) -> None:
    """Call `instance.after_fork` in each child forked while `instance` exists; keeps only a weak reference.

    A thread of the parent may have held its locks, and does not exist in the child.
    """
    _known.add(weakref.ref(instance, _known.discard))


def _after_fork() -> None:
    for reference in list(_known):
        instance = reference()
        if instance is not None:
            instance.after_fork()


os.register_at_fork(after_in_child=_after_fork)
