"""Text form of Programs, for display, tests and bug reports.

Two stages on two slots, two microbatches, GPipe::

    world 2 microbatches 2
    stages 0 | 1
    edges -1>0 0>1* 1>2*
    slot 0: RV1:-1>0@1 RV3:-1>0@1 F0 SV0:0>1@1 F1 ... | RG3:0>1@1 B3 ... R
    slot 1: SV1:-1>0@0 SV3:-1>0@0 RV0:0>1@0 F0 ...    | B3 SG3:0>1@0 ... R

``F3`` forward of microbatch (piece) 3, ``B3`` its backward, ``W3`` the delayed part of its backward, ``SV3:0>1@2``
send its activations of edge 0>1 to slot 2, ``RV`` receive them, ``SG``/``RG`` the same for gradients, which flow from
dst to src (the edge is written as in the forward), ``R`` reduce the gradients over the stage's replicas, ``R0`` those
of the first set of stages in the line ``tied 0+2 | 0+1+2``, which exists if stages share parameters. Where slots have
several stages, ``F3.1`` and ``R.1`` are those of stage 1. ``|`` ends the forward phase. An *interleaved* Program has
all actions before it: its backward starts from losses, and needs no gradients from the ranks.
"""

from __future__ import annotations

import re

from rannd.errors import PlanError
from rannd.plan.schedule.program import NOWHERE, Action, ActionKind, Layout, Program


def to_text(program: Program) -> str:
    """Format a program; :func:`from_text` reads it back.

    The lines are ``world 2 microbatches 1``, ``stages 0 | 1`` (slots of each), ``edges -1>0 0>1* 1>2*`` (* gradients
    flow
    back), ``tied 0+1`` if there are any, then ``slot N: forward actions | backward actions`` for each slot.
    """
    layout = program.layout
    edges = [f"{src}>{dst}" + ("*" if (src, dst) in layout.grad_edges else "") for src, dst in layout.edges]
    lines = [
        f"world {layout.world} microbatches {layout.microbatches}",
        "stages " + " | ".join(" ".join(map(str, slots)) for slots in layout.stages),
        " ".join(["edges", *edges]),
    ]
    if layout.tied:
        lines.append("tied " + " | ".join("+".join(map(str, stages)) for stages in layout.tied))
    for slot, actions in enumerate(program.slots):
        texts = [str(action) for action in actions]
        texts.insert(program.forward_length[slot], "|")
        lines.append(" ".join([f"slot {slot}:", *texts]))
    return "\n".join(lines) + "\n"


_ACTION = re.compile(r"R(?:(\d*)|\.(\d+))|([FBW])(\d+)(?:\.(\d+))?|(SV|RV|SG|RG)(\d+):(-?\d+)>(\d+)@(\d+)")
_EDGE = re.compile(r"(-?\d+)>(\d+)(\*?)")
_TIED = re.compile(r"tied (\d+(?:\+\d+)+(?: \| \d+(?:\+\d+)+)*)")


def from_text(text: str) -> Program:
    """Parse what :func:`to_text` wrote; PlanError with the wrong line otherwise."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 4:
        raise PlanError(f"a program's text has {len(lines)} lines; expected: world, stages, edges, one for each slot")
    layout, rest = _layout(lines)
    if len(rest) != layout.world:
        raise PlanError(f"a program's text has {len(rest)} slots; its world is {layout.world}")
    slots, forward_length = [], []
    for slot, line in enumerate(rest):
        label, _, actions = line.partition(":")
        words = actions.split()
        if label != f"slot {slot}" or words.count("|") != 1:
            raise PlanError(f"{line!r} is not of the form 'slot {slot}: forward actions | backward actions'")
        forward_length.append(words.index("|"))
        words.remove("|")
        slots.append(tuple(_action(word) for word in words))
    return Program(layout, tuple(slots), tuple(forward_length))


def _layout(lines: list[str]) -> tuple[Layout, list[str]]:
    """Parse the layout in the first lines; also return the remaining lines."""
    head = re.fullmatch(r"world (\d+) microbatches (\d+)", lines[0])
    stages = re.fullmatch(r"stages (\d[\d |]*)", lines[1])
    edge_words = lines[2].split()
    edges = [_EDGE.fullmatch(word) for word in edge_words[1:]]
    tied = _TIED.fullmatch(lines[3])
    if head is None or stages is None or edge_words[0] != "edges" or None in edges:
        raise PlanError(
            f"a program's text begins with {lines[:3]!r}; expected: world, stages and edges, as to_text writes"
        )
    pairs = [((int(edge[1]), int(edge[2])), edge[3] == "*") for edge in edges if edge is not None]
    sets = tied[1].split(" | ") if tied is not None else []
    layout = Layout(
        world=int(head[1]),
        microbatches=int(head[2]),
        stages=tuple(tuple(map(int, part.split())) for part in stages[1].split("|")),
        edges=tuple(edge for edge, _ in pairs),
        grad_edges=tuple(edge for edge, gradient in pairs if gradient),
        tied=tuple(tuple(map(int, each.split("+"))) for each in sets),
    )
    return layout, lines[3 + (tied is not None) :]


def _action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise PlanError(f"{word!r} is not an action; expected: F3, B3, W3, SV3:0>1@2, RV.., SG.., RG.., R or R0")
    reduce, reduced, compute, piece, stage, move, moved, src, dst, peer = found.groups()
    if compute:
        return Action(ActionKind(compute), int(piece), stage=int(stage) if stage else NOWHERE)
    if move:
        return Action(ActionKind(move), int(moved), int(src), int(dst), int(peer))
    return Action(ActionKind.REDUCE, int(reduce) if reduce else NOWHERE, stage=int(reduced) if reduced else NOWHERE)
