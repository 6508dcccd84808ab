"""Each call for files and sockets of the daemon, or of its client, fails in turn: nothing is wrong or lost, or hangs.

A client gets the value, or is told of a miss; a daemon goes on, or ends with a message; the next client finds a store
that is whole, with what was acknowledged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.faulty import LONGEST_S, run

CALLS = {
    "a daemon starts": 2,
    "a daemon answers": 6,
    "a daemon ends": 1,
    "a client asks": 4,
    "a client starts the daemon": 1,
}
"""How many calls of each kind fail in `make test`: a start of a daemon takes half a second."""


MARKS = {
    "a daemon starts": pytest.mark.long,
    "a client asks": pytest.mark.long,
    "a client starts the daemon": pytest.mark.full,
}
ALL = (pytest.mark.full, pytest.mark.timeout(LONGEST_S))


@pytest.mark.parametrize("part", [pytest.param(part, marks=MARKS.get(part, ())) for part in CALLS])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=ALL)], ids=["some", "all"])
def test_what_was_acknowledged_stays_and_nothing_is_wrong(part: str, every: bool, daemon_home, tmp_path: Path) -> None:
    variables = {**daemon_home.variables(), "RANNC_CACHE": "on"}
    most = "all" if every else str(CALLS[part])
    output = run("failing_daemons.py", part, most, str(tmp_path / "control"), under=daemon_home.base, **variables)
    assert "failing calls" in output
    print(output)
