"""What the ranks tell each other when a backward begins: which outputs have gradients, and whether they reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rannd.errors import StepError
from rannd.runtime.comm.lockstep import Phase, begin_to_agree, pack_flags, unpack_flags
from rannd.runtime.comm.world import World
from rannd.runtime.execution.played_graph import PlayedGraph
from rannd.runtime.execution.step import Step


class Upstream:
    """The exchange between ranks about one backward; it begins at once.

    Args:
        world: The ranks of the job.
        graphs: Those of all ranks' mini-batches, this rank's first.
        step: The step.
        gradients: Of this rank's outputs, in the order of the graph's; None where it has none.
        reduce: Gradients of parameters are reduced.
        wanted: They are requested on this rank.
    """

    def __init__(
        self,
        world: World,
        graphs: Sequence[PlayedGraph],
        step: Step,
        gradients: Sequence[torch.Tensor | None],
        *,
        reduce: bool,
        wanted: bool,
    ) -> None:
        self._world, self._graphs, self._step = world, graphs, step
        self._totals = totals = graphs[0].totals
        given = dict(zip(graphs[0].bound.graph.traced.results, gradients, strict=True))
        self._given = [given[node] for node in totals.nodes]
        self._flags = [gradient is not None for gradient in gradients]
        self._packed = len(flags := pack_flags([reduce, wanted, *self._flags]))
        numbers = totals.packed(self._given)
        self._agreement = begin_to_agree(world, Phase.BACKWARD, step.number, *flags, *numbers)
        self._found: tuple[tuple[bool, ...], bool] | None = None

    def own(self) -> tuple[bool, ...]:
        """Which of this rank's outputs have gradients."""
        return tuple(self._flags)

    def is_ready(self) -> bool:
        """Whether `agreed` does not wait any more."""
        return self._agreement.is_ready()

    def agreed(self) -> tuple[tuple[bool, ...], bool]:
        """Which outputs have gradients on any rank, and whether those of parameters are requested on any. Collective.

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
            parts = self._totals.upstream(self._given, [each[self._packed :] for each in told])
            for graph in self._graphs:
                for place, node in enumerate(graph.totals.nodes):
                    self._step.upstream[node] = [parts[rank][place] for rank in self._world.rank_of_slot]
            self._found = tuple(any(column) for column in by_output), any(wants)
        return self._found
