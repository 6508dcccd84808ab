"""All the rest that rannc-run does is the same with MPICH and Intel MPI, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from other_launchers import NAMES, other_shell
from test_orphans import (  # noqa: F401
    test_a_child_that_stays_behind_a_rank_that_ended_well,
    test_a_rank_is_killed_and_its_child_stays,
    test_a_second_ctrl_c_waits_for_nobody,
    test_a_watcher_is_killed,
    test_rannc_run_and_the_launcher_are_killed,
    test_stubborn_ranks_are_killed_after_the_grace_period,
    test_user_signals_are_forwarded_and_a_rank_may_end_well,
)
from test_run import (  # noqa: F401
    test_a_crash_at_start,
    test_a_host_that_is_not_there,
    test_everything_after_the_script_is_its_own,
    test_logs_per_rank,
    test_no_line_is_lost_or_torn,
    test_only_some_ranks_are_shown,
    test_ranks_get_threads_and_a_meeting_point,
)
from transcript import Shell

pytestmark = [pytest.mark.ranks, pytest.mark.full]


@pytest.fixture(params=NAMES)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    yield from other_shell(request.param, tmp_path)
