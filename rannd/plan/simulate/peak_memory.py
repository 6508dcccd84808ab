"""Computes the peak memory of each slot in a Program.

It depends on the order of a slot's actions, not on their times: a message occupies memory from when its receive is
posted, `AHEAD` computations early, to the end of the backward that uses it.
"""

from __future__ import annotations

from itertools import accumulate

from rannd.plan.schedule.program import AHEAD, COMPUTATIONS, NOWHERE, ActionKind, Program
from rannd.plan.simulate.step_costs import StepCosts


def peak_bytes(program: Program, costs: StepCosts, slot: int, *, late: int = 0) -> int:
    """Return the peak memory of `slot` in bytes, including its stages' parameters and optimizer state.

    `late`: bytes of messages for its rank at the end of the step that `program` does not contain.
    """
    layout, actions = program.layout, program.slots[slot]
    stages = layout.stages_of(slot)
    split = {layout.stage_at(slot, action) for action in actions if action.kind is ActionKind.WEIGHT}
    count = sum(action.kind in COMPUTATIONS for action in actions)
    change = [0] * (count + 1)
    """Change of the bytes held before each computation; the last entry: after all of them."""
    working = [0] * (count + 1)
    received: dict[tuple[int, int], int] = {}
    """Bytes of received messages that each microbatch still needs, by stage and microbatch."""
    done = 0
    for action in actions:
        kind, piece = action.kind, action.piece
        stage = action.stage if action.stage != NOWHERE else stages[0]
        if kind is ActionKind.RECV_VALUES or kind is ActionKind.RECV_GRADS:
            gradient = kind is ActionKind.RECV_GRADS
            size = (costs.grads_bytes if gradient else costs.values_bytes)[action.src, action.dst]
            change[max(done - AHEAD, 0)] += size
            reader = action.src if gradient else action.dst
            if reader in stages:  # the others are the rank's, which keeps them
                received[reader, piece] = received.get((reader, piece), 0) + size
        elif kind is ActionKind.FORWARD:
            change[done] += costs.kept_bytes[stage]
            working[done] = costs.working_bytes[stage]
            done += 1
        elif kind is ActionKind.BACKWARD:
            working[done] = costs.working_bytes[stage]
            done += 1
            kept = costs.kept_bytes[stage]
            if stage in split:
                change[done] -= kept - costs.weight_bytes[stage]
            else:
                change[done] -= kept + received.pop((stage, piece), 0)
        elif kind is ActionKind.WEIGHT:
            done += 1
            change[done] -= costs.weight_bytes[stage] + received.pop((stage, piece), 0)
    change[max(done - AHEAD, 0)] += late
    held = accumulate(change)
    state = sum(costs.state_bytes[stage] for stage in stages)
    return state + max(now + most for now, most in zip(held, working, strict=True))


def received_bytes(program: Program, costs: StepCosts, slot: int) -> int:
    """Return the bytes of all messages that `slot` receives."""
    return sum(
        (costs.grads_bytes if action.kind is ActionKind.RECV_GRADS else costs.values_bytes)[action.src, action.dst]
        for action in program.slots[slot]
        if action.kind in (ActionKind.RECV_VALUES, ActionKind.RECV_GRADS)
    )
