"""relayout.storage.system: what is left for a process, in cgroups as the kernel describes them, and in a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cgroups import new_group

from relayout.conversion.run import share_memory
from relayout.storage import system as memory
from relayout.storage.system import available_nbytes

MIB = 2**20
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), ("memory.max", "memory.current", "")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 1,000 MiB available, in no cgroup."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "groups")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def write_group(folder: Path, names: tuple[str, str, str], limit: int | str, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, prefix = names
    (folder / limit_name).write_text(f"{limit if isinstance(limit, str) else limit * MIB}\n")
    (folder / used_name).write_text(f"{used * MIB}\n")
    counts = {"active_file": files * MIB, "inactive_file": files * MIB, "anon": 7}
    (folder / "memory.stat").write_text("".join(f"{prefix}{name} {count}\n" for name, count in counts.items()))


def test_without_cgroups_it_is_what_the_system_has(system: Path) -> None:
    assert available_nbytes() == 1000 * MIB
    (system / "proc/self/cgroup").write_text("0::/a\n")
    assert available_nbytes() == 1000 * MIB
    write_group(system / "groups/a", V2, "max", 900, 0)
    assert available_nbytes() == 1000 * MIB


@pytest.mark.parametrize(("names", "line", "root"), [(V2, "0::/a/b", ""), (V1, "4:memory:/a/b", "memory")])
def test_the_cgroup_with_the_least_left_counts(system: Path, names: tuple[str, str, str], line: str, root: str) -> None:
    (system / "proc/self/cgroup").write_text(f"5:cpuset:/x\n{line}\n")
    groups = system / "groups" / root
    write_group(groups / "a/b", names, 600, 250, 25)
    assert available_nbytes() == 400 * MIB
    write_group(groups / "a", names, 700, 500, 0)
    assert available_nbytes() == 200 * MIB
    write_group(groups, names, 800, 900, 10)  # In a container, its own cgroup is here.
    assert available_nbytes() == 0


def test_copying_takes_three_quarters_of_what_is_left_at_most(system: Path) -> None:
    assert share_memory(8, "512MiB") == (8, 32 * MIB)
    (system / "proc/self/cgroup").write_text("0::/a\n")
    write_group(system / "groups/a", V2, 128, 0, 0)
    assert share_memory(8, "512MiB") == (8, 6 * MIB)
    assert share_memory(8, "16MiB") == (8, MIB)
    write_group(system / "groups/a", V2, 128, 128, 0)
    assert share_memory(8, "512MiB") == (1, MIB)


def test_a_process_in_a_real_cgroup_knows_its_limit() -> None:
    program = "from relayout.storage.system import available_nbytes as left; print(left())"
    try:
        with new_group() as group, group.limited(300 * MIB):
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    except SystemExit as error:
        pytest.skip(str(error))
    assert 200 * MIB < int(done.stdout) < 300 * MIB
