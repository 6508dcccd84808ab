"""How many rows of a batch each rank gets if some hosts are slow, where every rank computes the whole model.

`rannc-run` knows which hosts were slow in earlier starts, and tells the ranks (VARIABLE); an ElasticSampler with
``balance=True`` divides.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "RANND_ROW_SHARES"
"""``1:170:100,100,231``: a `RowShares` for the ranks of a start."""


@dataclass(frozen=True)
class RowShares:
    """Shares of ranks of different speeds."""

    least: int
    """Minimum rows of a rank: its microbatches have one each."""
    most: int
    """Maximum rows of a rank, in percent of even shares: for more there was no memory."""
    percents: tuple[int, ...]
    """Time of each rank for the same rows, relative to the usual rank's, in percent."""

    def text(self) -> str:
        """As the value of VARIABLE."""
        return f"{self.least}:{self.most}:{','.join(map(str, self.percents))}"

    def rows(self, batch: int) -> list[int]:
        """Return the rows of each rank: those with which the last one is done first, or else as even as can be.

        Rows are given one at a time to the rank that would be done first with one more, which is optimal; of several
        to the one that has fewest.
        """
        size = len(self.percents)
        even = [batch * (rank + 1) // size - batch * rank // size for rank in range(size)]
        most = batch * self.most // (100 * size)
        if not self.least * size <= batch <= most * size:
            return even
        found = [self.least] * size
        queue = [((self.least + 1) * percent, self.least, rank) for rank, percent in enumerate(self.percents)]
        heapq.heapify(queue)
        for _ in range(batch - self.least * size):
            _, _, rank = heapq.heappop(queue)
            found[rank] += 1
            if found[rank] < most:
                heapq.heappush(queue, ((found[rank] + 1) * self.percents[rank], found[rank], rank))
        return found if self._time(found) < self._time(even) else even

    def _time(self, rows: list[int]) -> int:
        return max(count * percent for count, percent in zip(rows, self.percents, strict=True))


def given(environ: Mapping[str, str], size: int) -> RowShares | None:
    """Return what `rannc-run` has told `size` ranks; None: nothing."""
    try:
        least, most, percents = environ.get(VARIABLE, "").split(":")
        found = RowShares(int(least), int(most), tuple(map(int, percents.split(","))))
    except ValueError:
        return None
    sound = len(found.percents) == size and min(found.percents) > 0 and found.least > 0 and found.most > 0
    return found if sound else None
