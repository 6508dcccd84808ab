"""What the planner is told of a model against what really happens: bytes, gradients, operations."""

from __future__ import annotations

import pytest
import torch
from interpreted import truths
from pieces import Small, graph_of, signature_of
from torch import Tensor
from zoo import ZOO

from rannd.graph.fx.flops import forward_flops

ROWS = (1, 3, 4)
TRUE_FLOPS = 0.02
"""Largest relative difference from torch's own count."""

SHOWN = ("gpt2", "mixtral", "t5", "swin", "resnet", "clip", "mamba", "lstm", "u-net", "siamese", "BatchNorm", "rwkv",
         "codebook")  # fmt: skip
LATER = ("llama", "bert", "bart", "vit", "whisper", "nn.Transformer")
LONG = ("rwkv", "t5", "swin", "resnet", "clip", "mixtral", "mamba", "lstm", "siamese")


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.full,) if name in LATER else (pytest.mark.long,) if name in LONG else ()


MORE_THAN_TRUE = {"rwkv": {"aten::select.int"}, "codebook": {"_operator.getitem"}}
"""Operators whose results are said to have a gradient, and have none: views of a tensor that is written into later,
before that; one of several results of an operator that has none. To take a gradient for possible costs a few bytes; to
miss one would lose it."""


@pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, marks=marks_of(entry.name)) for entry in ZOO if entry.name in SHOWN + LATER],
    ids=str,
)
def test_bytes_gradients_and_flops_are_true(entry: object) -> None:
    with entry.precision():
        torch.manual_seed(0)
        model = entry.build()
        graph = graph_of(model, **entry.batch(4))
        task = graph.task
        more: set[str] = set()
        counted = 0
        for rows in ROWS:
            _, tensors = signature_of(model, **entry.batch(rows))
            seen = truths(graph, tensors)
            for value in task.values:
                if value.name not in seen:
                    continue
                true = seen[value.name]
                op = task.ops[value.producer] if value.producer >= 0 else None
                assert value.bytes.at(rows) == true.bytes, (value, op)
                assert value.requires_grad or not true.requires_grad, (value, op)
                if value.requires_grad and not true.requires_grad:
                    more.add(op.target if op is not None else "argument")
                if op is not None and true.flops:
                    counted += 1
                    assert op.flops.at(rows) == pytest.approx(true.flops, rel=TRUE_FLOPS), op
    assert counted > 0
    assert more == MORE_THAN_TRUE.get(entry.name, set())


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(4, 6), (6, 5)]),
        ("...qd,...kd->...qk", [(4, 2, 3, 6), (1, 2, 5, 6)]),
        ("...qd,kd->...qk", [(4, 2, 3, 6), (5, 6)]),
        ("b...d, d e -> b ... e", [(4, 2, 3, 6), (6, 5)]),
    ],
)
def test_flops_of_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    first, *rest = (torch.randn(shape) for shape in shapes)

    def function(model: Small, x: Tensor) -> Tensor:
        return torch.einsum(equation, x, *rest)

    graph = graph_of(Small(function), first)
    node = next(node for node in graph.traced.graph.nodes if "einsum" in str(node.target))
    for rows in ROWS:
        x = torch.randn(rows, *first.shape[1:])
        (true,) = (each.flops for each in truths(graph, [x]).values() if each.flops)
        assert forward_flops(node, rows) == true
