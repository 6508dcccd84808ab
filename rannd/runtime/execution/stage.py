"""Forward and backward of one microbatch through a stage of this rank."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.device.action_clock import ActionClock
from rannd.device.generators import States, drawing_from, other_states, seeded
from rannd.device.identity import is_accelerator
from rannd.errors import AuditError
from rannd.graph.fx.aliasing import is_leaf
from rannd.graph.partition.failing_op import tell_op
from rannd.graph.weight_gradients.separation import separate
from rannd.graph.weight_gradients.weight_queue import WeightQueue
from rannd.plan.schedule.program import ActionKind
from rannd.plan.zero import LEAST_OFFLOADED
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.runtime.audit.differences import Measure
from rannd.runtime.binding.bound_graph import BoundGraph, BoundStage
from rannd.runtime.binding.microbatches import piece_seed
from rannd.runtime.binding.slot_tensors import SlotTensors
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiled_stage import CompiledStage, backward_again
from rannd.runtime.execution.step import Saved, Step
from rannd.runtime.gradients.sharded_gradients import ShardedGradients, first_readers
from rannd.runtime.transport.transport import finish
from rannd.runtime.zero.state_home import StateHome


class Computing:
    """Runs a stage of this rank of a bound graph, with this rank's tensors.

    `sharded`: what the replicas of the rank's stages share of the gradients of their parameters. `home`: where values
    that segments recompute from are between forward and backward; None: in the device's memory.
    """

    def __init__(
        self,
        context: Context,
        bound: BoundGraph,
        stage: BoundStage,
        tensors: SlotTensors,
        seed: int,
        compiled: Sequence[CompiledStage] = (),
        sharded: ShardedGradients | None = None,
        home: StateHome | None = None,
    ) -> None:
        self.seed = seed
        """Base seed of the stage's random numbers."""
        self._compiled = compiled
        """Code of each segment; empty: all run eagerly."""
        self._world = context.world
        self._finite = context.finite
        self._bound = bound
        self._stage = stage
        self._slot_tensors = tensors
        self._state = state = tensors.held
        self._written = sorted(bound.graph.placement.written & set(stage.part.tensors))
        """Buffers that it writes; no other stage reads them (see Placement.group)."""
        parts = [segment.part for segment in stage.segments]
        self._name_of: dict[int, str] = {}
        """Name of each tensor whose gradient comes late, by its identity."""
        self._tensors: list[list[torch.Tensor]] = []
        """The tensors of each segment."""
        self._written_by = [[name for name in self._written if name in set(part.tensors)] for part in parts]
        self.arrivals = Counter(name for part in parts for name in part.tensors)
        """Number of segments that read each tensor: how often its gradient is accumulated in a backward."""
        self._sharded = sharded
        self._home = home
        self._complete: list[list[int]] = []
        """The shared parameters whose gradients are complete after the backward of each segment."""
        if sharded is not None:
            complete = first_readers(sharded.buckets, [segment.part.tensors for segment in bound.segments])
            before = sum(len(each.segments) for each in bound.stages if each.number < stage.number)
            self._complete = complete[before : before + len(parts)]
        self._values = sharded.values if sharded is not None else None
        self._reads = self._values.readers([part.tensors for part in parts]) if self._values is not None else []
        """The parameters, of those that replicas share, that each segment reads."""
        parameters = {name for name in stage.part.tensors if isinstance(state.get(name), torch.nn.Parameter)}
        self._halves = [
            separate(segment.part, parameters) if stage.splits and not compiled and not segment.recompute else None
            for segment in stage.segments
        ]
        """The segments whose backward comes in two halves, inside of a call."""
        late = Counter(name for half in self._halves if half is not None for name in half.names)
        self._late = sorted(late)
        self.late_arrivals = {name: late[name] for name in self.arrivals}
        """How often the gradient of each tensor is accumulated in the second half of a backward."""
        self._entering, self._leaving = frozenset(stage.part.inputs), frozenset(stage.part.outputs)
        self._last = [
            [
                node
                for node in part.inputs
                if node not in self._leaving and not any(node in later.inputs for later in parts[number + 1 :])
            ]
            for number, part in enumerate(parts)
        ]
        """Values that no segment behind each segment reads."""
        writers = bound.graph.placement.writers
        self._writes = [
            {node for node in segment.part.inputs if not segment.members.isdisjoint(writers.get(node, ()))}
            for segment in stage.segments
        ]
        """Inputs that each segment writes in place."""
        self._opaque = [any(is_leaf(node) for node in segment.members) for segment in stage.segments]
        """Whether each segment runs code that torch does not see, which may draw of Python's and numpy's generators."""
        self._after: dict[str, torch.Tensor] = {}
        """Buffers as the microbatch that is kept has written them; until the call ends all start with the old ones."""
        results = zip(bound.graph.traced.results, bound.graph.results, strict=True)
        self._summed = [node for node, result in results if result.kind == "global" and node in self._leaving]
        """Its outputs that are summed over all ranks."""
        self._outside = len(bound.layout.stages)
        """Stands for the ranks that get the outputs."""
        self._clock: ActionClock | None = None
        self._compares = context.config.verify_recomp
        """Whether what is recomputed is compared with what the forward has computed."""

    # -- tensors ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare the tensors of a call."""
        self.resolve()
        self._after = {}

    def resolve(self) -> None:
        """Look up the tensor arguments of the segments, in their order."""
        self.rest()  # a phase that has raised an error may have left values that are not those of now
        self._clock = self._world.clock if self._stage.planned_rows else None
        self._name_of = {id(self._state[name]): name for name in self._late}
        self._tensors = [
            self._slot_tensors.find(segment.part.tensors, self._stage.constants) for segment in self._stage.segments
        ]

    def agree_on_buffers(self, step: Step) -> None:
        """Keep the buffers of one microbatch: broadcast them to the other replicas of the stage."""
        layout, world = self._bound.layout, self._world
        with torch.no_grad():
            for name, tensor in self._after.items():
                self._state[name].copy_(tensor)
        self._after = {}
        slots = layout.stages[self._stage.number]
        if not self._written or len(slots) < 2:
            return
        source = world.rank_of_slot[layout.slot_of(self._stage.number, step.pieces.first)]
        group = world.group_of(slots)
        # One message, since a model has many small buffers. The widest come first: then all are where views may begin.
        buffers = sorted((self._state[name].detach() for name in self._written), key=lambda each: -each.itemsize)
        flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
        finish(dist.broadcast(flat, source, group=group, async_op=True), on_host=flat.device.type == "cpu")
        if world.rank != source:
            parts = flat.split([each.nbytes for each in buffers])
            received = [part.view(each.dtype).view_as(each) for part, each in zip(parts, buffers, strict=True)]
            torch._foreach_copy_(buffers, received)

    # -- one piece --------------------------------------------------------------------------------------------

    def forward(self, step: Step, piece: int, live: frozenset[Node] | None) -> None:
        """Forward of one microbatch; `live`: nodes that will get a gradient, None if not known yet."""
        graph, part, stage = self._bound.graph, self._stage.part, self._stage.number
        differentiable = graph.placement.requires_grad if live is None else live
        values = {node: step.values.pop((piece, node, stage)) for node in part.inputs}
        if step.audit is not None:
            step.audit.record.values(stage, piece, entered=values)
            step.audit.record.named("before", stage, tensors=self.written())
        buffers = {name: self._state[name].detach().clone() for name in self._written}
        records = graph.signature.mode.grad
        saved: list[Saved] = []
        laid: dict[Node, torch.Tensor] = {}
        random: States | None = None  # as if the stage were one segment
        self._expect(step, piece, self._stage.forward_us)
        for number, segment in enumerate(self._stage.segments):
            given = {node: values[node].detach().requires_grad_(node in differentiable) for node in segment.part.inputs}
            inputs = self._unwritten(given, number)  # it may be the script's own tensor, or part of a message buffer
            if records and segment.recompute:
                kept = self._elsewhere(given, laid)
            else:  # backward needs those that get a gradient: what others were for is in the graph of autograd
                kept = {node: value for node, value in inputs.items() if value.requires_grad}
            del given
            for node in self._last[number]:
                del values[node]
            self._gather(number, number + 1)
            if step.audit is not None:
                step.audit.record.uses(segment.part.tensors, self._tensors[number])
            before = {name: buffers[name].clone() for name in self._written_by[number]} if segment.recompute else {}
            other = other_states() if records and segment.recompute and self._opaque[number] else None
            with torch.set_grad_enabled(records and not segment.recompute):
                outputs, after = self._run(step, piece, number, inputs, buffers, random)
            values.update((node, self._lasting(value.detach())) for node, value in outputs.items())
            made = {node: values[node] for node in outputs}
            if step.audit is not None:
                step.audit.record.values(stage, piece, number, made=made)
            if records:
                if segment.recompute:
                    away = frozenset(node for node in laid if node in kept)
                    saved.append(Saved(kept, {}, before, away, random, other, made if self._compares else None))
                else:
                    roots = {node: value for node, value in outputs.items() if value.requires_grad}
                    saved.append(Saved(kept, {n: each for n, each in roots.items() if live is None or n in live}, {}))
            random = after
        for node, reader in self._bound.traffic_of(inside=step.interleaved).leaving.get(stage, ()):
            step.values[piece, node, reader] = values[node]
        for node in self._summed:
            step.values[piece, node, self._outside] = values[node]
        if records:
            step.saved[piece, stage] = saved
        if piece == step.pieces.first:
            self._after = buffers

    def backward(self, step: Step, piece: int, live: frozenset[Node]) -> None:
        """Backward of one microbatch, which recomputes forward of segments if so planned."""
        layout, stage = self._bound.layout, self._stage.number
        every = step.saved[piece, stage] if step.keep else step.saved.pop((piece, stage))
        gradients: dict[Node, torch.Tensor] = {}
        """Of values between segments, and of the inputs of the stage."""
        entering = {
            node: value
            for saved in every
            for node, value in saved.inputs.items()
            if node in self._entering and node in live
        }
        self._expect(step, piece, self._stage.backward_us)
        for number, segment in reversed(list(enumerate(self._stage.segments))):
            saved = every[number]
            if not step.keep:
                every[number] = Saved({}, {}, {})
            self._gather(number, number - 1)
            inputs = self._brought(saved, every[number - 1] if number else None)
            outputs = saved.outputs
            if segment.recompute:
                buffers = {name: tensor.clone() for name, tensor in saved.buffers.items()}
                with torch.enable_grad(), drawing_from(saved.other):
                    inputs = self._unwritten(inputs, number)
                    outputs, _ = self._run(step, piece, number, inputs, buffers, saved.random)
                if saved.first is not None:
                    self._compare(saved.first, outputs, piece, number)
            roots: list[torch.Tensor] = []
            seeds: dict[Node, torch.Tensor] = {}
            for node, value in outputs.items():
                given = [gradients.pop(node, None)]
                if node in self._leaving:
                    given.append(step.gradients.pop((piece, node), None))
                    if node in step.upstream and node in live:
                        given.append(step.upstream[node][piece % layout.world])
                gradient = _sum(given)
                if gradient is not None and value.requires_grad:
                    roots.append(value)
                    seeds[node] = gradient
            if roots:
                again = backward_again() if step.keep and self._compiled else contextlib.nullcontext()
                with again, self._timed():
                    torch.autograd.backward(roots, list(seeds.values()), retain_graph=step.keep)
                if self._finite.every:
                    found = {node: value.grad for node, value in inputs.items()}
                    self._finite.gradients(seeds, found)
            if self._sharded is not None:
                self._sharded.send(self._complete[number])
            if step.audit is not None:
                found_now = {node: value.grad for node, value in inputs.items() if node in live}
                step.audit.record.values(stage, piece, number, seeds=seeds, found=found_now)
            for node, value in inputs.items():
                found_here, value.grad = value.grad, None
                if node in live and found_here is not None:
                    gradients[node] = gradients[node] + found_here if node in gradients else found_here
            del saved, inputs, outputs, roots, seeds
        left: dict[Node, torch.Tensor] = {}
        for node, value in entering.items():
            gradient = gradients.get(node)
            if gradient is None:
                gradient = torch.zeros_like(value)
            left[node] = gradient
            source = self._bound.stage_of.get(node, -1)  # -1: a rank gives it
            if layout.slot_of(source, piece) == self._bound.slot:
                step.add(piece, node, gradient)
            else:
                step.outgoing[piece, node, stage] = gradient
        if step.audit is not None:
            step.audit.record.values(stage, piece, left=left)

    def _compare(
        self, first: Mapping[Node, torch.Tensor], again: Mapping[Node, torch.Tensor], piece: int, number: int
    ) -> None:
        """AuditError if a segment has recomputed other values than those of its forward."""
        measure = Measure(half=self._bound.graph.signature.mode.autocast != "")
        for node, value in first.items():
            gap = measure.gap(value, again[node])
            if gap is not None:
                raise AuditError(
                    f"verify_recomp: value {node.name} of {node.meta.get('module') or 'the model'} {gap} when it is "
                    f"recomputed, in stage {self._stage.number}, segment {number}, piece {piece}, rank "
                    f"{self._world.rank}: does the model draw from generators of its own, or count its calls? "
                    "checkpointing=false recomputes nothing where memory suffices"
                )

    def written(self) -> dict[str, torch.Tensor]:
        """The buffers that the stage writes, by name."""
        return {name: self._state[name] for name in self._written}

    def _elsewhere(self, inputs: dict[Node, torch.Tensor], laid: dict[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """The values that a segment recomputes from; `laid`: those that are elsewhere, also for earlier segments.

        What enters the stage stays, which may be in a message buffer.
        """
        if self._home is None:
            return inputs
        found = dict(inputs)
        for node, value in inputs.items():
            if node not in self._entering and value.layout is torch.strided and value.nbytes >= LEAST_OFFLOADED:
                if node not in laid:
                    laid[node] = self._home.lay(value.detach()).requires_grad_(value.requires_grad)
                found[node] = laid[node]
        return found

    def _unwritten(self, inputs: dict[Node, torch.Tensor], number: int) -> dict[Node, torch.Tensor]:
        """The inputs, with copies of those that a segment writes."""
        return {
            node: value.detach().clone().requires_grad_(value.requires_grad) if node in self._writes[number] else value
            for node, value in inputs.items()
        }

    def _brought(self, saved: Saved, following: Saved | None) -> dict[Node, torch.Tensor]:
        """The inputs of a segment, on the device; begins to bring those of the segment whose backward follows."""
        if self._home is None or not saved.away:
            return saved.inputs
        found = {
            node: self._home.back(value).requires_grad_(value.requires_grad) if node in saved.away else value
            for node, value in saved.inputs.items()
        }
        if following is not None:
            self._home.coming(following.inputs[node] for node in following.away)
        return found

    def stand_by(self, kind: ActionKind) -> None:
        """Take part in what the replicas do together in a microbatch, without a microbatch."""
        numbers = range(len(self._stage.segments))
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
        if self._home is not None:
            self._home.forget()

    def _lasting(self, value: torch.Tensor) -> torch.Tensor:
        """The value, in memory of its own if it is a view of a parameter that replicas share."""
        return value.clone() if self._values is not None and self._values.lends(value) else value

    def _gather(self, number: int, following: int) -> None:
        """Have the parameters of a segment that replicas share, and get those of the segment that follows."""
        if self._values is not None:
            inside = 0 <= following < len(self._reads)
            following_reads = self._reads[following] if inside else ()
            self._values.enter(self._reads[number], following_reads, keep=self._stage.stays_whole)

    def weights(self, step: Step, piece: int, arrived: Callable[[str], None]) -> None:
        """Second half of a backward: the gradients of parameters that the first one has left.

        `arrived`: called with the name of each parameter whose gradient was accumulated without autograd's hooks.
        """
        with self._timed():  # its time is part of the backward's in the plan
            for queue in reversed(step.delayed.pop((piece, self._stage.number), [])):
                queue.accumulate(lambda parameter: arrived(self._name_of[id(parameter)]))

    def _expect(self, step: Step, piece: int, planned_us: float) -> None:
        """Tell the clock what the plan says of the computation that begins."""
        if self._clock is not None:
            self._clock.expect(planned_us, planned_us * step.pieces.rows[piece] / self._stage.planned_rows)

    def _timed(self) -> AbstractContextManager[None]:
        """Context of what is computed, without waiting for other ranks."""
        return self._clock if self._clock is not None else contextlib.nullcontext()

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
        part = self._stage.segments[number].part
        tensors = self._tensors[number]
        if buffers:
            tensors = [buffers.get(name, tensor) for name, tensor in zip(part.tensors, tensors, strict=True)]
        with (
            self._random(step, piece, random) if part.random else contextlib.nullcontext(random) as after,
            self._bound.graph.signature.mode.autocasting(),
            self._timed(),
        ):
            rows = step.pieces.rows[piece]
            if self._compiled and not self._finite.every:
                values = self._compiled[number].run(rows, inputs, tensors, inside=step.interleaved)
            else:
                module, arguments = part.module, [*inputs.values(), *tensors, *part.numbers_at(rows)]
                half = self._halves[number]
                if half is not None and step.interleaved and not self._finite.every:
                    queue = WeightQueue()
                    step.delayed.setdefault((piece, self._stage.number), []).append(queue)
                    module, arguments = half.module, [*arguments, queue]
                try:
                    values = self._finite.run(module, arguments)
                except Exception as exc:
                    # It runs the operators again: not those of code that torch does not see, whose lines are told.
                    if not (is_accelerator(self._world.device) or self._opaque[number] or is_out_of_memory(exc)):
                        tell_op(exc, module, arguments)
                    raise
        return dict(zip(part.outputs, values, strict=True)), after

    def _random(self, step: Step, piece: int, begin: States | None) -> AbstractContextManager[States]:
        """Fork the RNG with a seed made of base seed, step, microbatch and stage; the script's RNG is unaffected."""
        seed = piece_seed(self.seed, step.number, piece, self._stage.number)
        return seeded(self._world.device, seed if begin is None else begin)


def _sum(given: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of the gradients that there are, from left to right; None if there is none."""
    total: torch.Tensor | None = None
    for each in given:
        total = each if total is None else total if each is None else total + each
    return total
