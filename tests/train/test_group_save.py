"""relayout.save by four processes of a training: the files are those of `convert`, or there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import prestarted, s3_server
from support.checkpoints import write_family
from support.families import FAMILIES
from support.group_worker import NUM_MEMBERS, seen_by_members
from support.profile import sample
from support.saving_worker import NAMES

import relayout

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.saving_worker import main; main()"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("group")
    for name in NAMES:
        write_family(FAMILIES[name], place / name)
    return place


@pytest.fixture(scope="module")
def url(place: Path) -> str:
    return f"s3://{place.name}/saved"


@pytest.fixture(scope="module")
def seen(place: Path, url: str) -> list[dict[str, Any]]:
    """The errors that each process saw."""
    variables = {**prestarted.ONE_THREAD, **s3_server.environment(s3_server.shared())}
    done = prestarted.run(place, url, script=SCRIPT, imports=prestarted.GROUP, env=variables)
    assert done.returncode == 0, done.stderr
    return [json.loads((place / f"member-{number}.json").read_text()) for number in range(NUM_MEMBERS)]


def weights(folder: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


def converted(place: Path, name: str, tp: int) -> dict[str, bytes]:
    output = place / f"{name}-tp{tp}"
    if not output.exists():
        relayout.convert(place / name, output, tp=tp)
    return weights(output)


CASES = {
    **{f"{name}-fsdp-tp": (name, 2) for name in NAMES},
    **dict.fromkeys(("fsdp", "pipeline", "pairs", "background", "behind"), ("llama", 4)),
    **{"replicas": ("llama", 8), "one-rank": ("llama", 1)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_of_convert(place: Path, seen: list[dict[str, Any]], case: str) -> None:
    assert [member[case] for member in seen] == [None] * NUM_MEMBERS
    name, tp = CASES[case]
    assert weights(place / case) == converted(place, name, tp)
    assert relayout.verify(place / case).ok


def test_the_files_of_a_store_are_those_of_convert(place: Path, seen: list[dict[str, Any]], url: str) -> None:
    assert [member["store"] for member in seen] == [None] * NUM_MEMBERS
    stored = s3_server.shared().objects
    objects = {key: one.content for (bucket, key), one in stored.items() if bucket == place.name}
    found = {name.removeprefix("saved/"): content for name, content in objects.items() if name.endswith(".safetensors")}
    assert found == converted(place, "llama", 4)
    assert not [name for name in objects if not name.startswith("saved/")]


def errors_of(seen: list[dict[str, Any]], case: str) -> list[list[str]]:
    found = [member[case] for member in seen]
    assert None not in found
    return found


@pytest.mark.parametrize(
    ("case", "kind", "what"),
    [
        ("again", "PlanError", "already holds a complete conversion of model type llama"),
        ("missing", "PlanError", "all processes that hold a part of it must save together"),
        ("alone", "PlanError", "all processes that hold a part of it must save together"),
        (
            "options",
            "PlanError",
            "the members of the group save with different options: member 0 with tp=4, member 2 with tp=2",
        ),
        ("outputs", "PlanError", "group: member 0 makes a save to "),
        ("dtypes", "PlanError", "expected BF16"),
        ("sums", "PlanError", "a DTensor with partial sums"),
        ("order", "PlanError", "a DTensor that is sharded in a different order than its mesh dims"),
        ("shape", "PlanError", "a DTensor whose shard has shape [3], expected [2]"),
        ("layout", "PlanError", "a group writes all ranks, and layout='ranks'"),
        ("ranks", "PlanError", "a group writes all ranks, and layout='ranks'"),
        ("overlap", "PlanError", "parts that overlap"),
        ("part", "PlanError", "parts that overlap"),
        ("drift", "PlanError", "tensor 'x': the members 1 and 3 hold different values of the same elements"),
        ("buffer", "PlanError", "tensor 'x': the members 0-1,3 and 2 hold different values of the same elements"),
        ("config", "MissingPathError", "nothing"),
        ("copy", "RuntimeError", "the device is on fire"),
        ("notes", "OSError", "the drive is on fire"),
        ("space", "PlanError", "B too few"),
        ("full", "OSError", "No space left on device"),
    ],
)
def test_what_fails_one_fails_all(seen: list[dict[str, Any]], case: str, kind: str, what: str) -> None:
    for found_kind, message in errors_of(seen, case):
        assert found_kind == kind
        assert what in message


def test_an_output_that_appears_meanwhile_is_not_replaced(place: Path, seen: list[dict[str, Any]]) -> None:
    assert all("appears" in message for _, message in errors_of(seen, "appears"))
    assert weights(place / "appears") == weights(place / "one-rank")


def test_a_member_may_hold_several_ranges_of_an_axis(place: Path, seen: list[dict[str, Any]]) -> None:
    assert [member["strided"] for member in seen] == [None] * NUM_MEMBERS
    assert relayout.load(place / "strided", 0)["x"].tolist() == list(range(8))


def test_layer_10_comes_behind_layer_2_for_all_members(place: Path, seen: list[dict[str, Any]]) -> None:
    assert [member["numbers"] for member in seen] == [None] * NUM_MEMBERS
    loaded = relayout.load(place / "numbers", 0)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        f"layers.{n}.x": list(range(4 * n)) for n in (1, 2, 10)
    }


@pytest.mark.parametrize("case", ["tied", "tied-copies"])
def test_tied_weights_are_one_for_all_members(place: Path, seen: list[dict[str, Any]], case: str) -> None:
    assert [member[case] for member in seen] == [None] * NUM_MEMBERS
    with relayout.safe_open(place / case) as saved:
        assert list(saved.keys()) == ["embedding"]


def test_only_the_first_member_reads_the_configuration(seen: list[dict[str, Any]]) -> None:
    assert [member["config-of-one"] for member in seen] == [None] * NUM_MEMBERS


def test_an_interruption_before_a_save_in_the_background_is_heard_of(seen: list[dict[str, Any]]) -> None:
    assert seen[2]["interrupted"] == ["KeyboardInterrupt", ""]
    for kind, message in (member["interrupted"] for member in seen if member is not seen[2]):
        assert (kind, "member 2 of the group failed: KeyboardInterrupt" in message) == ("RuntimeError", True)


def test_nothing_is_left_of_a_save_that_failed(place: Path, seen: list[dict[str, Any]]) -> None:
    for case in (
        "missing",
        "options",
        "outputs",
        "others",
        "dtypes",
        "sums",
        "whole",
        "overlap",
        "drift",
        "buffer",
        "config",
        "copy",
        "notes",
        "interrupted",
        "killed",
    ):
        assert not (place / case).exists()
    assert [member["after"] for member in seen] == [None] * NUM_MEMBERS
    assert weights(place / "full") == converted(place, "llama", 4)
    # A member that is killed cannot be waited for: what another begins after that is left for the next save.
    assert {path.name for path in place.glob(".*")} <= {".killed.relayout-partial"}


def test_a_member_that_is_killed_fails_the_others(seen: list[dict[str, Any]]) -> None:
    for kind, message in errors_of(seen[:3], "killed"):
        assert kind == "ConnectionAbortedError"
        assert "a member may be gone" in message
    assert "killed" not in seen[3]


def test_members_that_never_call_are_named(tmp_path: Path) -> None:
    seen = seen_by_members(tmp_path, "from support.saving_worker import one_is_missing; one_is_missing()")
    assert [member["all call"] for member in seen] == [None] * NUM_MEMBERS
    for kind, message in (seen[number][case] for number in (0, 3) for case in ("the next", "the first")):
        assert (kind, "of 4 members these have not called: 1-2" in message) == ("ConnectionAbortedError", True)


def test_a_member_that_stands_still_is_named_in_the_log_and_may_go_on(tmp_path: Path) -> None:
    seen = seen_by_members(tmp_path, "from support.saving_worker import stopped; stopped()")
    assert seen == [{"stopped": None}] * NUM_MEMBERS
    said = "relayout: member 0 of a group waits for the members 2, up to its timeout of 120 s"
    assert (tmp_path / "said").read_text() == said


def test_a_member_that_is_killed_before_it_connects_fails_the_others_and_a_late_one_does_not(tmp_path: Path) -> None:
    given = {"script": "from support.saving_worker import connecting; connecting()", "imports": prestarted.GROUP}
    done = prestarted.run(tmp_path, env=prestarted.ONE_THREAD, **given)
    assert done.returncode == 0, done.stderr
    for number in (0, 1, 3):
        seen = json.loads((tmp_path / f"member-{number}.json").read_text())
        for case in ("killed", "gone"):
            kind, message = seen.pop(case)
            assert (kind, "a member may be gone" in message) == ("ConnectionAbortedError", True)
        assert "of 4 members these have not called: 2" in message
        assert seen == {"late for the first": None, "late for the next": None}


@pytest.mark.parametrize(
    ("member", "num_calls"),
    sample(
        [(m, n) for m in (-1, 0, 3) for n in (0, 1, 3, 6, 10, 15, 20, 25, 30, 40, 60, 80)], [(-1, 6), (0, 25), (3, 3)]
    ),
)
def test_of_a_save_that_is_killed_there_is_the_old_folder_or_the_new(
    place: Path, tmp_path: Path, member: int, num_calls: int
) -> None:
    (tmp_path / "llama").symlink_to(place / "llama")
    output = tmp_path / "out"
    relayout.save({"x": torch.ones(4)}, output)
    before = weights(output)
    given = {"script": "from support.saving_worker import killed; killed()", "imports": prestarted.GROUP}
    done = prestarted.run(tmp_path, member, num_calls, env=prestarted.ONE_THREAD, **given)
    assert done.returncode == 0, done.stderr
    found = weights(output)
    assert found == before or found.keys() == converted_parts(place).keys()
    (tmp_path / "rendezvous").unlink()
    done = prestarted.run(tmp_path, NUM_MEMBERS, 0, env=prestarted.ONE_THREAD, **given)
    assert done.returncode == 0, done.stderr
    assert weights(output) == converted_parts(place)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def converted_parts(place: Path) -> dict[str, bytes]:
    output = place / "llama-parts"
    if not output.exists():
        relayout.convert(place / "llama", output, tp=8, max_part_nbytes="30KB")
    return weights(output)
