"""A cache on the drive: what a load keeps, what it fetches of it, and what is there when a process is killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import s3_server
from support.bits import flip
from support.loader_fixtures import MIB, assert_equal, child, loader_threads, whole_tensors
from support.patience import PATIENCE
from support.remote import HEAD, HEADER, URL, expect, files_of_rank
from support.s3_server import Answer, Request, Server

import relayout
from relayout.engines.rank_weights import EngineOptions, RankWeights
from relayout.errors import FormatError, PlanError
from relayout.storage.local import store as local_store

pytest.importorskip("obstore", reason="the client of object stores")

LOAD = """
import sys, relayout
relayout.load(sys.argv[1], int(sys.argv[2]), cache=sys.argv[3])
"""

TOGETHER = """
import json, os, sys, traceback
import relayout

processes = []
for rank in (0, 1, 1):
    processes.append(os.fork())
    if not processes[-1]:
        try:
            relayout.load(sys.argv[1], rank, cache=sys.argv[2])
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
print(json.dumps([os.waitpid(process, 0)[1] for process in processes]))
"""


def weights_asked(server: Server) -> Counter[tuple[str, tuple[int, int] | None]]:
    """How often each range of each weight file was asked for."""
    return Counter((one.key, one.range) for one in server.requests if one.key.endswith(".safetensors"))


def entries_of(cache: Path) -> list[Path]:
    return list((cache / "relayout-cache-v1").glob("[0-9a-f]" * 32))


def entry_of(cache: Path) -> Path:
    [entry] = entries_of(cache)
    return entry


def kept(cache: Path) -> set[str]:
    """Names of the files that others see."""
    return {one.name for one in entry_of(cache).iterdir() if not one.name.startswith(".")}


def test_what_was_fetched_is_kept_and_loaded_from_the_drive(server: Server, converted: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expect(relayout.load(URL, 1, cache=cache), converted)
    small = {"relayout.json", "relayout.rank-1.json.zst", "relayout.chunks", "relayout.digests"}
    names = {*small, *files_of_rank(converted, 1)}
    assert kept(cache) == names
    for name in names:
        assert (entry_of(cache) / name).read_bytes() == (converted / name).read_bytes()
    assert server.sent_nbytes <= sum((converted / name).stat().st_size for name in names) * 1.01 + 2**16
    server.requests.clear()
    expect(relayout.load(URL, 1, cache=cache, verify=True, backend="direct"), converted)
    expect(dict(relayout.iter_load(URL, 1, cache=cache)), converted)
    with relayout.open(URL, 1, cache=cache) as opened:
        assert opened.path == URL
        expect({name: opened.get_tensor(name) for name in opened.offset_keys()}, converted)
    assert {one.key for one in server.requests} == {"out/relayout.json"}, "which tells whether it is still the same"
    expect(relayout.load(entry_of(cache), 1), converted)


def test_ranks_and_degrees_share_an_entry(server: Server, converted: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        expect(relayout.load(URL, rank, cache=tmp_path), converted, rank)
    assert max(weights_asked(server).values()) == 1, "nothing is fetched twice"
    server.requests.clear()
    other = tmp_path / "other"
    assert_equal(relayout.load(URL, 0, tp=4, cache=other), relayout.load(converted, 0, tp=4))
    assert {name for name in kept(other) if name.startswith("model-rank")} <= set(files_of_rank(converted, 0))
    server.requests.clear()
    assert_equal(relayout.load(URL, 2, tp=4, cache=tmp_path, verify=True), relayout.load(converted, 2, tp=4))
    assert not any(one.key.endswith(".safetensors") for one in server.requests)
    server.requests.clear()
    assert_equal(relayout.load(URL, 3, tp=4, cache=tmp_path), relayout.load(converted, 3, tp=4))
    assert [one.key for one in server.requests if one.status == 200] == ["out/relayout.json"]


def test_the_environment_says_where_and_how_much(
    server: Server, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RELAYOUT_CACHE_LIMIT", "1KB")
    with pytest.warns(UserWarning, match=f"{URL}: the cache {tmp_path}/cache has no room for it: reading from the"):
        expect(relayout.load(URL, 1), converted)
    monkeypatch.setenv("RELAYOUT_CACHE_LIMIT", "")
    expect(relayout.load(URL, 1), converted)
    assert set(files_of_rank(converted, 1)) <= kept(tmp_path / "cache")
    expect(relayout.load(converted, 1), converted)
    monkeypatch.setenv("RELAYOUT_CACHE_LIMIT", "1KB")
    with pytest.warns(UserWarning, match=r"s3://models/model: read as it is; it is not kept in the cache .*no room"):
        relayout.load("s3://models/model", 1, tp=2)
    with pytest.raises(PlanError, match="'much' is not a size"):
        relayout.load(URL, 0, cache=relayout.Cache(tmp_path / "cache", "much"))


def test_what_was_not_used_for_longest_makes_room(server: Server, converted: Path, model: Path, tmp_path: Path) -> None:
    urls = [f"s3://models/out{number}" for number in range(3)]
    for number in range(3):
        out = tmp_path / f"out{number}" if number else converted
        if number:
            relayout.convert(model, out, tp=2, max_part_nbytes=MIB + 4096 * number)
        for file in out.iterdir():
            server.put("models", f"out{number}/{file.name}", file.read_bytes())
    tmp_path = tmp_path / "cache"
    entries = []
    for url in urls[:2]:
        relayout.load(url, 1, cache=tmp_path)
        entries += [one for one in entries_of(tmp_path) if one not in entries]
    room = sum(file.stat().st_size for one in entries for file in one.iterdir())
    cache = relayout.Cache(tmp_path, room + 1000)
    time.sleep(0.02)
    relayout.load(urls[0], 1, cache=cache)
    left = tmp_path / "relayout-cache-v1" / ".gone-0123456789abcdef"
    left.mkdir()
    expect(relayout.load(urls[2], 1, cache=cache), converted)
    assert entries[0].exists()
    assert not entries[1].exists(), "it was used first and not since"
    assert not left.exists()
    with relayout.open(urls[0], 1, cache=cache), relayout.open(urls[2], 1, cache=cache):
        with pytest.warns(UserWarning, match="has no room for it"):
            expect(relayout.load(urls[1], 1, cache=cache), converted)
        assert entries[0].exists(), "what is in use is not removed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect(relayout.load(urls[1], 1, cache=cache), converted)
    assert len(entries_of(tmp_path)) == 2


def test_processes_that_start_together_fetch_nothing_twice(server: Server, converted: Path, tmp_path: Path) -> None:
    server.interfere = lambda request: time.sleep(0.01)  # type: ignore[func-returns-value]
    assert child(TOGETHER, URL, tmp_path) == [0, 0, 0]
    assert max(weights_asked(server).values()) <= 3, "a file is opened by each"
    bodies = {key: number for key, number in weights_asked(server).items() if key[1] and key[1][0] > 0}
    assert bodies
    assert set(bodies.values()) == {1}
    for rank in (0, 1):
        expect(relayout.load(entry_of(tmp_path), rank, verify=True), converted, rank)


@pytest.mark.parametrize("number", [4, 9])
def test_a_process_is_killed_while_it_fetches(server: Server, converted: Path, tmp_path: Path, number: int) -> None:
    reached = threading.Event()
    count = 0

    def hold(request: Request) -> None:
        nonlocal count
        count += 1
        if count >= number:
            reached.set()
            time.sleep(0.2)

    server.interfere = hold
    environment = {**os.environ, **s3_server.environment(server)}
    process = subprocess.Popen([sys.executable, "-c", LOAD, URL, "1", str(tmp_path)], env=environment)
    assert reached.wait(PATIENCE)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.interfere = lambda request: None
    if entries_of(tmp_path):
        for name in kept(tmp_path):
            assert (entry_of(tmp_path) / name).read_bytes() == (converted / name).read_bytes()
    expect(relayout.load(URL, 1, cache=tmp_path), converted)
    assert not [one for one in entry_of(tmp_path).iterdir() if one.name.endswith(".partial")]


@pytest.mark.parametrize(
    ("position", "says", "code"),
    [
        (-3, "bytes [0-9]+ to [0-9]+ do not match digest", "digest"),
        (40, "tensors_digest in its header differs from", "owner"),
    ],
)
def test_damage_on_the_way_is_never_kept(
    server: Server, converted: Path, tmp_path: Path, position: int, says: str, code: str
) -> None:
    name = max(files_of_rank(converted, 1))
    right = server.objects["models", f"out/{name}"].content
    wrong = bytearray(right)
    wrong[position] ^= 1
    server.put("models", f"out/{name}", bytes(wrong))
    with pytest.raises(FormatError, match=f"{URL}/{name}: {says}") as caught:
        relayout.load(URL, 1, cache=tmp_path)
    assert caught.value.code == code
    assert name not in kept(tmp_path)
    assert loader_threads() == []
    server.put("models", f"out/{name}", right)
    expect(relayout.load(URL, 1, cache=tmp_path), converted)


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer", "of another file", "a link", "a FIFO"])
@pytest.mark.parametrize("name", ["relayout.json", "relayout.rank-1.json.zst", "relayout.chunks", "weights"])
def test_what_is_damaged_is_fetched_again_and_nothing_else(
    server: Server, converted: Path, tmp_path: Path, name: str, damage: str
) -> None:
    relayout.load(URL, 1, cache=tmp_path)
    name = min(files_of_rank(converted, 1)) if name == "weights" else name
    path = entry_of(tmp_path) / name
    nbytes = path.stat().st_size
    if damage in ("gone", "a link", "a FIFO"):
        path.unlink()
    if damage == "a link":
        path.symlink_to(converted / "relayout.json")
    elif damage == "a FIFO":
        os.mkfifo(path)
    elif damage == "shorter":
        os.truncate(path, nbytes // 2)
    elif damage == "longer":
        os.truncate(path, nbytes + 1)
    elif damage == "of another file":
        path.write_bytes(bytes(nbytes))
    server.requests.clear()
    expect(relayout.load(URL, 1, cache=tmp_path), converted)
    assert {one.key for one in server.requests} <= {"out/relayout.json", f"out/{name}"}
    if name != "relayout.chunks":  # It is needed for what is fetched, or verified; then its digests are compared.
        assert path.read_bytes() == (converted / name).read_bytes()


def test_what_a_load_has_found_damaged_is_fetched_again_at_once(
    server: Server, converted: Path, tmp_path: Path
) -> None:
    expect(relayout.load(URL, 1, cache=tmp_path), converted)

    def in_an_engine(path: str, rank: int, *, cache: Path, verify: bool) -> object:
        return list(RankWeights(path, rank, 2, EngineOptions(cache=str(cache), verify=verify)).deliver())

    for load in (relayout.load, lambda *given, **options: list(relayout.iter_load(*given, **options)), in_an_engine):
        path = entry_of(tmp_path) / max(files_of_rank(converted, 1))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        if load is relayout.load:
            with pytest.warns(UserWarning, match=r"digest.*`relayout cache list` lists them\): loading again"):
                expect(load(URL, 1, cache=tmp_path, verify=True), converted)
        else:
            with pytest.raises(FormatError, match=r"digest.*the next load makes this entry of the cache again"):
                load(URL, 1, cache=tmp_path, verify=True)
            expect(relayout.load(URL, 1, cache=tmp_path, verify=True), converted)


def test_damage_below_deltas_is_fetched_again_and_that_of_a_delta_is_not_the_base_s(
    server: Server, converted: Path, model: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    flip(source / "model.safetensors", -1)
    relayout.convert(source, tmp_path / "new", tp=2, max_part_nbytes=MIB)
    relayout.delta(converted, tmp_path / "new", delta := tmp_path / "delta")
    cache = tmp_path / "cache"

    def load() -> dict[str, torch.Tensor]:
        return relayout.load(URL, 1, cache=cache, deltas=delta)

    expect(load(), tmp_path / "new")
    flip(entry_of(cache) / max(files_of_rank(converted, 1)), -1)
    with pytest.warns(UserWarning, match="digest.*: loading again"):
        expect(load(), tmp_path / "new")
    server.requests.clear()
    flip(max(delta.glob("*rank-1*"), key=lambda file: file.stat().st_size), 0)
    with pytest.raises(FormatError, match=f"{delta}/.* does not match"):
        load()
    assert not weights_asked(server)
    assert not (entry_of(cache) / ".doubted").exists()


def test_a_cache_that_cannot_be_used_is_said_and_the_store_is_read(
    server: Server, converted: Path, tmp_path: Path
) -> None:
    own = tmp_path / "relayout-cache-v1"
    relayout.load(URL, 1, cache=tmp_path)
    own.chmod(0o777)
    with pytest.warns(UserWarning, match="cannot be used: .*other users may write to it.*`relayout cache .*` lists"):
        expect(relayout.load(URL, 1, cache=tmp_path), converted)
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot be used: .*(File exists|Not a directory)"):
        expect(relayout.load(URL, 1, cache=tmp_path / "file"), converted)


def test_a_fetch_that_fails_leaves_complete_files_only(server: Server, converted: Path, tmp_path: Path) -> None:
    first, *_, last = sorted(files_of_rank(converted, 1))

    def refuse(request: Request) -> Answer | None:
        return Answer(403) if request.key == f"out/{last}" and request.range != (0, HEAD) else None

    server.interfere = refuse
    with pytest.raises(OSError, match="access denied"):
        relayout.load(URL, 1, cache=tmp_path)
    names = kept(tmp_path)
    assert first in names
    assert last not in names
    assert not [one for one in entry_of(tmp_path).iterdir() if one.name.endswith(".partial")]


def test_another_conversion_at_the_same_url_has_its_own_entry(
    server: Server, converted: Path, model: Path, tmp_path: Path
) -> None:
    relayout.load(URL, 0, cache=tmp_path / "cache")
    relayout.convert(model, tmp_path / "again", tp=4)
    for file in (tmp_path / "again").iterdir():
        server.put("models", f"out/{file.name}", file.read_bytes())
    found = relayout.load(URL, 3, cache=tmp_path / "cache")
    assert_equal(found, whole_tensors(tmp_path / "again", "model-rank-3-*"))
    assert len(entries_of(tmp_path / "cache")) == 2


CHANGED = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def tuned(server: Server, model: Path, tmp_path: Path) -> Path:
    """The model with another tensor, converted alike; on the server, too."""
    plain = Path(shutil.copytree(model, tmp_path / "plain"))
    tensors = load_file(plain / "model.safetensors")
    tensors[CHANGED] = -tensors[CHANGED]
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    relayout.convert(plain, tmp_path / "tuned", tp=2, max_part_nbytes=MIB)
    for file in (tmp_path / "tuned").iterdir():
        server.put("models", f"tuned/{file.name}", file.read_bytes())
    return tmp_path / "tuned"


def test_what_another_version_in_the_cache_has_is_not_fetched(
    server: Server, converted: Path, tuned: Path, tmp_path: Path
) -> None:
    cache, url = tmp_path / "cache", "s3://models/tuned"
    relayout.load(URL, 1, cache=cache)
    before = {path: path.read_bytes() for path in entry_of(cache).iterdir() if path.is_file()}
    server.requests.clear()
    expect(relayout.load(url, 1, cache=cache, verify=True), tuned)
    sizes, changed = files_of_rank(tuned, 1), whole_tensors(tuned, "model-rank-1-*")[CHANGED]
    fetched = sum(one.sent_nbytes for one in server.requests if one.key.endswith(".safetensors"))
    assert changed.nbytes < fetched <= changed.nbytes + (HEADER + 2**16) * len(sizes) < sum(sizes.values()) // 3
    assert {path: path.read_bytes() for path in before} == before
    [new] = set(entries_of(cache)) - {path.parent for path in before}
    assert all((new / name).read_bytes() == (tuned / name).read_bytes() for name in sizes)


@pytest.mark.parametrize("fault", ["damaged", "replaced", "removed", "index"])
def test_of_another_version_that_is_not_what_it_was_no_wrong_byte_is_kept(
    server: Server, converted: Path, tuned: Path, tmp_path: Path, fault: str
) -> None:
    cache = tmp_path / "cache"
    relayout.load(URL, 1, cache=cache)
    for name in files_of_rank(converted, 1):
        path = entry_of(cache) / name
        if fault == "damaged":
            path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))
        elif fault == "index":
            (entry_of(cache) / "relayout.digests").write_bytes(b"theirs")
        else:
            path.unlink()
            if fault == "replaced":
                path.symlink_to(tuned / name)
    expect(relayout.load("s3://models/tuned", 1, cache=cache, verify=True), tuned)
    new = max(entries_of(cache), key=lambda entry: (entry / "relayout.json").read_bytes() == _manifest(tuned))
    assert all((new / name).read_bytes() == (tuned / name).read_bytes() for name in files_of_rank(tuned, 1))


def _manifest(folder: Path) -> bytes:
    return (folder / "relayout.json").read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("what", ["a file", "the note of a reservation"])
def test_a_drive_that_is_full_while_it_is_filled_is_no_room_and_no_failure(
    server: Server, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """Also where the error names no file."""

    def full(fd: int, nbytes: int | bytes) -> int:
        if isinstance(nbytes, bytes) or nbytes > 2**16:
            raise OSError(number, os.strerror(number))
        return 0

    place, name = (local_store, "allocate") if what == "a file" else (os, "write")
    monkeypatch.setattr(place, name, full)
    with pytest.warns(UserWarning, match="has no room for it: reading from the store"):
        expect(relayout.load(URL, 1, cache=tmp_path), converted)
    assert not kept(tmp_path) & set(files_of_rank(converted, 1))


def test_fetching_is_reported(server: Server, converted: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tensors = relayout.load(URL, 1, cache=tmp_path, progress=lambda done, total: told.append((done, total)))
    fetched = sum(files_of_rank(converted, 1).values())
    assert (fetched, fetched) in told
    total = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors.values()}.values())
    assert told[-1][0] == told[-1][1] <= total
