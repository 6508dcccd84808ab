"""Tables that several variants of one search have in common: each is made once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property

import numpy as np

from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import Offload
from rannd.plan.schedule.schedules import ALL_SCHEDULES
from rannd.plan.stage_costs.intervals import Intervals, at, of_runs
from rannd.plan.stage_costs.reduction_times import Reductions
from rannd.plan.stage_costs.state_bytes import StateBytes
from rannd.plan.topology import Counts, Machine, Table, p2p_us
from rannd.plan.zero import LEAST_OFFLOADED

ROUNDING = 1e-9
"""Part of a time, or of a memory, by which sums in another order differ at most, and more."""


class RowTables:
    """Times and sizes of a microbatch of so many rows for all runs of blocks: ``[start, end]``, in us and bytes.

    `rows`: their number; for several variants at once numbers ``[variant, 1, 1]``, with which tables are
    ``[variant, start, end]``.
    """

    def __init__(self, intervals: Intervals, machine: Machine, rows: int | Counts) -> None:
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
        sent = at(intervals.sent, rows)
        host_us = np.full_like(action_us, machine.runtime.host_us)
        host_us[1:] += machine.runtime.host_us
        host_us[:, :-1] += machine.runtime.host_us
        self.host_us = host_us + machine.link.p2p_host_us * (self.received + sent)
        """Of the host for a forward, or a backward: it, its message from the stage before, and that to the next one,
        which count as equally large in both directions and over all links."""
        self.crossing = self.received + sent + self.output
        """Of what crosses the stage's border and stays until its backward."""
        self.entering = self.crossing + self.given
        """Of that and of the model's inputs."""
        self.between = at(intervals.inner, rows)
        """Of what blocks hand to each other, kept if they recompute one by one."""
        self.working = 2.0 * intervals.largest(rows)
        """Temporary, of a backward: gradients of the outputs and inputs of the largest operator."""
        far = machine.between if machine.between != machine.link else None
        self.values_us, self.grads_us = (
            [near := p2p_us(machine.link, each), near if far is None else p2p_us(far, each)]
            for each in (self.received, self.sent_grad)
        )
        """Times to receive activations, and gradients: inside a node and from another."""
        self.ranks_us = p2p_us(machine.link, self.given) + p2p_us(machine.link, at(intervals.output_grad, rows))
        """Time of the first input from a rank and of the first gradient of an output from it."""
        to_ranks = self.output[..., 0, -1].reshape(np.shape(rows)), at(intervals.inputs_grad, rows)
        self.returned = to_ranks[0] + to_ranks[1]
        """Of the model's outputs and the gradients of its inputs, which go to a rank: in the shape of `rows`."""
        self.to_ranks = p2p_us(machine.link, to_ranks[0]) + p2p_us(machine.link, to_ranks[1])
        """Time of those of the last microbatch."""

    def one(self, variant: int) -> RowTables:
        """Return the tables of one of several variants, by its place."""

        def own(value: object) -> object:
            if isinstance(value, list | tuple):
                return [own(each) for each in value]
            if not isinstance(value, np.ndarray) or value.ndim < 3:
                return value  # the same for all variants
            return value[variant] if value[variant].size > 1 else value[variant].item()

        found = copy(self)
        vars(found).update((name, own(value)) for name, value in vars(self).items())
        return found

    @cached_property
    def nearest_us(self) -> tuple[Table, Table]:
        """Times to receive activations and gradients over the faster link."""
        return np.minimum(*self.values_us), np.minimum(*self.grads_us)

    @cached_property
    def weight_us(self) -> Table:
        """The part of a backward that zero-bubble schedules may delay."""
        return at(self._intervals.weight, self._rows)

    def delayed_us(self, schedule: str) -> Table:
        """Return the part of a backward that is delayed under a schedule; not if a stage recomputes."""
        delays = ALL_SCHEDULES[schedule].delays_weights
        return np.minimum(self.weight_us, self.backward_us) if delays else np.zeros_like(self.backward_us)

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
        return self._intervals.largest_of(self.kept.diagonal(1, -2, -1))

    @cached_property
    def kept_divided(self) -> tuple[Table, Table]:
        """`kept` and `kept_apart` if each block is a segment."""
        kept = self.kept + self.between
        return kept, self._intervals.largest_of(kept.diagonal(1, -2, -1))

    @cached_property
    def handed_apart(self) -> tuple[Table, Table, Table]:
        """What of `between` stays where activations are offloaded, and comes back, see `Intervals.handed_apart`."""
        each = [self._intervals.handed_apart(rows, LEAST_OFFLOADED) for rows in np.asarray(self._rows).flat]
        small, read, two = (np.reshape(found, self.kept.shape) for found in zip(*each, strict=True))
        return small, read, two


class LeastTimes:
    """Least times of stages of several variants whatever memory and replicas they have: the same for all ZeRO stages.

    Args:
        rows: Tables of these variants.
        schedule: Its name.
        microbatches: Of each variant.
        intervals: Sums over runs of blocks.
        machine: The devices.
    """

    def __init__(
        self, rows: RowTables, schedule: str, microbatches: tuple[int, ...], intervals: Intervals, machine: Machine
    ) -> None:
        self.rows, self.microbatches = rows, np.array(microbatches)
        # With all devices a rank runs its own microbatches, and adds the gradients of all but one.
        forward, backward = (each[:, 0, -1] * self.microbatches for each in (rows.forward_us, rows.backward_us))
        self.alone = tuple(each * (1 - ROUNDING) for each in (forward + backward, forward + backward + forward))
        """Without and with recomputing, ``[variant]``: E of a single stage on all devices."""
        self.waits = rows.delayed_us(schedule)
        """``[variant, start, end]``: part of the backward that is delayed."""
        forward, backward, add = rows.forward_us, rows.backward_us, intervals.adding
        self.forward = forward[:, 0]
        """``[variant, first blocks]``: forward of the first blocks."""
        # Delayed gradients shorten a round at most by those of one in `microbatches`.
        filled = np.minimum(self.waits, forward) / self.microbatches[:, None, None]
        self.work = (forward + backward + add - filled)[:, 0]
        """The same: what devices compute of a microbatch."""
        values, grads = rows.nearest_us
        fills, rounds = [], []
        for each, delayed in ((backward, self.waits), (backward + forward, 0.0)):
            # In the order of the sums of `StageTerms`, so that a bound is not above by what sums are rounded by.
            fill = forward + (each - delayed) + 2 * rows.host_us + values + grads + rows.ranks_us
            fill[:, 0] += rows.to_ranks[..., 0] + machine.agreeing_us
            fills.append(fill)
            half, later = forward + rows.host_us, each + add + rows.host_us
            if ALL_SCHEDULES[schedule].takes_turns:
                rounds.append(np.maximum(np.maximum(half + later, values), grads))
            else:
                rounds.append(np.maximum(half, values) + np.maximum(later, grads))
        rounds[0] = rounds[0] - filled
        self.fill = fills[0][:, 0]
        """The same: fill of a single stage."""
        self.fills, self.rounds = ([of_runs(each, intervals.runs) for each in two] for two in (fills, rounds))
        """Without and with recomputing, ``[variant, stage]``: fill, and round of a microbatch."""
        self.pieces = machine.world * self.microbatches
        """By variant, microbatches of all ranks."""
        self._needed: tuple[bytes, list[Counts]] = b"", []

    def needed(self, variants: Counts, limits: Table) -> list[Counts]:
        """Return lower bounds for the replicas of stages whose rounds are within limits, without and with recomputing.

        ``[stage, variant, limit]``, for the variants at these places; `limits`: ``[variant, limit]``.
        """
        key = variants.tobytes() + limits.tobytes()
        if key != self._needed[0]:  # other ZeRO stages ask for the same
            found, pieces = [], self.pieces[variants, None]
            for piece_us in self.rounds:
                with np.errstate(divide="ignore", invalid="ignore"):
                    most = np.floor(limits / piece_us[variants].T[:, :, None] * (1 + 1e-12) + 1e-12) + 1
                # A stage whose replicas have so many microbatches at most. Not a number: a round that takes no time.
                found.append(np.ceil(pieces / np.fmin(most, pieces)).astype(np.int64))
            self._needed = key, found
        return self._needed[1]


class SharedTables:
    """What all variants of a search share.

    Args:
        intervals: Sums over runs of blocks.
        machine: The devices.
        rows: Rows of the microbatches of all variants, whose tables are made together.
    """

    def __init__(self, intervals: Intervals, machine: Machine, rows: Sequence[int] = ()) -> None:
        self.intervals, self.machine = intervals, machine
        self.reductions = Reductions(intervals, machine)
        self._together = tuple(rows)
        self._rows: dict[int | tuple[int, ...], RowTables] = {}
        self._times: dict[tuple[str, tuple[int, ...], tuple[int, ...]], LeastTimes] = {}
        self._states: dict[tuple[int, bytes, Offload, str], StateBytes] = {}

    def of_rows(self, rows: int | tuple[int, ...]) -> RowTables:
        """Return times and sizes of microbatches of `rows` rows, or of several variants."""
        if rows not in self._rows:
            if rows in self._together:
                self._rows[rows] = self.of_rows(self._together).one(self._together.index(rows))
            else:
                several = np.array(rows)[:, None, None] if isinstance(rows, tuple) else rows
                self._rows[rows] = RowTables(self.intervals, self.machine, several)
        return self._rows[rows]

    def least_times(self, schedule: str, microbatches: tuple[int, ...], rows: tuple[int, ...]) -> LeastTimes:
        """Return least times of variants with these numbers of microbatches, and their rows."""
        key = schedule, microbatches, rows
        if key not in self._times:
            tables = self.of_rows(rows)
            self._times[key] = LeastTimes(tables, schedule, microbatches, self.intervals, self.machine)
        return self._times[key]

    def state(self, zero: int, replicas: Counts, options: PlanOptions) -> StateBytes:
        """Return the bytes of training state under a ZeRO stage, for numbers of replicas."""
        key = zero, replicas.tobytes(), Offload.asked(options), options.device
        if key not in self._states:
            self._states[key] = StateBytes(self.intervals, zero, replicas, options)
        return self._states[key]
