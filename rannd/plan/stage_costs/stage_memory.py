"""The memory of a replica of every possible stage, as docs/planning.md states it.

Stages are put together from the last one on, because under 1F1B a stage keeps a microbatch until all later stages have
run it: tables of stages that end at one block depend on the number of devices `used` by later stages.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rannd.plan.plan_options import PlanOptions
from rannd.plan.schedule.program import AHEAD
from rannd.plan.stage_costs.intervals import Runs, of_runs
from rannd.plan.stage_costs.microbatch_counts import MicrobatchCounts
from rannd.plan.stage_costs.shared_tables import RowTables
from rannd.plan.stage_costs.state_bytes import StateBytes
from rannd.plan.topology import Counts, Mask, Table
from rannd.plan.zero import in_files


class StageMemory:
    """Bytes of all possible stages of one variant; tables are ``[start, end]`` if nothing else is said.

    Args:
        rows: Sizes of the largest microbatch.
        state: What is held of parameters, gradients and optimizer state.
        counts: Microbatches, and how many are in flight.
        options: What the plan has to be like.
        zero: ZeRO stage.
        delays: Whether a stage delays gradients of parameters, if the schedule does so.
    """

    def __init__(
        self,
        rows: RowTables,
        state: StateBytes,
        counts: MicrobatchCounts,
        options: PlanOptions,
        *,
        zero: int,
        delays: Mask,
    ) -> None:
        self._rows, self._counts = rows, counts
        self.state = state
        self.late = counts.own * rows.returned
        """Of a rank's own outputs, and gradients of its own inputs, which arrive at the end of the step."""
        self.kept, self.kept_apart = rows.kept_divided if zero >= 2 else (rows.kept, rows.kept_apart)
        """Per microbatch, of what is kept from forward to backward; of the largest block of the stage, which has it in
        its backward if it recomputes."""
        self._delays = delays
        self.stays = rows.between
        """Per microbatch, of what blocks hand to each other if they recompute one by one: what stays in the device's
        memory."""
        if state.offload.activations:
            self.stays, _, two = rows.handed_apart
            if not in_files(options.device):  # what a segment starts from is there again, and what the next one does
                self.kept_apart = self.kept_apart + two

    @cached_property
    def delayed(self) -> Table:
        """Per microbatch, of what waits for delayed gradients of parameters; all that is kept where that is not known.
        One stage delays nothing."""
        if not self._counts.splits:
            return np.zeros_like(self.kept)
        rows = self._rows
        found = np.where(self._delays, np.where(rows.delayed > 0, rows.delayed, self.kept), 0.0)
        found[..., 0, -1] = 0.0
        return found

    @cached_property
    def read_back(self) -> Table:
        """What blocks read of what does not stay, each block for itself."""
        return self._rows.handed_apart[1] if self.state.offload.activations else np.zeros_like(self.kept)

    @cached_property
    def _kept(self) -> Table:
        """Per microbatch, of what is kept until the end of its backward, both halves."""
        return np.maximum(self.kept, self.delayed) if self._counts.splits else self.kept

    def temporary(self, starts: slice | int, ends: slice | int) -> Table:
        """Return the bytes of what is needed while something is computed, by number of replicas or one for all."""
        result: Table = self.state.held.working[starts, ends] + self._rows.working[starts, ends, ..., None]
        return result

    @cached_property
    def _fixed(self) -> Table:
        """Bytes of what does not depend on microbatches: ``[start, end, number of replicas]``, or one entry for all."""
        result: Table = self.state.fixed + self._rows.working[:, :, None]
        return result

    def _activations(self, end: int, used: int | None) -> Table:
        """Return the bytes kept of all microbatches in flight, not recomputing, if parameter gradients may wait."""
        kept, later = self.kept[:end, end, None], self.delayed[:end, end, None]
        pieces, first = (self._counts.most(end, used, split=split) for split in (True, False))
        both: Table = np.maximum(kept, later)
        return both * first + later * (pieces - first)

    def plain(self, end: int, used: int | None, *, split: bool = True) -> Table:
        """Return the bytes of stages that end at `end`, not recomputing; `split`: parameter gradients may wait."""
        pieces = self._counts.most(end, used, split=split)
        starts = slice(0, end)
        kept = self._activations(end, used) if split and self._counts.splits else self.kept[starts, end, None] * pieces
        crossing = self._rows.crossing[starts, end, None] * pieces
        return self._fixed[starts, end] + self.posted(starts, end, pieces) + crossing + kept

    def most(self) -> Table:
        """Return the bytes with the smallest number of replicas, for any later stages; with more of them a stage does
        not need more, but for ZeRO 2 and 3, where there is one number."""
        pieces = self._counts.pieces[..., :1]
        kept = self._kept + self._rows.crossing
        fixed = self.state.fixed[:, :, 0] + self._rows.working
        result: Table = fixed + kept * pieces + self._posted_first()
        return result

    def _posted_first(self) -> Table:
        """Return the bytes of messages of stages with the smallest number of replicas, but what is received early."""
        pieces = self._counts.pieces[..., :1]
        grads = self._rows.sent_grad * np.minimum(pieces, AHEAD + 1)
        result: Table = self._rows.given * pieces + grads + self.late
        return result

    def posted(self, starts: slice, end: int, flying: Counts) -> Table:
        """Return the bytes of messages beyond those kept per microbatch: receives are posted `AHEAD` early."""
        rows, pieces = self._rows, self._counts.pieces
        early = np.where(flying < pieces, rows.received[starts, end, None], 0.0)
        grads = rows.sent_grad[starts, end, None] * np.minimum(pieces, AHEAD + 1)
        result: Table = rows.given[starts, end, None] * pieces + early + grads + self.late
        return result

    def held_with(self, flight: tuple[int, int], moment: tuple[int, int]) -> Table:
        """Return the bytes of stages with the smallest number of replicas, but what is temporary, at a moment.

        Nothing is recomputed. What a rank gets at the end of a step (`late`) is not included.

        Args:
            flight: Maximum number of microbatches between forward and backward, and between forward and the second half
                of it.
            moment: Those at the moment.
        """
        (first, most), (now, waiting) = flight, moment
        held, rows = self.state.held.state, self._rows
        kept = self._kept * now + self.delayed * (waiting - now)
        pieces = int(self._counts.pieces[0])
        posted = rows.given * pieces + rows.sent_grad * min(pieces, AHEAD + 1)
        result: Table = held[:, :, 0] + posted + rows.crossing * most + kept
        return result + rows.received if first < pieces else result

    def recomputing(self, end: int, used: int | None, plain: Table, again: Mask) -> Table:
        """Return the bytes of stages that end at `end`, of which some recompute (`again`); `plain`: if none does."""
        if not again.any():
            return plain
        flying = self._counts.most(end, used, split=False)
        kept = self.kept[:end, end, None]
        less = self.stays[:end, end, None] * flying + self.kept_apart[:end, end, None]
        if not self.state.apart:
            less = np.minimum(kept, less)
        whole = self.plain(end, used, split=False) if self._counts.splits else plain
        return np.where(again, whole - kept * flying + less, plain)

    def keeping(self, flying: Counts, runs: Runs) -> tuple[Table, Table]:
        """Return the bytes of stages with the smallest number of replicas that keep so many microbatches each.

        Without and with recomputing, as if no gradients of parameters were delayed: ``[variant, place, stage]``, for
        several variants.

        Args:
            flying: ``[variant, place, 1]``: the microbatches.
            runs: The stages.
        """

        def those(each: Table) -> Table:
            return of_runs(each, runs)[:, None]

        rows, pieces = self._rows, self._counts.pieces[..., :1]
        border = those(self.state.fixed[:, :, 0] + rows.working + self._posted_first())
        border = border + those(rows.crossing) * flying + np.where(flying < pieces, those(rows.received), 0.0)
        kept, again = those(self.kept), those(self.stays) * flying + those(self.kept_apart)
        if not self.state.apart:  # all together may need less
            again = np.minimum(kept, again)
        return border + kept * flying, border + again

    def least(self, end: int, used: int | None) -> Table:
        """Return the bytes of stages that end at `end`, with recomputing if that needs less."""
        plain = self.plain(end, used)
        everywhere = np.ones((end, len(self._counts.replicas)), dtype=bool)
        result: Table = np.minimum(plain, self.recomputing(end, used, plain, everywhere))
        return result

    def at_least(self, runs: Runs, *, close: bool = False) -> tuple[Table, Table]:
        """Return lower bounds of the bytes of a replica without and with recomputing, for any later stages.

        ``[stage, number of replicas]``, or one entry for all numbers. The arguments are those of `beside_fixed`.
        """
        fixed = of_runs(self.state.fixed, runs, behind=1)
        kept, again = self.beside_fixed(runs, close=close)
        return fixed + kept, fixed + again

    def beside_fixed(self, runs: Runs, *, close: bool = False) -> tuple[Table, Table]:
        """Return the part of `at_least` that is not the state's (`StateBytes.fixed`).

        Args:
            runs: The stages.
            close: Whether to count that stages keep more microbatches if others follow them.
        """

        def those(each: Table) -> Table:
            return of_runs(each, runs)[..., None]

        flying: Table = np.ones(1)
        if not self._counts.steady:
            flying = self._counts.pieces.astype(float)
        elif close:  # as if all had the fewest microbatches: one number, where others make tables large
            last, others = (self._counts.most(0, used, split=False)[0, ..., -1:].astype(float) for used in (0, 1))
            flying = np.where(runs.ends[..., None] < self._counts.blocks, others, last)
        border = those(self._rows.working) + self.late
        border = border + those(self._rows.entering) * flying
        kept, stays = those(self.kept), those(self.stays)
        again = (stays * flying if close else stays) + those(self.kept_apart)
        if not self.state.apart:  # all together, of one microbatch, may need less
            again = np.minimum(kept, again)
        return border + kept * flying, border + again
