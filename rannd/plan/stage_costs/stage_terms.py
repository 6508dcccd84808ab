"""The closed form E: for every possible stage, what it adds to the step time, and whether it fits.

docs/planning.md states E and derives it. Stages are put together from the last one on, because what a stage needs
depends on the later ones: under 1F1B it keeps a microbatch until all later stages have run it, and its gradients are
reduced while all earlier stages still run backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec
import numpy as np

from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import Offload
from rannd.plan.stage_costs.intervals import Runs
from rannd.plan.stage_costs.microbatch_counts import MicrobatchCounts
from rannd.plan.stage_costs.shared_tables import RowTables, SharedTables
from rannd.plan.stage_costs.stage_memory import StageMemory
from rannd.plan.stage_costs.state_bytes import StateBytes
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import Counts, Mask, Table
from rannd.plan.zero import computing, fetch_us, gathers_of, offload_us

NEVER = 1 << 40
"""A number of devices that no job has, for 'impossible'."""


class Terms(msgspec.Struct, frozen=True):
    """What stages that end at one block add to E: tables ``[first block, number of replicas]``, microseconds."""

    fill: Table
    """Paid once: one microbatch's way through the stage and back. Infinite if a stage is not possible."""
    rounds: Table
    """``[term, ..]``: per term the largest stage counts, for all microbatches but one: the round of forward and
    backward (1F1B), or forward and backward each (GPipe)."""
    exposed: Table
    """Gradient reduction that does not overlap with the stage's own backward."""
    drain: Table
    """Backward of the last microbatch, with which reductions of later stages overlap."""
    recompute: Mask
    stays_whole: Mask
    """Whether parameters stay whole until the last microbatch (ZeRO 3)."""


class StageTerms:
    """Terms of E of all possible stages of one variant, and whether they fit."""

    def __init__(
        self,
        shared: SharedTables,
        options: PlanOptions,
        variant: Variant,
        *,
        rows: int,
        limit: float,
        allowed: Mask,
        replicas: Counts,
    ) -> None:
        """Note what tables are made of, which are made when they are needed.

        Args:
            shared: What other variants have, too.
            options: What the plan has to be like.
            variant: What all stages share.
            rows: Rows of the largest microbatch.
            limit: Bytes per device.
            allowed: ``[start, end]``: whether these blocks may be a stage.
            replicas: Numbers of replicas that stages may have, ascending: the last axis of tables has one place each.
                One number with ZeRO 2 and 3, so that it holds that no stage needs more memory with more of them.
        """
        self.shared, self.options, self.variant = shared, options, variant
        self.intervals, self.machine = shared.intervals, shared.machine
        self.rows, self.limit, self.allowed, self.replicas = rows, limit, allowed, replicas
        self.reductions = shared.reductions
        self.world = shared.machine.world
        self.blocks = shared.intervals.count
        self.add_us = shared.intervals.adding
        """Added to each backward but the first: accumulates the gradients."""
        self.agreeing_us = shared.machine.agreeing_us
        self.slots_matter = shared.machine.several and variant.placement == "replicas"
        """Whether it matters which slots a stage has."""
        self._bases: dict[int, Terms] = {}
        self._known: dict[tuple[int, int], Terms] = {}

    # Most variants of a search are beaten before their own tables are needed.

    @cached_property
    def _column(self) -> dict[int, int]:
        """Place of each number of replicas."""
        return {int(count): place for place, count in enumerate(self.replicas)}

    @cached_property
    def offload(self) -> Offload:
        """What is elsewhere while it is not needed."""
        return Offload.asked(self.options)

    @cached_property
    def _may_stay(self) -> bool:
        """Whether parameters may stay whole until the last microbatch."""
        return self.variant.zero == 3 and not (self.options.reshard_after_forward or self.offload.params)

    @cached_property
    def microbatch(self) -> RowTables:
        """Times and sizes of the largest microbatch."""
        return self.shared.of_rows(self.rows)

    @cached_property
    def forward_us(self) -> Table:
        """Forward of a microbatch."""
        return self.microbatch.forward_us

    @cached_property
    def backward_us(self) -> Table:
        """Its backward."""
        return self.microbatch.backward_us

    @cached_property
    def weight_us(self) -> Table:
        """The part of the backward that is delayed; not if a stage recomputes."""
        return self.microbatch.delayed_us(self.variant.schedule)

    @cached_property
    def counts(self) -> MicrobatchCounts:
        """Its microbatches, and how many of them are in flight."""
        variant = self.variant
        return MicrobatchCounts(self.world, variant.schedule, variant.microbatches, self.replicas, self.weight_us > 0)

    @cached_property
    def state(self) -> StateBytes:
        """What a replica holds of parameters, gradients and optimizer state."""
        return self.shared.state(self.variant.zero, self.replicas, self.options)

    @cached_property
    def memory(self) -> StageMemory:
        """Memory of a replica."""
        given = self.microbatch, self.state, self.counts, self.options
        return StageMemory(*given, zero=self.variant.zero, delays=self.weight_us > 0)

    @cached_property
    def leaving_us(self) -> Table:
        """Time per microbatch to copy what blocks start from elsewhere, if they recompute."""
        return fetch_us(self.microbatch.between - self.memory.stays, self.options.device)

    @cached_property
    def coming_us(self) -> Table:
        """Time per microbatch to copy it back, for each block that reads it."""
        return fetch_us(self.memory.read_back, self.options.device)

    def column(self, replicas: int) -> int:
        """Return the place of a number of replicas."""
        return self._column[replicas]

    def has(self, replicas: Iterable[int]) -> bool:
        """Whether stages may have these numbers of replicas."""
        return self._column.keys() >= set(replicas)

    @cached_property
    def _pipelines_inside(self) -> Mask:
        """By number of replicas, whether each of the pipelines side by side stays inside a node."""
        return self.machine.pipelines_inside(self.replicas)

    def copies_us(self, end: int) -> Table:
        """Return the time of copying what a step changes in and out: ``[start, number of replicas]`` or one for all."""
        return offload_us(self.memory.state.held.offloaded[:end, end], self.options.device)

    def fetch_us(self, end: int) -> Table:
        """Return the time of copying parameters in, for each forward and backward of a microbatch, likewise."""
        return fetch_us(self.memory.state.held.fetched[:end, end], self.options.device)

    # -- what a stage adds ------------------------------------------------------------------------------------

    def stages(self, end: int, used: int) -> Terms:
        """Return the terms of all stages that end before block `end`, if later stages have `used` devices.

        Tables are ``[start, number of replicas]`` for ``start < end`` and the numbers up to the devices that are left;
        a stage that starts with block 0 takes them all, any other leaves at least one, and not more than can be used.
        """
        key = (end, used)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._stages(end, used)
        return found

    def _stages(self, end: int, used: int) -> Terms:
        left = self.world - used
        if self.slots_matter or (self.counts.steady and end in self._tight_ends):
            # If memory is tight, 1F1B terms depend on the later stages: they determine the microbatches in flight.
            base = self._terms(end, used, self.links(used) if self.slots_matter else None)
        else:
            if end not in self._bases:
                self._bases[end] = self._terms(end, None, None)
            base = self._bases[end]
        fit = int(np.searchsorted(self.replicas, left, side="right"))
        cut = Terms(
            base.fill[:, :fit].copy(), base.rounds[:, :, :fit], base.exposed[:, :fit], base.drain[:, :fit],
            base.recompute[:, :fit], base.stays_whole[:, :fit],
        )  # fmt: skip
        whole = self.replicas[:fit] == left
        cut.fill[0, ~whole] = np.inf
        cut.fill[1:, whole] = np.inf
        # Each earlier stage needs a block, and takes no more devices than the largest number of replicas.
        cut.fill[left - self.replicas[:fit] > np.arange(end)[:, None] * self.replicas[-1]] = np.inf
        if end == self.blocks and used == 0 and self.world in self._column:
            self._alone(cut)
        return cut

    def _alone(self, terms: Terms) -> None:
        """Adapt the terms of one stage on all devices: it transfers nothing, every rank runs its own microbatches."""
        if np.isfinite(terms.fill[0, -1]):
            found = self._computing(self.blocks, terms.recompute, terms.stays_whole, None)
            forward, backward = (each[0, -1] + self.microbatch.host_us[0, self.blocks] for each in found[:2])
            more = float(self.counts.pieces[-1] - 1)
            terms.fill[0, -1] = forward + backward + self.agreeing_us
            again = backward + self.add_us[0, self.blocks]
            rounds = [forward + again] if self.counts.steady else [forward, again]
            terms.rounds[:, 0, -1] = np.array(rounds) * more
            terms.drain[0, -1] = found[1][0, -1]
            terms.exposed[0, -1] = self._exposed(self.blocks, found[1][0, -1], None)[0, -1]

    def _computing(self, end: int, again: Mask, whole: Mask, inside: Mask | None) -> tuple[Table, Table, Table]:
        """Return forward and backward per microbatch, and the part of the backward that zb_h1 delays."""
        rows = slice(0, end)
        forward = self.forward_us[rows, end, None]
        backward = self.backward_us[rows, end, None] + np.where(again, forward, 0.0)
        if self.offload.activations:
            backward = backward + np.where(again, self.coming_us[rows, end, None], 0.0)
            forward = forward + np.where(again, self.leaving_us[rows, end, None], 0.0)
        waits = self.weight_us[rows, end, None]
        if self.counts.splits:  # otherwise it is 0
            waits = np.where(again, 0.0, waits)
        if self.variant.zero >= 2:
            gather = self.reductions.gather(end, self.replicas, inside)
            gathers = gathers_of(whole, self.counts.pieces)
            fetch = self.fetch_us(end)
            forward, backward = computing(self.variant.zero, forward, backward, gather, fetch, gathers=gathers)
        return forward, backward, waits

    def _terms(self, end: int, used: int | None, links: tuple[Mask, Mask, Mask] | None) -> Terms:
        """Return terms for all numbers of replicas. `links`: whether activations, gradients, reductions stay local."""
        rows = slice(0, end)
        values_inside, grads_inside = (self._pipelines_inside,) * 2 if links is None else links[:2]
        replicas_inside = links[2] if links is not None else None
        plain = self.memory.plain(end, used)
        again = self._recomputes(end, plain, used)
        memory = self.memory.recomputing(end, used, plain, again)
        whole = self._stays_whole(end, again, memory)
        forward, backward, waits = self._computing(end, again, whole, replicas_inside)
        near, far = (each[rows, end, None] for each in self.microbatch.values_us)
        values = np.where(values_inside, near, far)
        near, far = (each[rows, end, None] for each in self.microbatch.grads_us)
        grads = np.where(grads_inside, near, far)
        host = self.microbatch.host_us[rows, end, None]
        fill = forward + (backward - waits) + 2 * host + values + grads + self.microbatch.ranks_us[rows, end, None]
        if end < self.blocks or self.world > 1:
            fill[0] += self.microbatch.to_ranks + self.agreeing_us
        more = (self.counts.pieces - 1).astype(float)
        first, later = forward + host, backward + self.add_us[rows, end, None] + host
        if self.counts.steady:
            longest = np.maximum(np.maximum(first + later, values), grads) * more
            if self.counts.splits:
                # Delayed gradients fill the time in which the slot would wait for others: one forward per microbatch.
                filled = np.minimum(self.counts.waiting - 1, more) * np.minimum(waits, forward)
                longest = longest + waits - filled
            rounds = longest[None]
        else:
            rounds = np.stack([np.maximum(first, values) * more, np.maximum(later, grads) * more])
        fits = self.allowed[rows, end, None] & (memory <= self.limit)
        fill[~fits] = np.inf
        hiding = np.where(waits > 0, waits, backward) if self.counts.splits else backward
        exposed = self._exposed(end, hiding, replicas_inside)
        # Under zb_h1 all slots end at about the same time.
        drain = np.zeros_like(backward) if self.counts.splits else backward + grads
        return Terms(fill, rounds, exposed, drain, again, whole)

    def links(self, used: int) -> tuple[Mask, Mask, Mask]:
        """Whether activations, gradients, reductions stay inside nodes, for stages before the last `used` slots."""
        return self.machine.inside(self.replicas, used)

    def _exposed(self, end: int, backward: Table, inside: Mask | None) -> Table:
        """Return the reduction left after the last microbatch's backward: what did not overlap, and the last bucket."""
        zero = self.variant.zero
        found = self.reductions.of(end, self.replicas, inside, zero)
        left: Table = found.whole if self.options.sync_allreduce else np.maximum(found.whole - backward, found.tail)
        left = left + found.host
        # With ZeRO 1 and 2 parameters are gathered after the optimizer.
        if self.offload.optimizer or self.offload.params:
            left = left + self.copies_us(end)
        return left + self.reductions.gather(end, self.replicas, inside) if zero in (1, 2) else left

    # -- whether a stage fits ---------------------------------------------------------------------------------

    def forced(self, end: int) -> bool:
        """Whether stages that end at `end` recompute all blocks because that was asked for."""
        options = self.options
        return options.checkpointing and not (options.checkpointing_no_last and end == self.blocks)

    def _recomputes(self, end: int, plain: Table, used: int | None) -> Mask:
        """Whether stages recompute, given that they need `plain` bytes without."""
        if self.forced(end):
            return np.ones((len(plain), len(self.replicas)), dtype=bool)
        if used is None and self.counts.steady:  # only called if everything fits
            return np.zeros((len(plain), len(self.replicas)), dtype=bool)
        return np.greater(plain, self.limit)

    def _stays_whole(self, end: int, again: Mask, memory: Table) -> Mask:
        """Whether parameters of stages that need `memory` bytes stay whole until the last microbatch: where there is
        room, and neither recomputing nor offloaded parameters make some."""
        if not self._may_stay:
            return np.zeros_like(again)
        room = memory + self.memory.state.staying[:end, end] <= self.limit
        found: Mask = room if self.forced(end) else room & ~again
        return found

    @cached_property
    def _tight_ends(self) -> set[int]:
        """Where stages end of which some might not fit without recomputing, or not with parameters that stay whole."""
        ends = self._full_ends
        if self._may_stay:  # then there is one number of replicas
            more = self.memory.most() + self.memory.state.staying[:, :, 0] > self.limit
            ends = ends | set(np.flatnonzero(np.triu(more, 1).any(axis=0)).tolist())
        return ends

    @cached_property
    def _full_ends(self) -> set[int]:
        """Where stages end of which some might not fit without recomputing."""
        # With more replicas they need less.
        return set(np.flatnonzero(np.triu(self.memory.most() > self.limit, 1).any(axis=0)).tolist())

    def memory_at_least(self) -> float:
        """Return a lower bound of the memory of any plan: what some block needs in the stage that suits it best."""
        every = np.arange(self.blocks + 1)
        kept, less = self.memory.at_least(Runs.of(every[:, None], every, self.blocks))
        least = np.where(self.allowed, np.minimum(kept, less).min(axis=2), np.inf)
        holding = np.minimum.accumulate(least, axis=0)  # [block, end]: of stages that begin at the block or before it
        return float(max(holding[block, block + 1 :].min() for block in range(self.blocks)))

    def least_memory(self, end: int, used: int) -> Table:
        """Return the minimum bytes of stages that end here, recomputing if that is less; infinite if not allowed."""
        memory = self.memory.least(end, used)
        left = self.world - used
        fit = int(np.searchsorted(self.replicas, left, side="right"))
        memory = np.where(self.allowed[:end, end, None], memory, np.inf)[:, :fit]
        whole = self.replicas[:fit] == left
        memory[0, ~whole] = np.inf
        memory[1:, whole] = np.inf
        return memory

    def bytes_needed(self, start: int, end: int, replicas: int, *, used: int) -> float:
        """Return the minimum bytes of one stage, with recomputing if that is less."""
        return float(self.memory.least(end, used)[start, self.column(replicas)])

    def bytes_kept(self, start: int, end: int, replicas: int, *, used: int) -> float:
        """Return the bytes of one stage that keeps all activations."""
        return float(self.memory.plain(end, used)[start, self.column(replicas)])

    def recomputes(self, start: int, end: int, replicas: int, *, used: int) -> bool:
        """Whether a stage recomputes its activations."""
        return bool(self.stages(end, used).recompute[start, self.column(replicas)])

    def stays_whole(self, start: int, end: int, replicas: int, *, used: int) -> bool:
        """Whether a stage's parameters, which its replicas divide, stay whole until the last microbatch."""
        return replicas > 1 and bool(self.stages(end, used).stays_whole[start, self.column(replicas)])
