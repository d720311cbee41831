"""Two and three writers of one prefix, at every moment of each other: nothing foreign goes, and an output is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.bucket_world import NEVER, Chances, Killed, Request, World, WorldClient, Writer, in_its_time

from relayout.conversion import jobs
from relayout.conversion.layout import Conversion as ConversionPlan
from relayout.conversion.planning import plan_conversion
from relayout.conversion.run import carry_out
from relayout.errors import PlanError, RelayoutError
from relayout.publish import bucket
from relayout.publish.claim import CLAIM, Claim
from relayout.publish.output import with_suffix
from relayout.storage.stores import RequestError

Files = dict[str, bytes]
Make = Callable[..., World]
Plans = dict[int, tuple[ConversionPlan, Files]]
HIDDEN = "out/.relayout/"
MANIFEST = "out/relayout.json"
NUM_SCHEDULES = int(os.environ.get("RELAYOUT_SCHEDULES", "20"))
"""1,000 take some minutes."""
STEP = 1 if "RELAYOUT_SCHEDULES" in os.environ else 5
"""Of each law about any moment, every day some moments are tried: others for others of its parameters."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Conversions of a tiny model in two units, at the degrees 1, 2 and 2, and what they make on the drive."""
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "model").mkdir()
    random = np.random.default_rng(5)
    shapes = {f"model.layers.{n}.mlp.{part}_proj.weight": (64, 64) for n in range(2) for part in ("gate", "up", "down")}
    weights = {name: random.integers(1, 2**16, shape, np.uint16) for name, shape in shapes.items()}
    save_file(weights, folder / "model/model.safetensors")
    (folder / "model/config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}')
    (folder / "model/large.txt").write_bytes(random.integers(0, 256, 3000, np.uint8).tobytes())
    made = {}
    for key, tp, align in ((1, 1, 4096), (2, 2, 4096), (3, 2, 512)):
        plan = plan_conversion(folder / "model", folder / f"{key}", tp=tp, align=align, max_part_nbytes=30_000 // tp)
        carry_out(plan)
        made[key] = plan, {path.name: path.read_bytes() for path in (folder / f"{key}").iterdir()}
        assert len(plan.layout.units) == 2
    return made


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    with in_its_time() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "_SMALL_NBYTES", 2500)  # One side file goes through scratch.
        yield found


def strangers(world: World) -> Files:
    """What others have there: beside the output."""
    names = ["out2/model-rank-0-part-0.safetensors", "outer", ".out.relayout-partial/theirs", "relayout.json"]
    for name in names:
        world.bucket.write(name, f"of {name}".encode())
    return {name: world.bucket.objects[name][0] for name in names}


def check_strangers(world: World, theirs: Files) -> None:
    assert {name: world.bucket.objects[name][0] for name in theirs} == theirs


def there(world: World) -> Files:
    """All that is visible below the prefix."""
    names = [name for name in world.bucket.names("out/") if not name.startswith(HIDDEN)]
    return {name.removeprefix("out/"): world.bucket.objects[name][0] for name in names}


def published(world: World) -> Files:
    """The files that the manifest and the record name; names of weight files without their mark."""
    if MANIFEST not in world.bucket.objects:
        return {}
    found = there(world)
    manifest = json.loads(found["relayout.json"])
    index = json.loads(found["model.safetensors.index.json"])
    blobs = {}
    marks = {
        name.partition("-part-")[2].removesuffix(".safetensors").partition("-")[2] for name in weights_in(manifest)
    }
    [mark] = marks
    for name, blob in found.items():
        plain = name.replace(f"-{mark}.safetensors", ".safetensors") if mark else name
        if name in weights_in(manifest) or not name.startswith("model-rank-"):
            blobs[plain] = blob.replace(f"-{mark}.safetensors".encode(), b".safetensors") if mark else blob
    assert index
    return blobs


def weights_in(manifest: dict[str, object]) -> list[str]:
    files = manifest["files"]
    assert isinstance(files, list | dict)
    return [file["name"] for file in files] if isinstance(files, list) else list(files["name"])


def unsealed(files: Files) -> Files:
    """Files by name; of a manifest, which has a digest of itself, what it says."""
    found = dict(files)
    if "relayout.json" in found:
        top = json.loads(found["relayout.json"])
        for field in ("self_digest", "hub_index_digest"):
            top.pop(field, None)
        found["relayout.json"] = json.dumps(top).encode()
    return found


def is_whole(found: Files, expected: Files) -> bool:
    """Whether an output has all files of a conversion; others may be left there of other attempts."""
    wanted, there = unsealed(expected), unsealed(found)
    return all(there.get(name) == blob for name, blob in wanted.items())


def convert(writer: Writer, plan: ConversionPlan, *, force: bool = False) -> None:
    carry_out(replace(plan, output=writer.store()), force=force, threads=1)


def by_units(writer: Writer, plan: ConversionPlan, *, force: bool = False) -> None:
    there = replace(plan, output=writer.store())
    for unit in range(len(plan.layout.units)):
        jobs.convert_unit(there, unit, force=force, threads=1)
    jobs.commit_units(there, force=force)


WAYS = {"convert": convert, "units": by_units}


def solo(make: Make) -> tuple[World, Writer]:
    world = make()
    writer = Writer(world, "machine")
    world.current = writer
    return world, writer


def requests_of(
    make: Make, way: Callable[..., None], plan: ConversionPlan, prepared: Callable[[Writer], None]
) -> list[Request]:
    world, writer = solo(make)
    prepared(writer)
    requests: list[Request] = []
    world.watch = lambda writer, request: requests.append(request)
    writer.begin()
    way(writer, plan, force=True)
    return requests


def older_output(plans: Plans, older: str) -> Callable[[Writer], None]:
    def prepared(writer: Writer) -> None:
        writer.begin()
        if older != "nothing":
            convert(writer, plans[1][0])

    return prepared


@pytest.mark.parametrize("way", WAYS)
def test_a_conversion_leaves_exactly_the_files_of_a_local_one(make: Make, plans: Plans, way: str) -> None:
    world, writer = solo(make)
    theirs = strangers(world)
    writer.begin()
    WAYS[way](writer, plans[2][0])
    assert {name.removeprefix("out/"): world.bucket.objects[name][0] for name in world.bucket.names("out/")} == (
        plans[2][1]
    )
    check_strangers(world, theirs)


def test_what_replaces_another_output_has_names_of_its_own(make: Make, plans: Plans) -> None:
    world, writer = solo(make)
    older_output(plans, "an older output")(writer)
    before = {name for name in there(world) if name.startswith("model-rank-")}
    writer.begin()
    convert(writer, plans[2][0], force=True)
    now = {name for name in there(world) if name.startswith("model-rank-")}
    assert len(now) == 4
    assert not before & now
    assert len({name.partition("-part-")[2][1:] for name in now}) == 1, "one mark"
    assert is_whole(published(world), plans[2][1])
    assert world.bucket.names(HIDDEN) == []


@pytest.mark.parametrize("older", ["nothing", "an older output"])
@pytest.mark.parametrize("way", WAYS)
def test_after_a_kill_at_any_request_the_same_command_goes_on(make: Make, plans: Plans, way: str, older: str) -> None:
    prepared = older_output(plans, older)
    plan, expected = plans[2]
    requests = requests_of(make, WAYS[way], plan, prepared)
    assert len(requests) > 30
    first = 2 * list(WAYS).index(way) + ["nothing", "an older output"].index(older)
    for moment in range(1 + first % STEP, len(requests) + 1, STEP):
        world, writer = solo(make)
        theirs = strangers(world)
        prepared(writer)
        before = published(world)
        writer.begin(moment)
        with pytest.raises(Killed):
            WAYS[way](writer, plan, force=True)
        check_strangers(world, theirs)
        if MANIFEST in world.bucket.objects and not is_whole(published(world), expected):
            manifests = [json.loads(there(world)["relayout.json"]), json.loads(before["relayout.json"])]
            assert manifests[0]["conversion"] == manifests[1]["conversion"], moment
        for _ in range(2):
            writer.begin()
            if is_whole(published(world), expected):
                break
            WAYS[way](writer, plan, force=True)
        assert is_whole(published(world), expected), moment
        check_strangers(world, theirs)


def interrupt(first: Writer, moment: int, second: Writer, call: Callable[[], None]) -> None:
    """Let a process of the second writer work while the first one's request of this number is on its way."""
    world = first.world

    def come(writer: Writer, request: Request) -> None:
        if writer is first and first.num_requests == moment:
            world.current = second
            second.begin()
            call()
            world.current = first

    world.watch = come


def fail(writer: Writer, plan: ConversionPlan, meanwhile: Callable[[], None] = lambda: None) -> None:
    """A conversion whose source cannot be read, before it has sent a file."""

    def stop(done: int, total: int) -> None:
        meanwhile()
        writer.world.current = writer
        raise OSError(5, "the drive of the source")

    writer.begin()
    with pytest.raises(OSError, match="the drive of the source"):
        carry_out(replace(plan, output=writer.store()), force=True, threads=1, progress=stop)


@pytest.mark.parametrize("older", ["nothing", "an older output"])
def test_a_conversion_that_fails_before_it_has_sent_a_file_leaves_all_as_it_was(
    make: Make, plans: Plans, older: str
) -> None:
    world, writer = solo(make)
    theirs = strangers(world)
    older_output(plans, older)(writer)
    before = there(world)
    fail(writer, plans[2][0])
    assert there(world) == before
    writer.begin()
    convert(writer, plans[3][0], force=older != "nothing")
    assert is_whole(published(world), plans[3][1])
    assert older != "nothing" or there(world) == plans[3][1], "as if there had been no claim"
    assert world.bucket.names(HIDDEN) == []
    check_strangers(world, theirs)


@pytest.mark.parametrize("other", ["the same", "replaces"])
def test_a_conversion_that_fails_gives_up_no_claim_that_others_rely_on(make: Make, plans: Plans, other: str) -> None:
    """Others have begun the same work, or have taken over, and stand still at any of their requests."""
    plan = plans[2 if other == "the same" else 1][0]
    number = len(requests_of(make, convert, plan, lambda writer: None))
    relied = 0
    for moment in range(1, number + 1, STEP):
        world, first = solo(make)
        second = Writer(world, "another machine")
        world.writers.remove(second)
        left: list[tuple[bytes, str]] = []

        def come(world: World, second: Writer, moment: int, left: list[tuple[bytes, str]]) -> None:
            world.current = second
            second.begin(moment)
            with pytest.raises(Killed):
                convert(second, plan, force=other == "replaces")
            left.append(world.bucket.objects[f"out/{CLAIM}"])

        fail(first, plans[2][0], partial(come, world, second, moment, left))
        claim = Claim.parse(left[0][0], "")
        if claim.is_shared or "at TP 1" in claim.what:
            relied += 1
            assert world.bucket.objects[f"out/{CLAIM}"] == left[0]
            with pytest.raises(PlanError, match=r"is claimed by|already holds a complete"):
                convert(first, plans[3][0])
        else:
            convert(first, plans[3][0])
            assert there(world) == plans[3][1]
    assert relied > number // STEP // 2


def test_the_same_work_may_begin_at_any_request_of_a_conversion_that_fails(make: Make, plans: Plans) -> None:
    plan, expected = plans[2]
    world, first = solo(make)
    fail(first, plan)
    for moment in range(1, first.num_requests + 1):
        world, first = solo(make)
        second = Writer(world, "another machine")
        world.writers.remove(second)
        interrupt(first, moment, second, partial(convert, second, plan))
        with suppress(PlanError):  # It is complete already.
            fail(first, plan)
        assert there(world) == expected, moment
        convert(first, plans[1][0], force=True)
        assert is_whole(published(world), plans[1][1])
        assert world.bucket.names(HIDDEN) == []


OTHERS = ["the same", "other options", "replaces", "commits"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", OTHERS)
def test_a_second_writer_at_any_request_ends_with_one_whole_output(
    make: Make, plans: Plans, way: str, other: str
) -> None:
    """Of the same conversion, both go on; another is refused, or takes over by force."""
    plan, expected = plans[2]
    number = len(requests_of(make, WAYS[way], plan, lambda writer: writer.begin()))
    told = []

    def come(second: Writer) -> None:
        try:
            if other == "commits":
                jobs.commit_units(replace(plan, output=second.store()))
            else:
                convert(second, plans[2 if other == "the same" else 1][0], force=other == "replaces")
            told.append("done")
        except PlanError as error:
            told.append(error.code)

    for moment in range(1 + (OTHERS.index(other) + 2 * list(WAYS).index(way)) % STEP, number + 1, STEP):
        world, first = solo(make)
        second = Writer(world, "machine")
        world.writers.remove(second)
        theirs = strangers(world)
        interrupt(first, moment, second, partial(come, second))
        first.begin()
        outcome = "done"
        try:
            WAYS[way](first, plan)
        except (PlanError, RequestError, FileExistsError) as error:
            outcome = getattr(error, "code", "lost")
        found = published(world)
        assert is_whole(found, expected) or is_whole(found, plans[1][1]), (moment, outcome, told[-1])
        if other == "replaces" and told[-1] == "done":
            assert is_whole(found, plans[1][1]), (moment, outcome)
        check_strangers(world, theirs)
    assert set(told) <= {"busy", "done", "exists", "missing"}
    assert {"the same": "done", "other options": "busy", "replaces": "done", "commits": "missing"}[other] in told


def test_of_two_that_claim_a_prefix_at_the_same_moment_one_is_refused(make: Make, plans: Plans) -> None:
    """A claim is on its way when another process makes its own, and is killed."""
    world, first = solo(make)
    second = Writer(world, "another machine")
    claims = []

    def come(writer: Writer, request: Request) -> None:
        if request.operation == "upload":
            claims.append(world.bucket.objects[f"out/{CLAIM}"])
            second.killed_at = second.num_requests
        elif writer is first and (request.operation, request.name) == ("put", f"out/{CLAIM}") and not claims:
            world.current = second
            second.begin()
            with pytest.raises(Killed):
                convert(second, plans[1][0])
            world.current = first

    world.watch = come
    first.begin()
    with pytest.raises(PlanError, match=r"out: is claimed by a conversion of .* at TP 1"):
        convert(first, plans[2][0])
    assert [world.bucket.objects[f"out/{CLAIM}"]] == claims


class Halting(Writer):
    """Stands still before one request, while another writer does its work."""

    halts_at = NEVER
    other: Callable[[], None]

    def request(self, request: Request) -> object:
        if self.num_requests + 1 == self.halts_at:
            self.halts_at = NEVER
            self.other()
            self.world.current = self
        return super().request(request)


@pytest.mark.parametrize("older", ["nothing", "an older output"])
def test_a_writer_that_stands_still_until_another_takes_over_does_no_harm_when_it_goes_on(
    make: Make, plans: Plans, older: str
) -> None:
    """Whatever its next request is: it was on its way when the other one began, and comes when all is published."""
    prepared = older_output(plans, older)
    requests = requests_of(make, convert, plans[2][0], prepared)
    moments = [n for n, request in enumerate(requests, 1) if not request.is_harmless or request.operation == "get"]
    for moment in moments:
        world = make()
        first, second = Halting(world, "machine"), Writer(world, "another machine")
        world.writers.remove(second)
        world.current = first
        prepared(first)

        def take_over(world: World = world, second: Writer = second) -> None:
            world.current = second
            second.begin()
            with suppress(PlanError):  # The first one has just published.
                convert(second, plans[3][0], force=True)

        first.other, first.halts_at = take_over, moment
        first.begin()
        with suppress(PlanError, FileExistsError):
            convert(first, plans[2][0], force=True)
        found = published(world)
        request = requests[moment - 1]
        if request.operation == "delete":
            continue  # Only what the older output named, and an own claim: see the next test.
        assert is_whole(found, plans[3][1]) or is_whole(found, plans[2][1]), (moment, request)


def test_weights_that_are_deleted_late_are_nobodys(make: Make, plans: Plans) -> None:
    """Deletes of weight files name only names that nobody writes again, however often outputs replace each other."""
    world, writer = solo(make)
    deleted: list[set[str]] = []
    written: list[set[str]] = []

    def watch(writer: Writer, request: Request) -> None:
        if request.operation == "delete":
            deleted[-1].update(request.act.args[0])  # type: ignore[attr-defined]
        if request.operation == "upload":
            written[-1].add(request.name)

    world.watch = watch
    for tp in (1, 2, 1, 2, 2, 1):
        deleted.append(set())
        written.append(set())
        writer.begin()
        convert(writer, plans[tp][0], force=True)
        weights = {name for name in deleted[-1] if "model-rank-" in name}
        assert bool(weights) is (len(written) > 1)
        assert not weights & written[-1]
        for earlier in written[:-1]:
            assert not earlier & written[-1], "a name is written by one work only"


@pytest.mark.parametrize("name", ["config.json", "large.txt", "model-rank-1-part-0.safetensors", "new"])
@pytest.mark.parametrize("force", [False, True])
def test_what_others_put_in_the_place_of_an_output_is_not_touched(
    make: Make, plans: Plans, name: str, force: bool
) -> None:
    plan, _ = plans[2]
    world, writer = solo(make)
    world.bucket.write(f"out/{name}", b"theirs")
    before = dict(world.bucket.objects)
    writer.begin()
    with pytest.raises(PlanError, match="out: is not empty"):
        convert(writer, plan, force=force)
    assert world.bucket.objects == before


def test_what_others_put_there_meanwhile_is_named_and_stays(make: Make, plans: Plans) -> None:
    plan, expected = plans[2]
    world, writer = solo(make)

    def watch(writer: Writer, request: Request) -> None:
        if request.operation == "upload":
            world.bucket.write("out/new", b"theirs")

    world.watch = watch
    writer.begin()
    with pytest.raises(PlanError, match="holds files that this work did not write: 'new'"):
        convert(writer, plan)
    assert world.bucket.objects["out/new"][0] == b"theirs"
    assert MANIFEST not in world.bucket.objects
    del world.bucket.objects["out/new"]
    world.watch = lambda writer, request: None
    writer.begin()
    convert(writer, plan)
    assert there(world) == expected


def test_a_refused_command_changes_nothing(make: Make, plans: Plans) -> None:
    world, writer = solo(make)
    theirs = strangers(world)
    writer.begin(30)
    with pytest.raises(Killed):
        convert(writer, plans[2][0])
    before = dict(world.bucket.objects)
    for way in WAYS.values():
        writer.begin()
        with pytest.raises(PlanError, match=r"is claimed by a conversion of .*model at TP 2, \d+ files of it exist"):
            way(writer, plans[1][0])
    assert world.bucket.objects == before
    convert(writer, plans[1][0], force=True)
    assert is_whole(published(world), plans[1][1])
    check_strangers(world, theirs)


def before_the_manifest(world: World, name: str, content: bytes | None) -> None:
    """Let another process replace or delete a file just before the manifest is written."""

    def watch(writer: Writer, request: Request) -> None:
        if (request.operation, request.name) == ("list_objects", "out") and f"out/{name}" in world.bucket.objects:
            world.watch = lambda writer, request: None
            if content is None:
                del world.bucket.objects[f"out/{name}"]
            else:
                world.bucket.write(f"out/{name}", content)

    world.watch = watch


@pytest.mark.parametrize("how", ["replaced", "deleted"])
@pytest.mark.parametrize("name", ["config.json", "large.txt", "model-rank-0-part-0.safetensors"])
@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_changes_before_the_manifest_is_written_is_an_error(
    make: Make, plans: Plans, way: str, name: str, how: str
) -> None:
    plan, expected = plans[2]
    world, writer = solo(make)
    theirs = bytes(len(expected[name])) if how == "replaced" else None
    before_the_manifest(world, name, theirs)
    writer.begin()
    says = f"replaced or deleted by another process.*out/{name}|1 of 2 units are not done: 0"
    with pytest.raises((FileExistsError, PlanError), match=says):
        WAYS[way](writer, plan)
    assert "relayout.json" not in there(world)
    writer.begin()
    world.bucket.objects.pop(f"out/{name}", None)
    WAYS[way](writer, plan)
    assert there(world) == expected


@pytest.mark.parametrize("name", ["config.json", "model-rank-0-part-0.safetensors"])
def test_where_a_bucket_tells_no_versions_the_first_bytes_of_each_object_are_compared(
    make: Make, plans: Plans, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, expected = plans[2]
    for method, untold in {
        "list_objects": lambda found: [(one, "") for one, _ in found],
        "put": lambda _: {},
        "upload": lambda _: {},
    }.items():
        told = getattr(WorldClient, method)
        monkeypatch.setattr(WorldClient, method, lambda *given, _t=told, _u=untold, **named: _u(_t(*given, **named)))
    world, writer = solo(make)
    before_the_manifest(world, name, bytes(len(expected[name])))
    writer.begin()
    with pytest.raises(FileExistsError, match=f"replaced or deleted by another process.*out/{name}"):
        convert(writer, plan)
    del world.bucket.objects[f"out/{name}"]
    writer.begin()
    convert(writer, plan)
    assert there(world) == expected


def test_a_publication_reads_nothing_of_what_it_has_created(make: Make, plans: Plans) -> None:
    world, writer = solo(make)
    read: list[str] = []
    world.watch = lambda writer, request: read.append(request.name) if request.operation == "get" else None
    writer.begin()
    convert(writer, plans[2][0])
    assert not [name for name in read if name.startswith("out/") and not name.startswith(HIDDEN)]


STRANGE = {
    "no JSON": b"theirs",
    "no UTF-8": b"\xff{}",
    "nested": b"[" * 100_000,
    "a list": b"[]",
    "null": b"null",
    "no mark": b"{}",
    "another kind": b'{"relayout": "Unheard"}',
    "a field too few": b'{"relayout": "claim"}',
    "names above": Claim("x", "x", "", ("../x",), ()).dump(),
    "numbers": Claim("x", "x", "", (1,), ()).dump(),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("strange", STRANGE)
def test_what_has_the_name_of_a_claim_and_is_none_is_an_error_that_names_it(
    make: Make, plans: Plans, strange: str, force: bool
) -> None:
    world, writer = solo(make)
    world.bucket.write(f"out/{CLAIM}", STRANGE[strange])
    before = dict(world.bucket.objects)
    writer.begin()
    with pytest.raises(RelayoutError, match=f"out/{CLAIM}: not a claim of relayout.* delete this object"):
        convert(writer, plans[2][0], force=force)
    assert world.bucket.objects == before


@pytest.mark.parametrize("strange", ["no JSON", "null", "a list", "no mark", "nested"])
def test_what_has_the_name_of_a_record_and_is_none_is_an_error_that_names_it(
    make: Make, plans: Plans, strange: str
) -> None:
    plan = replace(plans[2][0])
    world, writer = solo(make)
    writer.begin()
    jobs.convert_unit(replace(plan, output=writer.store()), 0, threads=1)
    [record] = [name for name in world.bucket.names(HIDDEN) if name != f"out/{CLAIM}"]
    world.bucket.write(record, STRANGE[strange])
    before = dict(world.bucket.objects)
    with pytest.raises(RelayoutError, match=f"{record}: not a record of relayout"):
        convert(writer, plan)
    claims = before.pop(f"out/{CLAIM}"), world.bucket.objects.pop(f"out/{CLAIM}")
    assert replace(Claim.parse(claims[0][0], ""), is_shared=True) == Claim.parse(claims[1][0], "")
    assert world.bucket.objects == before


def test_marks_stand_before_the_extension() -> None:
    assert with_suffix("model-rank-0-part-0.safetensors", "0a1b") == "model-rank-0-part-0-0a1b.safetensors"
    assert with_suffix("relayout-rank-0-part-0.slices", "") == "relayout-rank-0-part-0.slices"


class Schedule:
    """Writers of one prefix, what they do, and what befalls them: all by chance, and the same for the same seed."""

    def __init__(self, make: Make, plans: Plans, seed: int) -> None:
        random = np.random.default_rng(seed)
        harm = random.choice([0.0, 0.02, 0.08])
        chances = Chances(
            delay=random.choice([0.1, 0.5, 1.0]),
            long_delay=random.choice([0.0, 0.01, 0.05]),
            lost=harm,
            late=harm / 4,
            pause=random.choice([0.0, 0.0, 0.02]),
        )
        self.random = random
        self.plans = plans
        self.world = make(seed, chances)
        self.theirs = strangers(self.world)
        self.told: list[str] = []
        self.disturbed: dict[str, bytes] = {}
        if random.random() < 0.4:
            older = Writer(self.world, "m0", lambda writer: None)
            older.begin()
            self.world.writers.clear()
            self.world.chances, chances = Chances(), self.world.chances
            self.world.current = older
            convert(older, plans[1][0])
            self.world.chances = chances
        for number in range(int(random.choice([2, 2, 3]))):
            Writer(self.world, f"m{number + 1}", self.work)
        self.stranger_at = int(random.integers(50, 400)) if random.random() < 0.3 else NEVER
        self.num_requests = 0
        self.world.watch = self.watch

    def watch(self, writer: Writer, request: Request) -> None:
        """Somebody else writes a file where there is none, at some moment."""
        self.num_requests += 1
        if self.num_requests >= self.stranger_at and "out/notes" not in self.world.bucket.objects:
            self.stranger_at = NEVER
            self.disturbed["out/notes"] = b"theirs"
            self.world.bucket.write("out/notes", b"theirs")

    def work(self, writer: Writer) -> None:
        random = self.random
        way = WAYS[str(random.choice(list(WAYS), p=[0.7, 0.3]))]
        tp, force = int(random.choice([1, 2])), bool(random.random() < 0.4)
        for _ in range(int(random.integers(1, 4))):
            writer.begin(
                int(random.integers(1, 150)) if random.random() < 0.5 else NEVER, is_done=random.random() < 0.5
            )
            try:
                way(writer, self.plans[tp][0], force=force)
            except Killed:
                self.told.append("killed")
            except (RelayoutError, OSError) as error:
                self.told.append(getattr(error, "code", type(error).__name__))
                writer.is_killed = True  # The process has ended.
                if getattr(error, "code", "") == "exists":
                    return
            else:
                writer.is_killed = True
                self.told.append("done")
                return
            writer.wait(float(random.uniform(0, 200)))

    def check(self) -> str:
        """Let the world run; then say what was left, which is whole, or can be gone on with."""
        world = self.world
        world.run()
        check_strangers(world, self.theirs)
        for name, blob in self.disturbed.items():
            assert world.bucket.objects[name][0] == blob
            del world.bucket.objects[name]  # They take it away again.
        outcome = "none"
        if MANIFEST in world.bucket.objects and not world.bucket.names(HIDDEN):
            outcome = "whole"
            found = published(world)
            assert any(is_whole(found, files) for _, files in self.plans.values())
        world.chances, world.watch = Chances(), lambda writer, request: None
        again = Writer(world, "m9")
        world.writers[:] = [again]
        world.current = again
        again.begin()
        late = ""
        try:
            convert(again, self.plans[2][0], force=True)
        except PlanError as error:  # What a writer that lost its claim has left late: somebody has to delete it.
            late = str(error)
        if late:
            assert "did not write" in late or "is not empty" in late
            return "strange"
        assert is_whole(published(world), self.plans[2][1]), "and another conversion is possible"
        check_strangers(world, self.theirs)
        return outcome


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, 10))
def test_writers_of_one_prefix_leave_a_whole_output_or_one_to_go_on_with(
    make: Make, plans: Plans, first: int, tmp_path: Path
) -> None:
    outcomes = []
    for seed in range(first, min(first + 10, NUM_SCHEDULES)):
        try:
            schedule = Schedule(make, plans, seed)
            outcomes.append(schedule.check())
        except BaseException as error:
            error.add_note(f"seed {seed}: {schedule.told}")
            raise
        if "RELAYOUT_SCHEDULES" in os.environ:
            print(seed, outcomes[-1], *schedule.told)
    assert outcomes
