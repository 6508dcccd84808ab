"""The op graph as the planner sees it: ops and values, sizes as functions of the batch.

No torch in this file: ``rannd.plan`` and ``rannc-run --plan-only`` read it without loading torch.

A :class:`TaskGraph` holds only ops that have to be placed on a stage. Ops that do not depend on the
batch (weight transposes) and cheap gradient-free ones that depend on model inputs alone (masks,
positions) are recomputed wherever they are read; the reader's ``inputs`` and ``params`` already
include what they read.
"""

from __future__ import annotations

import msgspec


class Size(msgspec.Struct, frozen=True, array_like=True):
    """A size as a polynomial of the number of rows (samples) in a piece: c0 + c1*rows + c2*rows**2."""

    c0: float = 0.0
    c1: float = 0.0
    c2: float = 0.0

    def at(self, rows: float) -> float:
        """The size for `rows` samples."""
        return self.c0 + rows * (self.c1 + rows * self.c2)

    def __add__(self, other: Size) -> Size:
        return Size(self.c0 + other.c0, self.c1 + other.c1, self.c2 + other.c2)


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that one op makes (or the user gives) and others read."""

    name: str
    producer: int
    """Index of the op that makes it; -1 for an input of the model."""
    bytes: Size
    requires_grad: bool
    is_output: bool = False
    """Handed back to the user."""
    is_sent: bool = True
    """Whether an output travels to the ranks with each microbatch. Losses are summed once a call instead, and numbers
    of rows are known there."""


class Param(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or buffer of the model; tied names are one Param."""

    name: str
    bytes: int
    trainable: bool
    buffer: bool = False
    itemsize: int = 4
    """Bytes of one element."""


class Op(msgspec.Struct, frozen=True, array_like=True):
    """One op that has to be placed on a stage."""

    name: str
    target: str
    """The operator, e.g. ``aten::linear``."""
    hash: str
    """What the op does and to what: operator, plain arguments, types and shapes as functions of the rows, what gets a
    gradient. Neither names nor its place in the model: equal ops of equal layers have equal hashes."""
    inputs: tuple[int, ...]
    """Values read, each once, also through recomputed ops, in the order in which the op's hash numbers them."""
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    """Parameters and buffers read, each once, also through recomputed ops, in the order that the hash knows."""
    flops: Size
    """Floating-point operations of the forward pass, estimated from the shapes."""
    group: int
    """Ops of one group have to stay in one stage (in-place ops and aliases, tuple producers, mutated buffers)."""
    module: str = ""
    """Dotted path of the user's module that ran the op."""
    segment: int = 0
    """1 + how many CutPoints were called before: stages may begin only where this number grows. 0 without CutPoints."""
    dtype: str = ""
    """The floating-point type it computes in, as 'float32': that of what it makes, or else of what it reads; '' for
    none (indices, masks). Under autocast the type that the operator was cast to."""
    opaque: str = ""
    """In words, the user's code that runs as this one operator, so that nothing of it can be placed apart; '' for
    operators of torch."""


class TaskGraph(msgspec.Struct, frozen=True):
    """The model as a graph of placeable ops, in topological order (an op reads only values made before it).

    `rows_coupled` is true where a sample's result depends on other samples (training-mode BatchNorm):
    then each rank's mini-batch must run whole, so microbatches are not possible.
    """

    graph_hash: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    params: tuple[Param, ...]
    rows_coupled: bool
    unused_params: tuple[int, ...] = ()
    """Parameters and buffers no op reads; they stay with the first stage."""
