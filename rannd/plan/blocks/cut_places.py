"""Positions where a graph may be cut: anywhere, or only at the user's CutPoints."""

from __future__ import annotations

from collections.abc import Sequence

from rannd.graph.fx.ir import TaskGraph


def has_cut_points(graph: TaskGraph) -> bool:
    """Whether the graph may be cut only at CutPoints."""
    return any(op.segment for op in graph.ops)


def cut_places(graph: TaskGraph, parts: Sequence[Sequence[int]]) -> list[bool]:
    """Return for each part (op indices, in topological order), and for the end, whether a stage may begin there.

    At a CutPoint, all ops that run before it must be in earlier parts than all that run after it. The first position
    and the end always count.
    """
    count = len(parts)
    if not has_cut_points(graph):
        return [True] * (count + 1)
    found = [True] * (count + 1)
    segments = [[graph.ops[op].segment for op in part] for part in parts]
    before = [-1] * (count + 1)
    after = [max(op.segment for op in graph.ops) + 1] * (count + 1)
    for index, numbers in enumerate(segments):
        before[index + 1] = max(before[index], *numbers)
    for index in range(count - 1, -1, -1):
        after[index] = min(after[index + 1], *segments[index])
    for index in range(1, count):
        found[index] = before[index] < after[index]
    return found
