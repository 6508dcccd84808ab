"""The cases of a file, and one private home for all jobs of a test run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from parity.cases import SEED
from parity.launch import Home, Outcome


def pytest_report_header() -> str:
    return f"parity cases drawn with TEST_SEED={SEED}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and hasattr(metafunc.module, "CASES"):
        rare = getattr(metafunc.module, "RARE", ())
        metafunc.parametrize(
            "case",
            [
                pytest.param(case, id=case.name, marks=pytest.mark.full if case in rare else ())
                for case in metafunc.module.CASES
            ],
        )


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Outcome]:
    """What became of the cases that ran so far."""
    return {}


@pytest.fixture(scope="session")
def home(forks: Path) -> Iterator[Home]:
    """Directories of the jobs; their daemon and everything else that still runs there ends with the session."""
    made = Home(forks)
    yield made
    made.close()
    assert made.strays() == []
