"""A conversion is killed, interrupted, and run on drives that fail: OUT is absent or complete, and the command goes on.

Most faults come from below Python: `faults.c` takes the place of the C library's calls, in a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file
from support import prestarted
from support.faults import environment
from support.interruptions import claims_in
from support.mounts import mounted_tmpfs
from support.profile import IS_LONG, sample

from relayout.conversion.copy_plan import SMALL_NBYTES
from relayout.conversion.layout import Conversion
from relayout.conversion.planning import plan_conversion
from relayout.conversion.run import carry_out

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="takes Linux's dynamic linker and /proc")

SEED = 20
TP = 2
MAX_PART_NBYTES = 3 * 2**20
OPTIONS = ["--tp", str(TP), "--plan", "plan.toml", "--max-part-size", str(MAX_PART_NBYTES)]
# Chunks of 1 MiB, so that tensors of several MiB take several steps.
LIMITS = ["--threads", "4", "--memory", "8MiB"]
PARTIAL = ".out.relayout-partial"
WITHOUT_SPACE_CHECK = (
    "from relayout.cli import app; from relayout.publish import folder;"
    "folder.LocalOutput.check_space = lambda *_: None; app.main()"
)

PLAN = """
[sizes]
heads = ["num_attention_heads"]
head_dim = ["hidden_size / num_attention_heads"]
experts = ["num_experts"]

[cut]
"embed.weight" = { dim = 0, by = "vocabulary" }
"h.*.qkv.{weight,bias}" = { interleaved = "heads", dim = 0, by = ["heads", "heads", "heads"] }
"h.*.dense.weight" = { dim = 1, by = "heads" }
"h.*.norm.{weight,bias}" = "whole"
"h.*.experts.gate_up" = { dim = 1, by = ["even", "even"] }
"h.*.experts.down" = { dim = 2, by = "even" }
"h.*.experts.*.w1.weight" = { dim = 0, by = "even" }
"none" = "whole"
"""
HIDDEN, LAYERS, EXPERTS = 512, 3, 4
CONFIG = {"hidden_size": HIDDEN, "num_attention_heads": 8, "num_experts": EXPERTS, "vocab_size": 1999}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (1999, HIDDEN), "none": (0, HIDDEN)}
    for layer in range(LAYERS):
        found |= {
            f"h.{layer}.qkv.weight": (3 * HIDDEN, HIDDEN),
            f"h.{layer}.qkv.bias": (3 * HIDDEN,),
            f"h.{layer}.dense.weight": (HIDDEN, HIDDEN),
            f"h.{layer}.norm.weight": (HIDDEN,),
            f"h.{layer}.norm.bias": (HIDDEN,),
            f"h.{layer}.experts.gate_up": (EXPERTS, 2 * HIDDEN, HIDDEN),
            f"h.{layer}.experts.down": (EXPERTS, HIDDEN, HIDDEN // 2),
        }
        found |= {f"h.{layer}.experts.{e}.w1.weight": (64 * (e + 1), HIDDEN) for e in range(EXPERTS)}
    return found


@dataclass(frozen=True)
class Model:
    """A source, and what an undisturbed conversion makes of it."""

    place: Path
    complete: dict[str, tuple[int, str]]
    """Content of the output."""
    calls: list[str]
    """What the conversion asked of the system, as `faults.c` logs it."""

    def planned(self, output: Path | None = None) -> Conversion:
        """The conversion, as the command plans it."""
        return plan_conversion(
            self.place / "model",
            output or self.place / "out",
            tp=TP,
            plan=self.place / "plan.toml",
            max_part_nbytes=MAX_PART_NBYTES,
        )


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file below a folder: mode and digest."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode, xxhash.xxh3_128_hexdigest(path.read_bytes()))
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, shim: Path) -> Model:
    """Several dozen MB of large and small, fused and stacked tensors in three files."""
    place = tmp_path_factory.mktemp("source")
    (place / "model").mkdir()
    (place / "plan.toml").write_text(PLAN)
    (place / "model" / "config.json").write_text(json.dumps(CONFIG))
    (place / "model" / "tokenizer.json").write_bytes(np.arange(2**16, dtype=np.uint32).tobytes())
    rng = np.random.default_rng(SEED)
    tensors = {name: rng.integers(1, 2**16, shape).astype(np.uint16) for name, shape in shapes().items()}
    names = list(tensors)
    weight_map = {name: f"model-{n % 3}.safetensors" for n, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, place / "model" / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (place / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = [tensor.nbytes for tensor in tensors.values()]
    assert max(sizes) > 2 * 2**20 > SMALL_NBYTES > min(size for size in sizes if size)
    assert 20e6 < sum(sizes) < 60e6
    done = run(place, shim=shim, log=place / "calls")
    assert (done.returncode, done.stderr) == (0, "")
    assert_nothing_hidden(place)
    return Model(place, content(place / "out"), (place / "calls").read_text().splitlines())


def command(place: Path, *more: str, output: Path | None = None) -> list[str]:
    return ["convert", "model", "-o", str(output or place / "out"), *OPTIONS, *LIMITS, *more]


def run(
    place: Path,
    *more: str,
    source: Path | None = None,
    output: Path | None = None,
    shim: Path | None = None,
    faults: Sequence[str] = (),
    log: Path | None = None,
    script: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the conversion of the model, into `out` in `place`, to its end."""
    words = command(place, *more, output=output)
    given = {} if script is None else {"script": script}
    return prestarted.run(*words, cwd=source or place, env=environment(shim, faults, log), **given)


def hidden(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name.startswith("."))


def assert_nothing_hidden(place: Path) -> None:
    assert hidden(place) == []


def nbytes_of(model: Model, tensors: set[int]) -> int:
    source = model.planned().source
    return sum(source.tensors[t].extent.nbytes for t in tensors)


def assert_goes_on(model: Model, place: Path, resumed: set[int]) -> None:
    """The same call ends well, takes these tensors over as done, and leaves what an undisturbed run leaves."""
    assert not (place / "out").exists()
    # In this process: most of what a run takes is the start of Python.
    assert carry_out(model.planned(place / "out"), threads=4, memory=2**23).resumed_nbytes == nbytes_of(model, resumed)
    assert content(place / "out") == model.complete
    assert_nothing_hidden(place)


NEXT = "relayout: next: "
"""Begins the line with the next command, which ends the output of a failed one."""


def kept_note(place: Path) -> str:
    return f"relayout: note: finished work is kept in {place / PARTIAL}; the same command resumes it"


def strata(low: int, high: int, count: int) -> list[int]:
    """Random whole numbers, spread over [low, high)."""
    rng = random.Random(SEED)
    edges = [low + (high - low) * n // count for n in range(count + 1)]
    return [rng.randrange(a, max(a + 1, b)) for a, b in pairwise(edges)]


def is_last_rename(line: str) -> bool:
    return line.startswith("rename ") and "/output -> " in line


def test_the_shim_sees_every_byte_of_a_conversion(model: Model) -> None:
    moved = {"read": 0, "write": 0}
    for line in model.calls:
        call, _, nbytes, path = line.split(" ", 3)
        if call in moved and path.endswith(".safetensors"):
            moved[call] += int(nbytes)
    planned = model.planned()
    assert moved["read"] >= planned.source.nbytes
    assert moved["write"] >= sum(file.nbytes - file.data_start for file in planned.layout.files)
    assert sum(map(is_last_rename, model.calls)) == 1


def own_calls(model: Model) -> list[str]:
    return [line for line in model.calls if str(model.place) in line]


NUM_KILLS = 60 if IS_LONG else 9


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_after_a_kill_the_same_command_goes_on(model: Model, shim: Path, tmp_path: Path, number: int) -> None:
    # Moments are calls, from the first read to the last unlink: before one, in the middle of it, after it.
    calls = own_calls(model)
    moment = strata(1, len(calls) + 1, NUM_KILLS)[number]
    how = ("kill", "tear", "after")[number % 3]
    common = os.path.commonpath([model.place, tmp_path])
    done = run(tmp_path, source=model.place, shim=shim, faults=[f"any|{common}/|{moment}|{how}"])
    assert done.returncode == -signal.SIGKILL
    out = tmp_path / "out"
    if not out.exists() and number % 3 == 1:  # And a second time.
        again = random.Random(number).randrange(20, len(calls) // 2)
        before = claims_in(tmp_path / PARTIAL)
        done = run(tmp_path, source=model.place, shim=shim, faults=[f"any|{common}/|{again}|{how}"])
        if done.returncode == 0:
            assert (content(out), hidden(tmp_path)) == (model.complete, [])
            return
        assert done.returncode == -signal.SIGKILL
        assert out.exists() or before <= claims_in(tmp_path / PARTIAL)
    if out.exists():
        assert content(out) == model.complete
    elif number % 3 == 2:
        done = run(tmp_path, source=model.place)
        assert (done.returncode, done.stderr) == (0, "")
        assert content(out) == model.complete
        assert_nothing_hidden(tmp_path)
    else:
        assert_goes_on(model, tmp_path, claims_in(tmp_path / PARTIAL))


def copying_calls(model: Model) -> list[str]:
    """Those of an undisturbed run, from the first to where the last unit is finished."""
    calls = own_calls(model)
    return calls[: max(n for n, line in enumerate(calls) if line.startswith("rename") and "/part-unit-" in line) + 1]


NUM_INTERRUPTIONS = 20 if IS_LONG else 4
BEHIND_THE_LAST_UNIT = [
    "write|relayout.rank-0.json.zst|1",
    "sync|relayout.json|1",
]


@pytest.mark.parametrize("moment", [*range(NUM_INTERRUPTIONS), *BEHIND_THE_LAST_UNIT])
def test_after_a_signal_the_same_command_goes_on(model: Model, shim: Path, tmp_path: Path, moment: int | str) -> None:
    is_odd = isinstance(moment, int) and moment % 2
    signal, code, word = ("term", 143, "terminated") if is_odd else ("int", 130, "interrupted")
    if isinstance(moment, str):
        where = moment
    else:
        copying = [line for line in copying_calls(model) if PARTIAL in line]
        call = strata(1, len(copying) * 9 // 10, NUM_INTERRUPTIONS)[moment]
        where = f"any|{tmp_path}/{PARTIAL}|{call}"
    done = run(tmp_path, source=model.place, shim=shim, faults=[f"{where}|{signal}"])
    assert (done.returncode, done.stdout) == (code, "")
    kept = kept_after(tmp_path)
    expected = [f"relayout: {word}", *([kept_note(tmp_path)] if kept else []), f"{NEXT}run the same command again"]
    assert done.stderr.splitlines() == expected
    assert isinstance(moment, int) or len(kept) == len(model.planned().source.tensors) - 1, "all but the empty one"
    assert_goes_on(model, tmp_path, kept)


@pytest.mark.parametrize("how", ["after", "int"])
def test_what_a_stop_behind_the_last_rename_leaves_is_cleared_by_the_same_command(
    model: Model, shim: Path, tmp_path: Path, how: str
) -> None:
    done = run(tmp_path, source=model.place, shim=shim, faults=[f"rename|/output -> |1|{how}"])
    assert done.returncode in (0, 130, -signal.SIGKILL)
    assert content(tmp_path / "out") == model.complete
    done = run(tmp_path, source=model.place)
    assert done.returncode in (0, 2)
    assert content(tmp_path / "out") == model.complete
    assert_nothing_hidden(tmp_path)


REPLACING = f"{PARTIAL}/done -> "
NO_EXCHANGE = f"exchange|{REPLACING}|1+|einval"
"""As of a kernel or file system that cannot exchange two names."""


# None: between two renames, where there is no output for a moment.
REPLACEMENTS: list[tuple[list[str], bool | None]] = [
    (["rename|/output -> |1|kill"], False),
    (["rename|/output -> |1|after"], False),
    ([f"exchange|{REPLACING}|1|kill"], False),
    ([f"exchange|{REPLACING}|1|after"], True),
    ([NO_EXCHANGE, "rename|/.out.relayout-old|1|kill"], False),
    ([NO_EXCHANGE, "rename|/.out.relayout-old|1|after"], None),
    ([NO_EXCHANGE, f"rename|{REPLACING}|1|kill"], None),
    ([NO_EXCHANGE, f"rename|{REPLACING}|1|after"], True),
    ([NO_EXCHANGE, "unlink|/.out.relayout-old|2|kill"], True),
    ([NO_EXCHANGE, "unlink|/.out.relayout-old|2|after"], True),
    ([f"unlink|{PARTIAL}/done|2|kill"], True),
    ([f"unlink|{PARTIAL}/done|2|after"], True),
]


@pytest.fixture(scope="session")
def older(model: Model) -> Path:
    """Another conversion of the model, which is to be replaced."""
    folder = model.place / "older"
    assert run(model.place, "--align", "512", output=folder).returncode == 0
    return folder


def assert_replaced_by_force(model: Model, out: Path) -> None:
    carry_out(model.planned(out), force=True, threads=4, memory=2**23)
    assert content(out) == model.complete
    assert_nothing_hidden(out.parent)


# Every day one state behind each call; the one in front of a call is that behind the call before.
@pytest.mark.parametrize(
    ("faults", "is_replaced"), sample(REPLACEMENTS, [*REPLACEMENTS[1:8:2], REPLACEMENTS[8], REPLACEMENTS[10]])
)
def test_a_kill_while_an_old_folder_is_replaced_loses_neither(
    model: Model, shim: Path, older: Path, tmp_path: Path, faults: list[str], is_replaced: bool | None
) -> None:
    out = shutil.copytree(older, tmp_path / "out")
    old = content(out)
    assert old != model.complete
    done = run(tmp_path, "--force", source=model.place, shim=shim, faults=faults)
    assert done.returncode == -signal.SIGKILL
    assert out.exists() == (is_replaced is not None)
    if is_replaced is not None:
        assert content(out) == (model.complete if is_replaced else old)
    assert_replaced_by_force(model, out)


def test_after_a_kill_between_two_renames_nothing_changes_without_force(
    model: Model, shim: Path, older: Path, tmp_path: Path
) -> None:
    out, waiting = shutil.copytree(older, tmp_path / "out"), tmp_path / ".out.relayout-old"
    old = content(out)
    faults = [NO_EXCHANGE, "rename|/.out.relayout-old|1|after"]
    done = run(tmp_path, "--force", source=model.place, shim=shim, faults=faults)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    done = run(tmp_path, source=model.place)
    assert done.returncode == 2
    says = f"an interrupted replacement left the older folder at {waiting}: rename it back"
    assert f"{out}: is missing; {says}, or use --force" in done.stderr
    for arguments in (["verify", str(out)], ["restore", str(out), "-o", str(tmp_path / "back")]):
        done = prestarted.run(*arguments, env=environment(None))
        assert done.returncode == 2
        assert says in done.stderr
    assert not out.exists()
    assert content(waiting) == old
    assert_replaced_by_force(model, out)


def test_where_names_cannot_be_exchanged_an_old_folder_is_replaced_all_the_same(
    model: Model, shim: Path, older: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(older, tmp_path / "out")
    assert run(tmp_path, "--force", source=model.place, shim=shim, faults=[NO_EXCHANGE]).returncode == 0
    assert content(out) == model.complete
    assert_nothing_hidden(tmp_path)


def kept_after(place: Path) -> set[int]:
    """What is kept after a conversion failed: nothing at all, or finished units."""
    kept = claims_in(place / PARTIAL)
    assert not (place / "out").exists()
    assert hidden(place) == ([PARTIAL] if kept else [])
    return kept


def assert_fails(done: subprocess.CompletedProcess[str], place: Path, says: str, *, kept: set[int]) -> None:
    assert (done.returncode, done.stdout) == (3, "")
    error, *notes, following = done.stderr.splitlines()
    assert following.startswith(NEXT)
    assert error.startswith("relayout: error: ")
    assert says in error
    assert notes == ([kept_note(place)] if kept else [])


def place_of_fault(log: Path, call: str, part: str, number: int) -> str:
    """The file and offset of a fault that struck, as a message names them; a header is written as a stream."""
    lines = [line for line in log.read_text().splitlines() if line.startswith(f"{call} ") and part in line]
    _, offset, _, path = lines[number - 1].split(" ", 3)
    shown = f"model/{Path(path).name}" if call == "read" else path
    return f"{shown}: {{error}} at byte {offset}" if int(offset) >= 0 else f"{shown}: {{error}}"


@pytest.mark.parametrize(
    ("call", "part", "number", "word"),
    [
        ("read", "model-0.safetensors", 3, "eio"),
        ("write", "model-rank-", 1, "eio"),
        ("write", "model-rank-1-part-0.safetensors", 3, "enospc"),
        ("write", "model-rank-", 65, "eio"),
        ("truncate", "model-rank-1-part-2.safetensors", 1, "eio"),
        ("allocate", "model-rank-", 9, "enospc"),
        ("rename", "part-unit-0", 1, "enospc"),
        ("rename", "part-unit-2", 1, "eio"),
        ("read", "model/tokenizer.json", 1, "eio"),
        ("write", "output/tokenizer.json", 1, "enospc"),
        ("sync", "output/tokenizer.json", 1, "eio"),
        ("write", "relayout.source.json.zst", 1, "eio"),
        ("sync", "relayout.rank-1.json.zst", 1, "eio"),
        ("sync", "model-rank-1-part-1.safetensors", 1, "eio"),
        ("truncate", "model-rank-1-part-1.safetensors", 2, "eio"),
        ("write", "relayout.json", 1, "enospc"),
        ("rename", "/output -> ", 1, "eio"),
    ],
)
def test_whatever_fails_the_file_is_named_and_what_is_done_kept(
    model: Model, shim: Path, tmp_path: Path, call: str, part: str, number: int, word: str
) -> None:
    """And the offset, where bytes of tensors are read or written."""
    log = tmp_path / "log"
    done = run(tmp_path, source=model.place, shim=shim, faults=[f"{call}|{part}|{number}|{word}"], log=log)
    kept = kept_after(tmp_path)
    says = part.split(" ")[0].rsplit("/", 1)[-1]
    if call in ("read", "write") and "model-" in part:
        error = os.strerror({"eio": errno.EIO, "enospc": errno.ENOSPC}[word])
        says = place_of_fault(log, call, part, number).format(error=error)
    assert_fails(done, tmp_path, says, kept=kept)
    assert kept or number < 20
    assert_goes_on(model, tmp_path, kept)


def test_a_record_that_cannot_be_read_now_is_not_thrown_away(model: Model, shim: Path, tmp_path: Path) -> None:
    run(tmp_path, source=model.place, shim=shim, faults=["write|relayout.json|1|kill"])
    before = claims_in(tmp_path / PARTIAL)
    assert before
    done = run(tmp_path, source=model.place, shim=shim, faults=["read|part-unit-1|1|eio"])
    assert not (tmp_path / "out").exists(), "all that was done has been done once more"
    assert done.returncode == 3
    assert "part-unit-1: " in done.stderr
    assert_goes_on(model, tmp_path, before)


@pytest.mark.parametrize(
    "faults",
    [
        ["read|.safetensors|/2|short|4096"],
        ["read|.safetensors|3+|short|65543"],
        ["read|model/|/2|short|700"],
        ["write|model-rank-|/2|short|1001"],
        ["write|model-rank-|1+|short|65537"],
        ["write|relayout|/2|short|17", "write|output/tokenizer.json|/2|short|999"],
        ["read|model/|/2|eintr", "write|partial|/3|eintr", "write|partial|/4|short|70001"],
    ],
    ids=lambda faults: " and ".join(faults),
)
def test_short_and_interrupted_transfers_change_nothing(
    model: Model, shim: Path, tmp_path: Path, faults: list[str]
) -> None:
    log = tmp_path / "log"
    done = run(tmp_path, source=model.place, shim=shim, faults=faults, log=log)
    assert (done.returncode, done.stderr) == (0, "")
    assert content(tmp_path / "out") == model.complete
    assert_nothing_hidden(tmp_path)
    more = [line for line in log.read_text().splitlines() if str(tmp_path) in line or str(model.place) in line]
    assert len(more) > len(own_calls(model)) + 3, "nothing was cut short"


@pytest.mark.parametrize("free_nbytes", [2**20, 16 * 2**20])
def test_a_full_drive_keeps_what_is_done_and_once_it_has_grown_the_same_command_ends(
    model: Model, tmp_path: Path, free_nbytes: int
) -> None:
    with mounted_tmpfs(tmp_path / "drive", str(free_nbytes)) as drive:
        refused = run(drive, source=model.place)
        assert refused.returncode == 2, "noticed before anything is written"
        assert_nothing_hidden(drive)
        done = run(drive, source=model.place, script=WITHOUT_SPACE_CHECK)
        kept = kept_after(drive)
        assert bool(kept) == (free_nbytes > 2**20)
        refused = run(drive, source=model.place)
        assert (refused.returncode, claims_in(drive / PARTIAL)) == (2, kept), "the check of space loses nothing either"
        subprocess.run(["mount", "-o", "remount,size=64m", str(drive)], check=True)
        assert_goes_on(model, drive, kept)
        assert_fails(done, drive, f"{drive}/{PARTIAL}/", kept=kept)
        assert os.strerror(errno.ENOSPC) in done.stderr
