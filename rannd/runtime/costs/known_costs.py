"""Costs of blocks from measurements of their parts. No torch in this file: some processes plan without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rannd.graph.fx.ir import TaskGraph
from rannd.graph.partition.block_hash import block_hashes, crossing
from rannd.plan.blocks.blocks import Block
from rannd.plan.blocks.grains import multiplies
from rannd.plan.deployment import Deployment
from rannd.plan.simulate.layout import piece_rows
from rannd.profile.costs import BlockCost
from rannd.profile.kept_values import Memory
from rannd.profile.points import Measured, total
from rannd.runtime.costs.correction import Correction, Kinds

_DIGITS = 16
"""Of a part's hash that tell it from others."""
Ops = tuple[int, ...]
"""Indices of operators of the task graph that are measured together."""


class StageCost(NamedTuple):
    """Microseconds of a stage for one microbatch, as its parts were measured, by kind of work."""

    forward_us: Kinds
    backward_us: Kinds
    add_us: float
    """To accumulate its gradients of parameters."""


@dataclass(frozen=True)
class MeasuredParts:
    """What of a graph is measured: parts, whose costs add up to those of blocks."""

    task: TaskGraph
    measured: Sequence[Ops]
    """Sets of operators that are measured: grains or atoms."""
    toolchain: str = ""
    """What compiles them; empty: nothing does."""

    def hashes(self, parts: Sequence[Ops]) -> list[str]:
        """Hash of each part, by which its measurements are known; others for compiled code."""
        found = block_hashes(self.task, parts)
        return [f"{each} {self.toolchain}" for each in found] if self.toolchain else found

    def of(self, sets: Sequence[Ops]) -> list[list[Ops]]:
        """Parts of each set of operators: its atoms, or its grains and its parts of split grains."""
        owner = {op: number for number, ops in enumerate(sets) for op in ops}
        found: list[list[Ops]] = [[] for _ in sets]
        for part in self.measured:
            for number in sorted({owner[op] for op in part if op in owner}):
                found[number].append(tuple(op for op in part if owner.get(op) == number))
        return found

    def wanted(self, sets: Sequence[Ops]) -> dict[str, list[Ops]]:
        """All parts of sets of operators, by hash: those with the same one are alike."""
        parts = [ops for each in self.of(sets) for ops in each]
        found: dict[str, list[Ops]] = {}
        for each, ops in zip(self.hashes(parts), parts, strict=True):
            found.setdefault(each, []).append(ops)
        return found

    def costs(
        self, blocks: Sequence[Block], profile: Mapping[str, Measured], most: int, correction: Correction
    ) -> tuple[BlockCost, ...]:
        """Costs of blocks for microbatches of up to `most` rows. KeyError for a part that was not measured."""
        parts = self.of([block.ops for block in blocks])
        flat = [ops for each in parts for ops in each]
        known = iter(zip(self.hashes(flat), crossing(self.task, flat), flat, strict=True))
        memory = Memory(self.task)
        found = []
        for each in parts:
            costs = [
                profile[key].cost(most, border).scaled(*correction.factors(self._kind(key, ops)))
                for key, border, ops in (next(known) for _ in each)
            ]
            found.append(total(costs, memory))
        return tuple(found)

    def work(self, stages: Sequence[Ops], profile: Mapping[str, Measured], rows: int, most: int) -> list[StageCost]:
        """What stages compute for a microbatch: the sums over their parts.

        Args:
            stages: Operators of each stage.
            profile: What was measured; KeyError for a part that was not.
            rows: Rows of the microbatch.
            most: As for `costs`, which says between which measurements times are interpolated.
        """
        found = []
        for parts in self.of(stages):
            forward, backward, add_us = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
            for key, ops in zip(self.hashes(parts), parts, strict=True):
                cost, kind = profile[key].cost(most), self._kind(key, ops)
                forward[kind] += cost.forward_us.at(rows)
                backward[kind] += cost.backward_us.at(rows)
                add_us += cost.add_us
            found.append(StageCost(dict(forward), dict(backward), add_us))
        return found

    def _kind(self, key: str, part: Ops) -> str:
        """What kind of work a part is, by its hash, and of what class: those have errors in common."""
        products = any(multiplies(self.task, self.task.ops[op]) for op in part)
        return f"{'products' if products else 'others'}/{key[:_DIGITS]}"


def with_costs(
    task: TaskGraph,
    deployment: Deployment,
    parts: MeasuredParts,
    profile: Mapping[str, Measured],
    correction: Correction,
) -> Deployment:
    """Return a deployment with the times of its stages by these costs. KeyError for a part that was not measured.

    A stage that recomputes repeats its whole forward.
    """
    numbers = {op.name: number for number, op in enumerate(task.ops)}
    rows, most = (piece_rows(deployment.batch_rows, len(deployment.slots), m) for m in (deployment.microbatches, 1))
    ops = [tuple(numbers[name] for name in stage.ops) for stage in deployment.stages]
    stages = []
    for stage, work in zip(deployment.stages, parts.work(ops, profile, rows, most), strict=True):
        forward, backward = correction.forward_us(work.forward_us), correction.backward_us(work.backward_us)
        estimate, pieces = stage.estimate, stage.estimate.pieces
        again, repeated = (forward, estimate.forward_us) if stage.recompute else (0.0, 0.0)
        own_us = estimate.backward_us - repeated - (pieces - 1) * work.add_us
        changed = msgspec.structs.replace(
            estimate,
            forward_us=pieces * forward,
            backward_us=pieces * (backward + again) + (pieces - 1) * work.add_us,
            weight_us=min(estimate.weight_us / max(own_us, 1e-3), 1.0) * pieces * backward,
        )
        stages.append(msgspec.structs.replace(stage, estimate=changed))
    return msgspec.structs.replace(deployment, stages=tuple(stages))
