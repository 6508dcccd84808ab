"""Links between real ranks."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rannd.profile import links
from rannd.profile.costs import LinkCost
from rannd.profile.links import LARGE, copy_speed, fit, measure_links, sizes_up_to


def _through_the_host(rank: int, folder: str) -> None:
    """As ranks that share a GPU do: gloo cannot read its memory."""
    links.is_accelerator, links.FASTER = (lambda device: True), 1
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
    assert cost.p2p_us(2 * LARGE) > cost.p2p_us(LARGE) > 0
    assert cost.allreduce_us(LARGE, 4) > cost.allreduce_us(LARGE, 2) > 0
    assert cost.p2p_us(0) == cost.allreduce_us(LARGE, 1) == 0


@pytest.mark.parametrize("run", [_rank, _through_the_host])
def test_two_ranks_find_the_same(run: Callable[[int, str], None], tmp_path: Path) -> None:
    mp.spawn(run, (str(tmp_path),), nprocs=2)
    costs = [msgspec.msgpack.decode((tmp_path / f"cost{rank}").read_bytes(), type=LinkCost) for rank in range(2)]
    assert costs[0] == costs[1]
    _plausible(costs[0])


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
    ],
)
def test_a_stored_link_that_no_link_can_be_is_refused(stored: list[float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=LinkCost)
    there = LinkCost(0.0, 1.0, 0.0, 1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(there), type=LinkCost) == there
