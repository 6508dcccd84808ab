"""Runs the probe on all hosts in parallel, started by the MPI launcher, with a time limit."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM
from typing import IO, TypeAlias

import msgspec

import rannd
from rannd.errors import LaunchError
from rannd.runner.launch import session_folder
from rannd.runner.launch.mpi import Launcher, LauncherKind, command_line
from rannd.runner.launch.probe import MARK, Answer, Question
from rannd.runner.resources import host_list
from rannd.runner.resources.rank_environment import forwarded_names
from rannd.runner.watch import processes
from rannd.runner.watch.line_channel import BACKLOG, listen_towards

QUIET_S = 2.0
"""Seconds after which the user is told which hosts have not answered yet."""
GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for a launcher if rannc-run itself is killed."""
AT_ONCE = 16
"""Number of hosts to ask at the same time: each is a login."""
Asking: TypeAlias = Callable[[str | None, tuple[str, int] | None], Question]
"""Makes the question for a host (None: for several), with an address of this machine that the host tries to reach."""
#: Words of the line that tells best why a host was not reached, by priority; launchers add paragraphs of their own.
_TELLING = ("denied", "refused", "no route", "unreachable", "timed out", "resolve", "no such", "not found", "error")
_PROBE = "import sys; sys.path.append(sys.argv.pop(1)); from rannd.runner.launch.probe import main; main()"


@dataclass
class _Asked:
    hosts: list[str]
    process: subprocess.Popen[bytes]
    guard: processes.Guard
    output: IO[bytes]
    folder: Mapping[str, str]
    """Variables with the session folder, for the launcher only."""


def ask(
    names: Sequence[str],
    launcher: Launcher,
    environ: Mapping[str, str],
    question: Asking,
    limit_s: float,
    say: Callable[[str], None],
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Return the answers by host, and for hosts without an answer the reason. `environ`: environment of the ranks."""
    answers: dict[str, Answer] = {}
    silent: dict[str, str] = {}
    # Slurm runs one step after the other: all hosts are asked in one step.
    waiting = [[*names]] if launcher.kind is LauncherKind.SRUN and names else [[name] for name in names]
    remote = next((name for name in names if not host_list.is_local(name)), None)
    end = time.monotonic() + limit_s
    quiet_until = time.monotonic() + QUIET_S
    running: list[_Asked] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _end_all(running))
        listener, back = None, None
        if remote is not None:
            with contextlib.suppress(LaunchError):  # that host will not answer
                listener = stack.enter_context(listen_towards(remote))
                listener.setblocking(False)
                back = listener.getsockname()[:2]
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(_start(waiting.pop(0), launcher, environ, question, back))
                stack.enter_context(running[-1].output)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                _end(each)
                _take(each, answers, silent, launcher)
            if listener is not None:
                _let_connect(listener)
            if time.monotonic() >= end:
                break
            if running and time.monotonic() >= quiet_until:
                quiet_until = end
                left = [name for each in running for name in each.hosts] + [name for each in waiting for name in each]
                say(f"asking whether {_few(left)} {'is' if len(left) == 1 else 'are'} ready ...")
            time.sleep(0.02)
        for each in running:
            _end(each)
            words = f"none within {limit_s:g} s"
            said = _last_line(each)
            silent.update(dict.fromkeys(each.hosts, f"{words}: {said}" if said else words))
        silent.update({name: "not asked before the time limit" for group in waiting for name in group})
    return answers, silent


def _let_connect(listener: socket.socket) -> None:
    """Close new connections: hosts only try whether they can connect, and others must not fill the queue."""
    with contextlib.suppress(OSError):  # there are no more
        for _ in range(BACKLOG):  # not until there are no more: they may come without end, and the time limit waits
            listener.accept()[0].close()


def _start(
    names: list[str],
    launcher: Launcher,
    environ: Mapping[str, str],
    question: Asking,
    back: tuple[str, int] | None,
) -> _Asked:
    told = msgspec.json.encode(question(names[0] if len(names) == 1 else None, back)).decode()
    root = os.path.dirname(os.path.dirname(os.path.abspath(rannd.__file__)))
    command = [sys.executable, "-c", _PROBE, root, told]
    folder: dict[str, str] = {}
    if len(names) > 1 or not host_list.is_local(names[0]):
        asked = [host_list.Host(name, 1) for name in names]
        forwarded = forwarded_names(environ)
        command = command_line(launcher, len(names), asked, forwarded, command)
        folder = session_folder.make(launcher.kind, environ)
    own_pid = os.getpid()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed after it has been read
    process = subprocess.Popen(
        command,
        env={**environ, **folder},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: processes.die_with_parent(own_pid, SIGTERM),
    )
    guard = processes.Guard(process.pid, GRACE_S, folder.get(session_folder.VARIABLE, ""))
    return _Asked(names, process, guard, output, folder)


def _end(asked: _Asked) -> None:
    if asked.process.poll() is None:
        processes.kill_session(asked.process.pid)
        asked.process.wait()
    asked.guard.close()
    session_folder.remove(asked.folder)


def _end_all(running: Sequence[_Asked]) -> None:
    for each in running:
        _end(each)


def _said(asked: _Asked) -> list[str]:
    asked.output.seek(0)
    return asked.output.read().decode(errors="replace").splitlines()


def _take(asked: _Asked, answers: dict[str, Answer], silent: dict[str, str], launcher: Launcher) -> None:
    lines = _said(asked)
    found = []
    for line in lines:
        if MARK in line:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line[line.index(MARK) + len(MARK) :], type=Answer))
    if len(asked.hosts) == len(found) == 1:
        answers[asked.hosts[0]] = found[0]
        return
    # Several hosts answer in any order, and may use a longer or shorter name for themselves.
    names = {each.host.partition(".")[0]: each for each in found}
    answers.update({name: names[short] for name in asked.hosts if (short := name.partition(".")[0]) in names})
    left = [name for name in asked.hosts if name not in answers]
    if not left:
        return
    said = _last_line(asked)
    code = asked.process.returncode
    words = f"{launcher.kind.value} ended with {code}" + (f": {said}" if said else "")
    silent.update(dict.fromkeys(left, words))


def _last_line(asked: _Asked) -> str:
    """Return the most informative line of a failed start, else the first one."""
    lines = [line.strip() for line in _said(asked) if line.strip(" -*=\t") and MARK not in line]
    lines = [line for line in lines if "setpgid(" not in line]  # printed by PRTE on a busy machine; harmless
    for word in _TELLING:
        for line in lines:
            if word in line.lower() and "warning" not in line.lower():
                return line[:200]
    return lines[0][:200] if lines else ""


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
