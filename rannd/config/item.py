"""One configuration item: its type, its range, and how a value for it is read and checked."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable
from typing import TypeVar

from rannd.errors import ConfigError

#: What an item can hold.
Value = bool | int | float | str
_T = TypeVar("_T", bool, int, float, str)

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_INT = re.compile(r"[+-]?[0-9]+")
_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What the table says about an item besides its name, type and default."""

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
    """Title of the section the item belongs to."""
    plan_affecting: bool
    """Whether two values of the item can lead to two different plans; then it is part of the cache key."""
    help: str
    """One line for the user."""
    least: float | None
    """Smallest number allowed, None: no limit."""
    below: float | None
    """Every number allowed is smaller than this one, None: no limit."""
    choices: tuple[str, ...] | None
    """The strings allowed, None: any."""
    no_effect: str | None
    """Why the item, known to RaNNC, does nothing here; None: it has an effect."""

    @property
    def variable(self) -> str:
        """The environment variable that overrides the item."""
        return f"RANNC_{self.name.upper()}"

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
        """The value that the text of a variable stands for; ranges are left to :meth:`check`.

        Raises:
            ConfigError: the text is none of the item's type.
        """
        word = text.strip()
        if self.type is str:
            return text
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
        """The value in the item's own type (a whole number becomes a float where a float is wanted).

        Raises:
            ConfigError: wrong type or out of range; the message starts with `where`.
        """
        if self.type is float and type(value) is int:
            value = float(value)
        # type() and not isinstance: a bool is an int for Python, not for a user.
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
        """The error for a value that the item cannot take."""
        return ConfigError(f"{where}: {self.name} = {toml_text(value)}, but {self.name} wants {self.wanted}")


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
    """Declares a field of the table; see :class:`Item` for the arguments."""
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


def items_of(table: type) -> dict[str, Item]:
    """The declared items of a dataclass by name, in their order there."""
    items = {}
    for field in dataclasses.fields(table):
        declaration = field.metadata.get("item")
        if declaration is not None:
            default = field.default
            assert isinstance(default, bool | int | float | str)
            items[field.name] = Item(name=field.name, type=type(default), default=default, **vars(declaration))
    return items


def toml_text(value: object) -> str:
    """The value as it is written in a TOML file; other values than TOML's as Python writes them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Of the known names (at least one) the one most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
