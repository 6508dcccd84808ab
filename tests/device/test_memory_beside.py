"""Memory beside tensors, on a device that is not there."""

from __future__ import annotations

import pytest
import torch

from rannd.device import memory_beside

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def test_what_the_allocator_does_not_hold_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 8 * GIB)
    assert memory_beside.bytes_beside(CUDA) == 2 * GIB
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 11 * GIB)
    assert memory_beside.bytes_beside(CUDA) == 0, "the numbers are not of one moment"
    assert memory_beside.bytes_beside(CPU) == 0


def test_products_are_refused_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert not memory_beside.refuses_products()
    torch.use_deterministic_algorithms(True)
    try:
        assert memory_beside.refuses_products()
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        assert not memory_beside.refuses_products()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_libraries_keep_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries run on the CPU here; the allocator is told to keep 32 and 8 MiB for them."""
    used = iter([100, 100 + (32 << 20), 200, 200, 300, 300 + (8 << 20)])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: next(used))
    monkeypatch.setattr(memory_beside, "_kept", {})
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert memory_beside.load_libraries(CPU, convolutions=False) == 32 << 20
    assert memory_beside.load_libraries(CPU, convolutions=False) == 32 << 20
    assert memory_beside.load_libraries(CPU, convolutions=True) == 40 << 20
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_a_gpu_has_memory_beside_tensors() -> None:
    kept = memory_beside.load_libraries(CUDA, convolutions=True)
    assert 0 < kept < GIB
    assert memory_beside.load_libraries(CUDA, convolutions=True) == kept
    beside = memory_beside.bytes_beside(CUDA)
    assert beside > 100 << 20, "a context alone is larger"
    tensor = torch.zeros(GIB, dtype=torch.uint8, device=CUDA)
    assert abs(memory_beside.bytes_beside(CUDA) - beside) < 64 << 20
    del tensor
