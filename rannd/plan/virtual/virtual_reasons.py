"""Why a plan has several stages per slot, or one."""

from __future__ import annotations

import math
from collections.abc import Callable

from rannd.plan.deployment import OFFLOAD_REASONS, Reason
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.plan.run_modes import VIRTUAL_GAIN, Offload
from rannd.plan.virtual.virtual_asked import VirtualAsked
from rannd.plan.virtual.virtual_search import Against, VirtualFound, VirtualPlan

VIRTUAL = "virtual stages"
MOST_COMPARED = 3
"""Maximum number of other values that a reason names: the best of them."""


def why_one(asked: VirtualAsked, found: VirtualFound | None, against: Against | None, *, devices: int) -> Reason:
    """Why there is one stage per slot; without `found`, no plan with several was looked at."""
    if asked.why_not:
        return Reason(VIRTUAL, "no", asked.why_not)
    if found is None or against is None:
        what = "there is one device" if devices == 1 else "there are too few blocks, or devices in a pipeline"
        return Reason(VIRTUAL, "no", what)
    if not found.played:
        return Reason(VIRTUAL, "no", f"by the closed form, none saves the {VIRTUAL_GAIN:.0%} that are asked for")
    best = min(found.played, key=lambda each: each.preference_us)
    slower = _slower(best, against.step_us)
    most, least = ("at most ", "at least ") if best.at_least else ("", "")
    told = f"{least}{slower:.1%} slower"
    if slower < 0:
        told = f"{most}{-slower:.1%} faster ({best.gain:.0%} are asked for)"
    return Reason(VIRTUAL, "no", f"{best.shape.passes} per slot ({best.shape.mode.schedule}) {told}")


def won_reasons(
    found: VirtualFound, plan: VirtualPlan, against: Against, others: tuple[Reason, ...]
) -> tuple[Reason, ...]:
    """Reasons of a plan with several stages per slot that was faster than the best with one, which had `others`."""
    offload = tuple(each for each in others if each.what in OFFLOAD_REASONS)
    why = f"1 per slot ({against.name}) {against.step_us / plan.step_us - 1:.1%} slower"
    return (*_common(found, plan), *offload, _recompute(plan, None), Reason(VIRTUAL, str(plan.shape.passes), why))


def forced_reasons(found: VirtualFound, plan: VirtualPlan, options: PlanOptions) -> tuple[Reason, ...]:
    """Reasons of a plan where several stages per slot were asked for."""

    def away(what: str, item: str, chosen: bool) -> Reason:
        asked = getattr(options, item)
        why = "no plan fits without it" if chosen else "a plan without it fits"
        return Reason(what, "yes" if chosen else "no", why if asked == AUTO else f"set by {item}={asked}")

    asked = f"schedule={options.schedule}"
    if options.virtual_stages != AUTO:
        asked = f"virtual_stages={options.virtual_stages}"
    return (
        *_common(found, plan),
        *map(away, OFFLOAD_REASONS, Offload.items(), plan.deployment.offloads),
        _recompute(plan, options),
        Reason(VIRTUAL, str(plan.shape.passes), f"set by {asked}"),
    )


def _common(found: VirtualFound, plan: VirtualPlan) -> tuple[Reason, ...]:
    """What the simulated plans with several stages per slot say of each choice."""
    shape = plan.shape

    def compared(value: Callable[[VirtualPlan], str]) -> str:
        best: dict[str, str] = {}
        for each in sorted(found.played, key=lambda each: each.step_us):
            slower = _slower(each, plan.step_us)
            most, least = ("at most ", "at least ") if each.at_least else ("", "")
            relative = f"{least}{slower:.1%} slower" if slower >= 0 else f"{most}{-slower:.1%} faster (not by enough)"
            best.setdefault(value(each), f"{value(each)} {relative}")
        told = [text for other, text in best.items() if other != value(plan)]
        return "of the simulated plans with several per slot: " + (", ".join(told[:MOST_COMPARED]) or "all have it")

    return (
        Reason("stages", str(shape.stages), compared(lambda each: f"{each.shape.stages} stages")),
        Reason("microbatches", str(shape.microbatches), compared(lambda each: f"{each.shape.microbatches}")),
        Reason("schedule", shape.schedule, compared(lambda each: each.shape.schedule)),
        Reason(
            "ZeRO",
            str(shape.mode.zero or "no"),
            compared(lambda each: f"ZeRO {each.shape.mode.zero}" if each.shape.mode.zero else "without"),
        ),
    )


def _slower(plan: VirtualPlan, step_us: float) -> float:
    """By what part of a step a plan is slower, or is at least (rounded down, as it is told)."""
    ratio = plan.step_us / step_us - 1
    return math.floor(ratio * 1000) / 1000 if plan.at_least else ratio


def _recompute(plan: VirtualPlan, options: PlanOptions | None) -> Reason:
    again = sum(stage.recompute for stage in plan.deployment.stages)
    if options is not None and options.checkpointing:
        return Reason("recompute", "yes", "set by checkpointing=true")
    if options is not None and options.offload_activations == "true":
        return Reason("recompute", "yes", "set by offload_activations=true")
    if not again:
        return Reason("recompute", "no", "all activations fit")
    return Reason("recompute", f"{again} of {plan.shape.stages} stages", "their slots would need too much memory")
