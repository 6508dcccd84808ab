"""Forks behave as processes that were started: output, variables, codes, signals; and none outlives its proxy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import psutil
import pytest

SCRIPT = """
import atexit, json, os, random, sys
began_with_torch = "torch" in sys.modules
class Here: pass
atexit.register(print, "at exit", flush=True)
told = [sys.argv, os.getcwd(), os.environ["COLOUR"], sys.path[0], __file__, Here.__module__, began_with_torch]
print(json.dumps(told), flush=True)
print(random.random(), sorted(os.listdir("/proc/self/fd")), file=sys.stderr)
if sys.argv[1] == "wait":
    print("pid", os.getpid(), flush=True)
    import time
    time.sleep(1000)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[1] == "raise":
    raise KeyError("wrong")
sys.exit(7)
"""


@pytest.fixture
def command(tmp_path: Path, forks: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "gr\udcfcn")
    monkeypatch.setenv(fork_server.VARIABLE, str(forks))
    return [sys.executable, fork_server.__file__, "script.py"]


def test_a_fork_runs_a_script_as_python_does(command: list[str], tmp_path: Path) -> None:
    done = [subprocess.run([*command, "exit", "two"], capture_output=True, text=True, check=False) for _ in range(2)]
    assert [each.returncode for each in done] == [7, 7]
    told, last = done[0].stdout.splitlines()
    arguments, folder, colour, first, file, module, began_with_torch = json.loads(told)
    assert arguments == ["script.py", "exit", "two"]
    assert Path(folder) == Path(first) == tmp_path
    assert (colour, file, module, began_with_torch) == ("gr\udcfcn", "script.py", "__main__", True)
    assert last == "at exit"
    assert done[0].stderr != done[1].stderr, "they draw other numbers"
    assert done[0].stderr.split(" ", 1)[1] == "['0', '1', '2', '3']\n", "3: the folder itself; nothing of the server's"


def test_a_fork_ends_as_its_script_does(command: list[str]) -> None:
    assert subprocess.run([*command, "kill"], capture_output=True, check=False).returncode == -9
    done = subprocess.run([*command, "raise"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("    raise KeyError(\"wrong\")\nKeyError: 'wrong'\n")
    assert "at exit" in done.stdout


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_proxy_is_one_to_the_fork(command: list[str], signum: signal.Signals) -> None:
    with subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        proxy.stdout.readline()
        pid = int(proxy.stdout.readline().split()[1])
        rank = psutil.Process(pid)
        assert pid != proxy.pid
        proxy.send_signal(signum)
        _, errors = proxy.communicate(timeout=120)
        psutil.wait_procs([rank], timeout=120)
    assert proxy.returncode == -signum
    assert ("KeyboardInterrupt" in errors) == (signum == signal.SIGINT)
    assert not psutil.pid_exists(pid)


def test_forks_end_with_their_server(command: list[str], tmp_path: Path, forks: Path) -> None:
    with fork_server.running(forks.with_name("another")):
        environment = {**os.environ, fork_server.VARIABLE: str(forks.with_name("another"))}
        proxy = subprocess.Popen([*command, "wait"], env=environment, stdout=subprocess.PIPE, text=True)
        assert proxy.stdout is not None
        proxy.stdout.readline()
        pid = int(proxy.stdout.readline().split()[1])
        rank = psutil.Process(pid)
    with proxy:
        assert proxy.wait(120) != 0
        psutil.wait_procs([rank], timeout=120)
    assert not psutil.pid_exists(pid)
