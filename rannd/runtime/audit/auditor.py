"""Rank 0's part of an audit: replays a step block by block, and compares what every rank kept of it.

    mini-batches ──► block 0.0 ──► block 0.1 ──► ... ──► outputs        all microbatches of a block, then the next block
                        ▲ compare     ▲ compare
    records of the ranks: values, then gradients backwards, gradients of parameters, buffers

A value that a rank has received has to be that which another one has computed, to the bit. It is then what the next
block is replayed from: so differences do not add up, a difference is in the block that makes it, and this process never
has more than one block's parameters and one microbatch's values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch.fx import Node

from rannd.device.autocast import without_autocast
from rannd.device.generators import States
from rannd.graph.partition.cut import crossing_shape
from rannd.runtime.audit.block_replay import BlockTensors, Replay, ReplayBlock, replay
from rannd.runtime.audit.differences import Comparisons, Differs, Measure, largest_element, like, wide
from rannd.runtime.audit.origins import Origins, StepFacts, only
from rannd.runtime.audit.parameter_gradients import ParameterGradients
from rannd.runtime.audit.record_exchange import RecordExchange
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.binding.microbatches import piece_seed
from rannd.runtime.comm.world import World
from rannd.runtime.failure.nan_check import has_nan
from rannd.runtime.parameters.ownership import Parameters


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
        self._graph = bound.graph
        self._parameters = parameters
        self._facts = facts
        self._ask = exchange.ask
        self._label = label
        self._origins = origins = Origins(world, bound, facts, exchange.ask, label)
        self.blocks = [ReplayBlock(stage, number) for stage in origins.stages for number in range(len(stage.segments))]
        self.pieces = origins.pieces
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
        self.compared = Comparisons()
        self.unsure: dict[str, None] = {}
        """Blocks that give other results in each run."""
        self.spoilt: dict[str, None] = {}
        """Blocks that compute NaN, which equal each other whatever is wrong."""
        self._gradients = ParameterGradients(
            world,
            parameters,
            origins,
            self._readers,
            exchange.ask,
            self.compared,
            half=self._half,
            unsure=self.unsure,
            is_unsure=self._is_unsure_parameter,
        )

    def run(self) -> None:
        """Compare everything. Differs at the first difference."""
        self._parameters_agree()
        for rank in range(self._world.size):
            self._shared_mini_batch(rank)
        for block in self.blocks:
            tensors = self._tensors(block)
            for piece in self.pieces:
                self._forward(block, piece, tensors)
        for rank in range(self._world.size):
            self._outputs(rank)
        for block in reversed(self.blocks):
            self._backward_of_all(block)
        for rank in range(self._world.size):
            self._input_gradients(rank)
        for stage in self._origins.stages:
            self._compare_buffers(stage.number)

    # -- forward --------------------------------------------------------------------------------------------------

    def _parameters_agree(self) -> None:
        """Ranks that hold a parameter, or a buffer that no stage writes, have equal values."""
        for name, readers in self._readers.items():
            if name in self._graph.traced.constants or name in self._graph.placement.written:
                continue
            ranks = sorted({rank for each in readers for rank in self._origins.ranks(each.stage.number)})
            digests = {rank: self._ask(rank, "digest", name) for rank in ranks}
            first = digests[ranks[0]].get("")
            for rank, found in digests.items():
                where = f"{readers[0]}, rank {rank}"
                if first is None or not found:  # replicas divide it
                    break
                if not torch.equal(found[""], found["used"]):
                    raise Differs(f"{name} of the model is not what the stage has computed with, in {where}")
                if not torch.equal(found[""], first):
                    raise Differs(
                        f"{name} has other values than on rank {ranks[0]}, in {where}: does the script change "
                        "parameters on some ranks only?"
                    )

    def _shared_mini_batch(self, rank: int) -> None:
        """A rank has its part of rank 0's mini-batch, if that is shared (`gather_inputs=False`)."""
        for place, spec in enumerate(self._graph.signature.tensors):
            expected = self._origins.shared_part(place, rank)
            if expected is not None:
                gap = Measure(exact=True).gap(expected, self._ask(rank, "leaf", place).get(""))
                self.compared.add(
                    "values", f"{spec.name}, as it has arrived from rank 0,", f"the mini-batch of rank {rank}", gap
                )

    def _tensors(self, block: ReplayBlock) -> BlockTensors:
        """A block's parameters and buffers, from a rank that has them."""
        constants, device = self._graph.traced.constants, self._world.device
        rank = self._origins.rank(block.stage.number, self.pieces[0])
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
        rank = self._origins.rank(stage, piece)
        known = self._ask(rank, "entered", stage, piece)
        for number in range(block.number):
            known |= self._ask(rank, "made", stage, piece, number)
        different = self._origins.live if self._facts.inside else self._graph.placement.requires_grad
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
        rank = self._origins.rank(stage, piece)
        where = f"{block}, {self._origins.at(piece)}, rank {rank}"
        if not block.number:
            found = self._ask(rank, "entered", stage, piece)
            for node in block.stage.part.inputs:
                source, sent, measure = self._origins.sent(node, piece)
                gap = measure.gap(sent, found.get(self._label[node]))
                self.compared.add(
                    "values", f"{self._origins.named(node)}, as it has arrived from {source},", where, gap
                )
        made = self._replay(block, piece, tensors)
        kept = self._ask(rank, "made", stage, piece, block.number)
        measure = Measure(half=self._half)
        for node, value in made.outputs.items():
            gap = measure.gap(value.detach().cpu(), kept.get(self._label[node]))
            if gap is not None and self._is_unsure(block, piece, tensors, made):
                return
            self.compared.add("values", self._origins.named(node), where, gap)
        if any(map(has_nan, made.outputs.values())):
            self.spoilt[str(block)] = None
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

    def _outputs(self, rank: int) -> None:
        """What the call has returned on a rank."""
        kept, sizes = self._ask(rank, "outputs"), self._facts.pieces
        slot = self._world.rank_of_slot.index(rank)
        mine = sizes.of_slot(slot)
        for place, (node, result) in enumerate(zip(self._graph.traced.results, self._graph.results, strict=True)):
            found = kept.get(str(place))
            if found is None or result.kind == "number" or node not in self._origins.maker:
                continue
            what = f"output {place} ({self._origins.named(node)})"
            if result.kind in ("global", "sum"):
                pieces = self.pieces if result.kind == "global" else mine
                parts = [each for piece in pieces if (each := self._origins.made(node, piece)) is not None]
                if not parts:
                    continue
                total = wide(torch.stack(list(map(wide, parts))).sum(0))
                total = total / self._facts.averaged if result.kind == "global" else total
                noise = max(map(largest_element, parts))
                gap = Measure(noise=noise, half=self._half).gap(total.to(found.dtype).view(found.shape), found)
                self.compared.add("values", what, f"{self._origins.maker[node]}, all pieces, rank {rank}", gap)
                continue
            for piece in mine if result.kind == "rows" else mine[:1]:
                part, value = found, self._origins.made(node, piece)
                if result.kind == "rows" and len(mine) > 1:
                    first, rows = sizes.slices[piece]
                    inner = crossing_shape(node, rows)[result.dim] // rows
                    part = found.narrow(result.dim, first * inner, rows * inner)
                gap = Measure(exact=True).gap(value, part)
                self.compared.add(
                    "values", what, f"{self._origins.maker[node]}, {self._origins.at(piece)}, rank {rank}", gap
                )

    # -- backward -------------------------------------------------------------------------------------------------

    def _backward_of_all(self, block: ReplayBlock) -> None:
        """Compare the gradients of all microbatches in a block, rank by rank, then those of its parameters."""
        tensors, noise = self._tensors(block), 0.0
        by_rank = self._origins.pieces_by_rank(block.stage.number)
        for rank, pieces in by_rank.items():
            noise = max([noise, *(self._backward(block, piece, tensors) for piece in pieces)])
            self._gradients.compare_local(block, rank, noise)
        self._gradients.compare(block, by_rank.keys(), noise)

    def _is_unsure_parameter(self, name: str) -> bool:
        """Whether a block that reads a parameter gives other gradients when it is run again."""
        readers = self._readers[name]
        return any([self._is_unsure_backward(each, self.pieces, self._tensors(each)) for each in readers])  # noqa: C419

    def _backward(self, block: ReplayBlock, piece: int, tensors: BlockTensors) -> float:
        """Compare the gradients of a microbatch in a block; returns the largest element of them."""
        stage = block.stage.number
        rank = self._origins.rank(stage, piece)
        where = f"{block}, {self._origins.at(piece)}, rank {rank}"
        seeds = self._seeds(block, piece)
        kept = self._ask(rank, "seeds", stage, piece, block.number)
        made = self._replay(block, piece, tensors)
        noise = max(map(largest_element, seeds.values()), default=0.0)
        for node, value in made.outputs.items():
            if value.requires_grad:
                gap = Measure(noise=noise, half=self._half).gap(seeds.get(node), kept.get(self._label[node]))
                self.compared.add(
                    "gradients", f"the gradient of {self._origins.named(node)}, as it has arrived,", where, gap
                )
        found = self._run_backward(made, seeds)
        noise = max([noise, *(largest_element(each) for each in found.values())])
        largest = self._gradients.take(block, tensors, rank)
        if str(block) not in self.unsure:
            try:
                self._compare_found(block, piece, rank, found, noise, where)
            except Differs:
                if not self._is_unsure_backward(block, [piece], tensors):
                    raise
        return max(noise, largest)

    def _seeds(self, block: ReplayBlock, piece: int) -> dict[Node, torch.Tensor]:
        """The gradients with which the backward of a block starts."""
        nodes = block.segment.part.outputs
        return {node: each for node in nodes if (each := self._origins.seed(node, block, piece)) is not None}

    def _run_backward(self, made: Replay, seeds: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor | None]:
        with without_autocast() if self._facts.inside else contextlib.nullcontext():  # else as now, in the script's
            return made.backward({node: each.to(self._world.device) for node, each in seeds.items()})

    def _is_unsure_backward(self, block: ReplayBlock, pieces: Iterable[int], tensors: BlockTensors) -> bool:
        """Whether a block gives other gradients when it is run again, see `_is_unsure`."""
        for piece in pieces:
            runs: list[list[torch.Tensor | None]] = []
            for _ in range(2):
                made = self._replay(block, piece, tensors)
                runs.append([*self._run_backward(made, self._seeds(block, piece)).values()])
                for each in tensors.tensors:
                    runs[-1].append(each.grad)
                    each.grad = None
            measure = Measure(noise=max(map(largest_element, runs[0]), default=0.0), half=self._half)
            if any(measure.gap(one, other) is not None for one, other in zip(*runs, strict=True)):
                self.unsure[str(block)] = None
                return True
        return False

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
            if node in self._origins.live:
                gap = measure.gap(None if gradient is None else gradient.cpu(), kept.get(self._label[node]))
                self.compared.add("gradients", f"the gradient of {self._origins.named(node)}", where, gap)
        if block.number:
            return
        left = self._ask(rank, "left", stage.number, piece)
        every = [self._ask(rank, "found", stage.number, piece, number) for number in range(len(stage.segments))]
        for node in stage.part.inputs:
            if node in self._origins.live:
                gradient = left.get(self._label[node])
                parts = [each for segment in every for each in only(segment, self._label[node])]
                total = torch.stack(list(map(wide, parts))).sum(0) if parts else None
                if total is None and gradient is not None:
                    total = torch.zeros_like(gradient)
                gap = measure.gap(total if total is None or gradient is None else total.to(gradient.dtype), gradient)
                self.compared.add(
                    "gradients", f"the gradient of {self._origins.named(node)}, as the stage gives it,", where, gap
                )

    def _input_gradients(self, rank: int) -> None:
        """Gradients of a rank's tensors."""
        kept, slot = self._ask(rank, "input gradients"), self._world.rank_of_slot.index(rank)
        mine, factor = self._facts.pieces.of_slot(slot), self._origins.factor(rank) * self._facts.divided
        specs = self._graph.signature.tensors
        for place, (node, spec) in enumerate(zip(self._graph.traced.placeholders, specs, strict=False)):
            if node not in self._origins.live or not mine:
                continue
            readers = [stage.number for stage in self._origins.stages if node in stage.part.inputs]
            found = kept.get(str(place))
            totals: list[torch.Tensor] = []
            for piece in mine:
                parts = [
                    each
                    for stage in readers
                    for each in only(
                        self._ask(self._origins.rank(stage, piece), "left", stage, piece), self._label[node]
                    )
                ]
                if parts:
                    totals.append(torch.stack(list(map(wide, parts))).sum(0) * factor)
            if not totals:
                continue
            total = torch.cat(totals) if spec.batch else torch.stack(totals).sum(0)
            noise = max(map(largest_element, totals))
            gap = Measure(noise=noise, half=self._half).gap(like(total, found), found)
            self.compared.add("gradients", f"the gradient of {spec.name}", f"{self.blocks[0]}, rank {rank}", gap)

    def _compare_buffers(self, stage: int) -> None:
        """Buffers are those after the first microbatch, on all replicas."""
        for rank in self._origins.ranks(stage):
            kept = self._ask(rank, "after", stage)
            for name, expected in self._buffers.get(stage, {}).items():
                block = next(each for each in self._readers[name] if each.stage.number == stage)
                if str(block) not in self.unsure:
                    where = f"{block}, {self._origins.at(self._facts.pieces.first)}, rank {rank}"
                    gap = Measure(half=self._half).gap(expected.cpu(), kept.get(name))
                    self.compared.add("buffers", f"buffer {name} after the step", where, gap)
