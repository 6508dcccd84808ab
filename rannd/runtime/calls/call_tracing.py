"""Traces the model for a call that has no graph yet, after checking that all ranks make the same call.

`Session` uses it in the first call, and in each call with another shape, mode or Python state of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import msgspec
import torch

from rannd import log
from rannd.errors import StepError, TraceError
from rannd.graph.call.call_diff import SAME_CALL, SAME_SIZES, difference, of_call, of_signature
from rannd.graph.call.call_errors import check_ready
from rannd.graph.call.signature import Call, Mode, Signature, classify
from rannd.graph.model import ModelGraph
from rannd.graph.python_state.guards import PythonState
from rannd.graph.tracing.dropout import traced_with
from rannd.runtime.binding.microbatches import split_rows
from rannd.runtime.comm.context import Context
from rannd.runtime.deployment.verify import verify
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.traces.trace_provider import Tracer

_OF_STRINGS = ". A string that the model's code reads is part of the call; others may differ"


class CallTracing:
    """Traces the model for calls that are the same on all ranks. All methods but `refusal` are collective.

    `state` returns the Python state of the model's modules.
    """

    def __init__(self, context: Context, values: InitialValues, state: Callable[[], PythonState]) -> None:
        self._context = context
        self._world = context.world
        self._values = values
        self._state = state
        self._tracer = Tracer(context)
        self._whole: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        """Tensors of calls (by structure) that carry no samples, so that a size like the batch's is chance."""

    def signature(self, call: Call, mode: Mode) -> Signature:
        """Signature of a call; StepError on all ranks if their calls differ."""
        check_ready(self._context.model, call.names, call.tensors)
        what = self._difference(of_call(call, mode))
        if what:
            raise StepError(
                f"ranks call the model in different ways: {what}; {SAME_CALL}"
                + (_OF_STRINGS if " passes str '" in what else "")
            )
        shapes = [
            msgspec.msgpack.decode(data, type=list[list[int]])
            for data in self._world.gather_bytes(msgspec.msgpack.encode(call.shapes()))
        ]
        return classify(call, mode, shapes, self._whole_of(call))

    def refuse_sizes(self, signature: Signature) -> NoReturn:
        """Raise StepError, on all ranks, because the sizes of their calls differ."""
        raise StepError(f"{self.other_sizes(signature)}; {SAME_SIZES}")

    def other_sizes(self, signature: Signature) -> str:
        """How the sizes of ranks' calls differ, for messages."""
        return f"ranks call the model in different ways: {self._difference(of_signature(signature))}"

    def _difference(self, described: dict[str, str]) -> str:
        """How what ranks have described differs."""
        told = self._world.gather_bytes(msgspec.msgpack.encode(described))
        return difference([msgspec.msgpack.decode(data, type=dict[str, str]) for data in told])

    def graph(self, signature: Signature, call: Call, held: Parameters | None) -> ModelGraph:
        """Graph of a call; `held`: the model's parameters, once it is deployed."""
        graph = self._trace(signature, call, held)
        self._whole_of(call).update(
            number
            for number, spec in enumerate(graph.signature.tensors)
            if not spec.batch and spec.shape and spec.shape[0] > 1
        )
        return graph

    def _whole_of(self, call: Call) -> set[int]:
        return self._whole.setdefault((str(call.spec), call.positions), set())

    def rows(self, graph: ModelGraph, call: Call) -> list[int]:
        """Number of rows (samples) of each rank. StepError if all mini-batches are empty."""
        rows = [count for (count,) in self._world.gather_numbers([graph.signature.rows(call.tensors)])]
        if self._context.options.shared:
            rows = [count for _, count in split_rows(rows[0], self._world.size)]
        if not any(rows):
            raise StepError("the mini-batches of all ranks are empty; skip the step")
        return rows

    def check(self, graph: ModelGraph, call: Call) -> None:
        """Compare the graph to plan for with the model if `verify_partitioning` is set. TraceError on this rank."""
        if self._context.config.verify_partitioning and not self._context.config.partitioning_dry_run_np:
            self._verify(graph, call)

    @property
    def traced(self) -> int:
        """Number of calls traced separately."""
        return self._tracer.traced

    def refusal(self, read: Sequence[str]) -> Callable[[], None]:
        """Prepare to store that the last call could not be traced with these arguments unread, or numbers as inputs."""
        return self._tracer.refusal(read)

    def planned(self, graph: ModelGraph, call: Call) -> ModelGraph:
        """Graph to plan for: of this call in training mode, if there is an optimizer.

        So an evaluation before the first step does not change the plan. A model that cannot be called like this in
        training (because it needs labels, say) is planned for the call as it is.
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
            log.get("RaNNCModule").info(
                "Planning for this call as it is, because it cannot be traced in training mode: %s", exc
            )
            return graph
        finally:
            for module, training in modes:
                module.training = training

    def _trace(self, signature: Signature, call: Call, held: Parameters | None) -> ModelGraph:
        """Graph of a call, from the cache or newly traced; a cached one is verified if `verify_partitioning` is set."""
        config = self._context.config
        with self._whole_model(held) as empty, traced_with(self._context.model, signature.mode):
            graph, cached = self._tracer.graph(signature, call, self._state(), empty, held)
            if cached and config.verify_partitioning and held is None:
                wrong = self._verified(graph, call)
                if wrong:
                    self._tracer.distrust(wrong)
                    graph, _ = self._tracer.graph(signature, call, self._state(), empty, held)
        if not config.partitioning_dry_run_np:
            self._values.check_leaves(graph.traced.leaf_paths)
        if self._world.rank == 0 and held is None:
            log.get("RaNNCModule").log(log.DETAIL, "Converting torch model to IR ...")
        return graph

    def _verified(self, graph: ModelGraph, call: Call) -> str:
        """Compare a graph with the model on each rank; returns the first error of any rank, '' if there is none."""
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
                "verify_partitioning: skipped, because no rank has the whole model (meta device)"
            )

    def _whole_model(self, held: Parameters | None) -> AbstractContextManager[Sequence[torch.Tensor] | None]:
        """Context manager in which the model's tensors can be traced although this rank holds only a part of them.

        Yields the tensors without values on this rank; None if no rank has values (meta device).
        """
        if held is not None:
            return held.hollow()
        return self._values.readable(planned_only=bool(self._context.config.partitioning_dry_run_np))
