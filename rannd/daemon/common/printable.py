"""Texts of somebody else, made fit to be shown."""

from __future__ import annotations


def plain(text: str) -> str:
    """A text as one line: what a terminal would obey becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
