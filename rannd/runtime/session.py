"""One wrapped model at work: its deployment, its graphs, its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch

from rannd import log
from rannd.errors import StepError, TraceError
from rannd.graph.call.call_diff import difference, of_call
from rannd.graph.call.call_errors import check_ready
from rannd.graph.call.signature import Call, Mode, Signature, classify
from rannd.graph.model import ModelGraph
from rannd.graph.modules.guards import PythonState
from rannd.graph.tracing.dropout import traced_with
from rannd.plan.deployment import Deployment
from rannd.profile.graph_profile import GraphProfile
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.lockstep import Phase, agree, meet
from rannd.runtime.deployment.deployer import Deployed, Deployer
from rannd.runtime.deployment.graph_table import UNKNOWN, Graphs
from rannd.runtime.deployment.undeploy import gather_gradient, undeploy
from rannd.runtime.deployment.verify import verify
from rannd.runtime.execution.autograd_bridge import attach
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.microbatches import split_rows
from rannd.runtime.execution.outputs import NotSent
from rannd.runtime.execution.shared_batch import Share, from_rank_0, rows_by_slot
from rannd.runtime.execution.step import Step
from rannd.runtime.optim.global_optimizer import whole_optimizer
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.planning.memory_promise import MemoryPromise
from rannd.runtime.traces.trace_provider import Tracer

MANY_GRAPHS = 16
"""So many graphs of one model are probably a mistake of the script."""


class Session:
    """Runs calls of a model. Everything here is collective: all ranks make the same calls in the same order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.world = world = context.world
        meet(world, Phase.WRAP)
        self._seed = int.from_bytes(world.broadcast_bytes(torch.initial_seed().to_bytes(8, "big")), "big")
        self.values = InitialValues(context)
        self._graphs = Graphs(context)
        self._tracer = Tracer(context)
        self._deployer = Deployer(context, self.values)
        self._steps = 0
        self.dropout: bool | None = None
        """What `RaNNCModule.enable_dropout` says; None: as the modules' training flags do."""
        if context.optimizer is not None:
            whole_optimizer(context.optimizer, world)
        self._deployed: Deployed | None = None

    @property
    def deployment(self) -> Deployment | None:
        """The deployment, once there is one."""
        return self._deployed.deployment if self._deployed is not None else None

    @property
    def parameters(self) -> Parameters | None:
        """Who holds what, once the model is deployed."""
        return self._deployed.parameters if self._deployed is not None else None

    @property
    def _promise(self) -> MemoryPromise | None:
        """What the plan promised."""
        return self._deployed.promise if self._deployed is not None else None

    @property
    def something_waits(self) -> bool:
        """Whether gradients wait here to be reduced."""
        return self._deployed is not None and self._deployed.reducer.something_waits

    @property
    def random_position(self) -> tuple[int, int]:
        """(seed, number of calls so far), on which the random numbers of the model's operators depend."""
        return self._seed, self._steps

    def resume(self, seed: int, steps: int) -> None:
        """Go on with the random numbers of another run. On all ranks, alike."""
        self._seed, self._steps = seed, steps
        for executor in self._graphs.executors():
            executor.computing.seed = seed

    # -- calls ------------------------------------------------------------------------------------------------

    def run(self, call: Call, training: bool, delayed: Callable[[], bool]) -> Any:
        """The output of one call, for this rank's samples.

        `delayed()` says, when backward runs, whether gradients wait.
        """
        watch = self.world.watch
        watch.where.step, watch.promise = self._steps, self._promise
        if self._context.options.shared:
            meet(self.world, Phase.FORWARD)
            call = from_rank_0(self.world, call)
        mode = Mode.current(training, self.dropout)
        state = self._graphs.state()
        changed_flags = self._deployed is not None and self._deployed.frozen.changed()
        waits = delayed()
        number = UNKNOWN if changed_flags else self._graphs.find(call, mode, state)
        told = self._agree(number, call, waits=waits)
        if self._deployed is not None and any(each == UNKNOWN for each, _ in told):
            self._deployed.frozen.agree()
            state = self._graphs.state()
            number = self._graphs.find(call, mode, state)
            told = self._agree(number, call, waits=waits)
        if any(each == UNKNOWN for each, _ in told):
            with self._context.cache.connected():
                watch.where.preparing = True
                number = self._prepare(call, mode, state)
                watch.where.preparing, watch.promise = False, self._promise
            self._many_graphs(call)
            told = self._agree(number, call, waits=waits)
        else:
            number = self._graphs.common(told)
        executor = self._graphs.use(number)
        graph = executor.bound.graph
        by_slot = tuple(told[rank][1] for rank in self.world.rank_of_slot)
        if self._context.options.shared:
            by_slot = rows_by_slot(self.world, graph, by_slot[0])
        if not any(by_slot):
            raise StepError("the mini-batches of all ranks are empty; skip the step")
        assert self._deployed is not None
        self._deployed.parameters.refresh()
        if self._deployed.clip_watch is not None:
            self._deployed.clip_watch.compare(self._steps)
        leaves = [tensor.to(self.world.device) for tensor in call.tensors]
        step = Step(self._steps, executor.pieces(by_slot), leaves)
        share: Share | None = None
        if self._context.options.shared:
            share = Share(self.world, graph, by_slot)
            step.leaves, step.whole = share.inputs(leaves), leaves
        step.interleaved, step.seed = self._interleaves(executor, mode)
        self._deployed.overflow.watched |= mode.float16
        self._steps += 1
        # Gradients that wait already are reduced together with those of this call, at its backward.
        watch.where.stage = executor.bound.stage
        outputs = executor.forward(step, reduce=not waits and not self._deployed.reducer.something_waits)
        if training and torch.is_grad_enabled():
            self._check_losses(executor, step, outputs)
        if share is not None:
            outputs = share.outputs(outputs)
        home = call.tensors[0].device
        outputs = [
            value.to(home) if isinstance(value, torch.Tensor) and not isinstance(value, NotSent) else value
            for value in outputs
        ]
        if torch.is_grad_enabled():
            outputs = attach(executor, step, call.tensors, outputs, delayed, share)
        return graph.traced.outputs.unflatten(outputs)

    def _agree(self, number: int, call: Call, *, waits: bool) -> list[tuple[int, int]]:
        """(graph, rows) of every rank."""
        told = agree(self.world, Phase.FORWARD, self._steps, number, self._graphs.rows(number, call), int(waits))
        if len({each[2] for each in told}) > 1:
            ranks = [rank for rank, each in enumerate(told) if each[2]]
            raise StepError(
                f"gradients wait on ranks {ranks} (delay_grad_allreduce), and are reduced at once on the others; turn "
                "the delay on and off on all ranks"
            )
        return [(number, rows) for number, rows, _ in told]

    def _interleaves(self, executor: Executor, mode: Mode) -> tuple[bool, float]:
        """Whether backward runs inside a call, and the gradient of the loss that it begins with.

        In half precision small gradients need the scale of the script's GradScaler from the start.
        """
        if (
            not self._context.config.interleave_loss
            or executor.bound.interleaved is None
            or not torch.is_grad_enabled()
        ):
            return False, 1.0
        scaler = self._context.options.scaler
        if scaler is not None and scaler.is_enabled():
            return True, float(scaler.get_scale())
        return not mode.float16, 1.0

    def _check_losses(self, executor: Executor, step: Step, outputs: Sequence[Any]) -> None:
        """NotANumberError, on all ranks, where a loss is NaN."""
        graph = executor.bound.graph
        losses = {
            f"(output {place} of its forward, {node.name})": outputs[place]
            for place, (node, result) in enumerate(zip(graph.traced.results, graph.results, strict=True))
            if result.kind == "global" and node in graph.placement.requires_grad
        }
        if losses:
            again = Step(step.number, step.pieces, step.leaves, whole=step.whole)
            half = graph.signature.mode.float16

            def run_again() -> None:
                executor.forward(again, reduce=False)
                self.world.barrier()  # whose own part is right must not be the first to raise

            def given() -> dict[str, torch.Tensor]:
                assert self._deployed is not None
                held = self._deployed.parameters
                inputs = {
                    f"input {spec.name}": leaf for spec, leaf in zip(graph.signature.tensors, step.leaves, strict=True)
                }
                return {**inputs, **{f"parameter {name}": held.tensors[name] for name in held.own}}

            self._context.finite.losses(
                losses, given, lambda: executor.mini_batch.counts_no_label(step), run_again, half=half
            )

    def _many_graphs(self, call: Call) -> None:
        if self._tracer.traced == MANY_GRAPHS and self.world.rank == 0:
            log.get("RaNNCModule").warning(
                "The model was traced %d times, the last time for %s; numbers and strings among its arguments, and "
                "shapes but for the batch, are part of a graph. Pass what changes from call to call as tensors",
                MANY_GRAPHS,
                ", ".join(f"{name}: {tuple(t.shape)}" for name, t in zip(call.names, call.tensors, strict=True)),
            )

    def reduce(self) -> None:
        """Reduce gradients that wait."""
        if self._deployed is not None:
            meet(self.world, Phase.ALLREDUCE_GRADS)
            with self.world.watch.inside("reduction of gradients"):
                self._deployed.reducer.reduce()

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's reduced gradient, by its first name, on all ranks. Collective."""
        assert self._deployed is not None
        meet(self.world, Phase.GET_PARAM_GRAD, name)
        return gather_gradient(self.world, self._deployed.parameters, name)

    def forget_waiting(self) -> None:
        """Drop gradients that wait for their reduction."""
        if self._deployed is not None:
            self._deployed.reducer.forget()

    def undeploy(self) -> None:
        """Give every rank the whole model and optimizer back; the next call deploys anew. Collective."""
        deployed = self._deployed
        if deployed is None:
            return
        meet(self.world, Phase.UNDEPLOY)
        deployed.parameters.adopt()
        deployed.frozen.agree()
        undeploy(self.world, deployed.parameters, deployed.origin, self._context.optimizer)
        self.close()
        if self.world.rank == 0:
            log.get("RaNNCModule").info("The model is whole again on every rank; the next call deploys it anew")

    def alive(self) -> None:
        """Nothing; what is in this place after `pyrannc.clear` raises."""

    def close(self) -> None:
        """Forget the deployment."""
        deployed, self._deployed = self._deployed, None
        self._graphs.clear()
        if deployed is not None:
            deployed.close()

    # -- graphs -----------------------------------------------------------------------------------------------

    def _prepare(self, call: Call, mode: Mode, state: PythonState) -> int:
        """Trace and bind the graph of a call not seen before; deploy at the first. Returns its number."""
        logger = log.get("RaNNCModule")
        deployed = self._deployed
        graph, signature = self._graph_of(call, mode)
        self._graphs.look_again()
        twin = self._graphs.twin(graph, state)
        if twin is not None:
            return twin
        rows = self._rows(signature, call)
        if deployed is not None:
            deployed.parameters.adopt()
        else:
            planned = self._as_trained(graph, call)
            if self._context.config.verify_partitioning and not self._context.config.partitioning_dry_run_np:
                self._verify(planned, call)
            self._deployed = self._deployer.deploy(planned, call, rows)
        assert self._deployed is not None
        number = self._graphs.add(signature, self._deployer.bind(self._deployed, graph, self._seed), state)
        if deployed is None:
            self.values.close()
            if self.world.rank == 0:
                logger.info("Routes verification passed.")
            logger.info("RaNNCModule is ready. (rank%d)", self.world.rank)
        return number

    def profile(self, call: Call, training: bool) -> GraphProfile:
        """Measure the blocks of a call's graph for plans of any size; nothing is deployed."""
        with self._context.cache.connected():
            graph, signature = self._graph_of(call, Mode.current(training, self.dropout))
            return self._deployer.profile(graph, call, self._rows(signature, call))

    def _graph_of(self, call: Call, mode: Mode) -> tuple[ModelGraph, Signature]:
        """The graph of a call that all ranks make alike, and what it is traced for."""
        check_ready(self._context.model, call.names, call.tensors)
        told = self.world.gather_bytes(msgspec.msgpack.encode(of_call(call, mode)))
        what = difference([msgspec.msgpack.decode(data, type=dict[str, str]) for data in told])
        if what:
            raise StepError(f"ranks call the model in different ways: {what}; all ranks have to make the same call")
        shapes = [
            msgspec.msgpack.decode(data, type=list[list[int]])
            for data in self.world.gather_bytes(msgspec.msgpack.encode(call.shapes()))
        ]
        signature = classify(call, mode, shapes)
        if self.world.rank == 0:
            more = "" if self._deployed is None else " for other inputs or another mode"
            log.get("RaNNCModule").info("Tracing model%s ...", more)
        graph = self._trace(signature, call)
        return graph, graph.signature

    def _rows(self, signature: Signature, call: Call) -> list[int]:
        """Rows of each rank."""
        rows = [count for (count,) in self.world.gather_numbers([signature.rows(call.tensors)])]
        if self._context.options.shared:
            rows = [count for _, count in split_rows(rows[0], self.world.size)]
        if not any(rows):
            raise StepError("the mini-batches of all ranks are empty; skip the step")
        return rows

    def _as_trained(self, graph: ModelGraph, call: Call) -> ModelGraph:
        """The graph to plan for: the one that training runs, where there is an optimizer, whatever the first call is.

        Plans so do not depend on an evaluation before the first step. A model that cannot be called like that in
        training (it wants labels, say) is planned for the call at hand.
        """
        mode = Mode(True, True, graph.signature.mode.autocast)
        if self._context.optimizer is None or graph.signature.mode == mode:
            return graph
        modes = [(module, module.training) for module in self._context.model.modules()]
        self._context.model.train()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._trace(dataclasses.replace(graph.signature, mode=mode, fixed_rows=None), call)
        except (TraceError, StepError) as exc:
            log.get("RaNNCModule").info("Planning for this call, not for training: %s", exc)
            return graph
        finally:
            for module, training in modes:
                module.training = training

    def _trace(self, signature: Signature, call: Call) -> ModelGraph:
        """The graph of a call, from the cache or traced now; checked against the model where that is wanted."""
        with self._whole_model() as empty, traced_with(self._context.model, signature.mode):
            graph, cached = self._tracer.graph(signature, call.tensors, self._graphs.state(), empty)
            if cached and self._context.config.verify_partitioning and self.deployment is None:
                wrong = self._verified(graph, call)
                if wrong:
                    self._tracer.distrust(wrong)
                    graph, _ = self._tracer.graph(signature, call.tensors, self._graphs.state(), empty)
        if not self._context.config.partitioning_dry_run_np:
            self.values.check_leaves(graph.traced.leaf_paths)
        if self.world.rank == 0 and self.deployment is None:
            log.get("RaNNCModule").info("Converting torch model to IR ...")
        return graph

    def _verified(self, graph: ModelGraph, call: Call) -> str:
        """What some rank found wrong about a graph, '' where all found it right."""
        wrong = ""
        try:
            self._verify(graph, call)
        except TraceError as exc:
            wrong = str(exc)
        return next((text for data in self.world.gather_bytes(wrong.encode()) if (text := data.decode())), "")

    def _verify(self, graph: ModelGraph, call: Call) -> None:
        if not self.values.bare:
            verify(self._context.model, graph, call.tensors)
        elif self.world.rank == 0:
            log.get("RaNNCModule").warning(
                "verify_partitioning: not done, because no rank has the whole model (meta device)"
            )

    def _whole_model(self) -> AbstractContextManager[Sequence[torch.Tensor] | None]:
        """The model as a tracer wants to see it, where ranks hold parts of it, or nobody has values.

        Gives the tensors whose memory holds nothing here; None where no rank has values.
        """
        if self._deployed is not None:
            return self._deployed.parameters.hollow()
        return self.values.readable(planned_only=bool(self._context.config.partitioning_dry_run_np))
