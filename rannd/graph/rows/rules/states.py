"""States of the batch-dimension analysis: where a value holds the samples of the batch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Node


class PlainState(enum.Enum):
    """States without fields."""

    FIXED = "a value that does not depend on the samples"
    COUNT = "a number computed from the batch size"
    WHOLE = "a value that depends on the samples in an unsupported way"


@dataclass(frozen=True)
class Rows:
    """A tensor with the samples in dimension `dim`, whose size is `outer` x rows x `inner` in row-major order."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class RowIndex:
    """The values `step` * (0 .. rows-1) along `dim`; all other dimensions have size 1 or repeat them."""

    dim: int
    step: int = 1


@dataclass(frozen=True)
class Arange:
    """A 1-d tensor with the values 0 .. rows x inner - 1."""

    inner: int


class Role(enum.Enum):
    """Role of a tensor in a sort of all rows x inner positions by their keys."""

    KEYS = "the keys, sorted"
    ORDER = "the places, in the order of their keys (divided by `share`)"
    VALUES = "dimension 0 has what belongs to each place, in that order"
    COUNTS = "how many places have each key"
    ENDS = "where the places of each key end"
    BLANK = "nothing yet: a tensor to be written as a whole"
    INVERSE = "where each place is in that order"


@dataclass(frozen=True)
class Sorted:
    """A tensor in the order of a sort, see moe_routing.py."""

    by: Node
    """The sort node."""
    inner: int
    role: Role
    share: int = 1


class Reduction(enum.Enum):
    """How a scalar was reduced over the samples, and so how the scalars of microbatches combine.

    With n rows in a microbatch and N in the mini-batch:
    """

    MEAN = "weighted by n/N, the pieces' numbers add up"
    SUM = "the pieces' numbers add up"
    EXACT = "weighted where it was reduced; the numbers add up"
    OTHER = "the pieces' numbers do not add up to anything"


@dataclass(frozen=True)
class Scalar:
    """One or more scalars reduced over all samples."""

    reduction: Reduction


State: TypeAlias = PlainState | Rows | RowIndex | Arange | Sorted | Scalar | tuple["State", ...]

FIXED, COUNT, WHOLE = PlainState.FIXED, PlainState.COUNT, PlainState.WHOLE


class Coupled(Exception):
    """An operator mixes samples, or no rule shows that it does not."""
