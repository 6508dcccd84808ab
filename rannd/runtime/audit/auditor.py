"""Rank 0's part of an audit: replays a step block by block, and compares what every rank kept of it.

    mini-batches ──► block 0.0 ──► block 0.1 ──► ... ──► outputs        all microbatches of a block, then the next block
                        ▲ compare     ▲ compare
    records of the ranks: values, then gradients backwards, gradients of parameters, buffers

A value that a rank has received has to be that which another one has computed, to the bit. It is then what the next
block is replayed from: so differences do not add up, a difference is in the block that makes it, and this process never
has more than one block's parameters and one microbatch's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from rannd.device.generators import States
from rannd.graph.partition.cut import crossing_shape
from rannd.graph.rows.loss_weights import counted, pieces_weights
from rannd.runtime.audit.block_replay import BlockTensors, Replay, ReplayBlock, replay
from rannd.runtime.audit.differences import Gap, Measure, largest_element
from rannd.runtime.audit.record_exchange import RecordExchange, Tensors
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.binding.microbatches import Pieces, piece_seed
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.ownership import Parameters


@dataclass(frozen=True)
class StepFacts:
    """What a step is, beside the values in it."""

    call: int
    """Number of the call, of which random numbers depend."""
    seed: int
    pieces: Pieces
    inside: bool
    """Whether backward ran inside the call."""
    loss_seed: float
    """Gradient of the loss that such a backward starts with."""
    averaged: int
    """Number of mini-batches that gradients are averaged over."""


class Differs(Exception):
    """The first difference of a step."""


class Auditor:
    """Replays one step. Only rank 0 has one."""

    def __init__(
        self,
        world: World,
        bound: BoundGraph,
        parameters: Parameters,
        facts: StepFacts,
        exchange: RecordExchange,
        label: Mapping[Node, str],
    ) -> None:
        self._world = world
        self._bound = bound
        self._graph = bound.graph
        self._parameters = parameters
        self._facts = facts
        self._ask = exchange.ask
        self._label = label
        self._layout = bound.traffic_of(inside=facts.inside).layout
        self._stages = [bound.anywhere(number) for number in range(len(self._layout.stages))]
        self.blocks = [ReplayBlock(stage, number) for stage in self._stages for number in range(len(stage.segments))]
        self.pieces = [piece for piece, rows in enumerate(facts.pieces.rows) if rows]
        self._maker = {
            node: ReplayBlock(stage, number)
            for stage in self._stages
            for number, segment in reversed(list(enumerate(stage.segments)))
            for node in segment.part.outputs
            if node in stage.part.outputs
        }
        self._half = bool(self._graph.signature.mode.autocast)
        self._begins: dict[tuple[int, int, int], int | States] = {}
        """Where the random numbers of each block begin in each microbatch, by stage, segment and microbatch."""
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        """Buffers that a stage has after the step."""
        self._readers = {
            name: [each for each in self.blocks if name in each.segment.part.tensors]
            for block in self.blocks
            for name in block.segment.part.tensors
        }
        self._sums: dict[str, dict[int, torch.Tensor]] = {}
        """Gradients of parameters that are not complete yet, by name and rank, summed up in double precision."""
        self._terms: dict[str, float] = {}
        """The largest element of what was summed up."""
        given = self._given_everywhere()
        self.live = bound.interleaved.live if facts.inside and bound.interleaved is not None else bound.live(given)
        self.count = {"values": 0, "gradients": 0, "buffers": 0}
        self.unsure: dict[str, None] = {}
        """Blocks that give other results in each run."""

    def run(self) -> None:
        """Compare everything. Differs at the first difference."""
        self._parameters_agree()
        for block in self.blocks:
            tensors = self._tensors(block)
            for piece in self.pieces:
                self._forward(block, piece, tensors)
        for rank in range(self._world.size):
            self._outputs(rank)
        for block in reversed(self.blocks):
            tensors = self._tensors(block)
            noise = 0.0
            for piece in self.pieces:
                noise = max(noise, self._backward(block, piece, tensors))
            self._gradients_of_parameters(block, noise)
        for rank in range(self._world.size):
            self._input_gradients(rank)
        for stage in self._stages:
            self._compare_buffers(stage.number)

    # -- places ---------------------------------------------------------------------------------------------------

    def _rank(self, stage: int, piece: int) -> int:
        return self._world.rank_of_slot[self._layout.slot_of(stage, piece)]

    def _ranks(self, stage: int) -> list[int]:
        return [self._world.rank_of_slot[slot] for slot in self._layout.stages[stage]]

    def _named(self, node: Node) -> str:
        module = node.meta.get("module") or ""
        if node.op == "placeholder":
            place = self._graph.traced.placeholders.index(node)
            specs = self._graph.signature.tensors
            return specs[place].name if place < len(specs) else f"the loss weight {node.name}"
        return f"value {node.name}" + (f" of {module}" if module else "")

    def _at(self, piece: int) -> str:
        microbatch, slot = divmod(piece, self._layout.world)
        return f"piece {piece} (microbatch {microbatch} of rank {self._world.rank_of_slot[slot]})"

    def _found(self, kind: str, what: str, where: str, gap: Gap | None) -> None:
        self.count[kind] += 1
        if gap is not None:
            raise Differs(f"{what} {gap}, in {where}")

    # -- forward --------------------------------------------------------------------------------------------------

    def _parameters_agree(self) -> None:
        """Ranks that hold a parameter, or a buffer that no stage writes, have equal values."""
        for name, readers in self._readers.items():
            if name in self._graph.traced.constants or name in self._graph.placement.written:
                continue
            ranks = sorted({rank for each in readers for rank in self._ranks(each.stage.number)})
            digests = {rank: self._ask(rank, "digest", name) for rank in ranks}
            first = digests[ranks[0]].get("")
            for rank, found in digests.items():
                where = f"{readers[0]}, rank {rank}"
                if first is None or not found:  # replicas divide it
                    break
                if not torch.equal(found[""], found["used"]):
                    raise Differs(f"{name} of the model is not what the stage has computed with, in {where}")
                if not torch.equal(found[""], first):
                    raise Differs(f"{name} has other values than on rank {ranks[0]}, in {where}")

    def _tensors(self, block: ReplayBlock) -> BlockTensors:
        """A block's parameters and buffers, from a rank that has them."""
        constants, device = self._graph.traced.constants, self._world.device
        rank = self._rank(block.stage.number, self.pieces[0])
        before = self._ask(rank, "before", block.stage.number)
        tensors: list[torch.Tensor] = []
        for name in block.segment.part.tensors:
            if name in constants:
                tensors.append(constants[name])
                continue
            model = self._parameters.tensors[name]
            value = self._tensor(name, rank).view(model.shape).to(device)
            if isinstance(model, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=model.requires_grad)
                value.grad_dtype = self._parameters.gradient_dtypes(name).accumulated
            tensors.append(value)
        names = set(block.segment.part.tensors)
        return BlockTensors(tensors, {name: each.to(device) for name, each in before.items() if name in names})

    def _tensor(self, name: str, rank: int) -> torch.Tensor:
        """A parameter or buffer as the stages of a rank read it; put together where replicas divide it."""
        found = self._ask(rank, "tensor", name)
        if "start" not in found:
            return found[""]
        holders = [self._world.rank_of_slot[slot] for slot in self._parameters.slots[name]]
        parts = [self._ask(each, "tensor", name) for each in holders]
        return torch.cat([each[""] for each in sorted(parts, key=lambda each: int(each["start"])) if each[""].numel()])

    def _replay(self, block: ReplayBlock, piece: int, tensors: BlockTensors) -> Replay:
        """Run a block as the rank did, from what it had."""
        stage, device = block.stage.number, self._world.device
        rank = self._rank(stage, piece)
        known = self._ask(rank, "entered", stage, piece)
        for number in range(block.number):
            known |= self._ask(rank, "made", stage, piece, number)
        different = self.live if self._facts.inside else self._graph.placement.requires_grad
        inputs = {
            node: known[self._label[node]].to(device, copy=True).requires_grad_(node in different)
            for node in block.segment.part.inputs
        }
        begin = self._begins.setdefault(
            (stage, block.number, piece), piece_seed(self._facts.seed, self._facts.call, piece, stage)
        )
        mode, rows = self._graph.signature.mode, self._facts.pieces.rows[piece]
        made = replay(block, mode, rows, inputs, tensors, begin, device)
        self._begins[stage, block.number + 1, piece] = begin if made.after is None else made.after
        return made

    def _forward(self, block: ReplayBlock, piece: int, tensors: BlockTensors) -> None:
        stage = block.stage.number
        rank = self._rank(stage, piece)
        where = f"{block}, {self._at(piece)}, rank {rank}"
        if not block.number:
            found = self._ask(rank, "entered", stage, piece)
            for node in block.stage.part.inputs:
                source, sent, measure = self._sent(node, piece)
                gap = measure.gap(sent, found.get(self._label[node]))
                self._found("values", f"{self._named(node)}, as it has arrived from {source},", where, gap)
        made = self._replay(block, piece, tensors)
        kept = self._ask(rank, "made", stage, piece, block.number)
        measure = Measure(half=self._half)
        for node, value in made.outputs.items():
            gap = measure.gap(value.detach().cpu(), kept.get(self._label[node]))
            if gap is not None and self._is_unsure(block, piece, tensors, made):
                return
            self._found("values", self._named(node), where, gap)
        if piece == self._facts.pieces.first:
            self._buffers.setdefault(stage, {}).update(made.buffers)

    def _is_unsure(self, block: ReplayBlock, piece: int, tensors: BlockTensors, made: Replay) -> bool:
        """Whether a block gives other results when it is run again: what it has computed cannot be replayed then."""
        again = self._replay(block, piece, tensors)
        same = all(
            Measure(half=self._half).gap(value, again.outputs[node]) is None for node, value in made.outputs.items()
        )
        if not same:
            self.unsure[str(block)] = None
        return not same

    def _sent(self, node: Node, piece: int) -> tuple[str, torch.Tensor | None, Measure]:
        """What a stage should have got: from where, the value, and how exactly."""
        if node.op == "placeholder":
            rank = self._rank(-1, piece)
            place = self._graph.traced.placeholders.index(node)
            given = len(self._graph.signature.tensors)
            if place < given:
                leaf = self._ask(rank, "leaves")[str(place)]
                first, rows = self._facts.pieces.slices[piece]
                batch = self._graph.signature.tensors[place].batch
                return f"rank {rank}", leaf[first : first + rows] if batch else leaf, Measure(exact=True)
            return f"rank {rank}", self._weights(rank, piece)[place - given].cpu(), Measure()
        maker = self._maker[node]
        rank = self._rank(maker.stage.number, piece)
        value = self._ask(rank, "made", maker.stage.number, piece, maker.number).get(self._label[node])
        return f"stage {maker.stage.number} on rank {rank}", value, Measure(exact=True)

    def _weights(self, rank: int, piece: int) -> tuple[torch.Tensor, ...]:
        """The loss weights of a microbatch, see rannd.graph.rows.loss_weights."""
        sizes, device = self._facts.pieces, self._world.device
        own = sizes.rank_rows[self._world.rank_of_slot.index(rank)]
        whole = self._ask(rank, "whole")
        leaves = whole or self._ask(rank, "leaves")
        tensors = [leaves[str(place)].to(device) for place in range(len(self._graph.signature.tensors))]
        counts = counted(self._graph.label_counts, tensors, own / sizes.total if whole else 1.0)
        return pieces_weights(
            self._graph.weights,
            world=self._facts.averaged,
            rows=sizes.rows[piece],
            rank_rows=own,
            total_rows=sizes.total,
            counts=counts,
            device=device,
        )

    def _made(self, node: Node, piece: int) -> torch.Tensor:
        maker = self._maker[node]
        rank = self._rank(maker.stage.number, piece)
        return self._ask(rank, "made", maker.stage.number, piece, maker.number)[self._label[node]]

    def _outputs(self, rank: int) -> None:
        """What the call has returned on a rank."""
        kept, sizes = self._ask(rank, "outputs"), self._facts.pieces
        slot = self._world.rank_of_slot.index(rank)
        mine = sizes.of_slot(slot)
        for place, (node, result) in enumerate(zip(self._graph.traced.results, self._graph.results, strict=True)):
            found = kept.get(str(place))
            if found is None or result.kind == "number" or node not in self._maker:
                continue
            what = f"output {place} ({self._named(node)})"
            if result.kind in ("global", "sum"):
                parts = [self._made(node, piece) for piece in (self.pieces if result.kind == "global" else mine)]
                if not parts:
                    continue
                wide = _wide(torch.stack(list(map(_wide, parts))).sum(0))
                total = wide / self._facts.averaged if result.kind == "global" else wide
                noise = max(map(largest_element, parts))
                gap = Measure(noise=noise, half=self._half).gap(total.to(found.dtype).view(found.shape), found)
                self._found("values", what, f"{self._maker[node]}, all pieces, rank {rank}", gap)
                continue
            for piece in mine if result.kind == "rows" else mine[:1]:
                part, value = found, self._made(node, piece)
                if result.kind == "rows" and len(mine) > 1:
                    first, rows = sizes.slices[piece]
                    inner = crossing_shape(node, rows)[result.dim] // rows
                    part = found.narrow(result.dim, first * inner, rows * inner)
                gap = Measure(exact=True).gap(value, part)
                self._found("values", what, f"{self._maker[node]}, {self._at(piece)}, rank {rank}", gap)

    # -- backward -------------------------------------------------------------------------------------------------

    def _given_everywhere(self) -> tuple[bool, ...]:
        """Which outputs have a gradient on some rank."""
        told = [self._ask(rank, "given").keys() for rank in range(self._world.size)]
        return tuple(any(str(place) in each for each in told) for place in range(len(self._graph.traced.results)))

    def _from_script(self, node: Node, piece: int) -> Iterator[torch.Tensor]:
        """Gradients with which the backward of a microbatch starts at an output."""
        dtype, inside = node.meta["val"].dtype, self._bound.interleaved
        if self._facts.inside and inside is not None:
            if node is inside.loss:
                yield torch.full((), self._facts.loss_seed / self._divided, dtype=dtype)
            return
        rank = self._rank(-1, piece)
        first, rows = self._facts.pieces.slices[piece]
        mine = self._facts.pieces.of_slot(self._layout.slot_of(-1, piece))
        for place, (each, result) in enumerate(zip(self._graph.traced.results, self._graph.results, strict=True)):
            if each is not node or result.kind == "number":
                continue
            given = self._ask(rank, "given").get(str(place))
            if given is None or (result.kind == "first" and piece != mine[0]):
                yield torch.zeros(crossing_shape(node, rows), dtype=dtype)
            elif result.kind == "rows" and len(mine) > 1:
                inner = crossing_shape(node, rows)[result.dim] // rows
                yield given.narrow(result.dim, first * inner, rows * inner).to(dtype)
            else:
                yield given.to(dtype)

    @property
    def _divided(self) -> int:
        """What the seed of a backward inside the call is divided by, instead of the sums of gradients."""
        return self._facts.averaged if self._facts.inside and self._facts.loss_seed == 1.0 else 1

    def _seed(self, node: Node, block: ReplayBlock, piece: int) -> torch.Tensor | None:
        """The gradient with which the backward of a block starts at one of its outputs; None if there is none."""
        stage, label = block.stage, self._label[node]
        parts: list[torch.Tensor] = []
        for number in range(len(stage.segments) - 1, block.number, -1):
            if node in stage.segments[number].part.inputs:
                parts.extend(
                    _only(self._ask(self._rank(stage.number, piece), "found", stage.number, piece, number), label)
                )
        if node in stage.part.outputs and node in self.live:
            for reader in self._stages:
                if reader is not stage and node in reader.part.inputs:
                    parts.extend(
                        _only(self._ask(self._rank(reader.number, piece), "left", reader.number, piece), label)
                    )
            parts.extend(self._from_script(node, piece))
        if not parts:
            return None
        return torch.stack(list(map(_wide, parts))).sum(0).to(parts[0].dtype) if len(parts) > 1 else parts[0]

    def _backward(self, block: ReplayBlock, piece: int, tensors: BlockTensors) -> float:
        """Compare the gradients of a microbatch in a block; returns the largest element of them."""
        stage = block.stage.number
        rank = self._rank(stage, piece)
        where = f"{block}, {self._at(piece)}, rank {rank}"
        seeds = {
            node: each for node in block.segment.part.outputs if (each := self._seed(node, block, piece)) is not None
        }
        kept = self._ask(rank, "seeds", stage, piece, block.number)
        made = self._replay(block, piece, tensors)
        noise = max(map(largest_element, seeds.values()), default=0.0)
        for node, value in made.outputs.items():
            if value.requires_grad:
                gap = Measure(noise=noise, half=self._half).gap(seeds.get(node), kept.get(self._label[node]))
                self._found("gradients", f"the gradient of {self._named(node)}, as it has arrived,", where, gap)
        found = made.backward({node: each.to(self._world.device) for node, each in seeds.items()})
        parameters = dict(zip(block.segment.part.tensors, tensors.tensors, strict=True))
        noise = max([noise, *(largest_element(each) for each in found.values())])
        if str(block) not in self.unsure:
            self._compare_found(block, piece, rank, found, noise, where)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.detach(), None
                wide = _wide(gradient if gradient.layout is torch.strided else gradient.to_dense()).cpu()
                sums = self._sums.setdefault(name, {})
                sums[rank] = sums[rank] + wide if rank in sums else wide
                largest = largest_element(wide)
                self._terms[name] = max(self._terms.get(name, 0.0), largest)
                noise = max(noise, largest)
        return noise

    def _compare_found(
        self,
        block: ReplayBlock,
        piece: int,
        rank: int,
        found: Mapping[Node, torch.Tensor | None],
        noise: float,
        where: str,
    ) -> None:
        stage = block.stage
        kept = self._ask(rank, "found", stage.number, piece, block.number)
        measure = Measure(noise=noise, half=self._half)
        for node, gradient in found.items():
            if node in self.live:
                gap = measure.gap(None if gradient is None else gradient.cpu(), kept.get(self._label[node]))
                self._found("gradients", f"the gradient of {self._named(node)}", where, gap)
        if block.number:
            return
        left = self._ask(rank, "left", stage.number, piece)
        every = [self._ask(rank, "found", stage.number, piece, number) for number in range(len(stage.segments))]
        for node in stage.part.inputs:
            if node in self.live:
                gradient = left.get(self._label[node])
                parts = [each for segment in every for each in _only(segment, self._label[node])]
                total = torch.stack(list(map(_wide, parts))).sum(0) if parts else None
                if total is None and gradient is not None:
                    total = torch.zeros_like(gradient)
                gap = measure.gap(total if total is None or gradient is None else total.to(gradient.dtype), gradient)
                self._found("gradients", f"the gradient of {self._named(node)}, as the stage gives it,", where, gap)

    # -- what is left of a step -----------------------------------------------------------------------------------

    def _gradients_of_parameters(self, block: ReplayBlock, noise: float) -> None:
        """Compare the gradients of the parameters that no earlier block reads."""
        for name in block.segment.part.tensors:
            model = self._parameters.tensors.get(name)
            readers = self._readers[name]
            if readers[0].key != block.key or not isinstance(model, torch.nn.Parameter) or not model.requires_grad:
                continue
            sums, terms = self._sums.pop(name, {}), self._terms.pop(name, 0.0)
            if any(str(each) in self.unsure for each in readers):
                continue
            half = self._half or self._parameters.gradient_dtypes(name).reduced.itemsize < 4
            measure = Measure(noise=max(noise, terms), half=half)
            holders = [self._world.rank_of_slot[slot] for slot in self._parameters.slots[name]]
            for rank in holders:
                local = self._ask(rank, "local", name).get("")
                if self._ask(rank, "piece", name):
                    continue  # ZeRO 2: replicas sum it up in each microbatch
                expected = sums.get(rank)
                what = f"the gradient of {name} before its reduction"
                gap = measure.gap(_like(expected, local), local)
                self._found("gradients", what, f"{block}, all pieces, rank {rank}", gap)
            if not sums:
                continue
            mean = torch.stack(list(sums.values())).sum(0) / (self._facts.averaged // self._divided)
            for rank in holders:
                self._reduced(name, mean, rank, measure, f"{block}, all pieces, rank {rank}")

    def _reduced(self, name: str, mean: torch.Tensor, rank: int, measure: Measure, where: str) -> None:
        """Compare a parameter's gradient after the reduction, and as it was given to the parameter."""
        piece = self._ask(rank, "piece", name).get("")
        if piece is not None:
            mean = mean.reshape(-1)[int(piece[0]) : int(piece[1])]
        reduced = self._ask(rank, "reduced", name).get("")
        if piece is None or reduced is not None:
            gap = measure.gap(_like(mean, reduced), reduced)
            self._found("gradients", f"the gradient of {name} after its reduction", where, gap)
        if self._ask(rank, "hooked", name) or not bool(mean.isfinite().all()):
            return  # a hook, or what makes all GradScalers skip a step, has changed it
        before, after = (self._ask(rank, kind, name).get("") for kind in ("grad before", "grad after"))
        given = mean * self._factor(rank)
        total = given if before is None else given + _wide(before)
        scaled = Measure(noise=max(measure.noise * abs(self._factor(rank)), largest_element(before)), half=measure.half)
        self._found("gradients", f"the gradient that {name} was given", where, scaled.gap(_like(total, after), after))

    def _factor(self, rank: int) -> float:
        """What held gradients are multiplied with, when the script calls backward."""
        if not self._facts.inside or self._bound.interleaved is None:
            return 1.0
        place = self._graph.traced.results.index(self._bound.interleaved.loss)
        given = self._ask(rank, "given").get(str(place))
        return 0.0 if given is None else float(given) / self._facts.loss_seed

    def _input_gradients(self, rank: int) -> None:
        """Gradients of a rank's tensors."""
        kept, slot = self._ask(rank, "input gradients"), self._world.rank_of_slot.index(rank)
        mine, factor = self._facts.pieces.of_slot(slot), self._factor(rank) * self._divided
        specs = self._graph.signature.tensors
        for place, (node, spec) in enumerate(zip(self._graph.traced.placeholders, specs, strict=False)):
            if node not in self.live or not mine:
                continue
            readers = [stage.number for stage in self._stages if node in stage.part.inputs]
            found = kept.get(str(place))
            totals: list[torch.Tensor] = []
            for piece in mine:
                parts = [
                    each
                    for stage in readers
                    for each in _only(self._ask(self._rank(stage, piece), "left", stage, piece), self._label[node])
                ]
                if parts:
                    totals.append(torch.stack(list(map(_wide, parts))).sum(0) * factor)
            if not totals:
                continue
            total = torch.cat(totals) if spec.batch else torch.stack(totals).sum(0)
            noise = max(map(largest_element, totals))
            gap = Measure(noise=noise, half=self._half).gap(_like(total, found), found)
            self._found("gradients", f"the gradient of {spec.name}", f"{self.blocks[0]}, rank {rank}", gap)

    def _compare_buffers(self, stage: int) -> None:
        """Buffers are those after the first microbatch, on all replicas."""
        for rank in self._ranks(stage):
            kept = self._ask(rank, "after", stage)
            for name, expected in self._buffers.get(stage, {}).items():
                block = next(each for each in self._readers[name] if each.stage.number == stage)
                if str(block) not in self.unsure:
                    where = f"{block}, {self._at(self._facts.pieces.first)}, rank {rank}"
                    gap = Measure(half=self._half).gap(expected.cpu(), kept.get(name))
                    self._found("buffers", f"buffer {name} after the step", where, gap)


def _only(tensors: Tensors, name: str) -> Sequence[torch.Tensor]:
    return [tensors[name]] if name in tensors else []


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision, if it is no integer."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _like(expected: torch.Tensor | None, found: torch.Tensor | None) -> torch.Tensor | None:
    """An expected sum in the type of what was found."""
    return expected if expected is None or found is None else expected.to(found.dtype)
