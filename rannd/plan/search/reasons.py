"""Why a plan has what it has: with what it was compared, and by how much that lost or did not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from rannd.plan.deployment import OFFLOAD, OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMS, Reason
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.plan.run_modes import LEAST_GAIN, RunMode
from rannd.plan.search.candidates import Candidate
from rannd.plan.search.ranking import Ranking
from rannd.plan.search.stages import Need, e_of, smallest_memory
from rannd.plan.stage_costs.estimate import StageTables
from rannd.units import amount, amounts_apart, count_text

_Value = TypeVar("_Value", int, str)

MOST_COMPARED = 3
"""Maximum number of other values that a reason names: the best of them."""
_GAIN = f"{LEAST_GAIN:.0%}"


class Searched(msgspec.Struct, frozen=True):
    """What the planner has searched when it found its plan."""

    tables: Sequence[StageTables]
    others: Sequence[StageTables]
    """Tables under the other schedules that were tried."""
    failed: Sequence[Need | None]
    """What plans with less offloaded need at least, if none fits; without any offload first."""
    stages: int
    """Number of stages that was asked for; 0: any."""
    counts: Sequence[int]
    """Numbers of microbatches."""
    coupled: bool
    """Whether the model's rows depend on each other."""


def reasons(
    ranking: Ranking, searched: Searched, options: PlanOptions, *, way: RunMode | None, interleaved: bool
) -> tuple[Reason, ...]:
    """Return a line for each choice of a plan.

    Args:
        ranking: The plan, and those that were simulated.
        searched: What was searched before.
        options: The configuration.
        way: The run mode that was asked for, if one was.
        interleaved: Whether backward runs inside the call.
    """
    chosen = ranking.chosen.choice
    stages = len(chosen.replicas)
    return (
        Reason("stages", str(stages), _stages(ranking, searched, options)),
        Reason("microbatches", str(chosen.variant.microbatches), _microbatches(ranking.chosen, searched, options)),
        Reason(
            "schedule",
            chosen.variant.schedule,
            _schedule(ranking, searched, options, way=way, interleaved=interleaved),
        ),
        Reason("ZeRO", str(ranking.deployment.zero or "no"), _zero(ranking, searched, options, way=way)),
        Reason(OFFLOAD, "yes" if ranking.deployment.offload else "no", _offload(ranking, searched, options)),
        Reason(
            OFFLOAD_PARAMS, "yes" if ranking.deployment.offload_params else "no", _params(ranking, searched, options)
        ),
        Reason(
            OFFLOAD_ACTIVATIONS,
            "yes" if ranking.deployment.offload_activations else "no",
            _activations(ranking, searched, options),
        ),
        Reason("recompute", *_recompute(ranking, options)),
    )


def _stages(ranking: Ranking, searched: Searched, options: PlanOptions) -> str:
    if options.replica_num:
        return f"set by replica_num={options.replica_num}"
    if options.partition_num:
        return f"set by partition_num={options.partition_num}"
    if len(ranking.deployment.slots) == 1:
        return "there is one device"
    if searched.tables[0].blocks == 1:
        return "no part of the model can be divided"

    def count(plan: Candidate) -> int:
        return len(plan.choice.replicas)

    told = _compared(ranking, count, lambda number: f"{number} {'stage' if number == 1 else 'stages'}", whole=True)
    return told or "no other number was as promising"


def _microbatches(chosen: Candidate, searched: Searched, options: PlanOptions) -> str:
    """E of the same stages with other numbers: the next ones below and above."""
    if searched.coupled:
        return "the model couples the rows of a batch"
    if options.pipeline_num:
        return f"set by pipeline_num={options.pipeline_num}"
    choice, found = chosen.choice, []
    place = searched.counts.index(choice.variant.microbatches)
    for count in (*searched.counts[:place][-1:], *searched.counts[place + 1 :][:1]):
        variant = msgspec.structs.replace(choice.variant, microbatches=count)
        tables = [table for table in (*searched.tables, *searched.others) if table.variant == variant]
        tried = [e_of(table, choice.starts, choice.replicas) for table in tables]
        best = min((each.step_us for each in tried if each is not None), default=None)
        told = "would not fit" if best is None else _relative(best, choice.step_us)
        found.append(f"{count_text(count, 'microbatch')} {told}")
    return f"of the same stages, by estimate: {', '.join(found)}" if found else "no other number leaves whole rows"


def _schedule(
    ranking: Ranking, searched: Searched, options: PlanOptions, *, way: RunMode | None, interleaved: bool
) -> str:
    if way is not None:
        return "asked for"
    if not interleaved:
        return "backward runs after the call: the model does not return its loss alone, or interleave_loss=false"
    if options.schedule != AUTO:
        return f"set by schedule={options.schedule}"
    if len(ranking.chosen.choice.replicas) == 1:
        return "one stage waits for nobody"
    told = _compared(ranking, lambda plan: plan.choice.variant.schedule, str)
    return told or "no other fits, or there is nothing to delay: " + ", ".join(
        sorted({table.variant.schedule for table in searched.others})
    )


def _zero(ranking: Ranking, searched: Searched, options: PlanOptions, *, way: RunMode | None) -> str:
    if way is not None:
        return "asked for"
    if ranking.deployment.offload_params:
        return "parameters that are offloaded are divided so"
    if options.zero_stage != AUTO:
        reason = "the optimizer cannot step parts of parameters"
        return reason if not options.divides else f"set by zero_stage={options.zero_stage}"
    if len({table.variant.zero for table in searched.tables}) == 1:
        one = len(ranking.deployment.slots) == 1
        return "there is one device" if one else "memory is not scarce: all fits without"
    zero = ranking.deployment.zero
    if zero and all(_shared(each.plan) for each in ranking.played):
        need = smallest_memory([table for table in searched.tables if not table.variant.zero], stages=searched.stages)
        if need is None or need.bytes > ranking.chosen.table.limit:
            return f"without it {_lacking(ranking, need)}"
    told = _compared(ranking, _shared, lambda zero: f"ZeRO {zero}" if zero else "without")
    if not told:
        return "the same stages need it" if zero else "no plan with it is as promising"
    return told


def _offload(ranking: Ranking, searched: Searched, options: PlanOptions) -> str:
    if not options.steps_apart:
        return "no optimizer, or one that cannot step some parameters after others"
    needs = [need for need in searched.failed if need is not None and not need.offload.optimizer]
    return _away("offload_optimizer", ranking.deployment.offload, needs, ranking, options)


def _params(ranking: Ranking, searched: Searched, options: PlanOptions) -> str:
    if not options.divides:
        return "no optimizer, or one that cannot step parts of parameters"
    if options.offload_params == "false":
        return "excluded by offload_params=false, or by compile_stages, which has whole parameters"
    needs = [need for need in searched.failed if need is not None and not need.offload.params]
    return _away("offload_params", ranking.deployment.offload_params, needs, ranking, options)


def _activations(ranking: Ranking, searched: Searched, options: PlanOptions) -> str:
    needs = [need for need in searched.failed if need is not None and not need.offload.activations]
    return _away("offload_activations", ranking.deployment.offload_activations, needs, ranking, options)


def _away(item: str, chosen: bool, needs: Sequence[Need], ranking: Ranking, options: PlanOptions) -> str:
    """Why something is offloaded or not; `needs`: what plans without need, of which none fits."""
    asked = getattr(options, item)
    if asked != AUTO:
        return f"set by {item}={asked}"
    if not chosen:
        return "a plan without it fits"
    return f"without it {_lacking(ranking, min(needs, key=lambda need: need.bytes, default=None))}"


def _recompute(ranking: Ranking, options: PlanOptions) -> tuple[str, str]:
    if options.checkpointing:
        last = ", checkpointing_no_last=true" if options.checkpointing_no_last else ""
        return "yes", f"set by checkpointing=true{last}"
    if options.offload_activations == "true":
        return "yes", "set by offload_activations=true"
    chosen, table = ranking.chosen.choice, ranking.chosen.table
    told: list[str] = []
    again: list[str] = []
    for number, (start, end, replicas, used) in enumerate(chosen.spans(table.blocks)):
        if table.recomputes(start, end, replicas, used=used):
            needed, limit = _apart(table.bytes_kept(start, end, replicas, used=used), table.limit)
            repeated = table.segments(start, end, replicas, used=used).forward_us
            repeated *= int(table.counts.pieces[table.column(replicas)])
            again.append(str(number))
            told.append(f"stage {number} would need {needed} of {limit}, repeats {repeated / 1e3:.3g} ms")
    if not told:
        return "no", "all activations fit"
    more = f" and {len(told) - MOST_COMPARED} more" if len(told) > MOST_COMPARED else ""
    return f"{len(again)} of {len(chosen.replicas)} stages", "; ".join(told[:MOST_COMPARED]) + more


# -- words ----------------------------------------------------------------------------------------------------


def _shared(plan: Candidate) -> int:
    """The ZeRO stage of a plan; without replicas there is nothing to share."""
    return plan.choice.variant.zero if max(plan.choice.replicas) > 1 or plan.table.offload.params else 0


def _compared(
    ranking: Ranking, value: Callable[[Candidate], _Value], name: Callable[[_Value], str], *, whole: bool = False
) -> str:
    """The best plan for each other value: by how much it is slower, or what it lacks; `whole`: with its ZeRO stage."""
    own, zero, step_us = value(ranking.chosen), _shared(ranking.chosen), ranking.deployment.step_us
    best: dict[_Value, str] = {}
    for each in sorted(ranking.played, key=lambda each: each.step_us):
        relative = _relative(each.step_us, step_us, at_least=each.at_least)
        best.setdefault(value(each.plan), f"{_with(each.plan, zero, whole)}{relative}")
    for plan in ranking.over:
        best.setdefault(value(plan), f"{_with(plan, zero, whole)}{amount(plan.over_bytes, 3)} too much")
    told = [f"{name(other)} {text}" for other, text in best.items() if other != own]
    return ", ".join(told[:MOST_COMPARED]) + (f", {len(told) - MOST_COMPARED} more" if told[MOST_COMPARED:] else "")


def _with(plan: Candidate, zero: int, whole: bool) -> str:
    """The ZeRO stage of a plan, if it is another one and has to be named."""
    return f"with ZeRO {_shared(plan)} " if whole and _shared(plan) not in (0, zero) else ""


def _relative(other_us: float, step_us: float, *, at_least: bool = False) -> str:
    """Compare two times; `at_least`: the other one is a lower bound."""
    ratio = other_us / step_us - 1 if step_us else 0.0
    if at_least:  # rounded down, as it is told
        ratio = math.floor(ratio * 1000) / 1000 if ratio < 1 else math.floor(ratio * 10) / 10
    if abs(ratio) < 0.0005:
        return "not faster" if at_least else "as fast"
    if ratio < 0:
        return f"{'at most ' * at_least}{-ratio:.1%} faster ({_GAIN} are asked for)"
    slower = f"{ratio:.1%} slower" if ratio < 1 else f"{ratio + 1:.1f} times as slow"
    return f"at least {slower}" if at_least else slower


def _lacking(ranking: Ranking, need: Need | None) -> str:
    if need is None:
        return "there is no such plan"
    needed, limit = _apart(need.bytes, ranking.chosen.table.limit)
    return f"{needed} of each device would be needed, {limit} are allowed"


def _apart(one: float, other: float) -> tuple[str, str]:
    return amounts_apart(round(one), round(other))
