"""Which step can be saved after a failure, of what ranks have left in memory, and who writes which part of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from rannd.ranks.memory_files import rescue_folder
from rannd.runner.watch.errand import HeldPart, RescueOrder

_Key = tuple[int, int, int, str]
"""Number, step, size and folder of a kept step."""


def plan_rescue(held: Mapping[int, Sequence[HeldPart]], after: int) -> RescueOrder | None:
    """Plan to write the newest step of which every rank's part is left; None if there is none after step `after`.

    A part is written by its own rank's watcher if that is left, else by the one with a copy that has least to write.

    Args:
        held: What each watcher that is left has, by its rank.
        after: Step of the last checkpoint.
    """
    found: dict[_Key, dict[int, list[int]]] = {}
    for watcher, records in held.items():
        for each in records:
            key = each.number, each.step, each.size, each.folder
            found.setdefault(key, {}).setdefault(each.rank, []).append(watcher)
    whole = [key for key, owners in found.items() if len(owners) == key[2]]
    if not whole:
        return None
    newest = max(whole)
    number, step, _, folder = newest
    if step <= after:
        return None
    parts: dict[int, list[int]] = {}
    for rank, watchers in sorted(found[newest].items()):
        writer = rank if rank in watchers else min(watchers, key=lambda each: len(parts.get(each, ())))
        parts.setdefault(writer, []).append(rank)
    return RescueOrder(number, step, rescue_folder(folder, step, secrets.token_hex(8)), parts, found[newest])
