"""Forward and backward of one microbatch through this rank's stage."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.device.generators import States, seeded
from rannd.graph.weight_gradients.separation import separate
from rannd.graph.weight_gradients.weight_queue import WeightQueue
from rannd.plan.schedule.program import ActionKind
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiled_stage import CompiledStage, backward_again
from rannd.runtime.execution.bound_graph import BoundGraph
from rannd.runtime.execution.p2p import as_bytes
from rannd.runtime.execution.step import Saved, Step
from rannd.runtime.gradients.sharded_gradients import ShardedGradients, first_readers


class Computing:
    """Runs this rank's stage of a bound graph with `state`, its tensors by name.

    `sharded`: what the replicas of the stage share of the gradients of its parameters.
    """

    def __init__(
        self,
        context: Context,
        bound: BoundGraph,
        state: Mapping[str, torch.Tensor],
        seed: int,
        compiled: Sequence[CompiledStage] = (),
        sharded: ShardedGradients | None = None,
    ) -> None:
        self.seed = seed
        """Base seed of the stage's random numbers."""
        self._compiled = compiled
        """Code of each segment; empty: all run eagerly."""
        self._world = context.world
        self._finite = context.finite
        self._bound = bound
        self._state = state
        self._written = sorted(bound.graph.placement.written & set(bound.part.tensors))
        self._loans: dict[str, torch.Tensor] = {}
        parts = [segment.part for segment in bound.segments]
        self._name_of: dict[int, str] = {}
        """Name of each tensor of the stage, by its identity."""
        self._tensors: list[list[torch.Tensor]] = []
        """The tensors of each segment."""
        self._written_by = [[name for name in self._written if name in set(part.tensors)] for part in parts]
        self.arrivals = Counter(name for part in parts for name in part.tensors)
        """Number of segments that read each tensor: how often its gradient is accumulated in a backward."""
        self._sharded = sharded
        self._complete = first_readers(sharded.buckets, [part.tensors for part in parts]) if sharded is not None else []
        """The shared parameters whose gradients are complete after the backward of each segment."""
        self._values = sharded.values if sharded is not None else None
        self._reads = self._values.readers([part.tensors for part in parts]) if self._values is not None else []
        """The parameters, of those that replicas share, that each segment reads."""
        parameters = {name for name in bound.part.tensors if isinstance(state.get(name), torch.nn.Parameter)}
        self._halves = [
            separate(segment.part, parameters) if bound.splits and not compiled and not segment.recompute else None
            for segment in bound.segments
        ]
        """The segments whose backward comes in two halves, inside of a call."""
        late = Counter(name for half in self._halves if half is not None for name in half.names)
        self.late_arrivals = {name: late[name] for name in self.arrivals}
        """How often the gradient of each tensor is accumulated in the second half of a backward."""
        self._entering, self._leaving = frozenset(bound.part.inputs), frozenset(bound.part.outputs)
        self._last = [
            [
                node
                for node in part.inputs
                if node not in self._leaving and not any(node in later.inputs for later in parts[number + 1 :])
            ]
            for number, part in enumerate(parts)
        ]
        """Values that no segment behind each segment reads."""
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

    def resolve(self) -> None:
        """Look up the tensor arguments of the segments, in their order."""
        self.rest()  # a phase that has raised an error may have left values that are not those of now
        sources = (self._loans, self._bound.constants, self._state)
        self._name_of = {id(self._state[name]): name for name in self.late_arrivals if name in self._state}
        self._tensors = [
            [next(source[name] for source in sources if name in source) for name in segment.part.tensors]
            for segment in self._bound.segments
        ]

    def _lend(self) -> None:
        """Send tensors to the stages that read but do not hold them."""
        world, slot, transport = self._world, self._bound.slot, self._world.transport
        for name, (lender, borrowers) in self._bound.borrowed.items():
            if self._values is not None and slot in self._bound.layout.stages[self._bound.layout.stage_of(lender)]:
                self._values.enter(*self._values.readers([[name]]))
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
        graph, part = self._bound.graph, self._bound.part
        differentiable = graph.placement.requires_grad if live is None else live
        values = {node: step.values.pop((piece, node)) for node in part.inputs}
        buffers = {name: tensor.clone() for name, tensor in self._before.items()}
        records = graph.signature.mode.grad
        saved: list[Saved] = []
        random: States | None = None  # as if the stage were one segment
        for number, segment in enumerate(self._bound.segments):
            inputs: dict[Node, torch.Tensor] = {}
            for node in segment.part.inputs:
                value = values[node].detach()
                if node in graph.placement.writers:
                    value = value.clone()  # it may be the script's own tensor, or part of a message buffer
                inputs[node] = value.requires_grad_() if node in differentiable else value
            for node in self._last[number]:
                del values[node]
            self._gather(number, number + 1)
            before = {name: buffers[name].clone() for name in self._written_by[number]} if segment.recompute else {}
            with torch.set_grad_enabled(records and not segment.recompute):
                outputs, after = self._run(step, piece, number, inputs, buffers, random)
            values.update((node, self._lasting(value.detach())) for node, value in outputs.items())
            if records:
                kept = outputs if live is None else {node: each for node, each in outputs.items() if node in live}
                saved.append(Saved(inputs, {} if segment.recompute else kept, before, random))
            random = after
        for node in part.outputs:
            step.values[piece, node] = values[node]
        if records:
            step.saved[piece] = saved
        if piece == step.pieces.first:
            with torch.no_grad():
                for name, tensor in buffers.items():
                    self._state[name].copy_(tensor)

    def backward(self, step: Step, piece: int, live: frozenset[Node]) -> None:
        """Backward of one microbatch, which recomputes forward of segments if so planned."""
        every = step.saved[piece] if step.keep else step.saved.pop(piece)
        world = self._bound.layout.world
        gradients: dict[Node, torch.Tensor] = {}
        """Of values between segments, and of the inputs of the stage."""
        entering = {
            node: value
            for saved in every
            for node, value in saved.inputs.items()
            if node in self._entering and node in live
        }
        for number, segment in reversed(list(enumerate(self._bound.segments))):
            saved = every[number]
            if not step.keep:
                every[number] = Saved({}, {}, {})
            self._gather(number, number - 1)
            outputs = saved.outputs
            if segment.recompute:
                buffers = {name: tensor.clone() for name, tensor in saved.buffers.items()}
                with torch.enable_grad():
                    outputs, _ = self._run(step, piece, number, saved.inputs, buffers, saved.random)
            roots, seeds = [], []
            for node, value in outputs.items():
                given = [gradients.pop(node, None)]
                if node in self._leaving:
                    given.append(step.gradients.pop((piece, node), None))
                    if node in step.upstream and node in live:
                        given.append(step.upstream[node][piece % world])
                gradient = _sum(given)
                if gradient is not None and value.requires_grad:
                    roots.append(value)
                    seeds.append(gradient)
            if roots:
                with backward_again() if step.keep and self._compiled else contextlib.nullcontext():
                    torch.autograd.backward(roots, seeds, retain_graph=step.keep)
                if self._finite.every:
                    found = {node: value.grad for node, value in saved.inputs.items()}
                    self._finite.gradients(dict(enumerate(seeds)), found)
            if self._sharded is not None:
                self._sharded.send(self._complete[number])
            for node, value in saved.inputs.items():
                found_here, value.grad = value.grad, None
                if node in live and found_here is not None:
                    gradients[node] = gradients[node] + found_here if node in gradients else found_here
            del saved, outputs, roots, seeds
        for node, value in entering.items():
            gradient = gradients.get(node)
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

    def stand_by(self, kind: ActionKind) -> None:
        """Take part in what the replicas do together in a microbatch, without a microbatch."""
        numbers = range(len(self._bound.segments))
        if kind is ActionKind.FORWARD:
            for number in numbers:
                self._gather(number, number + 1)
        elif kind is ActionKind.BACKWARD and self._sharded is not None:
            for number in reversed(numbers):
                self._gather(number, number - 1)
                self._sharded.send(self._complete[number])

    def rest(self) -> None:
        """Let go of what is needed during a phase only."""
        if self._values is not None:
            self._values.leave()

    def _lasting(self, value: torch.Tensor) -> torch.Tensor:
        """The value, in memory of its own if it is a view of a parameter that replicas share."""
        return value.clone() if self._values is not None and self._values.lends(value) else value

    def _gather(self, number: int, following: int) -> None:
        """Have the parameters of a segment that replicas share, and get those of the segment that follows."""
        if self._values is not None:
            inside = 0 <= following < len(self._reads)
            self._values.enter(self._reads[number], self._reads[following] if inside else ())

    def weights(self, step: Step, piece: int, arrived: Callable[[str], None]) -> None:
        """Second half of a backward: the gradients of parameters that the first one has left.

        `arrived`: called with the name of each parameter whose gradient was accumulated without autograd's hooks.
        """
        for queue in reversed(step.delayed.pop(piece, [])):
            queue.accumulate(lambda parameter: arrived(self._name_of[id(parameter)]))

    def _run(
        self,
        step: Step,
        piece: int,
        number: int,
        inputs: Mapping[Node, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        random: States | None,
    ) -> tuple[dict[Node, torch.Tensor], States | None]:
        """Run a segment on a microbatch, with `buffers` in place of those that the stage writes.

        `random`: where its random numbers begin. Returns its outputs, and where those of the next segment begin.
        """
        part = self._bound.segments[number].part
        tensors = self._tensors[number]
        if buffers:
            tensors = [buffers.get(name, tensor) for name, tensor in zip(part.tensors, tensors, strict=True)]
        with (
            self._random(step, piece, random) if part.random else contextlib.nullcontext(random) as after,
            self._bound.graph.signature.mode.autocasting(),
        ):
            rows = step.pieces.rows[piece]
            if self._compiled and not self._finite.every:
                values = self._compiled[number].run(rows, inputs, tensors, inside=step.interleaved)
            else:
                module, arguments = part.module, [*inputs.values(), *tensors, *part.numbers_at(rows)]
                half = self._halves[number]
                if half is not None and step.interleaved and not self._finite.every:
                    queue = WeightQueue()
                    step.delayed.setdefault(piece, []).append(queue)
                    module, arguments = half.module, [*arguments, queue]
                values = self._finite.run(module, arguments)
        return dict(zip(part.outputs, values, strict=True)), after

    def _random(self, step: Step, piece: int, begin: States | None) -> AbstractContextManager[States]:
        """Fork the RNG with a seed made of base seed, step, microbatch and stage; the script's RNG is unaffected."""
        text = f"{self.seed}/{step.number}/{piece}/{self._bound.stage}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return seeded(self._world.device, seed if begin is None else begin)


def _sum(given: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of the gradients that there are, from left to right; None if there is none."""
    total: torch.Tensor | None = None
    for each in given:
        total = each if total is None else total if each is None else total + each
    return total
