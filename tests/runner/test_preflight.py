"""What is looked at before ranks start on one machine."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from transcript import Shell, program


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
    assert head == ("rannc-run: this machine is not ready, nothing was started (--no-preflight starts all the same):")
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
