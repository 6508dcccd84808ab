"""Programs: what every slot does in one step, as lists of small actions.

The words. A *piece* is a slice of one rank's mini-batch: piece ``p = k * world + r`` is microbatch k of rank r
(here: of the rank that is bound to slot r). Pieces are never merged or split: each runs through all stages, on
one replica of each. Stage -1 stands for the ranks that give the inputs, stage S (the number of stages) for the
same ranks as they take the outputs; an *edge* (src, dst) says that values go from stage src to stage dst.

``schedule`` makes Programs, ``program_text`` writes and reads them, ``check`` proves them, ``simulate`` plays them on
costs, ``rannd.runtime.execution.executor`` runs them on tensors.
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
"""A receive is posted before so many computations."""


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Which slot runs which stage, between which stages values go, and which stages share parameters."""

    world: int
    """Number of slots, and of ranks."""
    microbatches: int
    """Slices of each rank's mini-batch."""
    stages: tuple[tuple[int, ...], ...]
    """Slot of each replica of each stage; every slot is in exactly one stage."""
    edges: tuple[Edge, ...]
    """(src stage, dst stage) pairs that carry values, sorted; -1: inputs, number of stages: outputs."""
    grad_edges: tuple[Edge, ...]
    """The edges whose values get gradients, sorted."""
    tied: tuple[tuple[int, ...], ...] = ()
    """Sets of stages that hold a trained parameter in common, sorted: its gradient is reduced over all their slots."""

    def __post_init__(self) -> None:
        last = len(self.stages)
        if self.world < 1 or self.microbatches < 1:
            raise PlanError(
                f"a layout of {self.world} slots and {self.microbatches} microbatches; both must be 1 or more"
            )
        if sorted(slot for stage in self.stages for slot in stage) != list(range(self.world)):
            raise PlanError(f"stages {self.stages} do not use each of {self.world} slots once")
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

    @property
    def pieces_total(self) -> int:
        """Number of pieces in a step."""
        return self.world * self.microbatches

    def slot_of(self, stage: int, piece: int) -> int:
        """The slot that runs `piece` in `stage`; in stages -1 and S the slot of the piece's rank.

        Where all numbers of replicas are multiples of g, the job is g pipelines side by side, and ranks in their order
        belong to one after the other: a stage with as many replicas as ranks moves nothing. Within a pipeline the
        replicas of a stage take pieces in turns, so that none waits while another has many at once.
        """
        microbatch, rank = divmod(piece, self.world)
        if stage in (-1, len(self.stages)):
            return rank
        pipeline, place = divmod(rank, self._ranks)
        turns = len(self.stages[stage]) // self.pipelines
        return self.stages[stage][pipeline * turns + (microbatch * self._ranks + place) % turns]

    @cached_property
    def pipelines(self) -> int:
        """How many parts of the job send each other nothing, but to reduce gradients."""
        return math.gcd(*map(len, self.stages))

    @property
    def _ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.world // self.pipelines

    def slots_of(self, stage: int) -> list[int]:
        """`slot_of` for every piece: for what looks at all of them."""
        return self._slots_of[stage]

    @cached_property
    def _slots_of(self) -> list[list[int]]:
        return self._by_stage()

    def _by_stage(self) -> list[list[int]]:
        """`slots_of` each stage; the last entry, which is also number -1, is the ranks'."""
        microbatches, ranks = np.divmod(np.arange(self.pieces_total), self.world)
        pipelines, places = np.divmod(ranks, self._ranks)
        numbers = microbatches * self._ranks + places
        found = []
        for slots in self.stages:
            turns = len(slots) // self.pipelines
            found.append(np.array(slots)[pipelines * turns + numbers % turns].tolist())
        return [*found, ranks.tolist()]

    def stage_of(self, slot: int) -> int:
        """The stage that `slot` belongs to."""
        return self._place_of[slot][0]

    @cached_property
    def _place_of(self) -> list[tuple[int, int]]:
        """(stage, number of the replica) of each slot."""
        found = [(0, 0)] * self.world
        for stage, slots in enumerate(self.stages):
            for replica, slot in enumerate(slots):
                found[slot] = stage, replica
        return found

    def pieces(self, stage: int, slot: int) -> tuple[int, ...]:
        """The pieces that `slot` runs in `stage`, increasing: the order in which a slot always takes them."""
        if stage in (-1, len(self.stages)):
            return tuple(range(slot, self.pieces_total, self.world))
        own, replica = self._place_of[slot]
        if own != stage:
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
        """Sets of stages whose slots reduce gradients together: each by itself, and tied ones; sorted."""
        return tuple(sorted([*((stage,) for stage in range(len(self.stages))), *self.tied]))

    def reduction(self, stages: tuple[int, ...]) -> Action:
        """The action that reduces over `stages`, which is one of `reductions`."""
        return Action(ActionKind.REDUCE, self.tied.index(stages) if len(stages) > 1 else NOWHERE)


class ActionKind(enum.Enum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of parameters; of inputs alone where the slot has a WEIGHT for the piece."""
    WEIGHT = "W"
    """Gradients of parameters, after a BACKWARD that left them out."""
    SEND_VALUES = "SV"
    RECV_VALUES = "RV"
    SEND_GRADS = "SG"
    RECV_GRADS = "RG"
    REDUCE = "R"


TRANSFERS = frozenset({ActionKind.SEND_VALUES, ActionKind.RECV_VALUES, ActionKind.SEND_GRADS, ActionKind.RECV_GRADS})
SENDS = frozenset({ActionKind.SEND_VALUES, ActionKind.SEND_GRADS})
NOWHERE = -2
"""`src`, `dst` and `peer` of an action that moves nothing, and `piece` of a reduction over one stage."""


class Action(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One thing a slot does. A transfer between equal slots is no action: the value is there already."""

    kind: ActionKind
    piece: int = NOWHERE
    """Of a reduction over several stages: its number in `Layout.tied`."""
    src: int = NOWHERE
    """The edge a transfer belongs to, in forward direction (for gradients too)."""
    dst: int = NOWHERE
    peer: int = NOWHERE
    """The other slot of a transfer."""

    def __str__(self) -> str:
        if self.kind is ActionKind.REDUCE:
            return "R" if self.piece == NOWHERE else f"R{self.piece}"
        if self.kind in TRANSFERS:
            return f"{self.kind.value}{self.piece}:{self.src}>{self.dst}@{self.peer}"
        return f"{self.kind.value}{self.piece}"


class Program(msgspec.Struct, frozen=True):
    """What every slot does in one step, in order."""

    layout: Layout
    slots: tuple[tuple[Action, ...], ...]
    forward_length: tuple[int, ...]
    """Number of leading actions of each slot that belong to the forward phase."""

    @property
    def interleaved(self) -> bool:
        """Whether backward belongs to the forward phase."""
        return all(length == len(actions) for length, actions in zip(self.forward_length, self.slots, strict=True))
