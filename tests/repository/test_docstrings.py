"""Everything public says what it does, has an example that runs, and is shown by `help` and `repr`."""

from __future__ import annotations

import ast
import doctest
import inspect
import pydoc
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.signing import make_keys
from support.training import next_step

import relayout

FUNCTIONS = [name for name in relayout.__all__ if inspect.isroutine(getattr(relayout, name))]
NOT_RUN = {"plan_bench"}
"""It would measure for a minute; its own tests run it."""


@pytest.fixture
def with_llama(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoints that the examples name."""
    (tmp_path / "llama-3.1-8b").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    relayout.convert("llama-3.1-8b", tp=8)
    return tmp_path


def examples(name: str) -> list[doctest.DocTest]:
    """The examples in the docstring of a public object, not of its methods."""
    found = doctest.DocTestFinder(recurse=False).find(getattr(relayout, name), name)
    return [one for one in found if one.examples]


def test_the_examples_of_docstrings_are_right(with_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("step-1").symlink_to("llama-3.1-8b-tp8")
    relayout.convert(next_step(Path("llama-3.1-8b"), Path("llama-3.1-8b-trained"), 2), "step-2", tp=8)
    relayout.delta("step-1", "step-2", "step-1-to-2")
    make_keys(Path(), "release")
    runner = doctest.DocTestRunner()
    count = 0
    for name in relayout.__all__:
        for one in examples(name):
            before = capsys.readouterr()
            result = runner.run(one, clear_globs=True)
            assert result.failed == 0, f"{name}: {capsys.readouterr().out}{before.err}"
            count += result.attempted
    assert count > 30


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, "CheckpointView", "TensorSlice", "HeldSlice"} - NOT_RUN))
def test_a_public_function_has_an_example(name: str) -> None:
    assert examples(name), name


def told(function: Any) -> set[str]:
    """The arguments that a docstring explains, with those of the function that it refers to for its options."""
    text = str(inspect.getdoc(function))
    names = {name.strip() for names in re.findall(r"^ *([\w, ]+):", text, re.MULTILINE) for name in names.split(",")}
    if others := re.search(r"^ *options: (?:all others )?as for `(\w+)`", text, re.MULTILINE):
        names |= told(getattr(relayout, others[1]))
    return names


@pytest.mark.parametrize("name", relayout.__all__)
def test_everything_public_has_a_docstring_with_its_arguments(name: str) -> None:
    found = getattr(relayout, name)
    assert inspect.getdoc(found)
    if name in FUNCTIONS:
        assert set(inspect.signature(found).parameters) <= told(found) | {"framework", "path", "device"}, name
        assert name in pydoc.plain(pydoc.render_doc(found)).splitlines()[0]


def test_a_wrong_argument_is_what_python_calls_a_value_error() -> None:
    with pytest.raises(ValueError, match="align"):
        relayout.plan_conversion("llama-3.1-8b", align=3)


FRAGMENT = re.compile(
    r"\s*(Of|That|Those|They|As|By|From|To|At|In (which|the|place|front)|Such|None|Not|Or|And|See|Whose|The same)\b"
)
"""How a docstring begins that says something only together with the line above it, or with another docstring."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Every docstring of a file, also those of attributes and constants, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def product_files() -> list[Path]:
    """The files of the packages."""
    package = Path(relayout.__file__).parent
    files = [path for folder in (package, package.parent / "loader") for path in folder.rglob("*.py")]
    return [path for path in files if not path.is_relative_to(package / "loader")]


def test_a_docstring_can_be_understood_alone() -> None:
    files = [*product_files(), *(Path(relayout.__file__).parents[1] / "tools" / "examples").glob("*.py")]
    found = [(path, *one) for path in files for one in docstrings(path)]
    assert len(found) > 2000
    fragments = [f"{path}:{line}: {text.strip()[:60]}" for path, line, text in found if FRAGMENT.match(text)]
    assert fragments == []


def test_the_help_of_the_package_leads_to_every_function() -> None:
    text = str(relayout.__doc__)
    assert [name for name in FUNCTIONS if not re.search(rf"^ {{4,8}}.*\b{name}\b", text, re.MULTILINE)] == []


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    assert sorted(dir(relayout)) == sorted([*relayout.__all__, "__version__", "__doc__"])


def test_a_result_is_shown_in_a_few_lines(with_llama: Path) -> None:
    found = repr(relayout.inspect("llama-3.1-8b-tp8"))
    assert found.startswith("Inspection(path='llama-3.1-8b-tp8', converted=True, model_type='llama', num_files=8, ")
    assert "present=(0, 1, 2, ...)" in found
    assert "groups=(TensorGroup(pattern='" in found
    assert len(found) < 2000 < len(str(relayout.inspect("llama-3.1-8b-tp8").as_json()))


def test_objects_say_what_they_are(with_llama: Path) -> None:
    assert repr(relayout.plan_conversion("llama-3.1-8b", tp=4)).startswith("<Conversion 'llama-3.1-8b' to ")
    with relayout.safe_open("llama-3.1-8b-tp8") as whole:
        assert repr(whole) == "<CheckpointView 'llama-3.1-8b-tp8': whole tensors, 51 tensors>"
        assert repr(whole.get_slice("lm_head.weight")) == "<TensorSlice 'lm_head.weight': BF16 [1000, 128]>"
    assert repr(whole).endswith("51 tensors, closed>")


LIMITS = {
    r"^What ": 0,
    r"^Whether ": 0,
    r"\b(so many|as many|so much)\b": 0,
    r"\bof which\b": 1,
    r"\b(is|are) no\b": 7,
    r"\b(nobody|whoever|somebody|stranger)\b": 0,
    r"\bbeside\b": 1,
    r"\b(tells?|asks?|believes?|knows|wants)\b": 3,
}
"""Words that make a sentence a riddle, as patterns, and how often the prose of the product may have them. The numbers
only fall: whoever removes some lowers the limit."""


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Every comment of a file, with its line."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


@pytest.mark.parametrize("pattern", LIMITS)
def test_words_that_make_riddles_become_fewer(pattern: str) -> None:
    found = [
        f"{path}:{line}: {text.strip()[:60]}"
        for path in product_files()
        for line, text in (*docstrings(path), *comments(path))
        for _ in re.findall(pattern, text)
    ]
    assert len(found) <= LIMITS[pattern], "\n".join(found)
