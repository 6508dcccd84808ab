"""Run the Program of a bound graph on tensors.

A call either runs forward, and backward when it is asked for, or both at once: a graph that is trained by its one loss
needs nothing from the script to begin its backward, so forward and backward are interleaved piece by piece (1F1B), and
the gradients wait until the script calls backward.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.cut import crossing_shape
from rannd.graph.losses import Count, counted, pieces_weights
from rannd.plan.schedule import Action, Kind
from rannd.runtime.agreement import Phase, agree, pack_flags, pack_floats, unpack_flags, unpack_floats
from rannd.runtime.bound import BoundGraph, Traffic
from rannd.runtime.exchange import Exchange, finish
from rannd.runtime.gradients import Reducer
from rannd.runtime.instructions import Instruction, instructions
from rannd.runtime.message_buffers import MessageBuffers
from rannd.runtime.parcels import Parcel
from rannd.runtime.pieces import Pieces
from rannd.runtime.results import flat_number, join, number_length, shaped_number
from rannd.runtime.step import Saved, Step
from rannd.runtime.world import World

MOST_SIZES = 64
"""So many different sizes of mini-batches are remembered."""

_GRADS = frozenset({Kind.SEND_GRADS, Kind.RECV_GRADS})
_FORWARD, _BACKWARD, _BOTH = "forward", "backward", "both"


class Executor:
    """Runs one bound graph, with `state` (name -> tensor to compute with) of this rank's stage."""

    def __init__(
        self,
        world: World,
        bound: BoundGraph,
        state: Mapping[str, torch.Tensor],
        reducer: Reducer,
        seed: int,
        *,
        averaged: int,
    ) -> None:
        """`averaged`: the number of ranks whose mini-batches are averaged over, 1 where one is shared by all."""
        self.world = world
        self.bound = bound
        self._state = state
        self._reducer = reducer
        self.closed = False
        """The deployment is gone."""
        self._seed = seed
        self._averaged = averaged
        self._graph = bound.graph
        self._slot = bound.slot
        self._last = len(bound.layout.stages)
        self._nodes = self._graph.traced.placeholders
        self._written = sorted(self._graph.placement.written & set(bound.part.tensors))
        self._loans: dict[str, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        self._buffers = MessageBuffers(world.device)
        self._numbers = [
            node
            for node, result in zip(self._graph.traced.results, self._graph.results, strict=True)
            if result.kind == "global"
        ]
        handed = bound.interleaved.traffic.edges if bound.interleaved is not None else {}
        self._handed = frozenset(node for edge, nodes in handed.items() if edge[1] == self._last for node in nodes)
        """Outputs that travel to the ranks at the end of an interleaved step."""
        self._sizes: OrderedDict[tuple[int, ...], Pieces] = OrderedDict()
        self._instructions: OrderedDict[tuple[str, tuple[bool, ...]], tuple[Instruction, ...]] = OrderedDict()
        self._parcels: dict[tuple[Any, ...], Parcel] = {}

    def reseed(self, seed: int) -> None:
        """Draw random numbers by another seed from now on."""
        self._seed = seed

    # -- sizes ------------------------------------------------------------------------------------------------

    def pieces(self, rows: tuple[int, ...]) -> Pieces:
        """The pieces of a call with `rows` rows of each slot's rank."""
        if rows not in self._sizes:
            self._sizes[rows] = Pieces(self.bound.layout, rows)
            if len(self._sizes) > MOST_SIZES:
                self._sizes.popitem(last=False)
                self._parcels.clear()
        return self._sizes[rows]

    def _phase(self, step: Step, phase: str) -> tuple[Instruction, ...]:
        """What this slot does in a phase; pieces without rows are left out."""
        running = tuple(map(bool, step.pieces.rows))
        if (phase, running) not in self._instructions:
            program = self._traffic(step).program
            slots = []
            for actions, length in zip(program.slots, program.forward_length, strict=True):
                chosen = actions[:length] if phase != _BACKWARD else actions[length:]
                slots.append([each for each in chosen if each.kind is not Kind.REDUCE and running[each.piece]])
            self._instructions[phase, running] = instructions(slots, self._slot)
            if len(self._instructions) > MOST_SIZES:
                self._instructions.popitem(last=False)
        return self._instructions[phase, running]

    def _traffic(self, step: Step) -> Traffic:
        if not step.interleaved:
            return self.bound.traffic
        assert self.bound.interleaved is not None
        return self.bound.interleaved.traffic

    def _parcel(self, step: Step, action: Action, live: frozenset[Node] | None) -> Parcel:
        """What an action moves."""
        rows = step.pieces.rows[action.piece]
        key = (step.interleaved, action.src, action.dst, rows, live if action.kind in _GRADS else None)
        found = self._parcels.get(key)
        if found is None:
            nodes = self._traffic(step).edges[action.src, action.dst]
            if action.kind in _GRADS:
                assert live is not None
                nodes = tuple(node for node in nodes if node in live)
            found = self._parcels[key] = Parcel(nodes, rows)
        return found

    # -- phases -----------------------------------------------------------------------------------------------

    def forward(self, step: Step, *, reduce: bool) -> list[Any]:
        """Run the forward phase, with all backwards where the step is interleaved.

        `reduce`: reduce the gradients of these backwards. Returns the model's outputs for this rank, in the order of
        the graph's.
        """
        self._lend()
        self._resolve()
        self._give_inputs(step)
        before = {name: self._state[name].detach().clone() for name in self._written}
        live = None
        if step.interleaved:
            assert self.bound.interleaved is not None
            live = self.bound.interleaved.live
            seed = torch.full((), step.seed, dtype=self.bound.interleaved.loss.meta["val"].dtype)
            step.upstream = {self.bound.interleaved.loss: [seed.to(self.world.device)] * self.world.size}
            self._reducer.set_aside()
        self._play(step, self._phase(step, _BOTH if step.interleaved else _FORWARD), live, before, reduce=reduce)
        if step.interleaved:
            assert live is not None
            step.gathered = self._reducer.gathered(reduce=reduce)
            step.input_gradients = self._input_gradients(step, live)
            self._forget(step)
        self._agree_on_buffers(step)
        outputs = self._outputs(step)
        step.values.clear()
        return outputs

    def backward(
        self, step: Step, gradients: Sequence[torch.Tensor | None], *, reduce: bool, again: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward phase with this rank's gradients of its outputs; returns those of its inputs.

        Gradients of parameters wait in the reducer, or are delivered with `reduce`. With `again` all is kept for
        another backward.
        """
        if self.closed:
            raise StepError(
                "backward runs through a call that was made before model.undeploy() or pyrannc.clear(); call the model "
                "again after it"
            )
        if step.finished:
            raise StepError(
                "backward runs a second time through one call of the model, whose activations are gone; call the model "
                "again, or give retain_graph=True to the first backward (for all calls: pyrannc.keep_graph(True))"
            )
        step.finished = not again
        live = self._upstream(step, gradients)
        if step.interleaved:
            return self._handed_over(step, gradients, reduce=reduce, again=again)
        step.keep = again
        self._resolve()
        self._give_seeds(step, gradients, live)
        self._play(step, self._phase(step, _BACKWARD), live, {}, reduce=reduce)
        if reduce:
            self._reducer.reduce()
        inputs = self._input_gradients(step, live)
        self._forget(step)
        return inputs

    def _handed_over(
        self, step: Step, gradients: Sequence[torch.Tensor | None], *, reduce: bool, again: bool
    ) -> list[torch.Tensor | None]:
        """Backward of a call whose backward has run: hand over what waits, times what the script has made of the loss.

        That is right because a gradient is linear in the gradient that it begins with.
        """
        assert self.bound.interleaved is not None
        assert step.gathered is not None
        loss = self.bound.interleaved.loss
        results = self._graph.traced.results
        if any(g is not None for node, g in zip(results, gradients, strict=True) if node is not loss):
            raise StepError(
                "backward came through an output beside the loss, but this call has run its backward from the loss "
                "already; set interleave_loss=false (RANNC_INTERLEAVE_LOSS=false) to have backward run when it is "
                "asked for"
            )
        slots = step.upstream[loss]
        if any(float(each) != float(slots[0]) for each in slots):
            raise StepError(
                f"the gradient of the loss differs between ranks ({[float(each) for each in slots]}), but its backward "
                "has run already, with the same for all; multiply the loss by the same number on all ranks, or set "
                "interleave_loss=false (RANNC_INTERLEAVE_LOSS=false)"
            )
        factor = float(slots[0]) / step.seed
        gathered = step.gathered
        if not again:
            step.gathered = None
        self._reducer.accept(gathered, factor, keep=again)
        if reduce:
            if self._reducer.something_waits() or not gathered.reduced:
                self._reducer.reduce()
            else:
                self._reducer.deliver()
        return [None if g is None else g * factor for g in step.input_gradients]

    def _forget(self, step: Step) -> None:
        step.gradients.clear()
        step.outgoing.clear()
        step.upstream.clear()

    def _play(
        self,
        step: Step,
        listed: Sequence[Instruction],
        live: frozenset[Node] | None,
        before: Mapping[str, torch.Tensor],
        *,
        reduce: bool,
    ) -> None:
        """Carry out instructions."""
        forward = Exchange(self.world, self.world.forward, self._buffers)
        backward = Exchange(self.world, self.world.backward, self._buffers)
        # The last backward of pieces has the final gradients of each parameter.
        final = next(
            (each.action for each in reversed(listed) if each.action and each.action.kind is Kind.BACKWARD), None
        )
        where = self.world.watch.where
        for instruction in listed:
            for action in instruction.posts:
                exchange = backward if action.kind in _GRADS else forward
                exchange.post(action, self._parcel(step, action, live))
            for action in instruction.awaits:
                where.piece, where.action = action.piece, action
                self._receive(step, backward if action.kind in _GRADS else forward, action)
            for action in instruction.settles:
                (backward if action.kind in _GRADS else forward).settle(action)
            if instruction.action is None:
                continue
            action = instruction.action
            piece = where.piece = action.piece
            where.action = action
            if action.kind is Kind.FORWARD:
                self._compute(step, piece, live, before)
                if not self._graph.signature.mode.grad:
                    self._give_back(step, piece)
            elif action.kind is Kind.BACKWARD:
                assert live is not None
                if reduce and action is final:
                    self._reducer.arm()
                self._differentiate(step, piece, live)
                if not step.keep:
                    self._give_back(step, piece)
            elif action.kind is Kind.SEND_VALUES:
                parcel = self._parcel(step, action, None)
                forward.send(action, parcel, {node: step.values[piece, node] for node in parcel.nodes})
            else:
                parcel = self._parcel(step, action, live)
                source = step.gradients if action.dst == self._last else step.outgoing
                backward.send(action, parcel, {node: source.pop((piece, node)) for node in parcel.nodes})
        forward.finish()
        backward.finish()
        where.piece = where.action = None

    def _receive(self, step: Step, exchange: Exchange, action: Action) -> None:
        values, buffer = exchange.take(action)
        piece = action.piece
        if action.kind in _GRADS:
            for node, value in values.items():
                _add(step, piece, node, value)
            ours = action.src >= 0
        else:
            for node, value in values.items():
                step.values[piece, node] = value
            ours = action.dst < self._last
        if buffer is not None and ours:  # others go to the script
            step.borrowed.setdefault(piece, []).append(buffer)

    def _give_back(self, step: Step, piece: int) -> None:
        for buffer in step.borrowed.pop(piece, ()):
            self._buffers.give(buffer)

    # -- forward ----------------------------------------------------------------------------------------------

    def _lend(self) -> None:
        """Give tensors that other stages hold to those that only read them in this graph."""
        for name, (lender, borrowers) in self.bound.borrowed.items():
            if self._slot == lender:
                value = self._state[name].detach().contiguous()
                for slot in borrowers:
                    finish(dist.isend(value, self.world.rank_of_slot[slot], group=self.world.forward))
            elif self._slot in borrowers:
                like = self._graph.traced.named(name)
                value = torch.empty(like.shape, dtype=like.dtype, device=self.world.device)
                finish(dist.irecv(value, self.world.rank_of_slot[lender], group=self.world.forward))
                self._loans[name] = value

    def _resolve(self) -> None:
        """Find the tensors that this rank's part computes with."""
        sources = (self._loans, self.bound.constants, self._state)
        self._tensors = [next(source[name] for source in sources if name in source) for name in self.bound.part.tensors]

    def _give_inputs(self, step: Step) -> None:
        """Slice this rank's mini-batch into pieces, and weigh the losses of each."""
        specs, sizes = self._graph.signature.tensors, step.pieces
        counts = self._label_counts(step)
        device = self.world.device
        for piece in sizes.of_slot(self._slot):
            first, rows = sizes.slices[piece]
            slices = [
                (leaf[first : first + rows] if spec.batch else leaf).detach()
                for spec, leaf in zip(specs, step.leaves, strict=True)
            ]
            values = pieces_weights(
                self._graph.weights,
                world=self._averaged,
                rows=rows,
                rank_rows=sizes.rank_rows[self._slot],
                total_rows=sizes.total,
                counts=counts,
            )
            weights = [torch.tensor(value, dtype=torch.float64, device=device) for value in values]
            for node, tensor in zip(self._nodes, [*slices, *weights], strict=True):
                step.values[piece, node] = tensor

    def _label_counts(self, step: Step) -> dict[str, Count]:
        """Denominators of this rank's means (labels that count), over its whole mini-batch."""
        rows = step.pieces.rank_rows[self._slot]
        if rows == 0:
            return {}
        if step.whole is not None:  # this rank's part of the labels of all
            return counted(self._graph.label_counts, step.whole, rows / step.pieces.total)
        return counted(self._graph.label_counts, step.leaves)

    def counts_no_label(self, step: Step) -> bool:
        """Whether a mean over labels has none to count in this rank's mini-batch."""
        counts = self._label_counts(step).values()
        return any(not any(each) if isinstance(each, list) else not each for each in counts)

    def _compute(
        self, step: Step, piece: int, live: frozenset[Node] | None, before: Mapping[str, torch.Tensor]
    ) -> None:
        """Forward of one piece."""
        differentiable = self._graph.placement.requires_grad if live is None else live
        inputs: dict[Node, torch.Tensor] = {}
        for node in self.bound.part.inputs:
            value = step.values.pop((piece, node)).detach()
            inputs[node] = value.requires_grad_() if node in differentiable else value
        buffers = {name: tensor.clone() for name, tensor in before.items()}
        records = self._graph.signature.mode.grad
        with torch.set_grad_enabled(records and not self.bound.recompute):
            outputs = self._run(step, piece, inputs, buffers)
        for node, value in outputs.items():
            step.values[piece, node] = value.detach()
        for node in self._numbers:
            if node in outputs:
                value = step.values.pop((piece, node))
                value = value.to(torch.complex128 if value.is_complex() else torch.float64)
                step.sums[node] = step.sums[node] + value if node in step.sums else value
        if records:
            if live is not None:
                outputs = {node: value for node, value in outputs.items() if node in live}
            kept = {} if self.bound.recompute else outputs
            step.saved[piece] = Saved(inputs, kept, dict(before) if self.bound.recompute else {})
        if piece == step.pieces.first:
            with torch.no_grad():
                for name, tensor in buffers.items():
                    self._state[name].copy_(tensor)

    def _run(
        self, step: Step, piece: int, inputs: Mapping[Node, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[Node, torch.Tensor]:
        """Run this rank's part on a piece; `buffers` replace those that it writes into."""
        part = self.bound.part
        tensors = self._tensors
        if buffers:
            tensors = [buffers.get(name, tensor) for name, tensor in zip(part.tensors, tensors, strict=True)]
        with (
            self._random(step, piece) if part.random else contextlib.nullcontext(),
            self._graph.signature.mode.autocasting(),
        ):
            arguments = (*inputs.values(), *tensors, *part.numbers_at(step.pieces.rows[piece]))
            values = self.world.finite.run(part.module, arguments)
        return dict(zip(part.outputs, values, strict=True))

    @contextlib.contextmanager
    def _random(self, step: Step, piece: int) -> Iterator[None]:
        """Random numbers that depend on seed, step, piece and stage alone; the script's own stay untouched."""
        text = f"{self._seed}/{step.number}/{piece}/{self.bound.stage}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield

    def _agree_on_buffers(self, step: Step) -> None:
        """Give the written buffers of the kept piece to the other replicas of the stage."""
        layout = self.bound.layout
        slots = layout.stages[self.bound.stage]
        if not self._written or len(slots) < 2:
            return
        source = self.world.rank_of_slot[layout.slot_of(self.bound.stage, step.pieces.first)]
        group = self.world.group_of(slots)
        for name in self._written:
            dist.broadcast(self._state[name].detach(), source, group=group)

    def _outputs(self, step: Step) -> list[Any]:
        """This rank's outputs. Collective where all ranks add up some."""
        missing: frozenset[Node] = frozenset()
        if step.interleaved and self.bound.interleaved is not None:
            missing = self.bound.interleaved.missing
        rows, pieces = step.pieces.rank_rows[self._slot], step.pieces.of_slot(self._slot)
        outputs = join(
            self._graph, step.values, pieces, rows, missing, self.world.device, shared=step.whole is not None
        )
        if self._numbers:
            lengths = [number_length(node) for node in self._numbers]
            flat = [
                flat_number(step.sums[node]) if node in step.sums else torch.zeros(length, dtype=torch.float64)
                for node, length in zip(self._numbers, lengths, strict=True)
            ]
            added = self.world.sum_numbers(torch.cat(flat)) / self._averaged
            parts = dict(zip(self._numbers, added.split(lengths), strict=True))
            for place, node in enumerate(self._graph.traced.results):
                if node in parts and outputs[place] is None:
                    outputs[place] = shaped_number(parts[node], node, self.world.device)
        step.sums.clear()
        return outputs

    # -- backward ---------------------------------------------------------------------------------------------

    def _upstream(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> frozenset[Node]:
        """Tell each other which outputs have gradients, and those of numbers; returns the nodes that get some."""
        results = self._graph.traced.results
        given = dict(zip(results, gradients, strict=True))
        flags = pack_flags([gradient is not None for gradient in gradients])
        lengths = [number_length(node) for node in self._numbers]
        numbers: list[float] = []
        for node, length in zip(self._numbers, lengths, strict=True):
            gradient = given[node]
            numbers += flat_number(gradient).tolist() if gradient is not None else [0.0] * length
        told = agree(self.world, Phase.BACKWARD, step.number, *flags, *pack_floats(numbers))
        by_rank = [unpack_flags(each, len(gradients)) for each in told]
        parts = [torch.tensor(unpack_floats(each[len(flags) :]), dtype=torch.float64).split(lengths) for each in told]
        for place, node in enumerate(self._numbers):
            step.upstream[node] = [
                shaped_number(parts[rank][place], node, self.world.device) for rank in self.world.rank_of_slot
            ]
        return self.bound.live(tuple(any(column) for column in zip(*by_rank, strict=True)))

    def _give_seeds(self, step: Step, gradients: Sequence[torch.Tensor | None], live: frozenset[Node]) -> None:
        """Split the gradients of this rank's outputs into those of its pieces."""
        sizes, pieces = step.pieces, step.pieces.of_slot(self._slot)
        for node, result, gradient in zip(self._graph.traced.results, self._graph.results, gradients, strict=True):
            if node not in live or result.kind in ("number", "global"):
                continue
            for piece in pieces:
                first, rows = sizes.slices[piece]
                shape = crossing_shape(node, rows)
                if gradient is None or (result.kind == "first" and piece != pieces[0]):
                    seed = torch.zeros(shape, dtype=node.meta["val"].dtype, device=self.world.device)
                elif result.kind == "rows" and len(pieces) > 1:
                    inner = shape[result.dim] // rows
                    seed = gradient.narrow(result.dim, first * inner, rows * inner)
                else:
                    seed = gradient
                _add(step, piece, node, seed.to(self.world.device))

    def _differentiate(self, step: Step, piece: int, live: frozenset[Node]) -> None:
        """Backward of one piece."""
        saved = step.saved[piece] if step.keep else step.saved.pop(piece)
        outputs = saved.outputs
        if self.bound.recompute:
            buffers = {name: tensor.clone() for name, tensor in saved.buffers.items()}
            with torch.enable_grad():
                outputs = self._run(step, piece, saved.inputs, buffers)
        roots, seeds = [], []
        for node, value in outputs.items():
            gradient = step.gradients.pop((piece, node), None)
            if node in step.upstream and node in live:
                number = step.upstream[node][piece % self.bound.layout.world]
                gradient = number if gradient is None else gradient + number
            if gradient is not None and value.requires_grad:
                roots.append(value)
                seeds.append(gradient)
        if roots:
            torch.autograd.backward(roots, seeds, retain_graph=step.keep)
            if self.world.finite.every:
                found = {node: value.grad for node, value in saved.inputs.items()}
                self.world.finite.gradients(dict(enumerate(seeds)), found)
        for node, value in saved.inputs.items():
            if node not in live:
                continue
            gradient, value.grad = value.grad, None
            if gradient is None:
                gradient = torch.zeros_like(value)
            if node.op == "placeholder" and piece % self.bound.layout.world == self._slot:
                _add(step, piece, node, gradient)
            else:
                step.outgoing[piece, node] = gradient
        if step.interleaved:
            self._drop_sent(step, piece)

    def _drop_sent(self, step: Step, piece: int) -> None:
        """Let go of a piece's values that have been sent; outputs go to the ranks at the end."""
        for node in self.bound.part.outputs:
            if node not in self._handed:
                step.values.pop((piece, node), None)

    def _input_gradients(self, step: Step, live: frozenset[Node]) -> list[torch.Tensor | None]:
        pieces = step.pieces.of_slot(self._slot)
        found: list[torch.Tensor | None] = []
        for node, spec, leaf in zip(self._nodes, self._graph.signature.tensors, step.leaves, strict=False):
            if node not in live:
                found.append(None)
                continue
            parts = [step.gradients[piece, node] for piece in pieces if (piece, node) in step.gradients]
            if not parts:
                found.append(torch.zeros_like(leaf))
            else:
                found.append(torch.cat(parts) if spec.batch else torch.stack(parts).sum(0))
        return found


def _add(step: Step, piece: int, node: Node, gradient: torch.Tensor) -> None:
    key = (piece, node)
    step.gradients[key] = step.gradients[key] + gradient if key in step.gradients else gradient
