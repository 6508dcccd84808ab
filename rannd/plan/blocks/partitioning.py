"""A task graph divided into atoms and grains, once; the blocks of any plan for it are made of these."""

from __future__ import annotations

from dataclasses import dataclass

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.cut_places import cut_places, has_cut_points
from rannd.plan.blocks.grains import make_grains


@dataclass(frozen=True)
class Partitioning:
    """What does not depend on the number of devices or on options. Each part is a sorted tuple of op indexes."""

    graph: TaskGraph
    atoms: tuple[tuple[int, ...], ...]
    """The smallest sets of ops that may be placed apart, in topological order."""
    grains: tuple[tuple[int, ...], ...]
    """Runs of atoms, which are measured."""

    @staticmethod
    def of(graph: TaskGraph) -> Partitioning:
        """The partitioning of a graph."""
        atoms = make_atoms(graph)
        return Partitioning(graph, atoms, make_grains(graph, atoms))

    @property
    def lost_cut_points(self) -> int:
        """Number of CutPoints that divide the graph's ops, but not what has to stay together."""
        if not has_cut_points(self.graph):
            return 0
        return len({op.segment for op in self.graph.ops}) + 1 - sum(cut_places(self.graph, self.atoms))
