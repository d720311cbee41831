"""relayout.load with a group: together the members read each byte once, each has all of them, and one fails all."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from blake3 import blake3
from support.conversions import reference_tensors, stored_in
from support.group_worker import NUM_MEMBERS, PIECE_NBYTES, digests, load_together, seen_by_members
from support.loader_fixtures import MIB, mlp_model
from support.remote import HEAD
from support.signing import make_keys

import relayout
from relayout.checkpoint.converted import FileDigests
from relayout.core.extents import Transfer
from relayout.errors import FormatError, PlanError
from relayout.format.index import Read
from relayout.loader.group.plan import Portion, PortionRound
from relayout.loader.group.sharing import Sharing, verify_received
from relayout.loader.sources.rank import StoredFile
from relayout.storage.local.store import LocalStore

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.group_worker import main; main()"
MEMBERS = range(NUM_MEMBERS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source`, converted as `out`: 8 MB a rank, in two files; `foreign` is a conversion of other bytes."""
    place = tmp_path_factory.mktemp("group")
    for seed, name in enumerate(("out", "foreign")):
        source = mlp_model(place / f"source{seed or ''}", num_layers=2, width=6144, seed=seed)
        relayout.convert(source, place / name, tp=2, max_part_nbytes=5 * MIB)
    relayout.convert(place / "source", place / "signed", tp=2, max_part_nbytes=5 * MIB)
    relayout.sign(place / "signed", key=make_keys(place).key)
    return place


@pytest.fixture(scope="module")
def group(place: Path) -> list[dict[str, Any]]:
    """What each member of a group saw in each case."""
    return seen_by_members(place, SCRIPT)


def rank_nbytes(place: Path, reads: int = 1) -> int:
    manifest = json.loads((place / "out" / "relayout.json").read_text())
    return int(manifest["ranks"][reads]["nbytes"])


STREAMED = ["streamed", "streamed, verified", "streamed, directly"]


@pytest.mark.parametrize("case", ["direct", "buffered", "store", "verified", *STREAMED, "afterwards"])
def test_every_member_has_the_tensors_of_the_rank(place: Path, group: list[dict[str, Any]], case: str) -> None:
    expected = digests(stored_in(place / "out", 1))
    assert len(expected) > 12
    assert [member[case]["tensors"] for member in group] == [expected] * NUM_MEMBERS


@pytest.mark.parametrize("by", ["trusted", "streamed, trusted"])
def test_what_others_have_read_is_proven(place: Path, group: list[dict[str, Any]], by: str) -> None:
    expected = digests(stored_in(place / "out", 1))
    some = {name: one for name, one in expected.items() if ".0.mlp." in name}
    quarter = digests(relayout.load(place / "out", 2, tp=4))
    for case, found in ((by, expected), (f"{by}, some", some), (f"{by}, four ranks", quarter)):
        assert [member[case].get("tensors", member[case]) for member in group] == [found] * NUM_MEMBERS


def test_a_member_that_lies_is_not_believed(place: Path, group: list[dict[str, Any]]) -> None:
    for case in ("a member lies", "streamed, a member lies"):
        for number, member in enumerate(group):
            assert (member[case]["kind"], member[case]["code"]) == ("FormatError", "digest"), (case, number)
            assert "do not match digest" in member[case]["error"]
    for member in group:  # Their ends are in chunks that go on in others: each reads those itself.
        assert member["streamed in small batches, a member lies"]["tensors"] == digests(stored_in(place / "out", 1))
    believed = [member["a member lies, and is believed"]["tensors"] for member in group]
    assert all(found != digests(stored_in(place / "out", 1)) for found in believed)  # So that the lie was one.


@pytest.mark.parametrize("damaged", [None, 3, 35])
def test_a_chunk_of_which_two_members_have_read_parts_is_proven(tmp_path: Path, damaged: int | None) -> None:
    """Whose part was wrong: what this member has read lay in its own memory, too."""
    content = bytes(range(1, 17))
    (tmp_path / "file").write_bytes(content)
    proof = FileDigests("", 0, 16, blake3(content).digest)
    file = StoredFile(LocalStore(tmp_path), "file", 16, proof)
    reads = [Read(0, Transfer(0, 0, 8)), Read(0, Transfer(8, 32, 8))]
    portions = tuple(
        Portion(member, read.transfer.target, read.transfer.target_end, (read,)) for member, read in enumerate(reads)
    )
    memory = bytearray(content[:8] + bytes(24) + content[8:])
    if damaged is not None:
        memory[damaged] ^= 1
    with pytest.raises(FormatError, match="digest") if damaged is not None else nullcontext():
        verify_received([file], reads, [PortionRound(0, portions)], memoryview(memory), 0, 1)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_must_be_proven_is_sent_to_host_memory_only(kind: str, is_signed: bool) -> None:
    """A device's memory cannot be hashed: there each member reads all, and proves what it reads."""
    sharing = Sharing(cast("Any", None), "", (), (), kind, is_signed)
    assert sharing.is_sent == (kind == "cpu" or not is_signed)


def test_at_another_degree_and_some_tensors_only(place: Path, group: list[dict[str, Any]]) -> None:
    whole = digests(reference_tensors(place / "source"))
    quarter = digests(relayout.load(place / "out", 2, tp=4))
    some = {name: one for name, one in digests(stored_in(place / "out", 1)).items() if ".0.mlp." in name}
    assert some
    cases = {"one rank, verified": whole, "four ranks": quarter, "streamed, four ranks": quarter}
    for case, expected in {**cases, "some": some, "streamed, some": some}.items():
        assert [member[case]["tensors"] for member in group] == [expected] * NUM_MEMBERS, case


def assert_read_once(place: Path, read: list[int], rank_nbytes: int, again: int = 0) -> None:
    """Beside what each reads of manifest, table and headers."""
    small = [place / "out" / f"relayout.{name}" for name in ("json", "chunks", "rank-1.json.zst")]
    num_files = len(list((place / "out").glob("model-rank-1-part-*")))
    each = sum(file.stat().st_size for file in small) + num_files * HEAD
    assert rank_nbytes <= sum(read) <= rank_nbytes + NUM_MEMBERS * each + num_files * again
    assert max(read) <= rank_nbytes / NUM_MEMBERS + each + 2 * PIECE_NBYTES


@pytest.mark.parametrize("case", ["store", "streamed"])
def test_together_they_read_the_rank_once(place: Path, group: list[dict[str, Any]], case: str) -> None:
    assert_read_once(place, [member[case]["nbytes"] for member in group], rank_nbytes(place))


def test_to_verify_they_read_whole_chunks_and_each_once(place: Path, group: list[dict[str, Any]]) -> None:
    tensors = {name: one for name, one in stored_in(place / "out", 1).items() if ".mlp." in name}
    assert [member["some, verified"]["tensors"] for member in group] == [digests(tensors)] * NUM_MEMBERS
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert_read_once(place, [member["some, verified"]["nbytes"] for member in group], nbytes, again=2 * MIB)


def test_progress_is_told_of_the_whole(place: Path, group: list[dict[str, Any]]) -> None:
    total = rank_nbytes(place)
    for told in [member["progress"] for member in group] + [member["streamed"]["progress"] for member in group]:
        assert told[-1] == [total, total]
        assert len(told) > 3


def test_members_that_load_something_else_are_named(group: list[dict[str, Any]]) -> None:
    for number, member in enumerate(group):
        for case in ("another rank", "streamed, another rank"):
            assert member[case]["kind"] == "PlanError"
            assert f"member {number} loads rank {number // 3} of 2" in member[case]["error"]
            assert "all members of a group must load the same" in member[case]["error"]
        assert "other tensors, or another version or conversion, of that" in member["streamed, other names"]["error"]
        assert member["another conversion"]["kind"] == "PlanError"
        assert "foreign" in member["another conversion"]["error"]


FAILURES = {
    "no such rank": ("PlanError", "rank 7, expected 0 to 1", 1),
    "bad option": ("PlanError", "threads: 0, expected 1 or more", 3),
    "bad progress": ("PlanError", "progress: 'a bar', expected", 2),
    "streamed, bad option": ("PlanError", "memory: 1 bytes", 1),
    "a read fails": ("OSError", "the drive is on fire", 2),
    "a streamed read fails": ("OSError", "the drive is on fire", 2),
    "fails between blocks": ("OSError", "the drive is on fire", 2),
}
"""The kind of the error, what it says, and whose it is."""


@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_on_one_member_fails_all_with_its_reason(group: list[dict[str, Any]], case: str) -> None:
    kind, says, culprit = FAILURES[case]
    for number, member in enumerate(group):
        assert member[case]["kind"] == kind
        assert says in member[case]["error"]
        assert (f"member {culprit} of the group failed: " in member[case]["error"]) == (number != culprit)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("verified by one", "all members of a group must load the same"),  # Chunks are assigned otherwise than blocks.
        ("streamed, verified by one", "all members of a group must load the same"),
        (
            "trusted by one",
            "all members of a group must load the same",
        ),  # One proves what it receives, and waits for it.
        ("plain", "iter_load shares converted checkpoints only"),
    ],
)
def test_what_a_group_cannot_do_is_refused_by_all(group: list[dict[str, Any]], case: str, says: str) -> None:
    for member in group:
        assert member[case]["kind"] == "PlanError"
        assert says in member[case]["error"]


def test_a_member_that_stops_early_fails_the_others(group: list[dict[str, Any]]) -> None:
    for number, member in enumerate(group):
        if number == 1:
            assert len(member["stopped early"]["tensors"]) == 3
        else:
            expected = "member 1 of the group failed: it stopped before the last tensor"
            assert member["stopped early"]["error"] == expected


@pytest.mark.parametrize("case", ["damaged", "streamed, damaged"])
def test_a_damaged_chunk_fails_all_with_its_reason(group: list[dict[str, Any]], case: str) -> None:
    failed = [member[case] for member in group]
    assert {(one["kind"], one["code"]) for one in failed} == {("FormatError", "digest")}
    assert all("toy://group/out/model-rank-1-part-0" in one["error"] for one in failed)
    assert sum("of the group failed" in one["error"] for one in failed) == NUM_MEMBERS - 1


def test_a_member_that_is_killed_fails_the_others_in_time(group: list[dict[str, Any]]) -> None:
    assert "killed" not in group[3]
    for member in group[:3]:
        assert member["killed"]["kind"] in ("OSError", "ConnectionAbortedError")
        assert "a member may be gone" in member["killed"]["error"]
        assert member["killed"]["seconds"] < 60


def test_memory_is_given_back_only_if_no_other_member_may_still_write_to_it(group: list[dict[str, Any]]) -> None:
    for member in group[:3]:
        assert member["fails, all alive"]["discarded"]
        assert not member["killed"]["discarded"]


def test_members_that_never_call_are_named(place: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(place / "out")
    script = "from support.group_worker import one_is_missing; one_is_missing()"
    seen = seen_by_members(tmp_path, script)
    assert all("tensors" in member["all call"] for member in seen)
    for number in (0, 3):
        assert "of 4 members these have not called: 1-2" in seen[number]["some never call"]["error"]
        [said] = seen[number]["said"]
        assert f"member {number} of a group waits for the members 1-2, which have not called" in said
    assert [seen[number]["said"] for number in (1, 2)] == [[], []]


def test_a_process_that_is_no_member_is_refused(converted: Path) -> None:
    import torch

    with pytest.raises(PlanError, match="not a member"):
        relayout.load(converted, 0, group=torch.distributed.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [{"message": True}, {"environment": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}], ids=str)
def test_a_load_takes_no_message_of_the_application_and_leaves_it_the_group(
    place: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    """In a group that is debugged, all members have to begin equally many operations."""
    expected = digests(relayout.load(place / "out", 1))
    for by in ("load", "iter_load"):
        (tmp_path / by).mkdir()
        have = load_together(tmp_path / by, path=str(place / "out"), rank=1, by=by, **case)
        assert have == [expected] * NUM_MEMBERS
