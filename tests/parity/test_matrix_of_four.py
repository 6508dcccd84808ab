"""The complete parity matrix, its cases of four ranks; a file each, because a worker takes a file at a time."""

from __future__ import annotations

import pytest
from parity.case import Case
from parity.cases import DRAWN, FULL
from parity.check import check
from parity.launch import Home, Outcome

CASES = [case for case in FULL if case.ranks == 4 and case not in DRAWN]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(3600)  # as in test_parity.py
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_training_equals_the_emulation(
    case: Case, request: pytest.FixtureRequest, home: Home, outcomes: dict[str, Outcome]
) -> None:
    check(case, request, home, outcomes)
