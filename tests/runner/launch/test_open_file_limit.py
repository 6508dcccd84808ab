"""rannc-run under limits of open files: raised for the ranks, or refused with what to do before anything starts."""

from __future__ import annotations

import pytest
from transcript import RANNC_RUN, Shell

pytestmark = pytest.mark.ranks

SCRIPT = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))\n"


def limited(shell: Shell, soft: int, hard: int, size: int) -> tuple[int, str, str]:
    """Exit code, output and errors of a job of `size` ranks that print their limits."""
    (shell.home / "train.py").write_text(SCRIPT)
    shell.command = ("sh", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "sh", str(RANNC_RUN))
    return shell.run("-np", str(size), "--no-tune", "train.py")


def test_a_thousand_ranks_under_the_usual_limit_are_told_which_one_they_need(shell: Shell) -> None:
    code, out, err = limited(shell, 1024, 1024, 1000)
    assert (code, out) == (7, "")
    assert (
        "rannc-run: rannc-run and MPI for 1000 ranks need up to 2096 open files, and this process may open 1024" in err
    )
    assert err.endswith("nothing was started\n")


def test_a_soft_limit_that_is_too_low_is_raised_for_the_launcher_and_the_ranks(shell: Shell) -> None:
    code, out, err = limited(shell, 99, 4000, 2)
    assert code == 0, err
    assert out.count("(1124, 4000)") == 2
