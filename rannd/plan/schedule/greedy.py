"""Orders the computations of 1F1B and related schedules with a greedy simulation.

It assumes that all stages take equally long with all their replicas, and that transfers take no time. A slot runs what
can begin first; of several, the backward. If the backward is split in two halves, forward, backward and second half
(parameter gradients) take turns. An order that the simulation has executed cannot deadlock, so the resulting Program
terminates.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from rannd.plan.schedule.program import Action, ActionKind, Layout

_NEVER = float("inf")
_BACKWARD, _FORWARD, _WEIGHT = range(3)
_KINDS = (ActionKind.BACKWARD, ActionKind.FORWARD, ActionKind.WEIGHT)
_TURNS = (
    ((_FORWARD, _BACKWARD, _WEIGHT), (_WEIGHT, _FORWARD, _BACKWARD)),
    ((_BACKWARD, _FORWARD, _WEIGHT), (_BACKWARD, _WEIGHT, _FORWARD)),
    ((_FORWARD, _BACKWARD, _WEIGHT), (_FORWARD, _BACKWARD, _WEIGHT)),
)
"""Priority of actions that can begin at once, by the kind of the last action and whether a second half is due.

It is due if more second halves wait than a slot may keep beside its microbatches in flight. So all slots keep equally
many microbatches, later stages more second halves, and these do not delay the last backward: this keeps the bubble
small.
"""


def greedy_orders(
    layout: Layout, windows: Sequence[int], split: Collection[int] = (), weight_windows: Sequence[int] = ()
) -> list[list[Action]]:
    """Return the computations of each slot, in order.

    Args:
        layout: Stages and slots.
        windows: By stage, the maximum number of microbatches of a slot between forward and backward.
        split: Stages whose backward (two units of time for a forward of one) is split into two halves, of which the
            second may be delayed.
        weight_windows: By stage, the maximum number of microbatches between forward and that second half.
    """
    return _Machine(layout, windows, split, weight_windows).play()


class _Slot:
    """State of one slot: what it has done, its limits, and its next action."""

    def __init__(self, layout: Layout, slot: int, window: int, weight_window: int) -> None:
        self.stage = stage = layout.stage_of(slot)
        self.pieces = [*layout.pieces(stage, slot), -1]
        self.count = len(self.pieces) - 1
        self.window = window
        self.weight_window = weight_window
        """0 if the backward is not split."""
        self.split = weight_window > 0
        self.size = len(layout.stages[stage])
        """Duration of a forward."""
        self.free = 0.0
        self.last = _WEIGHT
        self.forwards = self.backwards = self.weights = 0
        self.order: list[Action] = []
        self.start, self.kind = _NEVER, _FORWARD
        """Next action, as far as it is known; `start` is `_NEVER` if there is none."""


class _Machine:
    def __init__(
        self, layout: Layout, windows: Sequence[int], split: Collection[int], weight_windows: Sequence[int]
    ) -> None:
        last = len(layout.stages)
        later = [weight_windows[stage] if stage in split else 0 for stage in range(last)]
        stages = [layout.stage_of(slot) for slot in range(layout.world)]
        self.slots = [_Slot(layout, slot, windows[stage], later[stage]) for slot, stage in enumerate(stages)]
        self.turns = any(later)
        """Whether forward and backward take turns, also in stages whose backward is not split."""
        inner = [edge for edge in layout.edges if edge[0] >= 0 and edge[1] < last]
        inner_grads = [edge for edge in layout.grad_edges if edge in inner]
        self.forward_at = [[_NEVER] * layout.pieces_total for _ in range(last)]
        """When each stage ends the forward of each microbatch."""
        self.backward_at = [[_NEVER] * layout.pieces_total for _ in range(last)]
        self.values_of = [[self.forward_at[src] for src, dst in inner if dst == stage] for stage in range(last)]
        self.grads_of = [[self.backward_at[dst] for src, dst in inner_grads if src == stage] for stage in range(last)]
        for stage in range(last):
            self.grads_of[stage].append(self.forward_at[stage])
        self.readers = [[layout.slots_of(dst) for src, dst in inner if src == stage] for stage in range(last)]
        self.makers = [[layout.slots_of(src) for src, dst in inner_grads if dst == stage] for stage in range(last)]

    def play(self) -> list[list[Action]]:
        """Simulate until all computations are done."""
        slots = self.slots
        todo: list[tuple[float, int, int]] = []
        """(start, slot, number of actions that the slot had done when this entry was made)"""

        def look(number: int) -> None:
            slot = slots[number]
            self._decide(slot)
            if slot.start < _NEVER:
                heapq.heappush(todo, (slot.start, number, len(slot.order)))

        for number in range(len(slots)):
            look(number)
        while todo:
            start, number, done = heapq.heappop(todo)
            slot = slots[number]
            if done != len(slot.order) or start != slot.start:
                continue
            kind = slot.last = slot.kind
            if kind == _FORWARD:
                piece = slot.pieces[slot.forwards]
                slot.forwards += 1
                slot.free = self.forward_at[slot.stage][piece] = start + slot.size
                for others in self.readers[slot.stage]:
                    other = slots[others[piece]]
                    if other.pieces[other.forwards] == piece:
                        look(others[piece])
            elif kind == _BACKWARD:
                piece = slot.pieces[slot.backwards]
                slot.backwards += 1
                slot.free = self.backward_at[slot.stage][piece] = start + slot.size * (1 if slot.split else 2)
                for others in self.makers[slot.stage]:
                    other = slots[others[piece]]
                    if other.pieces[other.backwards] == piece:
                        look(others[piece])
            else:
                piece = slot.pieces[slot.weights]
                slot.weights += 1
                slot.free = start + slot.size
            slot.order.append(Action(_KINDS[kind], piece))
            look(number)
        return [slot.order for slot in slots]

    def _decide(self, slot: _Slot) -> None:
        """Determine the slot's next action and its start."""
        free, forwards, backwards = slot.free, slot.forwards, slot.backwards
        backward = forward = weight = _NEVER
        if backwards < forwards:
            piece, backward = slot.pieces[backwards], free
            for done in self.grads_of[slot.stage]:
                if done[piece] > backward:
                    backward = done[piece]
        full = slot.split and forwards - slot.weights >= slot.weight_window
        if forwards < slot.count and forwards - backwards < slot.window and not full:
            piece, forward = slot.pieces[forwards], free
            for done in self.values_of[slot.stage]:
                if done[piece] > forward:
                    forward = done[piece]
        if not slot.split:
            turn = self.turns and slot.last == _BACKWARD and forward <= backward
            slot.start, slot.kind = (backward, _BACKWARD) if backward <= forward and not turn else (forward, _FORWARD)
            return
        waiting = backwards - slot.weights
        if waiting:
            weight = free
        starts = (backward, forward, weight)
        slot.start = min(starts)
        turns = _TURNS[slot.last][waiting > slot.weight_window - slot.window]
        slot.kind = next(kind for kind in turns if starts[kind] == slot.start)
