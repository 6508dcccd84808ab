"""The simplest rules of the grammar of cached traces, and those that are made of others.

Each rule is a function of a value that raises Broken.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from rannd.graph.stored.encoding import DTYPES, Broken

DEEPEST: Final = 48
"""Lists inside of each other, and graphs inside of graphs."""
LONGEST_TEXT: Final = 65_536
MOST_DIMENSIONS: Final = 64
"""Of a tensor."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,511}", re.ASCII)

Rule = Callable[[Any], object]


def broken(what: str, value: Any) -> NoReturn:
    """Raise Broken, with the beginning of the value."""
    told = repr(value) if not isinstance(value, (list, dict)) else repr(_few(value))
    raise Broken(f"{what}: {told if len(told) < 200 else told[:200] + ' ..'}")


def _few(value: Sequence[Any] | Mapping[Any, Any]) -> list[Any]:
    """The first elements of a value for messages: repr of all of it may take long."""
    return [each if not isinstance(each, (list, dict)) else type(each).__name__ for each in list(value)[:8]]


# -- plain values -------------------------------------------------------------------------------------------------


def scalar(value: Any) -> None:
    if type(value) is str:
        text(value)
    elif value is not None and type(value) not in (bool, int, float):
        broken("a value", value)


def text(value: Any) -> None:
    if type(value) is not str or len(value) > LONGEST_TEXT:
        broken("a text", value)


def identifier(value: Any) -> None:
    if type(value) is not str or not _IDENTIFIER.fullmatch(value) or keyword.iskeyword(value) or value == "self":
        broken("a name", value)


def natural(value: Any) -> None:
    if type(value) is not int or not 0 <= value < 2**31:
        broken("a number", value)


def truth(value: Any) -> None:
    if type(value) is not bool:
        broken("a truth value", value)


def plain_list(value: Any) -> None:
    if not isinstance(value, list):
        broken("a list", value)


def dtype(value: Any) -> None:
    if type(value) is not str or value not in DTYPES:
        broken("a dtype", value)


# -- rules of rules -----------------------------------------------------------------------------------------------


def maybe(rule: Rule) -> Rule:
    """None, or what follows a rule."""
    return lambda value: None if value is None else rule(value)


def each(rule: Rule) -> Rule:
    """A list whose items follow a rule."""

    def check(value: Any) -> None:
        plain_list(value)
        for item in value:
            rule(item)

    return check


def record(*rules: Rule) -> Rule:
    """A list with one item for each rule."""

    def check(value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(rules):
            broken(f"a list of {len(rules)}", value)
        for rule, item in zip(rules, value, strict=True):
            rule(item)

    return check


def mapping(key: Rule, value: Rule) -> Rule:
    """A dict."""

    def check(data: Any) -> None:
        if not isinstance(data, dict):
            broken("a mapping", data)
        for name, item in data.items():
            key(name)
            value(item)

    return check


texts: Final = each(text)
naturals: Final = each(natural)
