"""Model checker for Programs: what must hold before one is run on tensors.

Written apart from the schedules it checks: it knows what a step has to do, not how a schedule orders it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from rannd.errors import PlanError
from rannd.plan.schedule import SENDS, TRANSFERS, Action, Edge, Kind, Layout, Program

_FORWARD_KINDS = frozenset({Kind.FORWARD, Kind.SEND_VALUES, Kind.RECV_VALUES})
_Move = tuple[int, int, bool, Edge, int]
"""A transfer as both of its slots see it: sender, receiver, gradient, edge, piece."""


def check(program: Program) -> None:
    """PlanError that names slot and action where `program` would not do one whole step.

    Checked: forward kinds lie in the forward phase, and nothing else does, unless all does; every piece goes
    forward and backward once in every stage, on the replica that has it; every value and gradient that has to move
    moves once, between the right slots, after it was made and before it is used; one reduction ends each slot; the
    transfers of a pair of slots come in the same order on both sides within the forward and within the backward
    group (NCCL demands it); and the program ends when each slot runs its list in order, sends not waiting, receives
    waiting for the oldest unread message of that sender and group (gloo and NCCL deliver in that order).
    """
    layout = program.layout
    if len(program.slots) != layout.world or len(program.forward_length) != layout.world:
        raise PlanError(f"program for {len(program.slots)} slots in a world of {layout.world}")
    for slot in range(layout.world):
        _check_phases(program, slot)
        _check_complete(layout, slot, program.slots[slot])
    _check_pair_orders(program)
    _run(program)


def _check_phases(program: Program, slot: int) -> None:
    actions, border = program.slots[slot], program.forward_length[slot]
    for place, action in enumerate(actions):
        if not program.interleaved and (action.kind in _FORWARD_KINDS) != (place < border):
            raise PlanError(f"slot {slot}: {action} at place {place} is in the wrong phase (forward ends at {border})")
    if [action.kind for action in actions].count(Kind.REDUCE) != 1 or actions[-1].kind is not Kind.REDUCE:
        raise PlanError(f"slot {slot}: a program ends with its one reduction, this one with {actions[-1:]}")


def _check_complete(layout: Layout, slot: int, actions: tuple[Action, ...]) -> None:
    """The slot does all it has to and nothing else, each once."""
    stage = layout.stage_of(slot)
    wanted = [Action(kind, piece) for kind in (Kind.FORWARD, Kind.BACKWARD) for piece in layout.pieces(stage, slot)]
    for edges, send, receive in (
        (layout.edges, Kind.SEND_VALUES, Kind.RECV_VALUES),
        (layout.grad_edges, Kind.RECV_GRADS, Kind.SEND_GRADS),
    ):
        for edge in edges:
            for piece in range(layout.pieces_total):
                src, dst = layout.slot_of(edge[0], piece), layout.slot_of(edge[1], piece)
                if src != dst and src == slot:
                    wanted.append(Action(send, piece, *edge, dst))
                if src != dst and dst == slot:
                    wanted.append(Action(receive, piece, *edge, src))
    wanted.append(Action(Kind.REDUCE))
    left, found = Counter(map(str, wanted)), Counter(map(str, actions))
    missing, extra = sorted((left - found).elements()), sorted((found - left).elements())
    if missing or extra:
        raise PlanError(f"slot {slot} of stage {stage}: missing {missing[:5]}, too much or wrong {extra[:5]}")


def _check_pair_orders(program: Program) -> None:
    """Both slots of a pair list the same moves, of both directions, in the same order."""
    seen: dict[tuple[int, int, bool], list[_Move]] = defaultdict(list)
    for slot, actions in enumerate(program.slots):
        for action in actions:
            if action.kind in TRANSFERS:
                move = _move(slot, action)
                seen[slot, action.peer, move[2]].append(move)
    for (slot, peer, gradient), moves in seen.items():
        others = seen.get((peer, slot, gradient), [])
        if moves != others:
            place = next((at for at, (a, b) in enumerate(zip(moves, others, strict=False)) if a != b), 0)
            group = "backward" if gradient else "forward"
            raise PlanError(
                f"slots {slot} and {peer} disagree about transfer {place} of the {group} group: "
                f"{moves[place : place + 1]} and {others[place : place + 1]}"
            )


def _move(slot: int, action: Action) -> _Move:
    sender, receiver = (slot, action.peer) if action.kind in SENDS else (action.peer, slot)
    gradient = action.kind in (Kind.SEND_GRADS, Kind.RECV_GRADS)
    return sender, receiver, gradient, (action.src, action.dst), action.piece


class _State:
    """What is where while a program runs."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.forwarded: set[tuple[int, int]] = set()
        self.backwarded: set[tuple[int, int]] = set()
        self.received: set[tuple[int, bool, Edge, int]] = set()
        self.wires: dict[tuple[int, int, bool], deque[tuple[Edge, int]]] = defaultdict(deque)

    def has(self, slot: int, stage: int, piece: int, edge: Edge, *, gradient: bool) -> bool:
        """Whether `slot` has what comes over `edge` (values at dst, gradients at src)."""
        other = edge[1] if gradient else edge[0]
        if self.layout.slot_of(other, piece) != slot:
            return (slot, gradient, edge, piece) in self.received
        virtual = other in (-1, len(self.layout.stages))
        done = self.backwarded if gradient else self.forwarded
        return virtual or (slot, piece) in done

    def try_action(self, slot: int, action: Action) -> bool:
        """Do the action; False where it has to wait; PlanError where it uses what is not there."""
        stage, piece, edge = self.layout.stage_of(slot), action.piece, (action.src, action.dst)
        layout = self.layout
        needed: list[bool] = []
        if action.kind is Kind.FORWARD:
            needed = [self.has(slot, stage, piece, each, gradient=False) for each in layout.edges if each[1] == stage]
            self.forwarded.add((slot, piece))
        elif action.kind is Kind.BACKWARD:
            needed = [
                self.has(slot, stage, piece, each, gradient=True) for each in layout.grad_edges if each[0] == stage
            ]
            needed.append((slot, piece) in self.forwarded)
            self.backwarded.add((slot, piece))
        elif action.kind is Kind.SEND_VALUES:
            needed = [edge[0] == -1 or (slot, piece) in self.forwarded]
            self.wires[slot, action.peer, False].append((edge, piece))
        elif action.kind is Kind.SEND_GRADS:
            needed = [edge[1] == len(layout.stages) or (slot, piece) in self.backwarded]
            self.wires[slot, action.peer, True].append((edge, piece))
        elif action.kind in TRANSFERS:
            gradient = action.kind is Kind.RECV_GRADS
            wire = self.wires[action.peer, slot, gradient]
            if not wire:
                return False
            if wire[0] != (edge, piece):
                raise PlanError(f"slot {slot}: {action} finds {wire[0]} (edge, piece) of slot {action.peer} first")
            wire.popleft()
            self.received.add((slot, gradient, edge, piece))
        else:
            needed = [(slot, each) in self.backwarded for each in layout.pieces(stage, slot)]
        if not all(needed):
            raise PlanError(f"slot {slot}: {action} uses what is not there yet")
        return True


def _run(program: Program) -> None:
    state = _State(program.layout)
    places = [0] * len(program.slots)
    moving = True
    while moving:
        moving = False
        for slot, actions in enumerate(program.slots):
            while places[slot] < len(actions) and state.try_action(slot, actions[places[slot]]):
                places[slot] += 1
                moving = True
    stuck = [
        f"slot {slot} at {actions[place]}"
        for slot, (actions, place) in enumerate(zip(program.slots, places, strict=True))
        if place < len(actions)
    ]
    if stuck:
        raise PlanError(f"the program never ends: {', '.join(stuck)} waits for a message that nobody sends before")
    left = {wire: list(messages) for wire, messages in state.wires.items() if messages}
    if left:
        raise PlanError(f"messages that nobody receives: {left}")
