"""Derives layout and costs of a deployment for schedules and the simulator: who sends what to whom, and the times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rannd.errors import DeploymentError
from rannd.graph.fx.ir import Size, TaskGraph
from rannd.plan.deployment import Deployment
from rannd.plan.plan_options import PlanOptions
from rannd.plan.precision import state_weights
from rannd.plan.schedule.in_flight import flights
from rannd.plan.schedule.program import Edge, Layout
from rannd.plan.schedule.schedules import window
from rannd.plan.simulate.step_costs import StepCosts, bucket_sizes
from rannd.plan.topology import agreeing_us
from rannd.plan.zero import computing, gathers_of, reduced_part
from rannd.profile.costs import LinkCost, RuntimeCost


def piece_rows(batch_rows: int, world: int, microbatches: int) -> int:
    """Return the rows of the largest microbatch of a global batch of `batch_rows` rows."""
    return math.ceil(math.ceil(batch_rows / world) / microbatches)


def layout_of(graph: TaskGraph, deployment: Deployment) -> Layout:
    """Return the layout in which `deployment` runs `graph`.

    An input that the model returns unchanged stays with its rank and is no edge.

    Raises:
        DeploymentError: The ops of the deployment are not those of the graph.
    """
    return _layout(deployment, _Placed(graph, deployment))


def _layout(deployment: Deployment, placed: _Placed) -> Layout:
    return Layout(
        world=len(deployment.slots),
        microbatches=deployment.microbatches,
        stages=tuple(stage.slots for stage in deployment.stages),
        edges=tuple(sorted(placed.sizes)),
        grad_edges=tuple(sorted(placed.grads)),
        tied=tuple(sorted(stages for stages in placed.trained() if len(stages) > 1)),
    )


def reduced_bytes(graph: TaskGraph, deployment: Deployment, options: PlanOptions) -> dict[tuple[int, ...], int]:
    """Return the bytes of gradients that are reduced together, by the stages that read the parameters.

    Raises:
        DeploymentError: The ops of the deployment are not those of the graph.
    """
    return _Placed(graph, deployment).trained(options)


def loss_layout(layout: Layout) -> Layout:
    """Return the layout of a step whose backward begins at its loss: no gradients of outputs come from the ranks."""
    last = len(layout.stages)
    grads = tuple(edge for edge in layout.grad_edges if edge[1] < last)
    return Layout(layout.world, layout.microbatches, layout.stages, layout.edges, grads, layout.tied)


def step_costs(
    graph: TaskGraph,
    deployment: Deployment,
    link: LinkCost,
    between: LinkCost | None = None,
    *,
    overlap: bool = True,
    options: PlanOptions | None = None,
    runtime: RuntimeCost = RuntimeCost(),  # noqa: B008  (frozen)
) -> StepCosts:
    """Return the costs of the actions of a Program of `deployment`, see `layout_and_costs`."""
    return layout_and_costs(graph, deployment, link, between, overlap=overlap, options=options, runtime=runtime)[1]


def layout_and_costs(
    graph: TaskGraph,
    deployment: Deployment,
    link: LinkCost,
    between: LinkCost | None = None,
    *,
    overlap: bool = True,
    options: PlanOptions | None = None,
    runtime: RuntimeCost = RuntimeCost(),  # noqa: B008  (frozen)
) -> tuple[Layout, StepCosts]:
    """Return the layout of `deployment`, and the costs of the actions of its Program, from its estimates and the links.

    If the backward is split, what a microbatch receives and sends counts until the second half is done.

    Args:
        graph: The task graph.
        deployment: A deployment of it.
        link: Link between slots of the same node.
        between: Link between slots of different nodes; None: the same as `link`.
        overlap: Whether gradients are reduced in buckets during the last backward.
        options: Say in which type gradients are reduced; None: in that of the parameters.
        runtime: What the runtime takes itself; estimates have its part of each action.

    Raises:
        DeploymentError: The ops of the deployment are not those of the graph.
    """
    placed = _Placed(graph, deployment)
    layout = _layout(deployment, placed)
    rows = piece_rows(deployment.batch_rows, layout.world, layout.microbatches)
    sizes, grads = placed.sizes, placed.grads
    trained, reduced = placed.trained(), placed.trained(options or PlanOptions())
    pieces = [math.ceil(layout.pieces_total / len(slots)) for slots in layout.stages]
    estimates = [stage.estimate for stage in deployment.stages]
    kept, later, working = [], [], []
    virtual = layout.virtual_stages > 1
    split = frozenset(number for number, each in enumerate(estimates) if each.weight_us > 0)
    flown = flights(deployment.schedule, layout, split).most if virtual else ()
    for number, (each, count) in enumerate(zip(estimates, pieces, strict=True)):
        # An estimate without a number of microbatches in flight was made for GPipe, which keeps all of them.
        flying = each.in_flight if each.pieces == count else count
        first = flown[number][0] if virtual else window(layout, number)
        first = min(first, flying) if each.weight_bytes else flying
        activation = math.ceil((each.activation_bytes - each.weight_bytes * (flying - first)) / first)
        kept.append(each.output_bytes + activation)
        later.append(each.output_bytes + (each.weight_bytes or activation))
        working.append(each.working_bytes)
    far = between or link

    def over(stages: Sequence[int]) -> tuple[LinkCost, int]:
        slots = {slot for stage in stages for slot in layout.stages[stage]}
        return link if len({deployment.slots[slot].node for slot in slots}) == 1 else far, len(slots)

    copying = [0.0] * len(layout.stages)
    """What reductions take of the processors of each stage."""

    def reduce(stages: Sequence[int]) -> tuple[float, ...]:
        nbytes, (chosen, ranks) = reduced.get(tuple(stages), 0), over(stages)
        part = reduced_part(deployment.zero) if len(stages) == 1 else 1.0
        each = [chosen.reduction_us(size, ranks) for size in (bucket_sizes(nbytes) if overlap else [nbytes])]
        for stage in stages:
            copying[stage] += part * sum(host for _, host in each)
        found = [part * us for us, _ in each]
        return tuple(found) if any(found) else ()

    gathers = []
    for number in range(len(layout.stages)):
        chosen, ranks = over([number])
        gathers.append(0.5 * chosen.allreduce_us(trained.get((number,), 0), ranks))
    reduce_us = tuple(reduce([stage]) for stage in range(len(layout.stages)))
    tied_us = tuple(reduce(stages) for stages in layout.tied)
    forwards, backwards = [], []
    for stage, count, gather in zip(deployment.stages, pieces, gathers, strict=True):
        each = stage.estimate
        times = np.array(each.forward_us / count), np.array(each.backward_us / count)
        often = gathers_of(stage.stays_whole, count)
        forward, backward = computing(deployment.zero, *times, np.array(gather), each.fetch_us, gathers=often)
        forwards.append(float(forward))
        backwards.append(float(backward))
    return layout, StepCosts(
        forward_us=tuple(forwards),
        backward_us=tuple(backwards),
        weight_us=tuple(each.weight_us / count for each, count in zip(estimates, pieces, strict=True)),
        agreeing_us=runtime.call_us
        + agreeing_us(far if len({slot.node for slot in deployment.slots}) > 1 else link, layout.world),
        host_us=runtime.host_us,
        byte_us=link.p2p_host_us,
        after_us=_after(deployment, gathers, copying),
        values_us=_times(sizes, rows, link),
        grads_us=_times(grads, rows, link),
        reduce_us=reduce_us,
        tied_us=tied_us,
        nodes=tuple(slot.node for slot in deployment.slots),
        far_values_us=_times(sizes, rows, far),
        far_grads_us=_times(grads, rows, far),
        state_bytes=tuple(each.param_bytes + each.grad_bytes + each.optimizer_bytes for each in estimates),
        kept_bytes=tuple(kept),
        weight_bytes=tuple(later),
        working_bytes=tuple(working),
        values_bytes={edge: math.ceil(size.at(rows)) for edge, size in sizes.items()},
        grads_bytes={edge: math.ceil(size.at(rows)) for edge, size in grads.items()},
    )


def _after(deployment: Deployment, gathers: Sequence[float], copying: Sequence[float]) -> tuple[float, ...]:
    """Time of what follows the reductions, by stage, see `StepCosts.after_us`."""
    later = gathers if deployment.zero in (1, 2) else [0.0] * len(copying)
    copies = [stage.estimate.offload_us for stage in deployment.stages]
    found = tuple(sum(each) for each in zip(copies, later, copying, strict=True))
    return found if any(found) else ()


def _times(sizes: Mapping[Edge, Size], rows: int, link: LinkCost) -> dict[Edge, float]:
    return {edge: link.p2p_us(size.at(rows)) for edge, size in sizes.items()}


def _stages_of(graph: TaskGraph, deployment: Deployment) -> list[int]:
    """Return the stage of each op."""
    stage_of_name = {name: number for number, stage in enumerate(deployment.stages) for name in stage.ops}
    if sum(len(stage.ops) for stage in deployment.stages) != len(stage_of_name) or set(stage_of_name) != {
        op.name for op in graph.ops
    }:
        raise DeploymentError(
            f"the deployment places {len(stage_of_name)} ops, which are not the {len(graph.ops)} ops of the model; "
            "it belongs to another model: run without it to plan again"
        )
    return [stage_of_name[op.name] for op in graph.ops]


class _Placed:
    """What the stages of a deployment send each other, and which parameters they read."""

    def __init__(self, graph: TaskGraph, deployment: Deployment) -> None:
        """DeploymentError: the ops of the deployment are not those of the graph."""
        self._graph = graph
        stage_of = _stages_of(graph, deployment)
        last = len(deployment.stages)
        readers: dict[int, set[int]] = defaultdict(set)
        targets: dict[int, set[int]] = defaultdict(set)
        for op, stage in zip(graph.ops, stage_of, strict=True):
            for read in op.params:
                readers[read].add(stage)
            for read in op.inputs:
                targets[read].add(stage)
        self._readers = {index: tuple(sorted(stages)) for index, stages in readers.items()}
        sizes: dict[Edge, Size] = defaultdict(Size)
        grads: dict[Edge, Size] = defaultdict(Size)
        for index, value in enumerate(graph.values):
            home = stage_of[value.producer] if value.producer >= 0 else -1
            if value.is_output and value.is_sent and home >= 0:
                targets[index].add(last)
            for target in targets[index] - {home}:
                sizes[home, target] += value.bytes
                if value.requires_grad:
                    grads[home, target] += value.bytes
        self.sizes, self.grads = dict(sizes), dict(grads)
        """Bytes of the activations, and of the gradients, that go over each edge."""

    def trained(self, options: PlanOptions | None = None) -> dict[tuple[int, ...], int]:
        """Return bytes of trainable parameters, by the stages that read them; with `options` of what is reduced."""
        found: dict[tuple[int, ...], int] = defaultdict(int)
        factors: dict[int, float] = {}
        for index, stages in self._readers.items():
            param = self._graph.params[index]
            if param.trainable:
                size = param.itemsize
                if size not in factors:
                    factors[size] = 1.0 if options is None else state_weights(size, options).reduced
                found[stages] += int(param.bytes * factors[size])
        return dict(found)
