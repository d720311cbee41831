"""Two and three writers of one prefix, at every moment of each other: nothing foreign goes, and an output is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.bucket_world import NEVER, Chances, Killed, Request, World, Writer, in_its_time
from support.store_contract import MARKER, staged

from relayout.conversion import jobs
from relayout.conversion.layout import Conversion as ConversionPlan
from relayout.conversion.run import carry_out
from relayout.errors import PlanError, RelayoutError
from relayout.planning import plan_conversion
from relayout.storage.cloud import connect
from relayout.storage.cloud.output import lease, staging
from relayout.storage.cloud.output import records as record_types
from relayout.storage.protocols import RequestError

Files = dict[str, bytes]
Make = Callable[..., World]
HIDDEN = ".out.relayout-partial/"
NUM_SCHEDULES = int(os.environ.get("RELAYOUT_SCHEDULES", "20"))
"""1,000 take some minutes."""
STEP = 1 if "RELAYOUT_SCHEDULES" in os.environ else 5
"""Of each law about any moment, every day some moments are tried: others for others of its parameters."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[ConversionPlan, Files]]:
    """By degree: a conversion of a tiny model in two units, and what it makes, as made on the drive."""
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "model").mkdir()
    random = np.random.default_rng(5)
    shapes = {f"model.layers.{n}.mlp.{part}_proj.weight": (64, 64) for n in range(2) for part in ("gate", "up", "down")}
    weights = {name: random.integers(1, 2**16, shape, np.uint16) for name, shape in shapes.items()}
    save_file(weights, folder / "model/model.safetensors")
    (folder / "model/config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}')
    (folder / "model/large.txt").write_bytes(random.integers(0, 256, 3000, np.uint8).tobytes())
    made = {}
    for tp in (1, 2):
        plan = plan_conversion(folder / "model", folder / f"tp{tp}", tp=tp, max_part_nbytes=30_000 // tp)
        carry_out(plan)
        made[tp] = plan, {path.name: path.read_bytes() for path in (folder / f"tp{tp}").iterdir()}
        assert len(plan.layout.units) == 2
    return made


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    with in_its_time() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_SMALL_NBYTES", 2500)  # One side file is an upload.
        yield found


def strangers(world: World) -> Files:
    """What others have there: beside the output, below the hidden prefix, and an upload to a file of the output."""
    names = ["out2/model-rank-0-part-0.safetensors", "outer", f"{HIDDEN}theirs", f"{HIDDEN}leases/x", "relayout.json"]
    for name in names:
        world.bucket.write(name, f"of {name}".encode())
    world.bucket.parts["theirs"] = {0: b"part"}
    world.bucket.parts["theirs too"] = {}
    return {name: world.bucket.objects[name][0] for name in names}


def check_strangers(world: World, theirs: Files) -> None:
    assert {name: world.bucket.objects[name][0] for name in theirs} == theirs
    assert {"theirs", "theirs too"} <= world.bucket.parts.keys()


def there(world: World) -> Files:
    return {n.removeprefix("out/"): world.bucket.objects[n][0] for n in world.bucket.names("out/")}


def records(world: World) -> list[bytes]:
    """What relayout has left below its hidden prefix."""
    names = [name for name in world.bucket.names(HIDDEN) if name not in (f"{HIDDEN}theirs", f"{HIDDEN}leases/x")]
    return [world.bucket.objects[name][0] for name in names]


def orphans(world: World) -> list[str]:
    """Uploads of nobody else's that no record names, so that nobody will ever abort them."""
    told = b"".join(records(world))
    return [name for name in world.bucket.parts if not name.startswith("theirs") and f'"{name}"'.encode() not in told]


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
    return world, Writer(world, "machine")


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


@pytest.mark.parametrize("older", ["nothing", "an older output"])
@pytest.mark.parametrize("way", WAYS)
def test_after_a_kill_at_any_request_the_same_command_goes_on(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], way: str, older: str
) -> None:
    def prepared(writer: Writer) -> None:
        writer.begin()
        if older != "nothing":
            convert(writer, plans[1][0])

    plan, expected = plans[2]
    requests = requests_of(make, WAYS[way], plan, prepared)
    assert len(requests) > 40
    num_orphans = num_unrecorded = 0
    first = 2 * list(WAYS).index(way) + ["nothing", "an older output"].index(older)
    for moment in range(1 + first % STEP, len(requests) + 1, STEP):
        world, writer = solo(make)
        theirs = strangers(world)
        prepared(writer)
        before = there(world)
        writer.begin(moment)
        with pytest.raises(Killed):
            WAYS[way](writer, plan, force=True)
        found = there(world)
        assert found in (before, expected) or "relayout.json" not in found, moment
        check_strangers(world, theirs)
        for _ in range(2):
            writer.begin()
            if there(world) == expected:
                break
            WAYS[way](writer, plan, force=True)
        assert there(world) == expected, moment
        check_strangers(world, theirs)
        num_orphans += len(orphans(world))
        num_unrecorded += moment > 1 and requests[moment - 2].operation == "begin"
    assert num_orphans == num_unrecorded, "only those of a process that ended between their beginning and their record"


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


OTHERS = ["the same", "other options", "replaces", "commits"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", OTHERS)
def test_a_second_writer_at_any_request_is_told_who_writes_and_changes_nothing(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], way: str, other: str
) -> None:
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
        second.pid = 76
        world.writers.remove(second)
        theirs = strangers(world)
        wholes = [expected, plans[1][1]]

        interrupt(first, moment, second, partial(come, second))
        first.begin()
        with suppress(PlanError, RequestError):
            WAYS[way](first, plan)
        assert there(world) in wholes, moment
        check_strangers(world, theirs)
        assert orphans(world) == []
    assert {"busy"} <= set(told) <= {"busy", "done", "exists", "missing"}
    assert told.count("busy") > len(told) / (4 if way == "units" else 2)


def killed_while_publishing(make: Make, plan: ConversionPlan) -> tuple[World, Writer]:
    """All is published but the manifest."""
    world, writer = solo(make)

    def kill(writer: Writer, request: Request) -> None:
        if (request.operation, request.name) == ("put", "out/relayout.json"):
            writer.killed_at = writer.num_requests

    world.watch = kill
    writer.begin()
    with pytest.raises(Killed):
        convert(writer, plan)
    world.watch = lambda writer, request: None
    writer.begin()
    return world, writer


@pytest.mark.parametrize(
    "name", ["config.json", "large.txt", "model-rank-1-part-0.safetensors", "relayout.json", "new"]
)
@pytest.mark.parametrize("force", [False, True])
def test_what_others_put_where_an_attempt_was_killed_while_publishing_is_not_replaced(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], name: str, force: bool
) -> None:
    plan, expected = plans[2]
    world, writer = killed_while_publishing(make, plan)
    theirs = bytes(len(expected.get(name, b"x")))
    world.bucket.write(f"out/{name}", theirs)
    before = dict(world.bucket.objects)
    with pytest.raises(PlanError, match="out: is not empty"):
        convert(writer, plan, force=force)
    assert world.bucket.objects == before
    del world.bucket.objects[f"out/{name}"]
    if name.startswith("model"):  # Ours was replaced by theirs: this is found out when it is to be published.
        with pytest.raises(RequestError, match="its upload no longer exists"):
            convert(writer, plan)
    convert(writer, plan)
    assert there(world) == expected
    assert not orphans(world)


def test_a_side_file_that_has_changed_replaces_the_one_that_a_killed_attempt_has_published(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]]
) -> None:
    plan, _ = plans[2]
    world, writer = killed_while_publishing(make, plan)
    for file in ("config.json", "large.txt"):
        path = plan.source.root.path(file)
        assert path is not None
        old = path.read_bytes()
        path.write_bytes(old[:-1] + b" }")
        try:
            convert(writer, plan)
            assert there(world)[file] == path.read_bytes()
        finally:
            path.write_bytes(old)
        world, writer = killed_while_publishing(make, plan)


def test_a_refused_command_changes_nothing(make: Make, plans: dict[int, tuple[ConversionPlan, Files]]) -> None:
    world, writer = killed_while_publishing(make, plans[2][0])
    theirs = strangers(world)
    before, uploads = dict(world.bucket.objects), dict(world.bucket.parts)
    with pytest.raises(PlanError, match="holds an interrupted attempt, with other options"):
        convert(writer, plans[1][0])
    with pytest.raises(PlanError, match="holds an interrupted conversion without units"):
        by_units(writer, plans[1][0])
    del before[f"{HIDDEN}lease"]  # Its holder is gone.
    assert (world.bucket.objects, world.bucket.parts) == (before, uploads)
    convert(writer, plans[1][0], force=True)
    assert there(world) == plans[1][1]
    check_strangers(world, theirs)


def harm_of(request: Request) -> str:
    """How a request may harm what somebody else has there: "" if it cannot."""
    if request.operation in ("delete", "abort"):
        return "deletes"
    return "publishes" if request.operation in ("put", "complete") and request.name.startswith("out/") else ""


class Halting(Writer):
    """Stands still after the answer to one request, while another writer does its work."""

    halts_at = NEVER
    other: Callable[[], None]

    def request(self, request: Request) -> Any:
        found = super().request(request)
        if self.num_requests == self.halts_at:
            self.other()
            self.world.current = self
        return found


def test_a_writer_that_stands_still_until_another_takes_over_deletes_and_publishes_nothing_more(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]]
) -> None:
    def prepared(writer: Writer) -> None:
        writer.begin()
        convert(writer, plans[1][0])

    harms = [harm_of(one) for one in requests_of(make, convert, plans[2][0], prepared)]
    assert set(harms) == {"", "deletes", "publishes"}
    for moment in [number for number, harm in enumerate(harms) if harm]:  # Just before the request that does harm.
        world = make()
        first, second = Halting(world, "machine"), Writer(world, "another machine")
        world.writers.remove(second)
        world.current = first
        prepared(first)
        before: Files = {}
        late: list[str] = []

        def take_over(
            world: World = world, second: Writer = second, before: Files = before, late: list[str] = late
        ) -> None:
            world.current = second
            second.begin()
            lease.Lease(second.store()._output(), "convert")._take()
            before.update(there(world))
            world.watch = lambda writer, request: late.append(harm_of(request))

        first.other, first.halts_at = take_over, moment
        first.begin()
        with suppress(PlanError):  # What it has to say is that it has lost its lease, unless all is published.
            convert(first, plans[2][0], force=True)
        assert late, "it goes on"
        assert set(late) == {""}, (moment, harms[moment], late)
        assert there(world) == before


def test_a_lease_is_taken_over_only_when_all_that_its_holder_asked_for_has_happened(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]]
) -> None:
    world, first = solo(make)
    first.begin(20)
    with pytest.raises(Killed):
        convert(first, plans[2][0])
    assert first.lease is not None
    confirmed = first.lease._confirmed
    second = Writer(world, "another machine")
    world.current = second
    world.writers[:] = [second]
    written: list[float] = []

    def watch(writer: Writer, request: Request) -> None:
        if not request.is_harmless:
            written.append(world.now)

    world.watch = watch
    second.begin()
    convert(second, plans[2][0])
    # It might have sent its last request so long after it was confirmed, again and again, and the last one may stall.
    assert written[0] - confirmed > lease.VALID_SECONDS + connect.RETRY_SECONDS + connect.STALL_SECONDS
    assert there(world) == plans[2][1]


@pytest.mark.parametrize("name", ["model-rank-0-part-0.safetensors", "relayout.json"])
def test_what_somebody_puts_in_the_place_of_a_file_that_is_to_be_replaced_stays(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], name: str
) -> None:
    world, writer = solo(make)
    writer.begin()
    convert(writer, plans[1][0])
    theirs = bytes(len(plans[1][1][name]))

    def watch(writer: Writer, request: Request) -> None:
        if (request.operation, request.name) == ("put", f"{HIDDEN}publishing"):  # What may go was proven before.
            world.bucket.write(f"out/{name}", theirs)

    world.watch = watch
    writer.begin()
    with pytest.raises(FileExistsError, match=f"out/{name}"):
        convert(writer, plans[2][0], force=True)
    assert there(world)[name] == theirs


def before_the_manifest(world: World, name: str, content: bytes | None) -> None:
    """Let another process replace or delete a published file just before the manifest is written."""

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
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], way: str, name: str, how: str
) -> None:
    plan, expected = plans[2]
    world, writer = solo(make)
    theirs = bytes(len(expected[name])) if how == "replaced" else None
    before_the_manifest(world, name, theirs)
    writer.begin()
    with pytest.raises(FileExistsError, match=f"replaced or deleted by another process.*out/{name}"):
        WAYS[way](writer, plan)
    assert "relayout.json" not in there(world)
    assert there(world).get(name) == theirs
    world.bucket.objects.pop(f"out/{name}", None)
    writer.begin()
    with suppress(RequestError):  # That an upload is gone.
        WAYS[way](writer, plan)
    if there(world) != expected:
        writer.begin()
        WAYS[way](writer, plan)
    assert there(world) == expected
    assert not orphans(world)


def test_an_attempt_that_fails_deletes_no_object_that_has_replaced_its_own(make: Make) -> None:
    world, writer = solo(make)
    before_the_manifest(world, "a", b"theirs")
    writer.begin()

    def write() -> None:
        with staged(writer.store()) as staging:
            for name in ("a", "b", MARKER):
                staging.put(name, [b"ours"])

    with pytest.raises(FileExistsError, match="out/a"):
        write()
    assert there(world) == {"a": b"theirs"}


def test_a_publication_reads_nothing_of_what_it_has_created(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]]
) -> None:
    world, writer = solo(make)
    read: list[str] = []
    world.watch = lambda writer, request: read.append(request.name) if request.operation == "get" else None
    writer.begin()
    convert(writer, plans[2][0])
    assert not [name for name in read if name.startswith("out/")]


@pytest.mark.parametrize("name", ["config.json", "model-rank-0-part-0.safetensors"])
def test_where_an_output_lacks_a_file_the_same_manifest_goes_before_and_comes_last(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], name: str
) -> None:
    plan, expected = plans[2]
    world, writer = solo(make)
    writer.begin()
    convert(writer, plan)
    del world.bucket.objects[f"out/{name}"]
    created: list[tuple[str, bool]] = []

    def watch(writer: Writer, request: Request) -> None:
        if harm_of(request) == "publishes":
            created.append((request.name, "out/relayout.json" in world.bucket.objects))

    world.watch = watch
    writer.begin()
    convert(writer, plan, force=True)
    assert (f"out/{name}", False) in created
    assert created[-1] == ("out/relayout.json", False)
    assert there(world) == expected


STRANGE = {
    "no JSON": b"theirs",
    "no UTF-8": b"\xff{}",
    "nested": b"[" * 100_000,
    "a list": b"[]",
    "null": b"null",
    "no mark": b"{}",
    "another kind": b'{"relayout": "Unheard"}',
    "a field too few": b'{"relayout": KIND}',
    "a field too many": b'{"relayout": KIND, "files": {}, "older": {}, "more": 1}',
    "null fields": None,
}


RECORDS = [
    "lease",
    "publishing",
    "uploads/x",
    "complete/x",
    "units/s/unit-0",
    "unit-uploads/s/x",
    "notes/relayout.journal/00000000",
]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "strange"),
    [(name, strange) for name in RECORDS for strange in ("another kind", "null fields")]
    + [("publishing", strange) for strange in STRANGE if strange not in ("another kind", "null fields")],
)
def test_what_has_the_name_of_a_record_and_is_none_is_an_error_that_names_it(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], name: str, strange: str, force: bool
) -> None:
    """Every record wherever it is read, and all that is none in the place of one."""
    kind = record_types.kind_of(name)
    assert kind is not None
    content = STRANGE[strange]
    if content is None:
        content = json.dumps({"relayout": kind.__name__} | dict.fromkeys(kind.__dataclass_fields__)).encode()
    content = content.replace(b"KIND", json.dumps(kind.__name__).encode())
    world, writer = killed_while_publishing(make, plans[2][0])
    world.bucket.write(f"{HIDDEN}{name}", content)
    before = dict(world.bucket.objects)
    uploads = dict(world.bucket.parts)
    with pytest.raises(RelayoutError) as caught:
        convert(writer, plans[2][0], force=force)
    if name.startswith("unit") and not force:
        assert "holds units" in str(caught.value)
    else:
        assert f"{HIDDEN}{name}: not a record of relayout" in str(caught.value)
        assert "delete this object" in str(caught.value)
    after = dict(world.bucket.objects)
    after.pop(f"{HIDDEN}lease", None)
    before.pop(f"{HIDDEN}lease", None)
    assert after == before
    assert world.bucket.parts == uploads


class Schedule:
    """Writers of one prefix, what they do, and what befalls them: all by chance, and the same for the same seed."""

    def __init__(self, make: Make, plans: dict[int, tuple[ConversionPlan, Files]], seed: int) -> None:
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
        self.seen: set[int] = set()
        """Degrees of the whole outputs that have been there."""
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
            machine = f"m{0 if random.random() < 0.4 else number + 1}"
            Writer(self.world, machine, self.work).pid = 1000 * (number + 1)
        self.stranger_at = int(random.integers(50, 400)) if random.random() < 0.3 else NEVER
        self.num_requests = 0
        self.world.watch, self.world.changed = self.watch, self.look

    def watch(self, writer: Writer, request: Request) -> None:
        """Somebody else writes a file of the output, at some moment, if there is none."""
        self.num_requests += 1
        name = f"out/{self.random.choice(['config.json', 'model-rank-0-part-0.safetensors', 'relayout.json', 'notes'])}"
        if self.num_requests >= self.stranger_at and name not in self.world.bucket.objects:
            self.stranger_at = NEVER
            self.disturbed[name] = b"theirs"
            self.world.bucket.write(name, b"theirs")

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
                assert tp in self.seen, "who says that it is done has made all of it"
                return
            writer.wait(float(random.uniform(0, 200)))

    def look(self) -> None:
        """Where there is a manifest, there is all that it names, at any moment."""
        if "out/relayout.json" in self.world.bucket.objects and "out/relayout.json" not in self.disturbed:
            found = {name: blob for name, blob in there(self.world).items() if f"out/{name}" not in self.disturbed}
            whole = [tp for tp, (_, files) in self.plans.items() if files == found]
            assert whole, f"a manifest, and not all that it names: {sorted(found)}"
            self.seen.update(whole)

    def check(self) -> str:
        """Let the world run; then say what was left, which is whole, or can be gone on with."""
        world = self.world
        world.run()
        check_strangers(world, self.theirs)
        for name, blob in self.disturbed.items():
            assert world.bucket.objects[name][0] == blob
            del world.bucket.objects[name]  # They take it away again.
        self.disturbed.clear()
        outcome = "whole" if "out/relayout.json" in world.bucket.objects else "none"
        self.look()
        world.chances, world.watch = Chances(), lambda writer, request: None
        again = Writer(world, "m9")
        world.writers[:] = [again]
        world.current = again
        tp = 2
        for force in (False, True, True, True):  # An error may say first that uploads are gone.
            again.begin()
            with suppress(PlanError, RequestError):
                convert(again, self.plans[tp][0], force=force)
                break
        assert there(world) == self.plans[tp][1], "and another conversion is possible"
        check_strangers(world, self.theirs)
        return outcome


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, 10))
def test_writers_of_one_prefix_leave_a_whole_output_or_one_to_go_on_with(
    make: Make, plans: dict[int, tuple[ConversionPlan, Files]], first: int
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
            print(seed, outcomes[-1], *schedule.told, len(orphans(schedule.world)))
    assert outcomes
