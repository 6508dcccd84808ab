"""Plays instructions on tensors: computes microbatches in this rank's stages, sends and receives values."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from rannd.plan.schedule.instructions import Instruction
from rannd.plan.schedule.program import COMPUTATIONS, OF_GRADIENTS, SENDS, TRANSFERS, Action, ActionKind
from rannd.runtime.comm.context import Context
from rannd.runtime.execution.p2p import Exchange, MessageBuffers, Parcel
from rannd.runtime.execution.played_graph import PlayedGraph
from rannd.runtime.execution.stage import Computing
from rannd.runtime.execution.step import Step
from rannd.runtime.gradients.reducer import Reducer
from rannd.runtime.timeline.recorder import Doing

Live = Mapping[PlayedGraph, frozenset[Node]]
"""Nodes of each graph that get a gradient."""


class ProgramPlayer:
    """Plays the instructions of steps; `graphs`: that of the mini-batch of each slot's rank.

    Messages arrive in `buffers`.
    """

    def __init__(
        self, context: Context, graphs: Sequence[PlayedGraph], reducer: Reducer, buffers: MessageBuffers
    ) -> None:
        self._world = world = context.world
        self._recorder = context.recorder
        self._graphs = graphs
        own = graphs[world.slot]
        self._bound = own.bound
        self._stages = own.stages
        self._reducer = reducer
        self._totals = own.totals
        self._home = self._bound.stages[0].number
        """The stage that stands for this rank where an action is of none."""
        self._outside = len(self._bound.layout.stages)
        self._buffers = buffers

    def _graph_of(self, piece: int) -> PlayedGraph:
        """The graph of the mini-batch that a microbatch belongs to."""
        return self._graphs[piece % len(self._graphs)]

    def play(
        self,
        step: Step,
        listed: Sequence[Instruction],
        live: Live | None,
        *,
        reduce: bool,
        early: bool,
        stages: Sequence[Computing],
        totals: bool = False,
    ) -> None:
        """Execute instructions.

        Args:
            step: The step.
            listed: Instructions of a phase.
            live: Nodes that get a gradient, of all graphs; None if not known yet.
            reduce: Gradients of parameters are reduced after it.
            early: And as soon as they are complete.
            stages: This rank's, of all graphs whose microbatches it computes.
            totals: Begin to sum up the global outputs, unless they are read late.
        """
        forward = Exchange(self._world, self._buffers, gradients=False)
        backward = Exchange(self._world, self._buffers, gradients=True)
        # The last forward completes the losses.
        last_forward = next((each for each in reversed(_computed(listed)) if each.kind is ActionKind.FORWARD), None)
        last_of = self._last_of(listed)
        armed = False
        totals = totals and not self._world.reads.late
        if totals and last_forward is None:
            self._totals.begin(step)
        where, recorder = self._world.watch.where, self._recorder
        for instruction in listed:
            for action in instruction.posts:
                exchange = backward if action.kind in OF_GRADIENTS else forward
                exchange.post(action, self._parcel(step, action, live))
            for action in instruction.awaits:
                where.stage, where.piece, where.action = self._stage_at(action), action.piece, action
                begun = recorder.begin()
                self._receive(step, backward if action.kind in OF_GRADIENTS else forward, action)
                recorder.end(Doing.RECEIVE, action.src, action.dst, action, begun)
            for action in instruction.settles:
                (backward if action.kind in OF_GRADIENTS else forward).settle(action)
            if instruction.action is None:
                continue
            action = instruction.action
            piece = where.piece = action.piece
            stage = where.stage = self._stage_at(action)
            where.action = action
            if action.kind in TRANSFERS:
                begun = recorder.begin()
                self._send(step, backward if action.kind in OF_GRADIENTS else forward, action, live)
                recorder.end(Doing.SEND, action.src, action.dst, action, begun)
                continue
            self._world.transport.before_computation()
            graph = self._graph_of(piece)
            computing = graph.stages[stage]
            if not step.pieces.rows[piece]:
                computing.stand_by(action.kind)
            elif action.kind is ActionKind.FORWARD:
                begun = recorder.begin()
                computing.forward(step, piece, None if live is None else live[graph])
                recorder.end(Doing.FORWARD, stage, stage, action, begun)
                graph.totals.take(step, piece)
                if not self._bound.graph.signature.mode.grad:
                    self._give_back(step, piece, stage)
            else:
                last = reduce and action is last_of[stage]
                if last and not armed:
                    self._reducer.arm(early=early, readers=[each.arrivals for each in self._stages.values()])
                    armed = True
                begun = recorder.begin()
                self._backward(
                    step, action, computing, live, last=last, halves=last_of[stage].kind is ActionKind.WEIGHT
                )
                recorder.end(Doing.WEIGHT if _is_half(action) else Doing.BACKWARD, stage, stage, action, begun)
            if totals and action is last_forward:
                self._totals.begin(step)
        begun = recorder.begin()
        forward.finish()
        backward.finish()
        recorder.end(Doing.SETTLE, -1, -1, None, begun)
        for computing in stages:
            computing.rest()
        where.stage, where.piece, where.action = self._home, None, None

    def _last_of(self, listed: Sequence[Instruction]) -> dict[int, Action]:
        """The computation that completes the gradients of each stage's parameters.

        It is the last second half of a backward, where backward comes in halves, or else the last backward.
        """
        found: dict[int, Action] = {}
        for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            found.update((self._stage_at(each), each) for each in _computed(listed) if each.kind is kind)
        return found

    def _backward(
        self,
        step: Step,
        action: Action,
        computing: Computing,
        live: Live | None,
        *,
        last: bool,
        halves: bool,
    ) -> None:
        """Backward of a microbatch in a stage, or its second half, if it comes in `halves`. `last`: see `_last_of`."""
        arrivals = computing.late_arrivals if halves else computing.arrivals
        with self._reducer.completing(arrivals, self._stage_at(action)) if last else contextlib.nullcontext():
            if _is_half(action):
                computing.weights(step, action.piece, self._reducer.arrived)
            else:
                assert live is not None
                computing.backward(step, action.piece, live[self._graph_of(action.piece)])
        if not step.keep and halves == _is_half(action):
            self._give_back(step, action.piece, self._stage_at(action))

    def _stage_at(self, action: Action) -> int:
        """The stage of this rank that an action belongs to."""
        if action.kind not in TRANSFERS:
            return self._bound.layout.stage_at(self._bound.slot, action)
        stage = action.src if (action.kind in SENDS) != (action.kind in OF_GRADIENTS) else action.dst
        return stage if stage in self._stages else self._home

    def _parcel(self, step: Step, action: Action, live: Live | None) -> Parcel:
        """Values that a transfer action moves."""
        graph, rows = self._graph_of(action.piece), step.pieces.rows[action.piece]
        return graph.parcel(action, rows, None if live is None else live[graph], inside=step.interleaved)

    def _send(self, step: Step, exchange: Exchange, action: Action, live: Live | None) -> None:
        parcel, piece = self._parcel(step, action, live), action.piece
        values: dict[Node, torch.Tensor] = {}
        for node in parcel.nodes:
            if action.kind is ActionKind.SEND_VALUES:
                values[node] = step.values.pop((piece, node, action.dst))
            elif action.dst == self._outside:
                values[node] = step.gradients.pop((piece, node))
            else:
                values[node] = step.outgoing.pop((piece, node, action.dst))
        exchange.send(action, parcel, values)

    def _receive(self, step: Step, exchange: Exchange, action: Action) -> None:
        values, buffer = exchange.take(action)
        piece = action.piece
        if action.kind in OF_GRADIENTS:
            for node, value in values.items():
                step.add(piece, node, value)
            ours = action.src >= 0
        else:
            for node, value in values.items():
                step.values[piece, node, action.dst] = value
            ours = action.dst < self._outside
        if buffer is not None and ours:  # other values are returned to the script and keep their buffer
            step.borrowed.setdefault((piece, self._stage_at(action)), []).append(buffer)

    def _give_back(self, step: Step, piece: int, stage: int) -> None:
        for buffer in step.borrowed.pop((piece, stage), ()):
            self._buffers.give(buffer)


def _is_half(action: Action) -> bool:
    return action.kind is ActionKind.WEIGHT


def _computed(listed: Sequence[Instruction]) -> list[Action]:
    """The computations among instructions."""
    return [each.action for each in listed if each.action is not None and each.action.kind in COMPUTATIONS]
