"""Build the graph of a small model, run it whole or in pieces, and compare with the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from rannd.graph.call.signature import Mode, Signature, classify, flatten_call
from rannd.graph.fx.sizes import number_at
from rannd.graph.model import ModelGraph, build
from rannd.graph.partition.cut import extract
from rannd.graph.rows.loss_weights import counted, pieces_weights

CPU = torch.device("cpu")
WIDTH = 6


class Small(nn.Module):
    """A model whose forward is a function of itself and the arguments, with a few parameters to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH))
        self.table = nn.Embedding(9, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.lstm_time_first = nn.LSTM(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def signature_of(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Signature, list[Tensor]]:
    """The signature of a call, and its tensors."""
    call = flatten_call(args, kwargs)
    return classify(call, Mode.current(model.training), [call.shapes()]), list(call.tensors)


def graph_of(model: nn.Module, *args: Any, **kwargs: Any) -> ModelGraph:
    """The graph of a call."""
    signature, tensors = signature_of(model, *args, **kwargs)
    return build(model, signature, tensors, CPU)


def state_of(graph: ModelGraph, model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a part may ask for, by name."""
    found: dict[str, Tensor] = dict(graph.traced.constants)
    for name, tensor in [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]:
        found[name] = tensor
    return found


def weights_of(graph: ModelGraph, tensors: Sequence[Tensor], rows: int, total: int) -> list[Tensor]:
    """Values of the weights of losses for a piece of `rows` of the `total` rows in `tensors`, on one rank."""
    counts = counted(graph.label_counts, tensors)
    return list(
        pieces_weights(graph.weights, world=1, rows=rows, rank_rows=total, total_rows=total, counts=counts, device=CPU)
    )


Outcome = tuple[list[Any], dict[str, Tensor]]
"""Leaves of the output, and the gradients by name."""


def _fresh(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _differentiate(outputs: Sequence[Any], model: nn.Module, leaves: Sequence[Tensor]) -> Outcome:
    """Gradients of a sum of all outputs, each element with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            factors = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
            total = total + (output * factors).sum()
    if total.requires_grad:
        total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {n}": leaf.grad for n, leaf in enumerate(leaves) if leaf.grad is not None}
    return [value.detach() if isinstance(value, Tensor) else value for value in outputs], gradients


def eager(graph: ModelGraph, model: nn.Module, tensors: Sequence[Tensor]) -> Outcome:
    """What the model itself does; its buffers are updated."""
    leaves = _fresh(model, tensors)
    args, kwargs = graph.signature.unflatten(leaves)
    found = pytree.tree_leaves(model(*args, **kwargs))
    outputs = [found[position] for position in graph.traced.outputs.positions]
    return _differentiate(outputs, model, leaves)


def in_pieces(graph: ModelGraph, model: nn.Module, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Outcome:
    """The whole graph, run for `sizes` rows at a time and joined as its results say."""
    leaves = _fresh(model, tensors)
    part = extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")
    state = state_of(graph, model)
    batch = [spec.batch for spec in graph.signature.tensors]
    found: list[dict[Any, Any]] = []
    first = 0
    for rows in sizes:
        piece = [leaf[first : first + rows] if b else leaf for leaf, b in zip(leaves, batch, strict=True)]
        given = [*piece, *weights_of(graph, tensors, rows, sum(sizes))]
        values = dict(zip(graph.traced.placeholders, given, strict=True))
        outputs = part.module(
            *(values[node] for node in part.inputs), *(state[name] for name in part.tensors), *part.numbers_at(rows)
        )
        found.append(dict(zip(part.outputs, outputs, strict=True)))
        first += rows
    joined: list[Any] = []
    for node, result in zip(graph.traced.results, graph.results, strict=True):
        if result.kind == "number":
            joined.append(number_at(node.meta["val"], sum(sizes)))
        elif result.kind == "rows":
            joined.append(torch.cat([each[node] for each in found], result.dim))
        elif result.kind == "first":
            joined.append(found[0][node])
        else:
            joined.append(sum(each[node] for each in found[1:]) + found[0][node])
    return _differentiate(joined, model, leaves)


def assert_same(found: Outcome, expected: Outcome, *, exact: bool = False, within: float = 1e-9) -> None:
    """Same outputs (`exact`: to the last bit) and the same gradients, to rounding (`within`: for doubles)."""
    near = {"rtol": within, "atol": within / 10, "equal_nan": True}
    tolerance = {"rtol": 0.0, "atol": 0.0, "equal_nan": True} if exact else near
    for place, (value, other) in enumerate(zip(found[0], expected[0], strict=True)):
        torch.testing.assert_close(value, other, **tolerance, msg=lambda m, p=place: f"output {p}: {m}")
    for name in sorted({*found[1], *expected[1]}):
        zero = torch.zeros(())
        value, other = torch.broadcast_tensors(found[1].get(name, zero), expected[1].get(name, zero))
        torch.testing.assert_close(
            value, other, **near, check_dtype=False, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )
