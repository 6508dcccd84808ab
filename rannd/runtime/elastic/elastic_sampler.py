"""`pyrannc.ElasticSampler`: batches whose samples do not depend on the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sized
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Sampler, dataloader

from rannd import patches
from rannd.errors import UsageError
from rannd.ranks import rank_notes, row_shares
from rannd.runtime.comm.rendezvous import find_place

_LOADER = patches.declare(
    "batches of a DataLoader",
    dataloader._BaseDataLoaderIter,
    "__next__",
    "which of an ElasticSampler's batches the script has got: workers fetch others in advance",
)
_AHEAD = patches.declare(
    "indices of a DataLoader",
    dataloader._BaseDataLoaderIter,
    "_next_index",
    "that a DataLoader reads an ElasticSampler",
)
_KEYS = ("length", "batch_size", "shuffle", "seed", "drop_last")
_READS_AHEAD = (
    "two batches of the ElasticSampler were read before the model was called: what reads ahead (as loaders do that "
    "accelerate.prepare returns) hides which batches the model was trained with, so one would be left out after a "
    "restart. Iterate over the DataLoader itself, and move its batches to the device in the loop"
)


class ElasticSampler(Sampler[list[int]]):
    """Gives each rank its share of global batches, for ``DataLoader(dataset, batch_sampler=sampler)``.

    torchdata's StatefulDataLoader takes it in the same way; its own state is not needed then.

    Which samples are in a global batch depends on `seed` and the epoch alone. Rank r of R gets rows r B / R to
    (r + 1) B / R of a batch of B, so that shares differ by one row at most, but for `balance`. An epoch that is broken
    off goes on where it was, on any number of ranks: no sample is left out or given twice. An epoch that is over is
    followed by the next one, also without `set_epoch`.

    With shares of different sizes, a loss that the model computes as a mean is the mean over the global batch. For a
    loss that the script computes on each rank, multiply by `weight`.

    Args:
        dataset: Anything with a length.
        batch_size: Rows of a global batch, of all ranks together.
        shuffle: Give the samples in a random order, another one in each epoch.
        seed: Of that order.
        drop_last: Leave out the last batch of an epoch if it has fewer rows.
        balance: If hosts are found to be slow, give their ranks fewer rows in later starts of an elastic job, and the
            others more (docs/elastic.md). The script must not expect shares of equal size, nor the model depend on
            which rows are together.
        rank, ranks: This rank, and how many there are; None: those of the job.

    Raises:
        UsageError: A batch has fewer rows than there are ranks, or an epoch has no batch.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        balance: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        place = find_place(os.environ)
        self.rank = place.rank if rank is None else rank
        self.ranks = place.size if ranks is None else ranks
        self.balance = balance
        told = balance and rank is None and ranks is None and rank_notes.heard()
        self._row_shares = row_shares.given(os.environ, self.ranks) if told else None
        self._bounds: dict[int, list[int]] = {}
        """By the rows of a batch: the first row of each rank, and in the end that number."""
        self.length, self.batch_size, self.shuffle = len(dataset), batch_size, shuffle
        self.seed, self.drop_last = seed, drop_last
        self.epoch = 0
        """The present epoch."""
        self.position = 0
        """Number of global batches of this epoch that the script has trained with."""
        self.weight = 1.0
        """Factor of this rank's mean loss with which the mean over ranks is that over the rows of the global batch that
        the script got last."""
        self.between: Callable[[], None] = _nothing
        """Called when the script is done with a batch, before it gets the next one."""
        self.calls: Callable[[], int] | None = None
        """Returns how often the model was called."""
        self._finished = False
        """Whether this process has come to the end of the epoch."""
        self._restored = False
        """Whether the position is another job's, and nothing was read since."""
        self._shares: Shares | None = None
        """The present iteration."""
        _check(self)
        patches.install(_LOADER.around(_next_batch), _AHEAD.around(_next_index))

    @property
    def balanced(self) -> tuple[int, ...] | None:
        """Time of each rank for the same rows, in percent, by which rows of this start are divided; None: evenly."""
        return self._row_shares.percents if self._row_shares is not None else None

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    @property
    def most_ranks(self) -> int:
        """Number of ranks that each get a row of each batch."""
        rest = self.length % self.batch_size
        return rest if rest and not self.drop_last else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; nothing changes if it is the present one, which goes on.

        UsageError for an epoch before the one that a checkpoint was saved in.
        """
        if self._restored and epoch < self.epoch:
            raise UsageError(
                f"set_epoch({epoch}), but the training goes on in epoch {self.epoch}; begin with it: "
                "for epoch in range(sampler.epoch, epochs)"
            )
        if epoch != self.epoch or self._finished:
            self.epoch, self.position, self._finished, self._shares = epoch, 0, False, None

    def __iter__(self) -> Iterator[list[int]]:
        self.commit()
        if self._finished:
            self.set_epoch(self.epoch + 1)
        self._shares = Shares(self)
        return self._shares

    def commit(self) -> None:
        """The script is done with the batch that it got last, if it has called the model with it."""
        if self._shares is not None:
            self.position = max(self.position, self._shares.given - int(self._shares.unused))

    def share(self, number: int, order: torch.Tensor) -> list[int]:
        """Return this rank's samples of a global batch; `order`: of the epoch."""
        rows = order[number * self.batch_size : (number + 1) * self.batch_size]
        first, end = self._part(len(rows))
        return [int(row) for row in rows[first:end]]

    def begin_batch(self, number: int) -> None:
        """The script gets a batch."""
        rows = min(self.batch_size, self.length - number * self.batch_size)
        first, end = self._part(rows)
        self.weight = self.ranks * (end - first) / rows
        self._restored = False

    def end_epoch(self, shares: Shares) -> None:
        """The script has got all batches of an iteration."""
        if shares is self._shares:
            self._finished, self._restored = True, False

    def is_stale(self, shares: Shares) -> bool:
        """Whether an iteration began before another one, or before a checkpoint was loaded."""
        return shares is not self._shares

    def order(self) -> torch.Tensor:
        """Return the samples of the present epoch in their order."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks."""
        return {key: getattr(self, key) for key in (*_KEYS, "epoch", "position")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from another job's position. UsageError if that had other batches."""
        for key in _KEYS:
            if state[key] != getattr(self, key):
                raise UsageError(
                    f"ElasticSampler has {key} = {getattr(self, key)}, and the one that was saved {state[key]}: its "
                    "batches are others. Give it the same, or begin in another directory"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._finished, self._restored, self._shares = False, True, None

    def _part(self, rows: int) -> tuple[int, int]:
        """Return the first row of this rank's share of a batch, and the one after its last."""
        if self._row_shares is None:
            return rows * self.rank // self.ranks, rows * (self.rank + 1) // self.ranks
        if rows not in self._bounds:
            self._bounds[rows] = [0, *accumulate(self._row_shares.rows(rows))]
        first, end = self._bounds[rows][self.rank : self.rank + 2]
        return first, end


class Shares(Iterator[list[int]]):
    """This rank's shares of the batches that are left of an epoch."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._order = sampler.order()
        self._read = self.given = sampler.position
        """`given`: number of batches of the epoch that the script has got; those before were read by a DataLoader."""
        self._first = self.given
        self._calls = -1
        """Calls of the model when the script got its last batch."""
        self.loader = False
        """Whether a DataLoader reads them, in advance perhaps."""

    def __next__(self) -> list[int]:
        if not self.loader:
            if _reading:
                raise UsageError(
                    "an ElasticSampler is read inside of another batch sampler; give it to the DataLoader itself "
                    "(batch_sampler=sampler), which counts the batches that the script has got"
                )
            self.next_batch()
        if self._read >= len(self._sampler):
            if not self.loader:
                self._sampler.end_epoch(self)
            raise StopIteration
        self._read += 1
        if not self.loader:
            self.give()
        return self._sampler.share(self._read - 1, self._order)

    def next_batch(self) -> None:
        """The script is done with the batch that it has got, and wants the next one."""
        sampler = self._sampler
        if sampler.is_stale(self):
            raise UsageError(
                "this iteration over the ElasticSampler began before a checkpoint was loaded, or before another "
                "iteration; make it after pyrannc.elastic(..), and one at a time"
            )
        if self.given == self._first + 1 and self.unused:
            raise UsageError(_READS_AHEAD)
        if self.given > sampler.position:
            sampler.position = self.given  # also if the script has left it out
            sampler.between()

    @property
    def unused(self) -> bool:
        """Whether the model was not called since the script got its last batch."""
        return self._sampler.calls is not None and self._sampler.calls() == self._calls

    def give(self) -> None:
        """The script gets the next batch."""
        if self._sampler.calls is not None:
            self._calls = self._sampler.calls()
        self._sampler.begin_batch(self.given)
        self.given += 1


_reading = False
"""Whether a DataLoader reads what is no iteration over an ElasticSampler, but may have one inside."""


def _next_index(original: Callable[[Any], Any], iterator: Any) -> Any:
    """Read the samples of a batch for a DataLoader, which need not give it to the script at once."""
    global _reading
    if isinstance(iterator._sampler_iter, Shares):
        iterator._sampler_iter.loader = True
        return original(iterator)
    _reading = True
    try:
        return original(iterator)
    finally:
        _reading = False


def _next_batch(original: Callable[[Any], Any], iterator: Any) -> Any:
    """Get the next batch of a DataLoader, when its last one was trained with."""
    shares = getattr(iterator, "_sampler_iter", None)
    if not isinstance(shares, Shares):
        return original(iterator)
    shares.loader = True
    shares.next_batch()
    try:
        batch = original(iterator)
    except StopIteration:
        shares._sampler.end_epoch(shares)
        raise
    except Exception:  # of a sample; the loader goes on with the next batch
        shares.give()
        raise
    shares.give()
    return batch


def _nothing() -> None:
    pass


def _check(sampler: ElasticSampler) -> None:
    if sampler.length < 1:
        raise UsageError("the dataset of an ElasticSampler has no samples")
    if sampler.batch_size < sampler.ranks:
        raise UsageError(
            f"a global batch of {sampler.batch_size} rows for {sampler.ranks} ranks; each needs one. Take a larger "
            f"batch_size, or at most {sampler.batch_size} ranks (--max-np)"
        )
    if not len(sampler):
        raise UsageError(
            f"a dataset of {sampler.length} samples has no whole batch of {sampler.batch_size}; use drop_last=False or "
            "a smaller batch_size"
        )
    if sampler.most_ranks < sampler.ranks:
        raise UsageError(
            f"the last batch of an epoch has {sampler.most_ranks} of {sampler.length} rows, fewer than {sampler.ranks} "
            "ranks; use drop_last=True, another batch_size, or fewer ranks (--max-np)"
        )
