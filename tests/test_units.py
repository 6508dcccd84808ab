"""Sizes as people read them."""

from __future__ import annotations

from rannd.units import amount, amounts_apart


def test_amounts() -> None:
    assert [amount(n) for n in (0, 2048, 5 << 20, 3 << 29)] == ["0 bytes", "2 KiB", "5 MiB", "1.5 GiB"]


def test_two_amounts_that_differ_are_shown_as_different() -> None:
    assert amounts_apart(5 << 20, 3 << 20) == ("5 MiB", "3 MiB")
    assert amounts_apart((4 << 30) + (1 << 20), 4 << 30) == ("4.001 GiB", "4 GiB")
    assert amounts_apart((4 << 30) + 1024, 4 << 30) == ("4.000001 GiB", "4 GiB")
    assert len(set(amounts_apart((1 << 40) + 1, 1 << 40))) == 2
