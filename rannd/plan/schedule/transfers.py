"""Builds a Program from the order of computations: inserts transfers and reductions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rannd.errors import PlanError
from rannd.plan.schedule.program import Action, ActionKind, Edge, Layout, Program


def with_transfers(layout: Layout, orders: Sequence[Sequence[Action]], *, interleaved: bool) -> Program:
    """Return the Program in which each slot computes what `orders` says, in that order.

    Forward phase of a slot: transfers of inputs; for each computation, receives from other stages (activations by src,
    gradients by dst), the computation, sends to other stages; transfers of outputs. Backward phase: gradients of
    outputs;
    computations as before; gradients of inputs. Then one reduction for each set of stages that includes the slot's
    stage.
    Transfers at the ends of a phase come in the order of microbatches, which all slots share. Where slots have several
    stages, a slot receives what another one sends in the order in which that one sends it.

    Args:
        layout: Stages, slots and edges.
        orders: Computations of each slot.
        interleaved: Backward belongs to the forward phase, because it needs nothing from the ranks; then outputs come
            last.

    Raises:
        PlanError: `interleaved`, but there are edges for gradients of outputs.
    """
    last = len(layout.stages)
    if interleaved and any(edge[1] == last for edge in layout.grad_edges):
        raise PlanError(f"gradients of outputs are sent over {layout.grad_edges}; an interleaved step has none")
    slots: list[list[Action]] = [[] for _ in range(layout.slot_count)]
    around = _Around(layout, orders)
    around.at_ranks(slots, [edge for edge in layout.edges if edge[0] < 0], gradient=False)
    for slot, order in enumerate(orders):
        around.compute(
            slots, slot, order if interleaved else [each for each in order if each.kind is ActionKind.FORWARD]
        )
    around.at_ranks(slots, [edge for edge in layout.edges if edge[1] == last], gradient=False)
    forward_length = [len(actions) for actions in slots]
    if not interleaved:
        around.at_ranks(slots, [edge for edge in layout.grad_edges if edge[1] == last], gradient=True)
        for slot, order in enumerate(orders):
            around.compute(slots, slot, [each for each in order if each.kind is not ActionKind.FORWARD])
    around.at_ranks(slots, [edge for edge in layout.grad_edges if edge[0] < 0], gradient=True)
    for stages in layout.reductions:
        action = layout.reduction(stages)
        for slot in dict.fromkeys(slot for stage in stages for slot in layout.stages[stage]):
            slots[slot].append(action)
    if interleaved:
        forward_length = [len(actions) for actions in slots]
    return Program(layout, tuple(tuple(actions) for actions in slots), tuple(forward_length))


_Way = tuple[Edge, list[int]]
"""An edge, and for each microbatch the slot at its other end."""


class _Around:
    """Inserts transfers before and after the computations of a layout."""

    def __init__(self, layout: Layout, orders: Sequence[Sequence[Action]]) -> None:
        self._layout = layout
        last = len(layout.stages)

        def ways(edges: Sequence[Edge], here: int) -> list[list[_Way]]:
            """Group the edges between stages by the stage at their end number `here`."""
            inner = [edge for edge in edges if edge[0] >= 0 and edge[1] < last]
            return [
                [(edge, layout.slots_of(edge[1 - here])) for edge in inner if edge[here] == stage]
                for stage in range(last)
            ]

        self._values_in, self._values_out = ways(layout.edges, 1), ways(layout.edges, 0)
        self._grads_in, self._grads_out = ways(layout.grad_edges, 0), ways(layout.grad_edges, 1)
        self._unread: dict[tuple[int, int, bool], deque[tuple[Edge, int]]] = {}
        """Messages that are not received yet, by sender, receiver and whether they are gradients; filled only if slots
        have several stages. Otherwise a pair has one edge in each direction, and the same order on both sides."""
        for slot, order in enumerate(orders if layout.virtual_stages > 1 else ()):
            for action in order:
                if action.kind is not ActionKind.WEIGHT:
                    gradient = action.kind is ActionKind.BACKWARD
                    ways_out = (self._grads_out if gradient else self._values_out)[layout.stage_at(slot, action)]
                    for edge, others in ways_out:
                        wire = (slot, others[action.piece], gradient)
                        self._unread.setdefault(wire, deque()).append((edge, action.piece))

    def compute(self, slots: list[list[Action]], slot: int, order: Sequence[Action]) -> None:
        """Append the computations of `slot`, each with its transfers to and from other stages."""
        actions = slots[slot]
        receive = self._receive if self._layout.virtual_stages > 1 else _move
        for action in order:
            piece, stage = action.piece, self._layout.stage_at(slot, action)
            if action.kind is ActionKind.FORWARD:
                receive(actions, ActionKind.RECV_VALUES, self._values_in[stage], piece, slot)
                actions.append(action)
                _move(actions, ActionKind.SEND_VALUES, self._values_out[stage], piece, slot)
            elif action.kind is ActionKind.BACKWARD:
                receive(actions, ActionKind.RECV_GRADS, self._grads_in[stage], piece, slot)
                actions.append(action)
                _move(actions, ActionKind.SEND_GRADS, self._grads_out[stage], piece, slot)
            else:
                actions.append(action)

    def _receive(self, actions: list[Action], kind: ActionKind, ways: Sequence[_Way], piece: int, slot: int) -> None:
        """Receive a microbatch's messages, and before them those that their senders sent earlier."""
        for edge, others in ways:
            sender = others[piece]
            unread = self._unread.get((sender, slot, kind is ActionKind.RECV_GRADS))
            while sender != slot and unread and (edge, piece) in unread:
                (src, dst), earlier = unread.popleft()
                actions.append(Action(kind, earlier, src, dst, sender))

    def at_ranks(self, slots: list[list[Action]], edges: Sequence[Edge], *, gradient: bool) -> None:
        """Append the transfers of all microbatches over edges from or to the ranks."""
        send, receive = (
            (ActionKind.SEND_GRADS, ActionKind.RECV_GRADS)
            if gradient
            else (ActionKind.SEND_VALUES, ActionKind.RECV_VALUES)
        )
        layout = self._layout
        ways = [(edge, layout.slots_of(edge[gradient]), layout.slots_of(edge[not gradient])) for edge in edges]
        for piece in range(layout.pieces_total if ways else 0):
            for (src, dst), senders, receivers in ways:
                sender, receiver = senders[piece], receivers[piece]
                if sender != receiver:
                    slots[sender].append(Action(send, piece, src, dst, receiver))
                    slots[receiver].append(Action(receive, piece, src, dst, sender))


def _move(actions: list[Action], kind: ActionKind, ways: Sequence[_Way], piece: int, slot: int) -> None:
    for (src, dst), others in ways:
        if others[piece] != slot:
            actions.append(Action(kind, piece, src, dst, others[piece]))
