"""Structural hash of a block of operators: equal for equal layers, wherever they are in a model.

No torch in this file, as in ``ir``: it sees only the task graph.

A block's hash covers the hashes of its operators and their dataflow. Inputs and parameters are numbered by first use,
so equal layers have equal hashes, whatever the names of their modules and parameters:

    %0  linear      reads  <0      @0 @1      <0: size in bytes, requires_grad
    %1  gelu        reads  %0
    %2  linear      reads  %1      @2 @3      output of the block
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from rannd.graph.fx.ir import TaskGraph


def block_hash(task: TaskGraph, ops: Iterable[int]) -> str:
    """Hash of the block made of `ops` (op numbers, in any order)."""
    return block_hashes(task, [tuple(ops)])[0]


def block_hashes(task: TaskGraph, blocks: Sequence[Iterable[int]]) -> list[str]:
    """Hash of each block; `blocks` are op numbers and may overlap."""
    readers: list[set[int]] = [set() for _ in task.values]
    for number, op in enumerate(task.ops):
        for value in op.inputs:
            readers[value].add(number)
    return [_hash(task, frozenset(ops), readers) for ops in blocks]


def crossing(task: TaskGraph, blocks: Sequence[Iterable[int]]) -> list[tuple[int, ...]]:
    """Inputs and outputs of each block, in the order of its hash.

    Blocks with the same hash therefore have corresponding values at the same positions.
    """
    readers: list[set[int]] = [set() for _ in task.values]
    for number, op in enumerate(task.ops):
        for value in op.inputs:
            readers[value].add(number)
    found = []
    for ops in blocks:
        members = sorted(set(ops))
        made = {value for number in members for value in task.ops[number].outputs}
        read = dict.fromkeys(value for number in members for value in task.ops[number].inputs if value not in made)
        inside = set(members)
        left = [
            value
            for number in members
            for value in task.ops[number].outputs
            if task.values[value].is_output or not readers[value] <= inside
        ]
        found.append((*read, *left))
    return found


def _hash(task: TaskGraph, members: frozenset[int], readers: Sequence[set[int]]) -> str:
    values: dict[int, str] = {}
    params: dict[int, str] = {}
    lines: list[str] = []
    outside = 0
    for place, number in enumerate(sorted(members)):
        op = task.ops[number]
        for index in op.inputs:
            if index not in values:
                values[index] = f"<{outside}"
                outside += 1
                lines.append(f"{values[index]}|{_value(task, index)}")
        for index in op.params:
            if index not in params:
                params[index] = f"@{len(params)}"
                param = task.params[index]
                lines.append(f"{params[index]}|{param.bytes}|{param.trainable}|{param.buffer}")
        read = " ".join(values[index] for index in op.inputs)
        held = " ".join(params[index] for index in op.params)
        made = []
        for output, index in enumerate(op.outputs):
            values[index] = f"%{place}.{output}"
            leaves = task.values[index].is_output or not readers[index] <= members
            made.append(f"{_value(task, index)}|{leaves}")
        lines.append(f"%{place}|{op.hash}|{op.target}|{op.flops}|{read}|{held}|{' '.join(made)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _value(task: TaskGraph, index: int) -> str:
    value = task.values[index]
    return f"{value.bytes}|{value.requires_grad}"
