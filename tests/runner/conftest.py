"""A rannc-run of the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from transcript import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = a_shell(tmp_path)
    yield made
    made.end()


def a_shell(tmp_path: Path) -> Shell:
    """A shell in `tmp_path`; whoever asked for it ends it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANNC_", "OMPI_", "MALLOC_"))}
    environ.pop("OMP_NUM_THREADS", None)
    conf = tmp_path / "conf"
    conf.mkdir()
    return Shell(tmp_path, {**environ, "RANNC_CONF_DIR": str(conf), "RANNC_CACHE": "off"})
