"""`report`: what the page shows is what the files are; it needs nothing else, and a browser shows it without errors."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import vector_edits
from support.checkpoints import write_family
from support.chromium import Browser, browser
from support.families import FAMILIES
from support.hub_models import MODELS

import relayout
from relayout.checkpoint.converted import read_digests, read_manifest, read_table
from relayout.errors import FormatError, PlanError
from relayout.html_report.page import KINDS, kind_of, render
from relayout.storage.stores import find_store

pytestmark = pytest.mark.documents

Content = dict[str, Any]


def read_header(file: Path) -> Content:
    """The entries of a safetensors file."""
    blob = file.read_bytes()
    header: Content = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    del header["__metadata__"]
    return header


def embedded(page: Path, what: str) -> bytes:
    found = re.search(rf'id="{what}">([A-Za-z0-9+/=]*)</script>', page.read_text())
    assert found
    return base64.b64decode(found[1])


def content_of(page: Path) -> Content:
    content: Content = json.loads(gzip.decompress(embedded(page, "content")))
    return content


def files_of(content: Content) -> Iterator[tuple[Content, list[tuple[str, int, int, list[int]]]]]:
    """Every file, and of each of its tensors name, offset in the data section, end and shape.

    They are found out as the page's script finds them out.
    """
    for file in content["files"]:
        order, holder = content["orders"][file["order"]], file["holder"]
        groups = [content["groups"][content["group"][t]] for t in order]
        is_rank = holder < content["num_ranks"]
        held = [group["slices"][group["which"][holder]] if is_rank else group for group in groups]
        ends = list(accumulate(one["nbytes"] for one in held))
        starts = [0, *ends[:-1]]
        rows = zip((content["names"][t] for t in order), starts, ends, (one["shape"] for one in held), strict=True)
        yield file, list(rows)


def assert_shown(content: Content, folder: Path) -> set[str]:
    """The tensors of every file are where its header says; returns the names of the files."""
    for file, rows in files_of(content):
        assert {name: (start, end, shape) for name, start, end, shape in rows} == {
            name: (*entry["data_offsets"], entry["shape"]) for name, entry in read_header(folder / file["name"]).items()
        }
        blob = (folder / file["name"]).read_bytes()
        assert (file["start"], file["nbytes"]) == (8 + int.from_bytes(blob[:8], "little"), len(blob))
    return {file["name"] for file in content["files"]}


@pytest.mark.parametrize("layout", ["ranks", "whole"])
def test_every_tensor_is_where_the_header_of_its_file_says(layout: str, llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "out", tp=4, layout=layout, max_part_nbytes="200KB")
    done = relayout.report(tmp_path / "out", tmp_path / "page.html")
    content = content_of(tmp_path / "page.html")
    assert (done.num_ranks, done.is_forecast, done.nbytes) == (4, False, (tmp_path / "page.html").stat().st_size)
    seen = assert_shown(content, tmp_path / "out")
    assert seen == {path.name for path in (tmp_path / "out").iterdir() if path.suffix in (".safetensors", ".slices")}
    assert len(seen) > 5


def test_an_expert_that_a_rank_does_not_hold_is_in_none_of_its_files(tmp_path: Path) -> None:
    source = write_family(FAMILIES["mixtral"], tmp_path / "mixtral")
    relayout.convert(source, tmp_path / "out", tp=2, expert_parallel=True)
    relayout.report(tmp_path / "out", tmp_path / "page.html")
    content = content_of(tmp_path / "page.html")
    assert_shown(content, tmp_path / "out")
    held = [rank["num_tensors"] for rank in content["ranks"]]
    assert held == [len(read_header(tmp_path / "out" / file["name"])) for file in content["files"]]
    assert max(held) < len(content["names"])


def test_digests_are_those_of_the_tables(folder: Path, tmp_path: Path) -> None:
    relayout.report(folder, tmp_path / "page.html")
    content, stored = content_of(tmp_path / "page.html"), embedded(tmp_path / "page.html", "digests")
    store = find_store(folder)
    manifest = read_manifest(store)
    expected = [
        dict(zip(read_table(store, manifest, rank).names, read_digests(store, manifest, rank), strict=True))
        for rank in range(4)
    ]
    rows = [(file["holder"], row[0]) for file, rows in files_of(content) for row in rows]
    assert content["digest_nbytes"] == 16
    assert [stored[at : at + 16].hex() for at in range(0, len(stored), 16)] == [expected[h][name] for h, name in rows]


def test_digests_of_many_slices_are_cut_to_their_first_bytes(folder: Path, tmp_path: Path) -> None:
    relayout.report(folder, tmp_path / "page.html")
    content = content_of(tmp_path / "page.html")
    many = np.random.default_rng(0).bytes(16 * 735_928)
    (tmp_path / "large.html").write_bytes(render(content, many))
    assert content_of(tmp_path / "large.html")["digest_nbytes"] == 8
    assert embedded(tmp_path / "large.html", "digests")[8:16] == many[16:24]
    assert len(render(content, many)) < 15e6


def test_a_forecast_is_what_a_conversion_then_makes(llama: Path, tmp_path: Path) -> None:
    done = relayout.report(llama, tmp_path / "forecast.html", tp=2)
    assert done.is_forecast
    relayout.convert(llama, tmp_path / "out", tp=2)
    relayout.report(tmp_path / "out", tmp_path / "made.html")
    forecast, made = content_of(tmp_path / "forecast.html"), content_of(tmp_path / "made.html")
    for key in ("names", "group", "groups", "orders", "files", "ranks", "shards", "offset", "shard", "whole_nbytes"):
        assert forecast[key] == made[key], key
    assert (made["reads"], forecast["reads"]) == ([1, 1], None)


def test_sums_of_ranks_are_those_of_inspect(llama: Path, tmp_path: Path) -> None:
    relayout.report(llama, tmp_path / "page.html", tp=4)
    content = content_of(tmp_path / "page.html")
    [expected] = [one for one in relayout.inspect(llama).amplification if one.tp == 4]
    assert max(rank["nbytes"] for rank in content["ranks"]) == expected.needed_nbytes
    assert max(rank["by_rows_nbytes"] for rank in content["ranks"]) == expected.row_reader_nbytes
    assert content["whole_nbytes"] == expected.whole_nbytes


def test_the_page_loads_nothing_and_has_the_licenses(folder: Path, tmp_path: Path) -> None:
    relayout.report(folder, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|img|iframe)[^>]* src=|<link|@import|url\(", text)
    assert "Copyright 2010-2023 Mike Bostock" in text
    assert "Permission to use, copy, modify, and/or distribute this software" in text
    assert "{{" not in text.partition("<script type")[0]


def test_a_page_that_cannot_be_written_leaves_the_old_one(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        relayout.report(folder, tmp_path / "none" / "page.html")
    assert caught.value.filename is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["text", "empty", "html", "shard", "config", "link", "dangling", "folder", "fifo"])
def test_only_an_older_page_is_replaced(kind: str, folder: Path, llama: Path, tmp_path: Path) -> None:
    model, page, there = tmp_path / "model", tmp_path / "page.html", tmp_path / "there"
    shutil.copytree(llama, model)
    relayout.report(folder, page)
    target = {
        "shard": next(model.glob("*.safetensors")),
        "config": model / "config.json",
    }.get(kind, there)
    if kind == "text":
        there.write_text("MINE")
    elif kind == "empty":
        there.touch()
    elif kind == "html":  # A page of somebody who writes about ours.
        there.write_text(
            '<!DOCTYPE html>\n<p>&lt;meta name="generator"&gt; <meta name="generator" content="relayout report">'
        )
    elif kind in ("link", "dangling"):
        there.symlink_to(page if kind == "link" else tmp_path / "none")
    elif kind == "folder":
        there.mkdir()
    elif kind == "fifo":
        os.mkfifo(there)
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    with pytest.raises(PlanError, match="exists and is not a relayout report; choose another -o") as caught:
        relayout.report(model, target, tp=2)
    assert (caught.value.path, caught.value.code) == (target, "exists")
    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert {path: (was.st_ino, was.st_size, was.st_mtime_ns) for path, was in before.items()} == {
        path: (now.st_ino, now.st_size, now.st_mtime_ns) for path, now in after.items()
    }


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model/page.html", "inside the checkpoint's"),
        ("link/deeper/page.html", "inside the checkpoint's"),
        ("a.safetensors", "a report cannot be"),
    ],
)
def test_a_new_page_is_no_part_of_a_checkpoint(name: str, says: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "deeper").mkdir()
    (tmp_path / "link").symlink_to("model")
    with pytest.raises(PlanError, match=f"{says}.*; choose another -o"):
        relayout.report(tmp_path / "model", tmp_path / name, tp=2)
    assert not (tmp_path / name).exists()


def test_an_older_page_is_replaced(folder: Path, llama: Path, tmp_path: Path) -> None:
    relayout.report(llama, tmp_path / "page.html", tp=2)
    assert not content_of(tmp_path / "page.html")["converted"]
    relayout.report(folder, tmp_path / "page.html")
    assert content_of(tmp_path / "page.html")["converted"]
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_what_cannot_be_shown_is_refused(folder: Path, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="set --tp N, the number of ranks"):
        relayout.report(llama, tmp_path / "page.html")
    with pytest.raises(PlanError, match="already converted"):
        relayout.report(folder, tmp_path / "page.html", tp=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "num_axes", "kind"),
    [
        ("model.embed_tokens.weight", 2, "embedding, head"),
        ("lm_head.weight", 2, "embedding, head"),
        ("model.layers.*.self_attn.q_proj.weight", 2, "attention in (q, k, v)"),
        ("model.layers.*.self_attn.o_proj.weight", 2, "attention out"),
        ("model.layers.*.mlp.gate_proj.weight", 2, "MLP in (gate, up)"),
        ("model.layers.*.mlp.down_proj.weight", 2, "MLP out (down)"),
        ("model.layers.*.mlp.experts.*.up_proj.weight", 2, "experts in"),
        ("model.layers.*.mlp.experts.*.down_proj.weight", 2, "experts out"),
        ("model.layers.*.mlp.experts.gate_up_proj", 3, "experts in"),
        ("model.layers.*.mlp.experts.*.down_proj.weight_scale_inv", 2, "scales, zeros"),
        ("model.layers.*.mlp.gate.weight", 2, "norms, biases, other"),
        ("model.layers.*.input_layernorm.weight", 1, "norms, biases, other"),
        ("transformer.h.*.attn.c_proj.weight", 2, "attention out"),
        ("transformer.h.*.mlp.c_proj.weight", 2, "MLP out (down)"),
        ("transformer.h.*.attn.c_attn.weight", 2, "attention in (q, k, v)"),
    ],
)
def test_a_kind_is_known_by_its_name(name: str, num_axes: int, kind: str) -> None:
    assert KINDS[kind_of(name, num_axes)] == kind


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser without a network."""
    with browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


def find(chromium: Browser, words: str) -> int:
    """Search, and wait for the number of tensors that are found."""
    chromium.run("document.getElementById('found').textContent = ''")
    event = "dispatchEvent(new Event('input'))"
    chromium.run(f"(s => {{ s.value = {json.dumps(words)}; s.{event} }})(document.getElementById('search'))")
    return int(chromium.wait_for("document.getElementById('found').textContent").split()[0].replace(",", ""))


def shown_bytes(chromium: Browser) -> tuple[int, int]:
    """The first and last byte of a rank that the picture shows."""
    data = chromium.run("({...document.getElementById('files').dataset})")
    return int(data["from"]), int(data["to"])


def details(chromium: Browser) -> dict[str, str]:
    pairs = "[...document.querySelectorAll('#detail > div')].map(one => [...one.children].map(two => two.textContent))"
    return dict(chromium.run(pairs))


def test_a_browser_shows_finds_and_zooms(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    relayout.report(folder, tmp_path / "page.html")
    chromium.open(tmp_path / "page.html")
    assert "Rank 0 of 4 needs" in chromium.run("document.getElementById('answer').textContent")
    colors = chromium.run(
        "(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
        "(document.getElementById('files'))"
    )
    assert colors > 10, "the picture is empty"
    everything = shown_bytes(chromium)
    assert everything[0] == 0

    name = "model.layers.1.mlp.down_proj.weight"
    assert find(chromium, "layers.1. DOWN_proj.weight") == 1
    chromium.run("document.querySelector('.tensor').click()")
    told = details(chromium)
    part = next(file for file in folder.glob("model-rank-0-part-*") if name in read_header(file))
    data_start = 8 + int.from_bytes(part.read_bytes()[:8], "little")
    start, end = (data_start + at for at in read_header(part)[name]["data_offsets"])
    assert told["file"] == part.name
    assert told["place in it"] == f"byte {start:,} to {end:,}"
    assert told["part of the whole"] == "dim 1: 0 to 96 of 384"
    assert told["there it is"] == "128 runs of 192 bytes"
    store = find_store(folder)
    manifest = read_manifest(store)
    row = list(read_table(store, manifest, 0).names).index(name)
    assert told["digest (XXH3-128)"] == read_digests(store, manifest, 0)[row]
    zoomed = shown_bytes(chromium)
    assert zoomed[1] - zoomed[0] < 0.2 * everything[1], "selecting did not zoom"

    chromium.run("document.getElementById('files').focus()")
    chromium.press("ArrowDown")
    assert details(chromium)["holder"] == "rank 1"
    assert chromium.run("document.getElementById('rank').value") == "1"
    chromium.press("ArrowRight")
    assert chromium.run("document.getElementById('selected').textContent") != name
    chromium.press("-")
    assert shown_bytes(chromium)[1] - shown_bytes(chromium)[0] > zoomed[1] - zoomed[0]
    chromium.press("0")
    assert shown_bytes(chromium) == everything

    box = chromium.run("(r => [r.x, r.y, r.width])(document.getElementById('files').getBoundingClientRect())")
    chromium.wheel(box[0] + box[2] / 2, box[1] + 20, -400)
    chromium.wait_for(f"Number(document.getElementById('files').dataset.to) < {everything[1]}")
    chromium.click(box[0] + box[2] / 2, box[1] + 20)
    assert details(chromium)["holder"] == "rank 0"
    assert chromium.messages == []


def test_a_browser_shows_it_dark_and_on_paper(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    relayout.report(folder, tmp_path / "page.html")
    color = "getComputedStyle(document.body).backgroundColor"
    try:
        chromium.emulate(scheme="dark")
        chromium.open(tmp_path / "page.html")
        assert chromium.run(color) == "rgb(20, 23, 27)"
        chromium.emulate(media="print", scheme="dark")
        chromium.run("dispatchEvent(new Event('beforeprint'))")
        assert chromium.run(color) == "rgb(255, 255, 255)"
        assert chromium.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    finally:
        chromium.emulate()
    assert chromium.messages == []


def test_a_telephone_shows_it_without_a_scroll_bar(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    relayout.report(folder, tmp_path / "page.html")
    try:
        chromium.emulate(width=400)
        chromium.open(tmp_path / "page.html")
        assert chromium.run("document.documentElement.scrollWidth") == 400
        columns = "getComputedStyle(document.getElementById('facts')).gridTemplateColumns"
        assert len(chromium.run(columns).split()) == 3, "one above the other they hide the picture"
    finally:
        chromium.emulate()


def test_hostile_names_are_text(chromium: Browser, tmp_path: Path) -> None:
    names = [
        '<img src=x onerror="document.title=1">',
        "</script><script>document.title=2</script>",
        "{{CONTENT}}",
        "${1}",
    ]
    source = tmp_path / "<b>model<&>"
    source.mkdir()
    save_file({name: np.arange(8, dtype=np.uint8) for name in names}, source / "model.safetensors")
    relayout.report(source, tmp_path / "page.html", tp=1)
    chromium.open(tmp_path / "page.html")
    for name in names:
        assert find(chromium, name.split()[0]) == 1
        chromium.run("document.querySelector('.tensor').click()")
        assert chromium.run("document.getElementById('selected').textContent") == name
    assert chromium.run("document.title") == "<b>model<&> · relayout report"
    assert chromium.run("document.querySelectorAll('main b, main img').length") == 0
    assert chromium.messages == []


def test_a_model_of_19_000_tensors_is_small_and_only_seen_rows_exist(chromium: Browser, tmp_path: Path) -> None:
    MODELS["Qwen3-30B-A3B"].write(tmp_path / "model")
    done = relayout.report(tmp_path / "model", tmp_path / "page.html", tp=4)
    assert done.num_tensors == MODELS["Qwen3-30B-A3B"].num_tensors == 18_867
    assert done.nbytes < 3e6
    chromium.open(tmp_path / "page.html")
    assert chromium.run("document.querySelectorAll('.tensor').length") < 60
    assert find(chromium, "layers.4 up_proj.weight") > 1000
    assert chromium.run("document.querySelectorAll('.tensor').length") < 60
    assert find(chromium, "experts.127.up_proj.weight") == 48
    chromium.run("document.getElementById('grid-body').scrollTop = 1e9")
    last = chromium.wait_for("[...document.querySelectorAll('.tensor')].at(-1).ariaRowIndex === '49'")
    assert last
    assert chromium.messages == []


def test_without_a_name_the_page_has_the_checkpoint_s_and_replaces_no_other_one_s(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a", "b"):
        shutil.copytree(folder, tmp_path / place / "model")
    monkeypatch.chdir(tmp_path)
    first = relayout.report("a/model")
    assert first.output == "model-report.html"
    assert relayout.report(tmp_path / "a" / "model").output == first.output
    with pytest.raises(PlanError, match="the page of another checkpoint, or degree; name this one with -o"):
        relayout.report("b/model")
    assert relayout.report("b/model", first.output).output == first.output


def test_digests_that_are_damaged_are_refused_and_no_page_is_written(tmp_path: Path) -> None:
    edit = {"file": "relayout.digests", "at": 3, "drop": 1, "put": {"hex": "00"}}
    (tmp_path / "place").mkdir()
    folder = vector_edits.laid_out({"base": "converted", "edit": [edit]}, tmp_path / "place")
    with pytest.raises(FormatError, match=r"relayout\.digests: its part for relayout\.rank-0\.json\.zst differs"):
        relayout.report(folder, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_browser_shows_the_times_of_bench(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    run = {"seconds": 2.0, "cpu_seconds": 1.0, "nbytes": 10**9}
    hostile = "<img src=x onerror=alert(1)>"
    timings = [{"title": hostile, "family": "x", "runs": [run]}, {"title": "ours", "family": "relayout", "runs": [run]}]
    measured = {"converted": str(folder), "source": None, "verdict": "as fast", "warnings": ["busy"]}
    (tmp_path / "bench.json").write_text(
        json.dumps(measured | {"loads": [{"title": "one rank of 4", "state": "cold", "timings": timings}]})
    )
    relayout.report(folder, tmp_path / "page.html", bench=tmp_path / "bench.json")
    chromium.open(tmp_path / "page.html")
    shown = chromium.run("[...document.querySelectorAll('#loads tbody td')].map(one => one.textContent)")
    assert shown[:3] == ["one rank of 4, cold", hostile, ""]
    assert shown[3:7] == ["2.00", "0.50", "1.00", "1.0x"]
    assert chromium.run("document.getElementById('verdict').textContent") == "as fast"
    try:
        chromium.emulate(width=390)
        assert chromium.run("document.documentElement.scrollWidth") == 390
    finally:
        chromium.emulate()
    relayout.report(folder, tmp_path / "page.html")
    chromium.open(tmp_path / "page.html")
    assert chromium.run("document.getElementById('measured').hidden") is True
