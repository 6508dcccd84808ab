"""Timelines of a step, predicted and measured, as a page draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rannd.errors import PlanError
from rannd.plan.compatibility import plain
from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import MeasuredStep, StepEvent
from rannd.plan.plan_text import devices_text
from rannd.plan.simulate.plan_records import DrawnStep, drawn_step
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, REDUCE, SEND, WAIT, Event
from rannd.runner.page.page_data import KINDS, Events, SlotUse, Timeline, TypicalStep
from rannd.units import count_text

MOST_COMPUTATIONS = 4000
"""Of a drawn step."""
MOST_EVENTS = 10_000
"""Of a drawn step; transfers are left out first."""
MOST_SLOTS = 64
"""Devices of a drawn step."""
UNITS = 200_000
"""Steps of a timeline's axis."""
_COMPUTED = {"F": 0, "B": 1, "W": 2}
_OTHERS = {RECEIVE: 3, REDUCE: 4, SEND: 5, WAIT: 6}
_OTHER = len(KINDS) - 1


class Predicted(msgspec.Struct, frozen=True):
    """A simulated step, or why there is none."""

    step: DrawnStep | None
    why: str = ""


def predicted(deployment: Deployment) -> Predicted:
    """Simulate a step of a deployment from what is stored with it."""
    if deployment.planned is None:
        return Predicted(None, "The plan is of a version of rannd that did not store what a step is simulated with.")
    try:
        step = drawn_step(deployment, MOST_COMPUTATIONS)
    except PlanError as exc:  # a schedule that this version does not know
        return Predicted(None, plain(str(exc), 240))
    if step is None:
        return Predicted(None, f"A step has more than {MOST_COMPUTATIONS:,} forwards and backwards; it is not drawn.")
    return Predicted(step)


def as_measured(deployment: Deployment, measured: MeasuredStep) -> DrawnStep | None:
    """Simulate a step whose stages take what was measured of them, each the slowest of its replicas."""

    def times(stage: int) -> tuple[float, float, float]:
        found = list(measured.of_stage(stage))
        weight = max(each.weight.median_us for each in found)
        return (
            max(each.forward.median_us for each in found),
            max(each.backward.median_us for each in found) + weight,
            weight,
        )

    try:
        return drawn_step(deployment, MOST_COMPUTATIONS, times)
    except PlanError:
        return None


def predicted_timeline(deployment: Deployment, step: DrawnStep, title: str = "predicted") -> Timeline:
    """Return the timeline of a simulated step."""
    note = _part(deployment, step)
    events = [
        msgspec.structs.replace(each, slot=step.slots[each.slot])
        for each in step.simulation.events
        if each.slot < len(step.slots)
    ]
    return _timeline(deployment, title, note, step.simulation.step_us, events, step.slots)


def measured_timeline(deployment: Deployment, measured: MeasuredStep, slots: Sequence[int]) -> Timeline | None:
    """Return what is known of a measured step, for some slots: its events, or those of medians of its stages."""
    steps = count_text(measured.steps, "step")
    typical = TypicalStep(f"the median of {steps}", measured.step_us)
    if measured.events:
        own = set(slots)
        events = [each for each in measured.events if each.slot in own]
        end = max((each.start_us + each.us for each in events), default=0.0)
        note = "one step, as ranks recorded it, from its begin on the first rank; the median, from that on the last"
        found = _timeline(deployment, "measured", note, end, events, slots)
        return msgspec.structs.replace(found, what="one recorded step", typical=typical)
    step = as_measured(deployment, measured)
    if step is None:
        return None
    note = (
        f"drawn from medians of {steps}: forwards and backwards take what was measured of their "
        "stage, when they begin is simulated, and transfers, reductions and the runtime take what was predicted; with "
        "trace_events=full the events of a step are stored"
    )
    found = predicted_timeline(deployment, step, "measured")
    return msgspec.structs.replace(
        found, note=note, what="simulated with the measured forwards and backwards", typical=typical
    )


def slot_uses(deployment: Deployment, step: DrawnStep) -> list[SlotUse]:
    """Return what devices spend the step for, by the stages that they have.

    Forwards and backwards are those of the estimates, as in `bubble`: simulated ones also have what the runtime takes.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, slot in enumerate(step.slots[: len(step.simulation.busy_us)]):
        numbers = tuple(number for number, stage in enumerate(deployment.stages) if slot in stage.slots)
        groups.setdefault(numbers, []).append(place)
    busy = step.simulation.busy_us
    found = []
    for numbers, places in groups.items():
        place = max(places, key=lambda each: busy[each])
        estimates = [deployment.stages[number].estimate for number in numbers]
        forward, backward = sum(each.forward_us for each in estimates), sum(each.backward_us for each in estimates)
        own = [event for event in step.simulation.events if event.slot == place]
        computed = [event for event in own if event.category == COMPUTE]
        both = _covered([*computed, *(event for event in own if event.category == REDUCE)])
        reduce = both - _covered(computed)
        found.append(
            SlotUse(
                devices_text([deployment.slots[step.slots[each]] for each in places]),
                ", ".join(map(str, numbers)),
                len(places),
                forward,
                backward,
                reduce,
                max(step.simulation.step_us - forward - backward - reduce, 0.0),
                False,
            )
        )
    longest = max(each.forward_us + each.backward_us for each in found)
    return [msgspec.structs.replace(each, critical=each.forward_us + each.backward_us == longest) for each in found]


def _covered(events: Iterable[Event]) -> float:
    """Time in which at least one of the events is going on."""
    total, end = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.start_us):
        begin = max(event.start_us, end)
        end = max(end, event.start_us + event.us)
        total += max(end - begin, 0.0)
    return total


def _part(deployment: Deployment, step: DrawnStep) -> str:
    drawn, world = len(step.slots), len(deployment.slots)
    return "" if drawn >= world else f"one of several equal pipelines: {drawn} of {world} devices"


def _timeline(
    deployment: Deployment,
    title: str,
    note: str,
    step_us: float,
    events: Sequence[Event | StepEvent],
    slots: Sequence[int],
) -> Timeline:
    used = sorted({slot for slot in slots if slot < len(deployment.slots)})
    if len(used) > MOST_SLOTS:
        note = "; ".join(filter(None, (note, f"the first {MOST_SLOTS} of {len(used)} devices")))
        used = used[:MOST_SLOTS]
    row = {slot: place for place, slot in enumerate(used)}
    events = [each for each in events if each.slot in row]
    if len(events) > MOST_EVENTS:
        events = [each for each in events if each.category in (COMPUTE, REDUCE)]
        note = "; ".join(filter(None, (note, "transfers are left out")))
        if len(events) > MOST_EVENTS:
            note = f"{note}; the last {len(events) - MOST_EVENTS:,} events, too"
            events = sorted(events, key=lambda each: each.start_us)[:MOST_EVENTS]
    unit = max(step_us, 1e-3) / UNITS
    names: dict[str, int] = {}
    shown = sorted(events, key=lambda each: (row[each.slot], each.start_us))
    return Timeline(
        title,
        note,
        step_us,
        unit,
        tuple(_label(deployment, slot) for slot in used),
        Events(
            tuple(row[each.slot] for each in shown),
            tuple(_kind(each) for each in shown),
            tuple(round(each.start_us / unit) for each in shown),
            tuple(max(round(each.us / unit), 1) for each in shown),
            tuple(names.setdefault(plain(each.name, 40), len(names)) for each in shown),
            tuple(names),
        ),
    )


def _kind(event: Event | StepEvent) -> int:
    if event.category == COMPUTE:
        return _COMPUTED.get(event.name[:1], _OTHER)
    return _OTHERS.get(event.category, _OTHER)


def _label(deployment: Deployment, slot: int) -> str:
    stages = [str(number) for number, stage in enumerate(deployment.stages) if slot in stage.slots]
    place = deployment.slots[slot]
    return f"{place.node}:{place.device} stage {','.join(stages)}"
