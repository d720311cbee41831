"""A process that is forked while something is loaded: the child ends, and says so where it goes on with the load."""

from __future__ import annotations

from pathlib import Path

from support import prestarted
from support.loader_fixtures import IN_FLIGHT, MIB
from support.patience import PATIENCE

START = f"""
import gc, multiprocessing, os, signal, sys, threading, time
import torch  # A child could not import what another thread is importing while the process forks (CPython's own limit).
import relayout
folder = sys.argv[1]

def ended(pid):
    end = time.monotonic() + {PATIENCE}
    while time.monotonic() < end:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"
"""

BEGUN = (
    START
    + f"""
from relayout.loader.backends import files as sources

# The other threads are in the middle of a read, or wait for their turn, while the process forks.
reading, may_read = threading.Event(), threading.Event()
true_read = sources.ReadableFiles.read

def read(self, file, offset, view):
    if offset > {MIB}:  # Behind the first tensor.
        reading.set()
        may_read.wait()
    return true_read(self, file, offset, view)

sources.ReadableFiles.read = read
iterator = relayout.iter_load(folder, 0, memory={IN_FLIGHT}, threads=3)
first = [next(iterator)]
before = first[0][1].numpy().tobytes()
reading.wait()
"""
)

CHILDREN = {
    "comes to its end": "pass",
    "forgets it": "del iterator; gc.collect(); os._exit(0)",
    "closes it and uses the tensors": "iterator.close(); os._exit(9 * (first[0][1].numpy().tobytes() != before))",
    "exits at once": "os._exit(0)",
    "loads by itself": """
sources.ReadableFiles.read = true_read
os._exit(0 if len(relayout.load(folder, 0)) == 16 and len(list(relayout.iter_load(folder, 0))) == 16 else 9)
""",
    "goes on": """
try:
    for _ in range(16):
        next(iterator)
except RuntimeError as error:
    try:
        next(iterator)
    except StopIteration:
        os._exit(0 if "forked" in str(error) else 8)
os._exit(9)
""",
    "leaves by exit": "sys.exit(0)",
}


def run(script: str, *arguments: object) -> str:
    """The last line that a script prints; it and all its children are killed if they hang."""
    done = prestarted.run(*arguments, script=script, imports=prestarted.LOADER)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_children_of_a_fork_in_the_middle_of_an_iteration_end(wide: Path) -> None:
    """Of os.fork, and of multiprocessing; their parent goes on."""
    script = f"""{BEGUN}
codes = {{}}
for name, what in {CHILDREN!r}.items():
    pid = os.fork()
    if pid == 0:
        exec(what)
        break
    codes[name] = ended(pid)
else:
    child = multiprocessing.get_context("fork").Process(target=lambda: None)
    child.start()
    child.join({PATIENCE})
    codes["multiprocessing"] = child.exitcode
    child.kill()
    may_read.set()
    print(codes, len(first + list(iterator)))
"""
    assert run(script, wide) == f"{dict.fromkeys([*CHILDREN, 'multiprocessing'], 0)} 16"


def test_children_that_are_forked_while_another_thread_loads_end(wide: Path) -> None:
    script = f"""{BEGUN.partition("iterator =")[0]}
found, codes = [], []
loading = threading.Thread(target=lambda: found.append(relayout.load(folder, 0, threads=3)))
loading.start()
reading.wait()
for what in {("pass", "os._exit(0)", CHILDREN["loads by itself"])!r}:
    pid = os.fork()
    if pid == 0:
        exec(what)
        break
    codes.append(ended(pid))
else:
    may_read.set()
    loading.join()
    print(codes, len(found[0]))
"""
    assert run(script, wide) == "[0, 0, 0] 16"


def test_a_load_that_forks_in_its_own_progress_is_an_error_in_the_child(wide: Path) -> None:
    script = f"""{START}
def progress(done, total):
    global pid
    if pid is None:
        pid = os.fork()

pid = None
try:
    print(len(relayout.load(folder, 0, progress=progress)))
except RuntimeError as error:
    assert pid == 0, error
    os._exit(0 if "forked" in str(error) else 8)
if pid == 0:
    os._exit(9)
print(ended(pid))
"""
    assert run(script, wide) == "0"


def test_a_child_uses_what_is_open_while_another_thread_of_the_parent_reads_a_table(wide: Path) -> None:
    script = f"""{START}
from relayout.loader.sources import reshard as regrouped

reading, may_read = threading.Event(), threading.Event()
true_read = regrouped.read_table

def read_table(*given):
    reading.set()
    may_read.wait()
    return true_read(*given)

regrouped.read_table = read_table
opened = relayout.safe_open(folder)
name = opened.keys()[3]
found = []
other = threading.Thread(target=lambda: found.append(opened.get_tensor(name)))
other.start()
reading.wait()
pid = os.fork()
if pid == 0:
    regrouped.read_table = true_read
    os._exit(0 if opened.get_tensor(name).numel() else 9)
code = ended(pid)
may_read.set()
other.join()
print(code, len(found))
"""
    assert run(script, wide) == "0 1"
