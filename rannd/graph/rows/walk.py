"""State of a batch-dimension analysis in progress."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from rannd.graph.rows.rules.states import COUNT, FIXED, State


@dataclass
class Walk:
    """One pass over a graph and its subgraphs; its result is a `rannd.graph.rows.analysis.RowAnalysis`."""

    states: dict[Node, State] = field(default_factory=dict)
    coupled: str | None = None
    weighted: list[tuple[Node, str]] = field(default_factory=list)
    masked: list[Node] = field(default_factory=list)
    squeezed: list[Node] = field(default_factory=list)
    whole: bool = False
    """Mini-batches run unsplit, each on one rank."""
    early: Set[Node] = frozenset()
    hidden: dict[Node, str] = field(default_factory=dict)
    """Early nodes that mix samples, with the reason; it matters only if they are used other than as a denominator."""
    inside: int = 0
    """Nesting depth of subgraphs; weights cannot be inserted inside one."""

    def couple(self, node: Node, reason: str) -> None:
        """Record that `node` mixes samples; the first reason is reported to the user."""
        source = next((other for other in node.all_input_nodes if other in self.hidden), None)
        told = self.hidden[source] if source is not None else f"{reason} ({node.name}{_where(node)})"
        if node in self.early:
            self.hidden[node] = told
        elif self.coupled is None:
            self.coupled = told


def state_of(walk: Walk, value: Any) -> State:
    """State of an argument, which may be a node, a constant or a list."""
    if isinstance(value, Node):
        return walk.states[value]
    if isinstance(value, (list, tuple)) and any(
        isinstance(item, Node) and walk.states[item] is COUNT for item in value
    ):
        return COUNT
    return FIXED


def _where(node: Node) -> str:
    module = node.meta.get("module", "")
    return f" in module {module}" if module else ""
