"""Which elements of the parameters of a stage each of its replicas owns.

Parameters are flattened in row-major order and laid end to end in buckets; each replica owns an equal range of each
bucket, the last one perhaps less::

    bucket    |  weight (6)    |  bias (3) |
    replica   |  0 (5)       |  1 (4)      |      pieces of replica 1: weight[5:6], bias[0:3]

A large parameter is a bucket of its own, so that its pieces can be gathered in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALONE = 8 << 20
"""Bytes from which a parameter is a bucket of its own."""
MOST = 25 << 20
"""Bytes of a bucket of smaller parameters."""


class Piece(NamedTuple):
    """A range of the elements of a flattened parameter."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are divided together."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of elements of each."""
    replicas: int

    @property
    def length(self) -> int:
        """Number of elements of each replica's range; the last ranges may reach beyond the end."""
        return -(-sum(self.sizes) // self.replicas)

    @property
    def is_shared_by_all(self) -> bool:
        """Whether every replica owns some elements."""
        return self.length * (self.replicas - 1) < sum(self.sizes)

    def pieces(self, replica: int) -> dict[str, Piece]:
        """The elements that a replica owns, by parameter; those of which it owns none are left out."""
        low, high = replica * self.length, (replica + 1) * self.length
        found, begin = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            piece = Piece(max(low - begin, 0), min(high - begin, size))
            if piece.size > 0:
                found[name] = piece
            begin += size
        return found


def divide(parameters: Iterable[tuple[str, int, int, str]], replicas: int) -> list[Bucket]:
    """Put parameters into buckets, in their order.

    Args:
        parameters: (name, number of elements, bytes of an element, dtype and whatever else keeps them apart).
        replicas: Number of replicas that share them.
    """
    found: list[Bucket] = []
    open_names: dict[str, list[tuple[str, int]]] = {}
    open_bytes: dict[str, int] = {}

    def close(kind: str) -> None:
        if named := open_names.pop(kind, []):
            found.append(_bucket(named, replicas))
        open_bytes.pop(kind, None)

    for name, size, width, kind in parameters:
        if size * width >= ALONE:
            found.append(_bucket([(name, size)], replicas))
            continue
        if open_bytes.get(kind, 0) + size * width > MOST:
            close(kind)
        open_names.setdefault(kind, []).append((name, size))
        open_bytes[kind] = open_bytes.get(kind, 0) + size * width
    for kind in list(open_names):
        close(kind)
    return found


def _bucket(named: Sequence[tuple[str, int]], replicas: int) -> Bucket:
    return Bucket(tuple(name for name, _ in named), tuple(size for _, size in named), replicas)
