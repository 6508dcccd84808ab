"""Exhaustive search for the least E, written from docs/planning.md and apart from the planner.

It enumerates every plan and adds up each from the graph's values and parameters, one stage at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.deployment import Slot
from rannd.plan.plan_options import PlanOptions
from rannd.profile.costs import CostTable
from rannd.profile.delayed_gradients import separable
from rannd.profile.kept_values import Memory


class Plan(NamedTuple):
    """A plan in all that E depends on."""

    bounds: tuple[int, ...]
    """First block of each stage, and the number of blocks."""
    replicas: tuple[int, ...]
    microbatches: int
    schedule: str
    placement: str


class Near(NamedTuple):
    """What of a stage stays inside nodes."""

    values: bool
    grads: bool
    replicas: bool


class Reference:
    """One instance: a graph, its blocks and costs, devices and a batch."""

    def __init__(
        self,
        graph: TaskGraph,
        blocks: Sequence[Block],
        costs: CostTable,
        slots: Sequence[Slot],
        batch_rows: int,
        options: PlanOptions,
        *,
        schedule: str = "1f1b",
        zero: int = 0,
    ) -> None:
        self.graph, self.blocks, self.costs = graph, blocks, costs
        self.slots, self.world, self.schedule, self.zero = slots, len(slots), schedule, zero
        self.batch_rows, self.options = batch_rows, options
        self.home = {op: index for index, block in enumerate(blocks) for op in block.ops}
        self.readers = [
            {self.home[at] for at, op in enumerate(graph.ops) if index in op.inputs}
            for index in range(len(graph.values))
        ]
        # Many plans have the same stages.
        self._bytes, self._params, self._gradients = map(cache, (self._bytes, self._params, self._gradients))  # type: ignore[method-assign]

    def plans(self) -> Iterator[Plan]:
        """All plans that the options allow."""
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
                    if self.zero >= 2 and len(set(replicas)) > 1:
                        continue
                    if options.limit_dev_num_pot and any(each not in (1, 2, 4, 8, self.world) for each in replicas):
                        continue
                    for microbatches in (1, 2, 4, 8):
                        if microbatches == 1 or (
                            microbatches <= min(rows, options.max_pipeline) and not self.graph.rows_coupled
                        ):
                            for placement in ("stages", "replicas"):
                                yield Plan((0, *cuts, count), replicas, microbatches, self.schedule, placement)

    def step_us(self, plan: Plan, again: Sequence[bool], staying: Collection[int] = ()) -> float:
        """E of one plan; `staying`: stages whose parameters stay whole until the last microbatch."""
        link, between = self.costs.link, self.costs.between or self.costs.link
        pieces = self.world * plan.microbatches
        rows = self._rows(plan.microbatches)
        several = len(plan.replicas) > 1
        runtime = self.costs.runtime
        fill = (
            runtime.call_us
            + 3
            * math.ceil(math.log2(self.world))
            * (between if self.slots[0].node != self.slots[-1].node else link).allreduce_latency_us
        )
        rounds: list[list[float]] = []
        backwards: list[float] = []
        reductions: list[float] = []
        for number, (start, end) in enumerate(pairwise(plan.bounds)):
            count = plan.replicas[number]
            near = self._near(plan, number)
            most = math.ceil(pieces / count)
            forward = sum(block.forward_us.at(rows) for block in self.costs.blocks[start:end]) + runtime.action_us
            backward = sum(block.backward_us.at(rows) for block in self.costs.blocks[start:end]) + runtime.action_us
            backward += forward if again[number] else 0.0
            adding = sum(block.add_us for block in self.costs.blocks[start:end])
            weight = 0.0
            if not again[number] and self._waits(plan, number):
                weight = sum(block.weight_us.at(rows) for block in self.costs.blocks[start:end])
            own, shared = self._gradients(start, end)
            over = link if near.replicas else between
            half = over.allreduce_us(own, count) / 2
            if self.zero == 2:
                backward = max(backward, half)
            elif self.zero == 3 and number in staying:  # gathered in the first forward of a step
                forward, backward = (max(forward, half) + (most - 1) * forward) / most, max(backward, half)
            elif self.zero == 3:
                forward, backward = max(forward, half), max(backward, 2 * half)
            host = runtime.host_us * (1 + (start > 0) + (end < len(self.blocks)))
            host += link.p2p_host_us * sum(self._bytes(start, end, what, rows) for what in ("received", "sent"))
            values = grads = 0.0
            if several:
                values = (link if near.values else between).p2p_us(self._bytes(start, end, "received", rows))
                grads = (link if near.grads else between).p2p_us(self._bytes(start, end, "sent_grad", rows))
                fill += link.p2p_us(self._bytes(start, end, "given", rows))
                fill += link.p2p_us(self._bytes(start, end, "output_grad", rows))
            fill += values + forward + grads + backward - weight + 2 * host
            if plan.schedule != "gpipe":
                filled = min(math.ceil(self.world / count) - 1, most - 1) * min(weight, forward)
                longest = max(forward + backward + adding + 2 * host, values, grads)
                rounds.append([(most - 1) * longest + weight - filled])
            else:
                each = max(forward + host, values), max(backward + adding + host, grads)
                rounds.append([(most - 1) * us for us in each])
            nodes = [slot.node for slot in self.slots]
            all_over = link if nodes[0] == nodes[-1] else between
            bucket = 25 * 2**20
            part = 0.5 if self.zero >= 2 else 1
            beside, host_own = (part * us for us in over.reduction_us(own, count))
            beside_shared, host_shared = all_over.reduction_us(shared, self.world)
            tail = max(
                over.reduction_us(min(own, bucket), count)[0] * part,
                all_over.reduction_us(min(shared, bucket), self.world)[0],
            )
            left = max(beside + beside_shared - (weight or backward), tail) + host_own + host_shared
            reductions.append(left + (half if self.zero in (1, 2) else 0.0))
            backwards.append(0.0 if plan.schedule == "zb_h1" else backward + grads)
        if several:
            fill += link.p2p_us(self._outputs(rows)) + link.p2p_us(self._inputs_grad(rows))
        left_over = max(reduction - sum(backwards[:number]) for number, reduction in enumerate(reductions))
        return fill + sum(max(each) for each in zip(*rounds, strict=True)) + left_over

    def _outputs(self, rows: int) -> float:
        return sum(value.bytes.at(rows) for value in self.graph.values if value.is_output and value.producer >= 0)

    def _inputs_grad(self, rows: int) -> float:
        return sum(
            value.bytes.at(rows)
            for value, readers in zip(self.graph.values, self.readers, strict=True)
            if value.producer < 0 and value.requires_grad and readers
        )

    def _at_ranks(self, rows: int) -> float:
        """What a rank gets back for one of its own pieces."""
        return self._outputs(rows) + self._inputs_grad(rows)

    def _near(self, plan: Plan, number: int) -> Near:
        """Whether what a stage receives, gets back, and reduces stays inside nodes."""
        nodes = [slot.node for slot in self.slots]
        count = plan.replicas[number]
        if nodes[0] == nodes[-1]:
            return Near(True, True, True)
        if plan.placement == "replicas" and len(plan.replicas) > 1:
            first = sum(plan.replicas[:number])
            last = first + count - 1
            before = first == 0 or nodes[first - 1] == nodes[last]
            behind = last + 1 == self.world or nodes[first] == nodes[last + 1]
            return Near(before, behind, nodes[first] == nodes[last])
        world = self.world
        inside = all(
            len({nodes[at] for at in range(world) if (at + 1) * count > g * world and at * count < (g + 1) * world})
            == 1
            for g in range(count)
        )
        return Near(inside, inside, False)

    def in_flight(self, plan: Plan, number: int, *, recompute: bool) -> int:
        """Most pieces of a stage between forward and the end of backward."""
        most = math.ceil(self.world * plan.microbatches / plan.replicas[number])
        if plan.schedule == "gpipe":
            return most
        if not recompute and self._waits(plan, number):
            return min(most, math.ceil(self.world / plan.replicas[number]) + 1)
        if number + 1 == len(plan.replicas):
            return 1
        return min(most, math.ceil(sum(plan.replicas[number:]) / plan.replicas[number]) + 1)

    def memory(self, plan: Plan, number: int, *, recompute: bool) -> float:
        """Bytes of one replica of a stage."""
        start, end = plan.bounds[number : number + 2]
        rows = self._rows(plan.microbatches)
        flying = self.in_flight(plan, number, recompute=recompute)
        pieces = math.ceil(self.world * plan.microbatches / plan.replicas[number])
        received = self._bytes(start, end, "received", rows)
        held = received + sum(self._bytes(start, end, what, rows) for what in ("sent", "output"))
        posted = pieces * self._bytes(start, end, "given", rows)
        posted += received if flying < pieces else 0.0
        posted += min(pieces, 3) * self._bytes(start, end, "sent_grad", rows)
        posted += plan.microbatches * self._at_ranks(rows)
        kept = sum(block.activation_bytes.at(rows) for block in self.costs.blocks[start:end])
        params = sum(self.graph.params[index].bytes for index in self._params(start, end))
        unused = sum(self.graph.params[index].bytes for index in self.graph.unused_params) if start == 0 else 0
        own, shared = self._gradients(start, end)
        count, factor = plan.replicas[number], self.options.opt_param_factor
        whole, part = own + shared, own / count + shared
        state = 2 * (part if self.zero >= 2 else whole) + factor * (part if self.zero >= 1 else whole)
        state -= whole - part if self.zero == 3 else 0
        if count > 1 and self.zero >= 2:
            state += self._while_needed(start, end, count)
        if self.zero < 2 or count == 1:  # gradients of a microbatch before they are added to others, and a bucket
            largest, _, tied, _ = self._divided(start, end)
            state += largest + tied + min(whole, max(25 << 20, largest + tied))
        made = [
            self.graph.values[value].bytes.at(rows)
            for block in self.blocks[start:end]
            for op in block.ops
            for value in self.graph.ops[op].outputs
        ]
        posted += 2 * max(made)
        fixed = params + unused + state + posted + flying * held
        between = sum(
            value.bytes.at(rows)
            for index, value in enumerate(self.graph.values)
            if value.producer >= 0
            and start <= (home := self.home[value.producer]) < end
            and any(home < reader < end for reader in self.readers[index])
        )
        kept += between if self.zero >= 2 else 0.0
        first = self.in_flight(plan, number, recompute=True)
        if not recompute and flying > first:  # zb_h1: the others wait for gradients of parameters
            later = self._delayed(start, end, rows) or kept
            return fixed + max(kept, later) * first + later * (flying - first)
        if not recompute and self._waits(plan, number):
            return fixed + max(kept, self._delayed(start, end, rows)) * flying
        if not recompute:
            return fixed + kept * flying
        largest = max(block.activation_bytes.at(rows) for block in self.costs.blocks[start:end])
        apart = between * flying + largest
        return fixed + (apart if self.zero >= 2 and count > 1 else min(kept, apart))

    def _waits(self, plan: Plan, number: int) -> bool:
        """Whether gradients of parameters of a stage wait."""
        start, end = plan.bounds[number : number + 2]
        rows = self._rows(plan.microbatches)
        late = sum(block.weight_us.at(rows) for block in self.costs.blocks[start:end]) > 0
        return plan.schedule == "zb_h1" and len(plan.replicas) > 1 and late

    def _delayed(self, start: int, end: int, rows: int) -> float:
        """Bytes that gradients of parameters are computed from, block by block: what separates reads and makes."""
        graph, total = self.graph, 0.0
        for block in self.blocks[start:end]:
            here = [number for number in block.ops if number in separable(graph)]
            read = {Memory(graph).home[value] for number in here for value in graph.ops[number].inputs}
            total += sum(graph.values[value].bytes.at(rows) for value in read)
            total += sum(graph.values[value].bytes.at(rows) for number in here for value in graph.ops[number].outputs)
        return total

    def best(self, limit: float) -> float | None:
        """The least E of all plans that fit, recomputing where a stage does not fit without."""
        found = []
        for plan in self.plans():
            again, whole, fits = [], [], True
            for number in range(len(plan.replicas)):
                recompute = self.options.checkpointing or self.memory(plan, number, recompute=False) > limit
                again.append(recompute)
                needed = self.memory(plan, number, recompute=recompute)
                fits &= needed <= limit
                if not recompute or self.options.checkpointing:
                    whole += [number] * (needed + self._staying(*plan.bounds[number : number + 2]) <= limit)
            if fits:
                found.append(self.step_us(plan, again, whole))
        return min(found, default=None)

    def smallest_memory(self) -> float:
        """The memory per device with which some plan just fits."""
        return min(
            max(self.memory(plan, number, recompute=True) for number in range(len(plan.replicas)))
            for plan in self.plans()
        )

    def _rows(self, microbatches: int) -> int:
        return math.ceil(math.ceil(self.batch_rows / self.world) / microbatches)

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

    def _while_needed(self, start: int, end: int, count: int) -> float:
        """Bytes that `count` replicas, which divide parameters, have as a whole for some blocks at a time."""
        largest, two, tied, two_read = self._divided(start, end)
        received = max(largest, tied) * (count - 1) / count
        grads = tied + two + largest + 2 * received
        return grads + (two_read if self.zero == 3 else 0)

    def _divided(self, start: int, end: int) -> tuple[int, int, int, int]:
        """Bytes of parameters that replicas may divide: of those that one block reads in the largest block and in two
        neighbours, of all that several blocks read, of all that two neighbours read."""
        outside = self._params(0, start) | self._params(end, len(self.blocks))
        divided = {index for index in self._params(start, end) - outside if self.graph.params[index].trainable}
        read = [self._params(block, block + 1) & divided for block in range(start, end)]
        several = {index for index in divided if sum(index in each for each in read) > 1}

        def sizes(sets: list[set[int]]) -> tuple[int, int]:
            found = [sum(self.graph.params[index].bytes for index in each) for each in sets]
            return max(found), max(map(sum, pairwise(found)), default=found[0])

        largest, two = sizes([each - several for each in read])
        return largest, two, sizes([several])[0], sizes(read)[1]

    def _staying(self, start: int, end: int) -> int:
        """Bytes of parameters that replicas divide, but for those that two blocks have as a whole anyway."""
        outside = self._params(0, start) | self._params(end, len(self.blocks))
        divided = {index for index in self._params(start, end) - outside if self.graph.params[index].trainable}
        read = [self._params(block, block + 1) & divided for block in range(start, end)]

        def size(indices: set[int]) -> int:
            return sum(self.graph.params[index].bytes for index in indices)

        two = max((size(one) + size(other) for one, other in pairwise(read)), default=size(read[0]))
        return max(size(divided) - two, 0)

    def _gradients(self, start: int, end: int) -> tuple[int, int]:
        """Bytes of trainable parameters that only these blocks read, and of those that others read too."""
        inside = {index for index in self._params(start, end) if self.graph.params[index].trainable}
        outside = self._params(0, start) | self._params(end, len(self.blocks))
        own = sum(self.graph.params[index].bytes for index in inside - outside)
        return own, sum(self.graph.params[index].bytes for index in inside & outside)
