"""One wrapped model at work: its deployment, its graphs, its parameters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rannd import log
from rannd.config import Config
from rannd.errors import RanndError, StepError, TraceError, UsageError
from rannd.graph.model import ModelGraph, build
from rannd.graph.pystate import State, changed, state_of
from rannd.graph.signature import Call, Mode, Signature, classify
from rannd.plan.check import check
from rannd.plan.deployment import Deployment
from rannd.runtime.bound import bind, planned_stages, tensor_owners
from rannd.runtime.deploy import Planner
from rannd.runtime.exchange import Phase, agree
from rannd.runtime.executor import Executor, Step
from rannd.runtime.gradients import Reducer
from rannd.runtime.optimizer import keep_own
from rannd.runtime.parameters import Parameters
from rannd.runtime.verify import dump, verify
from rannd.runtime.world import World

UNKNOWN = -1
IDLE_CHANGES = 3
"""So often an attribute may change for nothing before it is ignored."""
MANY_GRAPHS = 16
"""So many graphs of one model are probably a mistake of the script."""


class DryRunDone(SystemExit):
    """Ends a script that was started to plan only."""


@dataclass(frozen=True)
class _Deployed:
    deployment: Deployment
    parameters: Parameters
    reducer: Reducer


class Session:
    """Runs calls of a model. Everything here is collective: all ranks make the same calls in the same order."""

    def __init__(
        self,
        world: World,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        load_deployment: Path | None,
        sync: bool,
    ) -> None:
        self.world = world
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._load = load_deployment
        self._sync = sync
        self._seed = int.from_bytes(world.broadcast_bytes(torch.initial_seed().to_bytes(8, "big")), "big")
        self._executors: list[Executor] = []
        self._signatures: list[Signature] = []
        self._states: list[State] = []
        """Python state of the model's modules when each graph was traced."""
        self._ignored: set[tuple[str, str]] = set()
        self._idle_changes: Counter[tuple[str, str]] = Counter()
        self._steps = 0
        self._deployed: _Deployed | None = None

    @property
    def deployment(self) -> Deployment | None:
        """The deployment, once there is one."""
        return self._deployed.deployment if self._deployed is not None else None

    @property
    def parameters(self) -> Parameters | None:
        """Who holds what, once the model is deployed."""
        return self._deployed.parameters if self._deployed is not None else None

    # -- calls ------------------------------------------------------------------------------------------------

    def run(self, call: Call, training: bool, delayed: Callable[[], bool]) -> Any:
        """The output of one call, for this rank's samples.

        `delayed()` says, when backward runs, whether gradients wait.
        """
        mode = Mode.current(training)
        state = state_of(self._model, self._ignored)
        number = self._number(call, mode, state)
        rows = self._signatures[number].rows(call.tensors) if number != UNKNOWN else 0
        told = agree(self.world, Phase.FORWARD, self._steps, number, rows)
        if any(each == UNKNOWN for each, _ in told):
            number = self._prepare(call, mode, state)
            self._many_graphs(call)
            told = agree(self.world, Phase.FORWARD, self._steps, number, self._signatures[number].rows(call.tensors))
        elif any(each != number for each, _ in told):
            raise StepError(
                f"ranks call the model in different ways: graphs {[each for each, _ in told]} of "
                f"{len(self._signatures)}; shapes (but for the batch), types, and training mode have to be the same "
                "on all ranks"
            )
        executor = self._executors[number]
        by_slot = tuple(told[rank][1] for rank in self.world.rank_of_slot)
        if not any(by_slot):
            raise StepError("the mini-batches of all ranks are empty; skip the step")
        assert self._deployed is not None
        self._deployed.parameters.refresh()
        leaves = [tensor.to(self.world.device) for tensor in call.tensors]
        step = Step(self._steps, by_slot, leaves)
        self._steps += 1
        outputs = executor.forward(step)
        home = call.tensors[0].device
        outputs = [value.to(home) if isinstance(value, torch.Tensor) else value for value in outputs]
        if torch.is_grad_enabled():
            outputs = self._attach(executor, step, call, outputs, delayed)
        graph = executor.bound.graph
        return graph.traced.outputs.unflatten(outputs)

    def _number(self, call: Call, mode: Mode, state: State) -> int:
        """The graph for a call, UNKNOWN where it has to be traced."""
        for number, (signature, known) in enumerate(zip(self._signatures, self._states, strict=True)):
            if known == state and signature.matches(call, mode):
                return number
        return UNKNOWN

    def _many_graphs(self, call: Call) -> None:
        if len(self._signatures) == MANY_GRAPHS and self.world.rank == 0:
            log.get("RaNNCModule").warning(
                "The model was traced %d times, the last time for %s; numbers and strings among its arguments, and "
                "shapes but for the batch, are part of a graph. Pass what changes from call to call as tensors",
                MANY_GRAPHS,
                ", ".join(f"{name}: {tuple(t.shape)}" for name, t in zip(call.names, call.tensors, strict=True)),
            )

    def _attach(
        self, executor: Executor, step: Step, call: Call, outputs: list[Any], delayed: Callable[[], bool]
    ) -> list[Any]:
        """Make the outputs part of the script's autograd graph."""
        graph = executor.bound.graph
        places = [place for place, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
        nodes = graph.traced.results
        marked = [nodes[place] in graph.placement.requires_grad for place in places]
        if not any(marked):
            return outputs
        bridge = _Call(self, executor, step, len(outputs), places, delayed)
        anchor = torch.zeros((), requires_grad=True)
        tensors = [outputs[place] for place in places]
        attached: tuple[torch.Tensor, ...] = _Bridge.apply(bridge, marked, tensors, anchor, *call.tensors)  # type: ignore[no-untyped-call]
        for place, value in zip(places, attached, strict=True):
            outputs[place] = value
        return outputs

    def reduce(self) -> None:
        """Reduce gradients that wait."""
        if self._deployed is not None:
            self._deployed.reducer.reduce()

    def clip(self, most: float) -> torch.Tensor:
        """Clip the norm of the whole model's gradients."""
        if self._deployed is None:
            return torch.nn.utils.clip_grad_norm_(self._model.parameters(), most)
        return self._deployed.reducer.clip(most)

    # -- graphs -----------------------------------------------------------------------------------------------

    def _prepare(self, call: Call, mode: Mode, state: State) -> int:
        """Trace and bind the graph of a call not seen before; deploy at the first. Returns its number."""
        logger = log.get("RaNNCModule")
        deployed = self._deployed
        shapes = [
            msgspec.msgpack.decode(data, type=list[list[int]])
            for data in self.world.gather_bytes(msgspec.msgpack.encode(call.shapes()))
        ]
        signature = classify(call, mode, shapes)
        if self.world.rank == 0:
            logger.info("Tracing model%s ...", "" if deployed is None else " for other inputs or another mode")
        graph = self._trace(signature, call)
        twin = self._twin(graph, signature, state)
        if twin is not None:
            return twin
        rows = [count for (count,) in self.world.gather_numbers([signature.rows(call.tensors)])]
        if deployed is not None:
            deployed.parameters.adopt()
        else:
            self._deployed = self._deploy(self._as_trained(graph, call), call, rows)
        assert self._deployed is not None
        self._bind(self._deployed, graph)
        self._signatures.append(signature)
        self._states.append(state)
        if deployed is None:
            if self.world.rank == 0:
                logger.info("Routes verification passed.")
            logger.info("RaNNCModule is ready. (rank%d)", self.world.rank)
        return len(self._signatures) - 1

    def _twin(self, graph: ModelGraph, signature: Signature, state: State) -> int | None:
        """A graph that is the same although the Python state of the modules has changed.

        An attribute that changes again and again without changing the graph (a counter of the script's) is not
        looked at any more.
        """
        for number, known in enumerate(self._signatures):
            if known != signature or self._executors[number].bound.graph.task.graph_hash != graph.task.graph_hash:
                continue
            pairs = changed(self._states[number], state)
            if any(key in ("_buffers", "_parameters") for _, key in pairs):
                return None
            self._states[number] = state
            self._idle_changes.update(pairs)
            for pair in [pair for pair in pairs if self._idle_changes[pair] >= IDLE_CHANGES]:
                self._ignored.add(pair)
                for each in self._states:
                    each.pop(pair, None)
                if self.world.rank == 0:
                    log.get("RaNNCModule").warning(
                        "Attribute %s of module %r changed %d times without changing the graph; it is not looked at "
                        "any more",
                        pair[1],
                        pair[0],
                        IDLE_CHANGES,
                    )
            return number
        return None

    def _as_trained(self, graph: ModelGraph, call: Call) -> ModelGraph:
        """The graph to plan for: the one that training runs, where there is an optimizer, whatever the first call is.

        Plans so do not depend on an evaluation before the first step. A model that cannot be called like that in
        training (it wants labels, say) is planned for the call at hand.
        """
        mode = Mode(True, True, graph.signature.mode.autocast)
        if self._optimizer is None or graph.signature.mode == mode:
            return graph
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.train()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._trace(dataclasses.replace(graph.signature, mode=mode), call)
        except (TraceError, StepError) as exc:
            log.get("RaNNCModule").info("Planning for this call, not for training: %s", exc)
            return graph
        finally:
            for module, training in modes:
                module.training = training

    def _trace(self, signature: Signature, call: Call) -> ModelGraph:
        """Trace on every rank; an error on one, and graphs that differ, are errors on all."""
        graph: ModelGraph | None = None
        error: RanndError | None = None
        try:
            with self._whole_model():
                home = next((p.device for p in self._model.parameters()), self.world.device)
                leaves = [tensor.detach().to(home).requires_grad_(tensor.requires_grad) for tensor in call.tensors]
                graph = build(self._model, signature, leaves, self.world.device)
        except RanndError as exc:
            error = exc
        if self.world.rank == 0 and self.deployment is None and graph is not None:
            log.get("RaNNCModule").info("Converting torch model to IR ...")
        told = f"{graph.task.graph_hash} {signature.describe()}" if graph is not None else f"error: {error}"
        hashes = [data.decode() for data in self.world.gather_bytes(told.encode())]
        if error is not None:
            raise error
        failed = [rank for rank, each in enumerate(hashes) if each.startswith("error: ")]
        if failed:
            raise StepError(f"rank {failed[0]} could not trace the model: {hashes[failed[0]].removeprefix('error: ')}")
        different = [rank for rank, each in enumerate(hashes) if each != hashes[0]]
        if different:
            (mine, call_here), (other, call_there) = (hashes[r].split(" ", 1) for r in (0, different[0]))
            what = (
                f"rank {different[0]} calls the model with {call_there}, rank 0 with {call_here}"
                if call_here != call_there
                else f"ranks {different} have another model than rank 0 (graph {other[:12]}, not {mine[:12]})"
            )
            raise StepError(f"{what}; build the same model and call it in the same way on every rank")
        assert graph is not None
        if self.world.rank == 0:
            for where in graph.traced.changes:
                log.get("RaNNCModule").warning(
                    "forward changes attribute %s; that is no part of the graph, and is not done when the graph runs",
                    where,
                )
        if self._config.dump_graph and self.world.rank == 0:
            dump(graph, self._config)
        return graph

    def _whole_model(self) -> AbstractContextManager[None]:
        """The model as a tracer wants to see it, once other ranks hold parts of it."""
        return nullcontext() if self._deployed is None else self._deployed.parameters.hollow()

    def _deploy(self, graph: ModelGraph, call: Call, rows: Sequence[int]) -> _Deployed:
        planner = Planner(self.world, self._config, graph, self._model, self._optimizer, call.tensors, rows)
        if self._config.partitioning_dry_run_np:
            planner.dry_run(self._config.partitioning_dry_run_np)
            raise DryRunDone(0)
        deployment = planner.deployment(self._load)
        if self._config.verify_partitioning:
            verify(self._model, graph, call.tensors)
        owners = tensor_owners(graph, planned_stages(graph, deployment), deployment)
        if self.world.rank == 0:
            log.get("ParamStorage").info("Synchronizing parameters ...")
        parameters = Parameters(self.world, self._model, owners, deployment, sync=self._sync)
        if self._optimizer is not None:
            keep_own(self._optimizer, parameters)
        return _Deployed(deployment, parameters, Reducer(self.world, parameters))

    def _bind(self, deployed: _Deployed, graph: ModelGraph) -> None:
        planned = graph.task.graph_hash == deployed.deployment.graph_hash
        owners = None if planned else deployed.parameters.owners
        bound = bind(graph, deployed.deployment, self.world.slot, self.world.device, owners)
        check(bound.program)
        self._executors.append(Executor(self.world, bound, deployed.parameters.aliases, self._seed))


class _Call:
    """What the backward of a call needs to know."""

    def __init__(
        self,
        session: Session,
        executor: Executor,
        step: Step,
        outputs: int,
        places: Sequence[int],
        delayed: Callable[[], bool],
    ) -> None:
        self._session = session
        self._executor = executor
        self._step = step
        self._outputs = outputs
        self._places = places
        self._delayed = delayed

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the call's tensors from those of its tensor outputs."""
        given: list[torch.Tensor | None] = [None] * self._outputs
        for place, gradient in zip(self._places, gradients, strict=True):
            given[place] = gradient
        found = self._executor.backward(self._step, given)
        if not self._delayed():
            self._session.reduce()
        return found


class _Bridge(torch.autograd.Function):
    """Stands for the whole model in the script's autograd graph: its forward has run already."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        marked: list[bool],
        outputs: list[torch.Tensor],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.devices = [tensor.device for tensor in inputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value, mark in zip(outputs, marked, strict=True) if not mark))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        found = ctx.call.backward(gradients)
        moved = [None if g is None else g.to(device) for g, device in zip(found, ctx.devices, strict=True)]
        return (None, None, None, None, *moved)


def ensure_single_wrap(model: nn.Module) -> None:
    """UsageError where a model is wrapped already."""
    if getattr(model, "_rannd_wrapped", False):
        raise UsageError("this model is wrapped in a RaNNCModule already; wrap each model once")
    object.__setattr__(model, "_rannd_wrapped", True)
