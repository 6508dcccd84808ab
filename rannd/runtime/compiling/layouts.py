"""How the arguments of a stage's units lie in memory, found out without computing anything.

Strides of a value depend on what comes before it. The units are run on fake tensors, whose strides are those of a real
run; torch.compile keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from rannd import log
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.runtime.compiling.kinds import TensorLayout
from rannd.runtime.compiling.stage_units import Unit


def layouts_of(
    graph: ModelGraph,
    units: Sequence[Unit],
    tensors: Mapping[str, torch.Tensor],
    rows: int,
    differentiable: Set[Node],
    live: Set[Node],
    device: torch.device,
    *,
    grad: bool,
) -> list[tuple[TensorLayout, ...]]:
    """Layouts of the arguments of each unit, values first, in a piece of `rows` rows.

    `tensors`: parameters, buffers and constants by name. `differentiable`: values of other stages that require a
    gradient. `live`: nodes that may get one; compiled units detach all others.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
    values: dict[Node, torch.Tensor] = {}

    def value(node: Node) -> torch.Tensor:
        if node not in values:
            traced = node.meta["val"]
            made = torch.empty(crossing_shape(node, rows), dtype=traced.dtype, device=device)
            values[node] = made.requires_grad_() if grad and node in differentiable else made
        return values[node]

    found = []
    with mode, graph.signature.mode.autocasting():
        for unit in units:
            part = unit.part
            inputs = [value(node) for node in part.inputs]
            arguments = [*inputs, *(state[name] for name in part.tensors)]
            found.append(tuple(map(TensorLayout.of, arguments)))
            try:
                with torch.set_grad_enabled(grad):
                    outputs = part.module(*arguments, *part.numbers_at(rows))
            except Exception as exc:  # a kernel without a fake one: `value` assumes contiguous memory then
                log.get("RaNNCModule").debug("Layouts behind a block are not known: %s", exc)
                continue
            for node, made in zip(part.outputs, outputs, strict=True):
                if isinstance(made, torch.Tensor):
                    values[node] = made if unit.eager or node in live else made.detach()
    return found
