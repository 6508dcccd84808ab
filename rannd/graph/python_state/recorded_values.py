"""Recorded values: what `SnapshotWriter` makes of attributes, compared without running user code.

A value is what == compares exactly, or a tuple that begins with one of the marks below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Set
from typing import Any

ABSENT = object()
"""Stands for an attribute that is not there."""
OBJECT, ITEMS, PARTS, MODULE = object(), object(), object(), object()
"""Marks of an object with attributes, a container, an object of Python itself, and a module that is no submodule."""
CONTENTS = "[]"
"""Key of an object's items among its attributes, if it is a container."""
DOUBLE = struct.Struct("d")
"""How a float is recorded."""
Path = tuple[str, tuple[str, ...]]
"""Location inside a value as a Python expression, and the names of the attributes in it."""


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys whose values differ between two dicts of recorded values."""
    return [key for key in dict.fromkeys([*one, *other]) if one.get(key, ABSENT) != other.get(key, ABSENT)]


def plain_values(*recorded: Any) -> tuple[object, ...]:
    """The values of attributes that are numbers or strings; () unless all are."""
    found = [DOUBLE.unpack(each)[0] if type(each) is bytes and len(each) == DOUBLE.size else each for each in recorded]
    return tuple(found) if all(type(each) in (int, float, str) for each in found) else ()


def places(old: Any, new: Any) -> list[Path]:
    """Locations at which two recorded values of the same object differ; [("", ())] if they are different objects."""
    found: list[Path] = []
    pairs = _pairs(old, new)
    for label, name, one, other in pairs:
        for path, names in places(one, other):
            if not name and not names:
                return [("", ())]
            found.append((label + path, (name, *names) if name else names))
    return found or [("", ())]


def _pairs(old: Any, new: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (path, name of the attribute, before, after) for each difference inside of the same object."""
    if type(old) is not tuple or type(new) is not tuple or not old or not new or old[0] is not new[0]:
        return
    if old[0] is OBJECT and old[1:3] == new[1:3]:
        for name in differing(old[3], new[3]):
            own = name is not CONTENTS
            yield f".{name}" if own else "", name if own else "", old[3].get(name, ABSENT), new[3].get(name, ABSENT)
    elif old[0] is MODULE and old[1] == new[1] and old[2].keys() == new[2].keys():
        for path, one in old[2].items():
            other = new[2][path]
            for name in differing(one, other):
                yield f".{path}.{name}" if path else f".{name}", name, one.get(name, ABSENT), other.get(name, ABSENT)
    elif old[0] is PARTS and old[:3] == new[:3] and len(old[3]) == len(new[3]):
        for one, other in zip(old[3], new[3], strict=True):
            if one != other:
                yield "", "", one, other
    elif old[0] is ITEMS and old[:6] == new[:6] and type(old[6]) is type(new[6]) is list:
        for number, (one, other) in enumerate(zip(old[6], new[6], strict=False)):
            if one != other:
                key = number if old[5] is None else old[5][number] if type(old[5]) is list else None
                yield f"[{key!r}]" if type(key) in (int, str) else "[...]", "", one, other


def forget(value: Any, names: Set[str]) -> None:
    """Drop the attributes with these names from the objects in a recorded value."""
    if type(value) is not tuple or not value:
        return
    if value[0] is OBJECT:
        forget_names(value[3], names)
    elif value[0] is MODULE:
        for attributes in value[2].values():
            forget_names(attributes, names)
    elif (value[0] is PARTS or value[0] is ITEMS) and type(value[-1]) is list:
        for inner in value[-1]:
            forget(inner, names)


def forget_names(attributes: dict[str, Any], names: Set[str]) -> None:
    """Drop the attributes with these names, also from objects in the remaining attributes."""
    for name in names & attributes.keys():
        del attributes[name]
    for value in attributes.values():
        forget(value, names)
