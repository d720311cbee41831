"""The rules of a plan as a JSON object: what a converted checkpoint records, and what is refused of a hostile one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from relayout.errors import FormatError
from relayout.format.fields import parse_object
from relayout.format.manifest import compact_json
from relayout.plans.family import Family, builtin_families, dump_rules, parse_family, parse_rules

WHERE = "record: plan"


def parse(rules: Mapping[str, Any]) -> Family:
    return parse_rules(rules, WHERE, "mine", "file")


def through_json(family: Family) -> Family:
    """The family after it was stored and read again."""
    rules = parse_object(compact_json(dump_rules(family)), WHERE)
    return parse_rules(rules, WHERE, family.name, family.origin)


# There and back.


def test_a_plan_is_recorded_as_a_plan_file_would_say_it() -> None:
    text = """
    model_types = "falcon"
    quantization = ""
    language_prefixes = ["a.", "model.a."]
    transposed = true
    [sizes]
    heads = 4
    dim = ["d", { when = "new", use = "n" }, { when = "kind", is = "x", use = 2 }]
    [cut]
    b = "whole"
    a = { dim = 0, by = "heads*dim" }
    c = { dim = 1, by = ["heads", "dim"], interleaved = "heads" }
    d = { dim = 2, by = "ragged", block = 64 }
    e = { dim = 0, by = "even", whole_unless = "heads", squeeze = true }
    [defaults]
    falcon = { d = 8 }
    [experts]
    each = "e.#"
    """
    rules = dump_rules(parse_family(text, "mine.toml", "mine"))
    assert json.dumps(rules, indent=1) == json.dumps(
        {
            "model_types": ["falcon"],
            "quantization": "",
            "language_prefixes": ["model.a.", "a."],
            "transposed": True,
            "sizes": {
                "heads": [4],
                "dim": ["d", {"when": "new", "is": True, "use": "n"}, {"when": "kind", "is": "x", "use": 2}],
            },
            "defaults": {"falcon": {"d": 8}},
            "cut": {
                "b": "whole",
                "a": {"dim": 0, "by": ["heads * dim"]},
                "c": {"dim": 1, "by": ["heads", "dim"], "interleaved": "heads"},
                "d": {"dim": 2, "by": ["ragged"], "block": 64},
                "e": {"dim": 0, "by": ["even"], "whole_unless": "heads", "squeeze": True},
            },
            "experts": {"each": ["e.#"]},
        },
        indent=1,
    )
    assert dump_rules(parse_family("[cut]\nx = 'whole'", "mine.toml", "mine")) == {"cut": {"x": "whole"}}


def test_every_built_in_plan_survives() -> None:
    """And so does every plan that test_fuzz.py makes."""
    for family in builtin_families():
        found = through_json(family)
        assert found == family
        assert list(found.sizes) == list(family.sizes)


# What is refused of a record, beside what is of a plan file: see vectors/plan.toml.

CUT: dict[str, Any] = {"cut": {"x": "whole"}}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"cut": {}}, r"the plan has no rules, expected a table \[cut\]"),
        ({"cut": None}, "cut: None, expected a table"),
        (CUT | {"extends": "llama"}, "unknown key 'extends', expected cut, defaults, experts, language_prefixes"),
        (CUT | {"experts": {"stacked": ["**a**a**b"]}}, r"invalid pattern '\*\*a\*\*a\*\*b': more than 2 wildcards"),
        (CUT | {"model_types": nested(100)}, "model_types: .*, expected a string or a list of strings"),
        *(
            (CUT | {"sizes": {"h": [source]}}, "sizes.h: .*, expected a key of config.json")
            for source in (
                *(None, 2**53, 10**30, [], {"use": None}, {"use": 2**53}),
                *({"when": "x", "is": 2**53, "use": 1}, {"when": "x", "is": -(2**53), "use": 1}),
                *({"when": "x", "is": 1.0, "use": 1}, {"when": "x", "is": None, "use": 1}),
            )
        ),
        *(
            (CUT | {"defaults": {"m": row}}, "defaults.'m': .*, expected keys of config.json with positive integers")
            for row in (None, 8, [], {"n": 0}, {"n": True}, {"n": "8"}, {"n": 2**53})
        ),
        *(
            ({"cut": {"x": rule}}, "cut 'x': .*, expected \"whole\" or { dim = N, by = UNIT }")
            for rule in (None, {"dim": 2**53, "by": "even"}, {"dim": 0, "by": {}}, {"dim": 0, "by": nested(100)})
        ),
        ({"cut": {"x": {"dim": 0, "by": ["ragged"], "block": 2**53}}}, "cut 'x': .*: block must be a positive integer"),
        ({"cut": {"{a,aa}" * 20: "whole"}}, "invalid pattern .*: more than 64 ways"),
        ({"cut": {"a" * 513: "whole"}}, "invalid pattern .*: more than 512 characters"),
        ({"cut": {f"{n}": "whole" for n in range(4097)}}, "4097 patterns, limit 4096"),
    ],
)
def test_rules_that_are_no_plan_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=f"^{WHERE}: {message}") as caught:
        parse(rules)
    assert len(str(caught.value)) < 1000
    assert caught.value.code in ("field", "limit")


def test_the_largest_plan_that_a_file_can_hold_can_be_recorded() -> None:
    """Section 10 of FORMAT.md has the limit of plan files, the reader of records one of 2**20 bytes."""
    text = "extends = 'llama'\n[sizes]\n" + "".join(f"{n:x}=1\n" for n in range(37_000))
    assert 2**18 - 2**15 < len(text) < 2**18
    family = parse_family(text, "mine.toml", "mine")
    assert len(compact_json(dump_rules(family))) < 2**19
    assert through_json(family) == family
