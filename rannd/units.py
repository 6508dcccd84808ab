"""Sizes as text for people."""

from __future__ import annotations


def amount(count: float, digits: int = 4) -> str:
    """Format a number of bytes with a unit, such as '1.5 GiB'."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.{digits}g} {unit}"
    return f"{int(count)} bytes"


def amounts_apart(one: int, other: int) -> tuple[str, str]:
    """Format two different numbers of bytes with as many digits as it takes to tell them apart, 4 or more."""
    for digits in range(4, 17):
        if amount(one, digits) != amount(other, digits):
            break
    return amount(one, digits), amount(other, digits)


def count_text(number: int, what: str) -> str:
    """Format a number of things: ``1 stage``, ``2 batches``."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}es" if what.endswith("ch") else f"{number} {what}s"
