"""Explains cache misses: finds the most similar entry, and the components in which it differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rannd.daemon.common.printable import plain
from rannd.daemon.common.protocol import Difference, EntryInfo
from rannd.units import amounts_apart

SHOWN = 40
"""Maximum number of characters of a component's text in a line."""

MODEL = ("graph", "model")
"""Components that name the model: entries that differ in one belong to another model and rank behind all others."""

_IN_WORDS = {"world_size": "ranks", "global_batch": "batch", "device_memory": "device memory", "device_model": "device"}
_FOLLOWS = {"topology": "world_size", "inputs": "global_batch"}
"""Components that always differ if another one does: a clause leaves them out."""
_MOST_IN_CLAUSE = 2
_PREFIX = re.compile(r"^(plan|version|flag)\.")
_HASH = re.compile(r'"?[0-9a-f]{16,}"?')


def differences(wanted: Mapping[str, str], there: Mapping[str, str]) -> list[Difference]:
    """Return the components in which two keys of one kind differ, by name."""
    return [
        Difference(name, wanted.get(name), there.get(name))
        for name in sorted({*wanted, *there})
        if wanted.get(name) != there.get(name)
    ]


def nearest(wanted: Mapping[str, str], entries: Iterable[EntryInfo]) -> tuple[EntryInfo | None, list[Difference]]:
    """Return the entry that differs in the fewest components, and these; (None, []) if there are no entries.

    Entries of the same model rank first; of equal ones the first is returned.
    """
    best: EntryInfo | None = None
    found: list[Difference] = []
    least: tuple[bool, int] | None = None
    for entry in entries:
        differing = differences(wanted, entry.components)
        distance = not _same_model(differing), len(differing)
        if least is None or distance < least:
            best, found, least = entry, differing, distance
    return best, found


def clause(differing: Sequence[Difference]) -> str:
    """Describe what changed since the nearest entry of the same model: ``batch 128 -> 64``. '' for another model."""
    if not differing or not _same_model(differing):
        return ""
    names = {each.name for each in differing}
    told = [each for each in differing if _FOLLOWS.get(each.name) not in names]
    told.sort(key=lambda each: list(_IN_WORDS).index(each.name) if each.name in _IN_WORDS else len(_IN_WORDS))
    more = len(told) - _MOST_IN_CLAUSE
    return ", ".join(map(_change, told[:_MOST_IN_CLAUSE])) + (f" and {more} more" if more > 0 else "")


def _same_model(differing: Sequence[Difference]) -> bool:
    return not any(each.name in MODEL for each in differing)


def _change(difference: Difference) -> str:
    name = _IN_WORDS.get(difference.name, _PREFIX.sub("", difference.name))
    wanted, there = difference.wanted, difference.there
    if wanted is None or there is None or any(_HASH.fullmatch(each) or len(each) > SHOWN for each in (wanted, there)):
        return f"{name} changed"
    if difference.name == "device_memory" and wanted.isdecimal() and there.isdecimal():
        there, wanted = amounts_apart(int(there), int(wanted))
    return f"{name} {plain(there)} -> {plain(wanted)}"


def phrase(difference: Difference, *, most: int = SHOWN) -> str:
    """Describe a difference: ``global_batch 64, there 128``. Long texts are shown from their first difference on."""
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
