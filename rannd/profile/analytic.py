"""What blocks would cost on devices that are not there: a roofline over the operators of a task graph.

No torch in this file. Williams, Waterman, Patterson: Roofline (CACM 2009). For each operator, in microseconds,

    op_latency_us + max(operations / rate of its type, bytes read and written / bandwidth of the memory)

and nothing for views. Backwards are the same, an operator for each kind of gradient: of what the forward has read, and
of its parameters (`weight_us`), each with the forward's operations; fused attention computes its weights again, 2.5
times the forward's. A gradient that several readers add to is added up in memory. Rates come from a cluster's file.
docs/clusters.md says how far such costs are from measured ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rannd.config.cluster import Cluster, Link
from rannd.graph.fx.ir import Op, Size, TaskGraph
from rannd.profile.costs import BlockCost, CostTable, LinkCost
from rannd.profile.kept_values import ATTENTION, LOOKUPS, PRODUCTS, SUMS, Memory, name_of

ATTENTION_BACKWARD = 2.5
"""Five products of matrices instead of two (Dao: FlashAttention-2, 2023, section 3)."""
_LOSSES = frozenset({"cross_entropy_loss", "softmax", "log_softmax"})
"""Write what they read once more on the way: probabilities, or their logarithms."""


def analytic_costs(
    graph: TaskGraph, blocks: Sequence[Sequence[int]], cluster: Cluster, *, fewest: int, most: int, nodes: int
) -> CostTable:
    """Costs of `blocks` (op numbers) on devices of `cluster`, for pieces of `fewest` to `most` rows.

    Times are right, by the formula above, for `fewest` and for `most` rows, and between them on a line, which is never
    below the formula. `nodes`: with more than one, links between nodes count.
    """
    roofline = _Roofline(graph, cluster)
    inside, between = cluster.link.inside, cluster.link.between
    return CostTable(
        tuple(roofline.block(ops, fewest, most) for ops in blocks),
        link_cost(cluster, inside),
        link_cost(cluster, between) if between is not None and nodes > 1 else None,
    )


def link_cost(cluster: Cluster, link: Link) -> LinkCost:
    """A link of a cluster as the planner sees it. A ring all-reduce has two messages where a transfer has one."""
    rate = cluster.link_bytes_per_us(link)
    return LinkCost(link.latency_us, rate, 2 * link.latency_us, rate)


class _Roofline:
    """Times of the operators of one graph on one kind of device."""

    def __init__(self, graph: TaskGraph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self.memory = Memory(graph)
        self.readers = Counter(
            value
            for op in graph.ops
            if any(graph.values[made].requires_grad for made in op.outputs)
            for value in op.inputs
        )

    def block(self, ops: Sequence[int], fewest: int, most: int) -> BlockCost:
        forward, backward, weight = (
            _line(fewest, most, *(sum(part(number, rows) for number in ops) for rows in (fewest, most)))
            for part in (self.forward_us, self.backward_us, self.weight_us)
        )
        activations, kept = self.memory.kept(ops)
        adding = sum(self.add_us(number) for number in ops)
        return BlockCost(forward, backward + weight, activations, weight, 0, tuple(sorted(kept)), adding)

    # -- operators --------------------------------------------------------------------------------------------

    def forward_us(self, number: int, rows: int) -> float:
        """The forward of one op for a piece of `rows` rows."""
        if self.memory.view[number]:
            return 0.0
        op = self.graph.ops[number]
        name, made, read = name_of(op), self._made(number, rows), self._read(op, rows)
        moved = made + read
        if name in LOOKUPS:
            moved = 2 * made
        elif name in _LOSSES:
            moved += read
        # The copy that autocast makes of a parameter is written, and read instead.
        moved += 2 * self.memory.converted(op).at(rows)
        return self._us(op, op.flops.at(rows), moved)

    def backward_us(self, number: int, rows: int) -> float:
        """Gradients of what an op has read, parameters aside."""
        op = self.graph.ops[number]
        graded = [value for value in op.inputs if self.graph.values[value].requires_grad]
        if not graded or not self._trained(op):
            return 0.0
        made = self._made(number, rows)
        gradients = [self.graph.values[value].bytes.at(rows) for value in graded]
        again = sum(self.graph.values[value].bytes.at(rows) * max(self.readers[value] - 1, 0) for value in op.outputs)
        added = 3 * again / self.cluster.memory_bytes_per_us
        if self.memory.view[number]:
            # Parts of one gradient are put together where it is whole; anything else is seen through.
            return added + (2 * made / self.cluster.memory_bytes_per_us if self.memory.part[number] else 0.0)
        name = name_of(op)
        if name in SUMS:
            # Handed on as it is, but for what was spread over a larger sum.
            spread = [gradient for gradient in gradients if gradient != made]
            return added + self._us(op, 0.0, sum(made + gradient for gradient in spread))
        factor = float(len(graded)) if name in PRODUCTS else ATTENTION_BACKWARD if name == ATTENTION else 1.0
        # The input of a product with a parameter is read for the parameter's gradient only.
        alone = name in PRODUCTS and len(op.inputs) == 1
        kept = 0.0 if alone else sum(self.graph.values[value].bytes.at(rows) for value in self.memory.named(op))
        if name == "cross_entropy_loss":
            kept *= 3  # a gradient of the probabilities lies between
        held = sum(self.graph.params[index].bytes for index in op.params)
        return added + self._us(op, factor * op.flops.at(rows), made + kept + held + sum(gradients))

    def weight_us(self, number: int, rows: int) -> float:
        """Gradients of an op's parameters."""
        op = self.graph.ops[number]
        params = [self.graph.params[index] for index in op.params if self.graph.params[index].trainable]
        if not params or self.memory.view[number] or not self._trained(op):
            return 0.0
        values = sum(self.graph.values[value].bytes.at(rows) for value in op.inputs)
        written = sum(param.bytes for param in params)
        moved = self._made(number, rows) + (self._made(number, rows) if name_of(op) in LOOKUPS else values) + written
        return self._us(op, op.flops.at(rows), moved)

    def add_us(self, number: int) -> float:
        """To add gradients of an op's parameters to others."""
        params = [self.graph.params[index] for index in self.graph.ops[number].params]
        sizes = [param.bytes for param in params if param.trainable]
        return sum(self.cluster.op_latency_us + 3 * size / self.cluster.memory_bytes_per_us for size in sizes)

    def _us(self, op: Op, flops: float, moved: float) -> float:
        computing = flops / self.cluster.flops_per_us(op.dtype)
        return self.cluster.op_latency_us + max(computing, moved / self.cluster.memory_bytes_per_us)

    def _trained(self, op: Op) -> bool:
        return any(self.graph.values[value].requires_grad for value in op.outputs)

    def _made(self, number: int, rows: int) -> float:
        return self.memory.made[number].at(rows)

    def _read(self, op: Op, rows: int) -> float:
        values = sum(self.graph.values[value].bytes.at(rows) for value in op.inputs)
        return values + sum(self.graph.params[index].bytes for index in op.params)


def _line(fewest: int, most: int, less: float, more: float) -> Size:
    """The line through two points; through one point, proportional to the rows."""
    if fewest == most:
        return Size(0.0, more / most)
    slope = (more - less) / (most - fewest)
    return Size(less - slope * fewest, slope)
