"""Folds equal layers of a stage that follow each other: ``transformer.h.0..11`` for twelve of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rannd.plan.compatibility import plain
from rannd.plan.deployment import OpTable
from rannd.runner.page.page_data import Layers

_LONGEST = 120


def folded(table: OpTable, first: int, end: int) -> tuple[Layers, ...]:
    """Return the layers of the operators from `first` to `end` - 1.

    A layer is what a module with a number in its path runs at a stretch (`h.3`), or else a module. Layers are equal if
    they have the same operators, with equally many flops and bytes, in modules of the same names inside of them.
    """
    texts = table.texts
    runs = [
        (layer, list(places))
        for layer, places in groupby(range(first, end), lambda place: _layer(texts[table.modules[place]]))
    ]
    found: list[list[tuple[tuple[str, ...], list[int]]]] = []
    for layer, places in runs:
        last = found[-1][-1] if found else None
        if last is not None and _follows(last[0], layer) and _alike(table, (last[0], last[1]), (layer, places)):
            found[-1].append((layer, places))
        else:
            found.append([(layer, places)])
    return tuple(_layers(table, group) for group in found)


def _layer(module: str) -> tuple[str, ...]:
    """The part of a path up to its first number; all of it if there is none."""
    parts = tuple(module.split("."))
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return parts if number is None else parts[: number + 1]


def _follows(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether layers differ in their numbers alone."""
    return bool(one) and len(one) == len(other) and one[:-1] == other[:-1] and one[-1].isdecimal() and one != other


def _alike(table: OpTable, one: tuple[tuple[str, ...], list[int]], other: tuple[tuple[str, ...], list[int]]) -> bool:
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


def _layers(table: OpTable, group: Sequence[tuple[tuple[str, ...], list[int]]]) -> Layers:
    layer, places = group[0]
    every = [place for _, each in group for place in each]
    name = ".".join(layer) or "the model itself"
    if len(group) > 1:
        name = f"{name}..{group[-1][0][-1]}"
    sources = (table.texts[table.sources[place]] for place in places)
    return Layers(
        plain(name, _LONGEST),
        len(group),
        places[0],
        len(places),
        sum(table.flops[place] for place in every),
        sum(table.param_bytes[place] for place in every),
        plain(next(filter(None, sources), ""), _LONGEST),
    )
