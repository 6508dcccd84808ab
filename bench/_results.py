"""What the scripts in bench/ find: tables and goals, printed, and kept for the page of `make bench` (bench/all.py).

Where KEPT names a file, each row and each goal also becomes a line of it, in JSON. Jobs that a script starts inherit
the variable; of a job only rank 0 tells. Numbers are kept as they are: only what is printed is rounded.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from _goals import GOALS

KEPT = "BENCH_KEPT"
_TELLS = all(os.environ.get(name, "0") == "0" for name in ("OMPI_COMM_WORLD_RANK", "RANK"))
"""Whether this process is no rank, or rank 0."""


@dataclass(frozen=True)
class Spread:
    """Repeats of a measurement: median, 5th and 95th percentile (of fewer than 20 the smallest and the largest)."""

    median: float
    low: float
    high: float
    repeats: int

    @staticmethod
    def of(values: Sequence[float], scale: float = 1.0) -> Spread:
        """Of values that are multiplied by `scale` (1e3: seconds to milliseconds)."""
        ordered = sorted(scale * value for value in values)
        outer = int(0.05 * len(ordered))
        return Spread(statistics.median(ordered), ordered[outer], ordered[-1 - outer], len(ordered))


Cell = str | int | float | Spread | None
"""Of a table; None: empty."""


class Table:
    """A table that is printed row by row."""

    def __init__(self, title: str, *columns: str | tuple[str, str]) -> None:
        """Print the heading.

        `columns` are names, or names and formats of numbers: ``("step", "{:.1f} ms")``. The first one is the left one.
        """
        self.title = title
        self.columns = [(each, "") if isinstance(each, str) else each for each in columns]
        self._widths: list[int] = []
        _keep({"table": title, "columns": self.columns})
        _print(f"\n{title}")

    def row(self, *cells: Cell) -> None:
        """Print a row."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(cells)} cells for {len(self.columns)} columns")
        kept = [asdict(cell) if isinstance(cell, Spread) else cell for cell in cells]
        _keep({"table": self.title, "cells": kept})
        texts = [shown(cell, form) for cell, (_, form) in zip(kept, self.columns, strict=True)]
        if not self._widths:
            heads = [name for name, _ in self.columns]
            self._widths = [max(len(head), len(text) + 2) for head, text in zip(heads, texts, strict=True)]
            self._widths[0] = max(self._widths[0], 34)
            _print(self._line(heads))
        _print(self._line(texts))

    def _line(self, texts: Sequence[str]) -> str:
        left, *others = zip(texts, self._widths, strict=True)
        return "  ".join([f"{left[0]:{left[1]}s}", *(f"{text:>{width}s}" for text, width in others)]).rstrip()


def shown(cell: Any, form: str) -> str:
    """The text of a kept cell of a column with this format."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, dict):
        form = form or "{:.3f}"
        number = form[: form.index("}") + 1]
        return (
            f"{number.format(cell['median'])} ({number.format(cell['low'])} to {number.format(cell['high'])})"
            f"{form[len(number) :]}"
        )
    return (form or ("{:,}" if isinstance(cell, int) else "{:.3f}")).format(cell)


def note(text: str) -> None:
    """Print a line that belongs to the results: what was measured, under which conditions."""
    _keep({"note": text})
    _print(text)


def found(goal: str, value: float, what: str = "") -> bool:
    """Compare a number with one of GOALS (bench/_goals.py), print the verdict, and return whether it is reached.

    `what` tells more than the goal's text: which of several cases the number is of.
    """
    wanted = GOALS[goal]
    reached = wanted.reached(value)
    _keep({"goal": goal, "value": value, "reached": reached, "what": what})
    more = f" ({what})" if what else ""
    verdict = "reached" if reached else "MISSED"
    _print(f"goal: {wanted.name}{more}: {wanted.shown(value)}, {wanted.limit_text}: {verdict}")
    return reached


def _keep(line: dict[str, Any]) -> None:
    if _TELLS and (path := os.environ.get(KEPT)):
        with open(path, "a") as file:  # one write of a short line: jobs of a script take turns
            file.write(json.dumps(line) + "\n")


def _print(text: str) -> None:
    if _TELLS:
        print(text, flush=True)
