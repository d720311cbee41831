"""What a parser takes of memory, at most, for each byte that somebody sends: FORMAT.md, section 13, says how much."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import prestarted

NBYTES = 2 * 2**20

SCRIPT = """
import resource, sys
from relayout.checkpoint.source import parse_index
from relayout.checkpoint.folder import parse_config
from relayout.errors import FormatError
from relayout.format.safetensors import parse_header
from relayout.format.manifest import parse_manifest

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def keys(nbytes, value):
    return ",".join(f'"{number:05x}":{value}' for number in range(nbytes // (9 + len(value))))

parser, make = sys.argv[1], sys.argv[2]
text = eval(make, {"keys": keys, "nbytes": int(sys.argv[3])}).encode()
before = peak()
try:
    if parser == "header":
        file = len(text).to_bytes(8, "little") + text
        parse_header(file, len(file), "x")
    else:
        {"index": parse_index, "config": parse_config, "manifest": parse_manifest}[parser](text, "x")
except FormatError:
    pass
print(len(text), peak() - before)
"""
WORST = {
    "names in __metadata__": ("header", """'{"__metadata__":{' + keys(nbytes, '""') + '}}'"""),
    "names in __metadata__, one of them wide": (
        "header",
        """'{"__metadata__":{"😀":"",' + keys(nbytes, '""') + '}}'""",
    ),
    "tensors": ("header", """'{' + keys(nbytes, '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}') + '}'"""),
    "short words": ("header", """'{"x":["😀",' + '"ab",' * (nbytes // 5) + '0]}'"""),
    "names in weight_map": ("index", """'{"weight_map":{' + keys(nbytes, '0') + '}}'"""),
    "files in weight_map": ("index", """'{"weight_map":{' + keys(nbytes, '"a.safetensors"') + '}}'"""),
    "lists": ("config", """'{"x":[' + '[],' * (nbytes // 3) + '[]]}'"""),
    "lists and an escape": ("config", """'{"😀":["\\\\u0061",' + '[],' * (nbytes // 3) + '[]]}'"""),
    "objects": ("config", """'{"x":[' + '{"a":1},' * (nbytes // 8) + '0]}'"""),
    "numbers": ("manifest", """'{"x":[' + '300,' * (nbytes // 4) + '0]}'"""),
}


def promised() -> int:
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text("utf-8")
    found = re.search(r"memory of at most (\d+) times such a size", text)
    assert found
    return int(found[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="takes Linux's /proc")
@pytest.mark.parametrize("name", WORST)
def test_memory_is_bounded_by_the_size_of_what_is_read(name: str) -> None:
    done = prestarted.run(*WORST[name], NBYTES, script=SCRIPT, imports="relayout.checkpoint.source")
    assert done.returncode == 0, done.stderr
    nbytes, taken = map(int, done.stdout.split())
    assert nbytes > NBYTES // 2
    assert taken < promised() * nbytes
