"""Stands in for arguments that the model's code may not read at all: names of files, ids, objects of a data loader.

Tracing runs the model's code with a stand-in, which has the argument's class and nothing else: whatever needs more is
an error, and is noted, even if the code catches the error. A graph whose tracing has read no stand-in is valid for all
values of those arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_read: list[set[str]] = []
"""Names of what was read, per `noted_reads`."""


@dataclass(frozen=True)
class Unread:
    """The place, in a signature, of an argument that is not part of the call, whatever its value."""

    name: str
    kind: type
    plain: bool = field(compare=False, repr=False)
    """Whether it may be a part of the call: it has strings and numbers, not other objects."""
    value: Any = field(default=None, compare=False, repr=False)
    """The argument; None in a signature."""

    def __str__(self) -> str:
        return f"a {self.kind.__qualname__} that no code reads"


class ArgumentRead(Exception):
    """The model's code reads an argument that was taken for unread."""


class UnreadArgument:
    """The stand-in of an argument."""

    __slots__ = ("_place",)

    def __init__(self, place: Unread) -> None:
        object.__setattr__(self, "_place", place)

    def __getattribute__(self, name: str) -> Any:
        place: Unread = object.__getattribute__(self, "_place")
        if name == "__class__":  # isinstance gives what it gives for the argument
            return place.kind
        note_read(place.name)
        raise ArgumentRead(f"the model's code reads {place.name}")


def is_unread(value: object) -> bool:
    """Whether a value is a stand-in."""
    return type(value) is UnreadArgument


_PASSED = "\0passed on: "


def passed_on(value: object) -> str:
    """What a graph returns in the place of a stand-in: a string, because torch.export returns no other constants."""
    place: Unread = object.__getattribute__(value, "_place")
    return _PASSED + place.name


def name_passed_on(value: object) -> str | None:
    """Name of the argument that the model returns as it got it, for what a graph returns; None for other values."""
    return value.removeprefix(_PASSED) if isinstance(value, str) and value.startswith(_PASSED) else None


def note_read(name: str) -> None:
    """Note that an argument is read, by its name."""
    for names in _read:
        names.add(name)


@contextlib.contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Context manager that yields the names of the arguments that are read in it."""
    names: set[str] = set()
    _read.append(names)
    try:
        yield names
    finally:
        _read[:] = [each for each in _read if each is not names]


def _reading(name: str) -> Callable[..., Any]:
    def read(self: UnreadArgument, *_: object) -> Any:
        return getattr(self, name)

    return read


# Python looks these up in the class, not with __getattribute__.
# fmt: off
_SPECIAL = (
    "repr", "str", "bytes", "format", "hash", "bool", "len", "length_hint", "iter", "next", "reversed", "contains",
    "getitem", "setitem", "delitem", "missing", "call", "eq", "ne", "lt", "le", "gt", "ge", "int", "float", "complex",
    "index", "round", "trunc", "floor", "ceil", "neg", "pos", "abs", "invert", "setattr", "delattr", "dir", "sizeof",
    "reduce", "reduce_ex", "copy", "deepcopy", "fspath", "enter", "exit", "array", "await", "aiter", "anext",
)
_BINARY = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor",
    "or",
)
# fmt: on
for _name in (*_SPECIAL, *(f"{way}{each}" for each in _BINARY for way in ("", "r", "i"))):
    setattr(UnreadArgument, f"__{_name}__", _reading(f"__{_name}__"))
