"""Slicing of mini-batches into microbatches."""

from __future__ import annotations

import hashlib

from rannd.plan.schedule.program import Layout


class Pieces:
    """Microbatches of a call in which the ranks' mini-batches have `rows` rows, by slot."""

    def __init__(self, layout: Layout, rows: tuple[int, ...]) -> None:
        self.rank_rows = rows
        """Rows of each slot's mini-batch."""
        self.total = sum(rows)
        self.slices: list[tuple[int, int]] = [(0, 0)] * layout.pieces_total
        """(first row in its rank's mini-batch, number of rows) of each microbatch; those without rows do not run."""
        for slot, count in enumerate(rows):
            for microbatch, each in enumerate(split_rows(count, layout.microbatches)):
                self.slices[microbatch * layout.world + slot] = each
        self.rows = [count for _, count in self.slices]
        self.first = next((slot for slot, count in enumerate(rows) if count), 0)
        """The microbatch whose buffer updates are kept: the first one of the first slot with rows."""
        self._world = layout.world

    def of_slot(self, slot: int) -> list[int]:
        """Microbatches with rows of the mini-batch of the rank in `slot`."""
        return [piece for piece in range(slot, len(self.rows), self._world) if self.rows[piece]]


def split_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """(first row, number of rows) of `parts` slices of a mini-batch, the longer ones first."""
    size, longer = divmod(rows, parts)
    counts = [size + (part < longer) for part in range(parts)]
    return [(sum(counts[:part]), counts[part]) for part in range(parts)]


def piece_seed(base: int, call: int, piece: int, stage: int) -> int:
    """Where the random numbers of a microbatch begin in a stage.

    `base`: the model's seed; `call`: number of the call.
    """
    text = f"{base}/{call}/{piece}/{stage}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
