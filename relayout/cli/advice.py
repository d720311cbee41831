"""The line that follows an error: the next command to type, or what to do in words if there is no command."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from relayout.cli.signals import SignalReceived
from relayout.errors import FormatError, PlanError, RelayoutError
from relayout.storage.stores import scheme_of

_GROUPS = ("plans", "cache")
"""Commands that have commands of their own."""
_WITH_VALUE = ("--rank", "--tp")
"""Options with a value that messages say to omit."""
_BY_SCHEME = {"s3": "aws s3 ls {}/", "hf": "hf auth whoami", "http": "curl -I {}", "https": "curl -I {}"}
"""Commands that list a store, or test access to it, without relayout."""
_BY_ERRNO = {
    errno.EACCES: "ls -ld {}",
    errno.EPERM: "ls -ld {}",
    errno.EROFS: "df -h {}",
    errno.ENOSPC: "df -h {}",
    errno.EDQUOT: "df -h {}",
    errno.EIO: "dmesg | tail",
    errno.EMFILE: "ulimit -n 65536",
    errno.ENFILE: "ulimit -n 65536",
}


def next_step(error: BaseException, argv: Sequence[str]) -> str:
    """Return the next command after an error, or a sentence if there is none.

    Args:
        error: what ended the command.
        argv: the arguments of `relayout`.
    """
    if isinstance(error, SignalReceived):
        return "run the same command again"
    if isinstance(error, MemoryError):
        return "free -h"
    said = str(error)
    if quoted := _quoted_command(error, argv, said) or _corrected(argv, said) or _without_option(argv, said):
        return quoted
    if match := re.search(r"^no such command '([^']+)'", said):
        return _help(argv[: argv.index(match[1])] if match[1] in argv else ())  # This help lists the commands.
    if isinstance(error, FormatError):
        return _after_bad_file(error, argv)
    if isinstance(error, PlanError):
        return _after_bad_request(error, argv)
    if isinstance(error, OSError):
        return _after_failure(error, argv)
    return _help(argv)


def _help(argv: Sequence[str]) -> str:
    """Return the command that prints the help of the given command."""
    num_words = 2 if argv and argv[0] in _GROUPS else 1
    words = [word for word in argv[:num_words] if re.fullmatch("[a-z]+", word)]
    return " ".join(["relayout", *words, "--help"])


def _quoted_command(error: BaseException, argv: Sequence[str], said: str) -> str | None:
    """Return the command that a message names in backticks, or the `pip install` at its end."""
    if match := re.search(r"`((?:relayout|hf|git|pip) \S+ [^`]+)`", said):
        path = _folder_of(error) or next((word for word in argv[1:2] if not word.startswith("-")), None)
        return match[1] if path is None else re.sub(r"\b(SRC|MODEL)$", lambda _: shlex.quote(path), match[1])
    match = re.search(r"pip install (?:'[^']+'|[\w-]+)", said)
    return match[0] if match else None


def _corrected(argv: Sequence[str], said: str) -> str | None:
    """Return the command with the word that the message proposes in the place of the misspelled one."""
    match = re.search(r"did you mean '([^']+)'\?", said)
    if match is None:
        return None
    # The misspelled word is the last one of the message that the command has: a path may come before it.
    last, at = -1, -1
    for index, word in enumerate(argv):
        found = [*re.finditer(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", said[: match.start()])]
        if word and found and found[-1].start() > last:
            last, at = found[-1].start(), index
    if at < 0:
        return None
    folder, slash, _ = argv[at].rpartition("/")
    return shlex.join(["relayout", *argv[:at], f"{folder}{slash}{match[1]}", *argv[at + 1 :]])


def _without_option(argv: Sequence[str], said: str) -> str | None:
    """Return the command without the option that the message says to omit."""
    match = re.search(r"omit (--[a-z-]+)$", said)
    if match is None or match[1] not in argv:
        return None
    at = argv.index(match[1])
    num_words = 2 if match[1] in _WITH_VALUE else 1
    return shlex.join(["relayout", *argv[:at], *argv[at + num_words :]])


def _after_bad_file(error: FormatError, argv: Sequence[str]) -> str:
    """Return the next step after a file that violates its format."""
    path = _folder_of(error)
    if error.code == "version":
        return "install a newer relayout"
    if error.code == "signature":
        return "relayout sign --help"
    if path is None:
        return _help(argv)
    if "relayout convert makes one" in error.what:  # `inspect` prints the command that converts this checkpoint.
        return f"relayout inspect {shlex.quote(path)}"
    if str(error.path).endswith(".toml"):
        return "relayout plans show llama" if "--plan" in argv else "relayout sign --help"
    # `verify` lists all damaged files; if it has just failed, only the files themselves can be looked at.
    return _listing(path) if argv[:1] == ["verify"] else f"relayout verify {shlex.quote(path)}"


def _after_bad_request(error: PlanError, argv: Sequence[str]) -> str:
    """Return the next step after a request that cannot be carried out."""
    path = _folder_of(error)
    if path is None or error.code in ("option", "limit", "unsupported"):
        return _help(argv)
    if error.code == "no_plan":
        return "relayout plans list"
    if error.code == "space":
        return f"df -h {shlex.quote(_nearest(path))}"
    if error.code == "busy":
        return "ps -ef | grep relayout"
    if error.code in ("exists", "missing", "config"):
        return _listing(path)
    return f"relayout inspect {shlex.quote(path)}" if error.code in ("no_rule", "indivisible") else _help(argv)


def _after_failure(error: OSError, argv: Sequence[str]) -> str:
    """Return the next step after a failure of the operating system or a store."""
    if error.filename is None:
        return _help(argv)
    path = os.fspath(error.filename)
    if not isinstance(path, str):
        return _help(argv)
    if scheme_of(path) is not None or error.errno not in _BY_ERRNO:
        return _listing(path)
    return _BY_ERRNO[error.errno].format(shlex.quote(_nearest(path)))


def _listing(path: str) -> str:
    """Return the command that lists a folder or prefix."""
    scheme = scheme_of(path)
    if scheme is None:
        return f"ls -la {shlex.quote(_nearest(path))}"
    return _BY_SCHEME.get(scheme, "relayout doctor {}").format(shlex.quote(path.rstrip("/")))


def _folder_of(error: BaseException) -> str | None:
    """Return the folder, prefix or file that the caller named: an error may name a file in it."""
    if not isinstance(error, RelayoutError) or error.path is None:
        return None
    path = os.fspath(error.path)
    folder, _, name = path.rpartition("/")
    is_file_inside = bool(folder) and not _is_folder(path) and "." in name and not path.endswith("://")
    return folder if is_file_inside and error.code not in ("space", "exists") else path


def _is_folder(path: str) -> bool:
    """Return True if the path is a folder; False too if its parent folder cannot be entered."""
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def _nearest(path: str) -> str:
    """Return the path, or its nearest parent that exists."""
    found = Path(path)
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    return str(found)
