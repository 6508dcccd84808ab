"""Computes the peak memory of each slot in a Program.

It depends on the order of a slot's actions, not on their times: a message occupies memory from when its receive is
posted, `AHEAD` computations early, to the end of the backward that uses it.
"""

from __future__ import annotations

from itertools import accumulate

from rannd.plan.schedule.program import AHEAD, ActionKind, Program
from rannd.plan.simulate.step_costs import StepCosts


def peak_bytes(program: Program, costs: StepCosts, slot: int, *, late: int = 0) -> int:
    """Return the peak memory of `slot` in bytes, including its stage's parameters and optimizer state.

    `late`: bytes of messages for its rank at the end of the step that `program` does not contain.
    """
    stage, actions = program.layout.stage_of(slot), program.slots[slot]
    kept, later = costs.kept_bytes[stage], costs.weight_bytes[stage]
    split = any(action.kind is ActionKind.WEIGHT for action in actions)
    count = sum(action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT) for action in actions)
    change = [0] * (count + 1)
    """Change of the bytes held before each computation; the last entry: after all of them."""
    working = [0] * (count + 1)
    received: dict[int, int] = {}
    """Bytes of received messages that each microbatch still needs."""
    done = 0
    for action in actions:
        kind, piece = action.kind, action.piece
        if kind is ActionKind.RECV_VALUES or kind is ActionKind.RECV_GRADS:
            gradient = kind is ActionKind.RECV_GRADS
            size = (costs.grads_bytes if gradient else costs.values_bytes)[action.src, action.dst]
            change[max(done - AHEAD, 0)] += size
            if stage == (action.src if gradient else action.dst):  # the others are the rank's, which keeps them
                received[piece] = received.get(piece, 0) + size
        elif kind is ActionKind.FORWARD:
            change[done] += kept
            working[done] = costs.working_bytes[stage]
            done += 1
        elif kind is ActionKind.BACKWARD:
            working[done] = costs.working_bytes[stage]
            done += 1
            change[done] -= kept - later if split else kept + received.pop(piece, 0)
        elif kind is ActionKind.WEIGHT:
            done += 1
            change[done] -= later + received.pop(piece, 0)
    change[max(done - AHEAD, 0)] += late
    held = accumulate(change)
    return costs.state_bytes[stage] + max(now + most for now, most in zip(held, working, strict=True))


def received_bytes(program: Program, costs: StepCosts, slot: int) -> int:
    """Return the bytes of all messages that `slot` receives."""
    return sum(
        (costs.grads_bytes if action.kind is ActionKind.RECV_GRADS else costs.values_bytes)[action.src, action.dst]
        for action in program.slots[slot]
        if action.kind in (ActionKind.RECV_VALUES, ActionKind.RECV_GRADS)
    )
