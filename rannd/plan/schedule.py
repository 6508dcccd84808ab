"""Programs: what every slot does in one step, as lists of small actions.

The words. A *piece* is a slice of one rank's mini-batch: piece ``p = k * world + r`` is microbatch k of rank r
(here: of the rank that is bound to slot r). Pieces are never merged or split: each runs through all stages, on
one replica of each. Stage -1 stands for the ranks that give the inputs, stage S (the number of stages) for the
same ranks as they take the outputs; an *edge* (src, dst) says that values go from stage src to stage dst.

Two stages on two slots, two microbatches (fill-drain), drawn as :func:`to_text` writes them:

    slot 0: RV1:-1>0@1 RV3:-1>0@1 F0 SV0:0>1@1 F1 ... | RG3:0>1@1 B3 ... R
    slot 1: SV1:-1>0@0 SV3:-1>0@0 RV0:0>1@0 F0 ...    | B3 SG3:0>1@0 ... R

``F3`` forward of piece 3, ``B3`` its backward, ``SV3:0>1@2`` send piece 3's values of edge 0>1 to slot 2, ``RV``
receive them, ``SG``/``RG`` the same for gradients, which flow from dst to src (the edge is written as in the
forward), ``R`` reduce the gradients over the stage's replicas. ``|`` ends the forward phase. An *interleaved* Program
has all actions before it: its backward starts from losses, and needs no gradients from the ranks.
"""

from __future__ import annotations

import enum
import heapq
import re
from collections.abc import Iterable, Iterator

import msgspec

from rannd.errors import PlanError

Edge = tuple[int, int]


class Layout(msgspec.Struct, frozen=True):
    """Which slot runs which stage, and between which stages values go."""

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

    @property
    def pieces_total(self) -> int:
        """Number of pieces in a step."""
        return self.world * self.microbatches

    def slot_of(self, stage: int, piece: int) -> int:
        """The slot that runs `piece` in `stage`; in stages -1 and S the slot of the piece's rank.

        Replicas take pieces in the order of ranks, so a stage with as many replicas as ranks moves nothing.
        """
        microbatch, rank = divmod(piece, self.world)
        if stage in (-1, len(self.stages)):
            return rank
        slots = self.stages[stage]
        return slots[(rank * self.microbatches + microbatch) * len(slots) // self.pieces_total]

    def stage_of(self, slot: int) -> int:
        """The stage that `slot` belongs to."""
        return next(stage for stage, slots in enumerate(self.stages) if slot in slots)

    def pieces(self, stage: int, slot: int) -> tuple[int, ...]:
        """The pieces that `slot` runs in `stage`, increasing: the order in which a slot always takes them."""
        return tuple(piece for piece in range(self.pieces_total) if self.slot_of(stage, piece) == slot)


class Kind(enum.Enum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_VALUES = "SV"
    RECV_VALUES = "RV"
    SEND_GRADS = "SG"
    RECV_GRADS = "RG"
    REDUCE = "R"


TRANSFERS = frozenset({Kind.SEND_VALUES, Kind.RECV_VALUES, Kind.SEND_GRADS, Kind.RECV_GRADS})
SENDS = frozenset({Kind.SEND_VALUES, Kind.SEND_GRADS})
NOWHERE = -2
"""`src`, `dst` and `peer` of an action that moves nothing, and `piece` of a reduction."""


class Action(msgspec.Struct, frozen=True, array_like=True):
    """One thing a slot does. A transfer between equal slots is no action: the value is there already."""

    kind: Kind
    piece: int = NOWHERE
    src: int = NOWHERE
    """The edge a transfer belongs to, in forward direction (for gradients too)."""
    dst: int = NOWHERE
    peer: int = NOWHERE
    """The other slot of a transfer."""

    def __str__(self) -> str:
        if self.kind is Kind.REDUCE:
            return str(self.kind.value)
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


def fill_drain(layout: Layout, *, interleaved: bool = False) -> Program:
    """All forwards, then all backwards (GPipe's schedule), for unequal replica counts and skip edges too.

    Forward phase of a slot: transfers of inputs; for each own piece, increasing, receives from other stages
    (by src), forward, sends to other stages (by dst); transfers of outputs. Backward phase: gradients of
    outputs; for each own piece, decreasing, receives, backward, sends; gradients of inputs; one reduction.
    Transfers at the ends of a phase come in the order of pieces: an order that all slots share.

    `interleaved` (here and below): backward belongs to the forward phase, because it needs nothing from the ranks;
    outputs come last then, and no gradients of outputs travel.
    """
    orders = []
    for slot in range(layout.world):
        pieces = layout.pieces(layout.stage_of(slot), slot)
        forwards = [Action(Kind.FORWARD, piece) for piece in pieces]
        orders.append([*forwards, *(Action(Kind.BACKWARD, piece) for piece in reversed(pieces))])
    return _program(layout, orders, interleaved=interleaved)


def one_forward_one_backward(layout: Layout) -> Program:
    """Each slot runs a piece backward as early as it can, and so keeps few pieces (1F1B, PipeDream-Flush, interleaved).

    A slot of stage s has at most :func:`window` pieces in flight. The order is that of a machine whose stages take
    equally long with all their replicas, where a backward takes twice a forward and transfers take no time: a slot
    runs the oldest backward that is ready, else the next forward that is ready and fits into its window. What this
    machine has done in some order cannot wait for itself in a ring. With one replica a stage it is the known order, but
    for one more forward ahead: ``F0 F1 F2 B0 F3 B1 ...`` in the first of two stages.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021).
    """
    return _program(layout, _Greedy(layout).play(), interleaved=True)


SCHEDULES = ("1f1b", "fill_drain")
"""Names of the schedules, as `Deployment.schedule` has them."""


def interleaved_program(schedule: str, layout: Layout) -> Program:
    """The Program of a step whose backward needs nothing from the ranks. PlanError for a schedule not known."""
    if schedule == "1f1b":
        return one_forward_one_backward(layout)
    if schedule == "fill_drain":
        return fill_drain(layout, interleaved=True)
    raise PlanError(f"no schedule is named {schedule!r}; use one of {', '.join(SCHEDULES)}")


def window(layout: Layout, stage: int) -> int:
    """Most pieces that a slot of `stage` keeps in flight under 1F1B.

    A piece is away for as long as it takes all later stages, and a stage with R replicas takes R times as long for a
    piece as one of equal weight with one. On top comes one piece, which covers the time that transfers take: without
    it every slot waits for two of them in every round.
    """
    if stage + 1 == len(layout.stages):
        return 1
    later = sum(len(slots) for slots in layout.stages[stage:])
    return -(-later // len(layout.stages[stage])) + 1


class _Greedy:
    """The machine of :func:`one_forward_one_backward`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stage = [layout.stage_of(slot) for slot in range(layout.world)]
        self.pieces = [layout.pieces(stage, slot) for slot, stage in enumerate(self.stage)]
        self.window = [window(layout, stage) for stage in self.stage]
        last = len(layout.stages)
        self.before = [[src for src, dst in layout.edges if dst == stage and src >= 0] for stage in range(last)]
        self.after = [[dst for src, dst in layout.grad_edges if src == stage and dst < last] for stage in range(last)]
        self.done: dict[tuple[Kind, int, int], float] = {}
        """When (forward or backward, stage, piece) was done."""
        self.forwards = [0] * layout.world
        self.backwards = [0] * layout.world

    def play(self) -> list[list[Action]]:
        """What each slot computes, in order."""
        layout = self.layout
        orders: list[list[Action]] = [[] for _ in self.pieces]
        free = [0.0] * layout.world
        todo: list[tuple[float, int, int]] = []
        """(start, slot, number of actions that the slot had done when this was found out)"""

        def look(slot: int) -> None:
            for start, _ in self._next(slot, free):
                heapq.heappush(todo, (start, slot, len(orders[slot])))

        for slot in range(layout.world):
            look(slot)
        while todo:
            start, slot, done = heapq.heappop(todo)
            if done != len(orders[slot]):
                continue
            ((start, action),) = self._next(slot, free)
            stage = self.stage[slot]
            forward = action.kind is Kind.FORWARD
            takes = len(layout.stages[stage]) * (1.0 if forward else 2.0)
            free[slot] = self.done[action.kind, stage, action.piece] = start + takes
            (self.forwards if forward else self.backwards)[slot] += 1
            orders[slot].append(action)
            waiting = [dst for src, dst in layout.edges if src == stage and dst < len(layout.stages)]
            if not forward:
                waiting = [src for src, dst in layout.grad_edges if dst == stage and src >= 0]
            for each in {slot, *(layout.slot_of(other, action.piece) for other in waiting)}:
                look(each)
        return orders

    def _next(self, slot: int, free: list[float]) -> list[tuple[float, Action]]:
        """The earliest thing that `slot` can do, as far as that is known, and when; the backward at equal times."""
        pieces, stage = self.pieces[slot], self.stage[slot]
        forward, backward = self.forwards[slot], self.backwards[slot]
        found = []
        if backward < forward:
            needed = [(Kind.BACKWARD, later, pieces[backward]) for later in self.after[stage]]
            needed.append((Kind.FORWARD, stage, pieces[backward]))
            found += self._at(needed, free[slot], Action(Kind.BACKWARD, pieces[backward]))
        if forward < len(pieces) and forward - backward < self.window[slot]:
            needed = [(Kind.FORWARD, earlier, pieces[forward]) for earlier in self.before[stage]]
            found += self._at(needed, free[slot], Action(Kind.FORWARD, pieces[forward]))
        return sorted(found, key=lambda each: each[0])[:1]

    def _at(self, needed: list[tuple[Kind, int, int]], free: float, action: Action) -> list[tuple[float, Action]]:
        if not all(each in self.done for each in needed):
            return []
        return [(max([free, *(self.done[each] for each in needed)]), action)]


def _program(layout: Layout, orders: list[list[Action]], *, interleaved: bool) -> Program:
    """Put the transfers around what each slot computes."""
    last = len(layout.stages)
    if interleaved and any(edge[1] == last for edge in layout.grad_edges):
        raise PlanError(f"gradients of outputs travel over {layout.grad_edges}; an interleaved step has none")
    slots: list[list[Action]] = [[] for _ in range(layout.world)]

    def transfer(piece: int, edge: Edge, *, gradient: bool) -> Iterator[tuple[int, Action]]:
        """The (at most two) actions that move a piece over an edge, with the slots they belong to."""
        src, dst = layout.slot_of(edge[0], piece), layout.slot_of(edge[1], piece)
        if src == dst:
            return
        if gradient:
            yield dst, Action(Kind.SEND_GRADS, piece, *edge, src)
            yield src, Action(Kind.RECV_GRADS, piece, *edge, dst)
        else:
            yield src, Action(Kind.SEND_VALUES, piece, *edge, dst)
            yield dst, Action(Kind.RECV_VALUES, piece, *edge, src)

    def at_ranks(edges: Iterable[Edge], *, gradient: bool) -> None:
        chosen = list(edges)
        for piece in range(layout.pieces_total):
            for edge in chosen:
                for slot, action in transfer(piece, edge, gradient=gradient):
                    slots[slot].append(action)

    def at_slot(slot: int, piece: int, edges: Iterable[Edge], *, gradient: bool) -> None:
        for edge in edges:
            slots[slot].extend(act for at, act in transfer(piece, edge, gradient=gradient) if at == slot)

    inner = [edge for edge in layout.edges if edge[0] >= 0 and edge[1] < last]
    inner_grad = [edge for edge in layout.grad_edges if edge in inner]

    stages = [layout.stage_of(slot) for slot in range(layout.world)]

    def compute(slot: int, action: Action) -> None:
        stage, forward = stages[slot], action.kind is Kind.FORWARD
        edges = inner if forward else inner_grad
        into, out = [edge for edge in edges if edge[1] == stage], [edge for edge in edges if edge[0] == stage]
        at_slot(slot, action.piece, into if forward else out, gradient=not forward)
        slots[slot].append(action)
        at_slot(slot, action.piece, out if forward else into, gradient=not forward)

    outputs = [edge for edge in layout.edges if edge[1] == last]
    at_ranks((edge for edge in layout.edges if edge[0] < 0), gradient=False)
    for slot, order in enumerate(orders):
        for action in order:
            if interleaved or action.kind is Kind.FORWARD:
                compute(slot, action)
    at_ranks(outputs, gradient=False)
    forward_length = [len(actions) for actions in slots]
    if not interleaved:
        at_ranks((edge for edge in layout.grad_edges if edge[1] == last), gradient=True)
        for slot, order in enumerate(orders):
            for action in order:
                if action.kind is Kind.BACKWARD:
                    compute(slot, action)
    at_ranks((edge for edge in layout.grad_edges if edge[0] < 0), gradient=True)
    for slot, actions in enumerate(slots):
        actions.append(Action(Kind.REDUCE))
        if interleaved:
            forward_length[slot] = len(actions)
    return Program(layout, tuple(tuple(actions) for actions in slots), tuple(forward_length))


def to_text(program: Program) -> str:
    """The program as lines of text; :func:`from_text` reads them back.

    ``world 2 microbatches 1``, ``stages 0 | 1`` (slots of each), ``edges -1>0 0>1* 1>2*`` (* gradients flow
    back), then ``slot N: forward actions | backward actions`` for each slot.
    """
    layout = program.layout
    edges = [f"{src}>{dst}" + ("*" if (src, dst) in layout.grad_edges else "") for src, dst in layout.edges]
    lines = [
        f"world {layout.world} microbatches {layout.microbatches}",
        "stages " + " | ".join(" ".join(map(str, slots)) for slots in layout.stages),
        " ".join(["edges", *edges]),
    ]
    for slot, actions in enumerate(program.slots):
        texts = [str(action) for action in actions]
        texts.insert(program.forward_length[slot], "|")
        lines.append(" ".join([f"slot {slot}:", *texts]))
    return "\n".join(lines) + "\n"


_ACTION = re.compile(r"(?:(R)|([FB])(\d+)|(SV|RV|SG|RG)(\d+):(-?\d+)>(\d+)@(\d+))")
_EDGE = re.compile(r"(-?\d+)>(\d+)(\*?)")


def from_text(text: str) -> Program:
    """The program that :func:`to_text` wrote; PlanError with the line where it is not of that form."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 4:
        raise PlanError(f"a program's text has {len(lines)} lines; wanted: world, stages, edges and one for each slot")
    head = re.fullmatch(r"world (\d+) microbatches (\d+)", lines[0])
    stages = re.fullmatch(r"stages (\d[\d |]*)", lines[1])
    edge_words = lines[2].split()
    edges = [_EDGE.fullmatch(word) for word in edge_words[1:]]
    if head is None or stages is None or edge_words[0] != "edges" or None in edges:
        raise PlanError(
            f"a program's text begins with {lines[:3]!r}; wanted: world, stages and edges, as to_text writes"
        )
    pairs = [((int(edge[1]), int(edge[2])), edge[3] == "*") for edge in edges if edge is not None]
    layout = Layout(
        world=int(head[1]),
        microbatches=int(head[2]),
        stages=tuple(tuple(map(int, part.split())) for part in stages[1].split("|")),
        edges=tuple(edge for edge, _ in pairs),
        grad_edges=tuple(edge for edge, gradient in pairs if gradient),
    )
    if len(lines) != 3 + layout.world:
        raise PlanError(f"a program's text has {len(lines) - 3} slots; its world is {layout.world}")
    slots, forward_length = [], []
    for slot, line in enumerate(lines[3:]):
        label, _, rest = line.partition(":")
        words = rest.split()
        if label != f"slot {slot}" or words.count("|") != 1:
            raise PlanError(f"{line!r} is not of the form 'slot {slot}: forward actions | backward actions'")
        forward_length.append(words.index("|"))
        words.remove("|")
        slots.append(tuple(_action(word) for word in words))
    return Program(layout, tuple(slots), tuple(forward_length))


def _action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise PlanError(f"{word!r} is no action; wanted: F3, B3, SV3:0>1@2, RV.., SG.., RG.. or R")
    reduce, compute, piece, move, moved, src, dst, peer = found.groups()
    if reduce:
        return Action(Kind.REDUCE)
    if compute:
        return Action(Kind(compute), int(piece))
    return Action(Kind(move), int(moved), int(src), int(dst), int(peer))
