"""Floating-point operations of a node's forward pass, from its shapes. A product of (m,k) and (k,n) counts 2mkn."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Node

from rannd.graph.sizes import numel_at, shape_at
from rannd.graph.trace import arguments, operator_name


def forward_flops(node: Node, rows: int) -> float:
    """Operations for a piece of `rows` rows; one per element made where no formula knows better."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    made = float(sum(numel_at(v, rows) for v in values if isinstance(v, torch.Tensor)))
    if not isinstance(node.target, torch._ops.OpOverload):
        return made
    name = operator_name(node.target).removeprefix("aten::").split(".")[0]
    named = arguments(node)

    def shape(argument: Any) -> tuple[int, ...]:
        return shape_at(argument.meta["val"], rows) if isinstance(argument, Node) else ()

    if name == "linear":
        return 2.0 * made * shape(named["input"])[-1]
    if name in ("mm", "bmm", "matmul", "mv", "dot"):
        left = next(iter(named.values()))
        return 2.0 * made * (shape(left)[-1] if shape(left) else 1)
    if name in ("addmm", "baddbmm", "addmv"):
        left = list(named.values())[1]
        return 2.0 * made * shape(left)[-1]
    if name.startswith("conv"):
        weight = shape(named["weight"])
        if "transpose" in name or named.get("transposed"):
            return 2.0 * prod(shape(named["input"])) * prod(weight[1:])
        return 2.0 * made * prod(weight[1:])
    if name == "scaled_dot_product_attention":
        query, key = shape(named["query"]), shape(named["key"])
        return 4.0 * prod(query) * key[-2]
    if name == "einsum":
        letters = named["equation"].replace(" ", "").split("->")[0].split(",")
        sizes = {
            letter: size
            for word, tensor in zip(letters, named["tensors"], strict=True)
            for letter, size in zip(word, shape(tensor), strict=False)
        }
        return 2.0 * prod(sizes.values())
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        weights = sum(prod(shape(weight)) for weight in named["params"])
        steps = prod(shape(named["input"])[:2]) if "input" in named else 1
        return 2.0 * steps * weights
    return made
