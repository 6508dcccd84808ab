"""Compare the graph of the first mini-batch, whole, with the user's own model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rannd import log
from rannd.errors import TraceError
from rannd.graph.comparison import NotComparable, NotRepeatable, compare
from rannd.graph.model import ModelGraph


def verify(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> None:
    """TraceError where the graph's outputs differ from the model's on this rank's first mini-batch.

    What running the model changes (buffers, attributes, random number generators) is left as it was.
    """
    if graph.signature.rows(tensors) == 0 or graph.signature.mode.dropout is not None:
        return  # the model itself knows nothing of that
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            difference = compare(model, graph, [tensor.detach().to(device) for tensor in tensors], gradients=False)
    except NotRepeatable as exc:
        raise TraceError(
            f"verify_partitioning: {exc}: it differs from one call to the next by what its modules do not hold (a "
            "global variable, a file, the time), which no graph can show"
        ) from exc
    except NotComparable as exc:
        log.get("RaNNCModule").warning("verify_partitioning: not done: %s", exc)
        return
    if difference is not None:
        raise TraceError(
            f"verify_partitioning: {difference}: the model's code does something that its graph does not show. Please "
            "report this model"
        )
    log.get("RaNNCModule").info("The traced graph gives the same outputs as the model.")
