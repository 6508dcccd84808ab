"""Sizes in cached traces: the dearest that are allowed are quick to build, and those of real traces are allowed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rannd.graph.stored.encoding import Broken, to_expression
from rannd.graph.stored.size_grammar import MOST_SYMBOLS, Sizes, check_size

SECONDS = 10
"""More than the dearest takes on a busy machine (half a second where it was measured)."""


def symbol(number: int) -> list[str]:
    return ["y", f"n{number % MOST_SYMBOLS}"]


def largest(step: Callable[[Any, int], Any], begin: Any = None) -> Any:
    """Put a size into itself again and again, as often as the grammar allows."""
    found = begin or symbol(0)
    for number in range(300):
        larger = step(found, number)
        try:
            check_size(larger)
        except Broken:
            return found
        found = larger
    raise AssertionError("there is no limit")


COMMON = ["Add", *map(symbol, range(4))]
DEAR = {
    "remainders of each other": largest(
        lambda inner, n: ["Mod", ["Add", inner, symbol(n + 1)], ["Add", symbol(n + 2), n + 3]]
    ),
    "Python's remainders of each other": largest(
        lambda inner, n: ["PythonMod", ["Add", inner, symbol(n + 1)], ["Add", symbol(n + 2), n + 3]]
    ),
    "quotients of each other": largest(
        lambda inner, n: ["FloorDiv", ["Add", inner, symbol(n + 1)], ["Add", symbol(n + 2), n + 3]]
    ),
    "indices of each other": largest(
        lambda inner, n: ["ModularIndexing", ["Add", inner, symbol(n + 1)], ["Add", symbol(n + 2), n + 3], symbol(n)]
    ),
    "a remainder of many quotients": largest(
        lambda inner, n: ["Mod", *[["Add", *each[1:], ["FloorDiv", symbol(n), n + 2]] for each in inner[1:]]],
        ["Mod", ["Add", 1, symbol(0)], ["Add", 2, symbol(1)]],
    ),
    "a common factor": ["Mod", ["Mul", COMMON, ["Add", symbol(5), 1]], ["Mul", COMMON, ["Add", symbol(6), 2]]],
    "a power of a sum": ["FloorDiv", ["Pow", ["Add", symbol(0), symbol(1)], 4], ["Pow", ["Add", symbol(2), 1], 2]],
    "many maxima": largest(lambda inner, n: [*inner, ["Add", symbol(n), n]], ["Max", symbol(0), 1]),
    "many terms": largest(
        lambda inner, n: [*inner, ["Mul", n + 2, symbol(n), symbol(n + n // 8)]], ["Add", symbol(0), 1]
    ),
}


@pytest.mark.parametrize("name", DEAR)
def test_the_dearest_sizes_are_quick(name: str) -> None:
    begin = time.monotonic()
    found = to_expression(DEAR[name])
    for value in (7, 12):
        found.subs(dict.fromkeys(found.free_symbols, value))
    assert time.monotonic() - begin < SECONDS


def convolved(size: Any, layers: int) -> Any:
    """A dimension of an image after some layers of stride two."""
    for _ in range(layers):
        size = ["Add", 1, ["FloorDiv", ["Add", -1, size], 2]]
    return size


HEIGHT, WIDTH = convolved(["y", "n0"], 4), convolved(["y", "n1"], 4)
TOKENS = ["Mul", ["y", "rows"], HEIGHT, WIDTH]


@pytest.mark.parametrize("size", [TOKENS, ["FloorDiv", TOKENS, HEIGHT], ["Eq", ["PythonMod", TOKENS, 7], 0]])
def test_sizes_of_images_of_any_size_are_allowed(size: Any) -> None:
    check_size(size)


def test_sizes_that_are_the_same_count_once() -> None:
    sizes = Sizes()
    for _ in range(10_000):
        sizes.check(TOKENS)
    many = [["Add", number, ["y", "rows"]] for number in range(10_000)]
    with pytest.raises(Broken, match="parts of sizes"):
        list(map(sizes.check, many))
