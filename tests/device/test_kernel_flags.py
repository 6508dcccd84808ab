"""Each setting that chooses kernels is seen, however it was set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rannd.device.kernel_flags import kernel_flags, matmul_precisions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
cuda: Any = torch.backends.cuda
cudnn: Any = torch.backends.cudnn
mkldnn: Any = torch.backends.mkldnn


def attribute(holder: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def change() -> Iterator[None]:
        before = getattr(holder, name)
        assert before != value
        setattr(holder, name, value)
        try:
            yield
        finally:
            setattr(holder, name, before)

    return change


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def high_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        cuda.matmul.fp32_precision = mkldnn.matmul.fp32_precision = "none"


@contextlib.contextmanager
def old_tf32() -> Iterator[None]:
    cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        cuda.matmul.allow_tf32 = False
        cuda.matmul.fp32_precision = "none"


BOTH = {"deterministic": deterministic, "precision": high_precision}
ON_CUDA = {
    **BOTH,
    "allow_tf32": old_tf32,
    "fp32_precision": attribute(cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": attribute(cudnn.conv, "fp32_precision", "ieee"),
    "fp16": attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16": attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "accumulation": attribute(cuda.matmul, "allow_fp16_accumulation", True),
    "benchmark": attribute(cudnn, "benchmark", True),
    "cudnn deterministic": attribute(cudnn, "deterministic", True),
    "cudnn": attribute(cudnn, "enabled", False),
    "attention": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "order": lambda: sdpa_kernel([*map(SDPBackend, (3, 2, 1, 0))], set_priority=True),
}
ON_CPU = {
    **BOTH,
    "mkldnn": attribute(mkldnn, "deterministic", True),
    "fp32_precision": attribute(mkldnn.matmul, "fp32_precision", "bf16"),
    "convolutions": attribute(mkldnn.conv, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize(
    ("device", "change"),
    [
        *(pytest.param(CUDA, change, id=f"cuda, {name}") for name, change in ON_CUDA.items()),
        *(pytest.param(CPU, change, id=f"cpu, {name}") for name, change in ON_CPU.items()),
    ],
)
def test_a_change_is_seen(device: torch.device, change: Callable[[], AbstractContextManager[None]]) -> None:
    before = kernel_flags(device)
    with change():
        assert kernel_flags(device) != before
    assert kernel_flags(device) == before


def test_settings_of_another_device_do_not_count() -> None:
    before = kernel_flags(CPU)
    with ON_CUDA["benchmark"](), ON_CUDA["attention"](), ON_CUDA["fp32_precision"]():
        assert kernel_flags(CPU) == before


def test_both_ways_to_set_a_precision_can_be_mixed() -> None:
    with ON_CUDA["fp32_precision"](), ON_CUDA["convolutions"]():
        with pytest.raises(RuntimeError, match="mix"):
            torch.get_float32_matmul_precision()
        assert matmul_precisions()[0] == kernel_flags(CUDA)["fp32 matmul"] == "tf32"
        assert kernel_flags(CUDA)["fp32 conv"] == "ieee"
