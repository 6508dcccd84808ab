"""What is looked at before ranks start on one machine."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from transcript import Shell, program

from rannd.runner.launch import ask_hosts
from rannd.runner.launch.ask_hosts import ask
from rannd.runner.launch.mpi import Launcher, LauncherKind
from rannd.runner.launch.probe import Question


@pytest.fixture
def two_gpus(shell: Shell) -> Shell:
    """A machine that shows two GPUs, and a torch built for them."""
    tools = shell.home / "bin"
    tools.mkdir()
    tool = tools / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA'\necho 'GPU 1: NVIDIA'\n")
    tool.chmod(0o755)
    package = shell.home / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('rannc-run does not import torch')\n")
    (package / "version.py").write_text("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    shell.environ["PATH"] = f"{tools}:{shell.environ['PATH']}"
    shell.environ["PYTHONPATH"] = str(package.parent)
    return shell


def test_a_gpu_takes_one_rank(two_gpus: Shell) -> None:
    code, out, err = two_gpus.run("-np", "4", program("speak.py"))
    assert (code, out) == (7, "")
    head, titles, row = err.splitlines()
    assert head == ("rannc-run: this machine is not ready, nothing was started (--no-preflight skips this check):")
    assert re.split(r"  +", titles.strip()) == ["host", "what", "found", "what to do"]
    assert re.split(r"  +", row.strip())[1:] == [
        "GPUs",
        "2 for 4 ranks",
        "a GPU takes one rank: at most 2 of them here, or RANNC_DEVICE=cpu",
    ]


@pytest.mark.ranks
def test_ranks_on_cores_need_no_gpu(two_gpus: Shell) -> None:
    assert two_gpus.run("-np", "4", program("speak.py"), RANNC_DEVICE="cpu")[0] == 0
    assert two_gpus.run("-np", "4", "--no-preflight", program("speak.py"))[0] == 0
    Path(two_gpus.environ["PYTHONPATH"], "torch", "version.py").write_text("cuda: Optional[str] = None\n")
    assert two_gpus.run("-np", "4", program("speak.py"))[0] == 0, "torch is a build for CPUs"


def test_a_port_of_the_users_that_is_in_use(shell: Shell) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = shell.run("-np", "2", program("speak.py"), MASTER_PORT=port)
    assert code == 7
    assert f"MASTER_PORT={port} is in use" in err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_PORT", "abc", "MASTER_PORT=abc is not a port (1 to 65535)"),
        ("MASTER_PORT", "99999", "MASTER_PORT=99999 is not a port (1 to 65535)"),
        ("MASTER_ADDR", "nowhere.invalid", "MASTER_ADDR=nowhere.invalid: not known here"),
        ("MASTER_ADDR", "a..b", "MASTER_ADDR=a..b: not known here"),
    ],
)
def test_a_meeting_point_that_cannot_be(shell: Shell, name: str, value: str, message: str) -> None:
    code, out, err = shell.run("-np", "2", program("speak.py"), **{name: value})
    assert (code, out) == (7, "")
    assert message in err


def test_a_host_that_cannot_be_a_name(shell: Shell) -> None:
    code, out, err = shell.run("--hosts", "a..b:1,localhost:1", program("speak.py"))
    assert (code, out) == (7, "")
    assert re.search(r"^  a\.\.b +name +not known here: ", err, re.MULTILINE), err


def test_hosts_that_are_asked_at_once_answer_in_any_order(tmp_path: Path) -> None:
    """As under Slurm, whose srun starts one step after the other."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/sh\n"
        'while [ "${1#--}" != "$1" ]; do echo "$1" >>"$0.flags"; shift; done\n'
        'answer="$("$@")"\n'
        """for name in n2 n1.cluster; do echo "$answer" | sed 's/"host": "[^"]*"/"host": "'$name'"/'; done\n"""
    )
    srun.chmod(0o755)
    question = Question(folder=os.getcwd(), script="", master="localhost", port=0, back=None)
    found, silent = ask(
        ["n1", "n2", "n3"],
        Launcher(LauncherKind.SRUN, str(srun), "slurm 23"),
        os.environ,
        lambda name, back: question,
        60.0,
        print,
    )
    assert {name: answer.host for name, answer in found.items()} == {"n1": "n1.cluster", "n2": "n2"}
    assert list(silent) == ["n3"]
    flags = Path(f"{srun}.flags").read_text().split()
    assert {"--nodelist=n1,n2,n3", "--ntasks-per-node=1", "--ntasks=3"} <= set(flags)


class Besieged(socket.socket):
    """A listener in whose queue there is always somebody."""

    accepted = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.accepted += 1
        assert self.accepted <= 10_000, "it does not come back"
        socket.create_connection(self.getsockname()).close()
        return super().accept()


def test_connections_without_end_do_not_hide_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_hosts, "BACKLOG", 8)
    with Besieged() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ask_hosts._let_connect(listener)
    assert listener.accepted == 8
