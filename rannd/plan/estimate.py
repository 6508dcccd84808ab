"""The closed form E: what every stage that a plan could have adds to the time of a step, and what memory it needs.

docs/planning.md states E and where it comes from. Stages are put together from the last one on, because what a stage
needs depends on what comes behind it: under 1F1B it keeps a piece until all later stages are through with it, and
its gradients are reduced while all earlier stages still run backward.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from rannd.plan.deployment import StageEstimate
from rannd.plan.intervals import Intervals, at
from rannd.plan.machine import Counts, Machine, Mask, Table, allreduce_us, p2p_us
from rannd.plan.options import PlanOptions
from rannd.plan.program import AHEAD
from rannd.plan.step_costs import BUCKET

NEVER = 1 << 40
"""More devices than there are."""


class Variant(msgspec.Struct, frozen=True, order=True):
    """What all stages of a plan have in common."""

    schedule: str
    microbatches: int
    placement: str


class Terms(msgspec.Struct, frozen=True):
    """What stages that end at one block add to E: tables ``[first block, replicas - 1]``, microseconds."""

    fill: Table
    """Once: the way of one piece through the stage and back. Infinite where a stage is not possible."""
    rounds: Table
    """``[term, ..]``: of each term the largest counts, for all pieces but one: the round of forward and backward
    (1F1B), or forward and backward each (fill-drain)."""
    exposed: Table
    """Reduction of gradients that the stage's own backward does not hide."""
    drain: Table
    """Backward of the last piece: what later stages can reduce behind."""
    recompute: Mask


class Reductions:
    """Times to reduce the gradients of all stages that there could be: the same for all variants.

    Parameters that other stages read too are reduced over all stages that read them: here, as a bound, over all.
    """

    def __init__(self, intervals: Intervals, machine: Machine) -> None:
        replicas = np.arange(1, machine.world + 1)
        shared = intervals.shared[:, :, None]
        own = (intervals.trainable - intervals.shared)[:, :, None]
        links = [machine.between, machine.link] if machine.several else [machine.link]
        all_over = [allreduce_us(links[0], size, machine.world) for size in (shared, np.minimum(shared, BUCKET))]
        self._whole = [allreduce_us(link, own, replicas) + all_over[0] for link in links]
        self._tail = [np.maximum(allreduce_us(link, np.minimum(own, BUCKET), replicas), all_over[1]) for link in links]

    def of(self, end: int, inside: Mask | None) -> tuple[Table, Table]:
        """Whole and last bucket of stages that end at `end`: ``[start, replicas - 1]``.

        `inside`: where replicas are on one node. Without it they are as far apart as there are nodes.
        """
        if inside is None:
            return self._whole[0][:end, end], self._tail[0][:end, end]
        whole, tail = (np.where(inside, each[-1][:end, end], each[0][:end, end]) for each in (self._whole, self._tail))
        return whole, tail

    @cached_property
    def least(self) -> tuple[Table, Table]:
        """The same of all stages, ``[start, end, replicas - 1]``, wherever replicas are."""
        return np.minimum(self._whole[0], self._whole[-1]), np.minimum(self._tail[0], self._tail[-1])


class StageTables:
    """All possible stages of one variant."""

    def __init__(
        self,
        intervals: Intervals,
        machine: Machine,
        options: PlanOptions,
        variant: Variant,
        *,
        rows: int,
        limit: float,
        allowed: Mask,
        reductions: Reductions,
    ) -> None:
        """`rows`: of the largest piece; `limit`: bytes of a device; `allowed`: ``[start, end, replicas - 1]``."""
        self.intervals, self.machine, self.options, self.variant = intervals, machine, options, variant
        self.rows, self.limit, self.allowed = rows, limit, allowed
        self.reductions = reductions
        world = self.world = machine.world
        self.blocks = intervals.count
        self.replicas = np.arange(1, world + 1)
        self.pieces = -(-world * variant.microbatches // self.replicas)
        """Most pieces of a replica, by number of replicas."""
        self.steady = variant.schedule != "fill_drain"
        """Whether forward and backward take turns."""

        self.forward_us = at(intervals.forward, rows)
        self.backward_us = at(intervals.backward, rows)
        received, sent = at(intervals.received, rows), at(intervals.sent_grad, rows)
        self.values_us = [p2p_us(link, received) for link in (machine.link, machine.between)]
        """Time to receive a piece's values, inside a node and from another."""
        self.grads_us = [p2p_us(link, sent) for link in (machine.link, machine.between)]
        self.given = at(intervals.given, rows)
        """Bytes of one piece's inputs: those of all pieces are there from the start."""
        self.received = received
        """Bytes of one piece that come from other stages."""
        self.sent_grad = sent
        """Bytes of the gradients that come back for them."""
        self.crossing = received + at(intervals.sent, rows) + at(intervals.output, rows)
        """Bytes of one piece that cross the stage's border and stay until its backward."""
        self.kept = at(intervals.activation, rows)
        self.working = 2.0 * intervals.largest(rows)
        """Bytes that a backward needs for a moment: gradients of what the widest operator makes and reads."""
        self.state = intervals.params + (2.0 + options.opt_param_factor) * intervals.trainable
        """Parameters, their gradients (those of a step that waits, too) and the optimizer's state."""
        ranks = p2p_us(machine.link, at(intervals.given, rows)) + p2p_us(machine.link, at(intervals.output_grad, rows))
        self.ranks_us = ranks
        """First input from a rank, first gradient of an output from it."""
        last = self.blocks
        outputs = at(intervals.output, rows)[0, last]
        inputs_grad = max(intervals.inputs_grad.at(rows), 0.0)
        self.to_ranks = machine.link.p2p_us(float(outputs)) + machine.link.p2p_us(float(inputs_grad))
        self._apart = machine.several and variant.placement == "replicas"
        """Whether it matters which slots a stage has."""
        self.late = variant.microbatches * float(outputs + inputs_grad)
        """Bytes of a rank's own outputs, and gradients of its own inputs, which come when the step ends."""
        self._bases: dict[int, tuple[Terms, bool]] = {}
        self._known: dict[tuple[int, int], Terms] = {}
        self._inside = machine.pipelines_inside if machine.several else np.ones(world, dtype=bool)

    # -- what a stage adds ------------------------------------------------------------------------------------

    def stages(self, end: int, used: int) -> Terms:
        """All stages that end before block `end`, where those behind have `used` devices.

        Tables are ``[start, replicas - 1]`` for ``start < end`` and as many replicas as there are devices left; a stage
        that starts with block 0 takes them all, another one leaves at least one.
        """
        key = (end, used)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._stages(end, used)
        return found

    def _stages(self, end: int, used: int) -> Terms:
        left = self.world - used
        if end not in self._bases:
            # Under 1F1B it matters then what comes behind a stage: it says how many pieces are in flight.
            self._bases[end] = (self._terms(end, None, None), self.steady and self._is_tight(end))
        base, tight = self._bases[end]
        if self._apart or tight:
            base = self._terms(end, used, self._links(used) if self._apart else None)
        cut = Terms(
            base.fill[:, :left].copy(), base.rounds[:, :, :left], base.exposed[:, :left], base.drain[:, :left],
            base.recompute[:, :left],
        )  # fmt: skip
        cut.fill[0, : left - 1] = np.inf
        cut.fill[1:, left - 1] = np.inf
        if end == self.blocks and used == 0:
            self._alone(cut)
        return cut

    def _alone(self, terms: Terms) -> None:
        """One stage on all devices moves nothing: every rank runs its own pieces."""
        last = self.blocks
        if np.isfinite(terms.fill[0, -1]):
            again = bool(terms.recompute[0, -1])
            forward = self.forward_us[0, last]
            backward = self.backward_us[0, last] + (forward if again else 0.0)
            more = float(self.pieces[-1] - 1)
            terms.fill[0, -1] = forward + backward
            rounds = [forward + backward] if self.steady else [forward, backward]
            terms.rounds[:, 0, -1] = np.array(rounds) * more
            terms.drain[0, -1] = backward
            terms.exposed[0, -1] = self._exposed(last, np.array(backward), None)[0, -1]

    def _terms(self, end: int, used: int | None, links: tuple[Mask, Mask, Mask] | None) -> Terms:
        """Tables for all numbers of replicas. `links`: whether values, gradients and reductions stay inside nodes."""
        rows = slice(0, end)
        values_inside, grads_inside = (self._inside, self._inside) if links is None else links[:2]
        again = self._recomputes(end, used)
        forward = np.broadcast_to(self.forward_us[rows, end, None], again.shape)
        backward = self.backward_us[rows, end, None] + np.where(again, forward, 0.0)
        values = np.where(values_inside, self.values_us[0][rows, end, None], self.values_us[1][rows, end, None])
        grads = np.where(grads_inside, self.grads_us[0][rows, end, None], self.grads_us[1][rows, end, None])
        fill = forward + backward + values + grads + self.ranks_us[rows, end, None]
        if end < self.blocks or self.world > 1:
            fill[0] += self.to_ranks
        more = (self.pieces - 1).astype(float)
        if self.steady:
            rounds = (np.maximum(np.maximum(forward + backward, values), grads) * more)[None]
        else:
            rounds = np.stack([np.maximum(forward, values) * more, np.maximum(backward, grads) * more])
        fits = self.allowed[rows, end] & (self._memory(end, used, again) <= self.limit)
        fill[~fits] = np.inf
        exposed = self._exposed(end, backward, links[2] if links is not None else None)
        return Terms(fill, rounds, exposed, backward + grads, again)

    def _links(self, used: int) -> tuple[Mask, Mask, Mask]:
        """Whether values, gradients, reductions stay inside nodes, of stages in front of the `used` last slots."""
        end = np.full(self.world, self.world - used)
        start = end - self.replicas
        return (
            self.machine.same(start - 1, end - 1),
            self.machine.same(start, end),
            self.machine.same(start, end - 1),
        )

    def _exposed(self, end: int, backward: Table, inside: Mask | None) -> Table:
        """Reduction left when the backward of the last piece ends: what did not fit behind it, and the last bucket."""
        whole, tail = self.reductions.of(end, inside)
        if self.options.sync_allreduce:
            return whole
        result: Table = np.maximum(whole - backward, tail)
        return result

    # -- memory -----------------------------------------------------------------------------------------------

    def in_flight(self, used: int | None) -> npt.NDArray[np.intp]:
        """Most pieces between forward and backward, by number of replicas, where later stages have `used` devices.

        None: the most that there can be. See schedule.window for 1F1B's number.
        """
        if not self.steady or used is None:
            return self.pieces
        if used == 0:
            return np.minimum(self.pieces, 1)
        result: npt.NDArray[np.intp] = np.minimum(self.pieces, -(-(used + self.replicas) // self.replicas) + 1)
        return result

    def _plain(self, end: int, used: int | None) -> Table:
        """Bytes of stages that end at `end` and do not recompute."""
        pieces = self.in_flight(used)
        rows = slice(0, end)
        return (
            self.state[rows, end, None]
            + self.working[rows, end, None]
            + self._posted(rows, end, pieces)
            + (self.crossing[rows, end, None] + self.kept[rows, end, None]) * pieces
        )

    def _posted(self, starts: slice | int, end: int, flying: npt.NDArray[np.intp]) -> Table:
        """Bytes that messages have on top of what their pieces keep: receives are posted `AHEAD` computations early."""
        early = np.where(flying < self.pieces, self.received[starts, end, None], 0.0)
        grads = self.sent_grad[starts, end, None] * np.minimum(self.pieces, AHEAD + 1)
        result: Table = self.given[starts, end, None] * self.pieces + early + grads + self.late
        return result

    def _recomputes(self, end: int, used: int | None) -> Mask:
        shape = (end, self.world)
        if self.options.checkpointing:
            return np.ones(shape, dtype=bool)
        if used is None and self.steady:  # only asked for where everything fits
            return np.zeros(shape, dtype=bool)
        result: Mask = self._plain(end, used) > self.limit
        return result

    def _memory(self, end: int, used: int | None, again: Mask) -> Table:
        """Bytes of a replica."""
        plain = self._plain(end, used)
        saved = self.kept[:end, end, None] * (self.in_flight(used) - 1)
        result: Table = np.where(again, plain - saved, plain)
        return result

    def _least(self, end: int, used: int | None) -> Table:
        """Bytes of a replica that recomputes where that needs less."""
        everywhere = np.ones((end, self.world), dtype=bool)
        result: Table = np.minimum(self._plain(end, used), self._memory(end, used, everywhere))
        return result

    def _is_tight(self, end: int) -> bool:
        """Whether some stage that ends here might not fit without recomputing."""
        return bool((self._plain(end, None) > self.limit).any())

    def fewest(self) -> tuple[Counts, Counts]:
        """Fewest replicas that a stage can have, without recomputing and with, whatever comes behind it.

        ``[start, end]``; NEVER where it cannot be, or is a plan of its own.
        """
        pieces = np.ones(1) if self.steady else self.pieces
        border = (self.state + self.working)[:, :, None] + self.late + (self.crossing + self.given)[:, :, None] * pieces
        kept = self.kept[:, :, None]
        plain = np.less_equal(border + kept * pieces, -1.0 if self.options.checkpointing else self.limit)
        found = []
        for fits in (plain, np.less_equal(border + kept, self.limit)):
            possible = np.logical_and(fits, self.allowed)
            possible[0, self.blocks, self.world - 1] = False
            found.append(np.where(possible.any(axis=2), possible.argmax(axis=2) + 1, NEVER))
        return found[0], found[1]

    def next_allowed(self) -> Counts:
        """By number of replicas the least that is allowed somewhere and not smaller; NEVER behind the last."""
        may: Mask = np.asarray(self.allowed.any(axis=(0, 1)))
        following = np.full(self.world + 2, NEVER, dtype=np.int64)
        for replicas in range(self.world, 0, -1):
            following[replicas] = replicas if may[replicas - 1] else following[replicas + 1]
        following[0] = following[1]
        return following

    def exposed_at_least(self) -> Table:
        """Reduction that a stage leaves at least, whatever comes behind it and wherever it is.

        ``[start, end, replicas - 1]``, and never less with more replicas.
        """
        backward = self.backward_us.copy()
        for end in range(1, self.blocks + 1):
            if self.options.checkpointing or self._is_tight(end):
                backward[:, end] += self.forward_us[:, end]  # some may recompute
        whole, tail = self.reductions.least
        found = whole if self.options.sync_allreduce else np.maximum(whole - backward[:, :, None], tail)
        result: Table = np.minimum.accumulate(found[:, :, ::-1], axis=2)[:, :, ::-1]
        return result

    def least_memory(self, end: int, used: int) -> Table:
        """Bytes that stages that end here need at least, recomputing if that is less; infinite where not allowed."""
        memory = self._least(end, used)
        left = self.world - used
        memory = np.where(self.allowed[:end, end], memory, np.inf)[:, :left]
        memory[0, : left - 1] = np.inf
        memory[1:, left - 1] = np.inf
        return memory

    def bytes_needed(self, start: int, end: int, replicas: int, *, used: int) -> float:
        """Bytes with which one stage would do, recomputing where that is less."""
        return float(self._least(end, used)[start, replicas - 1])

    def recomputes(self, start: int, end: int, replicas: int, *, used: int) -> bool:
        """Whether a stage recomputes its activations."""
        return bool(self.stages(end, used).recompute[start, replicas - 1])

    # -- one stage --------------------------------------------------------------------------------------------

    def estimate(self, start: int, end: int, replicas: int, *, used: int) -> StageEstimate:
        """What one replica of the stage of blocks `start` to `end` - 1 does in a step."""
        intervals = self.intervals
        recompute = self.recomputes(start, end, replicas, used=used)
        pieces = int(self.pieces[replicas - 1])
        flying = int(self.in_flight(used)[replicas - 1])
        forward = self.forward_us[start, end] * pieces
        backward = self.backward_us[start, end] * pieces + (forward if recompute else 0.0)
        weight = 0.0 if recompute else at(intervals.weight, self.rows)[start, end] * pieces
        reduce = self.reductions.of(end, self._links(used)[2] if self._apart else None)[0][start, replicas - 1]
        param = int(intervals.params[start, end])
        # Gradients, and as much again for the pending buffer.
        grad = 2 * int(intervals.trainable[start, end])
        activation = math.ceil(self.kept[start, end] * (1 if recompute else flying))
        optimizer = math.ceil(intervals.trainable[start, end] * self.options.opt_param_factor)
        working = math.ceil(self.working[start, end])
        posted = self._posted(start, end, self.in_flight(used))[replicas - 1]
        comm = math.ceil(self.crossing[start, end] * flying + posted)
        return StageEstimate(
            forward_us=float(forward),
            backward_us=float(backward),
            allreduce_us=float(reduce),
            input_bytes=math.ceil(self.received[start, end] + self.given[start, end]),
            output_bytes=math.ceil(self.crossing[start, end] - self.received[start, end]),
            param_bytes=param,
            grad_bytes=grad,
            activation_bytes=activation,
            optimizer_bytes=optimizer,
            comm_bytes=comm,
            total_bytes=param + grad + activation + optimizer + comm + working,
            pieces=pieces,
            in_flight=flying,
            weight_us=float(weight),
            working_bytes=working,
        )
