"""Batches that do not depend on the number of ranks, and epochs that go on where they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from rannd.errors import UsageError
from rannd.ranks import rank_notes, row_shares
from rannd.runtime.elastic import elastic_sampler
from rannd.runtime.elastic.elastic_sampler import ElasticSampler

DATA = list(range(100, 150))
LOADERS = [
    DataLoader,
    pytest.param(StatefulDataLoader, marks=pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")),
]


def _samplers(ranks: int, batch: int = 12, **options: Any) -> list[ElasticSampler]:
    return [ElasticSampler(DATA, batch, rank=rank, ranks=ranks, drop_last=True, **options) for rank in range(ranks)]


def _batches(samplers: Iterable[ElasticSampler]) -> Iterator[list[int]]:
    """Global batches, in the order of the ranks."""
    for shares in zip(*samplers, strict=True):
        yield [sample for share in shares for sample in share]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 5, 12])
def test_the_samples_of_a_batch_do_not_depend_on_the_number_of_ranks(ranks: int, shuffle: bool) -> None:
    for epoch in range(3):
        alone, several = (_samplers(count, shuffle=shuffle) for count in (1, ranks))
        for each in (*alone, *several):
            each.set_epoch(epoch)
        assert list(_batches(several)) == list(_batches(alone))


def test_each_sample_is_given_once_per_epoch_and_shares_are_even() -> None:
    samplers = [ElasticSampler(DATA, 12, rank=rank, ranks=2) for rank in range(2)]
    found = list(_batches(samplers))
    assert [len(batch) for batch in found] == [12, 12, 12, 12, 2]
    assert sorted(chain(*found)) == list(range(50))
    sizes = {len(share) for sampler in _samplers(5) for share in sampler}
    assert sizes == {2, 3}


def test_epochs_differ_and_an_epoch_that_is_over_is_followed_by_the_next() -> None:
    (told,), (counted,) = _samplers(1), _samplers(1)
    epochs = []
    for epoch in range(3):
        told.set_epoch(epoch)
        epochs.append(list(told))
        assert list(counted) == epochs[-1], "without set_epoch"
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_seed_is_another_order() -> None:
    assert list(_samplers(1, seed=0)[0]) != list(_samplers(1, seed=1)[0])


@pytest.mark.parametrize("seed", range(20))
def test_jobs_that_are_stopped_anywhere_see_each_sample_once(seed: int) -> None:
    """Trainings of random lengths on random numbers of ranks, each of which takes up the state of the last one."""
    random = Random(seed)
    found: dict[int, list[list[int]]] = {}
    state: dict[str, Any] | None = None
    while True:
        samplers = _samplers(random.randint(1, 6), seed=seed)
        for each in samplers:
            if state is not None:
                each.load_state_dict(copy.deepcopy(state))
        todo = random.randint(0, 6)
        for epoch in range(samplers[0].epoch, 3):
            for each in samplers:
                each.set_epoch(epoch)
            for batch in _batches(samplers):
                if todo == 0:
                    break
                todo -= 1
                found.setdefault(epoch, []).append(batch)
            else:
                continue
            break
        else:
            break
        assert len({str(each.state_dict()) for each in samplers}) == 1
        state = samplers[0].state_dict()
    (alone,) = _samplers(1, seed=seed)
    for epoch in range(3):
        alone.set_epoch(epoch)
        assert found[epoch] == list(alone)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_reads_ahead_counts_what_the_script_was_given(
    workers: int, persistent: bool, kind: Callable[..., Any]
) -> None:
    (sampler,) = _samplers(1, shuffle=False)
    positions: list[int] = []
    sampler.between = lambda: positions.append(sampler.position)
    options = {"persistent_workers": True} if persistent and workers else {}
    loader = kind(
        torch.arange(50), batch_sampler=sampler, num_workers=workers, prefetch_factor=2 if workers else None, **options
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        positions.clear()
        for number, batch in enumerate(loader):
            assert batch.tolist() == list(range(12 * number, 12 * number + 12))
            assert sampler.position == number, "this batch is not done"
        assert positions == [1, 2, 3, 4]
        assert sampler.position == 4
    del loader


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle(workers: int, kind: Callable[..., Any]) -> None:
    sampler, other = _samplers(1)[0], _samplers(1)[0]
    loader, going_on = (kind(torch.arange(50), batch_sampler=each, num_workers=workers) for each in (sampler, other))
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    other.load_state_dict(sampler.state_dict())
    assert other.position == 2, "the third batch was given, and is not done"
    rest = [batch.tolist() for batch in going_on]
    assert first[:2] + rest == list(_samplers(1)[0])


def test_an_epoch_that_was_over_gives_nothing_and_then_the_next() -> None:
    (sampler,), (other,) = _samplers(1), _samplers(1)
    assert len(list(sampler)) == 4
    other.load_state_dict(sampler.state_dict())
    assert other.epoch == 0
    assert list(other) == [], "what follows the epoch in the script is still to be done"
    sampler.set_epoch(1)
    assert list(other) == list(sampler)


def test_a_script_that_begins_again_after_a_restart_is_told() -> None:
    (sampler,), (other,) = _samplers(1), _samplers(1)
    sampler.set_epoch(2)
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(UsageError, match=r"set_epoch\(0\), but the training goes on in epoch 2"):
        other.set_epoch(0)
    other.set_epoch(2)
    list(other)
    other.set_epoch(0)  # a script may do so later


def test_what_is_broken_off_goes_on_behind_the_last_batch() -> None:
    (sampler,) = _samplers(1)
    first = []
    for batch in sampler:
        first.append(batch)
        if len(first) == 2:
            break
    assert [*first, *sampler] == list(_samplers(1)[0])


def test_an_iteration_from_before_a_restart_is_refused() -> None:
    (sampler,), (other,) = _samplers(1), _samplers(1)
    loader = iter(DataLoader(torch.arange(50), batch_sampler=sampler))
    next(loader)
    sampler.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="began before a checkpoint was loaded"):
        next(loader)


def test_what_reads_ahead_is_refused() -> None:
    (sampler,) = _samplers(1)
    calls = [0]
    sampler.calls = lambda: calls[0]
    loader = iter(DataLoader(torch.arange(50), batch_sampler=sampler))
    next(loader)
    with pytest.raises(UsageError, match="two batches of the ElasticSampler were read before the model was called"):
        next(loader)
    sampler.load_state_dict(sampler.state_dict())
    for _ in DataLoader(torch.arange(50), batch_sampler=sampler):
        calls[0] += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_inside_of_another_is_refused(workers: int) -> None:
    (sampler,) = _samplers(1)

    class Around:
        def __iter__(self) -> Iterator[list[int]]:
            yield from sampler

    with pytest.raises(UsageError, match="inside of another batch sampler"):
        next(iter(DataLoader(torch.arange(50), batch_sampler=Around(), num_workers=workers)))  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_a_batch_all_the_same(workers: int) -> None:
    class Broken(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            if index == 13:
                raise ValueError("13")
            return index

        def __len__(self) -> int:
            return 50

    (sampler,) = _samplers(1, shuffle=False)
    batches = iter(DataLoader(Broken(), batch_sampler=sampler, num_workers=workers))
    next(batches)
    with pytest.raises(ValueError, match="13"):
        next(batches)
    next(batches)
    assert sampler.position == 2


@pytest.mark.parametrize("ranks", [1, 2, 5, 7])
def test_weights_make_the_mean_over_ranks_that_over_rows(ranks: int) -> None:
    values = torch.randn(50, dtype=torch.float64)
    samplers = _samplers(ranks, batch=10 if ranks < 7 else 8)
    for shares in zip(*samplers, strict=True):
        means = [values[share].mean() * sampler.weight for share, sampler in zip(shares, samplers, strict=True)]
        torch.testing.assert_close(torch.stack(means).mean(), values[[*chain(*shares)]].mean())


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="a global batch of 12 rows for 13 ranks"):
        _samplers(13)
    with pytest.raises(UsageError, match="the last batch of an epoch has 2 of 50 rows, fewer than 4 ranks"):
        ElasticSampler(DATA, 12, rank=0, ranks=4)
    with pytest.raises(UsageError, match="no samples"):
        ElasticSampler([], 12, rank=0, ranks=4)
    with pytest.raises(UsageError, match="a dataset of 50 samples has no whole batch of 60"):
        ElasticSampler(DATA, 60, rank=0, ranks=4, drop_last=True)
    assert [ElasticSampler(DATA, batch, rank=0, ranks=1).most_ranks for batch in (10, 12, 49)] == [10, 2, 1]


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}, {"batch_size": 10}])
def test_another_samplers_state_is_refused(change: dict[str, Any]) -> None:
    state = _samplers(1)[0].state_dict()
    options = {"batch_size": 12, **change}
    other = ElasticSampler(DATA, options.pop("batch_size"), rank=0, ranks=1, drop_last=True, **options)
    with pytest.raises(UsageError, match=f"has {next(iter(change))} = "):
        other.load_state_dict(state)


def test_ranks_of_slow_hosts_get_fewer_rows_if_the_script_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_notes, "heard", lambda: True)
    monkeypatch.setenv(row_shares.VARIABLE, "1:300:100,100,300")
    samplers = []
    for rank in range(3):
        monkeypatch.setattr(
            elastic_sampler, "find_place", lambda environ, rank=rank: SimpleNamespace(rank=rank, size=3)
        )
        samplers.append(ElasticSampler(range(27), 12, shuffle=False, balance=True))
    batches = list(zip(*samplers, strict=True))
    assert [[len(share) for share in batch] for batch in batches] == [[5, 5, 2], [5, 5, 2], [1, 1, 1]]
    assert [list(chain.from_iterable(batch)) for batch in batches] == [
        list(range(12)),
        list(range(12, 24)),
        [24, 25, 26],
    ]
    for sampler in samplers:
        sampler.begin_batch(0)
    assert [sampler.weight for sampler in samplers] == pytest.approx([1.25, 1.25, 0.5])
    assert samplers[0].balanced == (100, 100, 300)
    assert ElasticSampler(range(27), 12).balanced is None, "nobody has asked for it"
    assert ElasticSampler(range(27), 12, rank=0, ranks=3, balance=True).balanced is None, "ranks of the script's own"
    monkeypatch.setattr(rank_notes, "heard", lambda: False)
    assert ElasticSampler(range(27), 12, balance=True).balanced is None, "a process that a rank has started"
