"""Buffers of whole parameters come and go under what autograd has saved; one replica, which owns everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rannd.runtime.parameters.absent import is_absent, part_of
from rannd.runtime.zero.division import divide
from rannd.runtime.zero.replica_exchange import ReplicaExchange
from rannd.runtime.zero.sharded_parameters import ShardedParameters
from rannd.runtime.zero.tensor_piece import TensorPiece


def made() -> tuple[nn.Linear, Any, ShardedParameters]:
    """A layer, the parameters of a deployment, and their pieces."""
    torch.manual_seed(2)
    layer = nn.Linear(3, 4).double()
    tensors = dict(layer.named_parameters())
    dtypes = SimpleNamespace(accumulated=torch.float64)
    parameters: Any = SimpleNamespace(
        tensors=tensors, aliases={}, sharded=frozenset(), gradient_dtypes=lambda name: dtypes
    )
    world: Any = SimpleNamespace(
        rank=0,
        rank_of_slot=(0,),
        group_of=lambda _: None,
        transport=SimpleNamespace(backend="gloo"),
        device=torch.device("cpu"),
    )
    kinds = [(name, p.numel(), 8, name) for name, p in tensors.items()]
    return layer, parameters, ShardedParameters(parameters, divide(kinds, 1), ReplicaExchange(world, [0]))


def test_whole_parameters_come_and_go_under_a_graph() -> None:
    layer, parameters, sharded = made()
    weight, bias = (parameters.aliases[name] for name in ("weight", "bias"))
    storage = weight.untyped_storage()
    assert storage.nbytes() == 0
    assert sharded.readers([["weight"], ["bias", "other"], []]) == [[0], [1], []]
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    sharded.enter([0, 1])
    output = nn.functional.linear(x, weight, bias).tanh().sum()
    wanted = torch.autograd.grad(output, [x, weight, bias], retain_graph=True)
    sharded.leave()
    assert storage.nbytes() == 0
    sharded.enter([1], [0])
    sharded.enter([0])
    assert parameters.aliases["bias"].untyped_storage().nbytes() == 0
    sharded.enter([0, 1])
    found = torch.autograd.grad(output, [x, weight, bias])
    assert all(map(torch.equal, found, wanted))
    sharded.restore()
    torch.manual_seed(2)
    assert torch.equal(layer.weight, nn.Linear(3, 4).double().weight)
    assert not is_absent(layer.weight)
    assert type(layer.weight) is nn.Parameter


def test_a_change_of_values_ends_earlier_graphs() -> None:
    layer, parameters, sharded = made()
    sharded.enter([0, 1])
    x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    output = nn.functional.linear(x, parameters.aliases["weight"], parameters.aliases["bias"]).sum()
    with torch.no_grad():
        layer.weight.mul_(2.0)
    sharded.changed()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_the_users_parameter_stands_for_its_piece() -> None:
    layer, _, sharded = made()
    sharded_weight, part = layer.weight, part_of(layer.weight)
    assert isinstance(part, TensorPiece)
    assert isinstance(sharded_weight, nn.Parameter)
    assert sharded_weight.requires_grad
    sharded_weight.grad = TensorPiece(torch.ones(12, dtype=torch.float64), part.piece, part.shape)
    with torch.no_grad():
        sharded_weight.add_(sharded_weight.grad, alpha=-0.5)
        sharded_weight.data.mul_(3.0)
        sharded_weight.data = torch.full((4, 3), 7.0, dtype=torch.float64)
        average = torch.zeros_like(sharded_weight).lerp_(sharded_weight, 0.5)
    assert torch.equal(average.flat, torch.full((12,), 3.5, dtype=torch.float64))  # type: ignore[attr-defined]
    sharded.restore()
    assert torch.equal(layer.weight, torch.full((4, 3), 7.0, dtype=torch.float64))
    assert isinstance(layer.weight.grad, TensorPiece)
