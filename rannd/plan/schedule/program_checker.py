"""Model checker for Programs: verifies that a Program can be run on tensors.

It is independent of the schedules: it knows what a step has to do, not how a schedule orders it.
"""

from __future__ import annotations

from collections import defaultdict, deque

from rannd.errors import PlanError
from rannd.plan.schedule.program import NOWHERE, SENDS, TRANSFERS, Action, ActionKind, Edge, Layout, Program

_FORWARD_KINDS = frozenset({ActionKind.FORWARD, ActionKind.SEND_VALUES, ActionKind.RECV_VALUES})
_Move = tuple[int, int, bool, Edge, int]
"""A transfer as both of its slots see it: sender, receiver, whether it is a gradient, edge, microbatch."""


def check(program: Program) -> None:
    """Check that `program` executes exactly one whole step.

    Checked:

    - Forward actions are in the forward phase and no others are, unless all are.
    - Every microbatch runs forward and backward once in every stage, on the replica that it is assigned to. If a
      stage's
      backward is split, the second half follows for every microbatch, so every gradient is computed once.
    - Every activation and gradient that has to move moves once, between the right slots, after it is computed and
      before
      it is used.
    - After all gradients each slot reduces once with the replicas of its stage and once with each set of stages that it
      shares parameters with, in one order on all slots.
    - The transfers of a pair of slots come in the same order on both sides, within the forward and within the backward
      group (NCCL requires it). Where slots have several stages, a pair sends values both ways: then within each
      direction of a group, so that whoever runs such a Program needs a process group for each.
    - The program terminates if each slot runs its list in order, sends do not block, and receives wait for the oldest
      unread message of that sender and group (gloo and NCCL deliver in that order).

    Raises:
        PlanError: A check fails; the message names slot and action.
    """
    layout = program.layout
    if len(program.slots) != layout.world or len(program.forward_length) != layout.world:
        raise PlanError(f"program for {len(program.slots)} slots in a world of {layout.world}")
    interleaved = program.interleaved
    for slot in range(layout.world):
        _check_phases(program, slot, interleaved=interleaved)
        _check_reductions(layout, slot, program.slots[slot])
    _check_complete(program)
    _check_pair_orders(program)
    _Run(program).play()


def _check_phases(program: Program, slot: int, *, interleaved: bool) -> None:
    border = program.forward_length[slot]
    for place, action in enumerate(program.slots[slot] if not interleaved else ()):
        if (action.kind in _FORWARD_KINDS) != (place < border):
            raise PlanError(f"slot {slot}: {action} at place {place} is in the wrong phase (forward ends at {border})")


def _check_reductions(layout: Layout, slot: int, actions: tuple[Action, ...]) -> None:
    """Check that reductions are the slot's last actions, and the same on all slots that take part."""
    own = set(layout.stages_of(slot))
    wanted = [layout.reduction(stages) for stages in layout.reductions if own & set(stages)]
    found = [action for action in actions if action.kind is ActionKind.REDUCE]
    if found != wanted or list(actions[-len(wanted) :]) != wanted:
        raise PlanError(
            f"slot {slot}: a program ends with its reductions, here {' '.join(map(str, wanted))}; this one has "
            f"{' '.join(map(str, found)) or 'none'} and ends with {' '.join(map(str, actions[-len(wanted) :]))}"
        )


def _check_complete(program: Program) -> None:
    """Check that each slot has all its actions and no others, each once."""
    layout = program.layout
    split = {
        layout.stage_at(slot, action)
        for slot, actions in enumerate(program.slots)
        for action in actions
        if action.kind is ActionKind.WEIGHT
    }
    wanted: list[set[Action]] = []
    for slot in range(layout.world):
        wanted.append(set())
        for stage in layout.stages_of(slot):
            kinds = (ActionKind.FORWARD, ActionKind.BACKWARD, *((ActionKind.WEIGHT,) if stage in split else ()))
            wanted[slot] |= {
                layout.computation(kind, piece, stage) for kind in kinds for piece in layout.pieces(stage, slot)
            }
    for edges, send, receive in (
        (layout.edges, ActionKind.SEND_VALUES, ActionKind.RECV_VALUES),
        (layout.grad_edges, ActionKind.RECV_GRADS, ActionKind.SEND_GRADS),
    ):
        for edge in edges:
            for piece, (src, dst) in enumerate(zip(layout.slots_of(edge[0]), layout.slots_of(edge[1]), strict=True)):
                if src != dst:
                    wanted[src].add(Action(send, piece, *edge, dst))
                    wanted[dst].add(Action(receive, piece, *edge, src))
    for slot, actions in enumerate(program.slots):
        found: set[Action] = set()
        extra = []
        for action in actions:
            if action.kind is ActionKind.REDUCE:
                continue
            if action in found or action not in wanted[slot]:
                extra.append(str(action))
            found.add(action)
        missing = sorted(map(str, wanted[slot] - found))
        if missing or extra:
            raise PlanError(
                f"slot {slot} of stage {', '.join(map(str, layout.stages_of(slot)))}: missing {missing[:5]}, "
                f"too much or wrong {sorted(extra)[:5]}"
            )


def _check_pair_orders(program: Program) -> None:
    """Check that both slots of a pair list the same transfers, of both directions, in the same order."""
    seen: dict[tuple[int, int, bool, int], list[_Move]] = defaultdict(list)
    apart = program.layout.virtual_stages > 1
    for slot, actions in enumerate(program.slots):
        for action in actions:
            if action.kind in TRANSFERS:
                move = _move(slot, action)
                seen[slot, action.peer, move[2], move[0] if apart else NOWHERE].append(move)
    for (slot, peer, gradient, sender), moves in seen.items():
        others = seen.get((peer, slot, gradient, sender), [])
        if moves != others:
            place = next((at for at, (a, b) in enumerate(zip(moves, others, strict=False)) if a != b), 0)
            group = "backward" if gradient else "forward"
            raise PlanError(
                f"slots {slot} and {peer} disagree about transfer {place} of the {group} group: "
                f"{moves[place : place + 1]} and {others[place : place + 1]}"
            )


def _move(slot: int, action: Action) -> _Move:
    sender, receiver = (slot, action.peer) if action.kind in SENDS else (action.peer, slot)
    gradient = action.kind in (ActionKind.SEND_GRADS, ActionKind.RECV_GRADS)
    return sender, receiver, gradient, (action.src, action.dst), action.piece


class _Run:
    """Executes a program without tensors and tracks which values each slot has."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.layout = layout = program.layout
        self.done: set[tuple[ActionKind, int, int]] = set()
        """(kind of computation, stage, microbatch)"""
        self.received: set[tuple[int, bool, Edge, int]] = set()
        self.wires: dict[tuple[int, int, bool], deque[tuple[Edge, int]]] = defaultdict(deque)
        """Messages sent and not yet received, by sender, receiver, gradient."""
        last = len(layout.stages)
        self.values_of = [[edge for edge in layout.edges if edge[1] == stage] for stage in range(last)]
        self.grads_of = [[edge for edge in layout.grad_edges if edge[0] == stage] for stage in range(last)]

    def play(self) -> None:
        """Raise PlanError if the program uses what a slot does not have, deadlocks, or leaves a message unreceived."""
        slots = self.program.slots
        places = [0] * len(slots)
        waiting: dict[tuple[int, int, bool], int] = {}
        """The slot that waits for a message of this sender, receiver and group."""
        ready = list(range(len(slots)))
        while ready:
            slot = ready.pop()
            actions = slots[slot]
            while places[slot] < len(actions):
                action = actions[places[slot]]
                if action.kind in TRANSFERS:
                    gradient = action.kind in (ActionKind.SEND_GRADS, ActionKind.RECV_GRADS)
                    if action.kind in SENDS:
                        self._send(slot, action, gradient=gradient)
                        wire = (slot, action.peer, gradient)
                        if wire in waiting:
                            ready.append(waiting.pop(wire))
                    elif not self._receive(slot, action, gradient=gradient):
                        waiting[action.peer, slot, gradient] = slot
                        break
                elif action.kind is not ActionKind.REDUCE:  # reductions come last on every slot: no wait
                    self._compute(slot, action)
                places[slot] += 1
        stuck = [
            f"slot {slot} at {actions[place]}"
            for slot, (actions, place) in enumerate(zip(slots, places, strict=True))
            if place < len(actions)
        ]
        if stuck:
            raise PlanError(f"the program never ends: {', '.join(stuck)} waits for a message that is never sent")
        left = {wire: list(messages) for wire, messages in self.wires.items() if messages}
        if left:
            raise PlanError(f"messages that are never received: {left}")

    def _has(self, slot: int, piece: int, edge: Edge, *, gradient: bool) -> bool:
        """Whether `slot` has what `edge` transfers (activations at dst, gradients at src)."""
        other = edge[1] if gradient else edge[0]
        if self.layout.slot_of(other, piece) != slot:
            return (slot, gradient, edge, piece) in self.received
        virtual = other in (-1, len(self.layout.stages))
        return virtual or (ActionKind.BACKWARD if gradient else ActionKind.FORWARD, other, piece) in self.done

    def _compute(self, slot: int, action: Action) -> None:
        stage, piece = self.layout.stage_at(slot, action), action.piece
        if action.kind is ActionKind.FORWARD:
            needed = all(self._has(slot, piece, edge, gradient=False) for edge in self.values_of[stage])
        elif action.kind is ActionKind.BACKWARD:
            needed = (ActionKind.FORWARD, stage, piece) in self.done and all(
                self._has(slot, piece, edge, gradient=True) for edge in self.grads_of[stage]
            )
        else:
            needed = (ActionKind.BACKWARD, stage, piece) in self.done
        self._expect(needed, slot, action)
        self.done.add((action.kind, stage, piece))

    def _send(self, slot: int, action: Action, *, gradient: bool) -> None:
        at_rank = action.dst == len(self.layout.stages) if gradient else action.src == -1
        maker = action.dst if gradient else action.src
        made = (ActionKind.BACKWARD if gradient else ActionKind.FORWARD, maker, action.piece)
        self._expect(at_rank or made in self.done, slot, action)
        self.wires[slot, action.peer, gradient].append(((action.src, action.dst), action.piece))

    def _receive(self, slot: int, action: Action, *, gradient: bool) -> bool:
        """Receive a message; False if there is none yet."""
        wire, edge = self.wires[action.peer, slot, gradient], (action.src, action.dst)
        if not wire:
            return False
        if wire[0] != (edge, action.piece):
            raise PlanError(f"slot {slot}: {action} finds {wire[0]} (edge, piece) of slot {action.peer} first")
        wire.popleft()
        self.received.add((slot, gradient, edge, action.piece))
        return True

    def _expect(self, holds: bool, slot: int, action: Action) -> None:
        if not holds:
            raise PlanError(f"slot {slot}: {action} uses a value that it does not have yet")
