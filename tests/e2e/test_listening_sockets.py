"""A job on one machine listens to nobody else: each listening socket of its processes, as the kernel lists them."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from job import Job

pytestmark = pytest.mark.ranks

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
SCRIPT = """
import os, signal
import pyrannc
import torch
model = pyrannc.RaNNCModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
model(torch.ones(4, 4))
print("ready", flush=True)
signal.pause()
"""


def _sockets(pid: int) -> dict[str, int]:
    """Inode -> descriptor of each socket of a process."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found[target[len("socket:[") : -1]] = int(name)
    return found


def _interface(pid: int, descriptor: int) -> str:
    """The interface that a socket of a process is bound to; '' if it is bound to none."""
    process = os.pidfd_open(pid)
    copy = ctypes.CDLL(None).syscall(438, process, descriptor, 0)  # pidfd_getfd
    os.close(process)
    assert copy >= 0
    with socket.socket(fileno=copy) as end:
        return end.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode()


def listening(processes: list[psutil.Process]) -> list[tuple[str, str, str]]:
    """(name of the process, address in hexadecimal, interface) of each TCP socket that the processes listen on."""
    kernel = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    addresses = {}
    for fields in (line.split() for lines in kernel for line in lines):
        if fields[3] == LISTENING:
            addresses[fields[9]] = fields[1].partition(":")[0]
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, PermissionError):  # a zombie
            for inode, descriptor in _sockets(process.pid).items():
                if inode in addresses:
                    found.append((process.name(), addresses[inode], _interface(process.pid, descriptor)))
    return found


@pytest.mark.long
def test_all_are_on_the_loopback_interface(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["rannc-run", "-np", "2", str(script)]
    started = subprocess.Popen(command, env=job.environment, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        ready = 0
        for line in started.stdout:
            ready += "ready" in line
            if ready == 2:
                break
        assert ready == 2
        parent = psutil.Process(started.pid)
        found = listening([parent, *parent.children(recursive=True)])
    finally:
        started.terminate()
        started.communicate(timeout=60)
    for name in ("python", "prterun"):
        assert any(each[0].startswith(name) for each in found), found
    assert [each for each in found if each[1] not in LOOPBACK and each[2] != "lo"] == []
