"""Are the samples of a batch independent? A wrong 'yes' would corrupt training silently."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import row_cases
import row_operators
import torch
from pieces import Small, assert_same, eager, graph_of, in_pieces
from probe import probe
from row_cases import REFUSED, Forward
from thinned import one_in
from torch import Tensor

from rannd.graph.rows.rules.states import FIXED, Reduction, RowIndex, Rows, Scalar, State

INDEPENDENT = {**row_cases.INDEPENDENT, **row_operators.INDEPENDENT}
COUPLED = {**row_cases.COUPLED, **row_operators.COUPLED}
TABLES = (row_cases.INDEPENDENT, *row_operators.FAMILIES, row_cases.COUPLED, row_operators.COUPLED)

pytestmark = pytest.mark.usefixtures("double")


def _small(function: Forward, arguments: list[Callable[[], Tensor]], name: str) -> tuple[Small, list[Tensor]]:
    torch.manual_seed(zlib.crc32(name.encode()))
    return Small(function), [make() for make in arguments]


def _restored(model: torch.nn.Module, run: Callable[[], Any]) -> Any:
    """Result of `run`, with the buffers as they were before."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = run()
    for name, buffer in model.named_buffers():
        buffer.data.copy_(before[name])
    return found


def _sizes(rows: int, seed: str) -> list[int]:
    """The rows of some pieces that make `rows`, in a random composition."""
    generator = random.Random(seed)
    cuts = sorted(generator.sample(range(1, rows), generator.randint(1, 3)))
    return [high - low for low, high in zip([0, *cuts], [*cuts, rows], strict=True)]


def test_no_case_hides_another_of_its_name() -> None:
    assert len({*INDEPENDENT, *COUPLED}) == sum(map(len, TABLES))
    assert COUPLED.keys() >= REFUSED


@pytest.mark.parametrize("name", one_in(10, INDEPENDENT))
def test_independent_samples_give_the_same_in_pieces(name: str) -> None:
    function, arguments = INDEPENDENT[name]
    model, tensors = _small(function, arguments, name)
    graph = graph_of(model, *tensors)
    assert graph.coupled is None
    expected = _restored(model, lambda: eager(graph, model, tensors))
    for turn in range(2):
        sizes = _sizes(tensors[0].shape[0], f"{name}{turn}")
        found = in_pieces_restored(model, graph, tensors, sizes)
        assert_same(found, expected)
    assert probe(graph, model, tensors, [make() for make in arguments], name) > len(tensors)


def in_pieces_restored(model: Small, graph: Any, tensors: list[Tensor], sizes: list[int]) -> Any:
    """As the executor does: every piece sees the buffers as they were before the step."""
    if not graph.placement.written:
        return in_pieces(graph, model, tensors, sizes)
    return _restored(model, lambda: in_pieces(graph, model, tensors, [sum(sizes)]))


@pytest.mark.parametrize("name", one_in(6, (name for name in COUPLED if name not in REFUSED)))
def test_coupled_samples_are_seen(name: str) -> None:
    function, arguments = COUPLED[name]
    model, tensors = _small(function, arguments, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = graph_of(model, *tensors)
    assert graph.coupled is not None
    assert graph.task.rows_coupled


@pytest.mark.parametrize("name", one_in(3, sorted(REFUSED)))
def test_code_for_one_size_of_the_batch_gets_a_graph_for_that_size(name: str) -> None:
    function, arguments = COUPLED[name]
    model, tensors = _small(function, arguments, name)
    rows = tensors[0].shape[0]
    graph = graph_of(model, *tensors)
    assert graph.traced.leaf_paths or graph.signature.fixed_rows == rows
    assert graph.task.rows_coupled
    assert_same(in_pieces(graph, model, tensors, [rows]), eager(graph, model, tensors))


WRONG: dict[str, tuple[Forward, str, State]] = {
    "fixed": (lambda m, a: torch.softmax(a @ m.w, 1), "softmax", FIXED),
    "in the other dimension": (lambda m, a: torch.cat([a, a[:, :1]], 1) @ torch.ones(7, 7), "cat", Rows(1, 1, 1)),
    "one after another": (lambda m, a: torch.cat([a, a * 2]).view(2, -1, 6), "cat", Rows(0, 1, 2)),
    "sum": (lambda m, a: (a @ m.w).square().mean(), "mean", Scalar(Reduction.SUM)),
    "mean": (lambda m, a: (a @ m.w).square().sum(), "sum_1", Scalar(Reduction.MEAN)),
    "two apart": (lambda m, a: a[torch.arange(len(a)), torch.zeros_like(a[:, 0]).long()], "arange", RowIndex(0, 2)),
}
"""A model, one of its nodes, and what that is not."""


@pytest.mark.parametrize("name", WRONG)
def test_the_probe_sees_a_wrong_state(name: str) -> None:
    function, place, wrong = WRONG[name]
    torch.manual_seed(1)
    model, tensors, others = Small(function), [torch.randn(7, 6)], [torch.randn(7, 6)]
    graph = graph_of(model, *tensors)
    node = next(node for node in graph.analysis.states if node.name == place)
    broken = replace(graph, analysis=replace(graph.analysis, states={**graph.analysis.states, node: wrong}))
    probe(graph, model, tensors, others, name)
    with pytest.raises(AssertionError, match="is said to be"):
        probe(broken, model, tensors, others, name)


def test_the_reason_names_op_and_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
    graph = graph_of(model, torch.randn(7, 6))
    assert graph.coupled == "batch_norm normalises over the batch (batch_norm in module 1)"
    assert graph_of(model.eval(), torch.randn(7, 6)).coupled is None
