"""MPICH and Intel MPI: what rannc-run does is the same with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from other_launchers import NAMES, other_shell
from test_orphans import (  # noqa: F401 - the same, with the launchers of this file
    test_a_signal_reaches_every_rank,
    test_rannc_run_is_killed,
    test_the_launcher_is_killed,
)
from test_run import (  # noqa: F401
    test_a_killed_rank,
    test_everything_after_the_script_is_its_own,
    test_last_lines_without_end_are_completed,
    test_ranks_have_the_names_of_torchrun,
    test_the_exit_code_is_the_first_failing_ranks,
)
from thinned import first
from transcript import Shell

pytestmark = pytest.mark.ranks

TRAIN = """
import pyrannc, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(model, optimizer)
torch.manual_seed(1 + pyrannc.get_rank())
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, dtype=torch.float64)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"rank {pyrannc.get_rank()} of {pyrannc.get_world_size()}: {loss.item():.12f}", flush=True)
"""


@pytest.fixture(params=first(1, NAMES))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    yield from other_shell(request.param, tmp_path)


def test_it_is_the_launcher_of_its_own_environment(shell: Shell) -> None:
    script = shell.home / "x.py"
    script.write_text("")
    code, out, _ = shell.run("-np", "2", "--dry-run", str(script))
    assert code == 0
    launcher = re.search(r"launcher: .*\n  (\S+) ", out)
    assert launcher is not None
    assert Path(launcher[1]).parent == Path(shell.command[0]).parent


_under_open_mpi: list[str] = []
"""Losses of the test below, which are the same for all launchers."""


def test_training_equals_that_under_open_mpi(shell: Shell, forks: Path) -> None:
    """More ranks than there may be cores, in two stages."""
    (shell.home / "train.py").write_text(TRAIN)
    options = ("-np", "4", fork_server.__file__, "train.py")
    stages = {"RANNC_PARTITION_NUM": "2", fork_server.VARIABLE: str(forks)}
    code, out, err = shell.run(*options, **stages)
    assert code == 0, err
    losses = sorted(re.findall(r"rank \d of 4: .*", out))
    assert len(losses) == 12
    assert shell.command != Shell.command
    if not _under_open_mpi:
        shell.command = Shell.command
        code, out, err = shell.run(*options, **stages)
        assert code == 0, err
        _under_open_mpi.extend(sorted(re.findall(r"rank \d of 4: .*", out)))
    assert losses == _under_open_mpi
