"""The planner: from a graph, its blocks and their costs to a deployment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from rannd.errors import DoesNotFitError, PlanError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.blocks.cut_places import cut_places, has_cut_points
from rannd.plan.deployment import FORMAT, Deployment, Slot
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.plan.run_modes import (
    OFFLOADS,
    PARAMS_ZERO,
    RUN_MODES,
    Offload,
    RunMode,
    check_known,
    preference_us,
    runnable_zero,
)
from rannd.plan.schedule.schedules import ASKED_SCHEDULE, DEFAULT_SCHEDULE, DELAYING
from rannd.plan.search.candidates import EFFORT, Candidate, alike, candidate, candidates
from rannd.plan.search.ranking import rank
from rannd.plan.search.reasons import Searched, reasons
from rannd.plan.search.shortage import does_not_fit, modules_of, opaque_code, remedies
from rannd.plan.search.stages import Found, Need, best_choice, smallest_memory
from rannd.plan.search.virtual_planner import VirtualJob, challenged, forced
from rannd.plan.simulate.layout import piece_rows
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.intervals import Intervals
from rannd.plan.stage_costs.least_terms import families
from rannd.plan.stage_costs.shared_tables import SharedTables
from rannd.plan.stage_costs.stage_parts import StagePart, stage_name, stages_of
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import Counts, Machine, place
from rannd.plan.virtual.virtual_asked import VirtualAsked, asked_for
from rannd.plan.zero import replica_counts
from rannd.profile.costs import CostTable
from rannd.units import count_text

__all__ = [
    "PlanOptions",
    "microbatch_counts",
    "plan",
    "stage_name",
]

_MOST_PASSED = 8
"""Maximum number of plans from the search that are simulated."""
_MOST_NEAR = 8
"""Maximum number of variants that are searched for plans to simulate although their E is not better."""


def plan(
    graph: TaskGraph,
    blocks: Sequence[Block],
    costs: CostTable,
    *,
    world: int,
    slots: tuple[Slot, ...],
    batch_rows: int,
    memory_bytes: int,
    options: PlanOptions,
    interleaved: bool = True,
    ranked: bool = False,
    way: RunMode | None = None,
    coupled: str = "",
) -> Deployment:
    """Return the deployment of `graph` on `world` devices with the smallest E (docs/planning.md).

    Args:
        graph: The task graph.
        blocks: Its blocks.
        costs: Costs of the blocks and links.
        world: Number of devices.
        slots: Place of each device, sorted.
        batch_rows: Rows of the global batch.
        memory_bytes: Memory that may be used per device, after the margin.
        options: Constraints of the configuration.
        interleaved: Whether backward may begin inside a call, because the model returns its loss. Otherwise all
            forwards run before all backwards.
        ranked: Simulate this plan and others, and return the fastest, which takes longer than the search itself. Only
            then a free schedule is chosen; otherwise it is the default one.
        way: The run mode; None: from the options.
        coupled: Why the graph couples rows, for an error.

    Raises:
        PlanError: Constraints contradict each other.
        DoesNotFitError: No plan fits; the message has the smallest memory that would suffice.
    """
    asked = asked_for(options, interleaved=interleaved) if way is None else VirtualAsked((), (), False, "asked for")
    free = way is None and interleaved and (options.schedule == AUTO or asked.forced)
    chosen = way or RunMode((DEFAULT_SCHEDULE if free else options.schedule) if interleaved else ASKED_SCHEDULE)
    check_known(chosen)
    runnable = runnable_zero(chosen.schedule)
    zeros = (
        [chosen.zero] if way is not None else runnable[:1] if options.zero_stage == AUTO else [int(options.zero_stage)]
    )
    for zero in zeros:
        check_known(RunMode(chosen.schedule, zero))
    if world < 1 or len(slots) != world or list(slots) != sorted(set(slots)):
        raise PlanError(f"{len(slots)} slots {slots} for a world of {world}; give each device's slot once, sorted")
    if batch_rows < 1:
        raise PlanError(f"a global batch of {batch_rows} rows; plan with at least one")
    machine = Machine(slots, costs.link, costs.between, costs.runtime)
    rows_per_rank = math.ceil(batch_rows / world)
    counts = microbatch_counts(
        options, rows_per_rank=rows_per_rank, coupled=graph.rows_coupled, reason=coupled, why=opaque_code(graph)
    )
    counts = sorted({min(count, batch_rows) for count in counts})  # more would be without rows
    counts = _measurable(graph, blocks, costs, counts, batch_rows, world)
    rows = [piece_rows(batch_rows, world, count) for count in counts]
    shared = SharedTables(Intervals(graph, blocks, costs.blocks, options), machine, rows)
    replicas = _replicas(options, world)
    job = VirtualJob(graph, blocks, costs, slots, batch_rows, memory_bytes, options, shared, counts, replicas.tolist())
    offloads = _offloads(options, chosen, way)
    if asked.forced:
        return forced(job, asked, offloads)
    places = np.array(cut_places(graph, [block.ops for block in blocks]))
    stages = _demanded(
        options, world=world, blocks=int(places.sum()) - 1, marked=has_cut_points(graph), why=opaque_code(graph)
    )
    allowed = places[:, None] & places[None, :]

    def tables(
        replicas: Counts,
        limit: float,
        recompute: bool,
        *,
        zeros: Sequence[int],
        offload: Offload,
        schedules: Sequence[str] = (chosen.schedule,),
    ) -> list[StageTables]:
        asked = offload.applied(options)
        if recompute:  # the least memory that plans may have, to tell what those that do not fit lack
            asked = replace(asked, checkpointing=True, checkpointing_no_last=False, reshard_after_forward=True)
        return [
            StageTables(
                shared,
                asked,
                Variant(schedule, count, placement, zero),
                rows=piece_rows(batch_rows, world, count),
                limit=limit,
                allowed=allowed,
                replicas=numbers,
            )
            for schedule in schedules
            for zero in zeros
            for numbers in replica_counts(zero, replicas, world)
            for placement in (machine.placements if len(numbers) and numbers[0] < world else machine.placements[:1])
            for count in counts
            # Without replicas nothing is divided, but for what is offloaded: once is enough.
            if RunMode(schedule, zero) in RUN_MODES and len(numbers)
            if zero == zeros[0] or numbers[-1] > 1 or offload.params
        ]

    limit = float(memory_bytes)
    unfit: list[list[StageTables]] = []
    """Tables of which no plan fits, with each of what may be offloaded."""

    def needs() -> list[Need | None]:
        """What they need at least, which takes longer to find than a plan."""
        return [smallest_memory(each, stages=stages) for each in unfit]

    for offload in offloads:
        used = [PARAMS_ZERO] if offload.params else zeros
        every = tables(replicas, limit, False, zeros=used, offload=offload)
        free_zero = way is None and options.zero_stage == AUTO and not offload.params
        known = families(every)
        if free_zero and world > 1 and any(least.tight for least, _ in known):
            used = runnable  # memory asks for it
            more = tables(replicas, limit, False, zeros=runnable[1:], offload=offload)
            every, known = every + more, known + families(more)
        found = best_choice(every, stages=stages, known=known)
        if ranked:  # the best ones with and without ZeRO are simulated, and others that E may be wrong about
            groups = [[each for each in every if bool(each.variant.zero) == divided] for divided in (False, True)]
            near = [best_choice(group, stages=stages, near=_MOST_NEAR, effort=EFFORT) for group in groups]
            found = found.with_plans_of(near)
        if found.choice is None:
            unfit.append(every)
            continue
        make = partial(_deployment, graph, blocks, found=found, slots=slots, batch_rows=batch_rows)
        if not ranked:
            return make(candidate(found.choice, every))
        best = [candidate(choice, every) for choice in found.passed[:_MOST_PASSED]]
        sizes = [len(block.ops) for block in blocks]
        alone = partial(tables, zeros=used, offload=offload)
        among = candidates(alone, replicas, world, limit, sizes, stages)
        others = alone(replicas, limit, False, schedules=DELAYING) if free else []
        ranking = rank([*best, *among], make, graph, costs, options, partial(alike, others))
        search = Searched(every, others, needs(), stages=stages, counts=counts, coupled=graph.rows_coupled)
        told = reasons(ranking, search, options, way=way, interleaved=interleaved)
        deployment = replace(ranking.deployment, reasons=told)
        return challenged(job, asked, replace(ranking, deployment=deployment), used)
    need = _least(*needs())
    params = all(each.params for each in offloads)
    if need is None and (min(zeros) >= 2 or params):
        given, other = f"zero_stage={options.zero_stage}", "zero_stage=1"
        if params:
            given, other = "offload_params=true", "offload_params=false"
        raise PlanError(
            f"ZeRO stages 2 and 3 ({given}) need equally many replicas of all stages, which "
            f"{stages or 'no allowed number of'} stages (partition_num={options.partition_num}) of {world} devices "
            f"cannot have; use a number of stages that divides the devices, or {other}"
        )
    if need is None:
        raise PlanError(
            f"no {stages or 'number of'} stages of 1, 2, 4, 8 .. replicas add up to {world} devices "
            f"(partition_num={options.partition_num}, limit_dev_num_pot=true); set limit_dev_num_pot=false"
        )

    def least(zeros: Sequence[int], offloads: Sequence[Offload]) -> Need | None:
        tried = [
            each
            for offload in offloads
            for each in tables(
                replicas, limit, False, zeros=[PARAMS_ZERO] if offload.params else zeros, offload=offload
            )
        ]
        return smallest_memory(tried, stages=stages, below=need.bytes)

    rest = [zero for zero in runnable if zero not in zeros] if way is None and options.divides else []
    helps = remedies(need, ((setting, least(*what)) for setting, what in _unasked(options, offloads, zeros, rest)))
    raise does_not_fit(graph, blocks, need, memory_bytes, options, world, helps)


def _offloads(options: PlanOptions, chosen: RunMode, way: RunMode | None) -> list[Offload]:
    """What may be offloaded, in the order in which it is tried. PlanError if what has to be cannot be."""
    divided = options.zero_stage in (AUTO, str(PARAMS_ZERO)) if way is None else way.zero == PARAMS_ZERO
    divided &= RunMode(chosen.schedule, PARAMS_ZERO) in RUN_MODES
    found = [each for each in OFFLOADS if each.allowed_by(options) and (divided or not each.params)]
    if not found:
        raise PlanError(
            f"offload_params=true divides parameters as zero_stage={PARAMS_ZERO} does, which "
            f"schedule={chosen.schedule} and zero_stage={options.zero_stage} do not; leave both to the planner (auto)"
        )
    return found


def _unasked(
    options: PlanOptions, offloads: Sequence[Offload], zeros: Sequence[int], rest: Sequence[int]
) -> list[tuple[str, tuple[Sequence[int], Sequence[Offload]]]]:
    """Settings that were not tried, with their ZeRO stages and what is offloaded; combinations last.

    Args:
        options: The configuration.
        offloads: What was tried.
        zeros: ZeRO stages that were tried.
        rest: Others that can be run.
    """
    found: list[tuple[str, tuple[Sequence[int], Sequence[Offload]]]] = []
    allowed = [each for each in OFFLOADS if each.allowed_by(options) and (PARAMS_ZERO in rest or not each.params)]
    away = options.steps_apart and options.offload_optimizer == "false"
    divided = options.offload_params == "false" and options.divides

    def others(**changes: str) -> list[Offload]:
        changed = replace(options, **changes)
        return [each for each in OFFLOADS if each.allowed_by(changed) and not each.allowed_by(options)]

    if rest:
        found.append(("zero_stage={}", (rest, allowed)))
    if away:
        tried = [each for each in others(offload_optimizer="true") if each.params == (options.offload_params == "true")]
        found.append(("offload_optimizer=true", (zeros, tried)))
    if divided:
        also = "" if options.zero_stage in (AUTO, str(PARAMS_ZERO)) else f" and zero_stage={PARAMS_ZERO}"
        found.append((f"offload_params=true{also}", ([PARAMS_ZERO], others(offload_params="true"))))
        if away:
            tried = others(offload_params="true", offload_optimizer="true")
            found.append((f"offload_params=true{also} and offload_optimizer=true", ([PARAMS_ZERO], tried)))
    if options.offload_activations == "false":
        tried = [replace(each, activations=True) for each in offloads]
        found.append(("offload_activations=true", (zeros, tried)))
    if rest and away:
        tried = [each for each in others(offload_optimizer="true") if not each.params]
        found.append(("zero_stage={} and offload_optimizer=true", (rest, tried)))
    return found


def _least(*needs: Need | None) -> Need | None:
    """The smallest of them; of equal ones the first; None if there is none."""
    return min((need for need in needs if need is not None), key=lambda need: need.bytes, default=None)


def microbatch_counts(
    options: PlanOptions, *, rows_per_rank: int, coupled: bool, reason: str = "", why: str = ""
) -> list[int]:
    """Return the numbers of microbatches to try: min_pipeline, doubled up to max_pipeline, or only pipeline_num.

    No microbatch may have fewer rows than min_pipeline_bs, and a graph that couples rows takes whole mini-batches.

    Raises:
        PlanError: No number is left.
    """
    wanted = [options.pipeline_num]
    if not options.pipeline_num:
        doublings = range(int(math.log2(options.max_pipeline // options.min_pipeline)) + 1)
        wanted = [options.min_pipeline << power for power in doublings]
        wanted = [count for count in wanted if count <= max(rows_per_rank, options.min_pipeline)]
    asked = f"pipeline_num={options.pipeline_num}" if options.pipeline_num else f"min_pipeline={options.min_pipeline}"
    if coupled and wanted[0] > 1:
        because = (
            f" ({reason})" if reason else " (as BatchNorm does in training), or has a graph for one batch size only"
        )
        raise PlanError(
            f"{asked}, but the model couples the rows of a batch{because}, so each mini-batch has to run whole; set "
            f"pipeline_num=1{why}"
        )
    # Microbatches without rows do not run, so the smallest one has at least one row.
    smallest = {count: max(rows_per_rank // count, 1) for count in wanted}
    found = [count for count in wanted if (count == 1 or not coupled) and smallest[count] >= options.min_pipeline_bs]
    if not found:
        most = max(rows_per_rank // options.min_pipeline_bs, 1)
        raise PlanError(
            f"{asked} leaves microbatches of {smallest[wanted[0]]} of a rank's {rows_per_rank} rows, "
            f"fewer than min_pipeline_bs={options.min_pipeline_bs}; take at most {most} microbatches or a smaller "
            "min_pipeline_bs"
        )
    return found


def _measurable(
    graph: TaskGraph, blocks: Sequence[Block], costs: CostTable, counts: Sequence[int], batch_rows: int, world: int
) -> list[int]:
    """Filter numbers of microbatches: those with which no block alone ran out of memory when it was measured."""
    bounds = [(cost.most_rows, number) for number, cost in enumerate(costs.blocks) if cost.most_rows]
    if not bounds:
        return list(counts)
    most, block = min(bounds)
    found = [count for count in counts if piece_rows(batch_rows, world, count) <= most]
    if not found:
        rows = piece_rows(batch_rows, world, max(counts))
        raise DoesNotFitError(
            f"no plan fits: block {stage_name(block, block + 1)} ({modules_of(graph, blocks[block])}) ran out of "
            f"memory with {most + 1} rows when it was measured alone, and {max(counts)} microbatches still have {rows} "
            "rows each. Use smaller mini-batches, more microbatches (max_pipeline, pipeline_num) if the model's rows "
            "are independent, or devices with more memory"
        )
    return found


def _replicas(options: PlanOptions, world: int) -> Counts:
    """Return the numbers of replicas that a stage may have, ascending."""
    counts: Counts = np.arange(1, world + 1)
    if options.replica_num:
        counts = counts[counts == options.replica_num]
    elif options.limit_dev_num_pot:
        counts = counts[((counts & (counts - 1)) == 0) | (counts == world)]
    return counts


def _demanded(options: PlanOptions, *, world: int, blocks: int, marked: bool, why: str) -> int:
    """Return the number of stages; 0: free.

    Args:
        options: Constraints of the configuration.
        world: Number of devices.
        blocks: Number of parts that may be stages of their own.
        marked: Whether CutPoints separate these parts.
        why: Added to the error if there are too few parts.
    """
    stages, replicas = options.partition_num, options.replica_num
    if replicas:
        if stages and stages * replicas != world:
            raise PlanError(
                f"partition_num={stages} times replica_num={replicas} is {stages * replicas}, but there are {world} "
                "devices; set one of the two to 0, or start as many ranks as their product"
            )
        if world % replicas:
            divisors = [count for count in range(1, world + 1) if world % count == 0]
            raise PlanError(
                f"replica_num={replicas} does not divide {world} devices; use one of {divisors}, or 0 for free counts"
            )
        stages = world // replicas
    if stages > world:
        devices = "1 device" if world == 1 else f"{world} devices"
        raise PlanError(
            f"{stages} stages for {devices}; use partition_num={world} at most, or more ranks (rannc-run -np {stages})"
        )
    if stages > blocks and marked:
        raise PlanError(
            f"{stages} stages (partition_num={options.partition_num}, replica_num={options.replica_num}), but the "
            f"model may be cut at its CutPoints only, which divide it into {count_text(blocks, 'part')}; use at most "
            f"{count_text(blocks, 'stage')}, or add CutPoints"
        )
    if stages > blocks:
        raise PlanError(
            f"{stages} stages (partition_num={options.partition_num}, replica_num={replicas}), but the model divides "
            f"into {count_text(blocks, 'block')} only; use at most {count_text(blocks, 'stage')}{why}"
        )
    return stages


def _deployment(
    graph: TaskGraph,
    blocks: Sequence[Block],
    chosen: Candidate,
    *,
    found: Found,
    slots: tuple[Slot, ...],
    batch_rows: int,
) -> Deployment:
    choice, table = chosen.choice, chosen.table
    searched = found.choice is not None and found.choice.variant.schedule == choice.variant.schedule
    parts = [
        StagePart(
            start,
            end,
            home,
            table.segments(start, end, replicas, used=later),
            table.estimate(start, end, replicas, used=later),
            table.stays_whole(start, end, replicas, used=later),
        )
        for (start, end, replicas, later), home in zip(
            choice.spans(len(blocks)), place(choice.replicas, choice.variant.placement), strict=True
        )
    ]
    return Deployment(
        format=FORMAT,
        graph_hash=graph.graph_hash,
        slots=slots,
        stages=stages_of(graph, blocks, parts),
        microbatches=choice.variant.microbatches,
        schedule=choice.variant.schedule,
        batch_rows=batch_rows,
        step_us=choice.step_us,
        unused_params=tuple(graph.params[index].name for index in graph.unused_params),
        bound_us=found.bound_us / preference_us(choice.variant.zero, 1.0) if searched else 0.0,
        searched_all=found.searched_all,
        placement=choice.variant.placement,
        memory_bytes=int(table.limit),
        e_us=choice.step_us,
        zero=choice.variant.zero if max(choice.replicas) > 1 or table.offload.params else 0,
        offload=table.offload.optimizer,
        offload_params=table.offload.params,
        offload_activations=table.offload.activations and any(any(part.divided.again) for part in parts),
    )
