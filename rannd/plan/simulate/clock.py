"""Simulates when each computation and each transfer of a Program begins and ends.

It models the runtime (docs/schedules.md). A slot computes in the Program's order. A message is sent when its values are
computed, without blocking the sender; messages of one pair and direction share a link one after the other. A slot waits
for a message where it needs it: at the computation that uses it, or at the end of the phase if it is for the rank. So
transfers overlap with computing.

All times are sums and maxima of earlier ones, so the order in which slots are visited does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rannd.errors import PlanError
from rannd.plan.schedule.program import NOWHERE, Action, ActionKind, Edge, Layout, Program
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, Event


class Played(msgspec.Struct):
    """Times of a step on each slot, without reductions. Microseconds."""

    ends: list[float]
    """End of the last computation and the last receive."""
    busy: list[float]
    """Time spent in computations."""
    last: list[list[tuple[float, float]]]
    """Start and end of the last computation of parameter gradients, for each of the slot's stages."""
    links: list[dict[int, float]]
    """End of the last message to each receiver."""
    events: list[Event]
    """Recorded events; empty unless requested."""


def play(program: Program, costs: StepCosts, *, record: bool = False) -> Played:
    """Simulate one step of `program`; PlanError if it deadlocks."""
    return _Clock(program, costs).play(record=record)


_Send = tuple[int, int, float]
"""(message, receiver, microseconds on the link)"""
_Step = tuple[float, Sequence[int], list[_Send], Action | None, int]
"""(microseconds, messages it waits for, messages sent afterwards, computation, number of its stage among the slot's)

No computation: only a wait."""


class _Clock:
    def __init__(self, program: Program, costs: StepCosts) -> None:
        self.program, self.costs = program, costs
        self.layout = layout = program.layout
        self.total = layout.pieces_total
        self.numbers = {edge: 2 * number for number, edge in enumerate(layout.edges)}
        """A message is numbered (number of its edge, + 1 for gradients) * microbatches + microbatch."""
        self.near = _prices(layout, costs.values_us, costs.grads_us)
        self.far = self.near
        if costs.far_values_us is not None or costs.far_grads_us is not None:
            self.far = _prices(layout, costs.far_values_us or costs.values_us, costs.far_grads_us or costs.grads_us)
        self.nodes = costs.nodes or (0,) * layout.slot_count
        self.handling = [costs.host_us] * (2 * len(self.numbers))
        """What a message of each kind takes of the host at each of its ends, by its number."""
        if costs.byte_us:
            sizes = _prices(layout, costs.values_bytes, costs.grads_bytes)
            self.handling = [costs.host_us + costs.byte_us * nbytes for nbytes in sizes]

    def play(self, *, record: bool) -> Played:
        world = self.layout.slot_count
        steps = [self._steps(slot) for slot in range(world)]
        places = [0] * world
        clocks, busy = [0.0] * world, [0.0] * world
        last = [[(0.0, 0.0)] * self.layout.virtual_stages for _ in range(world)]
        arrivals = [-1.0] * (2 * len(self.numbers) * self.total)
        links: list[dict[int, float]] = [{} for _ in range(world)]
        waiting: dict[int, int] = {}
        events: list[Event] = []
        ready = list(range(world))
        while ready:
            slot = ready.pop()
            own, place, clock, link = steps[slot], places[slot], clocks[slot], links[slot]
            while place < len(own):
                us, needs, sends, action, number = own[place]
                start = clock
                for message in needs:
                    arrival = arrivals[message]
                    if arrival < 0.0:
                        waiting[message] = slot
                        break
                    if arrival > start:
                        start = arrival
                else:
                    clock = start + us
                    if action is not None:
                        busy[slot] += us
                        if action.kind is not ActionKind.FORWARD:
                            last[slot][number] = start, clock
                        if record:
                            events.append(Event(slot, COMPUTE, start, us, str(action)))
                    for message, receiver, takes in sends:
                        begin = link.get(receiver, 0.0)
                        if begin < clock:
                            begin = clock
                        link[receiver] = arrivals[message] = begin + takes
                        if message in waiting:
                            ready.append(waiting.pop(message))
                        if record:
                            events.append(Event(receiver, RECEIVE, begin, takes, self._name(message, slot)))
                    place += 1
                    continue
                break
            places[slot], clocks[slot] = place, clock
        if waiting:
            texts = ", ".join(f"slot {slot} at {self._name(message)}" for message, slot in waiting.items())
            raise PlanError(f"the program never ends: {texts} waits for a message that is never sent")
        return Played(clocks, busy, last, links, events)

    def _steps(self, slot: int) -> list[_Step]:
        """Translate the actions of a slot into steps of numbers: durations, messages needed, messages sent."""
        program, costs, total, numbers = self.program, self.costs, self.total, self.numbers
        actions, border = program.slots[slot], program.forward_length[slot]
        nodes = self.nodes
        # A slot that only stands for a rank (`LayoutPart.ranks`) computes nothing.
        stages = self.layout.stages_of(slot) if slot < self.layout.world else ()
        alone = stages[0] if stages else NOWHERE
        forward = {stage: costs.forward_us[stage] for stage in stages}
        backward = {stage: costs.backward_us[stage] for stage in stages}
        for stage in {self.layout.stage_at(slot, action) for action in actions if action.kind is ActionKind.WEIGHT}:
            backward[stage] -= costs.weight_us[stage]
        sends: list[_Send] = []
        steps: list[_Step] = [(0.0, (), sends, None, 0)]
        values: dict[tuple[int, int], list[int]] = {}
        """Messages that were received for a stage and microbatch."""
        grads: dict[tuple[int, int], list[int]] = {}
        late: list[int] = []
        """Messages for the rank: waited for at the end of the phase."""
        for place, action in enumerate(actions):
            if place == border:
                sends = []
                steps.append((0.0, late, sends, None, 0))
                late = []
            kind, piece = action.kind, action.piece
            stage = action.stage if action.stage != NOWHERE else alone
            if kind is ActionKind.FORWARD:
                sends = []
                steps.append((forward[stage], values.pop((stage, piece), ()), sends, action, stages.index(stage)))
            elif kind is ActionKind.BACKWARD:
                sends = []
                steps.append((backward[stage], grads.pop((stage, piece), ()), sends, action, stages.index(stage)))
            elif kind is ActionKind.SEND_VALUES or kind is ActionKind.SEND_GRADS:
                number = numbers[action.src, action.dst] + (kind is ActionKind.SEND_GRADS)
                prices = self.near if nodes[slot] == nodes[action.peer] else self.far
                sends.append((number * total + piece, action.peer, prices[number]))
            elif kind is ActionKind.RECV_VALUES:
                message = numbers[action.src, action.dst] * total + piece
                (values.setdefault((action.dst, piece), []) if action.dst in stages else late).append(message)
            elif kind is ActionKind.RECV_GRADS:
                message = (numbers[action.src, action.dst] + 1) * total + piece
                (grads.setdefault((action.src, piece), []) if action.src in stages else late).append(message)
            elif kind is ActionKind.WEIGHT:
                sends = []
                steps.append((costs.weight_us[stage], (), sends, action, stages.index(stage)))
        for left in (*values.values(), *grads.values()):
            late += left
        steps.append((0.0, late, [], None, 0))
        if not costs.host_us and not costs.byte_us:
            return steps
        return [
            (us + self._host_us(needs, sent) + costs.host_us * (action is not None), needs, sent, action, number)
            for us, needs, sent, action, number in steps
        ]

    def _host_us(self, needs: Sequence[int], sent: Sequence[_Send]) -> float:
        """Return what the messages of a step take of the host."""
        messages = [*needs, *(message for message, _, _ in sent)]
        return sum(self.handling[message // self.total] for message in messages)

    def _name(self, message: int, sender: int | None = None) -> str:
        """Return the text of the action that receives a message."""
        number, piece = divmod(message, self.total)
        edge = self.layout.edges[number // 2]
        if sender is None:
            sender = self.layout.slot_of(edge[number % 2], piece)
        return str(Action(ActionKind.RECV_GRADS if number % 2 else ActionKind.RECV_VALUES, piece, *edge, sender))


def _prices(layout: Layout, values: Mapping[Edge, float], grads: Mapping[Edge, float]) -> list[float]:
    """Return the transfer time of each message kind, by its number."""
    return [us for edge in layout.edges for us in (values[edge], grads.get(edge, 0.0))]
