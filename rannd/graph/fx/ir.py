"""Torch-free operator graph for the planner: operators and values, with sizes as functions of the batch size.

``rannd.plan`` and ``rannc-run --plan-only`` use this file without importing torch.

A :class:`TaskGraph` holds only operators that have to be placed on a stage. Operators that do not depend on the
batch (weight transposes) and cheap gradient-free ones that depend on model inputs alone (masks, positions) are
recomputed by every reader; the reader's ``inputs`` and ``params`` already include what they read.
"""

from __future__ import annotations

import msgspec


class Size(msgspec.Struct, frozen=True, array_like=True):
    """A size as a polynomial of the number of rows (samples) in a microbatch: c0 + c1*rows + c2*rows**2."""

    c0: float = 0.0
    c1: float = 0.0
    c2: float = 0.0

    def at(self, rows: float) -> float:
        """The size for `rows` samples."""
        return self.c0 + rows * (self.c1 + rows * self.c2)

    def __add__(self, other: Size) -> Size:
        return Size(self.c0 + other.c0, self.c1 + other.c1, self.c2 + other.c2)

    def scaled(self, factor: float) -> Size:
        """The size times `factor`."""
        return Size(self.c0 * factor, self.c1 * factor, self.c2 * factor)


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A tensor produced by one operator (or passed by the user) and read by others."""

    name: str
    producer: int
    """Index of the operator that produces it; -1 for an input of the model."""
    bytes: Size
    requires_grad: bool
    is_output: bool = False
    """Whether it is an output of the model."""
    is_sent: bool = True
    """Whether an output travels to the ranks with each microbatch. Losses are summed once a call instead, and numbers
    of rows are known there."""


class Param(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or buffer of the model; tied parameters are one Param."""

    name: str
    bytes: int
    trainable: bool
    buffer: bool = False
    itemsize: int = 4
    """Bytes of one element."""


class Op(msgspec.Struct, frozen=True, array_like=True):
    """One operator to be placed on a stage."""

    name: str
    target: str
    """The operator, e.g. ``aten::linear``."""
    hash: str
    """Hash of the operator, its plain arguments, dtypes, symbolic shapes and requires_grad flags. It excludes names and
    the position in the model, so that corresponding operators of equal layers have equal hashes."""
    inputs: tuple[int, ...]
    """Values read, directly or through recomputed operators, each once, in the order used by the hash."""
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    """Parameters and buffers read, likewise."""
    flops: Size
    """FLOPs of the forward pass, estimated from the shapes."""
    group: int
    """Operators of one group must be on one stage (in-place writes and aliases, tuple producers, mutated buffers)."""
    module: str = ""
    """Dotted path of the user's module that ran the operator."""
    segment: int = 0
    """1 + number of CutPoints called before: stages may begin only where this number grows. 0 without CutPoints."""
    dtype: str = ""
    """Floating-point dtype it computes in, e.g. 'float32': that of its result, or else of its inputs; '' for none
    (indices, masks). Under autocast the dtype that the operator was cast to."""
    opaque: str = ""
    """Description of the user's code that runs as this single opaque operator and cannot be split; '' for torch's
    operators."""
    source: str = ""
    """Line of the user's code that called it when it was traced, such as 'examples/tutorial.py:27'; '' if not
    known."""


class TaskGraph(msgspec.Struct, frozen=True):
    """The model as a graph of operators to be placed, in topological order.

    `rows_coupled` is true if a sample's result depends on other samples (training-mode BatchNorm): then each rank's
    mini-batch must run unsplit, so microbatches are not possible.
    """

    graph_hash: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    params: tuple[Param, ...]
    rows_coupled: bool
    unused_params: tuple[int, ...] = ()
    """Parameters and buffers that no operator reads; they stay on the first stage."""
