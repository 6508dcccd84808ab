"""The grammar of sizes, and of conditions on sizes, in a cached trace.

sympy simplifies what it builds, at a cost that grows with the expanded form: products of sums are multiplied out, and
the greatest common divisors of polynomials in several symbols are looked for. So that form is bounded, not the text.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, NamedTuple

from rannd.graph.stored.encoding import EXPRESSIONS
from rannd.graph.stored.grammar_rules import broken

LARGEST_SIZE: Final = 256
"""Functions and arguments of a size."""
LARGEST_POWER: Final = 64
LARGEST_DEGREE: Final = 8
"""Symbols that a size multiplies with each other."""
DEEPEST: Final = 16
"""Functions inside of each other."""
MOST_TERMS: Final = 128
"""Products that a size is a sum of, once it is expanded."""
MOST_DIVIDED: Final = 24
"""The same for all arguments of a function that looks for common divisors, or compares them, together."""
MOST_SYMBOLS: Final = 8
"""Different ones in a size."""
MOST_PARTS: Final = 2**12
"""Functions and arguments of all sizes of a trace, or conditions of a template, that differ from each other."""

_CONDITIONS = frozenset(["And", "Or", "Not", "Eq", "Ne", "Lt", "Le", "Gt", "Ge"])
_FLOAT = re.compile(r"[-+]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})([eE][-+]?\d{1,4})?", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


class _Expanded(NamedTuple):
    """What the expanded form of a size has at most."""

    degree: int
    products: int
    """Terms that are no plain numbers."""
    number: bool = True
    """Whether there is such a term; it is one, as numbers are added up."""

    @property
    def terms(self) -> int:
        return self.products + self.number


def check_size(data: Any) -> int:
    """Check a size, or a condition on sizes; the number of its functions and arguments. Raises Broken."""
    return _Size(data).parts


class Sizes:
    """All sizes of a trace, each of which may occur often."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._parts = 0

    def check(self, data: Any) -> None:
        """Check one more."""
        parts = check_size(data)
        if parts > 1 and (text := repr(data)) not in self._seen:
            self._seen.add(text)
            self._parts += parts
            if self._parts > MOST_PARTS:
                broken(f"more than {MOST_PARTS} parts of sizes", data)


class _Size:
    def __init__(self, data: Any) -> None:
        self._data = data
        self._symbols: set[str] = set()
        self.parts = 0
        self._expanded(data, 0)

    def _expanded(self, each: Any, depth: int) -> _Expanded:
        """Check a part."""
        self.parts += 1
        if self.parts > LARGEST_SIZE or depth > DEEPEST:
            broken("a size", self._data)
        if type(each) is bool or (type(each) is int and -(2**63) <= each < 2**63):
            return _Expanded(0, 0)
        if not isinstance(each, list) or len(each) < 2 or type(each[0]) is not str:
            broken("a size", each)
        tag, *items = each
        if tag in ("y", "q", "f"):
            found = self._plain(tag, items) if _is_plain(tag, items) else None
        elif tag not in EXPRESSIONS:
            found = None
        elif "Pow" in tag:
            found = self._power(items, depth)
        else:
            found = self._function(tag, [self._expanded(item, depth + 1) for item in items])
        if found is None or found.degree > LARGEST_DEGREE or found.terms > MOST_TERMS:
            broken("a size", each)
        return found

    def _plain(self, tag: str, items: list[Any]) -> _Expanded | None:
        if tag != "y":
            return _Expanded(0, 0)
        self._symbols.add(items[0])
        return _Expanded(1, 1, False) if len(self._symbols) <= MOST_SYMBOLS else None

    def _power(self, items: list[Any], depth: int) -> _Expanded | None:
        power = _exponent(items[1]) if len(items) == 2 else 0
        if not power:
            return None
        base = self._expanded(items[0], depth + 1)
        if not base.degree and isinstance(items[0], list) and items[0][0] not in ("q", "f"):
            return None  # a power of a number that has yet to be computed
        if not base.degree:
            return _Expanded(0, 1)  # a root
        return _Expanded(base.degree * power, base.terms**power - base.number, base.number)

    def _function(self, tag: str, given: list[_Expanded]) -> _Expanded | None:
        degrees, products, numbers = zip(*given, strict=True)
        terms = [each.terms for each in given]
        if tag == "Mul":
            return _Expanded(sum(degrees), math.prod(terms) - all(numbers), all(numbers))
        if tag == "Add":
            return _Expanded(max(degrees), sum(products), any(numbers))
        if tag not in _CONDITIONS and sum(terms) > MOST_DIVIDED:
            return None
        return _Expanded(max(degrees), max(1, *products))  # a quotient or remainder may become one of its arguments


def _is_plain(tag: str, items: list[Any]) -> bool:
    """Whether it is a symbol, a fraction or a float."""
    if tag == "q":
        return len(items) == 2 and all(type(item) is int for item in items) and items[1] > 0
    if len(items) != 1 or type(items[0]) is not str:
        return False
    if tag == "y":
        return bool(_SYMBOL.fullmatch(items[0]))
    return bool(_FLOAT.fullmatch(items[0])) and math.isfinite(float(items[0]))


def _exponent(power: Any) -> int:
    """How often a factor is multiplied at most, at least once; 0 for what is no small number."""
    number, of = power[1:] if isinstance(power, list) and len(power) == 3 and power[0] == "q" else (power, 1)
    if type(number) is not int or type(of) is not int or not 0 < of <= LARGEST_POWER:
        return 0
    return max(1, -(-abs(number) // of)) if abs(number) <= LARGEST_POWER else 0
