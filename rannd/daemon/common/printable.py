"""Makes untrusted text safe to print."""

from __future__ import annotations


def plain(text: str) -> str:
    """Replace control characters by question marks, so that a terminal shows one plain line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
