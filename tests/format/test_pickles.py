"""Pickles are read as data: what is read is what the module `pickle` reads, and nothing that one imports is run."""

from __future__ import annotations

import copyreg
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.errors import FormatError
from relayout.format.pickles import PERSISTENT, Called, read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9),
    lambda inside: (
        st.lists(inside) | st.lists(inside).map(tuple) | st.dictionaries(st.text() | st.integers(0, 2**40), inside)
    ),
    max_leaves=20,
)


def read(blob: bytes, *names: str) -> Any:
    return read_pickle(blob, names, "here")


@given(PLAIN, st.integers(3, 5))
def test_plain_values_are_read_as_by_pickle(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value


class _Calls:
    """Pickled as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def hostile(target: Path) -> dict[str, bytes]:
    """Pickles that end this process, or write a file, wherever a pickle can do that."""
    writes = f"open({str(target)!r}, 'w').write('x')"
    line = b"(S%s\n" % repr(writes).encode()
    return {
        "exit": pickle.dumps(_Calls(os._exit, 3)),
        "exit in protocol 2": pickle.dumps({"x": [_Calls(os._exit, 3)]}, 2),
        "system": pickle.dumps(("x", _Calls(os.system, f"touch {target}"))),
        "eval": pickle.dumps(_Calls(eval, writes)),
        "exec of an old protocol": pickle.dumps(_Calls(exec, writes), 0),
        "inst": line + b"ibuiltins\neval\n.",
        "obj": b"(cbuiltins\neval\n" + b"X%s%so." % (len(writes).to_bytes(4, "little"), writes.encode()),
        "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",
        "an extension": b"\x82\x01.",
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nt\x52.",
        "a newer protocol": b"\x80\x05\x96\x04\0\0\0\0\0\0\0abcd.",
    }


@pytest.mark.parametrize("name", hostile(Path()))
def test_nothing_that_a_pickle_calls_is_run(name: str, tmp_path: Path) -> None:
    blob = hostile(tmp_path / "written")[name]
    with pytest.raises(FormatError, match=r"imports .* was not run|instruction") as error:
        read(blob, "torch.Size", "collections.OrderedDict")
    assert error.value.code == "unsafe"
    assert list(tmp_path.iterdir()) == []


def test_the_hostile_pickles_are_hostile(tmp_path: Path) -> None:
    """The module `pickle` does run them: else the test above would prove nothing."""
    for name in ("exit", "exit in protocol 2", "system", "eval", "exec of an old protocol", "inst", "obj"):
        target = tmp_path / "written"
        script = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
        done = subprocess.run([sys.executable, "-c", script], input=hostile(target)[name], check=False)
        assert (done.returncode == 3) is name.startswith("exit"), name
        assert target.exists() is not name.startswith("exit"), name
        target.unlink(missing_ok=True)


def test_an_allowed_name_is_not_called_either() -> None:
    made = read(pickle.dumps(_Calls(os.system, "exit 3")), "posix.system")
    assert isinstance(made, Called)
    assert (made.kind, made.args) == ("posix.system", ("exit 3",))
    held = read(b"\x80\x02X\x01\0\0\0kQ.")
    assert (held.kind, held.args) == (PERSISTENT, ("k",))


def test_extensions_of_this_process_cannot_be_reached() -> None:
    copyreg.add_extension("os", "_exit", 77)
    try:
        with pytest.raises(FormatError, match="instruction"):
            read(b"\x80\x02\x82\x4dK\x03\x85R.")
    finally:
        copyreg.remove_extension("os", "_exit", 77)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b".",
        b"(.",
        b"N",
        b"NN.",
        b"N.N",
        b"h\0.",
        b"a.",
        b"(t",
        b"t.",
        b"NNa.",
        b"}NNs.",
        b"}(Nu.",
        b"})Ns.",
        b"NNb.",
        b"NNR.",
        b"X\xff\xff\xff\xffx.",
        b"\x8d" + b"\xff" * 8 + b"x.",
        b"\x8a\xff\x01.",
        b"C\x05ab.",
        b"G\0.",
        b"X\x01\0\0\0\xff.",
        b"cos\n",
        b"(N(a.",
    ],
)
def test_a_damaged_pickle_is_an_error(blob: bytes) -> None:
    with pytest.raises(FormatError) as error:
        read(blob)
    assert error.value.code in ("syntax", "unsafe")


def test_memory_is_that_of_the_pickle() -> None:
    """The memo of the module `pickle` is an array, of 64 GB here; and hash() of deep tuples ends a process."""
    began = time.monotonic()
    assert read(b"\x80\x02Nr\xff\xff\xff\xff.") is None
    with pytest.raises(FormatError, match="damaged"):
        read(b"})" + b"\x85" * 200_000 + b"Ns.")
    assert time.monotonic() - began < 60


@given(st.data())
def test_flipped_bytes_are_read_or_refused(data: st.DataObject) -> None:
    blob = bytearray(pickle.dumps({"a": [1, (2, "b")], "c": _Calls(os.system, "exit 3")}, 4))
    blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(blob), "posix.system")
    except FormatError:
        return
