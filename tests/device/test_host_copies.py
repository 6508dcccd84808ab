"""Tensors of a call that go to the device in one copy."""

from __future__ import annotations

import torch

from rannd.device.host_copies import ALIGNMENT, copied, to_device

CPU = torch.device("cpu")


def test_tensors_of_all_kinds_arrive_as_they_were() -> None:
    given = [
        torch.randn(3, 5),
        torch.tensor(7),
        torch.arange(5, dtype=torch.uint8),
        torch.empty(0, 4),
        torch.rand(2, 3) > 0.5,
        torch.randn(4, dtype=torch.complex128),
        torch.randn(2, 3, dtype=torch.bfloat16),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 1).expand(4, 5),
        torch.randn(3, 8, 2).permute(2, 0, 1)[:, :, 1:],
        torch.randn(3, requires_grad=True),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    there = copied(given, CPU, pinned=False)
    for before, after in zip(given, there, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
        assert after.stride() == before.detach().to(CPU, copy=True).stride()
    buffer = there[0].untyped_storage()
    together = [each for each in there if each.untyped_storage().data_ptr() == buffer.data_ptr()]
    assert len(together) == len(given), "what is copied alone, as a batch in channels_last, waits for the device"
    assert all(each.storage_offset() * each.itemsize % ALIGNMENT == 0 for each in together)


def test_the_script_may_overwrite_its_tensors() -> None:
    mine = torch.zeros(3)
    (there,) = copied([mine], CPU, pinned=False)
    mine.fill_(1.0)
    assert there.tolist() == [0.0, 0.0, 0.0]


def test_nothing_is_copied_where_it_is_already() -> None:
    mine = torch.zeros(3)
    assert to_device([mine], CPU)[0] is mine
    assert copied([], CPU, pinned=False) == []
    assert copied([torch.empty(0)], CPU, pinned=False)[0].shape == (0,)
