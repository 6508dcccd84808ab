"""Whether ranks train on the same samples is seen by the bytes of their mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from rannd.runtime.calls.equal_batches import MOST_ELEMENTS, tell_equal_batches
from rannd.runtime.comm.world import World


@dataclass
class Two:
    """What `tell_equal_batches` asks of two ranks, of which this is the first."""

    others: Callable[[bytes], bytes]
    rank: int = 0
    size: int = 2

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.others(data)]


def digest(*tensors: torch.Tensor) -> bytes:
    found: list[bytes] = []
    world = Two(lambda data: (found.append(data), b"")[1])
    tell_equal_batches(cast(World, world), tensors, 4)
    return found[0]


def test_equal_mini_batches_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rannd")
    world = cast(World, Two(lambda data: data))
    tell_equal_batches(world, [torch.randn(4, 3)], 4)
    assert "All ranks have passed the same mini-batch" in caplog.text
    assert "2 ranks train no faster than one" in caplog.text


@pytest.mark.parametrize(
    ("others", "rows", "rank"), [(lambda data: b"other", 4, 0), (lambda data: data, 1, 0), (lambda data: data, 4, 1)]
)
def test_others_are_not(
    others: Callable[[bytes], bytes], rows: int, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rannd")
    tell_equal_batches(cast(World, Two(others, rank)), [torch.randn(4, 3)], rows)
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64])
def test_what_a_digest_is_of(dtype: torch.dtype) -> None:
    values = torch.zeros(4, MOST_ELEMENTS).to(dtype)
    other = values.clone()
    other[0, 5] = 1
    assert digest(values) == digest(values.clone()) != digest(other)
    assert digest(values) != digest(values[:3])
    assert digest(values.t()) != digest(values)
    assert digest(values, other) != digest(other, values)


def test_tensors_without_bytes_of_their_own() -> None:
    assert digest(torch.zeros(4, 3, device="meta")) == digest(torch.zeros(4, 3, device="meta"))
    assert digest(torch.eye(3).to_sparse())
    assert digest(torch.zeros(0, 3), torch.tensor(5))
