"""Parts of a graph run on values that lie otherwise in memory than those that were traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pieces import graph_of, signature_of
from stages import parts_of, run_eager, run_stages
from torch import Tensor, nn

from rannd.graph.fx.traced import operator_name
from rannd.graph.model import ModelGraph


class Attention(nn.Module):
    """As nn.MultiheadAttention has it until torch 2.12: the result of attention lies as the query does."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 48)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.transpose(0, 1).contiguous().view(5, -1, 8).transpose(0, 1) for part in self.layer(x).split(16, 2)
        ]
        found = F.scaled_dot_product_attention(*(part.view(-1, 2, 5, 8) for part in heads))
        return self.last(found.permute(2, 0, 1, 3)).view(5, -1, 16).sum(0)


def plain(found: Tensor) -> Tensor:
    return found.contiguous().view(-1, 16).view_as(torch.empty(found.numel() // 4, 4)).cos()


def region(found: Tensor) -> Tensor:
    with torch.no_grad():
        positive = found.contiguous().view(-1, 16).cos() > 0
    return found.reshape(-1, 16) * positive


def cut_at(graph: ModelGraph, place: int) -> list[list[str]]:
    """Operators of both parts of a graph that is cut there."""
    stage = {node: int(number >= place) for number, node in enumerate(graph.placement.placed)}
    return [[operator_name(node.target) for node in part.module.graph.nodes] for part in parts_of(graph, stage)]


@pytest.mark.parametrize("last", [plain, region])
def test_a_part_views_what_lies_otherwise(last: Callable[[Tensor], Tensor]) -> None:
    model, x = Attention(last).double(), torch.randn(4, 5, 16).double()
    graph = graph_of(model, x)
    assert graph.traced.leaf_paths == ()
    _, tensors = signature_of(model, x)
    placed = graph.placement.placed
    attention = next(number for number, node in enumerate(placed) if "scaled_dot" in node.name)
    for place in range(attention, len(placed)):
        stage = {node: int(number >= place) for number, node in enumerate(placed)}
        if all(stage[node] == stage[other] for node in placed for other in placed
               if graph.placement.group[node] == graph.placement.group[other]):  # fmt: skip
            found = run_stages(graph, model, parts_of(graph, stage), tensors)
            torch.testing.assert_close(found, run_eager(graph, model, tensors))
    assert not {"aten::view", "aten::view_as"} & {name for names in cut_at(graph, attention) for name in names}


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        flat = y.view(-1)
        with torch.no_grad():
            again = y.view(-1).cos()
        y.mul_(2)
        return (flat.square() + again).view(-1, 6)


def test_views_of_what_is_written_into_stay() -> None:
    model, x = Written().double(), torch.randn(4, 6).double()
    graph = graph_of(model, x)
    _, tensors = signature_of(model, x)
    stage = dict.fromkeys(graph.placement.placed, 0)
    parts = parts_of(graph, stage)
    torch.testing.assert_close(run_stages(graph, model, parts, tensors), run_eager(graph, model, tensors))
    names = [operator_name(node.target) for node in parts[0].module.graph.nodes]
    assert "aten::view" in names  # `flat`; a look at its node in the autograd graph may have traced it a second time
    assert names.count("aten::reshape") == 1


@torch.library.custom_op("rannd_test_views::rows_of_memory", mutates_args=())
def rows_of_memory(a: Tensor) -> Tensor:
    """Reads memory from its first element on, row by row, as a kernel of one's own does."""
    return a.as_strided(a.shape, torch.empty(a.shape, device="meta").stride()) * 2


@rows_of_memory.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty(a.shape, dtype=a.dtype)


rows_of_memory.register_autograd(lambda ctx, gradient: gradient * 2)


def strided(a: Tensor) -> Tensor:
    return a.as_strided(a.shape, a.stride()) * 2


class Unseen(nn.Module):
    """Runs as one operator, for the sake of its branch."""

    def forward(self, a: Tensor) -> Tensor:
        positive = int((a > 0).sum()) > 3
        return rows_of_memory(a) if positive or len(a) else a  # type: ignore[no-any-return]


class Kernel(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *, asks: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 5), nn.Linear(5, 5)
        self.function, self.asks = function, asks

    def forward(self, x: Tensor) -> Tensor:
        if not self.asks or not x.is_contiguous():
            x = x.contiguous()
        y = self.function(x) + self.before(x)
        return self.after(self.function(y.contiguous()).sin())


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("function", [rows_of_memory, Unseen(), strided], ids=["operator", "module", "as_strided"])
def test_code_that_reads_memory_gets_it_without_gaps_as_traced(
    function: Callable[[Tensor], Tensor], asks: bool
) -> None:
    """contiguous() is not traced where there is nothing to do, and later calls may lie otherwise."""
    model, x = Kernel(function, asks=asks).double(), torch.randn(4, 5, 5).double()
    graph = graph_of(model, x)
    stage = {node: int(number > 2) for number, node in enumerate(graph.placement.placed)}
    for other in (x, x.transpose(1, 2), x.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        _, tensors = signature_of(model, other)
        found = run_stages(graph, model, parts_of(graph, stage), tensors)
        torch.testing.assert_close(found, run_eager(graph, model, tensors))
