"""Compiled parts of a graph for the profiler, so that plans are made with the costs of what will run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rannd import log
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, crossing_shape
from rannd.profile.measure import ProfileInputs
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiler import Code, Uncompiled
from rannd.runtime.compiling.kept_code import KeptCode
from rannd.runtime.compiling.kinds import TensorLayout, kind_of
from rannd.runtime.compiling.sharing import compiled
from rannd.runtime.compiling.stage_units import why_eager


class MeasuredCode:
    """Compiles the parts that this rank measures; those that cannot be compiled are measured as they are.

    What a plan then runs is mostly of the same kinds, and is found in torch's cache.
    """

    def __init__(self, context: Context, graph: ModelGraph) -> None:
        self._ranks = context.world.local_size
        self._graph = graph
        self._inside = context.config.interleave_loss and graph.sole_loss is not None
        self._kept = KeptCode(context.world.device, context.config.cache)
        self._codes: dict[tuple[int, int], Code | None] = {}
        """By identity of the part, and rows."""
        self.toolchain = "compiled " + hashlib.sha256(self._kept.toolchain.encode()).hexdigest()[:8]
        """Addition to the hashes of parts."""

    def prepare(self, part: Part, rows: Sequence[int], sample: ProfileInputs) -> None:
        """Compile a part for several row counts; the part has to live as long as this object."""
        live = frozenset(self._graph.placement.requires_grad)
        if why_eager(self._graph, part, live, inside=self._inside):
            return
        for count in rows:
            values = [
                _contiguous(node.meta["val"].dtype, crossing_shape(node, count), node in sample.gradients)
                for node in part.inputs
            ]
            states = [sample.state[name] for name in part.tensors]
            tensors = [
                _contiguous(each.dtype, tuple(each.shape), each.requires_grad, isinstance(each, torch.nn.Parameter))
                for each in states
            ]
            kind = kind_of(part, count, live, [*values, *tensors], self._graph.signature.mode, grad=True)
            found = compiled(self._kept, kind, self._ranks)
            self._codes[id(part), count] = found if isinstance(found, Code) else None
            if not isinstance(found, Code):
                log.get("GraphProfiler").debug("Measured without compilation: %s", found)

    def __call__(self, part: Part, rows: int) -> Callable[..., Sequence[Any]]:
        """What runs a part."""
        code = self._codes.get((id(part), rows))
        if code is None:
            return part.module

        def run(*arguments: Any) -> Any:
            try:
                return code(*(each for each in arguments if isinstance(each, torch.Tensor)))
            except Uncompiled:
                return part.module(*arguments)

        return run


def _contiguous(
    dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, parameter: bool = False
) -> TensorLayout:
    return TensorLayout(dtype, shape, tuple(torch.empty(shape, device="meta").stride()), requires_grad, parameter)
