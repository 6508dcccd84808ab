"""Chooses a plan with several stages per slot: tries the few that the closed form promises to be fast.

What such a plan can save is the bubble of the best plan with one stage per slot, so that most models need nothing but
a look at the closed form: see `least_us`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from rannd.errors import DoesNotFitError, PlanError
from rannd.plan.deployment import Deployment
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import RunMode, virtual_gain
from rannd.plan.schedule.schedules import DEFAULT_SCHEDULE
from rannd.plan.stage_costs.intervals import at
from rannd.plan.virtual.slot_cuts import SlotCuts
from rannd.plan.virtual.virtual_asked import VirtualAsked
from rannd.plan.virtual.virtual_plans import VirtualPlans
from rannd.plan.virtual.virtual_shapes import Shape
from rannd.units import amounts_apart

MOST_CUT = 12
"""Maximum number of plans that are cut, those with the smallest closed form; more if one is forced and none fits."""
MOST_PLAYED = 12
"""Maximum number of simulated plans."""
MOST_WORK = 12_000
"""Maximum of microbatches times stages, of one pipeline each, that are simulated in total."""
FEWEST_LACKING = 2
"""Simulated shapes from which on it counts what the closed form lacked for all of them."""
SLACK = 0.03
"""Part of a step by which the closed form may be larger than the simulated time."""


class VirtualPlan(msgspec.Struct, frozen=True):
    """A plan with several stages per slot."""

    shape: Shape
    deployment: Deployment
    step_us: float
    """Simulated time of a step, with `VirtualPlans.host_us`."""
    gain: float
    """What it has to save to be preferred (`virtual_gain`)."""
    at_least: bool = False
    """Whether `step_us` is a lower bound, with which the plan cannot win, so that it was not simulated."""

    @property
    def preference_us(self) -> float:
        return self.step_us / (1 - self.gain)


class VirtualFound(msgspec.Struct, frozen=True):
    """Result of a search."""

    best: VirtualPlan | None
    """The preferred one of those that fit and beat what they had to."""
    played: tuple[VirtualPlan, ...]
    """All that were simulated or cannot win."""
    least_bytes: int
    """Bytes of the fullest device of the smallest plan that was made; 0: none was made."""


class Against(msgspec.Struct, frozen=True):
    """What plans with several stages per slot have to beat."""

    mode: RunMode
    step_us: float
    """With `VirtualPlans.host_us`."""
    name: str


def least_us(plans: VirtualPlans, shape: Shape) -> float:
    """Return the closed form of a step (`slot_cuts`) whose slots and stages all take equally long."""
    rows = plans.rows(shape.microbatches)
    tables = plans.intervals
    forward, backward, weight = (
        float(at(each, rows)[0, -1]) for each in (tables.forward, tables.backward, tables.weight)
    )
    whole = forward + backward
    fill = (max(whole - 2 * weight, forward) if shape.delays else whole) / shape.stages
    return with_waiting(plans, shape, shape.pieces * whole / shape.positions) + (shape.positions - 1) * fill


def with_waiting(plans: VirtualPlans, shape: Shape, e_us: float) -> float:
    """Add to a closed form what transfers, the host, and reductions that hide behind nothing take.

    A pair of slots sends a microbatch's values once for each of their stages, its gradients likewise; the first and the
    last microbatch are sent through the pipeline while slots wait. The host's time is that of a slot in the middle.
    """
    hop, slowest = plans.hops_us(shape)
    between = 4 * shape.passes - (4 if shape.positions == 2 else 0)
    actions = shape.passes * (3 if shape.delays else 2) + between
    busy = max(e_us + shape.pieces * actions * plans.host_us, shape.pieces * shape.passes * slowest)
    return busy + 2 * (shape.positions - 1) * hop + plans.exposed_us(shape)


def search(plans: VirtualPlans, tried: Iterable[Shape], against: Against | None) -> VirtualFound:
    """Return the preferred plan of these shapes that beats `against`.

    Of shapes that differ only in their ZeRO stage, the first that fits is simulated, with all orders of slots; the
    others only of the best one.
    """
    return _Search(plans, against).run(list(tried))


class _Search:
    def __init__(self, plans: VirtualPlans, against: Against | None) -> None:
        self.plans = plans
        self.than = against.mode if against is not None else RunMode(DEFAULT_SCHEDULE)
        self.forced = against is None
        self.below = against.step_us if against is not None else math.inf
        """Preference that has to be beaten."""
        self.best: VirtualPlan | None = None
        self.least = 0
        self.played: list[VirtualPlan] = []
        self.work = MOST_WORK
        self.lacking: list[float] = []
        """Simulated time relative to the closed form, of the best order of slots of each group that was simulated."""
        self.known: dict[Shape, float] = {}

    def run(self, tried: Sequence[Shape]) -> VirtualFound:
        promising = sorted((self._least(shape), shape) for shape in tried)
        groups: dict[tuple[str, int, int, int], list[Shape]] = {}
        for least, shape in promising:
            if least < self.below * (1 + SLACK):
                groups.setdefault((shape.schedule, shape.passes, shape.positions, shape.microbatches), []).append(shape)
        for number, members in enumerate(groups.values()):
            enough = number >= MOST_CUT and not (self.forced and self.best is None)
            if enough or self._least(members[0]) >= self.below * (1 + SLACK):
                break
            self._try(members)
        if self.best is not None:
            own = self.best.shape
            key = own.schedule, own.passes, own.positions, own.microbatches
            for other in groups[key]:
                if other.placement == own.placement and other.zero > own.zero:
                    self._play([other], limited=True)
        return VirtualFound(self.best, tuple(self.played), self.least)

    def _too_slow(self, shape: Shape, cuts: SlotCuts) -> bool:
        """Whether a plan cannot win by the closed form, with what that lacked for all that were simulated before."""
        known = len(self.lacking) >= FEWEST_LACKING and not self.forced
        lacking = max(min(self.lacking), 1.0) if known else 1.0
        least = lacking * with_waiting(self.plans, shape, cuts.e_us)
        return least / (1 - self._gain(shape)) >= self.below * (1 + SLACK)

    def _gain(self, shape: Shape) -> float:
        return virtual_gain(shape.mode, self.than)

    def _least(self, shape: Shape) -> float:
        if shape not in self.known:
            self.known[shape] = least_us(self.plans, shape) / (1 - self._gain(shape))
        return self.known[shape]

    def _try(self, members: Sequence[Shape]) -> None:
        """Simulate the first ZeRO stage that fits, in all orders of slots; without recomputing, if one does.

        Plans that nothing forces recompute only with the last ZeRO stage.
        """
        plans = self.plans
        free = plans.cuts(members[0], math.inf)
        if free is None or all(self._too_slow(each, free) for each in members):
            return  # memory only makes them slower
        zeros = sorted({each.zero for each in members})
        every = [[each for each in members if each.zero == zero] for zero in zeros]
        small = [same for same in every if plans.least_bytes(same[0]) <= plans.memory_bytes]
        for same in small:
            if self._play(same, limited=True):
                return
        for same in every if self.forced else small[-1:]:
            if self._play(same, limited=False):
                return

    def _play(self, same: Sequence[Shape], *, limited: bool) -> bool:
        """Cut and simulate shapes that differ in the order of slots; False if they do not fit.

        `limited`: nothing is recomputed.
        """
        plans = self.plans
        for limit in plans.limits if limited else [math.inf]:
            cuts = plans.cuts(same[0], limit)
            if cuts is None:
                continue
            if all(self._too_slow(shape, cuts) for shape in same):
                return True
            if limited and cuts.most_bytes - plans.shared_bytes > plans.memory_bytes:
                continue
            parts, size = plans.fitted(same[0], cuts.starts)
            self.least = min(self.least or size, size)
            if size <= plans.memory_bytes and not (limited and any(any(part.divided.again) for part in parts)):
                ratios = [ratio for shape in same if (ratio := self._simulate(shape, cuts))]
                self.lacking += [min(ratios)] if ratios else []
                return True
        return False

    def _simulate(self, shape: Shape, cuts: SlotCuts) -> float:
        """Simulate a plan, unless it cannot win or enough were simulated (0).

        Returns its time, or what that is at least, / the closed form.
        """
        plans, work = self.plans, shape.pieces * shape.stages
        enough = len(self.played) >= MOST_PLAYED or work > self.work
        if self._too_slow(shape, cuts) or (enough and self.played):
            return 0.0
        parts, _ = plans.fitted(shape, cuts.starts)
        deployment = replace(plans.deployment(shape, parts), e_us=cuts.e_us)
        step_us = plans.least_us(deployment, host_us=plans.host_us)
        found = VirtualPlan(shape, deployment, step_us, self._gain(shape), at_least=True)
        if found.preference_us < self.below:
            self.work -= work
            step_us = plans.simulated(deployment, host_us=plans.host_us).step_us
            found = VirtualPlan(shape, deployment, step_us, self._gain(shape))
        self.played.append(found)
        if found.preference_us < self.below:
            self.best, self.below = found, found.preference_us
        return step_us / with_waiting(plans, shape, cuts.e_us)


def forced_plan(plans: VirtualPlans, asked: VirtualAsked, tried: Sequence[Shape], options: PlanOptions) -> VirtualFound:
    """Return the preferred plan of these shapes.

    Raises:
        PlanError: There are no shapes.
        DoesNotFitError: None that was tried fits.
    """
    world, numbers = plans.world, " or ".join(map(str, asked.passes))
    what = f"{numbers} stages per slot (virtual_stages={options.virtual_stages}, schedule={options.schedule})"
    if not tried:
        parts = int(plans.may_begin.sum()) - 1
        raise PlanError(
            f"no plan with {what} for {world} device{'s' if world > 1 else ''}: it needs 2 devices at least; as many "
            f"of them in each pipeline as divide all (partition_num={options.partition_num} counts all stages, "
            f"replica_num={options.replica_num}); not more stages than the {parts} parts that the model may be cut "
            f"into; and a schedule that runs with zero_stage={options.zero_stage}. Set virtual_stages=auto and "
            "schedule=auto"
        )
    found = search(plans, tried, None)
    if found.best is not None:
        return found
    needed, limit = amounts_apart(found.least_bytes, plans.memory_bytes)
    raise DoesNotFitError(
        f"no plan with {what} fits {world} devices: the smallest one that was tried needs {needed} of a device, "
        f"recomputing included; the limit is {limit}. Set virtual_stages=auto and schedule=auto, or use devices with "
        "more memory, more ranks or a smaller batch",
        needed=found.least_bytes,
    )
