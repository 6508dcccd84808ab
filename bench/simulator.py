"""Benchmarks of building, checking and simulating Programs, and the bubble of zero-bubble schedules (simulated).

    python bench/simulator.py [--full]

Jobs of 64 to 16,384 devices with 8 stages; a transfer takes a tenth of a forward. `predict` simulates one of the equal
blocks of a job, `simulate` every action of every slot; with `--full` also for 16,384 devices (needs several GB).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from _results import Table

from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.schedules import ALL_SCHEDULES, planned_program
from rannd.plan.simulate.simulator import predict, simulate
from rannd.plan.simulate.step_costs import StepCosts

Result = TypeVar("Result")
UNIT = 1000.0
"""Microseconds of a forward, and of each of the two halves of a backward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="simulate every action also for 16,384 devices")
    options = parser.parse_args()
    table = Table(
        "Programs of 8 stages with equal replicas, 32 pieces each",
        "schedule", "devices", ("predict", "{:.1f} ms"), ("replicas side by side", "{:.1f} ms"),
        ("step", "{:.1f} ms"), ("side by side", "{:.1f} ms"), "actions", ("created, 1,000/s", "{:,.0f}"),
        ("simulated, 1,000/s", "{:,.0f}"), ("checked, 1,000/s", "{:,.0f}"),
    )  # fmt: skip
    for devices, whole in ((64, True), (1024, True), (16384, options.full)):
        for schedule in ALL_SCHEDULES:
            job(table, schedule, devices, stages=8, microbatches=4, whole=whole)
    bubbles()


def pipelines(devices: int, stages: int, microbatches: int) -> Layout:
    """Layout whose stages are on neighbouring slots, with equal replicas; inputs and outputs at the ends."""
    replicas = devices // stages
    edges = tuple((src, src + 1) for src in range(-1, stages))
    slots = tuple(tuple(replica * stages + stage for replica in range(replicas)) for stage in range(stages))
    return Layout(devices, microbatches, slots, edges, edges[1:-1])


def side_by_side(devices: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Slots of stages whose replicas are on neighbouring slots."""
    replicas = devices // stages
    return tuple(tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages))


def virtual(layout: Layout, transfer: float) -> StepCosts:
    """Costs of equal stages: each half of backward takes as long as a forward, a reduction as long as two."""
    stages, nodes = len(layout.stages), tuple(slot // 8 for slot in range(layout.world))
    moves = dict.fromkeys(layout.edges, transfer)
    ones, zeros = (UNIT,) * stages, (0,) * stages
    return StepCosts(
        forward_us=ones,
        backward_us=(2 * UNIT,) * stages,
        weight_us=ones,
        values_us=moves,
        grads_us=moves,
        reduce_us=((UNIT, UNIT) if transfer else (),) * stages,
        nodes=nodes,
        state_bytes=zeros,
        kept_bytes=(1,) * stages,
        weight_bytes=(1,) * stages,
        working_bytes=zeros,
        values_bytes=dict.fromkeys(layout.edges, 0),
        grads_bytes=dict.fromkeys(layout.edges, 0),
    )


def timed(action: Callable[[], Result]) -> tuple[Result, float]:
    start = time.perf_counter()
    found = action()
    return found, time.perf_counter() - start


def job(table: Table, schedule: str, devices: int, *, stages: int, microbatches: int, whole: bool) -> None:
    layout = pipelines(devices, stages, microbatches)
    costs = virtual(layout, UNIT / 10)
    once, took = timed(lambda: predict(schedule, layout, costs))
    apart = msgspec.structs.replace(pipelines(devices, stages, microbatches), stages=side_by_side(devices, stages))
    other, longer = timed(lambda: predict(schedule, apart, costs))
    predicted = (1e3 * took, 1e3 * longer, once.step_us / 1e3, other.step_us / 1e3)
    if not whole:
        table.row(schedule, devices, *predicted, None, None, None, None)
        return
    layout = pipelines(devices, stages, microbatches)
    program, making = timed(lambda: planned_program(schedule, layout, costs.split))
    actions = sum(map(len, program.slots))
    played, playing = timed(lambda: simulate(program, costs))
    assert played == once
    checked = actions / timed(lambda: check(program))[1] / 1e3 if devices <= 1024 else None
    table.row(schedule, devices, *predicted, actions, actions / making / 1e3, actions / playing / 1e3, checked)


def bubbles() -> None:
    """Compare idle time of zero-bubble H1 with 1F1B's; forward and each half of backward take one unit of time."""
    table = Table(
        "Idle time where F = B = W and transfers take none (simulated)",
        "stages", "microbatches", "bubble of 1f1b", "of zb_h1", "idle time, zb_h1 / 1f1b",
    )  # fmt: skip
    for stages, microbatches in ((2, 4), (4, 2), (8, 2), (8, 8), (16, 2), (32, 1)):
        layout = pipelines(stages, stages, microbatches)
        costs = virtual(layout, 0.0)
        idle = [sum(predict(schedule, layout, costs).idle_us) for schedule in ("1f1b", "zb_h1")]
        found = [predict(schedule, layout, costs).bubble for schedule in ("1f1b", "zb_h1")]
        table.row(stages, layout.pieces_total, *found, idle[1] / idle[0])


if __name__ == "__main__":
    main()
