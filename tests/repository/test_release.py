"""The address of the repository: one value, repeated in the files that people read, and required by a release."""

from __future__ import annotations

import shutil
import zipfile
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import release
import yaml

ROOT = Path(__file__).parents[2]
URL = "https://github.com/some-owner/relayout"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that name the repository."""
    for name in release.WITH_REPOSITORY:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_release_fills_the_address_everywhere(tree: Path) -> None:
    old = release.repository_of(tree)
    release.fill(tree, URL)
    texts = {name: (tree / name).read_text() for name in release.WITH_REPOSITORY}
    assert [name for name, text in texts.items() if old in text or "@OWNER" in text] == []
    assert [name for name, text in texts.items() if URL not in text] == [".github/CODEOWNERS"]
    assert "\n* @some-owner\n" in texts[".github/CODEOWNERS"]
    assert yaml.safe_load(texts[".github/CITATION.cff"])["repository-code"] == URL
    assert release.repository_of(tree) == URL
    release.fill(tree, "https://codeberg.org/another/relayout")  # A filled tree can move.
    assert "\n* @another\n" in (tree / ".github" / "CODEOWNERS").read_text()
    assert not any("some-owner" in (tree / name).read_text() for name in release.WITH_REPOSITORY)


def test_no_other_file_names_the_repository() -> None:
    old = release.repository_of(ROOT)
    named = [
        name
        for name in release.git("ls-files").splitlines()
        if (ROOT / name).is_file() and old.encode() in (ROOT / name).read_bytes()
    ]
    assert set(named) <= set(release.WITH_REPOSITORY)


def test_a_file_without_the_address_is_refused(tree: Path) -> None:
    readme = tree / "README.md"
    readme.write_text(readme.read_text().replace(release.repository_of(tree), ""))
    with pytest.raises(SystemExit, match=r"README\.md: does not contain https://"):
        release.fill(tree, URL)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://somewhere.invalid/relayout",
        "https://somewhere.invalid/owner/relayout",
        "https://git.example.com/owner/relayout",
        "http://github.com/owner/relayout",
        "https://github.com/relayout",
        "https://github.com/owner/relayout/tree/main",
    ],
)
def test_what_nobody_can_reach_is_no_address(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected an address such as"):
        release.address(text)
    assert release.address(f"{URL}/") == URL


@pytest.mark.parametrize(("urls", "is_right"), [([], False), ([f"{URL}/issues"], True), (["https://a.org/b"], False)])
def test_a_wheel_that_names_another_repository_is_refused(urls: list[str], is_right: bool, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("a.dist-info/METADATA", "".join(f"Project-URL: Issues, {url}\n" for url in urls))
    if is_right:
        release.check_repository(wheel, URL)
        return
    with pytest.raises(SystemExit, match=f"expected {URL}"):
        release.check_repository(wheel, URL)
