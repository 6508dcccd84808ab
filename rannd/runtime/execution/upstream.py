"""What the ranks tell each other when a backward begins: which outputs have gradients, and whether they reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from rannd.errors import StepError
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.comm.lockstep import Phase, begin_to_agree, pack_flags, unpack_flags
from rannd.runtime.comm.world import World
from rannd.runtime.execution.global_sums import Totals
from rannd.runtime.execution.step import Step


class Upstream:
    """The exchange between ranks about one backward; it begins at once.

    Args:
        gradients: Of this rank's outputs, in the order of the graph's; None where it has none.
        reduce: Gradients of parameters are reduced.
        wanted: They are requested on this rank.
    """

    def __init__(
        self,
        world: World,
        bound: BoundGraph,
        totals: Totals,
        step: Step,
        gradients: Sequence[torch.Tensor | None],
        *,
        reduce: bool,
        wanted: bool,
    ) -> None:
        self._world, self._bound, self._totals, self._step = world, bound, totals, step
        self._given = dict(zip(bound.graph.traced.results, gradients, strict=True))
        self._flags = [gradient is not None for gradient in gradients]
        self._packed = len(flags := pack_flags([reduce, wanted, *self._flags]))
        numbers = totals.packed([self._given[node] for node in totals.nodes])
        self._agreement = begin_to_agree(world, Phase.BACKWARD, step.number, *flags, *numbers)
        self._found: tuple[frozenset[Node], bool] | None = None

    def own(self) -> frozenset[Node]:
        """The nodes that get gradients by this rank's outputs alone."""
        return self._bound.live(tuple(self._flags))

    def is_ready(self) -> bool:
        """Whether `agreed` does not wait any more."""
        return self._agreement.is_ready()

    def agreed(self) -> tuple[frozenset[Node], bool]:
        """The nodes that get gradients, and whether gradients of parameters are requested on any rank. Collective.

        Gives the step the gradients of globally summed outputs. StepError if ranks are at different places.
        """
        if self._found is None:
            told = self._agreement.finish()
            count = 2 + len(self._flags)
            reduced, wants, *by_output = zip(*(unpack_flags(each, count) for each in told), strict=True)
            if len(set(reduced)) > 1:
                raise StepError(
                    "gradients of parameters are reduced on ranks "
                    f"{[rank for rank, each in enumerate(reduced) if each]} alone: every rank has to turn "
                    "delay_grad_allreduce on and off at the same places"
                )
            nodes = self._totals.nodes
            parts = self._totals.upstream(
                [self._given[node] for node in nodes], [each[self._packed :] for each in told]
            )
            for node in nodes:
                self._step.upstream[node] = [parts[rank][node] for rank in self._world.rank_of_slot]
            self._found = self._bound.live(tuple(any(column) for column in by_output)), any(wants)
        return self._found
