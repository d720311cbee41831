"""relayout.plans.family: the plan language, what is refused of it, and the plans that come with relayout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.planning import make_source

from relayout.core.slices import Slice
from relayout.errors import FormatError, PlanError
from relayout.plans import family as families
from relayout.plans.family import (
    Family,
    Rule,
    SizeSource,
    builtin_families,
    builtin_text,
    dump_rules,
    find_family,
    parse_family,
    parse_rules,
    read_family,
)
from relayout.plans.planner import plan_by, plan_for


def parse(text: str) -> Family:
    return parse_family(text, "mine.toml", "mine")


# What a plan file says.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"whole"', Rule("x", None)),
        ('{ dim = 0, by = "heads" }', Rule("x", 0, ("heads",))),
        ('{ dim = 1, by = "even" }', Rule("x", 1, ("even",))),
        ('{ dim = 2, by = "kv_heads" }', Rule("x", 2, ("kv_heads",))),
        ('{ dim = 0, by = "vocabulary" }', Rule("x", 0, ("vocabulary",))),
        ('{ dim = 0, by = ["heads"] }', Rule("x", 0, ("heads",))),
        ('{ dim = 0, by = ["heads", "kv_heads", "kv_heads"] }', Rule("x", 0, ("heads", "kv_heads", "kv_heads"))),
        ('{ dim = 1, by = ["even", "even"] }', Rule("x", 1, ("even", "even"))),
        (
            '{ dim = 1, by = "even", or = "whole" }',
            Rule("x", 1, ("even",), or_whole=True),
        ),
        (
            '{ dim = 0, by = ["heads", "kv_heads"], interleaved = "kv_heads" }',
            Rule("x", 0, ("heads", "kv_heads"), interleaved="kv_heads"),
        ),
        ('{ dim = 1, by = "ragged" }', Rule("x", 1, ("ragged",))),
        ('{ dim = 1, by = "ragged", block = 64 }', Rule("x", 1, ("ragged",), block=64)),
        ('{ dim = 0, by = "heads", squeeze = true }', Rule("x", 0, ("heads",), is_squeezed=True)),
        ('{ dim = 0, by = "even", whole_unless = "heads" }', Rule("x", 0, ("even",), whole_unless="heads")),
        ('{ dim = 0, by = "heads * dim" }', Rule("x", 0, ("heads",), ("dim",))),
        ('{ dim = 0, by = ["heads*dim", "kv_heads * dim"] }', Rule("x", 0, ("heads", "kv_heads"), ("dim", "dim"))),
        ('{ dim = 0, by = "vocabulary", table = true }', Rule("x", 0, ("vocabulary",), is_table=True)),
    ],
)
def test_cuts(value: str, expected: Rule) -> None:
    sizes = '[sizes]\nheads = "n_head"\nkv_heads = "n_kv"\ndim = "d"\n'
    assert parse(f"{sizes}[cut]\nx = {value}").rules == (expected,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"n_head"', [SizeSource("n_head")]),
        ("12", [SizeSource(12)]),
        ('["n_head", "num_heads", 1]', [SizeSource("n_head"), SizeSource("num_heads"), SizeSource(1)]),
        ('{ when = "multi_query", use = 1 }', [SizeSource(1, "multi_query", True)]),
        ('[{ when = "new", use = "n" }, "m"]', [SizeSource("n", "new", True), SizeSource("m")]),
        ('{ when = "model_type", is = "mistral", use = 8 }', [SizeSource(8, "model_type", "mistral")]),
        ('{ when = "version", is = 2, use = 8 }', [SizeSource(8, "version", 2)]),
        ('{ when = "new", is = false, use = "n" }', [SizeSource("n", "new", False)]),
        ('{ use = "n" }', [SizeSource("n")]),
    ],
)
def test_sizes(value: str, expected: list[SizeSource]) -> None:
    family = parse(f"[sizes]\nheads = {value}\n[cut]\nx = 'whole'")
    assert family.sizes == {"heads": tuple(expected)}


def test_a_whole_plan_file() -> None:
    family = parse(
        """
        model_types = ["falcon", "RefinedWeb"]
        quantization = "mxfp4"
        language_prefixes = ["a.", "model.a.", "b.c."]
        [sizes]
        experts = "num_experts"
        [cut]
        "x" = "whole"
        "y.*" = { dim = 0, by = "even" }
        [experts]
        each = "y.#.w"
        stacked = ["z.{up,down}", "s"]
        """
    )
    assert family == Family(
        "mine",
        "file",
        model_types=("falcon", "RefinedWeb"),
        quantization="mxfp4",
        prefixes=("model.a.", "b.c.", "a."),  # The longest first.
        sizes={"experts": (SizeSource("num_experts"),)},
        rules=(Rule("x", None), Rule("y.*", 0, ("even",))),
        experts_each=("y.#.w",),
        experts_stacked=("z.{up,down}", "s"),
    )
    assert parse('model_types = "one"\n[cut]\nx = "whole"').model_types == ("one",)


LAYERED = """
[layers]
full = { key = "layer_types", is = "full" }
local = { key = "local_ids" }
[sizes]
kv_heads = "n_kv"
full_kv_heads = ["other.n_kv", "each.*.n_kv", "n_kv"]
full_head_dim = "full_dim"
[cut]
"l.<full>.k" = { dim = 0, by = "full_kv_heads" }
"l.<local>.k" = "whole"
"l.*.k" = { dim = 0, by = "kv_heads" }
[experts]
each = "l.<full>.e.#"
stacked = "l.<local>.s"
"""


def test_a_set_of_layers_becomes_the_numbers_that_config_json_has() -> None:
    family = parse(LAYERED)
    types = ["other", "full"] * 6
    resolved = family.resolved({"text_config": {"layer_types": types, "local_ids": [4, 0, 12345, -1, True, "2"]}})
    assert [rule.pattern for rule in resolved.rules] == ["l.{1,3,5,7,9}.k", "l.{11}.k", "l.{0,4}.k", "l.*.k"]
    assert resolved.experts_each == ("l.{1,3,5,7,9}.e.#", "l.{11}.e.#")
    assert (resolved.expert("l.11.e.7"), resolved.expert("l.1.e.7"), resolved.expert("l.0.e.7")) == (7, 7, None)
    assert resolved.experts_stacked == ("l.{0,4}.s",)
    assert not resolved.layers
    assert parse_rules(dump_rules(resolved), "record", "mine", "file") == resolved.resolved({}) == resolved
    # Without the lists no layer is told apart; with the same layers twice, the first rule counts.
    assert [rule.pattern for rule in family.resolved({}).rules] == ["l.*.k"]
    twice = family.resolved({"layer_types": ["full"], "local_ids": [0]})
    assert [rule.units for rule in twice.rules] == [("full_kv_heads",), ("kv_heads",)]


def test_many_layers_are_several_patterns_and_too_many_are_refused() -> None:
    family = parse(LAYERED)
    resolved = family.resolved({"local_ids": list(range(250))})
    assert {resolved.rule(f"l.{layer}.k") for layer in range(250)} <= set(resolved.rules[:-1])
    assert resolved.rule("l.250.k") == resolved.rules[-1]
    parse_rules(dump_rules(resolved), "record", "mine", "file")  # No pattern is slow.
    several = "\n".join(f'"{n}.<local>" = "whole"' for n in range(20))
    many = parse(LAYERED.replace('"l.<local>.k" = "whole"', several))
    with pytest.raises(PlanError, match=r"^\d+ patterns for the layers of config.json, limit 4096"):
        many.resolved({"local_ids": list(range(10_000))})


def test_a_path_in_config_json_becomes_the_number_there() -> None:
    family = parse(LAYERED)

    def sources(config: dict[str, Any]) -> list[object]:
        return [source.use for source in family.resolved(config).sizes["full_kv_heads"]]

    assert sources({"each": {"5": {"d": 8}, "11": {"n_kv": 2}}, "n_kv": 16}) == [2, "n_kv"]
    assert sources({"text_config": {"other": {"n_kv": 4}}, "other": {"n_kv": 8}}) == [4, "n_kv"]
    for no_number in ({}, {"other": {"n_kv": "4"}}, {"other": {"n_kv": 0}}, {"other": [4]}, {"each": {}}):
        assert sources(no_number) == ["n_kv"]


def test_layers_with_heads_of_their_own_share_and_check_these() -> None:
    config = {"layer_types": ["full", "other"], "n_kv": 4, "other": {"n_kv": 2}, "full_dim": 8}
    plan = plan_by(make_source({"l.0.k": (16, 1), "l.1.k": (16, 1)}, **config), 8, parse(LAYERED))
    assert [plan.cut(0).slices[rank].ranges for rank in (0, 3, 4)] == [((0, 8),), ((0, 8),), ((8, 8),)]
    assert [plan.cut(1).slices[rank].ranges for rank in (0, 3, 4)] == [((0, 4),), ((4, 4),), ((8, 4),)]
    with pytest.raises(PlanError, match=r"'l.0.k': .* 32 elements, but config.json declares 2 heads of 8 elements"):
        plan_by(make_source({"l.0.k": (32, 1)}, **config), 2, parse(LAYERED))


def test_the_first_rule_that_matches_counts() -> None:
    family = parse('[cut]\n"a.*" = "whole"\n"a.b" = { dim = 0, by = "even" }\n"**" = { dim = 1, by = "even" }')
    assert [family.rule(name) for name in ("a.b", "a.b.c")] == [Rule("a.*", None), Rule("**", 1, ("even",))]
    assert parse('[cut]\n"a" = "whole"').rule("b") is None


def test_a_prefix_of_the_language_part_is_taken_off_names_that_no_rule_matches() -> None:
    family = parse(
        """
        language_prefixes = ["lm.", "model.lm.", "lm.lm."]
        [cut]
        "lm.own" = "whole"
        "{own,a}" = { dim = 0, by = "even" }
        "lm.twice" = { dim = 1, by = "even" }
        [experts]
        each = "e.#"
        stacked = "s"
        """
    )
    rows, columns = Rule("{own,a}", 0, ("even",)), Rule("lm.twice", 1, ("even",))
    names = {
        "a": rows, "lm.a": rows, "model.lm.a": rows, "lm.lm.a": rows, "own": rows,
        "lm.own": Rule("lm.own", None),  # As it is named, before the prefix is taken off.
        "model.a": None, "a.lm.a": None, "lm.b": None, "b": None, "lma": None,
        "lm.lm.lm.a": None,  # One is taken off, the longest.
        "model.lm.lm.twice": columns,
        "lm.lm.twice": None,  # Of the two that fit only the longest counts.
    }  # fmt: skip
    assert {name: family.rule(name) for name in names} == names
    assert [family.expert(name) for name in ("e.7", "lm.e.12", "model.e.7", "e.x", "s")] == [7, 12, None, None, None]
    assert [family.stacks_experts(name) for name in ("s", "model.lm.s", "model.s", "e.7")] == [True, True, False, False]


# Plans that extend others.

Builtin = Callable[..., None]


@pytest.fixture
def builtin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Builtin]:
    """Puts other texts in the place of the plans that come with relayout."""

    def put(**texts: str) -> None:
        monkeypatch.setattr(families, "_builtin_texts", lambda: texts)
        families._builtin.cache_clear()

    yield put
    families._builtin.cache_clear()


BASE = """
model_types = ["base"]
quantization = "fp8"
language_prefixes = ["lm."]
[sizes]
heads = "n_head"
experts = "n_expert"
[cut]
"a" = { dim = 0, by = "heads" }
"b" = { dim = 0, by = "even" }
"**" = "whole"
[experts]
each = "e.#"
stacked = "s"
"""


def test_an_extended_plan_follows_after_the_files_own(builtin: Builtin) -> None:
    builtin(base=BASE)
    family = parse(
        'extends = "base"\n[sizes]\nheads = 4\nmore = 2\n[cut]\n"c" = "whole"\n"b" = { dim = 1, by = "more" }'
    )
    assert family == Family(
        "mine",
        "file",
        prefixes=("lm.",),
        sizes={"heads": (SizeSource(4),), "experts": (SizeSource("n_expert"),), "more": (SizeSource(2),)},
        rules=(Rule("c", None), Rule("b", 1, ("more",)), Rule("a", 0, ("heads",)), Rule("**", None)),
        experts_each=("e.#",),
        experts_stacked=("s",),
    )


def test_the_language_models_row_of_defaults_counts_for_keys_that_config_json_does_not_have(builtin: Builtin) -> None:
    builtin(base=BASE + "[defaults]\nb = { n = 2 }\na = { n = 3 }")
    family = parse('extends = "base"\n[defaults]\na = { n = 4, m = 8 }\nwrapper = { n = 5 }')
    assert family.defaults == {"a": {"n": 4, "m": 8}, "b": {"n": 2}, "wrapper": {"n": 5}}
    for config, expected in (
        ({"model_type": "a"}, {"n": 4, "m": 8}),
        ({"model_type": "a", "n": None}, {"m": 8}),  # Null is no key that was left out.
        ({"model_type": "wrapper", "text_config": {"model_type": "b"}}, {"n": 2}),
        ({"model_type": "wrapper", "text_config": {"model_type": "b"}, "n": 7}, {}),
        ({"model_type": "wrapper", "text_config": {"n": 1, "model_type": "a"}}, {"m": 8}),
        ({"model_type": "wrapper", "text_config": {"m": 1}}, {"n": 5}),
        ({"model_type": "wrapper", "text_config": {"model_type": "other"}}, {}),
        ({"model_type": ["a"]}, {}),
        ({}, {}),
    ):
        assert family.defaults_of(config) == expected, config
        resolved = family.resolved(config)
        assert resolved.defaults_of(config) == expected
        assert sum(map(len, resolved.defaults.values())) == len(expected)


def test_a_plan_that_extends_another_may_have_no_rules_of_its_own(builtin: Builtin) -> None:
    builtin(base=BASE)
    family = parse('extends = "base"\nlanguage_prefixes = ["x."]\n[experts]\neach = "f.#"')
    assert [rule.pattern for rule in family.rules] == ["a", "b", "**"]
    assert (family.prefixes, family.experts_each, family.experts_stacked) == (("x.",), ("f.#",), ("s",))
    assert parse('extends = "base"\n[experts]\nstacked = ["t"]').experts_stacked == ("t",)


def test_plans_extend_plans_that_extend_plans(builtin: Builtin) -> None:
    builtin(base=BASE, middle='extends = "base"\n[cut]\n"b" = "whole"\n"m" = "whole"')
    family = parse('extends = "middle"\n[cut]\n"m" = { dim = 0, by = "heads" }')
    assert family.rules == (Rule("m", 0, ("heads",)), Rule("b", None), Rule("a", 0, ("heads",)), Rule("**", None))


def test_plans_that_extend_each_other_are_refused(builtin: Builtin) -> None:
    texts = {name: f'extends = "{base}"\n[cut]\n"x" = "whole"' for name, base in zip("abcd", "bcad", strict=True)}
    builtin(**texts)
    for name, message in {
        "a": "c.toml: extends 'a', which extends this plan",
        "d": "d.toml: extends 'd', which ext",
    }.items():
        with pytest.raises(FormatError, match=f"^{message}"):
            parse(f'extends = "{name}"')


def test_a_file_may_have_the_name_of_the_plan_that_it_extends(tmp_path: Path) -> None:
    for name in ("llama.toml", "llama"):
        (tmp_path / name).write_text('extends = "llama"\n[cut]\n"x" = "whole"')
        assert read_family(tmp_path / name).rules[0] == Rule("x", None)
        assert len(read_family(tmp_path / name).rules) == 1 + len(find_family("llama").rules)


@pytest.mark.parametrize("plan", ["llama", "builtin:llama"])
def test_a_built_in_plan_is_used_by_its_name(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()  # A checkpoint's folder, say.
    source = make_source({"lm_head.weight": (128, 64)}, model_type="unheard")
    found = plan_for(source, 2, Path(plan))
    assert found.name == "builtin:llama"
    assert found.cut(0).slices == (Slice.along(0, ((0, 64),)), Slice.along(0, ((64, 64),)))


def test_a_file_with_the_name_of_a_built_in_plan_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").write_text('[cut]\n"**" = "whole"\n')
    source = make_source({"lm_head.weight": (128, 64)}, model_type="unheard")
    assert plan_for(source, 2, Path("llama")).cut(0).is_whole
    assert not plan_for(source, 2, Path("builtin:llama")).cut(0).is_whole


# What is no plan file, beside vectors/plan.toml.

NO_CUT = 'expected "whole" or { dim = N, by = UNIT }'
NO_PARTS = "parts must be either all 'even' or all names of sizes"
NO_WIDTHS = r"UNIT \* WIDTH needs names of sizes, and excludes interleaved"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sizes]\nheads = ['n', 0]\n[cut]\nx = 'whole'", "sizes.heads: .* expected a key of config.json"),
        ("[sizes]\nragged = 'n'\n[cut]\nx = 'whole'", "sizes.ragged: the name is reserved for a unit"),
        *(
            (f"[cut]\nx = {value}", f"cut 'x': .* {NO_CUT}")
            for value in ("{ rows = 'even' }", "{ dim = 0, by = [1] }", "{ dim = '0', by = 'even' }", "{ by = 'even' }")
        ),
        ("[cut]\nx = { dim = 0, by = 'even', rows = 'even' }", "cut 'x': .*: unknown key 'rows'"),
        ("[sizes]\nheads = 'n'\n[cut]\nx = { dim = 0, by = 'heads * dim' }", "cut 'x': unit 'dim', expected"),
        ("[sizes]\nheads = 'n'\n[cut]\nx = { dim = 0, by = 'heads *' }", "cut 'x': unit '', expected"),
        ("[sizes]\nk = 'n'\n[cut]\nx = { dim = 0, by = ['k', 'k'], interleaved = 'h' }", "cut 'x': unit 'h', exp"),
        # An axis has no number of `even` groups, nor are they any number of elements wide.
        ("[sizes]\nheads = 'n'\n[cut]\nx = { dim = 0, by = ['heads', 'heads'], interleaved = 'even' }", "cut 'x': "),
        ("[sizes]\nheads = 'n'\n[cut]\nx = { dim = 0, by = 'heads * even' }", "cut 'x': "),
        *(
            (
                f"[layers]\n{layers}\n[cut]\nx = 'whole'",
                "layers.'?a.*: .*, expected a name with { key = KEY, is = VALUE }",
            )
            for layers in (
                "a = 'k'",
                "a = { is = 1 }",
                "a = { key = 1 }",
                "a = { key = 'k', is = [1] }",
                "'a b' = { key = 'k' }",
            )
        ),
        ("[cut]\n'x.<a>' = 'whole'", "invalid pattern 'x.<a>': expected no set of layers in <>"),
        (
            "[layers]\na = { key = 'k' }\n[cut]\n'<a>.<a>' = 'whole'",
            "invalid pattern '<a>.<a>': expected one of a in <>",
        ),
        ("[layers]\na = { key = 'k' }\n[cut]\n'<b>' = 'whole'", "invalid pattern '<b>': expected one of a in <>"),
        ("[cut]\nx = { dim = 0, by = 'even', or = 'none' }", "cut 'x': .*: or must be \"whole\""),
        (
            "[cut]\nx = { dim = 0, by = 'even', squeeze = 1 }",
            "cut 'x': .*: whole_unless must be the name of a size, and sq",
        ),
        (
            "[cut]\nx = { dim = 0, by = 'even', whole_unless = 2 }",
            "cut 'x': .*: whole_unless must be the name of a size",
        ),
        ("[cut]\nx = { dim = 0, by = 'even', whole_unless = 'heads' }", "cut 'x': unit 'heads', expected"),
        ("[cut]\nx = { dim = 0, by = ['even', 'even'], interleaved = 2 }", "cut 'x': .*: interleaved must be the name"),
        ("[cut]\nx = { dim = 0, by = 'ragged', block = true }", "cut 'x': .*: block must be a positive integer"),
        ("[sizes]\nheads = 'n'\n[cut]\nx = { dim = 0, by = ['heads', 'even'] }", f"cut 'x': .*: {NO_PARTS}"),
        ("[sizes]\nh = 'n'\n[cut]\nx = { dim = 0, by = ['h * h', 'h'] }", "cut .*: either all parts or no part"),
        ("[sizes]\nh = 'n'\n[cut]\nx = { dim = 0, by = 'even * h' }", f"cut .*: {NO_WIDTHS}"),
        *(
            (f"[sizes]\nh = 'n'\n[cut]\nx = {{ {cut} }}", "cut 'x': .*: table must be true or false, and needs dim 0")
            for cut in (
                "dim = 0, by = 'even', table = 1",
                "dim = 1, by = 'even', table = true",
                "dim = 0, by = ['even', 'even'], table = true",
                "dim = 0, by = 'h * h', table = true",
                "dim = 0, by = 'even', squeeze = true, table = true",
            )
        ),
        (
            "[cut]\n'x.#.#' = { dim = 0, by = 'even', table = true }",
            "cut 'x.#.#': .*: a table has at most one '#' in its pattern",
        ),
        ("[cut]\nx = { dim = 0, by = 'hash_columns' }", "cut 'x': unit '\\w+', expected "),
        (
            "[sizes]\nh = 'n'\n[cut]\nx = { dim = 0, by = ['h * h', 'h * h'], interleaved = 'h' }",
            f"cut 'x': .*: {NO_WIDTHS}",
        ),
    ],
)
def test_a_bad_rule_or_size_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(FormatError, match=f"mine.toml: {message.replace('|', '[|]')}") as caught:
        plan_for(make_source({"x": (2, 2)}), 2, path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_plan_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot be read: |not a regular file"):
        plan_for(make_source({"x": (2, 2)}), 2, tmp_path / name)


def test_a_plan_file_is_at_most_256_kib(tmp_path: Path) -> None:
    text = "[cut]\nx = 'whole'\n#"
    (tmp_path / "mine.toml").write_text(text + " " * (2**18 - len(text)))
    assert read_family(tmp_path / "mine.toml").rules == (Rule("x", None),)
    (tmp_path / "mine.toml").write_text(text + " " * (2**18 - len(text) + 1))
    with pytest.raises(FormatError, match=r"mine.toml: "):
        read_family(tmp_path / "mine.toml")


# The plans that come with relayout.


def test_each_model_type_is_in_just_one_built_in_plan_for_each_quantization() -> None:
    found = Counter((kind, family.quantization) for family in builtin_families() for kind in family.model_types)
    assert set(found.values()) == {1}
    types = {kind for kind, _ in found}
    assert types >= {
        "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2",
        "gpt_neox", "falcon", "bloom", "opt", "gpt_oss", "llama4", "qwen2_5_vl", "llava", "mistral3", "starcoder2",
    }  # fmt: skip


def test_each_built_in_plan_is_found_by_each_of_its_model_types() -> None:
    for family in builtin_families():
        for model_type in family.model_types:
            assert find_family(model_type, family.quantization) == family


def test_to_find_a_plan_only_few_are_parsed() -> None:
    families._builtin.cache_clear()
    find_family("mixtral")
    assert families._builtin.cache_info().currsize <= 2  # It, and what it extends.


@pytest.mark.parametrize(
    ("model_type", "quantization"), [("rwkv", None), ("rwkv", "mxfp4"), ("", None), ("Llama", None)]
)
def test_a_model_type_without_a_plan_is_named(model_type: str, quantization: str | None) -> None:
    message = f"^no built-in plan for model type '{model_type}'$"
    with pytest.raises(PlanError, match=message):
        find_family(model_type, quantization)


def test_a_plan_for_one_quantization_is_not_for_others(builtin: Builtin) -> None:
    builtin(base=BASE)
    assert find_family("base", "fp8").name == "base"
    for quantization in (None, "awq"):
        with pytest.raises(PlanError, match="no built-in plan for model type 'base'"):
            find_family("base", quantization)


@pytest.mark.parametrize("family", builtin_families(), ids=lambda family: str(family.name))
def test_a_built_in_plan_can_be_printed_and_given_as_a_file(family: Family, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(builtin_text(family.name))
    assert read_family(path) == replace(family, name="mine.toml", origin="file")
    assert family.model_types
    with pytest.raises(PlanError, match=r"tensor 'strange': no rule of plan 'file:mine.toml' matches it: "):
        plan_for(make_source({"strange": (8, 8)}, model_type=family.model_types[0]), 2, path)


def test_a_built_in_plan_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(PlanError, match=r"^no built-in plan 'lama'; did you mean 'llama'\?"):
        builtin_text("lama")
    with pytest.raises(PlanError, match=r"^no built-in plan 'lama'; did you mean 'llama'\?"):
        read_family(Path("lama"))


def test_no_built_in_plan_tells_layers_apart() -> None:
    """Which would make planning slow for all layers."""
    assert [family.name for family in builtin_families() if family.depends_on_numbers] == []
    layered = [family for family in builtin_families() if family.layers]
    assert "gemma4" in [family.name for family in layered]
    for family in layered:
        lists = {one.key: [0 if one.equals is None else one.equals] for one in family.layers.values()}
        resolved = family.resolved(lists)
        assert resolved.depends_on_numbers
        assert not resolved.depends_on_later_numbers, family.name


# Cuts that may be whole.


def test_a_cut_may_be_whole_where_ranks_cannot_divide_it() -> None:
    family = parse('[cut]\nx = { dim = 0, by = ["even", "even"], or = "whole" }\ny = { dim = 0, by = "even" }')
    source = make_source({"x": (12, 4), "y": (8, 4)})
    assert plan_by(source, 2, family).cut(0).slices[1] == Slice.along(0, ((3, 3), (9, 3)))
    assert plan_by(source, 4, family).cut(0).is_whole
    assert parse_rules(dump_rules(family), "record", "mine", "file") == family
    with pytest.raises(PlanError, match=r"'y': .*8 elements, not a multiple of 3"):
        plan_by(source, 3, family)
    with pytest.raises(PlanError, match=r"'x': .*the dimension does not exist"):
        plan_by(make_source({"x": (), "y": (8, 4)}), 2, family)


def test_a_quantized_weight_is_held_whole_where_a_cut_may_be() -> None:
    family = parse('[cut]\n"{m,n}.weight" = { dim = 0, by = "even", or = "whole" }\n"{m,n}.bias" = "whole"')
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = {"m.weight": (384, 128), "m.weight_scale_inv": (3, 1), "m.bias": (384,)}
    source = make_source({**stored, "n.weight": (384, 128)}, quantization_config=quantization)
    for degree in (2, 3):  # Inside a block of scales, and at its border.
        plan = plan_by(source, degree, family)
        cuts = {tensor.name: plan.cut(t).is_whole for t, tensor in enumerate(source.tensors)}
        assert cuts == {**dict.fromkeys(stored, True), "n.weight": False}
