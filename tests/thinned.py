"""Matrices of cases that take long together: `make test` runs some of them, `make test-long` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`, of which only the first ones are not long. Those that have marks keep them."""
    return [case if place < count else _long(case) for place, case in enumerate(cases)]


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`, of which only one in `number` is not long. Those that have marks keep them."""
    return [_long(case) if place % number else case for place, case in enumerate(cases)]


def _long(case: Any) -> Any:
    if hasattr(case, "marks"):
        return case if case.marks else pytest.param(*case.values, id=case.id, marks=pytest.mark.long)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
