"""The user's modules that stages consist of, as text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rannd.graph.fx.ir import TaskGraph


def stage_modules(graph: TaskGraph, stages: Sequence[Sequence[int]]) -> list[str]:
    """Name the first and last module of each stage: ``transformer.wte..h.4``, ``transformer.h.0..4``, ``head``.

    A module stands for all inside it, unless another stage runs a part of it. '' for a stage whose operators are in no
    module but the model itself.

    Args:
        graph: The task graph.
        stages: Index of the operators of each stage, ascending.
    """
    homes: dict[str, set[int]] = {}
    for number, ops in enumerate(stages):
        for module in {graph.ops[op].module for op in ops}:
            for each in _around(module):
                homes.setdefault(each, set()).add(number)

    def whole(module: str) -> str:
        return next((each for each in _around(module) if len(homes[each]) == 1), module)

    named = [[graph.ops[op].module for op in ops if graph.ops[op].module] for ops in stages]
    return [_range(whole(modules[0]), whole(modules[-1])) if modules else "" for modules in named]


@lru_cache(maxsize=1 << 16)
def _around(module: str) -> tuple[str, ...]:
    """Return the modules that contain a module, outermost first, and the module itself: a, a.b, a.b.c."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _range(first: str, last: str) -> str:
    if first == last:
        return first
    ours, theirs = first.split("."), last.split(".")
    shared = next((count for count, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    return f"{first}..{'.'.join(theirs[shared:])}"
