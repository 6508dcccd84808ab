"""Gradients of parameters on their way: which difference is told, and that sums are let go once they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rannd.runtime.audit.differences import Comparisons, Differs
from rannd.runtime.audit.parameter_gradients import ParameterGradients

RANKS = 3
"""Replicas, each with one microbatch, whose gradient is its number + 1; their mean is 2."""


class Block:
    """A block of one stage that reads a weight."""

    def __init__(self, number: int) -> None:
        self.key = (0, number)
        self.segment = SimpleNamespace(part=SimpleNamespace(tensors=["w"]))

    def __str__(self) -> str:
        return f"block 0.{self.key[1]}"


def auditing(blocks: Sequence[Block], **wrong: Tensor) -> ParameterGradients:
    """Of records in which all is right but `wrong`, by kind, on rank 1."""
    kept = {"reduced": torch.full((2,), 2.0), "grad after": torch.full((2,), 2.0)}

    def ask(rank: int, kind: str, name: str) -> dict[str, Tensor]:
        values = {**kept, "local": torch.full((2,), rank + 1.0), **(wrong if rank == 1 else {})}
        return {"": values[kind]} if kind in values else {}

    world: Any = SimpleNamespace(rank_of_slot=list(range(RANKS)))
    dtypes = SimpleNamespace(reduced=torch.float32)
    parameters: Any = SimpleNamespace(
        tensors={"w": nn.Parameter(torch.zeros(2))},
        slots={"w": tuple(range(RANKS))},
        gradient_dtypes=lambda _: dtypes,
    )
    origins: Any = SimpleNamespace(facts=SimpleNamespace(averaged=RANKS, divided=1), factor=lambda _: 1.0)
    readers: Any = {"w": blocks}
    return ParameterGradients(
        world, parameters, origins, readers, ask, Comparisons(), half=False, unsure=(), is_unsure=lambda _: False
    )


def replayed(sums: ParameterGradients, block: Any, share: float = 1.0) -> int:
    """Replay the microbatches of all ranks in a block; returns the largest number of sums that were kept at once."""
    most = 0
    for rank in range(RANKS):
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.full((2,), (rank + 1.0) * share)
        given: Any = SimpleNamespace(tensors=[weight])
        assert sums.take(block, given, rank) == (rank + 1.0) * share
        assert weight.grad is None
        most = max(most, *(len(each) for each in sums._local.values()))
        sums.compare_local(block, rank, 0.0)
    sums.compare(block, range(RANKS), 0.0)
    return most


def test_one_rank_at_a_time_is_summed_up() -> None:
    block = Block(0)
    sums = auditing([block])
    assert replayed(sums, block) == 1
    assert not sums._local
    assert not sums._total
    assert sums._compared.count["gradients"] == 3 * RANKS


def test_a_weight_of_two_blocks_is_compared_in_the_earlier_one() -> None:
    blocks = [Block(0), Block(1)]
    sums = auditing(blocks)
    replayed(sums, blocks[1], share=0.25)
    assert not sums._compared.count["gradients"]
    replayed(sums, blocks[0], share=0.75)
    assert sums._compared.count["gradients"] == 3 * RANKS
    assert not sums._local


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("local", "the gradient of w before its reduction"),
        ("reduced", "the gradient of w after its reduction"),
        ("grad after", "the gradient that w was given"),
    ],
)
def test_the_place_of_a_difference_is_told(kind: str, told: str) -> None:
    block = Block(0)
    with pytest.raises(Differs, match=rf"{told} differs by up to .*, in block 0\.0, all pieces, rank 1"):
        replayed(auditing([block], **{kind: torch.full((2,), 5.0)}), block)
