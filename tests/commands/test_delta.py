"""`delta` and `apply`: a base and its deltas make the other folder, byte for byte, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import prestarted
from support.bits import flip
from support.conversions import Conversions, stored_in
from support.faults import environment
from support.loader_fixtures import assert_equal
from support.profile import IS_LONG, sample
from support.sidecar import RESULT, pieces_of, proof
from support.training import convert, next_step, tree
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.commands import copy as copying
from relayout.errors import FormatError, PlanError

PARTIAL = ".made.relayout-partial"
NAMES = sample(
    ["llama", "phi3", "mixtral", "deepseek_v3", "qwen3_next", "fp8_blocks_deepseek", "gpt_oss_mxfp4", "awq_moe"],
    ["mixtral", "fp8_blocks_deepseek"],
)


@pytest.mark.parametrize(("name", "layout"), list(zip(NAMES, cycle(["ranks", "whole"]), strict=False)))
def test_a_base_and_a_delta_make_each_kind_of_checkpoint(
    name: str, layout: str, conversions: Conversions, tmp_path: Path
) -> None:
    old, new, delta = tmp_path / "old", tmp_path / "new", tmp_path / "delta"
    source = conversions.source(name)
    convert(source, old, layout=layout, align=512)
    convert(next_step(source, tmp_path / "source", 1), new, layout=layout, align=512)
    relayout.delta(old, new, delta)
    relayout.apply_deltas(old, delta, tmp_path / "made")
    assert tree(tmp_path / "made") == tree(new)
    for rank in range(2):
        assert_equal(relayout.load(old, rank, deltas=delta), relayout.load(new, rank))


def test_tied_tensors_and_several_parts_come_back(qwen2: Path, tmp_path: Path) -> None:
    for name, source in (("old", qwen2), ("new", next_step(qwen2, tmp_path / "source", 1))):
        convert(source, tmp_path / name, max_part_nbytes=100_000)
    relayout.delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    relayout.apply_deltas(tmp_path / "old", [tmp_path / "delta"], tmp_path / "made")
    assert tree(tmp_path / "made") == tree(tmp_path / "new")
    for rank in range(2):
        tensors = relayout.load(tmp_path / "old", rank)
        relayout.apply(tmp_path / "delta", rank, tensors, base=tmp_path / "old")
        assert_equal(tensors, stored_in(tmp_path / "new", rank))


def test_tensors_of_any_dtype_and_odd_sizes_in_one_chunk_come_back(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int64]
    tensors = {
        f"{index}.{size}": torch.randint(0, 2, (size,)).to(dtype)
        for index, dtype in enumerate(dtypes)
        for size in (0, 1, 3, 1001, 70_001)
    }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    convert(tmp_path / "source", tmp_path / "old", tp=1)
    convert(next_step(tmp_path / "source", tmp_path / "source-1", 1), tmp_path / "new", tp=1)
    relayout.delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    relayout.apply_deltas(tmp_path / "old", tmp_path / "delta", tmp_path / "made")
    assert tree(tmp_path / "made") == tree(tmp_path / "new")
    expected = load_file(tmp_path / "source-1" / "model.safetensors")
    assert_equal(relayout.load(tmp_path / "old", 0, deltas=tmp_path / "delta"), expected)


def test_a_delta_of_five_percent_is_small_and_of_nothing_nearly_empty(steps: Path, tmp_path: Path) -> None:
    weights = sum(path.stat().st_size for path in (steps / "1").glob("*.safetensors"))
    changed = sum(path.stat().st_size for path in (steps / "0-to-1").glob("*.delta"))
    assert 0 < changed < 0.10 * weights  # 5 % of all bytes: of BF16 elements twice as many.
    relayout.delta(steps / "1", steps / "1", tmp_path / "delta")
    assert list((tmp_path / "delta").glob("*.delta")) == []
    assert list(tree(tmp_path / "delta")) == [RESULT, "relayout.json"]
    manifest = (steps / "1" / "relayout.json").stat().st_size
    assert sum(len(blob) for blob, _ in tree(tmp_path / "delta").values()) < manifest + 1000
    relayout.apply_deltas(steps / "1", tmp_path / "delta", tmp_path / "made")
    assert tree(tmp_path / "made") == tree(steps / "1")


@pytest.mark.parametrize("layout", ["ranks", "whole"])
def test_the_decoder_in_the_format_document_makes_each_file(layout: str, steps: Path, tmp_path: Path) -> None:
    """And what is said there of the index of a delta's files, and of the digests that changed."""
    old, new, delta = (steps / name for name in ("0", "1", "0-to-1"))
    if layout == "whole":
        old, new, delta = (tmp_path / name for name in ("old", "new", "delta"))
        convert(steps / "source-0", old, layout=layout)
        convert(steps / "source-1", new, layout=layout)
        relayout.delta(old, new, delta)
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text("utf-8")
    names: dict[str, Any] = {}
    for title in ("12. Reading a rank", "15. Deltas"):
        exec(text.partition(f"\n## {title}\n")[2].partition("```python\n")[2].partition("```")[0], names)
    top = json.loads((delta / "relayout.json").read_text())
    blob = names["expand"]((delta / RESULT).read_bytes())
    assert blob == (new / "relayout.json").read_bytes()
    assert (proof((old / "relayout.json").read_bytes()), proof(blob)) == (top["base"], top["makes"])
    manifest = json.loads(blob)
    chunks, proofs = bytearray((old / "relayout.chunks").read_bytes()), 0
    entries = {entry["file"]: entry for entry in top["files"]}
    assert list(entries) == sorted(entries)
    for number, file in enumerate(manifest["files"]):
        starts = [0, *range(file["data_start"], file["nbytes"], manifest["chunk_nbytes"]), file["nbytes"]]
        made, place = (old / file["name"]).read_bytes(), 0
        if number in entries:
            entry, stored = entries[number], (delta / f"{file['name']}.delta").read_bytes()
            index = stored[-80 * entry["num_pieces"] :]
            assert (len(stored), proof(index)) == (entry["nbytes"], entry["index_digest"])
            pieces = pieces_of(stored, entry["num_pieces"])
            assert [piece for piece, *_ in pieces] == sorted({piece for piece, *_ in pieces})
            for row, (piece, encoded, content) in enumerate(pieces):
                start, end = starts[piece : piece + 2]
                assert index[80 * row + 16 : 80 * row + 48].hex() == proof(encoded)
                change = names["decoded"](encoded)
                assert change.nbytes == end - start
                made = made[:start] + (np.frombuffer(made[start:end], np.uint8) ^ change).tobytes() + made[end:]
                assert proof(made[start:end]) == content
                place += len(encoded)
                if piece:
                    chunks[proofs + 32 * (piece - 1) : proofs + 32 * piece] = bytes.fromhex(content)
            assert place + len(index) == len(stored)
        proofs += 32 * (len(starts) - 2)
        assert made == (new / file["name"]).read_bytes()
    assert chunks == (new / "relayout.chunks").read_bytes()
    check_digests(old, new, delta, [*filter(None, [*manifest["ranks"], manifest["whole"]]), manifest["source"]])


def check_digests(old: Path, new: Path, delta: Path, parts: list[dict[str, Any]]) -> None:
    """Check what FORMAT.md says of the digests that changed."""
    stored, digests = (
        (delta / "relayout.digests.delta").read_bytes(),
        bytearray((old / "relayout.digests").read_bytes()),
    )
    start = 0
    entries = json.loads((delta / "relayout.json").read_text())["digests"]
    for part, entry in zip(parts, entries, strict=True):
        rows, stored = stored[: 24 * entry["count"]], stored[24 * entry["count"] :]
        assert proof(rows) == entry["digest"]
        numbers = [int.from_bytes(rows[at : at + 8], "little") for at in range(0, len(rows), 24)]
        assert numbers == sorted(set(numbers))
        assert all(number < part["num_tensors"] for number in numbers)
        for number, at in zip(numbers, range(8, len(rows), 24), strict=True):
            assert digests[start + 16 * number :][:16] != rows[at : at + 16]
            digests[start + 16 * number : start + 16 * number + 16] = rows[at : at + 16]
        end = start + 16 * part["num_tensors"]
        assert proof(bytes(digests[start:end])) == part["digests_digest"]
        start = end
    assert not stored
    assert digests == (new / "relayout.digests").read_bytes()


def test_only_side_files_that_changed_are_in_a_delta(steps: Path, llama: Path) -> None:
    others = {path.name for path in llama.glob("*.json")} - {"config.json", "model.safetensors.index.json"}
    assert others
    names = {path.name for path in (steps / "0-to-1" / "new").iterdir()}
    # The record has the proof of config.json.
    assert names == {"config.json", "relayout.json.zst", "relayout.source.json.zst"}
    assert not names & others
    assert json.loads((steps / "0-to-1" / "relayout.json").read_text())["others"] == [
        "relayout.source.json.zst",
        "config.json",
    ]


@pytest.mark.parametrize(
    "deltas", [["1-to-2"], ["1-to-2", "0-to-1"], ["0-to-1", "0-to-1"], ["0-to-1", "1-to-2", "1-to-2"]]
)
def test_another_base_or_order_is_refused(deltas: list[str], steps: Path, tmp_path: Path) -> None:
    paths = [steps / name for name in deltas]
    with pytest.raises(PlanError, match=r"applies to content .*: another base, or another order"):
        relayout.apply_deltas(steps / "0", paths, tmp_path / "made")
    with pytest.raises(PlanError, match="applies to content"):
        relayout.load(steps / "0", 0, deltas=paths)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_delta_or_no_base_is_refused(steps: Path, llama: Path, tmp_path: Path) -> None:
    for base, delta, message in (
        (steps / "0", steps / "1", "not a delta; relayout delta makes one"),
        (steps / "0", llama, "not a delta"),
        (steps / "0", steps / "none", "no such file or folder"),
        (llama, steps / "0-to-1", "not a converted folder"),
        (steps / "0-to-1", steps / "0-to-1", "is a delta: relayout apply adds it to its base"),
    ):
        with pytest.raises((FormatError, PlanError), match=message):
            relayout.apply_deltas(base, delta, tmp_path / "made")
    with pytest.raises(FormatError, match="a delta: relayout apply adds it to its base"):
        relayout.load(steps / "0-to-1", 0)
    with pytest.raises(PlanError, match="no delta"):
        relayout.apply_deltas(steps / "0", [], tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 1}, "tensor-parallel degree differs$"),
        ({"layout": "whole"}, "layout differs$"),
        ({"max_part_nbytes": 100_000}, "files differ$"),
    ],
)
def test_another_layout_is_refused(options: dict[str, Any], message: str, steps: Path, tmp_path: Path) -> None:
    convert(steps / "source-1", tmp_path / "new", **{"align": 512, **options})
    with pytest.raises(PlanError, match=f"needs the layout of .*{message}"):
        relayout.delta(steps / "0", tmp_path / "new", tmp_path / "delta")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_tensors_that_only_have_the_same_size_are_refused(tmp_path: Path) -> None:
    for name, dtype in (("old", torch.float16), ("new", torch.bfloat16)):
        (tmp_path / f"{name}-source").mkdir()
        save_file({"a.weight": torch.ones(8, 8, dtype=dtype)}, tmp_path / f"{name}-source" / "model.safetensors")
        convert(tmp_path / f"{name}-source", tmp_path / name, tp=1, align=512)
    with pytest.raises(PlanError, match=r"needs the layout of .*/old: the tables differ: other tensors, or written"):
        relayout.delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


FILES = [
    "relayout.json",
    "relayout.digests.delta",
    "model-rank-0-part-0.safetensors.delta",
    "model-rank-1-part-0.safetensors.delta",
    RESULT,
    "new/config.json",
    "new/relayout.source.json.zst",
]


def test_these_are_the_files_of_a_delta(steps: Path) -> None:
    assert sorted(FILES) == list(tree(steps / "0-to-1"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", sample(DAMAGES, ["middle byte", "truncated", "missing"]))
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_delta_makes_nothing(name: str, damage: str, steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    DAMAGES[damage](tmp_path / "delta" / name)
    if (name, damage) == ("relayout.json", "longer"):  # White space.
        relayout.apply_deltas(steps / "0", tmp_path / "delta", tmp_path / "made")
        assert tree(tmp_path / "made") == tree(steps / "1")
        return
    with pytest.raises((FormatError, PlanError)):
        relayout.apply_deltas(steps / "0", tmp_path / "delta", tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} <= {"delta", PARTIAL}
    if name.endswith(".delta"):  # Then the attempt goes on.
        shutil.copytree(steps / "0-to-1", tmp_path / "delta", dirs_exist_ok=True)
        relayout.apply_deltas(steps / "0", tmp_path / "delta", tmp_path / "made")
        assert tree(tmp_path / "made") == tree(steps / "1")


def test_a_header_that_changed_alone_is_in_a_delta(tmp_path: Path) -> None:
    for step in "01":
        (tmp_path / f"source-{step}").mkdir()
        path = tmp_path / f"source-{step}" / "model.safetensors"
        save_file({"a.weight": torch.ones(8, 8)}, path, metadata={"step": step})
        convert(tmp_path / f"source-{step}", tmp_path / step, tp=1)
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    relayout.apply_deltas(tmp_path / "0", tmp_path / "delta", tmp_path / "made")
    assert tree(tmp_path / "made") == tree(tmp_path / "1")
    assert (tmp_path / "1" / "model-rank-0-part-0.safetensors").read_bytes().count(b'"step":"1"') == 1


def test_an_interrupted_conversion_is_not_discarded_without_force(steps: Path, llama: Path, tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if done == total:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        relayout.convert(llama, tmp_path / "out", tp=2, progress=fail, max_part_nbytes=20_000)
    kept = tree(tmp_path / ".out.relayout-partial")
    with pytest.raises(PlanError, match="holds an interrupted attempt, with other options"):
        relayout.delta(steps / "0", steps / "1", tmp_path / "out")
    assert tree(tmp_path / ".out.relayout-partial") == kept
    relayout.delta(steps / "0", steps / "1", tmp_path / "out", force=True)
    assert tree(tmp_path / "out") == tree(steps / "0-to-1")


@pytest.mark.parametrize("offset", [0, 100_000, -1])
def test_a_damaged_base_makes_nothing(offset: int, steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "0", tmp_path / "base")
    flip(tmp_path / "base" / "model-rank-1-part-0.safetensors", offset)
    with pytest.raises(FormatError, match=r"damaged|prefix|header"):
        relayout.apply_deltas(tmp_path / "base", steps / "0-to-1", tmp_path / "made")
    with pytest.raises(FormatError):
        relayout.load(tmp_path / "base", 1, deltas=steps / "0-to-1")
    with pytest.raises(FormatError):
        relayout.delta(tmp_path / "base", steps / "1", tmp_path / "delta")
    assert {path.name for path in tmp_path.iterdir()} <= {"base", PARTIAL}


def test_changed_side_files_of_the_base_are_not_carried_over(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "0", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text("{}")
    with pytest.raises(FormatError, match="differs from the file that was copied"):
        relayout.apply_deltas(tmp_path / "base", steps / "0-to-1", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_delta_that_is_replaced_meanwhile_is_not_mixed_with_the_other(
    steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of one and a manifest of the other would look complete."""
    shutil.copytree(steps / "0-to-1", tmp_path / "delta")
    put_index, num_calls = copying.put_index, 0

    def replaced(*given: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        shutil.rmtree(tmp_path / "delta")
        shutil.copytree(tmp_path / "other", tmp_path / "delta")
        shutil.copy(steps / "1" / "config.json", tmp_path / "delta" / "new")  # Most do not change.
        put_index(*given)

    relayout.delta(steps / "0", steps / "2", tmp_path / "other")
    monkeypatch.setattr(copying, "put_index", replaced)
    with pytest.raises(FormatError, match=r"digest|differ"):
        relayout.apply_deltas(steps / "0", tmp_path / "delta", tmp_path / "made")
    assert num_calls == 1
    assert not (tmp_path / "made").exists()


def test_what_a_killed_attempt_wrote_is_not_made_again(steps: Path, shim: Path, tmp_path: Path) -> None:
    words = ["apply", "0", "0-to-1", "1-to-2", "-o", str(tmp_path / "out")]
    env = environment(shim, ["write|output/relayout.chunks|1|kill"])
    assert prestarted.run(*words, cwd=steps, env=env).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    done = relayout.apply_deltas(steps / "0", [steps / "0-to-1", steps / "1-to-2"], tmp_path / "out")
    assert done.resumed_nbytes > 0.9 * done.nbytes
    assert tree(tmp_path / "out") == tree(steps / "2")


@pytest.mark.parametrize("moment", ["write|0.safetensors.delta", "sync|output/relayout.json"])
def test_after_a_kill_delta_begins_again(moment: str, steps: Path, shim: Path, tmp_path: Path) -> None:
    given = ["delta", str(steps / "0"), str(steps / "1"), "-o", str(tmp_path / "out")]
    assert prestarted.run(*given, env=environment(shim, [f"{moment}|1|kill"])).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, given).exit_code == 0
    assert tree(tmp_path / "out") == tree(steps / "0-to-1")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_others_have_at_the_output_stays(steps: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    (tmp_path / ".other.relayout-partial").mkdir()
    (tmp_path / ".other.relayout-partial" / "thesis.tex").write_text("mine")
    before = tree(tmp_path)
    for name in ("out", "other"):
        for force in (False, True):
            with pytest.raises(PlanError, match=r"not an output of relayout|relayout did not put there"):
                relayout.apply_deltas(steps / "0", steps / "0-to-1", tmp_path / name, force=force)
            with pytest.raises(PlanError, match=r"not an output of relayout|relayout did not put there"):
                relayout.delta(steps / "0", steps / "1", tmp_path / name, force=force)
    assert tree(tmp_path) == before


def test_force_replaces_what_the_same_command_wrote_and_nothing_else(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps / "1-to-2", tmp_path / "delta")
    shutil.copytree(steps / "2", tmp_path / "folder")
    with pytest.raises(
        PlanError, match="already holds a complete delta of 2 files; it is unchanged; --force replaces it"
    ):
        relayout.delta(steps / "0", steps / "1", tmp_path / "delta")
    with pytest.raises(PlanError, match="not an output of relayout"):
        relayout.delta(steps / "0", steps / "1", tmp_path / "folder", force=True)
    with pytest.raises(PlanError, match="not an output of relayout"):
        relayout.apply_deltas(steps / "0", steps / "0-to-1", tmp_path / "delta", force=True)
    (tmp_path / "delta" / "new" / "thesis.tex").write_text("mine")
    with pytest.raises(PlanError, match="holds files that relayout did not write"):
        relayout.delta(steps / "0", steps / "1", tmp_path / "delta", force=True)
    (tmp_path / "delta" / "new" / "thesis.tex").unlink()
    relayout.delta(steps / "0", steps / "1", tmp_path / "delta", force=True)
    relayout.apply_deltas(steps / "0", steps / "0-to-1", tmp_path / "folder", force=True)
    assert tree(tmp_path / "delta") == tree(steps / "0-to-1")
    assert tree(tmp_path / "folder") == tree(steps / "1")


@pytest.mark.parametrize("private", ["0", "1", "0-to-1"])
def test_an_output_grants_no_more_than_any_of_its_inputs(private: str, steps: Path, tmp_path: Path) -> None:
    names = ("0", "1", "0-to-1")
    for name in names:
        shutil.copytree(steps / name, tmp_path / name)
        (tmp_path / name).chmod(0o700 if name == private else 0o755)
    relayout.delta(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    relayout.apply_deltas(tmp_path / "0", tmp_path / "0-to-1", tmp_path / "made")
    assert [(tmp_path / name).stat().st_mode & 0o077 == 0 for name in ("delta", "made")] == [
        private in names[:2], private in ("0", "0-to-1")
    ]  # fmt: skip


@pytest.mark.parametrize("force", [False, True])
def test_an_output_at_one_of_the_inputs_is_refused(force: bool, steps: Path) -> None:
    for output in ("0", "0-to-1"):
        with pytest.raises(PlanError, match=r"is the source itself|--force replaces it|not an output of relayout"):
            relayout.apply_deltas(steps / "0", steps / "0-to-1", steps / output, force=force)
    for output in ("0", "1"):
        with pytest.raises(PlanError, match=r"is the source itself|--force replaces it|not an output of relayout"):
            relayout.delta(steps / "0", steps / "1", steps / output, force=force)
        with pytest.raises(PlanError, match="inside"):
            relayout.delta(steps / "0", steps / "1", steps / output / "below", force=force)


def test_progress_counts_all_bytes_of_the_weights(steps: Path, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in (steps / "1").glob("*.safetensors"))
    for run in (
        lambda tell: relayout.delta(steps / "0", steps / "1", tmp_path / "delta", progress=tell),
        lambda tell: relayout.apply_deltas(steps / "0", steps / "0-to-1", tmp_path / "made", progress=tell),
    ):
        calls: list[tuple[int, int]] = []
        run(lambda done, whole, calls=calls: calls.append((done, whole)))
        assert calls
        [whole] = {whole for _, whole in calls}
        assert 0.9 * total < whole <= total  # Of headers, or without them.
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert 0.9 * whole < calls[-1][0] <= whole


def test_the_commands_write_the_same(steps: Path, tmp_path: Path) -> None:
    def run(*given: object) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*map(str, given), "--json", "--quiet"])
        assert result.exit_code == 0, result.output
        printed: dict[str, Any] = json.loads(result.stdout)
        return printed

    done = run("delta", steps / "0", steps / "1", "-o", tmp_path / "delta")
    assert tree(tmp_path / "delta") == tree(steps / "0-to-1")
    stored = sum(path.stat().st_size for path in (tmp_path / "delta").glob("*.safetensors.delta"))
    assert (done["num_files"], done["delta_nbytes"]) == (2, stored)
    done = run("apply", steps / "0", tmp_path / "delta", steps / "1-to-2", "-o", tmp_path / "made")
    assert tree(tmp_path / "made") == tree(steps / "2")
    assert (done["ranks"], done["resumed_nbytes"]) == ([0, 1], 0)
    result = CliRunner().invoke(app, ["apply", str(steps / "0"), str(steps / "1-to-2"), "-o", str(tmp_path / "wrong")])
    assert result.exit_code == 2
    assert "another base" in result.stderr
    assert not (tmp_path / "wrong").exists()


@pytest.mark.skipif(not IS_LONG, reason="writes 400 MB")
def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """Of either command, with two threads; the file has 96 MiB."""
    (tmp_path / "source").mkdir()
    values = torch.randint(-(2**15), 2**15, (48 * 2**20,), dtype=torch.int16)
    save_file({"w": values}, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    convert(tmp_path / "source", tmp_path / "0", tp=1)
    convert(next_step(tmp_path / "source", tmp_path / "source-1", 1), tmp_path / "1", tp=1)
    for given in (["delta", "0", "1", "-o", "d"], ["apply", "0", "d", "-o", "made"]):
        command = [sys.executable, "-m", "relayout", *given, "--threads", "2", "--json", "--quiet"]
        text = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
        assert json.loads(text)["peak_nbytes"] < 80 * 2**20
    assert tree(tmp_path / "made") == tree(tmp_path / "1")
