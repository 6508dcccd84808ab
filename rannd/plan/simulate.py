"""A clock and a memory meter for Programs: what E only estimates, played action by action.

The machine it plays: a slot does its actions in order. Sends cost the sender nothing. A receive waits for its
send, then takes the link's time; a slot receives one message at a time. Transfers that follow each other are
posted together, so none of a slot's receives holds up a send behind it. A reduction starts when all replicas of
the stage have reached it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rannd.errors import PlanError
from rannd.plan.schedule import SENDS, TRANSFERS, Action, Edge, Kind, Program


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What the actions of a Program cost: microseconds and bytes, by stage and by edge."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    """With the forward once more where the stage recomputes."""
    reduce_us: tuple[float, ...]
    values_us: Mapping[Edge, float]
    grads_us: Mapping[Edge, float]
    kept_bytes: tuple[int, ...]
    """Kept of a piece from its forward to its backward."""
    working_bytes: tuple[int, ...]
    """Needed on top while a forward or backward runs."""


class Simulation(msgspec.Struct, frozen=True):
    """What a simulated step took, by slot."""

    step_us: float
    busy_us: tuple[float, ...]
    """Forwards and backwards."""
    idle_us: tuple[float, ...]
    """The rest of the step: waiting, transfers, reductions."""
    peak_bytes: tuple[int, ...]
    """Most activation bytes at a time."""

    @property
    def bubble(self) -> float:
        """Part of all slots' time that is not spent in forwards and backwards."""
        return sum(self.idle_us) / (self.step_us * len(self.idle_us)) if self.step_us > 0 else 0.0


def simulate(program: Program, costs: StepCosts) -> Simulation:
    """Play one step of `program`. PlanError where it would wait for ever."""
    return _Machine(program, costs).play()


class _Machine:
    def __init__(self, program: Program, costs: StepCosts) -> None:
        self.program, self.costs = program, costs
        world = program.layout.world
        self.stage = [program.layout.stage_of(slot) for slot in range(world)]
        self.clock = [0.0] * world
        self.busy = [0.0] * world
        self.kept = [0] * world
        self.peak = [0] * world
        self.place = [0] * world
        self.posted_to = [0] * world
        """Actions of each slot before this place are no sends that wait to be posted."""
        self.sent_at: dict[tuple[Kind, int, Edge], float] = {}
        self.reached: dict[int, list[int]] = {stage: [] for stage in range(len(program.layout.stages))}

    def play(self) -> Simulation:
        waiting: dict[tuple[Kind, int, Edge], int] = {}
        ready = list(range(self.program.layout.world))
        while ready:
            slot = ready.pop()
            actions = self.program.slots[slot]
            while self.place[slot] < len(actions):
                action = actions[self.place[slot]]
                if action.kind in TRANSFERS:
                    for key in self._post(slot):
                        if key in waiting:
                            ready.append(waiting.pop(key))
                    if action.kind not in SENDS and not self._receive(slot, action):
                        waiting[_sent(action)] = slot
                        break
                elif action.kind is Kind.REDUCE:
                    self._reduce(slot)
                else:
                    self._compute(slot, action)
                self.place[slot] += 1
        if waiting:
            texts = ", ".join(
                f"slot {slot} at {self.program.slots[slot][self.place[slot]]}" for slot in waiting.values()
            )
            raise PlanError(f"the program never ends: {texts} waits for a message that nobody sends before")
        step = max(self.clock)
        return Simulation(step, tuple(self.busy), tuple(step - busy for busy in self.busy), tuple(self.peak))

    def _post(self, slot: int) -> list[tuple[Kind, int, Edge]]:
        """Post the sends of the run of transfers that the slot has reached, all at once."""
        actions, place = self.program.slots[slot], self.place[slot]
        posted = []
        if self.posted_to[slot] <= place:
            while place < len(actions) and actions[place].kind in TRANSFERS:
                action = actions[place]
                if action.kind in SENDS:
                    key = (action.kind, action.piece, (action.src, action.dst))
                    self.sent_at[key] = self.clock[slot]
                    posted.append(key)
                place += 1
            self.posted_to[slot] = place
        return posted

    def _receive(self, slot: int, action: Action) -> bool:
        sent = self.sent_at.get(_sent(action))
        if sent is None:
            return False
        edge = (action.src, action.dst)
        takes = self.costs.values_us if action.kind is Kind.RECV_VALUES else self.costs.grads_us
        self.clock[slot] = max(self.clock[slot], sent) + takes[edge]
        return True

    def _compute(self, slot: int, action: Action) -> None:
        stage = self.stage[slot]
        forward = action.kind is Kind.FORWARD
        took = self.costs.forward_us[stage] if forward else self.costs.backward_us[stage]
        self.clock[slot] += took
        self.busy[slot] += took
        if forward:
            self.kept[slot] += self.costs.kept_bytes[stage]
        self.peak[slot] = max(self.peak[slot], self.kept[slot] + self.costs.working_bytes[stage])
        if not forward:
            self.kept[slot] -= self.costs.kept_bytes[stage]

    def _reduce(self, slot: int) -> None:
        stage = self.stage[slot]
        self.reached[stage].append(slot)
        if len(self.reached[stage]) == len(self.program.layout.stages[stage]):
            end = max(self.clock[each] for each in self.reached[stage]) + self.costs.reduce_us[stage]
            for each in self.reached[stage]:
                self.clock[each] = end


def _sent(action: Action) -> tuple[Kind, int, Edge]:
    """The send that a receive waits for."""
    kind = Kind.SEND_VALUES if action.kind is Kind.RECV_VALUES else Kind.SEND_GRADS
    return kind, action.piece, (action.src, action.dst)
