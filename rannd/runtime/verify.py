"""Compare the traced graph with the user's own model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import nn

from rannd import log
from rannd.errors import TraceError
from rannd.graph.cut import extract
from rannd.graph.losses import counted, pieces_weights
from rannd.graph.model import ModelGraph
from rannd.graph.opaque import preserved

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference; half precision gets 5 %."""


def verify(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> None:
    """TraceError where the graph's outputs differ from the model's on this rank's first mini-batch.

    What running the model changes (buffers, attributes, random number generators) is left as it was.
    """
    rows = graph.signature.rows(tensors)
    if rows == 0 or graph.signature.mode.dropout is not None:  # the model itself knows nothing of that
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    tensors = [tensor.detach().to(device) for tensor in tensors]
    part = extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.traced.constants}
    counts = counted(graph.label_counts, tensors)
    weights = pieces_weights(graph.weights, world=1, rows=rows, rank_rows=rows, total_rows=rows, counts=counts)
    given = [*tensors, *(torch.tensor(weight, dtype=torch.float64, device=device) for weight in weights)]
    values = dict(zip(graph.traced.placeholders, given, strict=True))
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        seed = torch.initial_seed()
        torch.manual_seed(seed)
        args, kwargs = graph.signature.unflatten(tensors)
        with preserved(model):
            leaves = pytree.tree_leaves(model(*args, **kwargs))
        torch.manual_seed(seed)
        with preserved(model):
            found = part.module(
                *(values[node] for node in part.inputs), *(state[name] for name in part.tensors), *part.numbers_at(rows)
            )
    computed = dict(zip(part.outputs, found, strict=True))
    for node, position in zip(graph.traced.results, graph.traced.outputs.positions, strict=True):
        if node not in computed:
            continue
        expected, value = leaves[position], computed[node]
        scale = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
        difference = float((expected.double() - value.double()).abs().max()) / scale if expected.numel() else 0.0
        if not difference <= TOLERANCE.get(expected.dtype, 0.05):
            raise TraceError(
                f"verify_partitioning: output {position} of the traced graph differs from the model's by "
                f"{difference:.3g} (relative): the model's code does something that its graph does not "
                "show. Please report this model"
            )
    log.get("RaNNCModule").info("The traced graph gives the same outputs as the model.")
