"""Exhaustive search for the least E, written from docs/planning.md and apart from the planner.

It enumerates every plan and adds up each from the graph's values and parameters, one stage at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from rannd.graph.ir import TaskGraph
from rannd.plan.blocks import Block
from rannd.plan.options import PlanOptions
from rannd.profile.costs import CostTable


class Reference:
    """One instance: a graph, its blocks and costs, devices and a batch."""

    def __init__(
        self,
        graph: TaskGraph,
        blocks: Sequence[Block],
        costs: CostTable,
        world: int,
        batch_rows: int,
        options: PlanOptions,
    ) -> None:
        self.graph, self.blocks, self.costs = graph, blocks, costs
        self.world, self.batch_rows, self.options = world, batch_rows, options
        self.home = {op: index for index, block in enumerate(blocks) for op in block.ops}
        self.readers = [
            {self.home[at] for at, op in enumerate(graph.ops) if index in op.inputs}
            for index in range(len(graph.values))
        ]

    def plans(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """(bounds of the stages, replicas, microbatches) of all plans that the options allow."""
        options, count = self.options, len(self.blocks)
        rows = math.ceil(self.batch_rows / self.world)
        for stages in range(1, min(count, self.world) + 1):
            if options.partition_num not in (0, stages):
                continue
            for cuts in combinations(range(1, count), stages - 1):
                for shares in combinations(range(1, self.world), stages - 1):
                    replicas = tuple(b - a for a, b in pairwise((0, *shares, self.world)))
                    if options.replica_num and set(replicas) != {options.replica_num}:
                        continue
                    if options.limit_dev_num_pot and any(each not in (1, 2, 4, 8, self.world) for each in replicas):
                        continue
                    for microbatches in (1, 2, 4, 8):
                        if microbatches == 1 or (
                            microbatches <= min(rows, options.max_pipeline) and not self.graph.rows_coupled
                        ):
                            yield (0, *cuts, count), replicas, microbatches

    def step_us(
        self, bounds: tuple[int, ...], replicas: tuple[int, ...], microbatches: int, again: Sequence[bool]
    ) -> float:
        """E of one plan."""
        link, pieces = self.costs.link, self.world * microbatches
        rows = math.ceil(math.ceil(self.batch_rows / self.world) / microbatches)
        total = longest_forward = longest_backward = longest_reduce = 0.0
        for (start, end), count, recompute in zip(pairwise(bounds), replicas, again, strict=True):
            most = math.ceil(pieces / count)
            forward = sum(block.forward_us.at(rows) for block in self.costs.blocks[start:end])
            backward = sum(block.backward_us.at(rows) for block in self.costs.blocks[start:end])
            backward += forward if recompute else 0.0
            if len(replicas) > 1:
                forward += link.p2p_us(self._bytes(start, end, "received", rows))
                backward += link.p2p_us(self._bytes(start, end, "sent_grad", rows))
                total += most * link.p2p_us(self._bytes(start, end, "given", rows))
                total += most * link.p2p_us(self._bytes(start, end, "output_grad", rows))
            total += forward + backward
            longest_forward = max(longest_forward, (most - 1) * forward)
            longest_backward = max(longest_backward, (most - 1) * backward)
            own, shared = self._gradients(start, end)
            reduce = link.allreduce_us(own, count) + link.allreduce_us(shared, self.world)
            longest_reduce = max(longest_reduce, reduce)
        if len(replicas) > 1:
            values = self.graph.values
            outputs = sum(value.bytes.at(rows) for value in values if value.is_output and value.producer >= 0)
            grads = sum(
                value.bytes.at(rows)
                for value, readers in zip(values, self.readers, strict=True)
                if value.producer < 0 and value.requires_grad and readers
            )
            total += microbatches * (link.p2p_us(outputs) + link.p2p_us(grads))
        return total + longest_forward + longest_backward + longest_reduce

    def memory(self, start: int, end: int, replicas: int, microbatches: int, *, recompute: bool) -> float:
        """Bytes of one replica of a stage."""
        rows = math.ceil(math.ceil(self.batch_rows / self.world) / microbatches)
        most = math.ceil(self.world * microbatches / replicas)
        held = sum(self._bytes(start, end, what, rows) for what in ("received", "given", "sent", "output"))
        kept = sum(block.activation_bytes.at(rows) for block in self.costs.blocks[start:end])
        params = sum(self.graph.params[index].bytes for index in self._params(start, end))
        unused = sum(self.graph.params[index].bytes for index in self.graph.unused_params) if start == 0 else 0
        state = (2 + self.options.opt_param_factor) * sum(self._gradients(start, end))
        return params + unused + state + most * held + kept * (1 if recompute else most)

    def best(self, limit: float) -> float | None:
        """The least E of all plans that fit, recomputing only where nothing fits without."""
        for allow in (True,) if self.options.checkpointing else (False, True):
            found = []
            for bounds, replicas, microbatches in self.plans():
                again, fits = [], True
                for (start, end), count in zip(pairwise(bounds), replicas, strict=True):
                    plain = self.memory(start, end, count, microbatches, recompute=False)
                    recompute = self.options.checkpointing or (allow and plain > limit)
                    again.append(recompute)
                    fits &= self.memory(start, end, count, microbatches, recompute=recompute) <= limit
                if fits:
                    found.append(self.step_us(bounds, replicas, microbatches, again))
            if found:
                return min(found)
        return None

    def smallest_memory(self) -> float:
        """The memory per device with which some plan just fits."""
        return min(
            max(
                self.memory(start, end, count, microbatches, recompute=True)
                for (start, end), count in zip(pairwise(bounds), replicas, strict=True)
            )
            for bounds, replicas, microbatches in self.plans()
        )

    def _bytes(self, start: int, end: int, what: str, rows: int) -> float:
        """Sizes of the values of one kind, each once, for blocks `start` to `end` - 1."""
        total = 0.0
        for value, readers in zip(self.graph.values, self.readers, strict=True):
            home = self.home[value.producer] if value.producer >= 0 else None
            inside = home is not None and start <= home < end
            read_inside = any(start <= reader < end for reader in readers)
            read_behind = any(reader >= end for reader in readers)
            counts = {
                "received": home is not None and home < start and read_inside,
                "given": home is None and read_inside,
                "sent": inside and read_behind,
                "sent_grad": inside and read_behind and value.requires_grad,
                "output": inside and value.is_output,
                "output_grad": inside and value.is_output and value.requires_grad,
            }
            total += value.bytes.at(rows) if counts[what] else 0.0
        return total

    def _params(self, start: int, end: int) -> set[int]:
        return {param for block in self.blocks[start:end] for op in block.ops for param in self.graph.ops[op].params}

    def _gradients(self, start: int, end: int) -> tuple[int, int]:
        """Bytes of trainable parameters that only these blocks read, and of those that others read too."""
        inside = {index for index in self._params(start, end) if self.graph.params[index].trainable}
        outside = self._params(0, start) | self._params(end, len(self.blocks))
        own = sum(self.graph.params[index].bytes for index in inside - outside)
        return own, sum(self.graph.params[index].bytes for index in inside & outside)
