"""Weights of losses over several ranks: the mean over ranks of what pieces compute is the global value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pieces import CPU, WIDTH, Small, graph_of, state_of
from row_cases import INDEPENDENT
from row_operators import Forward
from torch import Tensor, nn

from rannd.graph.partition.cut import extract
from rannd.graph.rows.loss_weights import LABELS_WEIGHT, ROWS_WEIGHT, Result, counted, pieces_weights

ARGUMENTS = INDEPENDENT["padded"][1]
"""Makers of sequences and their labels, some of which do not count."""

pytestmark = pytest.mark.usefixtures("double")


def over_ranks(name: str, ranks: list[list[int]]) -> tuple[Small, list[Tensor], Tensor]:
    """(model, whole batch, mean over ranks of the sums of pieces); `ranks` has the rows of each rank's pieces."""
    return function_over_ranks(*INDEPENDENT[name], ranks)


def function_over_ranks(
    function: Forward, arguments: Sequence[Callable[[], Tensor]], ranks: list[list[int]]
) -> tuple[Small, list[Tensor], Tensor]:
    """The same for a function of a Small and what makes its arguments."""
    torch.manual_seed(2)
    model = Small(function)
    tensors = [make() for make in arguments]
    graph = graph_of(model, *tensors)
    assert graph.results == (Result("global"),)
    assert graph.signature.fixed_rows is None, graph.traced.record
    part = extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")
    state = state_of(graph, model)
    total = sum(sum(pieces) for pieces in ranks)
    assert total == tensors[0].shape[0]
    added = torch.zeros(())
    first = 0
    for pieces in ranks:
        own = [tensor[first : first + sum(pieces)] for tensor in tensors]
        counts = counted(graph.label_counts, own)
        for rows in pieces:
            weights = pieces_weights(
                graph.weights,
                world=len(ranks),
                rows=rows,
                rank_rows=sum(pieces),
                total_rows=total,
                counts=counts,
                device=CPU,
            )
            given: list[Any] = [tensor[first : first + rows] for tensor in tensors]
            given += weights
            values = dict(zip(graph.traced.placeholders, given, strict=True))
            (found,) = part.module(
                *(values[node] for node in part.inputs), *(state[key] for key in part.tensors), *part.numbers_at(rows)
            )
            added = added + found / len(ranks)
            first += rows
    return model, tensors, added


@pytest.mark.parametrize(
    "name", ["mean", "mean by hand", "mse", "mean with regulariser", "cross entropy", "probabilities"]
)
def test_a_mean_is_that_of_all_samples(name: str) -> None:
    """However uneven the ranks."""
    model, tensors, found = over_ranks(name, [[2, 2], [1], [1, 1]])
    torch.testing.assert_close(found, model(*tensors))


@pytest.mark.parametrize("name", ["sum", "sum with regulariser", "sum with constant"])
def test_a_sum_is_the_mean_of_the_ranks_sums(name: str) -> None:
    model, tensors, found = over_ranks(name, [[2, 2], [1, 2]])
    if name == "sum":
        expected = sum(model(*(tensor[rows] for tensor in tensors)) for rows in (slice(0, 4), slice(4, 7))) / 2
    else:  # what is added once on each rank
        constant = model(*(tensor[:0] for tensor in tensors))
        expected = (model(*tensors) - constant) / 2 + constant
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "name",
    [
        "padded", "padded, smoothed", "masked mean by hand", "masked mean, clamped", "masked mean of lengths",
        "class weights, mean", "class weights, made", "class weights, nll", "class weights, padded",
        "class weights, padded, smoothed, classes second",
    ],
)  # fmt: skip
def test_padded_labels_count_by_rank(name: str) -> None:
    """Each rank's mean is over its own labels, as it is with DistributedDataParallel; ranks count by their rows."""
    model, tensors, found = over_ranks(name, [[2, 2], [1, 2]])
    first, second = (model(*(tensor[rows] for tensor in tensors)) for rows in (slice(0, 4), slice(4, 7)))
    torch.testing.assert_close(found, (4 * first + 3 * second) / 7)


def padded(m: Small, a: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy((a @ m.w).flatten(0, 1), y.flatten())


def masked(m: Small, a: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).to(a.dtype)
    return ((a @ m.w).square().mean(-1) * mask).sum() / mask.sum()


def terms(m: Small, a: Tensor, y: Tensor) -> Tensor:
    return (a @ m.w).square().sum() / 100 + padded(m, a, y)


@pytest.mark.parametrize("loss", [padded, masked, terms])
@pytest.mark.parametrize("bend", [torch.exp, torch.square, lambda x: x * x.detach(), lambda x: x + torch.sqrt(x)])
def test_what_is_no_mean_is_made_of_each_ranks_own(loss: Forward, bend: Callable[[Tensor], Tensor]) -> None:
    """A perplexity, a focal factor: no weights are inside, however uneven the ranks."""

    model, tensors, found = function_over_ranks(lambda *given: bend(loss(*given)), ARGUMENTS, [[4], [3]])
    first, second = (model(*(tensor[rows] for tensor in tensors)) for rows in (slice(0, 4), slice(4, 7)))
    torch.testing.assert_close(found, (first + second) / 2)


def test_a_sum_by_hand_divided_by_the_rows_is_a_mean() -> None:
    """Python's sum begins with a 0, which is no term."""

    def function(m: Small, a: Tensor, y: Tensor) -> Any:
        found = (a @ m.w).square()
        return sum([found[:, 0].sum(), found[:, 1].sum()]) / len(a)

    model, tensors, found = function_over_ranks(function, ARGUMENTS, [[2, 2], [1, 2]])
    torch.testing.assert_close(found, model(*tensors))


def test_a_rank_without_labels_has_no_mean() -> None:
    """As torch's own mean of nothing."""
    weight = f"{LABELS_WEIGHT}0"
    none = {weight: torch.zeros((), dtype=torch.float64)}
    names = (weight, ROWS_WEIGHT)
    given = pieces_weights(names, world=2, rows=1, rank_rows=2, total_rows=4, counts=none, device=CPU)
    assert given[0].isnan()
    assert given[1] == 0.5


def test_class_weights_are_counted_by_class() -> None:
    """Labels that do not count, or are no classes, are in no class: what is wrong with those, the loss itself says."""
    weight = f"{LABELS_WEIGHT}0"
    function, _ = INDEPENDENT["class weights, mean"]
    graph = graph_of(Small(function), torch.randn(4, WIDTH), torch.tensor([0, 5, 5, 2]))
    found = counted(graph.label_counts, [torch.randn(5, WIDTH), torch.tensor([-100, 1, 1, 3, 17])])
    assert found[weight].tolist() == [0, 2, 0, 1, 0, 0]
    given = pieces_weights((weight,), world=2, rows=1, rank_rows=5, total_rows=20, counts=found, device=CPU)
    assert given[0].tolist() == [0, 4, 0, 2, 0, 0]


def test_weights_have_names_of_their_own() -> None:
    function, arguments = INDEPENDENT["padded with regulariser"]
    graph = graph_of(Small(function), *(make() for make in arguments))
    assert set(graph.weights) == {ROWS_WEIGHT, f"{LABELS_WEIGHT}0"}
    behind = [node.target for node in graph.traced.placeholders[len(graph.signature.tensors) :]]
    assert behind == list(graph.weights)
