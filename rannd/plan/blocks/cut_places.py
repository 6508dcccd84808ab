"""Where a model may be cut: anywhere, or where the user's CutPoints are."""

from __future__ import annotations

from collections.abc import Sequence

from rannd.graph.fx.ir import TaskGraph


def has_cut_points(graph: TaskGraph) -> bool:
    """Whether the graph may be cut at CutPoints only."""
    return any(op.segment for op in graph.ops)


def cut_places(graph: TaskGraph, parts: Sequence[Sequence[int]]) -> list[bool]:
    """For each part (of op indexes, in topological order), and one place more, whether a stage may begin with it.

    A CutPoint is a place where all that runs before it is in earlier parts than all that runs after it. The first
    place and the one behind the last part always are.
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
