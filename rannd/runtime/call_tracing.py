"""The graph of a call that has none yet: ranks compare their calls, the model is traced, the graph may be checked.

`Session` comes here at the first call, and at each call of another shape, mode or Python state of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

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
from rannd.runtime.comm.context import Context
from rannd.runtime.deployment.verify import verify
from rannd.runtime.execution.microbatches import split_rows
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.traces.trace_provider import Tracer

MANY_GRAPHS = 16
"""So many graphs of one model are probably a mistake of the script."""


class CallTracing:
    """Gives the graphs of calls that all ranks make alike. All methods but `warn_of_many` are collective.

    `state` gives the Python state of the model's modules.
    """

    def __init__(self, context: Context, values: InitialValues, state: Callable[[], PythonState]) -> None:
        self._context = context
        self._world = context.world
        self._values = values
        self._state = state
        self._tracer = Tracer(context)

    def graph(self, call: Call, mode: Mode, held: Parameters | None) -> ModelGraph:
        """The graph of a call; `held`: the model's parameters once it is deployed.

        StepError, on all ranks, where they make different calls.
        """
        check_ready(self._context.model, call.names, call.tensors)
        told = self._world.gather_bytes(msgspec.msgpack.encode(of_call(call, mode)))
        what = difference([msgspec.msgpack.decode(data, type=dict[str, str]) for data in told])
        if what:
            raise StepError(f"ranks call the model in different ways: {what}; all ranks have to make the same call")
        shapes = [
            msgspec.msgpack.decode(data, type=list[list[int]])
            for data in self._world.gather_bytes(msgspec.msgpack.encode(call.shapes()))
        ]
        signature = classify(call, mode, shapes)
        if self._world.rank == 0:
            more = "" if held is None else " for other inputs or another mode"
            log.get("RaNNCModule").info("Tracing model%s ...", more)
        return self._trace(signature, call, held)

    def rows(self, graph: ModelGraph, call: Call) -> list[int]:
        """Rows of each rank. StepError where there are none."""
        rows = [count for (count,) in self._world.gather_numbers([graph.signature.rows(call.tensors)])]
        if self._context.options.shared:
            rows = [count for _, count in split_rows(rows[0], self._world.size)]
        if not any(rows):
            raise StepError("the mini-batches of all ranks are empty; skip the step")
        return rows

    def planned(self, graph: ModelGraph, call: Call) -> ModelGraph:
        """The graph to plan for, from that of the first call; with `verify_partitioning` compared with the model."""
        graph = self._as_trained(graph, call)
        if self._context.config.verify_partitioning and not self._context.config.partitioning_dry_run_np:
            self._verify(graph, call)
        return graph

    def warn_of_many(self, call: Call) -> None:
        """Warn, once, where the model is traced again and again."""
        if self._tracer.traced == MANY_GRAPHS and self._world.rank == 0:
            log.get("RaNNCModule").warning(
                "The model was traced %d times, the last time for %s; numbers and strings among its arguments, and "
                "shapes but for the batch, are part of a graph. Pass what changes from call to call as tensors",
                MANY_GRAPHS,
                ", ".join(f"{name}: {tuple(t.shape)}" for name, t in zip(call.names, call.tensors, strict=True)),
            )

    def _as_trained(self, graph: ModelGraph, call: Call) -> ModelGraph:
        """The graph that training runs, where there is an optimizer, whatever the first call is.

        Plans so do not depend on an evaluation before the first step. A model that cannot be called like that in
        training (it wants labels, say) is planned for the call at hand.
        """
        model, mode = self._context.model, Mode(True, True, graph.signature.mode.autocast)
        if self._context.optimizer is None or graph.signature.mode == mode:
            return graph
        modes = [(module, module.training) for module in model.modules()]
        model.train()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._trace(dataclasses.replace(graph.signature, mode=mode, fixed_rows=None), call, None)
        except (TraceError, StepError) as exc:
            log.get("RaNNCModule").info("Planning for this call, not for training: %s", exc)
            return graph
        finally:
            for module, training in modes:
                module.training = training

    def _trace(self, signature: Signature, call: Call, held: Parameters | None) -> ModelGraph:
        """The graph of a call, from the cache or traced now; checked against the model where that is wanted."""
        config = self._context.config
        with self._whole_model(held) as empty, traced_with(self._context.model, signature.mode):
            graph, cached = self._tracer.graph(signature, call.tensors, self._state(), empty)
            if cached and config.verify_partitioning and held is None:
                wrong = self._verified(graph, call)
                if wrong:
                    self._tracer.distrust(wrong)
                    graph, _ = self._tracer.graph(signature, call.tensors, self._state(), empty)
        if not config.partitioning_dry_run_np:
            self._values.check_leaves(graph.traced.leaf_paths)
        if self._world.rank == 0 and held is None:
            log.get("RaNNCModule").info("Converting torch model to IR ...")
        return graph

    def _verified(self, graph: ModelGraph, call: Call) -> str:
        """What some rank found wrong about a graph, '' where all found it right."""
        wrong = ""
        try:
            self._verify(graph, call)
        except TraceError as exc:
            wrong = str(exc)
        return next((text for data in self._world.gather_bytes(wrong.encode()) if (text := data.decode())), "")

    def _verify(self, graph: ModelGraph, call: Call) -> None:
        if not self._values.bare:
            verify(self._context.model, graph, call.tensors)
        elif self._world.rank == 0:
            log.get("RaNNCModule").warning(
                "verify_partitioning: not done, because no rank has the whole model (meta device)"
            )

    def _whole_model(self, held: Parameters | None) -> AbstractContextManager[Sequence[torch.Tensor] | None]:
        """The model as a tracer wants to see it, where ranks hold parts of it, or nobody has values.

        Gives the tensors whose memory holds nothing here; None where no rank has values.
        """
        if held is not None:
            return held.hollow()
        return self._values.readable(planned_only=bool(self._context.config.partitioning_dry_run_np))
