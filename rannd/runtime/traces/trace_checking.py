"""Compares each new trace with the model on rank 0; modules that are traced wrongly become single operators."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from rannd import log
from rannd.errors import RanndError, TraceError
from rannd.graph.comparison import Mismatch, NotComparable, compare_few, rows_to_compare
from rannd.graph.model import ModelGraph
from rannd.graph.modules.bisection import first_wrong, outermost, twins
from rannd.graph.modules.source_location import described
from rannd.runtime.comm.context import Context
from rannd.runtime.planning.memory_fit import room
from rannd.units import amount

SLACK = 1.5
"""Safety factor on the estimated memory of a comparison."""


class Verdict(msgspec.Struct, frozen=True):
    """Result of comparing a graph with the model on rank 0."""

    checked: str | None
    """'': the graph is correct; other text: why it could not be compared; None: it is wrong."""
    opaque: tuple[str, ...] = ()
    """If the graph is wrong, paths of all modules that have to become leaves."""
    line: str = ""
    """Description of the error and the module that causes it."""
    reads: tuple[str, ...] = ()
    """Arguments that were taken for unread, with whose values alone the graph is wrong."""


class TraceChecker:
    """Compares graphs of one model with the model."""

    def __init__(self, context: Context) -> None:
        self._world = context.world
        self._context = context

    def verdict(
        self,
        graph: ModelGraph,
        tensors: Sequence[torch.Tensor],
        empty: Sequence[torch.Tensor] | None,
        opaque: Sequence[str],
        retraced: Callable[[Sequence[str]], ModelGraph] | None,
        unread: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Compare a graph with the model; returns the same verdict on all ranks. Collective.

        Args:
            graph: The graph.
            tensors: Tensors of rank 0's mini-batch, in the order of the graph's signature.
            empty: Parameters and buffers without values on this rank, because other ranks hold them; they are filled
                with random values. None: no rank has values.
            opaque: Modules that earlier comparisons have made leaves.
            retraced: Traces the model again with the modules at the given paths as leaves, on this rank only. None: do
                not search for the module that is wrong.
            unread: Values of the arguments that were taken for unread, by their names; None: not to be compared.

        Raises:
            TraceError: The results differ even if the whole model is a single operator.
        """
        found = b""
        if self._world.rank == 0:
            found = msgspec.msgpack.encode(self._found(graph, tensors, empty, opaque, retraced, unread or {}))
        verdict = msgspec.msgpack.decode(self._world.broadcast_bytes(found), type=Verdict)
        if verdict.checked is None and "" in opaque and not verdict.reads:
            raise TraceError(
                f"{verdict.line}, even though the whole model runs as one operator; please report this model"
            )
        return verdict

    def _found(
        self,
        graph: ModelGraph,
        tensors: Sequence[torch.Tensor],
        empty: Sequence[torch.Tensor] | None,
        opaque: Sequence[str],
        retraced: Callable[[Sequence[str]], ModelGraph] | None,
        unread: Mapping[str, Any],
    ) -> Verdict:
        if empty is None:
            return Verdict("no rank has the values of the whole model (meta device)")
        reason = self._why_not_comparable(graph, tensors, empty)
        if reason:
            return Verdict(reason)
        begun = time.monotonic()
        try:
            phase = log.long_phase("RaNNCModule", "Comparing the trace with the model", shown=self._world.rank == 0)
            with phase, _filled_with_values(empty), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model's code has already issued its warnings during tracing
                difference = self._difference(graph, tensors)
                if difference is None and (line := self._with_values(graph, tensors, unread)):
                    names = [name for name in unread if self._with_values(graph, tensors, {name: unread[name]})]
                    return Verdict(None, line=line, reads=tuple(names or unread))
                if difference is None:
                    log.get("RaNNCModule").debug(
                        "The trace gives the same results as the model. (compared in %.2f s)", time.monotonic() - begun
                    )
                    return Verdict("")
                if "" in opaque or retraced is None:
                    return Verdict(None, line=str(difference))
                return self._wrong(difference, tensors, opaque, retraced)
        except NotComparable as exc:
            return Verdict(str(exc))
        except Exception as exc:  # a comparison that fails must not end a job that would train
            return Verdict(f"{type(exc).__name__}: {exc}")

    def _with_values(self, graph: ModelGraph, tensors: Sequence[torch.Tensor], unread: Mapping[str, Any]) -> str:
        """How the model differs from its graph if it gets these values of unread arguments; '' if it does not.

        Their stand-ins have the right class for ``isinstance``, but not for ``type(x)``, which nothing can note.
        """
        if not unread:
            return ""
        try:
            compared = {name: value for name, value in unread.items() if name not in graph.traced.outputs.passed_on}
            values = dataclasses.replace(graph, signature=graph.signature.with_values(compared))
            return str(self._difference(values, tensors) or "")
        except NotComparable as exc:
            return str(exc)

    def _wrong(
        self,
        difference: Mismatch,
        tensors: Sequence[torch.Tensor],
        opaque: Sequence[str],
        retraced: Callable[[Sequence[str]], ModelGraph],
    ) -> Verdict:
        log.get("RaNNCModule").warning("The traced graph is wrong (%s), looking for the module ...", difference)

        def right(paths: Sequence[str]) -> bool:
            try:
                return self._difference(retraced(paths), tensors) is None
            except (RanndError, NotComparable):
                return False

        name = first_wrong(self._context.model, list(opaque), right)
        paths = tuple(outermost([*opaque, *twins(self._context.model, name, opaque)]))
        return Verdict(None, paths, f"{difference}: {described(self._context.model, name)}")

    def _difference(self, graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> Mismatch | None:
        return compare_few(self._context.model, graph, tensors)

    def _why_not_comparable(
        self, graph: ModelGraph, tensors: Sequence[torch.Tensor], empty: Sequence[torch.Tensor]
    ) -> str:
        """Why the graph cannot be compared with the model; '' if it can."""
        state = [*self._context.model.parameters(), *self._context.model.buffers()]
        rows = graph.signature.rows(tensors)
        if rows == 0:
            return "rank 0's mini-batch has no rows"
        if any(tensor.is_meta for tensor in (*state, *tensors)):
            return "the model or the mini-batch is on the meta device"
        if graph.signature.mode.dropout is not None:
            return "enable_dropout is set, which the user's model does not follow"
        rows = graph.signature.rows(rows_to_compare(graph, tensors)) if graph.traced.decisions is None else rows
        trained = sum(tensor.numel() * tensor.element_size() for tensor in state if tensor.requires_grad)
        values = sum(value.bytes.at(rows) for value in graph.task.values)
        moved = 0 if self._world.device.type == "cpu" else sum(t.numel() * t.element_size() for t in state)
        need = int(SLACK * (2 * trained + values) + sum(t.numel() * t.element_size() for t in empty) + moved)
        held = sum(t.untyped_storage().nbytes() for t in state if t.device.type == self._world.device.type)
        free = room(self._world, self._context.model) - held
        if need > free:
            return f"rank 0 would need {amount(need)}, but only {amount(max(free, 0))} is free"
        return ""


@contextlib.contextmanager
def _filled_with_values(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Fill tensors without values with plausible random ones; the result of a comparison does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.detach()
            if isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
                data.copy_(torch.randn(tensor.shape, generator=generator) / math.sqrt(max(tensor[0].numel(), 1)))
            else:  # scales and variances are positive
                data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    yield
