"""Gradients times a factor that is on the device: rounded as with a number of Python's."""

from __future__ import annotations

import pytest
import torch

from rannd.runtime.gradients.scaling import scale_, scaled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 0.1, 65536.0, 0.0, -2.0])
def test_a_factor_on_the_device_rounds_as_a_number(factor: float) -> None:
    torch.manual_seed(1)
    given = [torch.randn(shape, dtype=dtype) for dtype in DTYPES for shape in ((), (7,), (3, 1, 5))]
    expected = [gradient * factor for gradient in given]
    found = [gradient.clone() for gradient in given]
    scale_(found, torch.tensor(factor, dtype=torch.float64))
    for gradient, each, want in zip(given, found, expected, strict=True):
        assert each.dtype == want.dtype
        assert each.shape == want.shape
        assert torch.equal(each, want)
        before = gradient.clone()
        assert torch.equal(scaled(gradient, torch.tensor(factor, dtype=torch.float64)), want)
        assert torch.equal(gradient, before)


def test_half_precision_does_not_round_the_factor() -> None:
    gradient = torch.full((4,), 3.0, dtype=torch.bfloat16)
    rounded = gradient * torch.tensor(1.001, dtype=torch.bfloat16)
    scale_([gradient], torch.tensor(85.35, dtype=torch.float64))
    assert gradient[0] == torch.tensor(3 * 85.35, dtype=torch.bfloat16)
    assert rounded[0] == 3.0


def test_sparse_gradients() -> None:
    sparse = torch.eye(3).to_sparse()
    scale_([sparse], torch.tensor(0.25, dtype=torch.float64))
    assert torch.equal(sparse.to_dense(), torch.eye(3) / 4)


def test_nan_and_infinity() -> None:
    gradients = [torch.ones(2), torch.ones(2, dtype=torch.float16)]
    scale_(gradients, torch.tensor(float("nan"), dtype=torch.float64))
    assert all(each.isnan().all() for each in gradients)


@pytest.mark.gpu
def test_gradients_of_several_devices() -> None:
    gradients = [torch.ones(2), torch.ones(2, device="cuda"), torch.ones(2, device="cuda", dtype=torch.bfloat16)]
    scale_(gradients, torch.tensor(0.5, dtype=torch.float64, device="cuda"))
    assert [each.sum().item() for each in gradients] == [1.0, 1.0, 1.0]
