"""NCCL with the one rank that a machine with one GPU allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rannd.runtime.transport.choice import make_transport, transport_name
from rannd.runtime.transport.nccl_transport import NcclTransport

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture
def alone() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_reduces(alone: None) -> None:
    group = dist.new_group([0], backend="nccl")
    values = torch.arange(5.0, device=CUDA)
    dist.all_reduce(values, group=group)
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_the_transport_of_one_rank_has_no_pairs(alone: None) -> None:
    assert transport_name("auto", CUDA) == "nccl"
    transport = make_transport("nccl", CUDA, 0, None, lambda backend, ranks: dist.new_group(ranks, backend=backend))
    assert isinstance(transport, NcclTransport)
    assert transport.open([]) == 0
    buffer = transport.empty(16)
    assert buffer.device == CUDA
    buffer.fill_(1)
    transport.give_back(buffer)
    torch.accelerator.synchronize(CUDA)
