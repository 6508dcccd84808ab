"""Warns of what costs a trace again and again: numbers, strings and attributes that change from call to call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rannd import log
from rannd.graph.call.signature import Call
from rannd.graph.python_state.guards import Change

TRACES = 3
"""Number of traces for values of one argument or attribute after which a warning is logged."""
MANY = 16
"""Number of traces of one model after which a warning is logged."""
LONGEST = 60
_AS_TENSOR = "Pass it as torch.tensor(x), unless the code needs a number: an index of a list or ModuleList, a count"
_ITEM = re.compile(r"(\[\d+\])+$")
"""The end of the name of an item of a list."""


@dataclass
class _Varying:
    values: list[str] = field(default_factory=list)
    traces: int = 1
    seconds: float = 0.0


class Retraces:
    """What has changed between the traces of one model."""

    def __init__(self) -> None:
        self._varying: dict[str, _Varying] = {}

    def note(self, arguments: Mapping[str, tuple[Any, Any]], attributes: Sequence[Change], seconds: float) -> None:
        """Note a trace that was made because of these changes; warn once of each, at the third trace.

        Args:
            arguments: Name, former and present value.
            attributes: Changes of attributes, of which those of numbers and strings count.
            seconds: Duration of the trace.
        """
        lists: dict[str, list[str]] = {}
        for name in arguments:
            lists.setdefault(_ITEM.sub("", name), []).append(name)
        for stem, (name, *more) in lists.items():  # of a list the first item that has changed
            values = arguments[name]
            if all(isinstance(value, (int, float, complex, str)) for value in values):
                mend = "Pass a tensor in place of it" if isinstance(values[1], str) else _AS_TENSOR
                what = stem if more else name
                what = what if what.startswith("argument ") else f"argument {what}"
                self._count(what, values, seconds, mend)
        for change in attributes:
            if not change.values:
                continue
            mend = "Pass it to the model as an argument, torch.tensor(x)"
            self._count(f"attribute {change}", change.values, seconds, mend)

    def warn_of_many(self, traced: int, call: Call) -> None:
        """Warn once if the model is traced again and again."""
        if traced == MANY:
            log.get("RaNNCModule").warning(
                "The model was traced %d times, the last time for %s; a graph is specialized on numbers and strings "
                "among the arguments and on sizes that the code treats differently. Pass what changes from call to "
                "call as tensors",
                MANY,
                ", ".join(f"{name}: {tuple(t.shape)}" for name, t in zip(call.names, call.tensors, strict=True)),
            )

    def _count(self, name: str, values: Sequence[object], seconds: float, mend: str) -> None:
        found = self._varying.setdefault(name, _Varying())
        found.traces += 1
        found.seconds += seconds
        texts = [text if len(text) <= LONGEST else f"{text[:LONGEST]}.." for text in map(repr, values)]
        found.values += [text for text in dict.fromkeys(texts) if text not in found.values]
        if found.traces == TRACES:
            log.get("RaNNCModule").warning(
                "The model was traced for each value of %s (%s; the last %d traces took %.1f s), because the value "
                "is part of its graph. %s",
                name,
                ", ".join(found.values),
                TRACES - 1,
                found.seconds,
                mend,
            )
