"""First phase: atoms, the smallest sets of ops that may be placed on different stages.

Ops of one group (in-place ops and their aliases, tuple producers, mutated buffers) become one atom. An op on a path
between two ops of a group has to join them, or two stages would wait for each other:

    a(group 7) -> b -> c(group 7)        b reads a, c reads b: {a, b, c} is one atom

So an atom is a strongly connected component of the graph with its groups contracted (Tarjan 1972).
"""

from __future__ import annotations

import heapq

from rannd.graph.fx.ir import TaskGraph


def make_atoms(graph: TaskGraph) -> tuple[tuple[int, ...], ...]:
    """Return sets of op indices (each sorted), in a topological order close to the program's order.

    Every op is in exactly one atom, every group is inside one atom, and an atom reads only values of itself and of
    earlier atoms.
    """
    if not graph.ops:
        return ()
    group_ids: dict[int, int] = {}
    group_of = [group_ids.setdefault(op.group, len(group_ids)) for op in graph.ops]
    successors = _successors(graph, group_of, len(group_ids))
    component_of = _components(successors)

    owner = [component_of[group] for group in group_of]
    count = max(component_of) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for op, component in enumerate(owner):
        members[component].append(op)
    first = [(max(graph.ops[op].segment for op in ops), ops[0]) for ops in members]
    order = _topological(_successors(graph, owner, count), first)
    return tuple(tuple(members[component]) for component in order)


def _successors(graph: TaskGraph, owner: list[int], count: int) -> list[list[int]]:
    """Return the edges between the owners of ops, without self-loops and duplicates."""
    found: list[set[int]] = [set() for _ in range(count)]
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            producer = graph.values[value].producer
            if producer >= 0 and owner[producer] != owner[index]:
                found[owner[producer]].add(owner[index])
    return [sorted(each) for each in found]


def _components(successors: list[list[int]]) -> list[int]:
    """Return the number of the strongly connected component of each node (Tarjan's algorithm, without recursion)."""
    count = len(successors)
    index = [-1] * count
    low = [0] * count
    component = [-1] * count
    path: list[int] = []
    clock = found = 0
    for root in range(count):
        if index[root] >= 0:
            continue
        index[root] = low[root] = clock
        clock += 1
        path.append(root)
        work = [(root, iter(successors[root]))]
        while work:
            node, rest = work[-1]
            for successor in rest:
                if index[successor] < 0:
                    index[successor] = low[successor] = clock
                    clock += 1
                    path.append(successor)
                    work.append((successor, iter(successors[successor])))
                    break
                if component[successor] < 0:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    while True:
                        member = path.pop()
                        component[member] = found
                        if member == node:
                            break
                    found += 1
    return component


def _topological(successors: list[list[int]], first: list[tuple[int, int]]) -> list[int]:
    """Sort topologically (Kahn); among ready nodes the lowest segment, then the first op in program order, leads."""
    waiting = [0] * len(successors)
    for each in successors:
        for successor in each:
            waiting[successor] += 1
    ready = [(first[node], node) for node in range(len(successors)) if waiting[node] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for successor in successors[node]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                heapq.heappush(ready, (first[successor], successor))
    return order
