"""Every new trace is compared with the model once, on rank 0; what is not right runs as one operator."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

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
from rannd.runtime.comm.device import amount
from rannd.runtime.planning.memory_fit import room

SLACK = 1.5
"""A comparison may need so many times the memory that is counted for it."""


class Verdict(msgspec.Struct, frozen=True):
    """What rank 0 found out about a graph."""

    checked: str | None
    """'' where it is right; why it could not be compared; None where it is wrong."""
    opaque: tuple[str, ...] = ()
    """The modules to make leaves of, all of them, where it is wrong."""
    line: str = ""
    """What is wrong, and where."""


class TraceChecker:
    """Compares the graphs of one model with it."""

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
    ) -> Verdict:
        """Whether a graph is right; the same on all ranks. Collective.

        Args:
            tensors: Those of rank 0's mini-batch, as the graph's signature has them.
            empty: Parameters and buffers whose memory holds nothing, because other ranks have them; they get random
                values for a while. None: no rank has values.
            opaque: Modules that a comparison made leaves of before.
            retraced: Traces the model anew with the modules at the given paths as leaves, on this rank alone. None: it
                is of no interest which module is wrong.

        TraceError where the model is wrong even as a single operator.
        """
        found = b""
        if self._world.rank == 0:
            found = msgspec.msgpack.encode(self._found(graph, tensors, empty, opaque, retraced))
        verdict = msgspec.msgpack.decode(self._world.broadcast_bytes(found), type=Verdict)
        if verdict.checked is None and "" in opaque:
            raise TraceError(
                f"the model runs as one operator, and {verdict.line} all the same; please report this model"
            )
        return verdict

    def _found(
        self,
        graph: ModelGraph,
        tensors: Sequence[torch.Tensor],
        empty: Sequence[torch.Tensor] | None,
        opaque: Sequence[str],
        retraced: Callable[[Sequence[str]], ModelGraph] | None,
    ) -> Verdict:
        if empty is None:
            return Verdict("no rank has the values of the whole model (meta device)")
        reason = self._impossible(graph, tensors, empty)
        if reason:
            return Verdict(reason)
        begun = time.monotonic()
        try:
            with _given_values(empty), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model's own code has warned before
                difference = self._difference(graph, tensors)
                if difference is None:
                    log.get("RaNNCModule").info(
                        "The trace computes what the model computes. (compared in %.2f s)", time.monotonic() - begun
                    )
                    return Verdict("")
                if "" in opaque or retraced is None:
                    return Verdict(None, line=str(difference))
                return self._wrong(difference, tensors, opaque, retraced)
        except NotComparable as exc:
            return Verdict(str(exc))
        except Exception as exc:  # a comparison that fails must not end a job that would train
            return Verdict(f"{type(exc).__name__}: {exc}")

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
        with _on(self._world.device, self._context.model):
            return compare_few(self._context.model, graph, [tensor.to(self._world.device) for tensor in tensors])

    def _impossible(self, graph: ModelGraph, tensors: Sequence[torch.Tensor], empty: Sequence[torch.Tensor]) -> str:
        """Why a comparison cannot be, '' where nothing speaks against it."""
        state = [*self._context.model.parameters(), *self._context.model.buffers()]
        rows = graph.signature.rows(tensors)
        if rows == 0:
            return "rank 0's mini-batch has no rows"
        if any(tensor.is_meta for tensor in (*state, *tensors)):
            return "the model, or its mini-batch, is on the meta device"
        if graph.signature.mode.dropout is not None:
            return "the model itself knows nothing of enable_dropout"
        rows = graph.signature.rows(rows_to_compare(graph, tensors)) if graph.traced.decisions is None else rows
        trained = sum(tensor.numel() * tensor.element_size() for tensor in state if tensor.requires_grad)
        values = sum(value.bytes.at(rows) for value in graph.task.values)
        moved = 0 if self._world.device.type == "cpu" else sum(t.numel() * t.element_size() for t in state)
        need = int(SLACK * (2 * trained + values) + sum(t.numel() * t.element_size() for t in empty) + moved)
        held = sum(t.untyped_storage().nbytes() for t in state if t.device.type == self._world.device.type)
        free = room(self._world, self._context.model) - held
        if need > free:
            return f"rank 0 would need {amount(need)} for it, and {amount(max(free, 0))} is free"
        return ""


@contextlib.contextmanager
def _given_values(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Fill tensors whose memory holds nothing with values that a model could have; whether a graph is right does not
    depend on which."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.detach()
            if isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
                data.copy_(torch.randn(tensor.shape, generator=generator) / math.sqrt(max(tensor[0].numel(), 1)))
            else:  # scales and variances are positive
                data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    yield


@contextlib.contextmanager
def _on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """The model on the device that its graphs are for."""
    moved = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if t.device != device]
    try:
        for tensor, data in moved:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data
