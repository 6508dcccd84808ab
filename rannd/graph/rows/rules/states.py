"""Where the samples of a batch are in a value: the states that `rannd.graph.rows.analysis` computes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Node


class PlainState(enum.Enum):
    """States without further fields."""

    FIXED = "does not depend on the samples"
    COUNT = "a number made of the number of rows"
    WHOLE = "depends on the samples in a way no rule knows"


@dataclass(frozen=True)
class Rows:
    """A tensor with the samples in dimension `dim`, which is `outer` x rows x `inner` in row-major order."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class RowIndex:
    """`step` times the numbers 0 .. rows-1 along `dim`; all other dimensions have size 1 or repeat it."""

    dim: int
    step: int = 1


@dataclass(frozen=True)
class Arange:
    """The numbers 0 .. rows x inner - 1, in one dimension."""

    inner: int


class Role(enum.Enum):
    """What something has to do with a sort of all places (rows x inner) by their keys."""

    KEYS = "the keys, sorted"
    ORDER = "the places, in the order of their keys (divided by `share`)"
    VALUES = "dimension 0 has what belongs to each place, in that order"
    COUNTS = "how many places have each key"
    ENDS = "where the places of each key end"
    BLANK = "nothing yet: a tensor to be written as a whole"
    INVERSE = "where each place is in that order"


@dataclass(frozen=True)
class Sorted:
    """Made in the order of a sort, see row_rules/routing.py."""

    by: Node
    """The sort."""
    inner: int
    role: Role
    share: int = 1


class Reduction(enum.Enum):
    """How one number was made of all samples, hence how the numbers of pieces add up to the whole's.

    With n rows in a piece and N in all of it:
    """

    MEAN = "weighted by n/N, the pieces' numbers add up"
    SUM = "the pieces' numbers add up"
    EXACT = "weighted where it was reduced; the numbers add up"
    OTHER = "the pieces' numbers do not add up to anything"


@dataclass(frozen=True)
class Scalar:
    """One number, or a few, reduced over all samples."""

    reduction: Reduction


State: TypeAlias = PlainState | Rows | RowIndex | Arange | Sorted | Scalar | tuple["State", ...]

FIXED, COUNT, WHOLE = PlainState.FIXED, PlainState.COUNT, PlainState.WHOLE


class Coupled(Exception):
    """An op mixes samples, or no rule knows that it does not."""
