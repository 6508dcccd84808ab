"""Links between real ranks."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rannd.profile.costs import LinkCost
from rannd.profile.links import LARGE, SMALL, _fit, copy_speed, measure_links


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


def test_two_ranks_find_the_same(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    costs = [msgspec.msgpack.decode((tmp_path / f"cost{rank}").read_bytes(), type=LinkCost) for rank in range(2)]
    assert costs[0] == costs[1]
    _plausible(costs[0])


def test_copies_stand_for_links_that_are_not_there() -> None:
    _plausible(copy_speed(torch.device("cpu")))


def test_two_times_give_latency_and_bandwidth() -> None:
    latency, bandwidth = _fit(10 + SMALL / 500, 10 + LARGE / 500, LARGE)
    assert abs(latency - 10) < 1e-6
    assert abs(bandwidth - 500) < 1e-6
    latency, bandwidth = _fit(30.0, 20.0, LARGE)  # noise
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
