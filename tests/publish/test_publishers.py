"""Outputs are deleted by what their records name, and small files replaced by what they are, in whatever store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.mounts import mounted_tmpfs
from support.store_contract import MARKER, OLDER, SOME, WRITABLE, Ground, content, ground, staged

from relayout.errors import PlanError
from relayout.publish.claim import CLAIM, Prefix, claim_prefix
from relayout.publish.publishers import publisher_of
from relayout.storage.cloud.store import CloudStore, WritableClient
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Kind, Store


@pytest.fixture(params=WRITABLE)
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with ground(request.param, tmp_path, monkeypatch) as found:
        yield found


def make(store: Store) -> None:
    """An output of three files."""
    with staged(store) as output:
        output.put("small", [b"small"])
        output.put("first", [b"first"])
        output.put(MARKER, [b"ours\nsmall\nfirst"])


def files(folder: Path) -> dict[str, bytes]:
    """All that is below a folder, but for empty folders."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prefix_of(store: Store) -> Prefix:
    if not isinstance(store, CloudStore):
        pytest.skip("a local folder has no claim")
    assert isinstance(store.client, WritableClient)
    return Prefix(store.client, store.prefix, store)


def test_an_output_is_deleted_and_nothing_beside_it(there: Ground) -> None:
    store, beside = there.store("out"), there.store("out2")
    make(store)
    there.write(beside, small=b"theirs")
    publisher_of(store).remove(OLDER)
    assert store.kind() is Kind.NOTHING
    assert content(beside, "small") == b"theirs"
    publisher_of(store).remove(OLDER)
    make(store)
    assert content(store, "small") == b"small"


@pytest.mark.parametrize("what", ["no output", "a file more"])
def test_what_records_do_not_name_stays(there: Ground, what: str) -> None:
    store = there.store("out")
    if what == "a file more":
        make(store)
    there.write(store, theirs=b"theirs")
    with pytest.raises(PlanError, match="theirs"):
        publisher_of(store).remove(OLDER)
    assert content(store, "theirs") == b"theirs"
    assert what == "no output" or content(store, "first") == b"first"


def test_an_output_beside_which_a_claim_was_given_up_is_deleted(there: Ground) -> None:
    """In place of such a claim stays an object that says that there is none."""
    store = there.store("out")
    prefix = prefix_of(store)
    make(store)
    _, made = claim_prefix(prefix, OLDER, SOME, force=True)
    assert made is not None
    made.give_up(prefix)
    assert CLAIM in prefix.objects()
    publisher_of(store).remove(OLDER)
    assert prefix.objects() == {}


@pytest.mark.parametrize("how", ["link to an output", "link to nothing", "file", "mount point"])
def test_what_is_no_folder_of_its_own_stays_and_what_it_leads_to(tmp_path: Path, how: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "place").mkdir()
    other, out = tmp_path / "other/output", tmp_path / "place/out"
    make(LocalStore(other))

    def check() -> None:
        before = files(tmp_path)
        with pytest.raises(PlanError, match=r"out: (exists and is not a folder|is a mount point)"):
            publisher_of(LocalStore(out)).remove(OLDER)
        assert files(tmp_path) == before
        assert list((tmp_path / "place").iterdir()) == [out]

    if how == "mount point":
        with mounted_tmpfs(out, "1m"):
            (out / MARKER).write_bytes(b"ours\nsmall")
            (out / "small").write_bytes(b"small")
            check()
        return
    if how == "file":
        out.write_bytes(b"theirs")
    else:
        out.symlink_to(other if how == "link to an output" else tmp_path / "nothing")
    check()


class Killed(BaseException):
    """The process ends at this call: it changes nothing any more."""


def kill_at(patch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """From a call on that would change something on the drive, none does. Returns the calls, which are noted."""
    calls: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **options: Any) -> Any:
            if name != "open" or given[1] & os.O_CREAT:
                calls.append(name)
                if len(calls) > moment:
                    raise Killed
            return call(*given, **options)

        return called

    for name in ("open", "rename", "mkdir", "rmdir", "unlink", "write", "ftruncate", "fchmod"):
        patch.setattr(os, name, counted(name, getattr(os, name)))
    return calls


def test_a_deletion_that_is_killed_at_any_moment_is_ended_by_the_next(tmp_path: Path) -> None:
    moment = 0
    while True:
        place = tmp_path / str(moment)
        place.mkdir()
        store = LocalStore(place / "out")
        make(store)
        (place / "theirs").write_bytes(b"theirs")
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, moment)
            with suppress(Killed):
                publisher_of(store).remove(OLDER)
        if len(calls) <= moment:
            break
        publisher_of(store).remove(OLDER)
        assert files(place) == {"theirs": b"theirs"}, (moment, calls)
        assert [path.name for path in place.iterdir()] == ["theirs"], (moment, calls)
        moment += 1
    assert {"rename", "unlink", "rmdir"} <= set(calls)


def test_a_small_file_is_replaced_if_it_is_what_was_expected(there: Ground) -> None:
    store = there.store("root")
    if isinstance(store, LocalStore):
        store.folder.mkdir()
    publisher_of(store).replace("small", None, b"1")
    with pytest.raises(FileExistsError):
        publisher_of(store).replace("small", None, b"2")
    publisher_of(store).replace("small", b"1", b"22")
    with pytest.raises(FileExistsError):
        publisher_of(store).replace("small", b"1", b"3")
    with pytest.raises(FileExistsError):
        publisher_of(store).replace("missing", b"1", b"3")
    assert content(store, "small") == b"22"
    assert store.stat("missing") is None


def test_of_many_that_replace_the_same_content_one_succeeds(there: Ground) -> None:
    store = there.store("root")
    if isinstance(store, LocalStore):
        store.folder.mkdir()
    publisher_of(store).replace("small", None, b"before")

    def try_it(number: int) -> bool:
        try:
            publisher_of(store).replace("small", b"before", b"of %d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(try_it, range(6)))
    assert sum(done) == 1
    assert content(store, "small") == b"of %d" % done.index(True)
