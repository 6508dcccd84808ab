"""Why something was not in the cache: the entry that differs least, and the components in which it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rannd.daemon.common.printable import plain
from rannd.daemon.common.protocol import Difference, EntryInfo

SHOWN = 40
"""Letters of a component's text that a line shows."""


def differences(wanted: Mapping[str, str], there: Mapping[str, str]) -> list[Difference]:
    """The components in which two keys of one kind differ, by name."""
    return [
        Difference(name, wanted.get(name), there.get(name))
        for name in sorted({*wanted, *there})
        if wanted.get(name) != there.get(name)
    ]


def nearest(wanted: Mapping[str, str], entries: Iterable[EntryInfo]) -> tuple[EntryInfo | None, list[Difference]]:
    """The first of the `entries` that differ in fewest components, and in what; (None, []) where there is none."""
    best: EntryInfo | None = None
    found: list[Difference] = []
    for entry in entries:
        differing = differences(wanted, entry.components)
        if best is None or len(differing) < len(found):
            best, found = entry, differing
    return best, found


def phrase(difference: Difference, *, most: int = SHOWN) -> str:
    """A difference in words: ``global_batch 64, there 128``. Long texts are shown from their first difference on."""
    wanted, there = difference.wanted, difference.there
    if wanted is None or there is None:
        return f"{difference.name} {_cut(wanted, 0, most)}, there {_cut(there, 0, most)}"
    same = next((at for at, pair in enumerate(zip(wanted, there, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, same - most // 4) if max(len(wanted), len(there)) > most else 0
    return f"{difference.name} {_cut(wanted, start, most)}, there {_cut(there, start, most)}"


def _cut(text: str | None, start: int, most: int) -> str:
    if text is None:
        return "(nothing)"
    shown = plain(text[start : start + most])
    return ("..." if start else "") + shown + ("..." if start + most < len(text) else "")
