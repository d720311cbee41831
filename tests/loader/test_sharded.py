"""`load(into=...)` without a rank: each process has the shards that PyTorch cuts, and together all read a byte once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import prestarted, s3_server
from support.group_worker import NUM_MEMBERS, seen_by_members
from support.loader_fixtures import mlp_model, skip_unless_drives_are_counted
from support.remote import HEADER
from support.sharded_worker import SOURCES, meshes, module_of, same_bits
from support.signing import make_keys

import relayout
from relayout.core.slices import NOT_HELD, Slice
from relayout.errors import PlanError
from relayout.loader.sharded import _backend_beside, _PartsMessage

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.sharded_worker import main; main()"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`wide`, of 1.5 MB, and its conversions; `foreign`, of other values; `big`, of 17 MB, and its conversion."""
    place = tmp_path_factory.mktemp("group")
    for name, width, seed in (("wide", 768, 0), ("foreign", 768, 1), ("big", 6144, 0)):
        mlp_model(place / name, num_layers=2, width=width, seed=seed)
    relayout.convert(place / "wide", place / "out", tp=2)
    relayout.convert(place / "wide", place / "whole", tp=2, layout="whole")
    relayout.convert(place / "wide", place / "signed", tp=2)
    relayout.sign(place / "signed", key=make_keys(place).key)
    relayout.convert(place / "foreign", place / "foreign-out", tp=2)
    relayout.delta(place / "foreign-out", place / "out", place / "delta")
    relayout.convert(place / "big", place / "big-out", tp=4)
    return place


@pytest.fixture(scope="module")
def group(place: Path) -> list[dict[str, Any]]:
    """What each member of a group saw in each case."""
    return seen_by_members(place, SCRIPT)


FILLED = (
    *(f"{mesh}, {source}" for mesh in meshes() for source in (*SOURCES, "alone", "alone, plain")),
    *(
        "verified",
        "signed",
        "progress",
        "direct",
        "strided",
        "strided, alone",
        "strided on one",
        "wider",
        "wider, alone",
    ),
    *(
        "first",
        "plain tensors among them",
        "tied",
        "stages",
        "some",
        "afterwards",
        "a group without gloo",
        "a group without gloo again",
        "several machines, wide",
        "several machines, out",
        "deltas",
    ),
)


@pytest.mark.parametrize("case", FILLED)
def test_each_process_has_the_shards_that_torch_cuts(group: list[dict[str, Any]], case: str) -> None:
    assert [{key: member[case].get(key) for key in ("different", "error")} for member in group] == [
        {"different": [], "error": None}
    ] * NUM_MEMBERS


@pytest.mark.parametrize("mesh", meshes())
def test_a_store_sends_each_byte_once(place: Path, group: list[dict[str, Any]], mesh: str) -> None:
    nbytes = sum(tensor.nbytes for tensor in load_file(place / "wide" / "model.safetensors").values())
    plain, converted = (sum(member[f"{mesh}, {source}"]["nbytes"] for member in group) for source in SOURCES[:2])
    # Each member reads the beginning of each file, which has the header, and small files.
    [weights] = (place / "wide").glob("*.safetensors")
    beginnings = NUM_MEMBERS * (HEADER + sum(file.stat().st_size for file in (place / "wide").glob("*.json")))
    assert nbytes - HEADER <= plain - beginnings <= weights.stat().st_size
    small = sum(file.stat().st_size for file in (place / "out").iterdir() if file.suffix != ".safetensors")
    assert converted - nbytes <= NUM_MEMBERS * (2 * HEADER + small)


@pytest.mark.parametrize("kind", ["big", "big-out"])
def test_a_drive_reads_each_byte_once(place: Path, group: list[dict[str, Any]], kind: str) -> None:
    case = f"cold, {kind}"
    assert [member[case]["different"] for member in group] == [[]] * NUM_MEMBERS
    read = sum(member[case]["drive"] for member in group)
    skip_unless_drives_are_counted(read)
    nbytes = sum(file.stat().st_size for file in (place / kind).glob("*.safetensors"))
    assert 0.9 * nbytes <= read <= 1.25 * nbytes  # Without an exchange it is twice or more.


@pytest.mark.parametrize("kind", ["big", "big-out"])
def test_a_bucket_sends_each_byte_once(place: Path, kind: str) -> None:
    pytest.importorskip("obstore", reason="the client of object stores")
    nbytes = sum(tensor.nbytes for tensor in load_file(place / "big" / "model.safetensors").values())
    with s3_server.running() as server:
        for file in (place / kind).iterdir():
            server.put("models", f"{kind}/{file.name}", file.read_bytes())
        variables = {**prestarted.ONE_THREAD, **s3_server.environment(server)}
        script = "from support.sharded_worker import from_bucket; from_bucket()"
        (place / "rendezvous").unlink(missing_ok=True)
        done = prestarted.run(*(place, f"s3://models/{kind}"), script=script, imports=prestarted.GROUP, env=variables)
        assert done.returncode == 0, done.stderr
        found = [json.loads((place / f"of-bucket-{number}.json").read_text()) for number in range(NUM_MEMBERS)]
        assert found == [[]] * NUM_MEMBERS
        assert nbytes <= server.sent_nbytes <= 1.06 * nbytes


def test_progress_is_told_of_what_the_process_holds(group: list[dict[str, Any]]) -> None:
    for member in group:
        told, total = member["progress"]["told"], member["progress"]["told"][-1][1]
        assert told[-1] == [total, total]
        assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("partial", "input_layernorm.weight': a DTensor with partial sums"),
        ("lacking", "the checkpoint has no 'model.layers.0.mlp.gate_prog.weight'; did you mean"),
        ("fused", "the checkpoint has no 'model.layers.0.mlp.experts.gate_up_proj'; of a model of transformers, give"),
        ("beside", "the checkpoint has 'model.layers.0.input_layernorm.weight', which the model lacks"),
        ("shape", "into has shape [100], the checkpoint [101]"),
        ("shape of one", "into has shape [100], the checkpoint [101]"),
        ("narrower", "is torch.float16 [65, 768], expected torch.float32 [65, 768]"),
        ("meta", "call model.to_empty(device=...), and init_weights()"),
        ("FSDP1", "state_dict() has a copy, and not the memory of the model"),
        ("not tensors", "a int, expected a tensor"),
        ("nothing to fill", "into is a int, expected tensors by name, or a torch.nn.Module"),
        ("overlapping", "share memory"),
        ("other values for tied ones", "another tensor in the same memory, the checkpoint other values for it"),
        ("another checkpoint", "all members of a group must load the same"),
        ("other names", "all members of a group must load the same"),
        ("another backend", "with backend='direct'"),
        ("trusted by one", "with backend='auto', signed"),
        ("verify", "only converted checkpoints have digests"),
        ("degree", "tp cannot be combined with into and no rank"),
        ("cache", "cache cannot be combined with into and no rank"),
        ("rank", "group cannot be combined with into and a rank"),
        ("device", "device 'meta': its tensors have no memory to load into"),
        ("bad option", "threads: 0, expected 1 or more"),
    ],
)
def test_what_is_refused(group: list[dict[str, Any]], case: str, what: str) -> None:
    for member in group:
        assert member[case]["kind"] == "PlanError"
        assert what in member[case]["error"]


@pytest.mark.parametrize(
    ("case", "culprit", "kind", "what", "own"),
    [
        ("a read fails", 2, "OSError", "the drive is on fire", "OSError"),
        ("a read fails, converted", 2, "OSError", "the drive is on fire", "OSError"),
        ("interrupted", 1, "RuntimeError", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("no memory", 3, "MemoryError", "there is no memory for a buffer", "MemoryError"),
        ("shape of one", 2, "PlanError", "into has shape [100], the checkpoint [101]", "PlanError"),
        ("bad option", 3, "PlanError", "threads: 0, expected 1 or more", "PlanError"),
        ("degree of one", 1, "PlanError", "tp cannot be combined with into and no rank", "PlanError"),
    ],
)
def test_what_fails_on_one_member_fails_all_and_names_it(
    group: list[dict[str, Any]], case: str, culprit: int, kind: str, what: str, own: str
) -> None:
    for number, member in enumerate(group):
        assert member[case]["kind"] == (own if number == culprit else kind)
        if number != culprit:
            assert f"member {culprit} of the group failed" in member[case]["error"]
            assert what in member[case]["error"]


def test_a_member_that_is_killed_fails_the_others(group: list[dict[str, Any]]) -> None:
    assert "killed" not in group[3]
    for member in group[:3]:
        assert member["killed"]["kind"] in ("OSError", "ConnectionAbortedError")
        assert "a member may be gone" in member["killed"]["error"]


def test_a_process_alone_fills_a_model_of_plain_tensors(place: Path) -> None:
    whole = load_file(place / "wide" / "model.safetensors")
    for source in ("wide", "out"):
        model = module_of({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
        found = relayout.load(place / source, into=model)
        assert found.keys() == whole.keys()
        for name, tensor in model.named_parameters():
            assert found[name].data_ptr() == tensor.data_ptr()
            assert same_bits(tensor, whole[name])


def test_a_model_has_no_rank(place: Path) -> None:
    with pytest.raises(PlanError, match="leave out the rank"):
        relayout.load(place / "out", 0, into=torch.nn.Linear(2, 2))


def test_two_names_of_one_memory_need_one_tensor_even_where_a_process_has_no_elements(tmp_path: Path) -> None:
    whole = {"a": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0, 5), "scalar": torch.tensor(3)}
    save_file(whole, tmp_path / "model.safetensors")
    for tied in ("a", "empty"):
        filled = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        relayout.load(tmp_path, into={**filled, "b": filled[tied].detach()})
        assert all(same_bits(filled[name], whole[name]) for name in whole)
        with pytest.raises(PlanError, match="the checkpoint has no 'b'"):
            relayout.load(tmp_path, into={**filled, "b": filled[tied].clone()})


ROWS, OTHERS = Slice.along(0, [(0, 4)]), Slice.along(0, [(4, 6)])


@pytest.mark.parametrize(
    ("parts", "are_apart"),
    [
        ([ROWS, OTHERS], True),
        ([OTHERS, NOT_HELD, ROWS], True),
        ([Slice(), NOT_HELD], True),
        ([NOT_HELD, NOT_HELD], True),
        ([Slice(), Slice()], False),
        ([ROWS, ROWS, OTHERS], False),
        ([ROWS, Slice.along(0, [(3, 4)])], False),
        ([ROWS, Slice()], False),
        ([Slice.along(1, [(0, 4)]), Slice.along(1, [(4, 4)])], False),
        ([Slice.along(0, [(0, 2), (8, 2)]), OTHERS], False),
    ],
)
def test_members_of_one_machine_exchange_nothing(parts: list[Slice], are_apart: bool) -> None:
    """What several have comes through the page cache, but to a device, or if that is not to be used."""
    told = [_PartsMessage([part], {0: 0}, frozenset(), 1, "this machine", "cpu") for part in parts]
    assert _backend_beside(told, "auto") == ("auto" if are_apart else "buffered")
    assert _backend_beside(told, "direct") == ("direct" if are_apart else None)
    # Every member decides the same, also if one alone has a device.
    assert _backend_beside([*told[1:], told[0]._replace(kind="cuda")], "auto") == ("auto" if are_apart else None)
    told[0] = told[0]._replace(page_cache="another")
    assert _backend_beside(told, "auto") is None
