"""What the documents show does work."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from support import format_example, golden
from support.conversions import reference_tensors
from support.hub_models import MODELS
from support.models import as_integers
from support.patience import PATIENCE
from support.tools import built_command
from support.training import next_step, tree
from support.trees import content
from support.vector_edits import BASES, laid_out, vectors
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.core.slices import BITS
from relayout.errors import FormatError
from relayout.plans.division import Sizes, divide
from relayout.plans.family import SizeSource, parse_family, parse_rules

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE, GUIDES = DOCS / "reference", DOCS / "guides"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FORMAT, PLANS = (DOCS / "FORMAT.md").read_text(), (REFERENCE / "PLANS.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def blocks(text: str, language: str) -> list[str]:
    code = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code
    return code


def section(text: str, number: int) -> str:
    """One numbered section of a document."""
    match = re.search(rf"^## {number}\. .*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match
    return match[0]


READER = "\n\n".join(blocks(section(FORMAT, number), "python")[0] for number in (12, 15))
READER += "\n\n" + blocks(section(FORMAT, 16), "python")[1]
"""The reader of a folder, a delta and a root in FORMAT.md, as it stands there."""
COMPILED_READER = compile(READER, "<string>", "exec")


@pytest.fixture
def example_folder(tmp_path: Path) -> Path:
    """The example of FORMAT.md as a folder, with the manifest that is printed there."""
    [text] = blocks(section(FORMAT, 3), "json")
    return format_example.write_folder(tmp_path / "example", text.encode())


Read = Mapping[str, tuple[str, list[int], bytes]]
"""Dtype, shape and bytes of each tensor."""


def the_reader() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(COMPILED_READER, names)
    return names


def read_as_the_document_does(folder: Path, rank: int) -> Read:
    tensors: Read = the_reader()["Rank"](folder, rank).tensors()
    return tensors


def test_the_reader_in_the_format_document_has_at_most_120_lines() -> None:
    assert sum(1 for line in READER.splitlines() if line.strip()) <= 120


@pytest.mark.parametrize("rank", [0, 1])
def test_the_reader_in_the_format_document_reads_the_example(example_folder: Path, rank: int) -> None:
    tensors = read_as_the_document_does(example_folder, rank)
    assert list(tensors) == list(format_example.FILE_ORDER)
    for name, (_, shape, blob) in tensors.items():
        array = format_example.slice_array(name, rank)
        assert (tuple(shape), blob) == (array.shape, array.tobytes()), name


UNKNOWN = ("unknown", "lower-case", "empty")
"""The vectors of dtypes that nobody knows."""


def test_the_reader_in_the_format_document_refuses_vectors_or_reads_what_is_right(tmp_path: Path) -> None:
    right = {rank: read_as_the_document_does(BASES / "converted", rank) for rank in range(2)}
    refusing, wrong = set(), set()
    for vector in vectors():
        if vector["base"] != "converted" or "made" in vector or vector.get("is_bomb"):
            continue
        place = tmp_path / vector["name"]
        place.mkdir(parents=True)
        folder = laid_out(vector, place)
        for rank in range(2):
            try:
                tensors = read_as_the_document_does(folder, rank)
            except Exception as error:
                refusing |= {frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == "<string>"}
            else:
                if tensors != right[rank]:
                    wrong.add(vector["name"])
    lines = blocks(section(FORMAT, 12), "python")[0].splitlines()
    checks = {number: line for number, line in enumerate(lines, 1) if line.lstrip().startswith("check(")}
    assert len(checks) > 10
    assert [line for number, line in checks.items() if number not in refusing] == []
    # It leaves out the names in headers, and knows no dtype.
    assert wrong == {"rank_file/table-names-swapped", *(f"table/dtype-{what}" for what in UNKNOWN)}


def test_the_reader_in_the_format_document_refuses_the_layout_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="damaged, or not of version 1"):
        read_as_the_document_does(BASES / "whole", 0)


def test_the_reader_in_the_format_document_follows_the_golden_root() -> None:
    names, listed = the_reader(), golden.read_list()["steps"]
    for rank in range(golden.NUM_RANKS):
        tensors = names["follow"](golden.STEPS, rank).tensors()
        found = {name: golden.row(dtype, shape, blob) for name, (dtype, shape, blob) in tensors.items()}
        assert found == listed[max(listed)][rank]


def test_the_manifest_in_the_format_document_is_that_of_the_example() -> None:
    [text] = blocks(section(FORMAT, 3), "json")
    before, quoted, after = text.rpartition('"self_digest"')
    assert quoted + after == f'"self_digest": "{format_example.blake3_hex(before.encode())}"\n}}\n'
    manifest = json.loads(text)
    del manifest["self_digest"]
    assert list(manifest.items()) == list(format_example.manifest().items())


def test_the_table_in_the_format_document_is_that_of_the_example() -> None:
    [text] = blocks(section(FORMAT, 5), "json")
    assert json.loads(text) == format_example.table(1)


def test_the_first_bytes_in_the_format_document_are_those_of_the_example() -> None:
    length, header = format_example.rank_file(1)[0][:8], format_example.rank_file(1)[0][8:]
    [text] = blocks(section(FORMAT, 6), "text")
    assert text.replace("\n", "").encode() == header.rstrip(b" ")
    assert f"`{length.hex(' ')}`" in FORMAT
    assert f"the length {len(header)}" in FORMAT


def test_the_content_in_the_format_document_is_that_of_the_example() -> None:
    match = re.search(r"^ *```json\n(.*?)```", section(FORMAT, 6), re.MULTILINE | re.DOTALL)
    assert match
    text = "".join(line.strip() for line in match[1].splitlines())
    assert (
        format_example.digest(text.encode())
        == json.loads(blocks(section(FORMAT, 3), "json")[0])["files"][1]["tensors_digest"]
    )


def test_the_record_in_the_format_document_is_that_of_the_example() -> None:
    [text] = blocks(section(FORMAT, 7), "json")
    printed, record = json.loads(text), format_example.record()
    [shortened], [header] = printed["files"].pop("header"), record["files"].pop("header")
    assert header.startswith(shortened.removesuffix(" ... "))
    assert printed == record


def test_the_digests_in_the_format_document_are_right() -> None:
    vectors = re.findall(r"of\s+nothing\s+`(\w+)`;\s+of\s+the\s+8\s+bytes\s+`relayout`\s+`(\w+)`", FORMAT)
    hashes = format_example.digest, format_example.blake3_hex
    assert vectors == [(hashed(b""), hashed(b"relayout")) for hashed in hashes]


def test_relayout_writes_the_example_of_the_format_document(tmp_path: Path) -> None:
    """All but what depends on the zstd library, and on the version of relayout."""
    source, plan = format_example.write_source(tmp_path)
    relayout.convert(source, tmp_path / "out", tp=2, plan=plan, max_part_nbytes=format_example.MAX_PART_NBYTES)
    for rank in range(format_example.NUM_RANKS):
        name = f"model-rank-{rank}-part-0.safetensors"
        assert (tmp_path / "out" / name).read_bytes() == b"".join(format_example.rank_file(rank))
        stored = (tmp_path / "out" / f"relayout.rank-{rank}.json.zst").read_bytes()
        assert json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(stored)) == format_example.table(rank)
    chunks = b"".join(map(format_example.chunks, range(format_example.NUM_RANKS)))
    assert (tmp_path / "out" / "relayout.chunks").read_bytes() == chunks
    stored = (tmp_path / "out" / "relayout.source.json.zst").read_bytes()
    record = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(stored))
    expected = format_example.record()
    rules = [parse_rules(side["plan"].pop("rules"), "record", "example", "file") for side in (record, expected)]
    assert record == expected
    assert rules[0].rules == rules[1].rules
    written, printed = json.loads((tmp_path / "out" / "relayout.json").read_text()), format_example.manifest()
    for manifest in (written, printed):
        manifest.pop("self_digest", None)
        manifest.pop("generator")
        manifest["source"].pop("record_digest")
        for entry in manifest["ranks"]:
            entry.pop("table_digest")
    assert written == printed


def test_relayout_reads_the_example_of_the_format_document(example_folder: Path) -> None:
    assert relayout.verify(example_folder).differences == []
    for rank in range(format_example.NUM_RANKS):
        for name, tensor in relayout.load(example_folder, rank, verify=True).items():
            np.testing.assert_array_equal(as_integers(tensor).view(np.uint16), format_example.slice_array(name, rank))


def test_the_digests_of_the_golden_folder_in_the_format_document_are_right() -> None:
    named = dict(re.findall(r"^\| `(\w+/\S+)` \| `(\w+)` \|$", section(FORMAT, 14), re.MULTILINE))
    stored = {
        f"{layout}/{path.name}": format_example.digest(path.read_bytes())
        for layout in golden.LAYOUTS
        for path in (golden.FOLDER / layout).iterdir()
        if path.name != "config.json"
    }
    assert named == stored


def test_the_reader_in_the_format_document_reads_the_golden_folder() -> None:
    for rank, expected in enumerate(golden.read_list()["ranks"]):
        tensors = read_as_the_document_does(golden.FOLDER / "ranks", rank)
        assert {name: golden.row(*one) for name, one in tensors.items()} == expected


def test_the_plan_in_the_document_of_plans_is_one() -> None:
    [text] = blocks(PLANS, "toml")
    family = parse_family(text, "my-plan.toml", "mine")
    cuts = {
        "model.layers.11.attn.qkv_proj.bias": (0, ("heads", "kv_heads", "kv_heads")),
        "model.layers.0.mlp.experts.7.down_proj.weight": (1, ("even",)),
        "model.layers.0.attn.q_norm.weight": (None, ()),
        "model.norm.weight": (None, ()),
    }
    for name, cut in cuts.items():
        rule = family.rule(name)
        assert rule is not None
        assert (rule.dim, rule.units) == cut
    assert family.rule("model.layers.0.mlp.gate_proj.weight") is None
    assert family.expert("model.layers.0.mlp.experts.7.down_proj.weight") == 7


def test_the_worked_example_in_the_document_of_plans_is_right() -> None:
    [text] = blocks(PLANS, "toml")
    rule = parse_family(text, "my-plan.toml", "mine").rule("model.layers.0.attn.qkv_proj.weight")
    assert rule is not None
    config = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
    sizes = Sizes(parse_family(text, "my-plan.toml", "mine").sizes, config)
    ranges = divide(rule, 1280, sizes, 4)[1]
    [said] = re.findall(r"slice\s+is\s+`\{\"0\": (\[\[.*?\]\])\}`", PLANS)
    assert [list(part) for part in ranges] == json.loads(said)


def test_the_rules_in_the_document_of_plans_are_a_plan() -> None:
    [text] = blocks(PLANS, "json")
    family = parse_rules(json.loads(text), "PLANS.md", "example", "file")
    assert family.model_types == ("example",)
    assert family.experts_each == ("**.experts.#.**",)
    rule = family.rule("a.blocks")
    assert rule is not None
    assert (rule.dim, rule.units, rule.block) == (1, ("ragged",), 64)
    assert family.sizes["kv_heads"] == (SizeSource(1, "multi_query"), SizeSource("num_key_value_heads"))


def test_the_document_of_plans_has_all_keys_and_units() -> None:
    from relayout.plans import family

    keys = set(re.findall(r"^\| `\[?(\w+)\]?` \|", section(PLANS, 2), re.MULTILINE))
    with pytest.raises(FormatError) as unknown:
        parse_family("nonsense = 1", "mine.toml", "mine")
    assert keys == set(str(unknown.value).partition("expected ")[2].split(", "))
    cells = re.findall(r"^\| (`[^|]*`) \|", section(PLANS, 4).split("Further keys")[0], re.MULTILINE)
    units = {unit for cell in cells for unit in re.findall(r"`(\w+)`", cell)}
    assert units == {family.EVEN, family.VOCABULARY, family.RAGGED, family.HASH_COLUMNS, *family.SHARED}


def test_the_manifest_has_the_fields_that_the_format_document_names_and_no_others(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "out", tp=2)
    manifest = json.loads((tmp_path / "out" / "relayout.json").read_text())
    tables = re.split(r"^Of ", section(FORMAT, 3), flags=re.MULTILINE)
    named = [set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) for table in tables]
    tables = [manifest, manifest["source"], manifest["files"][0], manifest["ranks"][0]]
    assert [set(table) for table in tables] == [named[0], named[1], named[2], named[3]]
    reads = set(re.findall(r"^\| `(\w+)` \|", section(FORMAT, 4), re.MULTILINE))
    assert {name for entry in manifest["ranks"] for read in entry["reads"] for name in read} <= reads


def test_the_format_document_lists_all_dtypes() -> None:
    rows = re.findall(r"^ *\| (\d+) \| ([A-Z].*?) \|", section(FORMAT, 5), re.MULTILINE)
    assert {name: int(bits) for bits, names in rows for name in names.split(", ")} == BITS


def headings(path: Path) -> set[str]:
    """The anchors of a document, as GitHub makes them of its headings."""
    lines = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", lines, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_link_leads_to_a_file_and_a_heading_that_are_there(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not anchor or anchor in headings(file), f"{target}#{anchor}"


def test_nobody_is_told_to_install_the_package_of_somebody_else() -> None:
    for path in DOCUMENTS:
        assert not re.search(
            r"pip install[^\n]*\brelayout\b(?!\[)(?<!safetensors-relayout)(?<!in a checkout of relayout)",
            path.read_text(),
        ), path


@pytest.fixture
def with_llama(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoint that the documents name."""
    (tmp_path / "llama-3.1-8b").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_numbers(line: str) -> str:
    """A line of output with each number or range, and the unit of bytes after it, replaced."""
    number = r"\d[\d.,]*(?: [kMG]?B\b)?"
    return re.sub(f"{number}(?: to {number})?", "#", line)


def test_the_commands_of_the_readme_run(with_llama: Path, llama: Path) -> None:
    """The transcript shows each command with the output that it has now, except for numbers."""
    (with_llama / "llama-3.2-1b").symlink_to(llama)
    section = DOCUMENTS[0].read_text().split("## Quick start")[1]
    transcript, cache = blocks(section, "")[:2]
    shown = [part.strip().splitlines() for part in re.split(r"^\$ ", transcript, flags=re.MULTILINE)[1:]]
    assert [lines[0].split()[:2] for lines in shown] == [
        ["relayout", "convert"],
        ["relayout", "verify"],
        ["vllm", "serve"],
    ]
    assert [line.split()[:2] for line in cache.splitlines()] == [
        ["export", "RELAYOUT_CACHE=/nvme/relayout"],
        ["vllm", "serve"],
        ["vllm", "serve"],
    ]
    [restore] = re.findall(r"`(relayout\s+restore\s.*?)`", section, re.DOTALL)
    for command, *output in [*shown[:2], [f"{restore} -o back"]]:
        result = CliRunner(env={"COLUMNS": "120"}).invoke(app, command.split()[1:])
        assert result.exit_code == 0, result.output
        said = [without_numbers(line) for line in result.output.splitlines()]
        assert [line for line in output if line and without_numbers(line) not in said] == []
    assert (with_llama / shown[2][0].split()[2] / "relayout.json").is_file()
    assert content(with_llama / "back") == content(with_llama / "llama-3.2-1b")
    names: dict[str, Any] = {}
    exec(blocks(section, "python")[0], names)
    assert names["tensors"]["model.norm.weight"].shape == (128,)


def test_the_python_of_the_document_of_conversions_runs(with_llama: Path) -> None:
    [library, dcp] = blocks((REFERENCE / "CONVERTING.md").read_text(), "python")
    (with_llama / "fast").mkdir()
    names: dict[str, Any] = {}
    exec(library.replace('"/fast/', '"fast/').replace('"/other/', '"' + "fast/back-"), names)
    assert relayout.preview(names["plan"]).num_ranks == 4
    assert "torch.empty(4096" in dcp
    exec(dcp.replace("torch.empty(4096", "torch.empty(128").replace('"llama-3.1-8b-tp8"', '"fast/llama-tp8"'), names)
    expected = relayout.load("fast/llama-tp8", 0)["model.norm.weight"]
    np.testing.assert_array_equal(as_integers(names["weights"]["model.norm.weight"]), as_integers(expected))


def test_the_commands_and_the_python_of_the_document_of_deltas_run(with_llama: Path) -> None:
    text, source = (REFERENCE / "DELTAS.md").read_text(), Path("llama-3.1-8b")
    for step in (1, 2, 3):
        source = next_step(source, Path(f"source-{step}"), step)
        relayout.convert(source, f"step-{step}", tp=2)
    relayout.delta("step-2", "step-3", "step-2-to-3")
    first, *others = [line.split("#")[0].split()[1:] for line in blocks(text, "")[0].splitlines()]
    assert CliRunner().invoke(app, first).exit_code == 0
    for made, line in zip(("step-2", "step-3"), others, strict=True):
        kept = Path(made).rename(f"kept-{made}")
        assert CliRunner().invoke(app, line).exit_code == 0
        assert tree(Path(made)) == tree(kept)
    Path("step-1-to-2").rename("kept-delta")
    names: dict[str, Any] = {"rank": 1}
    exec(blocks(text, "python")[0], names)
    expected = relayout.load("kept-step-3", 1)
    assert names["tensors"].keys() == expected.keys()
    assert all(torch.equal(names["tensors"][name], tensor) for name, tensor in expected.items())


def test_the_ways_to_load_in_the_document_run(with_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [first, ways, _] = blocks((REFERENCE / "LOADING.md").read_text(), "python")
    relayout.convert("llama-3.1-8b", "llama-3.1-8b-tp8", tp=8)
    names: dict[str, Any] = {}
    exec(first, names)
    path, rank = "llama-3.1-8b-tp8", 3
    parameters = {name: tensor.clone() for name, tensor in names["tensors"].items()}
    names |= {"path": path, "rank": rank, "parameters": parameters, "named_tensors": dict(parameters)}
    names["model"] = {
        name: torch.zeros_like(tensor) for name, tensor in reference_tensors(Path("llama-3.1-8b")).items()
    }
    exec(ways.replace('"cuda:0"', '"cpu"'), names)
    assert names["tensors"].keys() == {name for name in parameters if ".layers.0." in name}
    printed = capsys.readouterr().out
    [keys] = [line for line in printed.splitlines() if line.startswith("['")]
    assert "norm.weight" in keys
    assert "lm_head" not in keys
    assert "backend" in printed
    assert all(tensor.any() for tensor in names["model"].values())


def test_the_way_to_fill_a_sharded_model_in_the_document_runs(with_llama: Path) -> None:
    relayout.convert("llama-3.1-8b", "llama-3.1-8b-tp8", tp=8)
    [_, _, example] = blocks((REFERENCE / "LOADING.md").read_text(), "python")
    begin = """
import relayout, torch.distributed
torch.distributed.init_process_group("gloo", "file://" + __import__("os").path.abspath("meet"), rank=0, world_size=1)
path = "llama-3.1-8b-tp8"
"""
    end = "print(sum(float(one.full_tensor().double().abs().sum()) for one in model.parameters()))"
    whole = reference_tensors(Path("llama-3.1-8b"))
    done = subprocess.run(
        [sys.executable, "-c", begin + example.replace('"cuda"', '"cpu"') + end],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(sum(float(one.double().abs().sum()) for one in whole.values()))


def test_every_argument_of_load_is_in_the_document() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "LOADING.md").read_text(), re.MULTILINE)
    assert table == [name for name in inspect.signature(relayout.load).parameters if name not in ("path", "rank")]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_manual_page_is_set_without_a_warning() -> None:
    command = ["groff", "-man", "-Tascii", "-ww", "-P-cbou", DOCS / "relayout.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "relayout convert llama-3.1-8b --tp 8" in done.stdout


def test_the_document_of_models_has_all_full_size_models() -> None:
    text = (REFERENCE / "MODELS.md").read_text()
    for model in MODELS.values():
        what = f"| {model.name} ({model.config['model_type']}) | {model.num_tensors:,} | {model.nbytes / 1e9:.4g} |"
        assert f"{what} {model.tp} |" in text, what


def test_messages_in_the_document_of_troubles_are_the_program_s() -> None:
    sources = "".join(path.read_text() for package in ("relayout", "loader") for path in (ROOT / package).rglob("*.py"))
    texts = re.sub(r'"\s*\n\s*f?"', "", sources)  # Of literals that are written in several lines.
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "TROUBLESHOOTING.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 30
    assert [message for message in messages if message not in texts] == []


@pytest.mark.parametrize("path", [DOCUMENTS[0], *sorted(GUIDES.glob("*.md"))], ids=lambda path: path.stem)
def test_commands_in_guides_have_these_options(path: Path) -> None:
    code = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    text = "".join(block for language, block in code if not language)
    lines = re.findall(r"^(?:\$ |srun .*|kubectl exec .* -- )?\brelayout ([a-z].*)", text, re.MULTILINE)
    given = {"${words[@]}": ["SRC", "--tp", "8"]}
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        # An error of usage: no such option, or an argument is missing.
        command = built_command().commands[name]
        while hasattr(command, "commands"):
            name, *words = words
            command = command.commands[name]
        command.make_context(name, [one for word in words for one in given.get(word, [word])])
    assert lines


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_commands_of_the_guide_to_signing_sign_and_refuse(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    *commands, _engine = blocks((GUIDES / "SIGNING.md").read_text(), "")
    (tmp_path / "llama-3.1-8b").symlink_to(llama)
    script = f'relayout() {{ "{sys.executable}" -m relayout "$@"; }}\n{chr(10).join(commands)}'
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    policy = tmp_path / "trusted.toml"
    assert relayout.load(tmp_path / "here", 0, trust=policy).keys()
    relayout.convert(llama, tmp_path / "unsigned", tp=8)
    with pytest.raises(FormatError, match=r"model\.sig"):
        relayout.load(tmp_path / "unsigned", 0, trust=policy)
