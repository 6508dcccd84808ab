"""`verify_partitioning`: compares the outputs of the unpartitioned graph with those of the user's model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rannd import log
from rannd.errors import TraceError
from rannd.graph.comparison import NotComparable, NotRepeatable, compare
from rannd.graph.model import ModelGraph


def verify(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> None:
    """TraceError if the graph's outputs differ from the model's on this rank's first mini-batch.

    Side effects of running the model (on buffers, attributes, random number generators) are undone.
    """
    if graph.signature.rows(tensors) == 0 or graph.signature.mode.dropout is not None:
        return  # no rows to compare, or enable_dropout, which the user's model does not follow
    try:
        with torch.no_grad():
            difference = compare(model, graph, tensors, gradients=False)
    except NotRepeatable as exc:
        raise TraceError(
            f"verify_partitioning: {exc}: its results depend on state outside its modules (a global variable, a file, "
            "the time), which a graph cannot contain; pass it as a tensor argument"
        ) from exc
    except NotComparable as exc:
        log.get("RaNNCModule").warning("verify_partitioning: skipped: %s", exc)
        return
    if difference is not None:
        raise TraceError(
            f"verify_partitioning: {difference}: the graph lacks something that the model's code does. Please report "
            "this model"
        )
    log.get("RaNNCModule").info("The traced graph gives the same outputs as the model.")
