"""Programs: the actions of every slot in one step.

A *piece* is one microbatch of one rank: piece ``p = k * world + r`` is microbatch k of the mini-batch of rank r (here:
of the rank that is bound to slot r). Pieces are never merged or split: each runs through all stages, on one replica of
each. Stage -1 stands for the ranks as they provide the inputs, stage S (the number of stages) for the same ranks as
they receive the outputs; an *edge* (src, dst) means that activations go from stage src to stage dst.

``schedules`` makes Programs, ``program_text`` writes and reads them, ``program_checker`` verifies them, ``simulate``
runs them on costs, ``rannd.runtime.execution.executor`` runs them on tensors.
"""

from __future__ import annotations

import enum
import math
from functools import cached_property

import msgspec
import numpy as np

from rannd.errors import PlanError

Edge = tuple[int, int]

AHEAD = 2
"""Number of computations by which a receive is posted early."""


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Which slot runs which stage, which stages exchange activations, and which stages share parameters."""

    world: int
    """Number of slots, and of ranks."""
    microbatches: int
    """Microbatches per rank."""
    stages: tuple[tuple[int, ...], ...]
    """Slot of each replica of each stage; every slot is in one stage, or all are in equally many."""
    edges: tuple[Edge, ...]
    """(src stage, dst stage) pairs that carry activations, sorted; -1: inputs, number of stages: outputs."""
    grad_edges: tuple[Edge, ...]
    """The edges whose activations get gradients, sorted."""
    tied: tuple[tuple[int, ...], ...] = ()
    """Sets of stages that share a trainable parameter, sorted: its gradient is reduced over all their slots."""

    def __post_init__(self) -> None:
        last = len(self.stages)
        if self.world < 1 or self.microbatches < 1:
            raise PlanError(
                f"a layout of {self.world} slots and {self.microbatches} microbatches; both must be 1 or more"
            )
        used = sorted(slot for stage in self.stages for slot in stage)
        often = len(used) // self.world
        if used != [slot for slot in range(self.world) for _ in range(often)] or any(
            len(set(stage)) < len(stage) for stage in self.stages
        ):
            raise PlanError(
                f"stages {self.stages} do not use each of {self.world} slots once; only if all slots are in equally "
                "many stages, and no stage names one twice, may there be more than one stage a slot"
            )
        if not all(self.stages):
            raise PlanError(f"a stage without a slot in {self.stages}")
        wrong = [edge for edge in self.edges if not (-1 <= edge[0] < edge[1] <= last and edge != (-1, last))]
        if wrong or list(self.edges) != sorted(set(self.edges)):
            raise PlanError(f"edges {self.edges} are not sorted pairs of rising stages from -1 to {last}")
        if list(self.grad_edges) != sorted(set(self.grad_edges)) or not set(self.grad_edges) <= set(self.edges):
            raise PlanError(f"gradient edges {self.grad_edges} are not a sorted part of the edges {self.edges}")
        odd = [each for each in self.tied if len(each) < 2 or list(each) != sorted(set(each) & set(range(last)))]
        if odd or list(self.tied) != sorted(set(self.tied)):
            raise PlanError(f"tied stages {self.tied} are not sorted sets of two or more of stages 0 to {last - 1}")

    @property
    def slot_count(self) -> int:
        """Number of slots."""
        return self.world

    @cached_property
    def virtual_stages(self) -> int:
        """Number of stages of every slot: 1, or more where stages are interleaved."""
        return sum(map(len, self.stages)) // self.world

    @property
    def pieces_total(self) -> int:
        """Number of microbatches of all ranks in a step."""
        return self.world * self.microbatches

    def slot_of(self, stage: int, piece: int) -> int:
        """Return the slot that runs microbatch `piece` in `stage`; for stages -1 and S the slot of its rank.

        If all numbers of replicas are multiples of g, the job consists of g pipelines side by side, and ranks are
        assigned to
        them in order: a stage with as many replicas as ranks moves nothing. Within a pipeline the replicas of a stage
        take
        microbatches in turns, so that none waits while another has many at once.
        """
        microbatch, rank = divmod(piece, self.world)
        if stage in (-1, len(self.stages)):
            return rank
        pipeline, place = divmod(rank, self._ranks)
        turns = len(self.stages[stage]) // self.pipelines
        return self.stages[stage][pipeline * turns + (microbatch * self._ranks + place) % turns]

    @cached_property
    def pipelines(self) -> int:
        """Number of pipelines side by side that exchange nothing but gradients to reduce."""
        return math.gcd(*map(len, self.stages))

    @property
    def _ranks(self) -> int:
        """Ranks per pipeline."""
        return self.world // self.pipelines

    def slots_of(self, stage: int) -> list[int]:
        """Return `slot_of` for every microbatch."""
        return self._slots_of[stage]

    @cached_property
    def _slots_of(self) -> list[list[int]]:
        return self._by_stage()

    def _by_stage(self) -> list[list[int]]:
        """Return `slots_of` for each stage; the last entry, also index -1, is for the ranks."""
        microbatches, ranks = np.divmod(np.arange(self.pieces_total), self.world)
        pipelines, places = np.divmod(ranks, self._ranks)
        numbers = microbatches * self._ranks + places
        found = []
        for slots in self.stages:
            turns = len(slots) // self.pipelines
            found.append(np.array(slots)[pipelines * turns + numbers % turns].tolist())
        return [*found, ranks.tolist()]

    def stage_of(self, slot: int) -> int:
        """Return the stage that `slot` belongs to.

        Raises:
            PlanError: The slot has several.
        """
        found = self._stages_of[slot]
        if len(found) > 1:
            raise PlanError(f"slot {slot} has the stages {found}, where one is expected")
        return found[0]

    def stages_of(self, slot: int) -> tuple[int, ...]:
        """Return the stages that `slot` runs, ascending."""
        return self._stages_of[slot]

    @cached_property
    def _stages_of(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[] for _ in range(self.world)]
        for stage, slots in enumerate(self.stages):
            for slot in slots:
                found[slot].append(stage)
        return [tuple(each) for each in found]

    @cached_property
    def _replica_of(self) -> dict[tuple[int, int], int]:
        """Index of the replica of each (stage, slot)."""
        return {(stage, slot): replica for stage, slots in enumerate(self.stages) for replica, slot in enumerate(slots)}

    def pieces(self, stage: int, slot: int) -> tuple[int, ...]:
        """Return the microbatches that `slot` runs in `stage`, ascending; a slot always runs them in this order."""
        if stage in (-1, len(self.stages)):
            return tuple(range(slot, self.pieces_total, self.world))
        replica = self._replica_of.get((stage, slot))
        if replica is None:
            return ()
        turns = len(self.stages[stage]) // self.pipelines
        pipeline, turn = divmod(replica, turns)
        numbers = range(turn, self._ranks * self.microbatches, turns)
        return tuple(
            microbatch * self.world + pipeline * self._ranks + place
            for microbatch, place in (divmod(number, self._ranks) for number in numbers)
        )

    @cached_property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """Sets of stages whose slots reduce gradients together: each stage alone, and tied stages.

        Sorted; descending if slots have several stages, because the gradients of the later ones are complete first.
        """
        sets = [*((stage,) for stage in range(len(self.stages))), *self.tied]
        return tuple(sorted(sets, reverse=self.virtual_stages > 1))

    def reduction(self, stages: tuple[int, ...]) -> Action:
        """Return the action that reduces over `stages`, one of `reductions`."""
        if len(stages) > 1:
            return Action(ActionKind.REDUCE, self.tied.index(stages))
        return Action(ActionKind.REDUCE, stage=stages[0] if self.virtual_stages > 1 else NOWHERE)

    def computation(self, kind: ActionKind, piece: int, stage: int) -> Action:
        """Return the forward, backward or second half of it of a microbatch in a stage."""
        return Action(kind, piece, stage=stage if self.virtual_stages > 1 else NOWHERE)

    def stage_at(self, slot: int, action: Action) -> int:
        """Return the stage of a computation of `slot`."""
        return action.stage if action.stage != NOWHERE else self.stage_of(slot)


class ActionKind(enum.Enum):
    """Kind of an action; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and parameters; of inputs only if the slot has a WEIGHT for the microbatch."""
    WEIGHT = "W"
    """Gradients of parameters, after a BACKWARD without them."""
    SEND_VALUES = "SV"
    RECV_VALUES = "RV"
    SEND_GRADS = "SG"
    RECV_GRADS = "RG"
    REDUCE = "R"


COMPUTATIONS = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT})
TRANSFERS = frozenset({ActionKind.SEND_VALUES, ActionKind.RECV_VALUES, ActionKind.SEND_GRADS, ActionKind.RECV_GRADS})
SENDS = frozenset({ActionKind.SEND_VALUES, ActionKind.SEND_GRADS})
OF_GRADIENTS = frozenset({ActionKind.SEND_GRADS, ActionKind.RECV_GRADS})
NOWHERE = -2
"""`src`, `dst` and `peer` of an action that is no transfer, `piece` of a reduction over one stage, `stage` of actions
of a slot that has one."""


class Action(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One action of a slot. A transfer from a slot to itself is no action."""

    kind: ActionKind
    piece: int = NOWHERE
    """Number of the microbatch; for a reduction over several stages, its index in `Layout.tied`."""
    src: int = NOWHERE
    """The edge of a transfer, in forward direction (also for gradients)."""
    dst: int = NOWHERE
    peer: int = NOWHERE
    """The other slot of a transfer."""
    stage: int = NOWHERE
    """The stage of a computation, or of a reduction over one stage, if its slot has several."""

    def __str__(self) -> str:
        own = "" if self.stage == NOWHERE else f".{self.stage}"
        if self.kind is ActionKind.REDUCE:
            return f"R{own}" if self.piece == NOWHERE else f"R{self.piece}"
        if self.kind in TRANSFERS:
            return f"{self.kind.value}{self.piece}:{self.src}>{self.dst}@{self.peer}"
        return f"{self.kind.value}{self.piece}{own}"


class Program(msgspec.Struct, frozen=True):
    """The actions of every slot in one step, in order."""

    layout: Layout
    slots: tuple[tuple[Action, ...], ...]
    forward_length: tuple[int, ...]
    """Number of actions of each slot in the forward phase."""

    @property
    def interleaved(self) -> bool:
        """Whether the backward belongs to the forward phase."""
        return all(length == len(actions) for length, actions in zip(self.forward_length, self.slots, strict=True))

    @property
    def phases(self) -> tuple[list[list[Action]], list[list[Action]]]:
        """Actions of every slot in the forward and in the backward phase, without reductions."""
        pairs = list(zip(self.slots, self.forward_length, strict=True))
        forward = [[each for each in actions[:end] if each.kind is not ActionKind.REDUCE] for actions, end in pairs]
        backward = [[each for each in actions[end:] if each.kind is not ActionKind.REDUCE] for actions, end in pairs]
        return forward, backward
