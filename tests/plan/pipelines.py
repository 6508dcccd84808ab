"""Layouts of plain pipelines."""

from __future__ import annotations

import itertools

from rannd.plan.schedule.program import Layout


def pipeline(
    *replicas: int, microbatches: int = 1, labels: bool = True, outputs: bool = False, skip: bool = False
) -> Layout:
    """Stages with so many replicas each; `labels`: the last stage reads inputs, `skip`: it reads the first one."""
    slots = iter(range(sum(replicas)))
    stages = tuple(tuple(itertools.islice(slots, count)) for count in replicas)
    last = len(stages) - 1
    edges = {(-1, 0), *((stage, stage + 1) for stage in range(last))}
    edges |= ({(-1, last)} if labels else set()) | ({(last, last + 1)} if outputs else set())
    edges |= {(0, last)} if skip else set()
    inner = tuple(sorted(edge for edge in edges if edge[0] >= 0 and edge[1] <= last))
    return Layout(sum(replicas), microbatches, stages, tuple(sorted(edges)), inner)
