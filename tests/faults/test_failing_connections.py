"""Each call for a socket of a job fails in turn, on either side: failures are noticed all the same, nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.faulty import LONGEST_S, run

SOME = {"failing_hubs.py": 5, "failing_monitors.py": 2}
"""How many calls of each kind fail in `make test`."""


ALL = (pytest.mark.full, pytest.mark.timeout(LONGEST_S))


@pytest.mark.parametrize("program", SOME)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=ALL)], ids=["some", "all"])
def test_the_job_goes_on_or_ends_with_a_reason(program: str, every: bool, tmp_path: Path) -> None:
    output = run(program, "all" if every else str(SOME[program]), under=tmp_path)
    assert "failing calls" in output
    print(output)
