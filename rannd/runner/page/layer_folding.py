"""Folds equal layers of a stage that follow each other: ``transformer.h.0..11`` for twelve of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rannd.plan.compatibility import plain
from rannd.plan.deployment import OpTable
from rannd.runner.page.page_data import Layers

_LONGEST = 120


_Run = tuple[tuple[str, ...], list[int]]
"""A layer, and the places of the operators that it runs at a stretch."""


def folded(table: OpTable, first: int, end: int) -> tuple[Layers, ...]:
    """Return the layers of the operators from `first` to `end` - 1.

    A layer is what a module with a number in its path runs at a stretch (`h.3`), or else a module. Layers are equal if
    they have the same operators, with equally many flops and bytes, in modules of the same names inside of them. If
    what calls them runs the same operators after each (`torch.relu(layer(x))`), these are a part of the layer.
    """
    texts = table.texts
    runs = [
        (layer, list(places))
        for layer, places in groupby(range(first, end), lambda place: _layer(texts[table.modules[place]]))
    ]
    found, at = [], 0
    while at < len(runs):
        size = 1
        count = _repeats(table, runs, at, size)
        if count == 1 and (pairs := _repeats(table, runs, at, 2)) > 1:
            size, count = 2, pairs
        end_at = at + size * count
        found.append(_layers(table, [runs[each : each + size] for each in range(at, end_at, size)]))
        at = end_at
    return tuple(found)


def _repeats(table: OpTable, runs: Sequence[_Run], at: int, size: int) -> int:
    """How often so many runs follow each other: a numbered layer, and others that are the same each time."""
    count = 1
    while at + size * (count + 1) <= len(runs):
        last, this = (runs[at + size * each : at + size * (each + 1)] for each in (count - 1, count))
        follows = _follows(last[0][0], this[0][0]) and all(
            a[0] == b[0] for a, b in zip(last[1:], this[1:], strict=True)
        )
        if not (follows and all(_alike(table, a, b) for a, b in zip(last, this, strict=True))):
            break
        count += 1
    return count


def _layer(module: str) -> tuple[str, ...]:
    """The part of a path up to its first number; all of it if there is none."""
    parts = tuple(module.split("."))
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return parts if number is None else parts[: number + 1]


def _follows(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether layers differ in their numbers alone."""
    return bool(one) and len(one) == len(other) and one[:-1] == other[:-1] and one[-1].isdecimal() and one != other


def _alike(table: OpTable, one: _Run, other: _Run) -> bool:
    return len(one[1]) == len(other[1]) and all(
        _signature(table, one[0], a) == _signature(table, other[0], b) for a, b in zip(one[1], other[1], strict=True)
    )


def _signature(table: OpTable, layer: Sequence[str], place: int) -> tuple[object, ...]:
    inside = table.texts[table.modules[place]][len(".".join(layer)) :]
    return (
        inside,
        table.targets[place],
        table.dtypes[place],
        table.flops[place],
        table.param_bytes[place],
        table.output_bytes[place],
    )


def _layers(table: OpTable, group: Sequence[Sequence[_Run]]) -> Layers:
    first = group[0]
    places = [place for _, each in first for place in each]
    every = [place for runs in group for _, each in runs for place in each]
    names = [".".join(layer) or "the model itself" for layer, _ in first]
    if len(group) > 1:
        names[0] += f"..{group[-1][0][0][-1]}"
    sources = (table.texts[table.sources[place]] for place in places)
    return Layers(
        plain(" and ".join(names), _LONGEST),
        len(group),
        places[0],
        len(places),
        sum(table.flops[place] for place in every),
        sum(table.param_bytes[place] for place in every),
        plain(next(filter(None, sources), ""), _LONGEST),
    )
