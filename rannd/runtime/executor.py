"""Run the Program of a bound graph on tensors: the forward of a call, and its backward when it is asked for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.cut import crossing_shape
from rannd.graph.losses import LABELS_WEIGHT, pieces_weights
from rannd.graph.sizes import number_at
from rannd.plan.schedule import TRANSFERS, Action, Kind
from rannd.runtime.bound import BoundGraph
from rannd.runtime.exchange import Exchange, Phase, agree, finish, pack_flags, split_rows, unpack_flags
from rannd.runtime.world import World

Key = tuple[int, Node]


@dataclass
class Saved:
    """What the backward of a piece needs."""

    inputs: dict[Node, torch.Tensor]
    outputs: dict[Node, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    """Buffers as they were before the step, where the forward has to run again."""


@dataclass
class Step:
    """One call of the model, until its backward is done."""

    number: int
    rows: tuple[int, ...]
    """Rows of each slot's mini-batch."""
    leaves: Sequence[torch.Tensor]
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    outgoing: dict[Key, torch.Tensor] = field(default_factory=dict)
    finished: bool = False


class Executor:
    """Runs one bound graph, with `state` (name -> tensor to compute with) of this rank's stage."""

    def __init__(self, world: World, bound: BoundGraph, state: Mapping[str, torch.Tensor], seed: int) -> None:
        self.world = world
        self.bound = bound
        self._state = state
        self._seed = seed
        self._graph = bound.graph
        self._layout = bound.layout
        self._slot = bound.slot
        self._last = len(bound.layout.stages)
        self._nodes = self._graph.traced.placeholders
        self._written = sorted(self._graph.placement.written & set(bound.part.tensors))
        self._loans: dict[str, torch.Tensor] = {}
        self._counts = self._graph.label_counts

    # -- sizes ------------------------------------------------------------------------------------------------

    def _slice(self, step: Step, piece: int) -> tuple[int, int]:
        microbatch, slot = divmod(piece, self._layout.world)
        return split_rows(step.rows[slot], self._layout.microbatches)[microbatch]

    def _rows(self, step: Step, piece: int) -> int:
        return self._slice(step, piece)[1]

    def _own(self, step: Step) -> list[int]:
        """Pieces of this rank's own mini-batch that have rows."""
        pieces = range(self._slot, self._layout.pieces_total, self._layout.world)
        return [piece for piece in pieces if self._rows(step, piece)]

    # -- forward ----------------------------------------------------------------------------------------------

    def forward(self, step: Step) -> list[Any]:
        """Run the forward phase; returns the model's outputs for this rank, in the order of the graph's."""
        self._lend()
        self._give_inputs(step)
        before = {name: self._state[name].detach().clone() for name in self._written}
        exchange = Exchange(self.world, self.world.forward)
        length = self.bound.program.forward_length[self._slot]
        for action in self.bound.program.slots[self._slot][:length]:
            if not self._rows(step, action.piece):
                continue
            if action.kind is Kind.FORWARD:
                exchange.flush()
                self._compute(step, action.piece, before)
            else:
                self._transfer_values(step, exchange, action)
        exchange.finish()
        self._agree_on_buffers(step)
        outputs = self._outputs(step)
        step.values.clear()
        return outputs

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

    def _give_inputs(self, step: Step) -> None:
        """Slice this rank's mini-batch into pieces, and weigh the losses of each."""
        pieces = self._own(step)
        specs = self._graph.signature.tensors
        total = sum(step.rows)
        slices: dict[int, list[torch.Tensor]] = {}
        for piece in pieces:
            first, rows = self._slice(step, piece)
            slices[piece] = [
                (leaf[first : first + rows] if spec.batch else leaf).detach()
                for spec, leaf in zip(specs, step.leaves, strict=True)
            ]
        counts = self._label_counts(step)
        for piece in pieces:
            values = pieces_weights(
                self._graph.weights,
                world=self._layout.world,
                rows=self._rows(step, piece),
                rank_rows=step.rows[self._slot],
                total_rows=total,
                counts=counts,
            )
            weights = [torch.tensor(value, dtype=torch.float64, device=self.world.device) for value in values]
            for node, tensor in zip(self._nodes, [*slices[piece], *weights], strict=True):
                step.values[piece, node] = tensor

    def _label_counts(self, step: Step) -> dict[str, float]:
        """Denominators of this rank's means (labels that count), over its whole mini-batch."""
        if self._counts is None or step.rows[self._slot] == 0:
            return {}
        with torch.no_grad():
            found = self._counts(*(leaf.detach() for leaf in step.leaves))
        return {f"{LABELS_WEIGHT}{number}": float(count) for number, count in enumerate(found)}

    def _transfer_values(self, step: Step, exchange: Exchange, action: Action) -> None:
        piece, edge = action.piece, (action.src, action.dst)
        rows = self._rows(step, piece)
        later = action.src < 0 or action.dst == self._last
        for node in self.bound.edges[edge]:
            if action.kind is Kind.SEND_VALUES:
                exchange.send(node, step.values[piece, node], rows, action.peer, later=later)
            else:
                exchange.receive(
                    node, rows, action.peer, lambda n, t: step.values.__setitem__((piece, n), t), later=later
                )

    def _compute(self, step: Step, piece: int, before: Mapping[str, torch.Tensor]) -> None:
        """Forward of one piece."""
        inputs: dict[Node, torch.Tensor] = {}
        for node in self.bound.part.inputs:
            value = step.values[piece, node].detach()
            inputs[node] = value.requires_grad_() if node in self._graph.placement.requires_grad else value
        buffers = {name: tensor.clone() for name, tensor in before.items()}
        records = self._graph.signature.mode.grad
        with torch.set_grad_enabled(records and not self.bound.recompute):
            outputs = self._run(step, piece, inputs, buffers)
        for node, value in outputs.items():
            step.values[piece, node] = value.detach()
        if records:
            kept = {} if self.bound.recompute else outputs
            step.saved[piece] = Saved(inputs, kept, dict(before) if self.bound.recompute else {})
        if piece == self._winner(step):
            with torch.no_grad():
                for name, tensor in buffers.items():
                    self._state[name].copy_(tensor)

    def _run(
        self, step: Step, piece: int, inputs: Mapping[Node, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[Node, torch.Tensor]:
        """Run this rank's part on a piece; `buffers` replace those that it writes into."""
        part = self.bound.part
        sources = (buffers, self._loans, self.bound.constants, self._state)
        tensors = [next(source[name] for source in sources if name in source) for name in part.tensors]
        with (
            self._random(step, piece) if part.random else contextlib.nullcontext(),
            self._graph.signature.mode.autocasting(),
        ):
            values = part.module(*inputs.values(), *tensors, *part.numbers_at(self._rows(step, piece)))
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

    def _winner(self, step: Step) -> int:
        """The piece whose buffers are kept: the first of the first rank that has rows."""
        return next(slot for slot, rows in enumerate(step.rows) if rows)

    def _agree_on_buffers(self, step: Step) -> None:
        """Give the written buffers of the kept piece to the other replicas of the stage."""
        slots = self._layout.stages[self.bound.stage]
        if not self._written or len(slots) < 2:
            return
        source = self.world.rank_of_slot[self._layout.slot_of(self.bound.stage, self._winner(step))]
        group = self.world.group_of(slots)
        for name in self._written:
            dist.broadcast(self._state[name].detach(), source, group=group)

    def _outputs(self, step: Step) -> list[Any]:
        """Join the outputs of this rank's pieces."""
        pieces = self._own(step)
        rows = step.rows[self._slot]
        outputs: list[Any] = []
        numbers: list[torch.Tensor] = []
        for node, result in zip(self._graph.traced.results, self._graph.results, strict=True):
            if result.kind == "number":
                outputs.append(number_at(node.meta["val"], rows))
                continue
            found = [step.values[piece, node] for piece in pieces]
            if result.kind == "rows" and len(found) > 1:
                outputs.append(torch.cat(found, result.dim))
            elif result.kind == "global":
                shape = crossing_shape(node, rows)
                sums = torch.stack(found).sum(0) if found else torch.zeros(shape, dtype=node.meta["val"].dtype)
                numbers.append(sums.reshape(-1).to("cpu", torch.float64))
                outputs.append(sums)
            elif result.kind == "sum" and found:
                outputs.append(torch.stack(found).sum(0))
            elif found:
                outputs.append(found[0])
            else:
                outputs.append(self._empty(node))
        if numbers:
            sizes = [number.numel() for number in numbers]
            added = self.world.sum_numbers(torch.cat(numbers)) / self._layout.world
            parts = iter(added.split(sizes))
            for place, result in enumerate(self._graph.results):
                if result.kind == "global":
                    local = outputs[place]
                    outputs[place] = next(parts).reshape(local.shape).to(self.world.device, local.dtype)
        return outputs

    def _empty(self, node: Node) -> torch.Tensor:
        """An output of a rank without rows."""
        shape = crossing_shape(node, 0)
        if 0 not in shape:
            raise StepError(
                f"this rank's mini-batch is empty, and the model's output {node.name} of shape {shape} cannot "
                "be empty; give every rank at least one sample"
            )
        return torch.empty(shape, dtype=node.meta["val"].dtype, device=self.world.device)

    # -- backward ---------------------------------------------------------------------------------------------

    def backward(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the backward phase with this rank's gradients of its outputs; returns those of its inputs.

        Gradients of parameters are added to those of the tensors in `state`; reducing them is the caller's.
        """
        if step.finished:
            raise StepError(
                "backward runs a second time through one call of the model, whose activations are gone; call the model "
                "again (retain_graph keeps nothing here)"
            )
        step.finished = True
        packed = pack_flags([gradient is not None for gradient in gradients])
        told = agree(self.world, Phase.BACKWARD, step.number, *packed)
        flags = [unpack_flags(first, second, len(gradients)) for first, second in told]
        wanted = tuple(any(column) for column in zip(*flags, strict=True))
        live = self.bound.live(wanted)
        self._give_seeds(step, gradients, live)
        exchange = Exchange(self.world, self.world.backward)
        length = self.bound.program.forward_length[self._slot]
        for action in self.bound.program.slots[self._slot][length:]:
            if action.kind is Kind.REDUCE or not self._rows(step, action.piece):
                continue
            if action.kind in TRANSFERS:
                self._transfer_gradients(step, exchange, action, live)
            else:
                exchange.flush()
                self._differentiate(step, action.piece, live)
        exchange.finish()
        inputs = self._input_gradients(step, live)
        step.gradients.clear()
        step.outgoing.clear()
        return inputs

    def _give_seeds(self, step: Step, gradients: Sequence[torch.Tensor | None], live: frozenset[Node]) -> None:
        """Split the gradients of this rank's outputs into those of its pieces."""
        pieces = self._own(step)
        for node, result, gradient in zip(self._graph.traced.results, self._graph.results, gradients, strict=True):
            if node not in live:
                continue
            for piece in pieces:
                first, rows = self._slice(step, piece)
                shape = crossing_shape(node, rows)
                if gradient is None or (result.kind == "first" and piece != pieces[0]):
                    seed = torch.zeros(shape, dtype=node.meta["val"].dtype, device=self.world.device)
                elif result.kind == "rows" and len(pieces) > 1:
                    inner = shape[result.dim] // rows
                    seed = gradient.narrow(result.dim, first * inner, rows * inner)
                else:
                    seed = gradient
                self._add(step, piece, node, seed.to(self.world.device))

    def _add(self, step: Step, piece: int, node: Node, gradient: torch.Tensor) -> None:
        key = (piece, node)
        step.gradients[key] = step.gradients[key] + gradient if key in step.gradients else gradient

    def _transfer_gradients(self, step: Step, exchange: Exchange, action: Action, live: frozenset[Node]) -> None:
        piece, edge = action.piece, (action.src, action.dst)
        rows = self._rows(step, piece)
        later = action.src < 0 or action.dst == self._last
        for node in self.bound.edges[edge]:
            if node not in live:
                continue
            if action.kind is Kind.SEND_GRADS:
                source = step.gradients if action.dst == self._last else step.outgoing
                exchange.send(node, source[piece, node], rows, action.peer, later=later)
            else:
                exchange.receive(node, rows, action.peer, lambda n, t: self._add(step, piece, n, t), later=later)

    def _differentiate(self, step: Step, piece: int, live: frozenset[Node]) -> None:
        """Backward of one piece."""
        saved = step.saved.pop(piece)
        outputs = saved.outputs
        if self.bound.recompute:
            buffers = {name: tensor.clone() for name, tensor in saved.buffers.items()}
            with torch.enable_grad():
                outputs = self._run(step, piece, saved.inputs, buffers)
        roots, seeds = [], []
        for node, value in outputs.items():
            gradient = step.gradients.pop((piece, node), None)
            if gradient is not None and value.requires_grad:
                roots.append(value)
                seeds.append(gradient)
        if roots:
            torch.autograd.backward(roots, seeds)
        for node, value in saved.inputs.items():
            if node not in live:
                continue
            gradient = value.grad if value.grad is not None else torch.zeros_like(value)
            if node.op == "placeholder" and self._layout.slot_of(-1, piece) == self._slot:
                self._add(step, piece, node, gradient)
            else:
                step.outgoing[piece, node] = gradient

    def _input_gradients(self, step: Step, live: frozenset[Node]) -> list[torch.Tensor | None]:
        pieces = self._own(step)
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
