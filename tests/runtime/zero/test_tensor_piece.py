"""Gradients of which a rank has a piece: what treats each element by itself works, all else is an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.zero.division import Piece
from rannd.runtime.zero.tensor_piece import TensorPiece, flat_part

PIECE = Piece(3, 9)


def pair() -> tuple[torch.Tensor, TensorPiece]:
    """A gradient, and a piece of it."""
    whole = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return whole, TensorPiece(whole.reshape(-1)[PIECE.start : PIECE.stop].clone(), PIECE, whole.shape)


def same(sharded: torch.Tensor, whole: torch.Tensor) -> bool:
    return torch.equal(flat_part(sharded), whole.reshape(-1)[PIECE.start : PIECE.stop])


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul_": lambda g: g.mul_(0.5),
    "div_ by a number of a tensor": lambda g: g.div_(torch.tensor(3.0, dtype=torch.float64)),
    "mul by a tensor of one element": lambda g: g * torch.full((1,), 3.0, dtype=torch.float64),
    "add_ of a tensor": lambda g: g.add_(torch.arange(12.0, dtype=torch.float64).view(4, 3), alpha=0.1),
    "add to a tensor": lambda g: torch.arange(12.0, dtype=torch.float64).view(4, 3) + g,
    "clamp_": lambda g: g.clamp_(-0.5, 0.5),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "zero_": lambda g: g.zero_(),
    "copy_": lambda g: g.copy_(torch.ones(4, 3)),
    "data": lambda g: g.data.mul_(2.0),
    "detach": lambda g: g.detach().neg(),
    "zeros_like": torch.zeros_like,
    "float": lambda g: g.float(),
    "isfinite": lambda g: g.isfinite(),
    "clone": lambda g: copy.deepcopy(g).mul_(2.0),
    "where": lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
    "foreach": lambda g: torch._foreach_mul([g, torch.ones(2)], 3.0)[0],
    "foreach of pairs": lambda g: torch._foreach_add([torch.ones(2), g], [torch.ones(2), torch.ones_like(g)])[1],
}


def test_data_can_be_set() -> None:
    whole, sharded = pair()
    sharded.data = sharded.data * 2
    assert same(sharded, whole * 2)
    sharded.data = whole
    assert same(sharded, whole)
    for other in (torch.ones(3, 4, dtype=torch.float64), torch.ones(4, 3)):
        with pytest.raises(UsageError, match="same shape and dtype"):
            sharded.data = other


def test_new_tensors_are_whole() -> None:
    found = pair()[1].new_full((2,), 3.0)
    assert type(found) is torch.Tensor
    assert found.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    whole, sharded = pair()
    expected, found = ELEMENTWISE[name](whole), ELEMENTWISE[name](sharded)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert same(found, expected)
    assert same(sharded, whole)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "norm": lambda g: g.norm(),
    "sum": lambda g: g.sum(),
    "all": lambda g: g.isfinite().all(),
    "view": lambda g: g.view(-1),
    "index": lambda g: g[0],
    "matmul": lambda g: g @ torch.ones(3, 3, dtype=torch.float64),
    "into a whole tensor": lambda g: torch.zeros(4, 3, dtype=torch.float64).add_(g),
    "out=": lambda g: torch.mul(g, 2.0, out=torch.zeros(4, 3, dtype=torch.float64)),
    "randn_like": torch.randn_like,
    "broadcast": lambda g: g.mul_(torch.ones(3, dtype=torch.float64)),
    "pickle": pickle.dumps,
}


INTO: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add_": lambda whole, g: whole.add_(g),
    "copy_": lambda whole, g: whole.copy_(g),
    "foreach": lambda whole, g: torch._foreach_add_([whole], [g]),
    "foreach of several": lambda whole, g: torch._foreach_mul_([g, whole], [torch.ones_like(g), g]),
}


@pytest.mark.parametrize("name", INTO)
def test_a_whole_tensor_takes_nothing_of_a_piece(name: str) -> None:
    whole, (_, sharded) = torch.ones(4, 3, dtype=torch.float64), pair()
    before = sharded.flat.clone()
    with pytest.raises(UsageError, match=r"ZeRO stages 2 and 3"):
        INTO[name](whole, sharded)
    assert torch.equal(whole, torch.ones(4, 3, dtype=torch.float64))
    assert torch.equal(sharded.flat, before)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"ZeRO stages 2 and 3"):
        REFUSED[name](pair()[1])


def test_it_is_a_gradient_that_optimizers_tools_take() -> None:
    whole, sharded = pair()
    plain, parameter = (nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))
    plain.grad, parameter.grad = whole, sharded
    assert parameter.grad is sharded
    for each in (plain, parameter):
        nn.utils.clip_grad_value_([each], 0.3)
    assert same(parameter.grad, plain.grad)
    scale, found = torch.tensor(0.25), torch.zeros(1)
    for each in (plain, parameter):
        torch._amp_foreach_non_finite_check_and_unscale_([each.grad], found, scale)
    assert same(parameter.grad, plain.grad)
    assert not found
    flat_part(parameter.grad)[2] = float("inf")
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, scale)
    assert found
    optimizer = torch.optim.SGD([parameter])
    optimizer.zero_grad(set_to_none=False)
    assert not flat_part(parameter.grad).any()


def test_pieces_of_different_ranges_do_not_mix() -> None:
    _, sharded = pair()
    other = TensorPiece(torch.ones(6, dtype=torch.float64), Piece(0, 6), (4, 3))
    with pytest.raises(UsageError, match="not pieces of tensors of one shape"):
        sharded.add_(other)
