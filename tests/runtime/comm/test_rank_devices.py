"""Which rank is in which slot, and which ranks may not be together."""

from __future__ import annotations

import msgspec
import pytest

from rannd.errors import LaunchError
from rannd.plan.deployment import Slot
from rannd.runtime.comm.rank_devices import RankDevice, slots_of

CPU = RankDevice("here", "boot/here", "cpu", 0, "", "gloo")
GPU = RankDevice("here", "boot/here", "cuda", 0, "GPU-0", "nccl")


def of(rank: RankDevice, **fields: object) -> RankDevice:
    return msgspec.structs.replace(rank, **fields)


def test_slots_are_nodes_and_devices() -> None:
    ranks = [of(GPU, index=1, identity="b"), of(GPU, node="boot/there", identity="c"), of(GPU, identity="a")]
    assert slots_of(ranks, shared=False) == [Slot(0, 1), Slot(1, 0), Slot(0, 0)]
    assert slots_of([of(CPU, index=2), of(CPU, index=0)], shared=False) == [Slot(0, 2), Slot(0, 0)]


def test_ranks_that_see_one_device_each_are_counted() -> None:
    """Slurm's --gpus-per-task: the index is 0 everywhere, the UUID tells devices apart."""
    ranks = [of(GPU, identity=name) for name in ("GPU-b", "GPU-a", "MIG-1", "MIG-2")]
    assert slots_of(ranks, shared=False) == [Slot(0, 0), Slot(0, 1), Slot(0, 2), Slot(0, 3)]
    ranks = [of(GPU, node=f"boot/{node}", identity=name) for node, name in ((0, "a"), (1, "a"), (0, "b"), (1, "b"))]
    assert slots_of(ranks, shared=False) == [Slot(0, 0), Slot(1, 0), Slot(0, 1), Slot(1, 1)]


def test_a_device_of_two_ranks_is_an_error_unless_they_may_share() -> None:
    ranks = [of(GPU, index=0), of(GPU, index=1, identity="GPU-1"), of(GPU, index=1, identity="GPU-1")]
    with pytest.raises(LaunchError, match=r"ranks 1 and 2 on here share a device \(GPU-1\).*transport=staged"):
        slots_of(ranks, shared=False)
    assert slots_of(ranks, shared=True) == [Slot(0, 0), Slot(0, 1), Slot(0, 2)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([CPU, GPU], r"different kinds of devices \(cpu, cuda\); set device= to the same"),
        ([GPU, of(GPU, transport="staged")], r"different kinds of transports \(nccl, staged\); set transport= to"),
    ],
)
def test_ranks_of_different_kinds_are_an_error(ranks: list[RankDevice], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        slots_of(ranks, shared=False)
