"""The output of a step: its folder is that of a save, its delta is what changed, and memory is kept between steps."""

from __future__ import annotations

from pathlib import Path

from support import prestarted
from support.mounts import mounted_tmpfs
from support.steps import CONFIG, assert_is_step, files_in, weights_of

import relayout

CHANGED = {"relayout.json", "relayout.digests.delta", "new/relayout.json.zst"}
CHANGED |= {f"model-rank-{rank}-part-0.safetensors.delta" for rank in range(2)}
"""The files of a delta if weights alone have changed."""


def test_a_folder_of_a_step_is_that_of_save_and_deltas_lead_to_it_byte_for_byte(tmp_path: Path) -> None:
    publisher = relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2, full_every=2)
    for step in (1, 2, 3):
        last = publisher.publish(weights_of(step), step)
    relayout.save(weights_of(3), tmp_path / "saved", config=CONFIG, tp=2, max_part_nbytes=2**29)
    steps = relayout.Steps(tmp_path / "steps")
    entries = steps.entries()
    assert last.full is not None
    assert last.delta is not None
    deltas = [steps.path(entry.delta.name) for entry in entries[1:] if entry.delta is not None]
    first = entries[0].full
    assert first is not None
    for delta in deltas:
        assert set(files_in(delta)) == CHANGED, "tables and what has not changed are those of the step before"
    relayout.apply_deltas(steps.path(first.name), deltas, tmp_path / "applied")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    for other in (Path(steps.path(last.full.name)), tmp_path / "applied"):
        assert {path.name: path.read_bytes() for path in other.iterdir()} == saved


_FILLS = """
import sys
import relayout
from support.steps import CONFIG, weights_of
publisher = relayout.Publisher(sys.argv[1], config=CONFIG, tp=2, keep_in=sys.argv[2])
try:
    publisher.publish(weights_of(1), 1)
except OSError as error:
    print(error.strerror, error.filename)
"""


def test_where_the_drive_for_the_last_step_is_full_the_step_fails_and_the_process_goes_on(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "drive", "64k") as drive:
        done = prestarted.run(tmp_path / "steps", drive, script=_FILLS)
    assert (done.returncode, done.stdout) == (0, f"No space left on device {drive}\n"), done.stderr
    assert relayout.Steps(tmp_path / "steps").newest() is None


def test_a_step_without_a_change_is_one(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2)
    follower = relayout.Follower(root, 0)
    publisher.publish(weights_of(1), 1)
    assert follower.update() == 1
    again = publisher.publish(weights_of(1), 2)
    assert again.delta is not None
    delta = files_in(f"{root}/{again.delta.name}")
    assert set(delta) == {"relayout.json", "new/relayout.json.zst"}
    assert again.delta.nbytes == sum(map(len, delta.values()))
    assert follower.update() is None
    assert follower.step == 2
    publisher.publish(weights_of(3), 3)
    assert follower.update() == 3
    assert_is_step(follower.tensors, weights_of(3), 0)


def test_the_bytes_of_a_delta_are_those_of_all_its_files(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2)
    for step in (1, 2, 3):
        publisher.publish(weights_of(step), step)
    for entry in relayout.Steps(root).entries()[1:]:
        assert entry.delta is not None
        delta = files_in(f"{root}/{entry.delta.name}")
        assert set(delta) == CHANGED
        assert entry.delta.nbytes == sum(map(len, delta.values()))
