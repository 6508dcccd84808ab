"""Where the samples of a batch are in a value: the states that `rannd.graph.rows` computes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias


class Kind(enum.Enum):
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
    """The numbers 0 .. rows-1 along `dim`; all other dimensions have size 1 or repeat it."""

    dim: int


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
    """One number reduced over all samples."""

    reduction: Reduction


State: TypeAlias = Kind | Rows | RowIndex | Scalar | tuple["State", ...]

FIXED, COUNT, WHOLE = Kind.FIXED, Kind.COUNT, Kind.WHOLE


class Coupled(Exception):
    """An op mixes samples, or no rule knows that it does not."""
