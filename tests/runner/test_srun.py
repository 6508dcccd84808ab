"""Slurm's srun, or what stands in for it: it records its command line, and starts ranks as srun does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_launchers import environment_without_mpi
from test_launchers import TRAIN
from transcript import Shell, a_shell, program

pytestmark = pytest.mark.ranks

SRUN = """#!{python}
import json, os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("slurm 23.11.4")
    sys.exit()
with open({record!r}, "w") as record:
    json.dump(sys.argv[1:], record)
options = [each for each in sys.argv[1:] if each.startswith("--") and each != "--"]
count = int(next(each.split("=")[1] for each in options if each.startswith("--ntasks=")))
command = sys.argv[1 + len(options):]
ranks = [
    subprocess.Popen(command, env=os.environ | {{
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS_PER_NODE": str(count), "SLURM_JOB_ID": "4711",
    }})
    for rank in range(count)
]
codes = [rank.wait() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell on a machine that has srun and no MPI."""
    tools = tmp_path / "bin"
    tools.mkdir()
    srun = tools / "srun"
    srun.write_text(SRUN.format(python=sys.executable, record=str(tmp_path / "record.json")))
    srun.chmod(0o755)
    made = a_shell(tmp_path)
    made.environ["PATH"] = str(tools)
    made.command = environment_without_mpi(tmp_path / "venv")
    yield made
    made.end()


def recorded(shell: Shell) -> list[str]:
    found: list[str] = json.loads((shell.home / "record.json").read_text())
    return found


def test_ranks_train_under_srun(shell: Shell) -> None:
    (shell.home / "train.py").write_text(TRAIN)
    code, out, err = shell.run("-np", "2", "train.py")
    assert code == 0, err
    assert len(re.findall(r"rank [01] of 2: ", out)) == 6
    options = ["--cpu-bind=none", "--overcommit", "--kill-on-bad-exit=0", "--export=ALL", "--ntasks=2"]
    assert recorded(shell)[: len(options)] == options
    assert recorded(shell)[-1] == "train.py"


def test_the_exit_code_is_the_first_failing_ranks(shell: Shell) -> None:
    code, _, err = shell.run("-np", "3", "--no-tune", program("exit_on_rank.py"), "1", "7")
    assert code == 7
    assert "rannc-run: 1 of 3 ranks failed:" in err
    assert "ended by rannc-run: ranks 0, 2" in err


def test_two_hosts_get_as_many_ranks_each(shell: Shell) -> None:
    code, out, _ = shell.run("--hosts", "localhost:1,127.0.0.1:1", "--dry-run", program("speak.py"))
    assert code == 0
    assert "launcher: slurm 23.11.4" in out
    here = shell.run("--hosts", "a:2,b:3", "--dry-run", program("speak.py"))
    assert here[0] == 2
    assert "srun places the same number of ranks on each host" in here[2]
