"""Reads a pickle as data: nothing is imported, and nothing is called.

A pickle is a program for a stack machine, and two of its instructions import any object and call it. The machine here
has the instructions that build plain values. In place of an import it pushes a `Name`, which is a string and must be
one of those that the caller expects. In place of a call it pushes a `Called`, which holds the name and the arguments.
No code exists that a pickle could reach, so that whatever it contains, reading it has no effect beyond its result.

Instructions are those of protocols 2 to 5 that torch's pickles have (Python 3.14, `Lib/pickletools.py`, `opcodes`).
Memory is proportional to the length of the pickle: the memo is a dict, where the module `pickle` has an array whose
length the pickle chooses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from relayout.errors import FormatError, about, shown


class Name(str):
    """The full name of an object that a pickle imports."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Called:
    """An object that a pickle makes by a call, or refers to by a persistent id. It is equal to itself only."""

    kind: str
    """Full name of what is called; `PERSISTENT` for a persistent id."""
    args: tuple[Any, ...]
    """The arguments of the call; of a persistent id, the id."""
    state: Any = None
    """The state that the object is given afterwards."""


PERSISTENT = "persistent id"
MAX_PICKLE_NBYTES = 2**30
_MARK = object()


def read_pickle(blob: bytes, names: Collection[str], where: str) -> Any:
    """Return the value of a pickle: plain Python values, and `Name` and `Called` for all others.

    Args:
        blob: the pickle, and nothing behind it.
        names: full names of what the pickle may import.
        where: of the pickle, for errors.

    Raises:
        FormatError: it is damaged, imports something else, or has an instruction that torch's pickles lack.
    """
    with about(path=where):
        if len(blob) > MAX_PICKLE_NBYTES:
            raise FormatError(f"a pickle of {len(blob)} bytes, limit {MAX_PICKLE_NBYTES}", code="limit")
        machine = _PickleMachine(blob, frozenset(names))
        try:
            return machine.run()
        except (IndexError, KeyError, struct.error):  # An empty stack, an unknown memo, or the end of the bytes.
            raise FormatError(f"the pickle is damaged at byte {machine.at}", code="syntax") from None
        except UnicodeDecodeError:
            raise FormatError(f"the pickle has a text that is not UTF-8 at byte {machine.at}", code="syntax") from None


class _PickleMachine:
    def __init__(self, blob: bytes, names: frozenset[str]) -> None:
        self.at = 0
        """Position of the next byte."""
        self._blob = blob
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        blob, handlers = self._blob, _HANDLERS
        while True:
            code = blob[self.at]
            self.at += 1
            if code == _STOP:
                if self.at != len(blob):
                    raise self._damaged(f"{len(blob) - self.at} bytes behind its end")
                (value,) = self._pop_all()
                return value
            handler = handlers.get(code)
            if handler is None:
                what = f"the pickle has the instruction {shown(chr(code))}, which PyTorch does not write"
                raise FormatError(what, offset=self.at - 1, code="unsafe")
            handler(self)

    def _pop_all(self) -> list[Any]:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise self._damaged(f"{len(self._stack)} values at its end, expected one")
        return self._stack

    def _damaged(self, what: str) -> FormatError:
        return FormatError(f"the pickle is damaged: {what}", offset=self.at, code="syntax")

    def _take(self, nbytes: int) -> bytes:
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self._blob):
            raise IndexError
        return self._blob[start : self.at]

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError
        return value

    def _to_mark(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        stack = self._stack
        position = len(stack) - 1
        while stack[position] is not _MARK:  # IndexError: there is none.
            position -= 1
            if position < 0:
                raise IndexError
        values = stack[position + 1 :]
        del stack[position:]
        return values

    def _push_name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""
        if full not in self._names:
            what = (
                f"imports {shown(full)}, which no checkpoint of PyTorch needs: it could run any code, and was not run"
            )
            raise FormatError(what, offset=self.at, code="unsafe")
        self._stack.append(Name(full))

    def _skip(self, nbytes: int) -> None:
        self._take(nbytes)

    def _global(self) -> None:
        module, name = (self._line() for _ in range(2))
        self._push_name(module, name)

    def _line(self) -> str:
        end = self._blob.find(b"\n", self.at)
        if end < 0:
            raise IndexError
        return self._take(end + 1 - self.at)[:-1].decode()

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._push_name(module, name)

    def _call(self) -> None:
        args, called = self._pop(), self._pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise self._damaged("a call of something that is not a name")
        self._stack.append(Called(str(called), args))

    def _build(self) -> None:
        state, made = self._pop(), self._stack[-1]
        if not isinstance(made, Called):
            raise self._damaged("a state for something that is not an object")
        made.state = state

    def _persistent(self) -> None:
        self._stack.append(Called(PERSISTENT, (self._pop(),)))

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))

    def _integer(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _text(self, nbytes: int) -> None:
        self._stack.append(self._take(self._number(nbytes)).decode("utf-8", "surrogatepass"))

    def _bytes(self, nbytes: int) -> None:
        self._stack.append(self._take(self._number(nbytes)))

    def _unsigned(self, nbytes: int) -> None:
        self._stack.append(self._number(nbytes))

    def _tuple(self) -> None:
        self._stack.append(tuple(self._to_mark()))

    def _tuple_of(self, count: int) -> None:
        self._stack.append(tuple(reversed([self._pop() for _ in range(count)])))

    def _append(self) -> None:
        value = self._pop()
        self._extend(self._stack[-1], [value])

    def _appends(self) -> None:
        values = self._to_mark()
        self._extend(self._stack[-1], values)

    def _extend(self, target: Any, values: list[Any]) -> None:
        if not isinstance(target, list):
            raise self._damaged("items for something that is not a list")
        target.extend(values)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set(self._stack[-1], [key, value])

    def _set_items(self) -> None:
        values = self._to_mark()
        self._set(self._stack[-1], values)

    def _set(self, target: Any, values: list[Any]) -> None:
        keys = values[::2]
        # Not tuples: hash() of tuples in tuples, a million deep, ends the process.
        if (
            not isinstance(target, dict)
            or len(values) % 2
            or not all(isinstance(key, (str, int, Called)) for key in keys)
        ):
            raise self._damaged("entries for something that is not a dict, or have no name")
        target.update(zip(keys, values[1::2], strict=True))

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, nbytes: int) -> None:
        self._memo[self._number(nbytes)] = self._stack[-1]

    def _get(self, nbytes: int) -> None:
        self._stack.append(self._memo[self._number(nbytes)])


_STOP = ord(".")


def _with(method: Callable[..., None], *args: Any) -> Callable[[_PickleMachine], None]:
    return lambda machine: method(machine, *args)


def _new(kind: Callable[[], Any]) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine._push(kind())


_HANDLERS: dict[int, Callable[[_PickleMachine], None]] = {
    0x80: _with(_PickleMachine._skip, 1),  # PROTO
    0x95: _with(_PickleMachine._skip, 8),  # FRAME
    ord("("): _with(_PickleMachine._push, _MARK),
    ord("N"): _with(_PickleMachine._push, None),
    0x88: _with(_PickleMachine._push, True),
    0x89: _with(_PickleMachine._push, False),
    ord("J"): _PickleMachine._integer,
    ord("K"): _with(_PickleMachine._unsigned, 1),
    ord("M"): _with(_PickleMachine._unsigned, 2),
    0x8A: _PickleMachine._long,
    ord("G"): _PickleMachine._float,
    0x8C: _with(_PickleMachine._text, 1),
    ord("X"): _with(_PickleMachine._text, 4),
    0x8D: _with(_PickleMachine._text, 8),
    ord("C"): _with(_PickleMachine._bytes, 1),
    ord("B"): _with(_PickleMachine._bytes, 4),
    ord(")"): _with(_PickleMachine._push, ()),
    ord("t"): _PickleMachine._tuple,
    0x85: _with(_PickleMachine._tuple_of, 1),
    0x86: _with(_PickleMachine._tuple_of, 2),
    0x87: _with(_PickleMachine._tuple_of, 3),
    ord("]"): _new(list),
    ord("a"): _PickleMachine._append,
    ord("e"): _PickleMachine._appends,
    ord("}"): _new(dict),
    ord("s"): _PickleMachine._set_item,
    ord("u"): _PickleMachine._set_items,
    0x94: _PickleMachine._memoize,
    ord("q"): _with(_PickleMachine._put, 1),
    ord("r"): _with(_PickleMachine._put, 4),
    ord("h"): _with(_PickleMachine._get, 1),
    ord("j"): _with(_PickleMachine._get, 4),
    ord("c"): _PickleMachine._global,
    0x93: _PickleMachine._stack_global,
    ord("R"): _PickleMachine._call,  # REDUCE
    0x81: _PickleMachine._call,  # NEWOBJ
    ord("b"): _PickleMachine._build,
    ord("Q"): _PickleMachine._persistent,
}
