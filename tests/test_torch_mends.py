"""What mends a version of torch says the same as torch itself, in every version."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import rannd.graph.fx.fake_kernels  # noqa: F401  (mends what is at fault)
from rannd import torch_mends
from rannd.torch_mends import no_recomputing, tracing


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 5, 3)], ids=str)
def test_cross_entropy_with_probabilities(
    shape: tuple[int, ...], smoothing: float, weighted: bool, reduction: str
) -> None:
    scores, target = numbers(*shape), numbers(*shape).cos().softmax(-1)
    weight = numbers(5).exp() if weighted else None
    found = torch_mends._cross_entropy_loss(scores, target, weight, REDUCTIONS[reduction], -100, smoothing)
    torch.testing.assert_close(
        found, F.cross_entropy(scores, target, weight, reduction=reduction, label_smoothing=smoothing)
    )


def test_cross_entropy_of_no_samples_and_of_classes() -> None:
    assert torch_mends._cross_entropy_loss(numbers(0, 5), numbers(0, 5)).isnan()
    scores, classes = numbers(4, 5), torch.tensor([0, 1, 4, 2])
    if torch_mends.VERSION < (2, 13):
        assert torch_mends._cross_entropy_loss(scores, classes) == F.cross_entropy(scores, classes)


@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_quantiles(name: str, interpolation: str) -> None:
    own, torchs = getattr(torch_mends, f"_{name}"), getattr(torch, name)
    gaps = numbers(3, 6, 4)
    gaps[0, 1, 2] = gaps[2, :, 3] = torch.nan
    wanted = (0.3, 1.0, torch.tensor(0.7).double(), torch.tensor([0.0, 0.11, 0.5, 0.93]).double())
    for values, q, dim, keepdim in product((numbers(3, 6, 4), gaps), wanted, (None, 0, 1, -1), (False, True)):
        found = own(values, q, dim, keepdim, interpolation=interpolation)
        expected = torchs(values, q, dim, keepdim, interpolation=interpolation)
        torch.testing.assert_close(found, expected, equal_nan=True)
    for dim, keepdim in product((None, 0), (False, True)):
        torch.testing.assert_close(own(numbers(), 0.3, dim, keepdim), torchs(numbers(), 0.3, dim, keepdim))


class Small(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.lstm = nn.LSTM(6, 6, num_layers=2, bidirectional=True)
        self.table = nn.Embedding(9, 6)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(self, *tensors)


X = torch.rand(7, 6, generator=torch.Generator().manual_seed(0))
TRACED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "lstm": (lambda m, x: m.lstm(x.expand(4, *x.shape)), [X]),
    "lstm, one sample": (lambda m, x: m.lstm(x.sum(0).expand(4, 1, -1)), [X]),
    "embedding": (lambda m, ids: m.table(ids), [torch.ones(7, 2, dtype=torch.int32)]),
    "embedding of a number": (lambda m, ids: m.table(ids.sum()), [torch.zeros(7, dtype=torch.long)]),
    "binary cross entropy": (lambda m, x, w: F.binary_cross_entropy(x, x, w, reduction="none"), [X, X[:, :1]]),
    "binary cross entropy, one weight": (lambda m, x: F.binary_cross_entropy(x, x, x.sum()), [X]),
    "cross entropy": (lambda m, x: F.cross_entropy(x, x, reduction="none"), [X]),
    "quantile": (lambda m, x: (x.quantile(0.3, 1), x.nanquantile(torch.tensor([0.1, 0.9]), 1, True)), [X]),
    "unique": (lambda m, x: torch.unique((x * 3).round(), return_inverse=True, return_counts=True)[1:], [X]),
    "unique rows": (lambda m, x: torch.unique(x, return_inverse=True, return_counts=True, dim=1)[1:], [X]),
    "unique in a row": (lambda m, x: torch.unique_consecutive(x, return_inverse=True, return_counts=True)[1:], [X]),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")
@pytest.mark.parametrize("name", TRACED)
def test_what_is_traced_is_what_comes_out(name: str) -> None:
    function, tensors = TRACED[name]
    model = Small(function)
    rows = {0: torch.export.Dim.DYNAMIC}
    with tracing(), torch.no_grad():
        program = torch.export.export(model, tuple(tensors), dynamic_shapes=(tuple(rows for _ in tensors),))
    output = next(iter(reversed(program.graph.nodes)))
    traced = [node.meta["val"] for node in output.all_input_nodes]
    found = torch.utils._pytree.tree_leaves(model(*tensors))
    assert [each.dtype for each in traced] == [each.dtype for each in found]
    for each, real in zip(traced, found, strict=True):
        known = [size if isinstance(size, int) else real.shape[place] for place, size in enumerate(each.shape)]
        assert known == list(real.shape)


def test_indices_that_are_no_integers_are_refused_while_they_are_traced() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="'indices' to have one of the following scalar types"):
        F.embedding(torch.ones(2), torch.ones(9, 6))


def test_nothing_is_left_in_place() -> None:
    before = {**vars(F)}, {**vars(torch.utils.checkpoint)}
    with tracing(), no_recomputing():
        pass
    assert (vars(F), vars(torch.utils.checkpoint)) == before


def test_a_checkpoint_that_cannot_be_looked_through_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mends, "VERSION", (2, 12))
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
    told = rf"torch {torch.__version__[:4]}.*_checkpoint_without_reentrant_generator"
    with pytest.raises(RuntimeError, match=told), no_recomputing():
        pass
