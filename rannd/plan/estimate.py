"""The closed form E: what a stage costs under the fill-drain schedule, for every run of blocks and replica count.

docs/planning.md states E and says where it bounds the simulator. All tables here are ``[i, j, R]``: the stage of
blocks i to j-1 on R replicas, for ``0 <= i < j <= n`` and ``1 <= R <= world``. E of a plan is

    sum of fill + largest forward + largest backward + largest allreduce       over its stages
"""

from __future__ import annotations

import math

import numpy as np

from rannd.plan.deployment import StageEstimate
from rannd.plan.intervals import Intervals, Table, at
from rannd.plan.options import PlanOptions
from rannd.profile.costs import LinkCost


class StageTables:
    """Terms of E and memory of every possible stage, for one number of microbatches.

    `fill`, `forward`, `backward` and `allreduce` are microseconds, without recomputing; what recomputing adds is
    in `recompute_fill_us` and `recompute_backward_us`. `memory` and `memory_recompute` are the bytes that a
    replica needs without and with recomputing.
    """

    def __init__(
        self,
        intervals: Intervals,
        link: LinkCost,
        options: PlanOptions,
        *,
        world: int,
        microbatches: int,
        rows: int,
        allreduce: Table,
    ) -> None:
        """`rows`: rows of the largest piece; `allreduce`: :func:`allreduce_table`, the same for all `microbatches`."""
        self.intervals, self.options = intervals, options
        self.world, self.microbatches, self.rows = world, microbatches, rows
        self.allreduce = allreduce
        move = np.vectorize(link.p2p_us, otypes=[float])

        replicas = np.maximum(np.arange(world + 1), 1)
        self.pieces = -(-world * microbatches // replicas)
        """Most pieces that a replica runs, by number of replicas."""
        more = (self.pieces - 1).astype(float)

        self.forward_us = at(intervals.forward, rows)
        self.backward_us = at(intervals.backward, rows)
        busy_forward = self.forward_us + move(at(intervals.received, rows))
        busy_backward = self.backward_us + move(at(intervals.sent_grad, rows))
        at_ranks = move(at(intervals.given, rows)) + move(at(intervals.output_grad, rows))
        self.fill = (busy_forward + busy_backward)[:, :, None] + at_ranks[:, :, None] * self.pieces
        self.forward = busy_forward[:, :, None] * more
        self.backward = busy_backward[:, :, None] * more
        self.recompute_fill_us = self.forward_us[:, :, None]
        self.recompute_backward_us = self.forward_us[:, :, None] * more

        last = intervals.count
        outputs = float(at(intervals.output, rows)[0, last])
        to_ranks = microbatches * (link.p2p_us(outputs) + link.p2p_us(max(intervals.inputs_grad.at(rows), 0.0)))
        self.fill[0, 1:last] += to_ranks
        # One stage on all devices moves nothing: every rank runs its own pieces.
        alone = self.forward_us[0, last] + self.backward_us[0, last]
        self.fill[0, last] = alone

        self.kept = at(intervals.activation, rows)
        self.held = (
            at(intervals.received, rows)
            + at(intervals.given, rows)
            + at(intervals.sent, rows)
            + at(intervals.output, rows)
        )
        """Bytes of one piece that cross the stage's border and stay until its backward."""
        state = intervals.params + (2.0 + options.opt_param_factor) * intervals.trainable
        border = state[:, :, None] + self.held[:, :, None] * self.pieces
        self.memory = border + self.kept[:, :, None] * self.pieces
        self.memory_recompute = border + self.kept[:, :, None]

    def estimate(self, start: int, end: int, replicas: int, *, recompute: bool) -> StageEstimate:
        """What one replica of the stage of blocks `start` to `end` - 1 does in a step."""
        intervals, pieces = self.intervals, int(self.pieces[replicas])
        forward = self.forward_us[start, end] * pieces
        backward = self.backward_us[start, end] * pieces + (forward if recompute else 0.0)
        incoming = at(intervals.received, self.rows) + at(intervals.given, self.rows)
        outgoing = at(intervals.sent, self.rows) + at(intervals.output, self.rows)
        param = int(intervals.params[start, end])
        # Gradients, and as much again for the pending buffer.
        grad = 2 * int(intervals.trainable[start, end])
        activation = math.ceil(self.kept[start, end] * (1 if recompute else pieces))
        optimizer = math.ceil(intervals.trainable[start, end] * self.options.opt_param_factor)
        comm = math.ceil(self.held[start, end] * pieces)
        return StageEstimate(
            forward_us=float(forward),
            backward_us=float(backward),
            allreduce_us=float(self.allreduce[start, end, replicas]),
            input_bytes=math.ceil(incoming[start, end]),
            output_bytes=math.ceil(outgoing[start, end]),
            param_bytes=param,
            grad_bytes=grad,
            activation_bytes=activation,
            optimizer_bytes=optimizer,
            comm_bytes=comm,
            total_bytes=param + grad + activation + optimizer + comm,
        )


def allreduce_table(intervals: Intervals, link: LinkCost, world: int) -> Table:
    """Time to reduce the gradients of each possible stage.

    Parameters that other stages read too are reduced over all stages that read them: here, as a bound, over
    all devices.
    """
    reduce = np.vectorize(link.allreduce_us, otypes=[float])
    own = (intervals.trainable - intervals.shared)[:, :, None]
    result: Table = reduce(own, np.arange(world + 1)) + reduce(intervals.shared, world)[:, :, None]
    return result
