"""Forward and backward of one microbatch through this rank's stage."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.device.generators import seeded
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiled_stage import CompiledStage, backward_again
from rannd.runtime.execution.bound_graph import BoundGraph
from rannd.runtime.execution.p2p import as_bytes
from rannd.runtime.execution.step import Saved, Step


class Computing:
    """Runs this rank's stage of a bound graph with `state`, its tensors by name."""

    def __init__(
        self,
        context: Context,
        bound: BoundGraph,
        state: Mapping[str, torch.Tensor],
        seed: int,
        compiled: CompiledStage | None = None,
    ) -> None:
        self.seed = seed
        """Base seed of the stage's random numbers."""
        self._compiled = compiled
        self._world = context.world
        self._finite = context.finite
        self._bound = bound
        self._state = state
        self._written = sorted(bound.graph.placement.written & set(bound.part.tensors))
        self._loans: dict[str, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        self._before: dict[str, torch.Tensor] = {}
        """Buffers written by the stage, as they were before the call: every microbatch starts with them."""
        handed = bound.interleaved.traffic.edges if bound.interleaved is not None else {}
        last = len(bound.layout.stages)
        self._handed = frozenset(node for edge, nodes in handed.items() if edge[1] == last for node in nodes)
        """Outputs that are sent to the ranks at the end of an interleaved step."""

    # -- tensors ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare the tensors of a call: borrow, look up, and copy written buffers."""
        self._lend()
        self.resolve()
        self._before = {name: self._state[name].detach().clone() for name in self._written}

    def resolve(self) -> list[torch.Tensor]:
        """Look up the tensor arguments of the stage, in its order."""
        sources = (self._loans, self._bound.constants, self._state)
        self._tensors = [
            next(source[name] for source in sources if name in source) for name in self._bound.part.tensors
        ]
        return self._tensors

    def _lend(self) -> None:
        """Send tensors to the stages that read but do not hold them."""
        world, slot, transport = self._world, self._bound.slot, self._world.transport
        for name, (lender, borrowers) in self._bound.borrowed.items():
            if slot == lender:
                message = as_bytes(self._state[name].detach())
                sent = [transport.send(message, world.rank_of_slot[each], gradients=False) for each in borrowers]
                for each in sent:
                    transport.settle(each)
            elif slot in borrowers:
                like = self._bound.graph.traced.named(name)
                buffer = transport.empty(like.numel() * like.dtype.itemsize)
                transport.take(transport.post(buffer, world.rank_of_slot[lender], gradients=False))
                self._loans[name] = buffer.view(like.dtype).view(like.shape)

    def agree_on_buffers(self, step: Step) -> None:
        """Broadcast the written buffers of the microbatch that is kept to the other replicas of the stage."""
        layout, world = self._bound.layout, self._world
        slots = layout.stages[self._bound.stage]
        if not self._written or len(slots) < 2:
            return
        source = world.rank_of_slot[layout.slot_of(self._bound.stage, step.pieces.first)]
        group = world.group_of(slots)
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for name in self._written:
            buffer = self._state[name].detach()
            kinds.setdefault(buffer.dtype, []).append(buffer)
        for buffers in kinds.values():  # one message per dtype, since a model has many small buffers
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, source, group=group)
            if world.rank != source:
                for buffer, part in zip(buffers, flat.split([each.numel() for each in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))

    # -- one piece --------------------------------------------------------------------------------------------

    def forward(self, step: Step, piece: int, live: frozenset[Node] | None) -> None:
        """Forward of one microbatch; `live`: nodes that will get a gradient, None if not known yet."""
        graph = self._bound.graph
        differentiable = graph.placement.requires_grad if live is None else live
        inputs: dict[Node, torch.Tensor] = {}
        for node in self._bound.part.inputs:
            value = step.values.pop((piece, node)).detach()
            if node in graph.placement.writers:
                value = value.clone()  # it may be the script's own tensor, or part of a message buffer
            inputs[node] = value.requires_grad_() if node in differentiable else value
        buffers = {name: tensor.clone() for name, tensor in self._before.items()}
        records = graph.signature.mode.grad
        with torch.set_grad_enabled(records and not self._bound.recompute):
            outputs = self._run(step, piece, inputs, buffers)
        for node, value in outputs.items():
            step.values[piece, node] = value.detach()
        if records:
            if live is not None:
                outputs = {node: value for node, value in outputs.items() if node in live}
            kept = {} if self._bound.recompute else outputs
            step.saved[piece] = Saved(inputs, kept, dict(self._before) if self._bound.recompute else {})
        if piece == step.pieces.first:
            with torch.no_grad():
                for name, tensor in buffers.items():
                    self._state[name].copy_(tensor)

    def backward(self, step: Step, piece: int, live: frozenset[Node]) -> None:
        """Backward of one microbatch, which recomputes its forward if so planned."""
        saved = step.saved[piece] if step.keep else step.saved.pop(piece)
        outputs = saved.outputs
        world = self._bound.layout.world
        if self._bound.recompute:
            buffers = {name: tensor.clone() for name, tensor in saved.buffers.items()}
            with torch.enable_grad():
                outputs = self._run(step, piece, saved.inputs, buffers)
        roots, seeds = [], []
        for node, value in outputs.items():
            gradient = step.gradients.pop((piece, node), None)
            if node in step.upstream and node in live:
                number = step.upstream[node][piece % world]
                gradient = number if gradient is None else gradient + number
            if gradient is not None and value.requires_grad:
                roots.append(value)
                seeds.append(gradient)
        if roots:
            with backward_again() if step.keep and self._compiled is not None else contextlib.nullcontext():
                torch.autograd.backward(roots, seeds, retain_graph=step.keep)
            if self._finite.every:
                found = {node: value.grad for node, value in saved.inputs.items()}
                self._finite.gradients(dict(enumerate(seeds)), found)
        for node, value in saved.inputs.items():
            if node not in live:
                continue
            gradient, value.grad = value.grad, None
            if gradient is None:
                gradient = torch.zeros_like(value)
            if node.op == "placeholder" and piece % world == self._bound.slot:
                step.add(piece, node, gradient)
            else:
                step.outgoing[piece, node] = gradient
        if step.interleaved:
            for node in self._bound.part.outputs:  # already sent
                if node not in self._handed:
                    step.values.pop((piece, node), None)

    def _run(
        self, step: Step, piece: int, inputs: Mapping[Node, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[Node, torch.Tensor]:
        """Run the stage on a microbatch, with `buffers` in place of those that it writes."""
        part = self._bound.part
        tensors = self._tensors
        if buffers:
            tensors = [buffers.get(name, tensor) for name, tensor in zip(part.tensors, tensors, strict=True)]
        with (
            self._random(step, piece) if part.random else contextlib.nullcontext(),
            self._bound.graph.signature.mode.autocasting(),
        ):
            rows = step.pieces.rows[piece]
            if self._compiled is not None and not self._finite.every:
                values = self._compiled.run(rows, inputs, tensors, inside=step.interleaved)
            else:
                arguments = (*inputs.values(), *tensors, *part.numbers_at(rows))
                values = self._finite.run(part.module, arguments)
        return dict(zip(part.outputs, values, strict=True))

    @contextlib.contextmanager
    def _random(self, step: Step, piece: int) -> Iterator[None]:
        """Fork the RNG with a seed made of base seed, step, microbatch and stage; the script's RNG is unaffected."""
        text = f"{self.seed}/{step.number}/{piece}/{self._bound.stage}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        with seeded(self._world.device, seed):
            yield
