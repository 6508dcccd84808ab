"""How long reductions of gradients took in steps, from what of them computations did not hide.

A reduction begins when its gradients are there, beside computations, and ends after them. How long it would take alone
is not measured, but what ranks wait for at the end is. Simulated steps in which reductions take the links' time times
some factor wait the longer, the larger it is, which gives the factor with which they wait as long as was measured. The
ranks of a reduction end together: what is waited for is that of the last one to come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import MeasuredStep
from rannd.plan.plan_options import PlanOptions
from rannd.plan.simulate.layout import layout_of, loss_layout, reduced_bytes, step_costs
from rannd.plan.simulate.simulator import predict
from rannd.plan.simulate.step_costs import bucket_sizes
from rannd.profile.costs import LinkCost, RuntimeCost
from rannd.runtime.costs.learned_runtime import LEAST_FACTOR, MOST_FACTOR, ReductionsTook

HIDDEN = 0.1
"""Part of reductions that has to be waited for, measured or simulated; of less, nothing is said of them."""
FACTORS = (LEAST_FACTOR, 0.5, 0.8, 1.0, 1.25, 2.0, MOST_FACTOR)
"""Factors of simulated steps."""


class _Sent(NamedTuple):
    """What a slot's reductions send, see `ReductionsTook`."""

    between: bool
    rounds: float
    nbytes: float


def reductions_took(
    graph: TaskGraph,
    deployment: Deployment,
    measured: MeasuredStep,
    links: tuple[LinkCost, LinkCost | None],
    options: PlanOptions,
) -> list[ReductionsTook]:
    """Return what the reductions of each group of replicas took.

    Nothing is said where ZeRO divides them among replicas, and of ranks with some reductions on a node and some
    between nodes.

    Args:
        graph: The task graph.
        deployment: A deployment of it.
        measured: Its steps.
        links: Within a node and between nodes, measured alone.
        options: Those of the plan.

    Raises:
        DeploymentError: The ops of the deployment are not those of the graph.
    """
    if deployment.zero or any(deployment.offloads):
        return []
    overlap = not options.sync_allreduce
    runtime = RuntimeCost(0.0, deployment.call_us, deployment.host_us)
    layout = layout_of(graph, deployment)

    def waits(factor: float) -> Sequence[float]:
        """Simulated waits of the slots."""
        near, far = (None if link is None else _scaled(link, factor) for link in links)
        assert near is not None
        costs = step_costs(graph, deployment, near, far, overlap=overlap, options=options, runtime=runtime)
        return predict(deployment.schedule, loss_layout(layout), costs, memory=False).drain_us

    nbytes = reduced_bytes(graph, deployment, options)
    of_slot: dict[int, dict[tuple[int, ...], _Sent]] = defaultdict(dict)
    for stages in layout.reductions:
        replicas = {slot for stage in stages for slot in layout.stages[stage]}
        whole, count = nbytes.get(stages, 0), len(replicas)
        if whole and count > 1:
            between = len({deployment.slots[slot].node for slot in replicas}) > 1
            sizes = bucket_sizes(whole) if overlap else [whole]
            sent = _Sent(between, len(sizes) * (count - 1.0), 2 * (count - 1) / count * whole)
            for slot in replicas:
                of_slot[slot][stages] = sent
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for slot, reduced in of_slot.items():
        alike[tuple(reduced)].append(slot)
    simulated = [waits(factor) for factor in FACTORS] if alike else []
    found = []
    for slots in alike.values():
        every = of_slot[slots[0]].values()
        kinds = {each.between for each in every}
        if len(kinds) > 1:
            continue
        (between,) = kinds
        link = (links[1] or links[0]) if between else links[0]
        rounds, moved = sum(each.rounds for each in every), sum(each.nbytes for each in every)
        alone = rounds * link.allreduce_latency_us + moved / link.allreduce_bytes_per_us
        waited = min(measured.ranks[slot].reduced_us for slot in slots)
        if not waited:
            continue
        wait = [min(each[slot] for slot in slots) for each in simulated]
        if max(waited, wait[FACTORS.index(1.0)]) >= HIDDEN * alone:
            found.append(ReductionsTook(between, rounds, moved, alone * float(np.interp(waited, wait, FACTORS))))
    return found


def _scaled(link: LinkCost, factor: float) -> LinkCost:
    return msgspec.structs.replace(
        link,
        allreduce_latency_us=factor * link.allreduce_latency_us,
        allreduce_bytes_per_us=link.allreduce_bytes_per_us / factor,
        allreduce_host_us=factor * link.allreduce_host_us,
    )
