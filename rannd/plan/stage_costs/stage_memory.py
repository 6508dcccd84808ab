"""The memory of a replica of every possible stage, as docs/planning.md states it.

Stages are put together from the last one on, because under 1F1B a stage keeps a microbatch until all later stages have
run it: tables of stages that end at one block depend on the number of devices `used` by later stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import Offload
from rannd.plan.schedule.program import AHEAD
from rannd.plan.simulate.step_costs import BUCKET
from rannd.plan.stage_costs.intervals import Intervals, at
from rannd.plan.stage_costs.microbatch_counts import MicrobatchCounts
from rannd.plan.topology import Counts, Mask, Table
from rannd.plan.zero import LEAST_OFFLOADED, ReplicaBytes, Trained, WholeBytes, held, in_files


class StageMemory:
    """Bytes of all possible stages of one variant; tables are ``[start, end]`` if nothing else is said.

    Args:
        intervals: Sizes of runs of blocks.
        counts: Microbatches, and how many are in flight.
        options: What the plan has to be like.
        zero: ZeRO stage.
        rows: Rows of the largest microbatch.
        delays: Whether a stage delays gradients of parameters, if the schedule does so.
    """

    def __init__(
        self,
        intervals: Intervals,
        counts: MicrobatchCounts,
        options: PlanOptions,
        *,
        zero: int,
        rows: int,
        delays: Mask,
    ) -> None:
        self._intervals, self._counts = intervals, counts
        self._zero, self._device = zero, options.device
        self.offload = Offload.asked(options)
        """What is elsewhere while it is not needed."""
        self.apart = (zero >= 2) & ((counts.replicas > 1) | self.offload.params)
        """Whether each block has to be a segment, by number of replicas: its gradients are given away."""
        self.given = at(intervals.given, rows)
        """Of the model's inputs per microbatch; those of all microbatches are there from the start."""
        self.received = at(intervals.received, rows)
        """Per microbatch, of what comes from other stages."""
        self.sent_grad = at(intervals.sent_grad, rows)
        """Per microbatch, of the gradients that come back."""
        self.output = at(intervals.output, rows)
        """Per microbatch, of the model's outputs."""
        self.crossing = self.received + at(intervals.sent, rows) + self.output
        """Per microbatch, of what crosses the stage's border and stays until its backward."""
        last = intervals.count
        self.late = int(counts.pieces[-1]) * float(self.output[0, last] + max(intervals.inputs_grad.at(rows), 0.0))
        """Of a rank's own outputs, and gradients of its own inputs, which arrive at the end of the step."""

        self.kept = at(intervals.activation, rows)
        delayed = at(intervals.delayed, rows)
        self.delayed = np.where(delays, np.where(delayed > 0, delayed, self.kept), 0.0)
        self.delayed[0, last] = 0.0
        """Per microbatch, of what waits for delayed gradients of parameters; all that is kept where that is not known.
        One stage delays nothing."""
        self.between = at(intervals.inner, rows)
        """Per microbatch, of what blocks of the stage hand to each other, kept if they recompute one by one."""
        self.stays = self.between
        """What of it stays in the device's memory then."""
        self.read_back = two = np.zeros_like(self.between)
        """What of the rest blocks read, each block for itself."""
        if self.offload.activations:
            self.stays, self.read_back, two = intervals.handed_apart(rows, LEAST_OFFLOADED)
        if zero >= 2:
            self.kept = self.kept + self.between  # each block is a segment
        self.kept_apart = intervals.largest_of(np.diagonal(self.kept, 1))
        """What the largest block of the stage has in its backward if it recomputes."""
        if not in_files(options.device):  # what a segment starts from is there again, and what the next one does
            self.kept_apart = self.kept_apart + two

        self.working = 2.0 * intervals.largest(rows)
        """Temporary, of a backward: gradients of the outputs and inputs of the largest operator."""
        sharded = self.replica_bytes(slice(None), slice(None), counts.replicas if zero else 1)
        self.offloaded, self.fetched = sharded.offloaded, sharded.fetched
        """``[start, end, replicas - 1]``, or one entry for all: of what a step changes elsewhere; of the parameters
        among it."""
        trainable, two = intervals.trainable, intervals.units.two_params
        self.staying = np.maximum(trainable.whole - trainable.shared - two, 0.0)[:, :, None] * (counts.replicas > 1)
        """``[start, end, replicas - 1]``: of what is whole in addition, if parameters that replicas divide stay whole
        until the last microbatch; those of a block and the next one are `temporary`."""
        self.state = sharded.state
        """The same: of parameters, gradients (also those of a delayed step) and optimizer state."""
        self.temporary = sharded.working + self.working[:, :, None]
        """The same: of what is needed while something is computed."""
        self.fixed = self.state + self.temporary
        """The same: of what does not depend on microbatches."""

    def _activations(self, end: int, used: int | None) -> Table:
        """Return the bytes kept of all microbatches in flight, not recomputing, if parameter gradients may wait."""
        kept, later = self.kept[:end, end, None], self.delayed[:end, end, None]
        pieces, first = (self._counts.most(end, used, split=split) for split in (True, False))
        result: Table = np.maximum(kept, later) * first + later * (pieces - first)
        return result

    def plain(self, end: int, used: int | None, *, split: bool = True) -> Table:
        """Return the bytes of stages that end at `end`, not recomputing; `split`: parameter gradients may wait."""
        pieces = self._counts.most(end, used, split=split)
        rows = slice(0, end)
        kept = self._activations(end, used) if split and self._counts.splits else self.kept[rows, end, None] * pieces
        return self.fixed[rows, end] + self.posted(rows, end, pieces) + self.crossing[rows, end, None] * pieces + kept

    def posted(self, starts: slice, end: int, flying: Counts) -> Table:
        """Return the bytes of messages beyond those kept per microbatch: receives are posted `AHEAD` early."""
        early = np.where(flying < self._counts.pieces, self.received[starts, end, None], 0.0)
        grads = self.sent_grad[starts, end, None] * np.minimum(self._counts.pieces, AHEAD + 1)
        result: Table = self.given[starts, end, None] * self._counts.pieces + early + grads + self.late
        return result

    def held_with(self, replicas: int, flight: tuple[int, int], moment: tuple[int, int]) -> Table:
        """Return the bytes of all stages, but what is temporary, at a moment: ``[start, end]``.

        Nothing is recomputed. What a rank gets at the end of a step (`late`) is not included.

        Args:
            replicas: Number of replicas.
            flight: Maximum number of microbatches between forward and backward, and between forward and the second half
                of it.
            moment: Those at the moment.
        """
        (first, most), (now, waiting) = flight, moment
        place = min(replicas, self.state.shape[2]) - 1
        kept = np.maximum(self.kept, self.delayed) * now + self.delayed * (waiting - now)
        pieces = int(self._counts.pieces[replicas - 1])
        posted = self.given * pieces + self.sent_grad * min(pieces, AHEAD + 1)
        result: Table = self.state[:, :, place] + posted + self.crossing * most + kept
        return result + self.received if first < pieces else result

    def divided_bytes(self, start: int, ends: Sequence[int], replicas: int) -> ReplicaBytes:
        """Return what `replica_bytes` does for one stage; with ZeRO 2 and 3 its segments are runs of blocks.

        Args:
            start: First block of the stage.
            ends: Blocks of the stage before the end of each segment.
            replicas: Number of replicas.
        """
        units = self._intervals.units_of(start, ends) if self.apart[replicas - 1] else None
        return self.replica_bytes(start, start + ends[-1], replicas, units)

    def whole_bytes(self, start: int, ends: Sequence[int], replicas: int, *, stays: bool) -> float:
        """Return the bytes of what a replica has as a whole at a time of parameters and gradients that are divided.

        `start`, `ends`, `replicas`: of the stage, as for `divided_bytes`. `stays`: parameters stay whole until the last
        microbatch.
        """
        end = start + ends[-1]
        found = float(self.divided_bytes(start, ends, replicas).working[0])
        if stays:
            trainable, two = self._intervals.trainable, self._intervals.units_of(start, ends).two_params
            found += max(float(trainable.whole[start, end] - trainable.shared[start, end] - two[0]), 0.0)
        return found

    def replica_bytes(
        self, starts: slice | int, ends: slice | int, replicas: npt.ArrayLike, units: WholeBytes | None = None
    ) -> ReplicaBytes:
        """Return the memory of stages for parameters, gradients and optimizer state.

        `units`: of segments of several blocks; None: each block is one.
        """
        tables = self._intervals

        def those(each: Trained) -> Trained:
            return Trained(*(table[starts, ends, ..., None] for table in each))

        return held(
            self._zero,
            replicas,
            params=tables.params[starts, ends, ..., None],
            trainable=those(tables.trainable),
            gradients=those(tables.gradients),
            optimizer=those(tables.optimizer),
            units=units or WholeBytes(*(table[starts, ends, ..., None] for table in tables.units)),
            offload=float(BUCKET) if self.offload.optimizer else 0.0,
            away=self.offload.params,
            grads_away=self.offload.params and in_files(self._device),
        )

    def recomputing(self, end: int, used: int | None, plain: Table, again: Mask) -> Table:
        """Return the bytes of stages that end at `end`, of which some recompute (`again`); `plain`: if none does."""
        if not again.any():
            return plain
        flying = self._counts.most(end, used, split=False)
        kept = self.kept[:end, end, None]
        less = self.stays[:end, end, None] * flying + self.kept_apart[:end, end, None]
        less = np.where(self.apart, less, np.minimum(kept, less))
        whole = self.plain(end, used, split=False) if self._counts.splits else plain
        return np.where(again, whole - kept * flying + less, plain)

    def least(self, end: int, used: int | None) -> Table:
        """Return the bytes of stages that end at `end`, with recomputing if that needs less."""
        plain = self.plain(end, used)
        everywhere = np.ones((end, len(self._counts.replicas)), dtype=bool)
        result: Table = np.minimum(plain, self.recomputing(end, used, plain, everywhere))
        return result

    def at_least(self) -> tuple[Table, Table]:
        """Return lower bounds of the bytes of a replica without and with recomputing, for any later stages."""
        pieces = np.ones(1) if self._counts.steady else self._counts.pieces
        border = self.fixed + self.late + (self.crossing + self.given)[:, :, None] * pieces
        kept = self.kept[:, :, None]
        again = (self.stays + self.kept_apart)[:, :, None]
        again = np.where(self.apart, again, np.minimum(kept, again))
        return border + kept * pieces, border + again
