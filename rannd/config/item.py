"""One configuration item: its type and range, and how its values are parsed and checked."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable
from typing import TypeVar

from rannd.errors import ConfigError

#: Types of an item's value.
Value = bool | int | float | str
_T = TypeVar("_T", bool, int, float, str)

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_INT = re.compile(r"[+-]?[0-9]+")
_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


UNUSED = "RaNNC items without effect"
"""The section of items that are declared so that a file written for RaNNC can be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What the table declares about an item besides its name, type and default."""

    group: str
    plan_affecting: bool
    help: str
    least: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    no_effect: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One row of the table of items."""

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: Value
    group: str
    """Title of the item's section."""
    plan_affecting: bool
    """Whether different values can lead to different plans, which makes the item part of the cache key."""
    help: str
    """One line of help for the user."""
    least: float | None
    """Smallest allowed number; None: no limit."""
    below: float | None
    """Exclusive upper limit of a number; None: no limit."""
    choices: tuple[str, ...] | None
    """Allowed strings; None: any."""
    no_effect: str | None
    """Why the item, which RaNNC has, does nothing here; None: it has an effect."""

    @property
    def variable(self) -> str:
        """Name of the environment variable that overrides the item."""
        return f"RANNC_{self.name.upper()}"

    @property
    def switch(self) -> bool:
        """Whether "true" and "false" are among the allowed strings, for which true and false may be written."""
        return self.choices is not None and {"true", "false"} <= set(self.choices)

    @property
    def wanted(self) -> str:
        """The allowed values in words."""
        if self.choices is not None:
            return "one of " + ", ".join(json.dumps(choice) for choice in self.choices)
        words = _TYPE_WORDS[self.type]
        limits = [f"{self.least:g} or more"] if self.least is not None else []
        if self.below is not None:
            limits.append(f"below {self.below:g}")
        return f"{words}, {' and '.join(limits)}" if limits else words

    def parse(self, text: str, where: str) -> Value:
        """The value in the text of an environment variable; :meth:`check` checks its range.

        Raises:
            ConfigError: the text is not of the item's type.
        """
        word = text.strip()
        if self.type is str:
            return _BOOLS.get(word.lower(), text) if self.switch else text
        if self.type is bool and word.lower() in _BOOLS:
            return _BOOLS[word.lower()]
        if self.type is int and _INT.fullmatch(word):
            return int(word)
        if self.type is float:
            try:
                return float(word)
            except ValueError:
                pass
        raise self.wrong(text, where)

    def check(self, value: object, where: str) -> Value:
        """The value, converted to the item's type (an integer becomes a float for an item of type float).

        Raises:
            ConfigError: the value has another type or is out of range; the message starts with `where`.
        """
        if self.type is float and type(value) is int:
            value = float(value)
        if self.switch and type(value) is bool:
            value = toml_text(value)
        # type() instead of isinstance(): to Python a bool is an int, to the user it is not.
        if type(value) is not self.type:
            raise self.wrong(value, where)
        assert isinstance(value, bool | int | float | str)
        if self.choices is not None and value not in self.choices:
            raise self.wrong(value, where)
        if isinstance(value, int | float) and (
            not math.isfinite(value)
            or (self.least is not None and value < self.least)
            or (self.below is not None and value >= self.below)
        ):
            raise self.wrong(value, where)
        return value

    def wrong(self, value: object, where: str) -> ConfigError:
        """The error for a value that is not allowed."""
        return ConfigError(f"{where}: {self.name} = {toml_text(value)}, but {self.name} must be {self.wanted}")


def item(
    default: _T,
    help: str,
    *,
    group: str,
    plan_affecting: bool,
    least: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    no_effect: str | None = None,
) -> _T:
    """Declares an item as a dataclass field; see :class:`Item` for the arguments."""
    declaration = Declaration(
        group=group,
        plan_affecting=plan_affecting,
        help=help,
        least=least,
        below=below,
        choices=choices,
        no_effect=no_effect,
    )
    field: _T = dataclasses.field(default=default, metadata={"item": declaration})
    return field


def unused(default: _T, help: str, reason: str, *, least: float | None = None) -> _T:
    """Declares an item that RaNNC has and that does nothing here; `reason` says why."""
    return item(default, help, group=UNUSED, plan_affecting=False, least=least, no_effect=reason)


def items_of(table: type) -> dict[str, Item]:
    """The items that a dataclass declares, by name, in order."""
    items = {}
    for field in dataclasses.fields(table):
        declaration = field.metadata.get("item")
        if declaration is not None:
            default = field.default
            assert isinstance(default, bool | int | float | str)
            items[field.name] = Item(name=field.name, type=type(default), default=default, **vars(declaration))
    return items


def toml_text(value: object) -> str:
    """The value in TOML syntax; a value that TOML does not have as Python's repr."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to `name`. There must be at least one."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
