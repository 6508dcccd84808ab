"""Each call for files fails in turn with EIO, ENOSPC, EMFILE, EINTR, or writes half: whole or not at all, always told.

As SQLite tests itself (https://www.sqlite.org/testing.html, "I/O Error Testing").
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.faulty import run


@pytest.mark.parametrize(
    ("program", "way"),
    [
        pytest.param("failing_saves.py", {}, marks=pytest.mark.long),
        pytest.param("failing_saves.py", {"FAULTS_NO_EXCHANGE": "1"}, marks=pytest.mark.long),
        ("failing_exports.py", {}),
    ],
    ids=["saves", "saves by two renames", "exports"],
)
def test_whole_or_not_at_all_and_always_told(program: str, way: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    output = run(program, str(root), under=root, **way)
    assert "failing calls" in output
    print(output)
