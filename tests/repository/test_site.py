"""The site of the documents: all of them are in it, and a link that leads nowhere is an error."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from docs.__main__ import build, environment
from docs.pages import ROOT, documents, page_of, pages

import relayout

pytestmark = [pytest.mark.documents, pytest.mark.xdist_group("site")]


def test_the_menu_has_every_document() -> None:
    listed = re.findall(r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(map(page_of, documents()))


def test_the_reference_has_everything_public() -> None:
    listed = re.findall(r"^::: relayout\.(\w+)$", (ROOT / "docs" / "reference" / "API.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(relayout.__all__)


def test_the_site_is_built_and_broken_links_alone_are_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        environment()
    except subprocess.CalledProcessError:
        pytest.skip("the extra `docs` cannot be installed here, perhaps without a network")
    contents = dict(pages())
    targets = ("nowhere.md", "../format.md#no-such-section")
    links = "\n".join(f"[there]({target})" for target in targets)
    broken = contents | {"reference/deltas.md": contents["reference/deltas.md"] + f"\n{links}\n".encode()}
    assert build(broken.items(), tmp_path) == 1
    told = "".join(capfd.readouterr())
    assert [target for target in targets if f"'{target}'" not in told] == []
    assert f"Aborted with {len(targets)} warnings in strict mode" in told
    site = tmp_path / "site"
    api = (site / "reference" / "api.html").read_text()
    assert "doctest" not in api
    assert re.sub(r"<[^>]+>", "", api).count("trust_remote_code: bool = False") == 5, "each option is in the signature"
    assert (site / "index.html").is_file()
    assert "relayout.json" in (site / "search" / "search_index.json").read_text()
