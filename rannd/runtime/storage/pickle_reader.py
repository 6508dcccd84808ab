"""Reads pickles without unpickling: what they describe, as records.

``pickle.load`` calls what the file names. Here ``pickletools`` reads the opcodes, and a small stack machine makes
lists, tuples, numbers, strings, and records of a few known names of them. Nothing that the file names is imported or
called. A subclass of `PickleReader` has the names of one kind of file; what it makes of the records, it checks.

``pickle.Unpickler`` with a `find_class` that returns only known classes would be shorter, as would ``torch.load`` with
weights_only, but they check too little:

- They hash any dict key. A tuple that holds one tuple twice, which holds one twice, and so on, takes exponential time
  to hash: a file of 127 bytes never ends. A look at the opcodes beforehand does not tell what becomes a key.
- The file says how large the memo is: 9 bytes take 4 GiB (LONG_BINPUT in Python 3.11).
- BUILD sets attributes of whatever is on the stack, also of the classes that `find_class` has returned.

So time and memory are in proportion to the file.
"""

from __future__ import annotations

import abc
import pickletools
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


@dataclass(frozen=True)
class Name:
    """A name of a class or function, with its module."""

    text: str


@dataclass(eq=False)
class Record:
    """What the file says of an object: its class, the arguments it is made of, the state it is given."""

    name: str
    made_of: tuple[Any, ...]
    has: Any = None


class PickleReader(abc.ABC):
    """Reader of one kind of file.

    Args:
        what: Such a file, in messages.
        names: Names that it may have.
    """

    def __init__(self, what: str, names: Container[str]) -> None:
        self._what = what
        self._names = names

    @abc.abstractmethod
    def new_dict(self) -> Any:
        """What stands for an empty dict."""

    @abc.abstractmethod
    def put_items(self, target: Any, items: list[Any]) -> None:
        """Put keys and values, in turn, into what stands for a dict. ValueError where it is none."""

    def make(self, name: str, made_of: tuple[Any, ...]) -> Any:
        """What stands for the result of a call. ValueError where there is no such call."""
        return Record(name, made_of)

    def persistent(self, said: Any) -> Any:
        """What stands for what lies outside of the pickle. ValueError where there is no such thing."""
        raise ValueError(f"it holds a BINPERSID, which {self._what} has not")

    def read(self, data: bytes) -> Any:
        """What a pickle describes. (Opcodes: the documentation of Python's ``pickletools``.)

        ValueError, TypeError, LookupError, AttributeError: It is damaged, or of another kind.
        """
        stack: list[Any] = []
        below: list[list[Any]] = []  # what was on the stack before each mark
        memo: dict[int, Any] = {}
        for op, found, _ in pickletools.genops(data):
            arg: Any = found
            match op.name:  # the frequent ones first: these are compared one after the other
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                    stack.append(arg)
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "MARK":
                    below.append(stack)
                    stack = []
                case "REDUCE" | "NEWOBJ":
                    made_of, name = stack.pop(), stack.pop()
                    if not isinstance(name, Name) or not isinstance(made_of, tuple):
                        raise ValueError("it makes something of what is no name")
                    stack.append(self.make(name.text, made_of))
                case "BUILD":
                    has = stack.pop()
                    if not isinstance(stack[-1], Record):
                        raise ValueError("it gives attributes to what is no record")
                    stack[-1].has = has
                case "EMPTY_DICT":
                    stack.append(self.new_dict())
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "SETITEMS":
                    items, stack = stack, below.pop()
                    self.put_items(stack[-1], items)
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(op.name[-1])
                    stack[-count:] = [tuple(stack[-count:])]
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                    stack.append(arg)
                case "NONE" | "NEWTRUE" | "NEWFALSE":
                    stack.append(_CONSTANTS[op.name])
                case "TUPLE":
                    items, stack = stack, below.pop()
                    stack.append(tuple(items))
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    self.put_items(stack[-1], [key, value])
                case "APPEND":
                    items = [stack.pop()]
                    as_list(stack[-1]).extend(items)
                case "APPENDS":
                    items, stack = stack, below.pop()
                    as_list(stack[-1]).extend(items)
                case "GLOBAL":
                    module, name = arg.split(" ", 1)
                    # As Python before 3.11.4 names it for protocols up to 2, for members of enumerations.
                    stack.append(self._known("builtins" if module == "__builtin__" else module, name))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    stack.append(self._known(module, name))
                case "BINPERSID":
                    stack.append(self.persistent(stack.pop()))
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case _:
                    raise ValueError(f"it holds a {op.name}, which {self._what} has not")
        raise ValueError("it ends too early")

    def _known(self, module: Any, name: Any) -> Name:
        full = f"{text(module)}.{text(name)}"
        if full not in self._names:
            raise ValueError(f"it names {full[:200]}, which {self._what} does not")
        return Name(full)


def text(value: Any) -> str:
    """A string that can be printed. ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"there is a {type(value).__name__} in the place of a string")
    value.encode()  # half of a surrogate pair could not be printed in a message
    return value


def number(value: Any) -> int:
    """A size or an offset. ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("there is something else in the place of a size or an offset")
    return value


def as_list(value: Any) -> list[Any]:
    """A list. ValueError for anything else."""
    if not isinstance(value, list):
        raise ValueError("it appends to what is no list")
    return value
