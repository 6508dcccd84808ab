"""Links between real ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from thinned import first

from rannd.plan.topology import p2p_us, reduction_us
from rannd.profile import links
from rannd.profile.costs import LinkCost
from rannd.profile.links import LARGE, copy_speed, fit, measure_links, sizes_up_to


def _through_the_host(rank: int, folder: str) -> None:
    """As ranks that share a GPU do: gloo cannot read its memory."""
    links.is_accelerator, links.FASTER = (lambda device: True), 1
    _rank(rank, folder)


def _on_one_processor(rank: int, folder: str) -> None:
    """The threads that copy messages have no other one."""
    there = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {there[rank % len(there)]})
    _rank(rank, folder)


def _one_of_them_on_one_processor(rank: int, folder: str) -> None:
    if rank == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    _rank(rank, folder)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(minutes=2))
    group = dist.group.WORLD
    assert group is not None
    cost = measure_links(group, torch.device("cpu"))
    Path(f"{folder}/cost{rank}").write_bytes(msgspec.msgpack.encode(cost))
    dist.destroy_process_group()


def _plausible(cost: LinkCost) -> None:
    assert cost.p2p_latency_us >= 0
    assert cost.allreduce_latency_us >= 0
    assert 0 < cost.p2p_bytes_per_us < 1e9
    assert 0 < cost.allreduce_bytes_per_us < 1e9
    longer, shorter = (cost.p2p_us(nbytes) + 2 * nbytes * cost.p2p_host_us for nbytes in (2 * LARGE, LARGE))
    assert longer > shorter > 0
    assert cost.allreduce_us(LARGE, 4) > cost.allreduce_us(LARGE, 2) > 0
    assert cost.p2p_us(0) == cost.allreduce_us(LARGE, 1) == 0


def _cost(run: Callable[[int, str], None], folder: Path) -> LinkCost:
    mp.spawn(run, (str(folder),), nprocs=2)
    costs = [msgspec.msgpack.decode((folder / f"cost{rank}").read_bytes(), type=LinkCost) for rank in range(2)]
    assert costs[0] == costs[1]
    _plausible(costs[0])
    return costs[0]


@pytest.mark.parametrize("run", first(1, [_rank, _through_the_host, _one_of_them_on_one_processor]))
def test_two_ranks_find_the_same(run: Callable[[int, str], None], tmp_path: Path) -> None:
    cost = _cost(run, tmp_path)
    several = run is _through_the_host or len(os.sched_getaffinity(0)) > 1
    assert not several or (cost.p2p_host_us, cost.allreduce_host_us) == (0.0, 0.0)


@pytest.mark.long
def test_a_rank_with_one_processor_computes_nothing_while_it_copies_messages(tmp_path: Path) -> None:
    cost = _cost(_on_one_processor, tmp_path)
    assert 0.05 < cost.p2p_host_us * cost.p2p_bytes_per_us <= 1.0
    assert cost.allreduce_host_us * cost.allreduce_bytes_per_us == pytest.approx(1.0)


def test_what_processors_do_for_messages_is_part_of_their_time() -> None:
    link = LinkCost(10.0, 100.0, 20.0, 200.0, 0.003, 0.002)
    assert link.p2p_us(1000) == pytest.approx(10.0 + 1000 / 100 - 2 * 1000 * 0.003)
    for ranks in (1, 2, 4):
        beside, host = link.reduction_us(1000, ranks)
        assert beside + host == pytest.approx(link.allreduce_us(1000, ranks))
        assert host == pytest.approx(2 * (ranks - 1) / ranks * 1000 * 0.002)
    wrong = msgspec.structs.replace(link, p2p_host_us=1.0, allreduce_host_us=1.0)
    assert (wrong.p2p_us(1000), wrong.reduction_us(1000, 2)) == (10.0, (0.0, link.allreduce_us(1000, 2)))
    sizes, counts = np.array([0.0, 1.0, 1000.0]), np.array([[1], [2], [4]])
    for each in (link, wrong):
        assert p2p_us(each, sizes).tolist() == pytest.approx([each.p2p_us(size) for size in sizes])
        for table, number in zip(reduction_us(each, sizes, counts), range(2), strict=True):
            told = [[each.reduction_us(size, count)[number] for size in sizes] for (count,) in counts]
            assert table == pytest.approx(np.array(told))


def test_copies_stand_for_links_that_are_not_there() -> None:
    _plausible(copy_speed(torch.device("cpu")))


SIZES = sizes_up_to(LARGE)


def _times(latency: float, bandwidth: float) -> list[float]:
    return [latency + size / bandwidth for size in SIZES]


def test_three_times_give_latency_and_bandwidth() -> None:
    assert SIZES == (4096, LARGE // 4, LARGE)
    assert fit(SIZES, _times(10, 500)) == pytest.approx((10, 500))


@pytest.mark.parametrize("wrong", [2.0, 10.0])
@pytest.mark.parametrize("place", [1, 2])
def test_a_disturbed_large_message_is_left_out(place: int, wrong: float) -> None:
    times = _times(10, 500)
    times[place] *= wrong
    latency, bandwidth = fit(SIZES, times)
    # A message that seems to take longer than a larger one is known to be wrong, but hides how long it took.
    assert bandwidth == pytest.approx(500, rel=0.35)
    assert latency == pytest.approx(10, rel=0.35)


def test_a_disturbed_small_message_leaves_the_bandwidth() -> None:
    first, *others = _times(10, 500)
    latency, bandwidth = fit(SIZES, [first * 20, *others])
    assert bandwidth == pytest.approx(500, rel=0.1)
    assert latency <= first * 20


def test_times_that_no_link_has_give_one_that_can_be() -> None:
    for times in ([30.0, 20.0, 10.0], [0.0, 0.0, 0.0], [1.0, 1e9, 1.0]):
        latency, bandwidth = fit(SIZES, times)
        assert latency >= 0
        assert bandwidth > 0


@pytest.mark.parametrize(
    "stored",
    [
        [1.0, 0.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, -1.0],
        [-1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1e290, 1.0],
        [1.0, 1e-290, 1.0, 1.0],
        [float("nan")] * 4,
        [float("inf")] * 4,
        [1.0, 1.0, 1.0, 1.0, -1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 0.0, float("nan")],
    ],
)
def test_a_stored_link_that_no_link_can_be_is_refused(stored: list[float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=LinkCost)
    there = LinkCost(0.0, 1.0, 0.0, 1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(there), type=LinkCost) == there
