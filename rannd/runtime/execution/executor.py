"""Execute the Program of a step.

A call either runs forward only, and backward when the script calls it, or both at once: for a graph with a single loss
backward needs nothing from the script, so forward and backward of microbatches are interleaved (1F1B), and the
gradients are held until the script calls backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from rannd.device.autocast import without_autocast
from rannd.device.reads import read
from rannd.errors import StepError
from rannd.plan.schedule.instructions import Instruction
from rannd.plan.schedule.program import TRANSFERS
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.lockstep import (
    Phase,
    agree,
    compare_later,
    pack_floats,
    same_loss_gradient,
    unpack_floats,
)
from rannd.runtime.execution.outputs import join
from rannd.runtime.execution.p2p import MessageBuffers
from rannd.runtime.execution.played_graph import PlayedGraph
from rannd.runtime.execution.program_player import Live, ProgramPlayer
from rannd.runtime.execution.stage import Computing
from rannd.runtime.execution.step import Step
from rannd.runtime.execution.upstream import Upstream
from rannd.runtime.gradients.autograd_inputs import NOTHING, Anchor, Asked
from rannd.runtime.gradients.reducer import Reducer
from rannd.runtime.gradients.scaling import Factor, scaled
from rannd.runtime.timeline.recorder import Doing


class Executor:
    """Executes steps; `graphs`: that of the mini-batch of each slot's rank.

    All are the same graph, unless ranks pass different sizes: then see `PlayedGraph.plays_like`. Messages arrive in
    `buffers`, the same for all executors of a deployment.
    """

    def __init__(
        self,
        context: Context,
        graphs: Sequence[PlayedGraph],
        reducer: Reducer,
        anchor: Anchor,
        buffers: MessageBuffers,
    ) -> None:
        self.anchor = anchor
        self.world = context.world
        self.own = own = graphs[context.world.slot]
        """That of this rank's mini-batch."""
        self.bound = own.bound
        self.stages = own.stages
        self.mini_batch = own.mini_batch
        self.closed = False
        """Whether the deployment has been removed."""
        self._context = context
        self._graphs = graphs
        self._every = tuple(dict.fromkeys(graphs))
        self._computing = _computing(graphs, self._every, own)
        self._buffers = buffers
        self._reducer = reducer
        self._graph = own.bound.graph
        self._slot = own.bound.slot
        self._last = len(own.bound.layout.stages)
        self._totals = own.totals
        self._recorder = context.recorder
        self.subject = context.subject
        self._player = ProgramPlayer(context, graphs, reducer, buffers)

    def beside(self, others: Sequence[Executor]) -> Executor:
        """Executor of steps in which ranks have graphs of their own: this rank's is this one's.

        `others`: executors of the graphs of each slot's rank.
        """
        return Executor(self._context, [each.own for each in others], self._reducer, self.anchor, self._buffers)

    def _overlaps(self, step: Step) -> bool:
        """Whether reductions begin in the last backward of each stage.

        Not where replicas meet: one that stands by in its last microbatch would begin them in another order.
        """
        return self.bound.traffic_of(inside=step.interleaved).overlaps and not self.bound.meets

    # -- phases -----------------------------------------------------------------------------------------------

    def forward(self, step: Step, *, reduce: bool) -> list[Any]:
        """Run the forward phase, including all backwards if the step is interleaved.

        `reduce`: reduce the gradients of these backwards. Returns this rank's outputs, in the order of the graph's
        outputs.
        """
        self._reducer.audited = None if step.audit is None else step.audit.reduction
        for graph in self._every:
            graph.tensors.lend()
        for computing in self._computing:
            computing.begin()
        self.mini_batch.give(step, self.bound.traffic_of(inside=step.interleaved).leaving.get(-1, ()))
        live: Live | None = None
        # Dividing the seed saves a pass over all gradients at the end; a scaled loss keeps its full scale.
        whole = not isinstance(step.seed, torch.Tensor) and step.seed == 1.0
        division = self._reducer.divisor if reduce and whole else 1
        if step.interleaved:
            assert self.bound.interleaved is not None
            seed = self._seed(step, self.bound.interleaved.loss.meta["val"].dtype, division)
            live = {}
            for graph in self._every:
                assert graph.bound.interleaved is not None
                live[graph] = graph.bound.interleaved.live
                step.upstream[graph.bound.interleaved.loss] = [seed] * self.world.size
            self._reducer.set_aside(divided=division != 1)
        listed = self.own.instructions(step.pieces, inside=step.interleaved, second=False)
        # A call may be in a region of autocast, which segments enter themselves; backward belongs outside of it.
        with without_autocast():
            self._player.play(
                step, listed, live, reduce=reduce, early=self._overlaps(step), stages=self._computing, totals=True
            )
        if step.interleaved:
            assert live is not None
            step.gathered = self._reducer.gathered(reduce=reduce)
            found = self.mini_batch.input_gradients(step, live[self.own])
            step.input_gradients = [each if each is None or division == 1 else each * division for each in found]
            self._forget(step)
        if self.world.reads.late:  # after all reductions, so that no rank's can be in its way
            self._totals.begin(step)
        for computing in self._graphs[step.pieces.first].stages.values():
            computing.agree_on_buffers(step)
        outputs = self._outputs(step)
        step.values.clear()
        if step.audit is not None:
            step.audit.mini_batch(step.leaves, step.whole)
            step.audit.outputs(outputs)
            for number, computing in self.stages.items():
                step.audit.record.named("after", number, tensors=computing.written())
        return outputs

    def _seed(self, step: Step, dtype: torch.dtype, division: int) -> torch.Tensor:
        """Gradient of the loss that an interleaved backward starts with, on the device."""
        if isinstance(step.seed, torch.Tensor):
            return (step.seed / division).to(dtype)
        return torch.full((), step.seed / division, dtype=dtype, device=self.world.device)

    def backward(
        self, step: Step, gradients: Sequence[torch.Tensor | None], *, reduce: bool, again: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward phase, see `_backward`, and record it as a part of the call."""
        begun = self._recorder.begin_on_host()
        try:
            return self._backward(step, gradients, reduce=reduce, again=again)
        finally:
            self._recorder.end_on_host(Doing.CALL, begun)

    def _backward(
        self, step: Step, gradients: Sequence[torch.Tensor | None], *, reduce: bool, again: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward phase from the gradients of this rank's outputs; returns the gradients of its inputs.

        Gradients of parameters are held in the reducer, or with `reduce` delivered: all, or those requested by
        torch.autograd.grad. With `again` everything is kept for another backward (retain_graph).
        """
        asked = self.anchor.asked()
        self._check_asked(asked, reduce=reduce)
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
        if step.interleaved:
            return self._deliver_held_gradients(step, gradients, asked, reduce=reduce, again=again)
        self._reducer.audited = None if step.audit is None else step.audit.reduction
        listed = self.own.instructions(step.pieces, inside=False, second=True)
        requested = asked is not NOTHING
        graphs = (self.own, *(each for each in self._every if each is not self.own))
        upstream = Upstream(self.world, graphs, step, gradients, reduce=reduce, wanted=requested)
        meanwhile = asked is None and not self._totals.nodes and not self.bound.meets and not _communicates(listed)
        # This rank's gradients depend on nothing that others tell, so that it need not wait for them yet.
        marked, wanted = (upstream.own(), True) if meanwhile else upstream.agreed()
        live = self._live(marked)
        reduce = reduce and wanted
        step.keep = again
        for computing in self._computing:
            computing.resolve()
        self.mini_batch.give_seeds(step, gradients, live[self.own])
        if asked is not None:
            self._reducer.set_aside()
        try:
            self._reducer.upstream = upstream
            self._player.play(
                step,
                listed,
                live,
                reduce=reduce and asked is None,
                early=self._overlaps(step),
                stages=self._computing,
            )
            marked, _ = upstream.agreed()
        finally:
            self._reducer.upstream = None
        if asked is not None:
            gathered = self._reducer.gathered(reduce=False)
            if wanted:
                self._reducer.accept(self._reducer.asked_of(gathered, asked), 1.0, keep=False)
        else:
            self._reducer.something_waits = True
        if reduce:
            self._reducer.reduce(asked)
        inputs = self.mini_batch.input_gradients(step, self._live(marked)[self.own])
        self._forget(step)
        return inputs

    def _live(self, marked: tuple[bool, ...]) -> Live:
        """Nodes that get a gradient if the marked outputs have one."""
        return {graph: graph.bound.live(marked) for graph in self._every}

    def _deliver_held_gradients(
        self,
        step: Step,
        gradients: Sequence[torch.Tensor | None],
        asked: Asked | None,
        *,
        reduce: bool,
        again: bool,
    ) -> list[torch.Tensor | None]:
        """Backward of an interleaved call: deliver the held gradients, scaled by the gradient of the loss.

        This is correct because gradients are linear in the gradient that backward starts with.
        """
        assert self.bound.interleaved is not None
        assert step.gathered is not None
        loss = self.bound.interleaved.loss
        results = self._graph.traced.results
        if any(g is not None for node, g in zip(results, gradients, strict=True) if node is not loss):
            raise StepError(
                "backward came through an output besides the loss, but this call has run its backward from the loss "
                "already; set interleave_loss=false (RANNC_INTERLEAVE_LOSS=false) to have backward run when it is "
                "asked for"
            )
        (given,) = (g for node, g in zip(results, gradients, strict=True) if node is loss)
        late = self.world.reads.late and given is not None and given.device == self.world.device
        number = float(read(given)) if given is not None and not late else 0.0
        gathered = step.gathered if asked is None else self._reducer.asked_of(step.gathered, asked)
        collective = reduce and (self._reducer.something_waits or not gathered.reduced)
        wanted = asked is not NOTHING
        if collective or (reduce and self._reducer.compares):
            told = agree(self.world, Phase.BACKWARD, step.number, int(wanted), *pack_floats([number]))
            same_loss_gradient([unpack_floats(each[1:])[0] for each in told])
            wanted = any(each[0] for each in told)
        elif not late:
            compare_later(self.world, step.number, number, reduce)
        factor: Factor = number / step.seed
        if late:
            assert given is not None
            world, call = self.world, step.number  # not the step itself, whose tensors would live a step longer
            world.reads.add(given, lambda found: compare_later(world, call, found[0], reduce))
            factor = given.detach().double() / step.seed
        if not again:
            step.gathered = None
        if wanted:
            self._reducer.accept(gathered, factor, keep=again)
            if collective:
                self._reducer.reduce(asked)
            elif reduce:
                self._reducer.deliver(asked)
        return [None if g is None else scaled(g, factor) for g in step.input_gradients]

    def _check_asked(self, asked: Asked | None, *, reduce: bool) -> None:
        """StepError if torch.autograd.grad asks for parameters while other gradients wait to be reduced."""
        if asked is not None and asked.found is not None and (not reduce or self._reducer.something_waits):
            raise StepError(
                "torch.autograd.grad with respect to parameters of a RaNNCModule while gradients wait "
                "(delay_grad_allreduce): call model.allreduce_grads() before it, with the delay off"
            )

    def _forget(self, step: Step) -> None:
        step.gradients.clear()
        step.outgoing.clear()
        step.upstream.clear()

    def _outputs(self, step: Step) -> list[Any]:
        """Assemble this rank's outputs; collective if some are summed over all ranks."""
        missing: frozenset[Node] = frozenset()
        if step.interleaved and self.bound.interleaved is not None:
            missing = self.bound.interleaved.missing
        rows, pieces = step.pieces.rank_rows[self._slot], step.pieces.of_slot(self._slot)
        outputs = join(
            self._graph,
            step.values,
            self._last,
            pieces,
            rows,
            missing,
            self.world.device,
            shared=step.whole is not None,
        )
        found = self._totals.finish(step)
        for place, node in enumerate(self._graph.traced.results):
            if node in found and outputs[place] is None:
                outputs[place] = found[node]
        return outputs


def _computing(graphs: Sequence[PlayedGraph], every: Sequence[PlayedGraph], own: PlayedGraph) -> tuple[Computing, ...]:
    """This rank's stages of the graphs whose microbatches it computes."""
    here = set(every)
    if len(every) > 1:
        layout, slot = own.bound.layout, own.bound.slot
        here = {own}
        for stage in own.stages:
            at = layout.slots_of(stage)
            here.update(graphs[piece % layout.world] for piece, computes in enumerate(at) if computes == slot)
    return tuple(computing for graph in every if graph in here for computing in graph.stages.values())


def _communicates(listed: Sequence[Instruction]) -> bool:
    """Whether a phase moves values between ranks."""
    return any(each.posts or each.awaits or (each.action and each.action.kind in TRANSFERS) for each in listed)
