"""Shell transcripts of programs that misbehave in the middle of their work: a command, its output, its exit code."""

from __future__ import annotations

import json
import os
import re

import pytest
from transcript import Shell, Witness, program, read_lines

pytestmark = pytest.mark.ranks


def lines_of(text: str, rank: int) -> list[str]:
    """What rank `rank` printed, without its prefix."""
    return re.findall(rf"^\[[^:\]]+:{rank}\] (.*)$", text, re.MULTILINE)


def pids_in(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_a_training_that_crashes_at_step_3_on_one_rank(shell: Shell, stages: str) -> None:
    """$ rannc-run -np 2 --log-dir logs failing.py script 1"""
    options = ("-np", "2", "--no-tune", "--log-dir", "logs")
    code, out, err = shell.run(*options, program("failing.py"), "script", "1", RANNC_PARTITION_NUM=stages)
    assert code == 1, err
    assert all(Witness(pid).ended() for pid in pids_in(out))
    assert len(pids_in(out)) == 2

    # The rank that failed shows its own traceback, and where it was.
    own = lines_of(err, 1)
    assert 'raise KeyError("the script is wrong")' in "\n".join(own)
    assert own[-2:] == [
        "[rank1]: KeyError: 'the script is wrong'",
        "[rank1]: rannd: this was rank 1, the script, after step 2",
    ]
    # The other one says which rank it was.
    other = "\n".join(lines_of(err, 0))
    assert re.search(r"RankFailedError: rank 1 \(.*\) failed in the script, after step 2: KeyError", other)
    # rannc-run reports the first failure last, then where the logs are.
    rows = re.findall(r"^rannc-run:   \S+ +(\d) +\d+ +[\d:.]+ +(.*)$", err, re.MULTILINE)
    assert rows[-1][0] == "1", err
    assert re.fullmatch(r"exit code 1  KeyError: 'the script is wrong' \(failing.py:\d+\)", rows[-1][1]), err
    (run,) = (shell.home / "logs").iterdir()
    assert err.splitlines()[-1] == f"rannc-run: logs: {run}"
    failure = json.loads((run / "rank_1" / "error.json").read_text())
    assert (failure["rank"], failure["status"], failure["ended_by_signal_of_rannc_run"]) == (1, 1, 0)
    assert "KeyError: 'the script is wrong'" in failure["stderr_tail"]


def test_a_rank_that_ignores_sigterm_outlives_no_failure(shell: Shell) -> None:
    """$ rannc-run -np 2 --grace-period 0.5 stubborn.py meeting"""
    os.mkfifo(shell.home / "meeting")
    options = ("-np", "2", "--no-tune", "--grace-period", "0.5", "--log-dir", "logs")
    process = shell.start(*options, program("stubborn.py"), "meeting")
    (line,) = read_lines(process.stdout, 1)
    witness = Witness(pids_in(line)[0])
    assert witness.ended()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    assert re.search(r"^rannc-run:   \S+ +1 +\d+ +[\d:.]+ +exit code 7 +the last words$", err, re.MULTILINE)
    (run,) = (shell.home / "logs").iterdir()
    failure = json.loads((run / "rank_0" / "error.json").read_text())
    assert (failure["status"], failure["ended_by_signal_of_rannc_run"]) == (-9, 9)
