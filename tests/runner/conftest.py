"""A rannc-run of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transcript import Shell, a_shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = a_shell(tmp_path)
    yield made
    made.end()
