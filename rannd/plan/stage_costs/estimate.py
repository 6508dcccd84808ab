"""What a stage of a plan gets: its segments, and the estimate of its time and memory."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from rannd.plan.deployment import StageEstimate
from rannd.plan.stage_costs.recompute import DividedStage, least_memory, segments
from rannd.plan.stage_costs.stage_terms import StageTerms
from rannd.plan.topology import Mask
from rannd.plan.zero import SEGMENT, fetch_us, offload_us


class StageTables(StageTerms):
    """Terms of E of all possible stages of one variant, and estimates of the chosen ones."""

    @cached_property
    def _segments(self) -> dict[tuple[int, int, int, int], DividedStage]:
        """What was divided before, by first block, end, replicas and devices of later stages."""
        return {}

    @cached_property
    def _estimates(self) -> dict[tuple[int, int, int, int], StageEstimate]:
        """What was estimated before, likewise."""
        return {}

    def segments(self, start: int, end: int, replicas: int, *, used: int) -> DividedStage:
        """Return what of a stage recomputes: the least that makes it fit, or all of it with `checkpointing`.

        E and the search count a stage that cannot keep everything as one that recomputes all. Where replicas share
        gradients, each block is a segment, which gives its gradients away after its backward; small neighbours are one
        together where nothing is recomputed and memory suffices.
        """
        key = (start, end, replicas, used)
        if key not in self._segments:
            self._segments[key] = self._divided(start, end, replicas, used=used)
        return self._segments[key]

    def _divided(self, start: int, end: int, replicas: int, *, used: int) -> DividedStage:
        forward = np.diagonal(self.forward_us, 1)[start:end]
        apart = self.memory.state.apart
        if not self.recomputes(start, end, replicas, used=used):
            ends = self._joined(start, end, replicas, used=used) if apart else (end - start,)
            return DividedStage(ends, (False,) * len(ends), float(self.memory.kept[start, end]), 0.0, 0.0)
        flying = self.counts.most_of(start, end, self.column(replicas), used=used, split=False)
        activation = self.memory.kept[start : end + 1, start : end + 1]
        if self.offload.activations:
            return self.away(start, end, flying, apart=apart)
        handed = self.intervals.handed(start, end, self.rows)
        if self.forced(end):
            return least_memory(forward, activation, handed, flying, apart=apart)
        plain = self.memory.plain(end, used, split=False)
        others = plain[start, self.column(replicas)] - self.memory.kept[start, end] * flying
        budget = self.limit - float(others)
        found = segments(forward, activation, handed, flying, budget, apart=apart)
        return found or least_memory(forward, activation, handed, flying, apart=apart)

    def _joined(self, start: int, end: int, replicas: int, *, used: int) -> tuple[int, ...]:
        """Return where segments of a stage end that recomputes nothing: runs of blocks with few gradients if what is
        whole with them fits, otherwise each block."""
        apart, joined = tuple(range(1, end - start + 1)), self.intervals.joined(start, end, SEGMENT)
        stays = self.stays_whole(start, end, replicas, used=used)
        separate, together = (
            self.memory.state.of_stage(start, ends, replicas).state.item()
            + self.memory.state.whole_bytes(start, ends, replicas, stays=stays)
            for ends in (apart, joined)
        )
        fits = self.bytes_kept(start, end, replicas, used=used)
        fits += float(self.memory.state.staying[start, end, self.column(replicas)]) * stays
        return joined if fits - separate + together <= self.limit else apart

    def away(self, start: int, end: int, flying: int, *, apart: bool) -> DividedStage:
        """Return a stage that recomputes: each block, from values that are elsewhere, or all together if that is less.

        `apart`: each block has to be a segment.
        """
        count, stays = end - start, float(self.memory.stays[start, end])
        forward_us = float(np.diagonal(self.forward_us, 1)[start:end].sum())
        largest, away = float(self.memory.kept_apart[start, end]), float(self.microbatch.between[start, end]) - stays
        alone = DividedStage(tuple(range(1, count + 1)), (True,) * count, stays, largest, forward_us, away)
        together = DividedStage((count,), (True,), 0.0, float(self.memory.kept[start, end]), forward_us)
        return together if not apart and together.bytes(flying) <= alone.bytes(flying) else alone

    def estimate(self, start: int, end: int, replicas: int, *, used: int) -> StageEstimate:
        """Return the estimate for one replica of the stage of blocks `start` to `end` - 1 in a step."""
        key = (start, end, replicas, used)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(start, end, replicas, used=used)
        return self._estimates[key]

    def _estimate(self, start: int, end: int, replicas: int, *, used: int) -> StageEstimate:
        # Where a stage cannot keep everything, its backward is not split: that alone may make it fit.
        split = not self.recomputes(start, end, replicas, used=used)
        column = self.column(replicas)
        first, most = (self.counts.most_of(start, end, column, used=used, split=delays) for delays in (False, split))
        inside = self.links(used)[2] if self.slots_matter else None
        divided = self.segments(start, end, replicas, used=used)
        whole = self.stays_whole(start, end, replicas, used=used)
        return self.estimate_of(start, end, replicas, divided, (first, most), split=split, whole=whole, inside=inside)

    def estimate_of(
        self,
        start: int,
        end: int,
        replicas: int,
        divided: DividedStage,
        flight: tuple[int, int],
        *,
        split: bool,
        whole: bool = False,
        inside: Mask | None = None,
    ) -> StageEstimate:
        """Return the estimate of a stage with given segments and microbatches in flight.

        Args:
            start: First block.
            end: Block after the last one.
            replicas: Number of replicas.
            divided: Its segments.
            flight: Maximum number of microbatches between forward and backward, and between forward and the second half
                of it.
            split: Whether gradients of parameters may be delayed, if the schedule does so.
            whole: Whether parameters that replicas divide stay whole until the last microbatch.
            inside: By number of replicas, whether they are on one node; None: they count as on different nodes.
        """
        column, microbatch = self.column(replicas), self.microbatch
        pieces = int(self.counts.pieces[column])
        first, flying = flight
        leaving, coming = (each[start, end] * (divided.away > 0) for each in (self.leaving_us, self.coming_us))
        forward = (self.forward_us[start, end] + leaving) * pieces
        backward = (self.backward_us[start, end] + divided.forward_us + coming) * pieces
        backward += self.add_us[start, end] * (pieces - 1)
        weight = microbatch.weight_us[start, end] * pieces if split else 0.0
        zero = self.variant.zero
        reduction = self.reductions.of(end, self.replicas, inside, zero)
        reduce = reduction.whole[start, column] + reduction.host[start, column]
        if zero in (1, 2):
            reduce += self.reductions.gather(end, self.replicas, inside)[start, column]
        own = self.memory.state.of_stage(start, divided.ends, replicas)
        param, grad, optimizer = (math.ceil(size[0]) for size in (own.params, own.grads, own.optimizer))
        later = float(self.memory.delayed[start, end])
        waits = later > 0 and split
        activation = math.ceil(divided.kept * flying)
        if waits:
            activation = math.ceil(max(divided.kept, later) * first + later * (flying - first))
        at_a_time = self.memory.state.whole_bytes(start, divided.ends, replicas, stays=whole)
        working = math.ceil(microbatch.working[start, end] + divided.working + at_a_time)
        posted = self.memory.posted(slice(start, start + 1), end, np.full((1, len(self.replicas)), flying))[0, column]
        comm = math.ceil(microbatch.crossing[start, end] * flying + posted)
        return StageEstimate(
            forward_us=float(forward),
            backward_us=float(backward),
            allreduce_us=float(reduce),
            input_bytes=math.ceil(microbatch.received[start, end] + microbatch.given[start, end]),
            output_bytes=math.ceil(microbatch.crossing[start, end] - microbatch.received[start, end]),
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
            whole_bytes=math.ceil(at_a_time),
            weight_bytes=math.ceil(later) if waits else 0,
            offloaded_bytes=math.ceil(own.offloaded[0] + divided.away * flying),
            offload_us=float(offload_us(own.offloaded, self.options.device)[0]),
            fetch_us=float(fetch_us(own.fetched, self.options.device)[0]),
        )
