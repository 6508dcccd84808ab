"""Gives a plan several stages per slot: where that is asked for, or where it is faster than the best with one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from rannd.errors import DoesNotFitError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.deployment import Alternative, Deployment, Slot
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.plan.run_modes import PARAMS_ZERO, Offload, RunMode
from rannd.plan.search.ranking import MOST_TOLD, Ranking
from rannd.plan.slot_memory import fullest_bytes
from rannd.plan.stage_costs.shared_tables import SharedTables
from rannd.plan.virtual.virtual_asked import VirtualAsked, shapes_of
from rannd.plan.virtual.virtual_plans import VirtualPlans
from rannd.plan.virtual.virtual_reasons import forced_reasons, why_one, won_reasons
from rannd.plan.virtual.virtual_search import Against, VirtualPlan, forced_plan, search
from rannd.profile.costs import CostTable

ZEROS = (0, 1, 2, 3)


class VirtualJob(msgspec.Struct, frozen=True):
    """What plans are made for."""

    graph: TaskGraph
    blocks: Sequence[Block]
    costs: CostTable
    slots: tuple[Slot, ...]
    batch_rows: int
    memory_bytes: int
    options: PlanOptions
    shared: SharedTables
    counts: Sequence[int]
    """Numbers of microbatches to try."""
    replicas: Sequence[int]
    """Numbers of replicas that a stage may have."""

    def plans(self, offload: Offload) -> VirtualPlans:
        """Return the maker of plans that offload this."""
        return VirtualPlans(
            self.graph,
            self.blocks,
            self.costs,
            self.slots,
            batch_rows=self.batch_rows,
            memory_bytes=self.memory_bytes,
            options=offload.applied(self.options),
            shared=self.shared,
        )


def forced(job: VirtualJob, asked: VirtualAsked, offloads: Sequence[Offload]) -> Deployment:
    """Return the preferred plan with several stages per slot; `offloads`: what may be offloaded, in this order.

    Raises:
        PlanError: Something excludes such plans.
        DoesNotFitError: None that was tried fits.
    """
    options = job.options
    zeros = ZEROS if options.zero_stage == AUTO else (int(options.zero_stage),)
    failed: list[DoesNotFitError] = []
    for offload in offloads:
        plans, used = job.plans(offload), (PARAMS_ZERO,) if offload.params else zeros
        tried = shapes_of(plans, asked, counts=job.counts, zeros=used, allowed=job.replicas)
        if failed and not tried:
            continue  # the schedule does not divide parameters
        try:
            found = forced_plan(plans, asked, tried, options)
        except DoesNotFitError as exc:
            failed.append(exc)
            continue
        assert found.best is not None
        deployment = _finished(plans, found.best)
        return replace(deployment, reasons=forced_reasons(found, found.best, options))
    raise min(failed, key=lambda exc: exc.needed)


def challenged(job: VirtualJob, asked: VirtualAsked, ranking: Ranking, zeros: Sequence[int]) -> Deployment:
    """Return the best plan with one stage per slot, or one with several that is faster by enough."""
    best = ranking.deployment
    plans = job.plans(Offload(*best.offloads))
    tried = shapes_of(plans, asked, counts=job.counts, zeros=zeros, allowed=job.replicas)
    if not tried:
        return replace(best, reasons=(*best.reasons, why_one(asked, None, None, devices=plans.world)))
    step_us = best.step_us
    if plans.host_us != job.costs.runtime.host_us:
        step_us = plans.simulated(best, host_us=plans.host_us).step_us
    against = Against(RunMode(best.schedule, best.zero), step_us, ranking.chosen.name)
    found = search(plans, tried, against)
    if found.best is None:
        return replace(best, reasons=(*best.reasons, why_one(asked, found, against, devices=plans.world)))
    others = (Alternative(ranking.chosen.name, best.step_us, fullest_bytes(best), 0), *best.alternatives)
    return replace(
        _finished(plans, found.best),
        alternatives=others[:MOST_TOLD],
        searched_all=best.searched_all,
        reasons=won_reasons(found, found.best, against, best.reasons),
    )


def _finished(plans: VirtualPlans, plan: VirtualPlan) -> Deployment:
    """The deployment with the simulated time that all deployments have: of the host only what was measured."""
    return replace(plan.deployment, step_us=plans.simulated(plan.deployment).step_us)
