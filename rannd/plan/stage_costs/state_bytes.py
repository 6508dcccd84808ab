"""What a replica of every possible stage holds of parameters, gradients and optimizer state, under one ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import Offload
from rannd.plan.simulate.step_costs import BUCKET
from rannd.plan.stage_costs.intervals import Intervals
from rannd.plan.topology import Counts, Table
from rannd.plan.zero import ReplicaBytes, Trained, WholeBytes, held, in_files


class StateBytes:
    """Bytes of all possible stages, for some numbers of replicas.

    Args:
        intervals: Sizes of runs of blocks.
        zero: ZeRO stage.
        replicas: Numbers of replicas that stages may have; one with ZeRO 2 and 3.
        options: What the plan has to be like.
    """

    def __init__(self, intervals: Intervals, zero: int, replicas: Counts, options: PlanOptions) -> None:
        self._intervals, self._zero, self._device = intervals, zero, options.device
        self._known: dict[tuple[int, tuple[int, ...], int], ReplicaBytes] = {}
        """What `of_stage` returned."""
        self.offload = Offload.asked(options)
        """What is elsewhere while it is not needed."""
        self.apart = zero >= 2 and (replicas[0] > 1 or self.offload.params)
        """Whether blocks have to be segments: their gradients are given away, or their parameters."""
        self.held = self.of_replica(slice(None), slice(None), replicas if zero else 1)
        """``[start, end, number of replicas]``, or one entry for all; each block is a segment."""
        self.fixed = self.held.state + self.held.working
        """The same: of what is held permanently or at a time."""
        self._divided = replicas > 1

    @cached_property
    def staying(self) -> Table:
        """``[start, end, number of replicas]``: of what is whole in addition, if parameters that replicas divide stay
        whole until the last microbatch; those of a block and the next one are in `held.working`."""
        trainable, two = self._intervals.trainable, self._intervals.units.two_params
        return np.maximum(trainable.whole - trainable.shared - two, 0.0)[:, :, None] * self._divided

    def of_stage(self, start: int, ends: Sequence[int], replicas: int) -> ReplicaBytes:
        """Return what a replica of one stage holds, whose segments may have several blocks with ZeRO 2 and 3.

        Args:
            start: First block of the stage.
            ends: Blocks of the stage before the end of each segment.
            replicas: Number of replicas.
        """
        if not self._zero:  # the same for all numbers of replicas
            return ReplicaBytes(*(table[start, start + ends[-1]] for table in self.held))
        key = start, tuple(ends) if self.apart else (ends[-1],), replicas
        if key not in self._known:
            units = self._intervals.units_of(start, ends) if self.apart else None
            self._known[key] = self.of_replica(start, start + ends[-1], replicas, units)
        return self._known[key]

    def whole_bytes(self, start: int, ends: Sequence[int], replicas: int, *, stays: bool) -> float:
        """Return the bytes of what a replica has as a whole at a time of parameters and gradients that are divided.

        `start`, `ends`, `replicas`: of the stage, as for `of_stage`. `stays`: parameters stay whole until the last
        microbatch.
        """
        end = start + ends[-1]
        found = float(self.of_stage(start, ends, replicas).working[0])
        if stays:
            trainable, two = self._intervals.trainable, self._intervals.units_of(start, ends).two_params
            found += max(float(trainable.whole[start, end] - trainable.shared[start, end] - two[0]), 0.0)
        return found

    def of_replica(
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
            bucket=float(BUCKET),
        )
