"""Check where the analysis of rows says the samples are, on every value that a graph computes.

The graph runs node by node: once for all rows, once more with one row replaced by another, and once in pieces. What
comes out has to be what the state of each node says:

- fixed: always the same;
- the samples are in dimension `dim` as outer x rows x inner: another row changes its own places at most, and the
  pieces' values, put together along the rows, are the value of the whole;
- sorted: what comes back from the order of all samples is checked instead;
- made of all samples: the pieces' numbers add up as the reduction says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pieces import state_of, weights_of
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node

from rannd.graph.fx.aliasing import nested_graph
from rannd.graph.model import ModelGraph
from rannd.graph.rows.rules.states import COUNT, FIXED, WHOLE, Arange, Reduction, RowIndex, Rows, Scalar, Sorted, State

WITHIN = {torch.float64: 1e-9, torch.complex128: 1e-9}
"""Relative differences that are rounding; 2e-4 for other types."""


@dataclass
class Run:
    """Copies of what every node made, when it made it."""

    values: dict[Node, Any] = field(default_factory=dict)
    found: int = 0


class _Recorder(Interpreter):
    """Runs a graph and its regions (no_grad, autocast), with random numbers that depend on the node alone."""

    def __init__(self, root: nn.Module, graph: Graph, run: Run, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(root, graph=graph)
        self.run_, self.tensors = run, tensors

    def run_node(self, n: Node) -> Any:
        if n.op == "get_attr" and str(n.target) in self.tensors:
            value: Any = self.tensors[str(n.target)]
        elif n.op == "call_function" and (region := nested_graph(self.module, n)) is not None:
            inner, _ = region
            recorder = _Recorder(inner, inner.graph, self.run_, self.tensors)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            args = tuple(recorder.run if value is inner else value for value in args)
            value = n.target(*args, **kwargs)  # type: ignore[operator]
        else:
            torch.manual_seed(self.run_.found)
            value = super().run_node(n)
        self.run_.found += 1
        if n.op != "output":
            self.run_.values[n] = _copied(value)
        return value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return tuple(_copied(each) for each in value)
    return value


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Puts the buffers of a model back at the end."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def record(graph: ModelGraph, model: nn.Module, given: Sequence[Tensor]) -> Run:
    """Run the graph once; buffers stay as they were."""
    run = Run()
    state = state_of(graph, model)
    tensors = {str(node.target): state[name] for node, name in graph.traced.attributes.items()}
    with torch.no_grad(), restored(model), torch.random.fork_rng(devices=[]):
        copies = [tensor.detach().clone() for tensor in given]
        _Recorder(graph.traced.root, graph.traced.graph, run, tensors).run(*copies, enable_io_processing=False)
    return run


def probe(graph: ModelGraph, model: nn.Module, tensors: Sequence[Tensor], others: Sequence[Tensor], seed: str) -> int:
    """Check all nodes of a graph whose rows are independent; `others` are arguments to take another row from.

    Gives the number of values that were checked.
    """
    assert graph.coupled is None
    generator = random.Random(seed)
    batch = [spec.batch for spec in graph.signature.tensors]
    rows = graph.signature.rows(list(tensors))
    row = generator.randrange(rows)
    changed = [_with_row(t, other, row) if b else t for t, other, b in zip(tensors, others, batch, strict=True)]
    whole = record(graph, model, [*tensors, *weights_of(graph, tensors, rows, rows)])
    another = record(graph, model, [*changed, *weights_of(graph, tensors, rows, rows)])
    sizes = _composition(rows, generator)
    pieces, first = [], 0
    for size in sizes:
        piece = [t[first : first + size] if b else t for t, b in zip(tensors, batch, strict=True)]
        pieces.append(record(graph, model, [*piece, *weights_of(graph, tensors, size, rows)]))
        first += size
    checked = 0
    for node, state in graph.analysis.states.items():
        if node not in whole.values:
            continue  # an operator that losses replaced
        try:
            _unchanged(state, whole.values[node], another.values[node], row, rows)
            if not graph.placement.random:
                _adds_up(state, whole.values[node], [piece.values[node] for piece in pieces], sizes)
        except AssertionError as wrong:
            raise AssertionError(f"{node.format_node()} is said to be {state}: {wrong}") from wrong
        checked += 1
    return checked


def _with_row(tensor: Tensor, other: Tensor, row: int) -> Tensor:
    changed = tensor.detach().clone()
    changed[row] = other[row]
    return changed


def _composition(rows: int, generator: random.Random) -> list[int]:
    """Pieces of different sizes, a single row among them where there are three rows or more."""
    sizes = [1] if rows > 2 else []
    while sum(sizes) < rows:
        sizes.append(generator.randint(1, rows - sum(sizes)))
    generator.shuffle(sizes)
    return sizes


def _close(found: Tensor, expected: Tensor) -> None:
    within = WITHIN.get(expected.dtype, 2e-4)
    exact = not (expected.dtype.is_floating_point or expected.dtype.is_complex)
    torch.testing.assert_close(
        found, expected, rtol=0 if exact else within, atol=0 if exact else within, equal_nan=True
    )


def _by_rows(value: Tensor, state: Rows, rows: int) -> Tensor:
    """The value with the rows in front."""
    split = value.reshape(*value.shape[: state.dim], state.outer, rows, state.inner, *value.shape[state.dim + 1 :])
    return split.movedim(state.dim + 1, 0)


def _unchanged(state: State, value: Any, other: Any, row: int, rows: int) -> None:
    """Another row has changed its own places at most."""
    if isinstance(state, tuple):
        for each, one, two in zip(state, value, other, strict=True):
            _unchanged(each, one, two, row, rows)
    elif isinstance(state, Rows):
        kept = torch.arange(rows) != row
        _close(_by_rows(other, state, rows)[kept], _by_rows(value, state, rows)[kept])
    elif isinstance(state, RowIndex):
        shape = [1] * value.ndim
        shape[state.dim] = rows
        expected = (torch.arange(rows) * state.step).reshape(shape).expand(value.shape)
        assert torch.equal(value.long(), expected)
        assert torch.equal(other, value)
    elif isinstance(state, Arange):
        assert torch.equal(value, torch.arange(rows * state.inner))
        assert torch.equal(other, value)
    elif state is FIXED and isinstance(value, Tensor):
        _close(other, value)
    elif state is COUNT:
        assert other == value
    else:
        assert state is FIXED or state is WHOLE or isinstance(state, (Scalar, Sorted))


def _adds_up(state: State, value: Any, pieces: Sequence[Any], sizes: Sequence[int]) -> None:
    """The pieces' values make the whole's."""
    rows = sum(sizes)
    if isinstance(state, tuple):
        for place, each in enumerate(state):
            _adds_up(each, value[place], [piece[place] for piece in pieces], sizes)
    elif isinstance(state, Rows):
        parts = [_by_rows(piece, state, size) for piece, size in zip(pieces, sizes, strict=True)]
        _close(torch.cat(parts), _by_rows(value, state, rows))
    elif isinstance(state, Scalar) and state.reduction is not Reduction.OTHER:
        mean = state.reduction is Reduction.MEAN
        _close(sum(p * (n / rows if mean else 1) for p, n in zip(pieces, sizes, strict=True)), value)
    elif state is FIXED and isinstance(value, Tensor):
        for piece in pieces:
            _close(piece, value)
