"""What counts as a difference, and how it is told."""

from __future__ import annotations

import pytest
import torch

from rannd.runtime.audit.differences import NO_NUMBER, Measure, largest_element

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.complex64, 1e-4)],
)
def test_a_difference_is_relative_to_the_largest_element(dtype: torch.dtype, relative: float) -> None:
    expected = torch.tensor([100.0, 1.0], dtype=dtype)
    near = torch.tensor([100.0, 1.0 + 50 * relative], dtype=dtype)
    far = torch.tensor([100.0, 1.0 + 300 * relative], dtype=dtype)
    assert Measure().gap(expected, near) is None
    found = Measure().gap(expected, far)
    assert found is not None
    assert found.largest == pytest.approx(300 * relative, rel=0.05)
    assert found.relative == pytest.approx(3 * relative, rel=0.05)
    assert (Measure(exact=True).gap(expected, near) is None) == torch.equal(expected, near)


def test_what_rounding_leaves_of_zero_is_no_difference() -> None:
    """Beside gradients of 1, that is; alone it is all that there is."""
    one, other = torch.tensor([1e-15], dtype=torch.float64), torch.tensor([-1e-15], dtype=torch.float64)
    assert Measure().gap(one, other) is not None
    assert Measure(noise=1.0).gap(one, other) is None
    assert Measure(noise=1e-4).gap(one, other) is not None


def test_under_autocast_a_float32_value_is_as_rough_as_what_it_was_made_of() -> None:
    one, other = torch.tensor([1.0]), torch.tensor([1.01])
    assert Measure().gap(one, other) is not None
    assert Measure(half=True).gap(one, other) is None


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        ([NAN, 1.0], [NAN, 1.0], True),
        ([INF, 1.0], [INF, 1.0], True),
        ([INF, 1.0], [-INF, 1.0], False),
        ([INF, 1.0], [1.0, 1.0], False),
        ([NAN, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [NAN, 1.0], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_what_cannot_be_subtracted(expected: list[float], found: list[float], equal: bool) -> None:
    gap = Measure().gap(torch.tensor(expected), torch.tensor(found))
    assert gap == (None if equal else NO_NUMBER)
    assert equal or "cannot be subtracted" in str(gap)


def test_a_missing_tensor_differs_from_zeros_and_from_none_not() -> None:
    assert Measure().gap(None, None) is None
    assert Measure().gap(torch.zeros(2), None) == NO_NUMBER
    assert Measure().gap(None, torch.zeros(2)) == NO_NUMBER


def test_integers_are_equal_or_not() -> None:
    one = torch.tensor([10**6, 1])
    assert Measure(noise=1e9).gap(one, one + torch.tensor([0, 1])) is not None
    assert Measure().gap(one, one.clone()) is None
    assert Measure().gap(torch.tensor([True]), torch.tensor([False])) is not None


def test_the_largest_element_is_finite() -> None:
    assert largest_element(torch.tensor([-3.0, INF, NAN, 2.0])) == 3.0
    assert largest_element(torch.tensor([])) == largest_element(None) == 0.0
