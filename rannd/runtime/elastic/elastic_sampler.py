"""`pyrannc.ElasticSampler`: batches whose samples do not depend on the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler, dataloader

from rannd import patches
from rannd.errors import UsageError
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


class ElasticSampler(Sampler[list[int]]):
    """Gives each rank its share of global batches, for ``DataLoader(dataset, batch_sampler=sampler)``.

    torchdata's StatefulDataLoader takes it in the same way; its own state is not needed then.

    Which samples are in a global batch depends on `seed` and the epoch alone. Rank r of R gets rows r B / R to
    (r + 1) B / R of a batch of B, so that shares differ by one row at most. An epoch that is broken off goes on where
    it was, on any number of ranks: no sample is left out or given twice. An epoch that is over is followed by the next
    one, also without `set_epoch`.

    With shares of different sizes, a loss that the model computes as a mean is the mean over the global batch. For a
    loss that the script computes on each rank, multiply by `weight`.

    Args:
        dataset: Anything with a length.
        batch_size: Rows of a global batch, of all ranks together.
        shuffle: Give the samples in a random order, another one in each epoch.
        seed: Of that order.
        drop_last: Leave out the last batch of an epoch if it has fewer rows.
        rank, ranks: This rank, and how many there are; None: those of the job.

    Raises:
        UsageError: A batch has fewer rows than there are ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        place = find_place(os.environ)
        self.rank = place.rank if rank is None else rank
        self.ranks = place.size if ranks is None else ranks
        self.length, self.batch_size, self.shuffle = len(dataset), batch_size, shuffle
        self.seed, self.drop_last = seed, drop_last
        self.epoch = 0
        """The present epoch."""
        self.position = 0
        """Number of global batches of this epoch that the script has trained with."""
        self.weight = 1.0
        """Factor of this rank's mean loss with which the mean over ranks is that over the rows of the global batch that
        the script got last."""
        self._finished = False
        """Whether this process has come to the end of the epoch."""
        self.between: Callable[[], None] = _nothing
        """Called when the script is done with a batch, before it gets the next one."""
        _check(self)
        patches.install(_LOADER.around(_next_batch), _AHEAD.around(_next_index))

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; nothing changes if it is the present one, which goes on."""
        if epoch != self.epoch or self._finished:
            self.epoch, self.position, self._finished = epoch, 0, False

    def __iter__(self) -> Iterator[list[int]]:
        if self._finished:
            self.set_epoch(self.epoch + 1)
        return Shares(self)

    def share(self, number: int, order: torch.Tensor) -> list[int]:
        """Return this rank's samples of a global batch; `order`: of the epoch."""
        rows = order[number * self.batch_size : (number + 1) * self.batch_size]
        first, end = (len(rows) * rank // self.ranks for rank in (self.rank, self.rank + 1))
        return [int(row) for row in rows[first:end]]

    def order(self) -> torch.Tensor:
        """Return the samples of the present epoch in their order."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator)

    def rows(self, number: int) -> int:
        """Return the rows of a global batch."""
        return min(self.batch_size, self.length - number * self.batch_size)

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
        self.epoch, self.position, self._finished = state["epoch"], state["position"], False


class Shares(Iterator[list[int]]):
    """This rank's shares of the batches that are left of an epoch.

    Where a DataLoader reads them, in advance perhaps, `handed` counts the batches that the script has got; else those
    that were read.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._order = sampler.order()
        self._read = self.handed = sampler.position
        self.loader = False
        """Whether a DataLoader reads them."""

    def __next__(self) -> list[int]:
        number = self._read
        if not self.loader and number > self._sampler.position:
            self.after_batch(number)
        if number >= len(self._sampler):
            if not self.loader:
                self.end()
            raise StopIteration
        self._read += 1
        if not self.loader:
            self.begin_batch(number)
        return self._sampler.share(number, self._order)

    def after_batch(self, done: int) -> None:
        """The script is done with so many batches of the epoch."""
        self._sampler.position = done
        self._sampler.between()

    def begin_batch(self, number: int) -> None:
        """The script gets a batch."""
        sampler, rows = self._sampler, self._sampler.rows(number)
        first, end = (rows * rank // sampler.ranks for rank in (sampler.rank, sampler.rank + 1))
        sampler.weight = sampler.ranks * (end - first) / rows

    def end(self) -> None:
        """The script has got all batches."""
        self._sampler._finished = True


def _next_index(original: Callable[[Any], Any], iterator: Any) -> Any:
    """Read the samples of a batch for a DataLoader, which need not give it to the script at once."""
    if isinstance(iterator._sampler_iter, Shares):
        iterator._sampler_iter.loader = True
    return original(iterator)


def _next_batch(original: Callable[[Any], Any], iterator: Any) -> Any:
    """Get the next batch of a DataLoader, when its last one was trained with."""
    shares = getattr(iterator, "_sampler_iter", None)
    if not isinstance(shares, Shares):
        return original(iterator)
    if shares.handed > shares._sampler.position:
        shares.after_batch(shares.handed)
    try:
        batch = original(iterator)
    except StopIteration:
        shares.end()
        raise
    shares.begin_batch(shares.handed)
    shares.handed += 1
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
    rest = sampler.length % sampler.batch_size
    if not sampler.drop_last and 0 < rest < sampler.ranks:
        raise UsageError(
            f"the last batch of an epoch has {rest} of {sampler.length} rows, fewer than {sampler.ranks} ranks; use "
            "drop_last=True, another batch_size, or fewer ranks (--max-np)"
        )
