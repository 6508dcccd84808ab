"""Estimates costs of blocks on devices that are not available, with a roofline model of the operators of a task graph.

No torch in this file. Williams, Waterman, Patterson: Roofline (CACM 2009). For each operator, in microseconds,

    op_latency_us + max(FLOPs / rate of its dtype, bytes read and written / memory bandwidth)

and 0 for views. The backward is estimated the same way, one operator per kind of gradient: of the inputs, and of the
parameters (those that may be delayed, see delayed_gradients.py, are `weight_us`), each with the forward's FLOPs; fused
attention recomputes its weights, 2.5 times the forward's FLOPs. The gradient of a value with several readers is
accumulated in memory. Rates come from a cluster's file. docs/clusters.md compares such costs with measured ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rannd.config.cluster import Cluster, Link
from rannd.graph.fx.ir import Op, Size, TaskGraph
from rannd.profile.costs import BlockCost, CostTable, LinkCost
from rannd.profile.delayed_gradients import separable
from rannd.profile.kept_values import ATTENTION, LOOKUPS, PRODUCTS, SUMS, Memory, name_of

ATTENTION_BACKWARD = 2.5
"""Five matrix products instead of two (Dao: FlashAttention-2, 2023, section 3)."""
_LOSSES = frozenset({"cross_entropy_loss", "softmax", "log_softmax"})
"""Operators that write an intermediate as large as their input: probabilities or log probabilities."""


def analytic_costs(
    graph: TaskGraph, blocks: Sequence[Sequence[int]], cluster: Cluster, *, fewest: int, most: int, nodes: int
) -> CostTable:
    """Return costs of `blocks` (op numbers) on devices of `cluster`, for microbatches of `fewest` to `most` rows.

    Times follow the formula above for `fewest` and for `most` rows, with linear interpolation in between, which is
    never below the formula. With more than one of `nodes`, links between nodes are included.
    """
    roofline = _Roofline(graph, cluster)
    inside, between = cluster.link.inside, cluster.link.between
    return CostTable(
        tuple(roofline.block(ops, fewest, most) for ops in blocks),
        link_cost(cluster, inside),
        link_cost(cluster, between) if between is not None and nodes > 1 else None,
    )


def link_cost(cluster: Cluster, link: Link) -> LinkCost:
    """Return a link of a cluster as a `LinkCost`. A ring all-reduce of two ranks has two messages, a transfer has
    one."""
    rate = cluster.link_bytes_per_us(link)
    return LinkCost(link.latency_us, rate, 2 * link.latency_us, rate)


class _Roofline:
    """Roofline times of the operators of one graph on one kind of device."""

    def __init__(self, graph: TaskGraph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self.memory = Memory(graph)
        self.separable = separable(graph)
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
        delayed = [number for number in ops if number in self.separable]
        later = _line(
            fewest, most, *(sum(self.weight_us(number, rows) for number in delayed) for rows in (fewest, most))
        )
        activations, kept = self.memory.kept(ops)
        adding = sum(self.add_us(number) for number in ops)
        return BlockCost(forward, backward + weight, activations, later, 0, tuple(sorted(kept)), adding)

    # -- operators --------------------------------------------------------------------------------------------

    def forward_us(self, number: int, rows: int) -> float:
        """Forward time of one op for a microbatch of `rows` rows."""
        if self.memory.view[number]:
            return 0.0
        op = self.graph.ops[number]
        name, made, read = name_of(op), self._made(number, rows), self._read(op, rows)
        moved = made + read
        if name in LOOKUPS:
            moved = 2 * made
        elif name in _LOSSES:
            moved += read
        # Autocast's copy of a parameter is written, then read instead of the parameter.
        moved += 2 * self.memory.converted(op).at(rows)
        return self._us(op, op.flops.at(rows), moved)

    def backward_us(self, number: int, rows: int) -> float:
        """Time to compute the gradients of an op's inputs, without parameters."""
        op = self.graph.ops[number]
        graded = [value for value in op.inputs if self.graph.values[value].requires_grad]
        if not graded or not self._trained(op):
            return 0.0
        made = self._made(number, rows)
        gradients = [self.graph.values[value].bytes.at(rows) for value in graded]
        again = sum(self.graph.values[value].bytes.at(rows) * max(self.readers[value] - 1, 0) for value in op.outputs)
        added = 3 * again / self.cluster.memory_bytes_per_us
        if self.memory.view[number]:
            # The backward of a slice fills a gradient of the whole; that of any other view moves no data.
            return added + (2 * made / self.cluster.memory_bytes_per_us if self.memory.part[number] else 0.0)
        name = name_of(op)
        if name in SUMS:
            # The gradient is passed on unchanged, except to operands that were broadcast: these reduce it.
            spread = [gradient for gradient in gradients if gradient != made]
            return added + self._us(op, 0.0, sum(made + gradient for gradient in spread))
        factor = float(len(graded)) if name in PRODUCTS else ATTENTION_BACKWARD if name == ATTENTION else 1.0
        # The input of a product with a parameter is read only for the parameter's gradient.
        alone = name in PRODUCTS and len(op.inputs) == 1
        kept = 0.0 if alone else sum(self.graph.values[value].bytes.at(rows) for value in self.memory.named(op))
        if name == "cross_entropy_loss":
            kept *= 3  # the gradient of the probabilities is an intermediate
        held = sum(self.graph.params[index].bytes for index in op.params)
        return added + self._us(op, factor * op.flops.at(rows), made + kept + held + sum(gradients))

    def weight_us(self, number: int, rows: int) -> float:
        """Time to compute the gradients of an op's parameters."""
        op = self.graph.ops[number]
        params = [self.graph.params[index] for index in op.params if self.graph.params[index].trainable]
        if not params or self.memory.view[number] or not self._trained(op):
            return 0.0
        values = sum(self.graph.values[value].bytes.at(rows) for value in op.inputs)
        written = sum(param.bytes for param in params)
        moved = self._made(number, rows) + (self._made(number, rows) if name_of(op) in LOOKUPS else values) + written
        return self._us(op, op.flops.at(rows), moved)

    def add_us(self, number: int) -> float:
        """Time to accumulate the gradients of an op's parameters."""
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
    """Return the line through two points; with one point, the one through the origin."""
    if fewest == most:
        return Size(0.0, more / most)
    slope = (more - less) / (most - fewest)
    return Size(less - slope * fewest, slope)
