"""Predicts time and memory of a step by running its Program on costs.

`clock` simulates computations and transfers, `peak_memory` counts bytes; reductions of gradients follow here, because
nothing else waits for them. Large jobs consist of identical blocks (`repeats`): :func:`predict` simulates each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from rannd.plan.schedule.program import Layout, Program
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.simulate.clock import Played, play
from rannd.plan.simulate.peak_memory import peak_bytes, received_bytes
from rannd.plan.simulate.repeats import repeats
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.simulate.timeline import REDUCE, Event


class Simulation(msgspec.Struct, frozen=True):
    """Predicted times and peak memory of a step, by slot."""

    step_us: float
    busy_us: tuple[float, ...]
    """Time in forwards and backwards."""
    idle_us: tuple[float, ...]
    """The rest of the step: waiting, transfers, reductions."""
    peak_bytes: tuple[int, ...]
    """Peak memory; empty if only times were asked for."""
    events: tuple[Event, ...] = ()
    """What ran on each slot, in order; empty unless recorded."""
    drain_us: tuple[float, ...] = ()
    """What of `idle_us` are reductions, and what follows them, when all is computed and sent."""

    @property
    def bubble(self) -> float:
        """Fraction of all slots' time that is not spent in forwards and backwards."""
        return sum(self.idle_us) / (self.step_us * len(self.idle_us)) if self.step_us > 0 else 0.0


def simulate(program: Program, costs: StepCosts, *, record: bool = False) -> Simulation:
    """Simulate one step of `program`; PlanError if it deadlocks. `record`: also return the events."""
    peaks = [peak_bytes(program, costs, slot) for slot in range(program.layout.world)]
    return _simulation(program.layout, costs, play(program, costs, record=record), peaks, record=record)


def timeline_of(program: Program, costs: StepCosts) -> Simulation:
    """Simulate one step of `program` with its events, and without memory; PlanError if it deadlocks."""
    return _simulation(program.layout, costs, play(program, costs, record=True), (), record=True)


def predict(schedule: str, layout: Layout, costs: StepCosts, *, memory: bool = True) -> Simulation:
    """Return what `simulate` predicts for `layout` under `schedule`, much faster for large jobs.

    `memory`: whether peaks are asked for, too.

    Raises:
        PlanError: The schedule is not known.
    """
    return predict_order(lambda part: planned_program(schedule, part, costs.split), layout, costs, memory=memory)


def predict_order(
    make: Callable[[Layout], Program], layout: Layout, costs: StepCosts, *, memory: bool = True
) -> Simulation:
    """Return what `simulate` predicts for the Program that `make` returns for `layout`, or for an equal part of it."""
    world = layout.world
    ends, busy = [0.0] * world, [0.0] * world
    last = [[(0.0, 0.0)] * layout.virtual_stages] * world
    given, late = [0.0] * world, [0] * world
    """For ranks whose slots are in other blocks: end of the sends of their inputs, and bytes that they receive."""
    programs: list[tuple[Program, StepCosts]] = []
    home = [(0, 0)] * world
    """Index in `programs` and slot number of each slot's block."""
    for repeat in repeats(layout, costs.nodes):
        part = msgspec.structs.replace(costs, nodes=repeat.nodes)
        program = make(repeat.block)
        played = play(program, part)
        for own in range(repeat.block.slot_count):
            inside = own < repeat.block.world
            sends = 0.0 if inside else max(played.links[own].values(), default=0.0)
            gets = 0 if inside or not memory else received_bytes(program, part, own)
            for place in repeat.places:
                slot = place[own]
                ends[slot] = max(ends[slot], played.ends[own])
                if inside:
                    busy[slot], last[slot] = played.busy[own], played.last[own]
                    home[slot] = len(programs), own
                else:
                    given[slot], late[slot] = sends, gets
        programs.append((program, part))
    if any(until > max(end for _, end in own) for until, own in zip(given, last, strict=True)):
        # Sending inputs may delay what a slot sends in its own block: blocks are not independent.
        whole = make(layout)
        return simulate(whole, costs) if memory else _simulation(layout, costs, play(whole, costs), (), record=False)
    known: dict[tuple[int, int, int], int] = {}
    peaks = []
    for (number, own), more in zip(home, late, strict=True) if memory else ():
        if (number, own, more) not in known:
            known[number, own, more] = peak_bytes(*programs[number], own, late=more)
        peaks.append(known[number, own, more])
    return _simulation(layout, costs, Played(ends, busy, last, [], []), peaks, record=False)


def _simulation(layout: Layout, costs: StepCosts, played: Played, peaks: Sequence[int], *, record: bool) -> Simulation:
    """Add the reductions, and the gathering of parameters after them (ZeRO)."""
    ends = np.array(played.ends)
    starts, stops = np.moveaxis(np.array(played.last), 2, 0)
    free = np.zeros(layout.world)
    """When each slot ends its last reduction: a slot runs one at a time."""
    events = list(played.events)
    for stages in layout.reductions:
        buckets = costs.reduce_us[stages[0]] if len(stages) == 1 else costs.tied_us[layout.tied.index(stages)]
        if not sum(buckets):
            continue
        slots = [slot for stage in stages for slot in layout.stages[stage]]
        numbers = [layout.stages_of(slot).index(stage) for stage in stages for slot in layout.stages[stage]]
        begins, end = _reduce(buckets, starts[slots, numbers], stops[slots, numbers], float(free[slots].max()))
        free[slots] = end
        if record:
            name = str(layout.reduction(stages))
            events += [Event(slot, REDUCE, begins, end - begins, name) for slot in dict.fromkeys(slots)]
    for stage, us in enumerate(costs.after_us):
        slots = list(layout.stages[stage])
        begins = float(np.maximum(ends[slots], free[slots]).max())
        free[slots] = begins + us
        if record and us:
            events += [Event(slot, REDUCE, begins, us, "G") for slot in slots]
    step = costs.agreeing_us + float(np.maximum(ends, free).max())
    return Simulation(
        step,
        tuple(played.busy),
        tuple(step - busy for busy in played.busy),
        tuple(peaks),
        tuple(sorted(replace(event, start_us=event.start_us + costs.agreeing_us) for event in events)),
        tuple(np.maximum(free - ends, 0.0).tolist()),
    )


_Times = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _reduce(buckets: Sequence[float], starts: _Times, stops: _Times, free: float) -> tuple[float, float]:
    """Return begin and end of the reduction of gradients that slots compute from `starts` to `stops`.

    Each bucket starts when it is complete on all slots and the previous one is done. Gradients are assumed to become
    available at a constant rate.
    """
    made, end, whole = 0.0, free, sum(buckets)
    begins = -1.0
    for us in buckets:
        made += us
        begin = max(end, float((starts + (stops - starts) * (made / whole)).max()))
        begins = begin if begins < 0 else begins
        end = begin + us
    return begins, end
