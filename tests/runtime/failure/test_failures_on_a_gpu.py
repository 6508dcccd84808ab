"""Failures that only a GPU has: its memory, and backward in a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.runtime.failure import stack_dump
from rannd.runtime.failure.failure_report import is_broken

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


class _Greedy(torch.autograd.Function):
    """Takes more memory than any device has, for inputs above 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if float(x.detach().max()) > 1:
            torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Taking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Greedy.apply(x)


def test_memory_of_a_device_that_runs_out_is_named_with_the_plan() -> None:
    model = pyrannc.RaNNCModule(nn.Sequential(nn.Linear(4, 4), _Taking(), nn.Linear(4, 4)))
    x = torch.zeros(2, 4)
    model(x).sum().backward()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(100.0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(x + 1)
    notes = " ".join(caught.value.__notes__)
    assert "rannd: out of memory on cuda:0; requested: 65536.00 GiB" in notes
    assert "the plan estimated" in notes
    assert is_out_of_memory(caught.value)
    assert not is_broken(caught.value)


def test_a_tensor_that_is_larger_than_the_device_is_not_a_broken_connection() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(torch.accelerator.get_memory_info(CUDA)[1] + 1, dtype=torch.uint8, device=CUDA)
    assert is_out_of_memory(caught.value)
    assert not is_broken(caught.value)


def test_a_hang_in_the_thread_of_backward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd runs a device's backward in a thread of its own; the script's thread waits for that one."""
    monkeypatch.setenv("RANNC_INTERLEAVE_LOSS", "false")
    stuck, released = threading.Event(), threading.Event()
    threads: list[int] = []

    def stay_in_backward(gradient: Tensor) -> None:
        threads.append(threading.get_ident())
        stuck.set()
        released.wait()

    inner = nn.Linear(4, 4)
    inner.weight.register_hook(stay_in_backward)
    model = pyrannc.RaNNCModule(inner)
    found: list[Any] = []

    def watch() -> None:
        try:
            assert stuck.wait(120)
            where = model._session.world.watch.where
            found.extend([stack_dump.progress(where), stack_dump.progress(where), stack_dump.doing(where)])
            found.append(stack_dump.dump())
        finally:
            released.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    model(torch.randn(2, 4)).sum().backward()
    watcher.join()
    assert threads
    assert found[0] == found[1], "a thread that stays in a hook makes no progress"
    assert found[2] == "working", "what the hook does is not a wait for other ranks"
    assert "stay_in_backward" in found[3]
