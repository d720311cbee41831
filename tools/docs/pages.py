"""The pages of the site: the documents, with links from page to page instead of from file to file."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMES = {"README.md": "index.md", "docs/README.md": "documents.md"}
"""Pages that are not called like their documents."""
_LINK = re.compile(r"(\]\()(?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
_SHOWN = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".cff": "yaml"}
"""Files that become pages of code, by their suffixes; others are copied."""


def documents() -> list[str]:
    """The documents of the repository, by their paths."""
    names = ["ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(["git", *names], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in listed if name == "README.md" or name.startswith("docs/")]


def page_of(name: str) -> str:
    """The page that a file of the repository becomes."""
    if name in _NAMES:
        return _NAMES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/").lower()
    return f"files/{name.replace('/.', '/').lstrip('.')}" + (".md" if Path(name).suffix in _SHOWN else "")


def pages() -> Iterator[tuple[str, bytes]]:
    """(page, content), of the documents and of the files that they link to.

    Raises:
        SystemExit: two files would become one page.
    """
    names, seen = documents(), dict[str, str]()
    for name in names:  # Which grows by what they link to.
        page, path = page_of(name), ROOT / name
        if seen.setdefault(page, name) != name:
            raise SystemExit(f"{name} and {seen[page]} would both be {page}")
        if path.suffix in _SHOWN:
            yield page, f"# {path.name}\n\n`{name}`\n\n````{_SHOWN[path.suffix]}\n{path.read_text()}````\n".encode()
        elif path.suffix == ".md":
            text, linked = _with_links_of_pages(name, path.read_text())
            names += [one for one in linked if one not in names]
            yield page, _indented(text).encode()
        else:
            yield page, path.read_bytes()


def _with_links_of_pages(name: str, text: str) -> tuple[str, list[str]]:
    """The text of a document as that of its page, and the files that it links to."""
    linked = []

    def replaced(match: re.Match[str]) -> str:
        start, target, anchor = match.groups(default="")
        file = os.path.normpath(Path(name).parent / target)
        if (ROOT / file).is_dir():  # There is no page of a folder.
            return f"{start}{os.path.relpath(page_of(name), Path(page_of(name)).parent)})"
        linked.append(file)
        return f"{start}{os.path.relpath(page_of(file), Path(page_of(name)).parent)}{anchor})"

    return _LINK.sub(replaced, text), linked


def _indented(text: str) -> str:
    """What belongs to an item of a numbered list, by four spaces: GitHub takes three, Python-Markdown does not."""
    lines, in_code = [], False
    for line in text.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        lines.append(f" {line}" if line.startswith("   ") and not in_code else line)
    return "".join(lines)
