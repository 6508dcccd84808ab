"""A lower bound of the simulated time of a step, without a Program: what some slot computes, and what it waits for.

A slot computes all its microbatches. Before the first of them, this one comes through the earlier stages; after the
last backward, its gradients go back through them. Reductions follow as in `simulator.py`. This holds for any order in
which a slot computes, if it runs the microbatches of a stage forward in ascending order, as all schedules do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rannd.plan.schedule.program import Edge, Layout
from rannd.plan.simulate.step_costs import StepCosts

_ROUNDING = 1e-9
"""Part of a step by which sums in another order differ at most, and more."""


def least_us(layout: Layout, costs: StepCosts, *, delayed: Collection[int] = ()) -> float:
    """Return a time, in microseconds, that the simulated step of no Program of `layout` is below.

    `delayed`: the stages whose backward the schedule may split in two halves.
    """
    return _Least(layout, costs, delayed).step_us() * (1 - _ROUNDING)


class _Least:
    def __init__(self, layout: Layout, costs: StepCosts, delayed: Collection[int]) -> None:
        self.layout, self.costs = layout, costs
        self.count = count = len(layout.stages)
        self.turns = [len(slots) // layout.pipelines for slots in layout.stages]
        """Slots of each stage in a pipeline, which take its microbatches in turns."""
        self.pieces = layout.pieces_total // layout.pipelines
        """Microbatches of a pipeline."""
        inner, inner_grads = (
            [edge for edge in edges if edge[0] >= 0 and edge[1] < count] for edges in (layout.edges, layout.grad_edges)
        )
        self.values = self._moves(inner, costs.values_us, costs.far_values_us)
        self.grads = self._moves(inner_grads, costs.grads_us, costs.far_grads_us)
        ahead, back = [costs.host_us] * count, [costs.host_us] * count
        for moves, each in ((self.values, ahead), (self.grads, back)):
            for edge, (_, always) in moves.items():
                for stage in edge:
                    each[stage] += costs.host_us * always
        self.forward = [us + more for us, more in zip(costs.forward_us, ahead, strict=True)]
        self.weight = [costs.weight_us[stage] if stage in delayed else 0.0 for stage in range(count)]
        """The second half of a backward, if there may be one."""
        self.backward = [
            us - (costs.weight_us[stage] if stage in delayed else 0.0) + back[stage]
            for stage, us in enumerate(costs.backward_us)
        ]
        """The first half, or all of it."""

    def _moves(
        self, edges: Sequence[Edge], near: Mapping[Edge, float], far: Mapping[Edge, float] | None
    ) -> dict[Edge, tuple[float, bool]]:
        """Return for each edge the least time of a message, and whether every microbatch is a message there."""
        found, nodes, stages = {}, self.costs.nodes, self.layout.stages
        for edge in edges:
            one, other = (set(stages[stage]) for stage in edge)
            us = near[edge]
            if far is not None and nodes:
                apart = {nodes[slot] for slot in one}.isdisjoint({nodes[slot] for slot in other})
                us = far[edge] if apart else min(us, far[edge])
            always = one.isdisjoint(other)
            found[edge] = us if always else 0.0, always
        return found

    def step_us(self) -> float:
        """Return the bound."""
        heads = self._heads()
        whole = [sum(each) for each in zip(self.forward, self.backward, self.weight, strict=True)]
        stops, halves = [0.0] * self.count, [0.0] * self.count
        """When the last computation of a stage ends, and its last backward or first half of one."""
        for stage in reversed(range(self.count)):
            for turn, head in enumerate(heads[stage]):
                pieces = self._pieces(stage, turn)
                stops[stage] = max(stops[stage], head + pieces * whole[stage])
                halves[stage] = max(halves[stage], head + pieces * (whole[stage] - self.weight[stage]))
            for (src, dst), (us, _) in self.grads.items():
                if src == stage:
                    halves[stage] = max(halves[stage], halves[dst] + us + self.backward[stage])
            stops[stage] = max(stops[stage], halves[stage])
        end = max(stops)
        if self.layout.virtual_stages > 1:
            for own in {self.layout.stages_of(slots[0]) for slots in self.layout.stages}:
                busy = sum(self.pieces * whole[stage] for stage in own)
                end = max(end, min(heads[stage][0] for stage in own) + busy)
        return self.costs.agreeing_us + self._with_reductions(stops, end)

    def _pieces(self, stage: int, turn: int) -> int:
        """Return the number of microbatches of a slot."""
        return -(-(self.pieces - turn) // self.turns[stage])

    def _heads(self) -> list[list[float]]:
        """Return when the slots of each stage of a pipeline begin at the earliest."""
        heads = [[0.0] * turns for turns in self.turns]
        for (src, dst), (us, _) in sorted(self.values.items(), key=lambda each: each[0][1]):
            for turn in range(self.turns[dst]):
                before, place = divmod(turn, self.turns[src])
                ready = heads[src][place] + (before + 1) * self.forward[src] + us
                heads[dst][turn] = max(heads[dst][turn], ready)
        return heads

    def _with_reductions(self, stops: Sequence[float], end: float) -> float:
        """Return the end of the step, if the stages end at `stops`, and all computations at `end`."""
        costs, free = self.costs, [0.0] * self.count
        tied = dict(zip(self.layout.tied, costs.tied_us, strict=True))
        for stages in self.layout.reductions:
            buckets = tied[stages] if len(stages) > 1 else costs.reduce_us[stages[0]]
            whole = sum(buckets)
            if not whole:
                continue
            ends = [max(free[stage] for stage in stages) + whole]
            for stage in stages:
                # Buckets become complete in the course of the last backward. How long that takes is known without the
                # host, which handles some messages that are not counted here. (Bytes of messages are counted nowhere
                # here: those that make a backward longer make it end as much later.)
                us = self.backward[stage] + self.weight[stage]
                counted = buckets if not costs.host_us else buckets[-1:]
                left = sum(counted)
                for bucket in counted:
                    ends.append(stops[stage] - us * (left - bucket) / whole + left)
                    left -= bucket
            for stage in stages:
                free[stage] = max(ends)
        after = (max(*each) for each in zip(stops, free, strict=True))
        return max(end, *free, *(us + begin for us, begin in zip(costs.after_us, after, strict=bool(costs.after_us))))
