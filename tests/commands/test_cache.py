"""`relayout cache`: what it lists, what it removes, and what it never touches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import relayout
from relayout.cache.conversions import cached_conversion
from relayout.cache.folder import Cache
from relayout.cli.app import app
from relayout.commands.cache import add, cache
from relayout.errors import PlanError
from relayout.storage.stores import find_input


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A cache with conversions for 2 and for 4 ranks."""
    for tp in (2, 4):
        relayout.load(llama, 0, tp=tp, cache=tmp_path / "cache")
    return tmp_path / "cache"


def test_entries_are_listed_with_source_degree_size_and_use(folder: Path, llama: Path) -> None:
    listing = cache(folder)
    assert [(entry.source, entry.num_ranks, entry.is_in_use) for entry in listing.entries] == [
        (str(llama), 2, False),
        (str(llama), 4, False),
    ]
    for entry in listing.entries:
        files = (folder / "relayout-cache-v1" / entry.name).rglob("*")
        assert entry.nbytes == sum(file.stat().st_size for file in files if file.is_file())
    assert listing.nbytes == sum(entry.nbytes for entry in listing.entries)


def test_one_entryis_removed_by_how_its_name_begins_and_all_by_clear(folder: Path) -> None:
    first, second = cache(folder).entries
    listing = cache(folder, remove=[first.name[:8]])
    assert [entry.name for entry in listing.entries] == [second.name]
    assert listing.removed_nbytes == first.nbytes
    assert cache(folder, clear=True).entries == ()
    assert not list(folder.rglob("*.safetensors"))


def test_an_entryin_use_and_the_files_of_others_stay(folder: Path, llama: Path) -> None:
    own = folder / "relayout-cache-v1"
    theirs = [own / ("f" * 32) / "weights", own / "notes.txt", folder / "models" / "weights"]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    used = cached_conversion(find_input(llama), 4, Cache(folder))
    listing = cache(folder, clear=True)
    assert [(entry.num_ranks, entry.is_in_use) for entry in listing.entries] == [(4, True)]
    assert listing.in_use == (listing.entries[0].name,)
    assert all(path.read_text() == "theirs" for path in theirs)
    with pytest.raises(PlanError, match=r"has no entry 'ffff'"):
        cache(folder, remove=["ffff"])
    del used
    assert cache(folder, clear=True).entries == ()
    assert all(path.read_text() == "theirs" for path in theirs)


def test_what_cannot_be_listed_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAYOUT_CACHE", raising=False)
    (tmp_path / "file").touch()
    for given, message in ((None, "no cache: give its folder"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(PlanError, match=message):
            cache(given)
    for start in ("", "zz"):
        with pytest.raises(PlanError, match=f"has no entry '{start}'"):
            cache(folder, remove=[start])
    monkeypatch.setenv("RELAYOUT_CACHE", str(folder))
    assert len(cache().entries) == 2


def test_a_beginning_that_several_entries_have_removes_none(tmp_path: Path) -> None:
    for name in ("ab" * 16, "ac" * 16):
        Cache(tmp_path).hold(name).close()
    with pytest.raises(PlanError, match="2 entries begin with 'a'"):
        cache(tmp_path, remove=["a"])
    assert len(cache(tmp_path, remove=["ab"]).entries) == 1


def test_what_is_added_keeps_the_limit_that_is_given(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the cache has no room"):
        add(llama, 2, tmp_path, limit="1KB")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert len(add(llama, 2, tmp_path, limit="1GB").entries) == 1


def test_the_command_prints_a_table_or_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = CliRunner().invoke(app, ["cache", "list", "--folder", str(folder)]).output
    assert shown.startswith(f"{folder}: 2 checkpoints, ")
    assert [line.split()[-5] for line in shown.splitlines()[-2:]] == ["2", "4"]
    found = json.loads(CliRunner().invoke(app, ["cache", "clear", "--folder", str(folder), "--json"]).output)
    assert found["entries"] == []
    assert found["removed_nbytes"] > 0


@pytest.mark.parametrize("name", ["none", "of another"])
def test_a_cache_that_no_start_has_made_yet_is_said_not_to_exist(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "of another").mkdir()
    for command in ("list", "clear"):
        done = CliRunner().invoke(app, ["cache", command, "--folder", str(tmp_path / name)])
        says = f"{tmp_path / name}: does not exist; relayout cache add creates it\n"
        assert (done.exit_code, done.stdout) == (0, says)
    listing = cache(tmp_path / name)
    assert (listing.exists, listing.entries, listing.nbytes) == (False, (), 0)
    assert [path.name for path in tmp_path.rglob("*")] == ["of another"]


def test_what_had_to_make_room_is_named_with_its_bytes(folder: Path, llama: Path, tmp_path: Path) -> None:
    first, second = cache(folder).entries
    shutil.copytree(llama, tmp_path / "other")
    command = ["cache", "add", str(tmp_path / "other"), "--tp", "2", "--folder", str(folder)]
    limit = str(first.nbytes + second.nbytes + first.nbytes // 2)
    done = CliRunner().invoke(app, [*command, "--limit", limit, "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert [(entry["name"], entry["nbytes"]) for entry in found["removed"]] == [(first.name, first.nbytes)]
    assert found["removed_nbytes"] == first.nbytes
    assert [entry["is_in_use"] for entry in found["entries"]] == [False, False]
    done = CliRunner().invoke(app, ["cache", "remove", second.name, "--folder", str(folder)])
    assert f"\nremoved {second.name[:12]}: {llama}, " in done.stdout
    done = CliRunner().invoke(app, [*command, "--limit", limit])
    assert "removed" not in done.stdout, "it was there"


def test_what_made_room_in_vain_is_named_too(
    folder: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [entry.name for entry in cache(folder).entries]
    shutil.copytree(llama, tmp_path / "other")
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(OSError, match="the cache has no room") as caught:
        add(tmp_path / "other", 2, folder)
    assert [note.split(" to make room")[0] for note in caught.value.__notes__] == [
        f"the cache removed {name}" for name in names
    ]


def test_a_limit_that_is_no_size_is_named_as_it_was_given(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYOUT_CACHE_LIMIT", "abc")
    with pytest.raises(PlanError, match=r"^RELAYOUT_CACHE_LIMIT: 'abc' is not a size"):
        add(llama, 2, tmp_path)
    with pytest.raises(PlanError, match=r"^limit: 'much' is not a size"):
        add(llama, 2, tmp_path, limit="much")
    assert not list(tmp_path.iterdir())
    assert len(add(llama, 2, tmp_path, limit="1GB").entries) == 1
