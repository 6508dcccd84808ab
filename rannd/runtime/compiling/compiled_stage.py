"""Runs a stage unit by unit, compiled ones as torch.compile's code, others eagerly."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from rannd import log
from rannd.graph.partition.cut import Part
from rannd.runtime.compiling.compiler import Code, Uncompiled
from rannd.runtime.compiling.stage_units import Unit

MOST_LAYOUTS = 3
"""How often a unit is compiled again because its arguments lie in memory in other ways."""

Way: TypeAlias = tuple[int, bool, bool]
"""What code is compiled for: rows of a piece, whether autograd records, whether backward runs inside the call."""


@dataclass(frozen=True)
class _Step:
    """A unit with the places of its arguments in the stage's values and tensors."""

    unit: Unit
    tensors: tuple[int, ...]
    last: tuple[Node, ...]
    """Values that no later unit reads."""


class CompiledStage:
    """A stage whose units are compiled.

    Args:
        part: The whole stage.
        units: Its units, in an order in which they can run.
        codes: Code of each unit for each way in which the stage is run, None where a unit runs eagerly.
        again: Compiles a unit for other layouts of its arguments; None if it cannot.
    """

    def __init__(
        self,
        part: Part,
        units: Sequence[Unit],
        codes: Mapping[Way, list[Code | None]],
        again: Callable[[int, Way, Sequence[torch.Tensor]], Code | None],
    ) -> None:
        self._part = part
        self._codes = codes
        self._again = again
        self._more: dict[tuple[Way, int], list[Code]] = {}
        """Code for other layouts than expected, by unit."""
        place = {name: number for number, name in enumerate(part.tensors)}
        kept = set(part.outputs)
        uses = Counter(node for unit in units for node in unit.part.inputs)
        self._steps = []
        for unit in units:
            uses.subtract(unit.part.inputs)
            last = tuple(node for node in unit.part.inputs if not uses[node] and node not in kept)
            self._steps.append(_Step(unit, tuple(place[name] for name in unit.part.tensors), last))
        self._told: set[object] = set()

    def run(
        self, rows: int, inputs: Mapping[Node, torch.Tensor], tensors: Sequence[torch.Tensor], *, inside: bool
    ) -> Sequence[Any]:
        """Run a piece; returns the outputs of the stage. `inside`: its backward runs inside the call."""
        if torch.is_inference_mode_enabled():
            # Guards take its tensors for others than those that were compiled for.
            with torch.inference_mode(False), torch.no_grad():
                return self.run(
                    rows,
                    {node: each.clone() if each.is_inference() else each for node, each in inputs.items()},
                    tensors,
                    inside=inside,
                )
        way = rows, torch.is_grad_enabled(), inside
        codes = self._codes.get(way)
        if codes is None:
            self._tell(way, f"Pieces of {rows} rows{_told_of(way)} run eagerly: {self._others(way)}")
            return self._part.module(*inputs.values(), *tensors, *self._part.numbers_at(rows))  # type: ignore[no-any-return]
        values = dict(inputs)
        for number, (step, code) in enumerate(zip(self._steps, codes, strict=True)):
            part = step.unit.part
            arguments = [*(values[node] for node in part.inputs), *(tensors[place] for place in step.tensors)]
            for node in step.last:
                del values[node]
            if code is None:
                outputs = part.module(*arguments, *part.numbers_at(rows))
            else:
                try:
                    outputs = code(*arguments)
                except Uncompiled as exc:
                    outputs = self._otherwise(number, way, arguments, str(exc))
            del arguments
            values.update(zip(part.outputs, outputs, strict=True))
        return [values[node] for node in self._part.outputs]

    def _otherwise(self, number: int, way: Way, arguments: list[torch.Tensor], why: str) -> Any:
        """Run a unit whose arguments are others than those that it was compiled for: with code for them, or eagerly."""
        codes = self._more.setdefault((way, number), [])
        for code in codes:
            try:
                return code(*arguments)
            except Uncompiled as exc:
                why = str(exc)
        if len(codes) < MOST_LAYOUTS:
            self._tell(why, f"Compiling blocks again, for calls that are not as they were before: {why}")
            made = self._again(number, way, arguments)
            if made is not None:
                codes.append(made)
                try:
                    return made(*arguments)
                except Uncompiled as exc:
                    why = str(exc)
        self._tell(number, f"A block runs eagerly, because calls are not as they were before: {why}")
        part = self._steps[number].unit.part
        return part.module(*arguments, *part.numbers_at(way[0]))

    def _others(self, way: Way) -> str:
        sizes = sorted({rows for rows, grad, inside in self._codes if (grad, inside) == way[1:]}, reverse=True)
        return (
            f"blocks are compiled for pieces of {' and '.join(map(str, sizes))} rows"
            if sizes
            else "no block is compiled for them"
        )

    def _tell(self, what: object, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.get("RaNNCModule").info("%s", text)


@contextlib.contextmanager
def backward_again() -> Iterator[None]:
    """For a backward that may run again (retain_graph): torch refuses it for compiled code, unless told otherwise."""
    import torch._functorch.config

    with torch._functorch.config.patch(donated_buffer=False):
        yield


def _told_of(way: Way) -> str:
    return "" if way[1] else " without gradients"
