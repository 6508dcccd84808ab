"""Traces graphs for calls of one model that have none, and binds them to its deployment, which the first call makes.

::

    call ──► traced ──► planned and deployed, the first time ──► bound ──► added to the table
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from rannd import log
from rannd.errors import ProfileError, TraceError
from rannd.graph.call.plain_arguments import ArgumentsChanged
from rannd.graph.call.signature import Call, Mode, Signature, flatten_call, sized
from rannd.graph.call.unread import note_read
from rannd.profile.graph_profile import GraphProfile
from rannd.runtime.calls.argument_learning import ArgumentLearning
from rannd.runtime.calls.call_tracing import CallTracing
from rannd.runtime.calls.equal_batches import tell_equal_batches
from rannd.runtime.calls.graph_table import UNKNOWN, Graphs
from rannd.runtime.calls.retraces import Retraces
from rannd.runtime.comm.context import Context
from rannd.runtime.deployment.deployer import Deployed, Deployer
from rannd.runtime.execution.shared_batch import from_rank
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.planning.replanning import Replanning

_T = TypeVar("_T")


class Owner(Protocol):
    """Whose calls are run."""

    @property
    def seed(self) -> int:
        """Seed of the random numbers of the model's operators."""

    def made(self, deployed: Deployed) -> None:
        """Called with a new deployment, before the graph that it was made for is bound."""

    def ready(self) -> None:
        """Called when this graph was bound."""


class GraphBinding:
    """Binds graphs of one model. All methods are collective.

    Args:
        context: What the model was wrapped with.
        values: The model's values before it is deployed.
        graphs: Table that bound graphs are added to.
        replanning: Is told how long a deployment takes; may have a better plan for the next one.
    """

    def __init__(self, context: Context, values: InitialValues, graphs: Graphs, replanning: Replanning) -> None:
        self._context, self._world, self._values, self._graphs = context, context.world, values, graphs
        self._replanning = replanning
        self._tracing = CallTracing(context, values, graphs.state)
        self._arguments = ArgumentLearning(context.world, self._tracing.refusal, inputs=context.config.verify_trace)
        self._retraces = Retraces()
        self._deployer = Deployer(context, values)
        self.deployed: Deployed | None = None
        """None before the first call, and after `forget`."""

    def flattened(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], use: Callable[[Call], _T]) -> _T:
        """Use the flattened arguments of a call, again if tracing shows that they have to be flattened differently."""
        with self._arguments.trying():
            while True:
                with contextlib.suppress(ArgumentsChanged):
                    return use(flatten_call(args, kwargs, self._arguments.known))

    def bind(self, call: Call, mode: Mode, owner: Owner) -> int:
        """Trace and bind a graph for a call that some rank has no graph for; returns its number."""
        with self._context.cache.connected():
            number = self._bind_graphs(call, mode, owner)
        if self._world.rank == 0:
            self._retraces.warn_of_many(self._tracing.traced, call)
        return number

    def profile(self, call: Call, mode: Mode) -> GraphProfile:
        """Measure the blocks of a call's graph, for plans on any number of ranks; nothing is deployed."""
        with self._context.cache.connected():
            signature = self._tracing.signature(call, mode)
            with self._arguments.noted(call):
                graph = self._tracing.graph(signature, call, None)
            return self._deployer.profile(graph, call, self._tracing.rows(graph, call))

    def forget(self) -> None:
        """Drop the deployment and its graphs; the next call deploys the model again."""
        deployed, self.deployed = self.deployed, None
        self._graphs.clear()
        if deployed is not None:
            deployed.close()

    def _bind_graphs(self, call: Call, mode: Mode, owner: Owner) -> int:
        """Bind graphs until each rank has one for its call, the largest call's first; returns the number of its own."""
        shared = self._context.options.shared
        varying = self._graphs.varying(call, mode)
        self._arguments.may_be_inputs(varying)
        signature = self._tracing.signature(call, mode)
        keys = self._world.gather_bytes(signature.key().encode())
        if len(set(keys)) == 1 or shared:
            first = self.deployed is None
            number = self._bind_graph(call, signature, varying, owner)
            if first and mode.training and self._context.optimizer is not None and not shared:
                tell_equal_batches(self._world, call.tensors, self._graphs.rows(number, call))
            return number
        told = self._tracing.other_sizes(signature)
        amounts = self._world.gather_numbers([sum(tensor.numel() for tensor in call.tensors)])
        bound = set[int]()
        while True:
            numbers = [number for (number,) in self._world.gather_numbers([self._graphs.find(call, mode)])]
            self._graphs.note_use(numbers)  # so that binding others drops none of them
            lacking = [rank for rank, number in enumerate(numbers) if number == UNKNOWN]
            if not lacking:
                return numbers[self._world.rank]
            rank = min(lacking, key=lambda rank: (-amounts[rank][0], rank))
            theirs = from_rank(self._world, call, rank)
            # Nothing can be traced or planned for without samples, and a graph has to hold for the call that it is of.
            if rank in bound or not signature.rows(theirs.tensors):
                self._tracing.refuse_sizes(signature)
            bound.add(rank)
            try:
                self._bind_graph(theirs, sized(signature, theirs), varying, owner)
            except (TraceError, ProfileError) as exc:  # on all ranks, for the sizes of one
                raise type(exc)(f"{exc}; {told}") from exc

    def _bind_graph(self, call: Call, signature: Signature, varying: dict[str, tuple[Any, Any]], owner: Owner) -> int:
        """Trace the model for a call, deploy it if this is the first call, and bind the graph to the deployment."""
        begun = time.monotonic()
        state, deployed = self._graphs.state(), self.deployed
        with self._arguments.noted(call):
            graph = self._tracing.graph(signature, call, self._held)
            planned = self._tracing.planned(graph, call) if deployed is None else None
            if self._context.options.shared:  # all ranks return what rank 0 returns
                for name in graph.traced.outputs.passed_on:
                    note_read(name)
        self._graphs.look_again()
        twin = self._graphs.twin(graph, state)
        if twin is not None:
            return twin
        if self._world.rank == 0:
            self._retraces.note(varying, self._graphs.changed_attributes(graph, state), time.monotonic() - begun)
        rows = self._tracing.rows(graph, call)
        if planned is None:
            assert deployed is not None
            deployed.parameters.adopt()
        else:
            self._tracing.check(planned, call)
            deployed = self.deployed = self._deployer.deploy(planned, call, rows, self._replanning)
            owner.made(deployed)
        binding = time.monotonic()
        executor = self._deployer.bind(deployed, graph, owner.seed, rows)
        if planned is not None:
            self._replanning.moving_s += time.monotonic() - binding
        number = self._graphs.add(graph.signature, executor, state)
        if planned is not None:
            self._values.close()
            owner.ready()
            self._tell_ready(signature.mode, time.monotonic() - begun)
        return number

    @property
    def _held(self) -> Parameters | None:
        """The model's parameters, once it is deployed."""
        return self.deployed.parameters if self.deployed is not None else None

    def _tell_ready(self, mode: Mode, seconds: float) -> None:
        logger = log.get("RaNNCModule")
        if self._world.rank == 0:
            logger.log(log.DETAIL, "Routes verification passed.")
            begins = "; training begins" if mode.training and self._context.optimizer is not None else ""
            if begins and not self._world.place.launcher:
                begins += " (rannc-run -np N starts a script on N ranks)"
            ranks = "1 rank" if self._world.size == 1 else f"{self._world.size} ranks"
            logger.info("The model is ready on %s after %.1f s%s", ranks, seconds, begins)
        logger.log(log.DETAIL, "RaNNCModule is ready. (rank%d)", self._world.rank)
