"""Estimate the FLOPs of a node's forward pass from its shapes; a (m,k) x (k,n) matrix product counts 2mkn."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.sizes import is_known, shape_at
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import arguments, operator_name


def forward_flops(node: Node, rows: int) -> float:
    """FLOPs for a microbatch of `rows` rows; one per result element for operators without a formula."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    made = float(sum(prod(_shape(v, rows)) for v in values if isinstance(v, TensorValue)))
    if not isinstance(node.target, torch._ops.OpOverload):
        return made
    name = operator_name(node.target).removeprefix("aten::").split(".")[0]
    named = arguments(node)

    def shape(argument: Any) -> tuple[int, ...]:
        return _shape(argument.meta["val"], rows) if isinstance(argument, Node) else ()

    if operator_name(node.target) == LEAF:  # estimated like linear layers with all of its parameters
        held = sum(prod(shape(tensor)) for tensor in named["tensors"] if tensor.op == "get_attr")
        return made + 2.0 * rows * held
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
        return _einsum(named["equation"], [shape(tensor) for tensor in named["tensors"]])
    if name.endswith("_cell"):
        return 2.0 * prod(shape(named["input"])[:-1]) * (prod(shape(named["w_ih"])) + prod(shape(named["w_hh"])))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        weights = sum(prod(shape(weight)) for weight in named["params"])
        steps = prod(shape(named["input"])[:2]) if "input" in named else 1
        return 2.0 * steps * weights
    return made


def computing_type(node: Node) -> str:
    """Floating-point dtype of a node's result, or else of its first such input, e.g. 'float32'; '' if there is none."""
    for near in (node, *node.all_input_nodes):
        value = near.meta.get("val")
        for each in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(each, TensorValue) and (each.is_floating_point() or each.is_complex()):
                return str(each.dtype).removeprefix("torch.")
    return ""


def _einsum(equation: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """FLOPs of a single loop nest over all operands; ellipsis dimensions are matched from the right."""
    sizes: dict[str, int] = {}
    for word, sized in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=True):
        front, dots, back = word.partition("...")
        hidden = len(sized) - len(front) - len(back) if dots else 0
        letters = [*front, *(f".{place}" for place in range(hidden, 0, -1)), *back]
        for letter, size in zip(letters, sized, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return 2.0 * prod(sizes.values())


def _shape(value: TensorValue, rows: int) -> tuple[int, ...]:
    """Shape for `rows` rows; data-dependent sizes are taken to be `rows`, too."""
    if is_known(value):
        return shape_at(value, rows)
    return tuple(
        size if isinstance(size, int) else int(size.subs(dict.fromkeys(size.free_symbols, rows)))
        for size in value.shape
    )
