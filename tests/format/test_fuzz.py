"""A short run of `tools/run fuzz` on every parser: all vectors, and some that are made from them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import fuzz
import fuzzing
import pytest
import typer
from fuzzing import TARGETS
from support.tools import PYTHONPATH

MUTATIONS = 100


@pytest.mark.parametrize("parser", TARGETS)
def test_anything_parses_or_is_refused(parser: str) -> None:
    target = TARGETS[parser]
    seeds = target.seeds()
    assert len(seeds) >= 10
    for seed in seeds:
        target.run(seed)
    rng = random.Random(0)
    for _ in range(MUTATIONS):
        data = rng.choice(seeds if rng.random() < 0.5 else seeds[:1])  # The first is the good one.
        for _ in range(rng.choice([1, 1, 2, 4])):
            data = target.mutate(data, rng)
        target.run(data)


CARELESS = {
    "header": ("parse_header", lambda blob, nbytes, where: json.loads(blob[8:])),
    "index": ("parse_index", lambda blob, where: json.loads(blob)["weight_map"]),
    "config": ("parse_config", lambda blob, where: json.loads(blob)),
    "manifest": ("parse_manifest", lambda blob, where: json.loads(blob)),
    **dict.fromkeys(
        ("table", "table_beside_whole", "whole"),
        ("parse_table", lambda blob, manifest, rank, where: json.loads(blob)),
    ),
    "record": ("parse_record", lambda text, ranks, where: json.loads(text)),
    "delta": ("parse_delta", lambda blob, where: json.loads(blob)),
    "delta_index": ("parse_delta_index", lambda blob, stored, file, chunk_nbytes: json.loads(blob)),
    "changed_digests": ("parse_changed_digests", lambda blob, part, count: json.loads(blob)),
    "change": ("xor_into", lambda encoded, target: None),
    "plan": ("parse_family", lambda text, where, name: json.loads(text)),
}


@pytest.mark.parametrize("parser", TARGETS)
def test_a_careless_parser_would_be_found(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, *CARELESS[parser])
    found = 0
    for seed in TARGETS[parser].seeds():
        try:
            TARGETS[parser].run(seed)
        except Exception:
            found += 1
    assert found


def test_a_mutation_changes_what_a_parser_sees_and_is_the_same_each_time() -> None:
    for target in TARGETS.values():
        seed = target.seeds()[0]
        made = [target.mutate(seed, random.Random(number)) for number in range(50)]
        assert made == [target.mutate(seed, random.Random(number)) for number in range(50)]
        assert len(set(made)) > 25


def test_the_command_tells_how_much_it_tried_and_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "plan" / "findings").mkdir(parents=True)
    (tmp_path / "plan" / "findings" / "AssertionError-7").write_bytes(b"{}")
    for parser, code, findings in (("index", 0, []), ("plan", 1, ["AssertionError-7"])):
        with pytest.raises(typer.Exit) as end:
            fuzz.main([parser], 0.2, "own", tmp_path)
        assert end.value.exit_code == code
        told = json.loads(capsys.readouterr().out)
        assert (told["parser"], told["findings"]) == (parser, findings)
        assert told["inputs"] > 1
