"""Tables that several variants of one search have in common: each is made once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import Offload
from rannd.plan.stage_costs.intervals import Intervals, at
from rannd.plan.stage_costs.reduction_times import Reductions
from rannd.plan.stage_costs.state_bytes import StateBytes
from rannd.plan.topology import Counts, Machine, Table, p2p_us
from rannd.plan.zero import LEAST_OFFLOADED


class RowTables:
    """Times and sizes of a microbatch of so many rows for all runs of blocks: ``[start, end]``, in us and bytes."""

    def __init__(self, intervals: Intervals, machine: Machine, rows: int) -> None:
        self._intervals, self._rows = intervals, rows
        action_us = np.triu(np.full((intervals.count + 1,) * 2, machine.runtime.action_us), 1)  # not of no blocks
        self.forward_us = at(intervals.forward, rows) + action_us
        self.backward_us = at(intervals.backward, rows) + action_us
        self.given = at(intervals.given, rows)
        """Of the model's inputs; those of all microbatches are there from the start."""
        self.received = at(intervals.received, rows)
        """Of what comes from other stages."""
        self.sent_grad = at(intervals.sent_grad, rows)
        """Of the gradients that come back."""
        self.output = at(intervals.output, rows)
        """Of the model's outputs."""
        self.crossing = self.received + at(intervals.sent, rows) + self.output
        """Of what crosses the stage's border and stays until its backward."""
        self.inputs_grad = max(intervals.inputs_grad.at(rows), 0.0)
        """Of the gradients of the model's inputs."""
        self.between = at(intervals.inner, rows)
        """Of what blocks hand to each other, kept if they recompute one by one."""
        self.working = 2.0 * intervals.largest(rows)
        """Temporary, of a backward: gradients of the outputs and inputs of the largest operator."""
        links = machine.link, machine.between
        self.values_us = [p2p_us(link, self.received) for link in links]
        """Time to receive activations, inside a node and from another."""
        self.grads_us = [p2p_us(link, self.sent_grad) for link in links]
        self.ranks_us = p2p_us(machine.link, self.given) + p2p_us(machine.link, at(intervals.output_grad, rows))
        """Time of the first input from a rank and of the first gradient of an output from it."""
        outputs = float(self.output[0, intervals.count])
        self.to_ranks = machine.link.p2p_us(outputs) + machine.link.p2p_us(self.inputs_grad)
        """Time of the outputs and input gradients of the last microbatch."""

    @cached_property
    def nearest_us(self) -> tuple[Table, Table]:
        """Times to receive activations and gradients over the faster link."""
        return np.minimum(*self.values_us), np.minimum(*self.grads_us)

    @cached_property
    def weight_us(self) -> Table:
        """The part of a backward that zero-bubble schedules may delay."""
        return at(self._intervals.weight, self._rows)

    @cached_property
    def delayed(self) -> Table:
        """Of what waits for delayed gradients of parameters; 0 where that is not known."""
        return at(self._intervals.delayed, self._rows)

    @cached_property
    def kept(self) -> Table:
        """Of what is kept from forward to backward."""
        return at(self._intervals.activation, self._rows)

    @cached_property
    def kept_apart(self) -> Table:
        """What the largest block has in its backward if it recomputes."""
        return self._intervals.largest_of(self.kept.diagonal(1))

    @cached_property
    def kept_divided(self) -> tuple[Table, Table]:
        """`kept` and `kept_apart` if each block is a segment."""
        kept = self.kept + self.between
        return kept, self._intervals.largest_of(kept.diagonal(1))

    @cached_property
    def handed_apart(self) -> tuple[Table, Table, Table]:
        """What of `between` stays where activations are offloaded, and comes back, see `Intervals.handed_apart`."""
        return self._intervals.handed_apart(self._rows, LEAST_OFFLOADED)


class SharedTables:
    """What all variants of a search share.

    Args:
        intervals: Sums over runs of blocks.
        machine: The devices.
    """

    def __init__(self, intervals: Intervals, machine: Machine) -> None:
        self.intervals, self.machine = intervals, machine
        self.reductions = Reductions(intervals, machine)
        self._rows: dict[int, RowTables] = {}
        self._states: dict[tuple[int, bytes, Offload, str], StateBytes] = {}

    def of_rows(self, rows: int) -> RowTables:
        """Return times and sizes of microbatches of `rows` rows."""
        if rows not in self._rows:
            self._rows[rows] = RowTables(self.intervals, self.machine, rows)
        return self._rows[rows]

    def state(self, zero: int, replicas: Counts, options: PlanOptions) -> StateBytes:
        """Return the bytes of training state under a ZeRO stage, for numbers of replicas."""
        key = zero, replicas.tobytes(), Offload.asked(options), options.device
        if key not in self._states:
            self._states[key] = StateBytes(self.intervals, zero, replicas, options)
        return self._states[key]
