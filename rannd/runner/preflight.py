"""Looks at the hosts of a job before any rank starts: what would make it hang, or fail on some, is told in one table.

Each other host is asked by a process that the launcher itself starts there (so what is found is what ranks will find),
all hosts at once. On one machine there is nothing to ask: its GPUs and its port are looked at here.
"""

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
from typing import IO

import msgspec

import rannd
from rannd.errors import LaunchError
from rannd.runner import hosts as placing
from rannd.runner import processes
from rannd.runner.channel import address_towards
from rannd.runner.environment import forwarded_names
from rannd.runner.mpi import Kind, Launcher, command_line
from rannd.runner.probe import MARK, Answer, Question, here, is_free, usable_gpus

ANSWER_S = 60.0
"""A host that has not answered by then is not ready."""
QUIET_S = 2.0
"""After so long the user is told what is waited for."""
AT_ONCE = 16
"""Hosts that are asked at the same time: each is a login."""
_PROBE = "import sys; sys.path.append(sys.argv.pop(1)); from rannd.runner.probe import main; main()"


@dataclass(frozen=True)
class Plan:
    """What is to be started, as far as it is looked at."""

    launcher: Launcher
    places: Sequence[placing.Place]
    hosts: Sequence[placing.Host]
    """Empty where all ranks run on this machine."""
    on_cpu: bool
    """No rank uses a GPU, even where there are some."""
    script: str
    """'' for a module."""
    limit_s: float
    """Seconds for all answers."""
    chosen_port: bool
    """MASTER_PORT is rannc-run's choice, not the user's."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong on one host."""

    host: str
    what: str
    found: str
    mend: str
    """What to do."""


def table(problems: Sequence[Problem], hosts: int) -> str:
    """All problems for the user, without the name of the program."""
    wrong = len({each.host for each in problems})
    rows = [("host", "what", "found", "what to do")]
    rows += [(each.host, each.what, each.found, each.mend) for each in problems]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    are = "is" if wrong == 1 else "are"
    head = f"{wrong} of {hosts} hosts {are} not ready" if hosts > 1 else "this machine is not ready"
    return "\n".join([f"{head}, nothing was started (--no-preflight starts all the same):", *lines])


def inspect(plan: Plan, environ: Mapping[str, str], say: Callable[[str], None]) -> tuple[list[Problem], int | None]:
    """(what is wrong, a port that is free on the host of rank 0 or None where that was not asked).

    `environ`: what ranks will have.
    """
    if not plan.hosts:
        return _alone(plan, environ), None
    names = [host.name for host in plan.hosts if any(place.host == host.name for place in plan.places)]
    problems = [found for name in names if (found := _unknown(name)) is not None]
    bad = {each.host for each in problems}
    answers, silent = _ask([name for name in names if name not in bad], plan, environ, say)
    first = plan.places[0].host
    own = here(_question(plan, environ, None, back=None), environ)
    by_host = {each.host: each for each in [*problems, *silent]}
    found = []
    for name in names:
        if name in by_host:
            found.append(by_host[name])
        elif name in answers:
            found += _compare(name, answers[name], own, plan, environ, answers.get(first))
    return found, answers[first].free_port if first in answers else None


# --- one machine ----------------------------------------------------------------------------------


def _alone(plan: Plan, environ: Mapping[str, str]) -> list[Problem]:
    name = plan.places[0].host
    found = _too_many(name, plan, 0 if plan.on_cpu else usable_gpus(environ))
    given = _given_port(plan, environ)
    if given and not is_free(given):
        found.append(_taken(name, environ))
    return found


def _too_many(name: str, plan: Plan, gpus: int) -> list[Problem]:
    ranks = sum(place.host == name for place in plan.places)
    if plan.on_cpu or gpus == 0 or ranks <= gpus:
        return []
    mend = f"a GPU takes one rank: at most {gpus} of them here, or RANNC_DEVICE=cpu"
    return [Problem(name, "GPUs", f"{gpus} for {ranks} ranks", mend)]


def _given_port(plan: Plan, environ: Mapping[str, str]) -> int:
    """The user's own MASTER_PORT, 0 for none."""
    given = "" if plan.chosen_port else environ.get("MASTER_PORT", "")
    return int(given) if given.isdigit() and int(given) < 65536 else 0


def _taken(name: str, environ: Mapping[str, str]) -> Problem:
    mend = "leave MASTER_PORT unset, or name a free port"
    return Problem(name, "port", f"MASTER_PORT={environ.get('MASTER_PORT')} is in use", mend)


# --- several --------------------------------------------------------------------------------------


def _unknown(name: str) -> Problem | None:
    try:
        socket.getaddrinfo(name, None)
    except OSError as exc:
        return Problem(name, "name", f"not known here: {exc.strerror}", "is it right? DNS or /etc/hosts has to know it")
    return None


def _question(plan: Plan, environ: Mapping[str, str], name: str | None, back: tuple[str, int] | None) -> Question:
    first = plan.places[0].host
    return Question(
        folder=os.getcwd(),
        script=plan.script,
        master=environ.get("MASTER_ADDR", first),
        port=_given_port(plan, environ) if name == first else 0,
        back=back,
    )


def _compare(
    name: str, answer: Answer, own: Answer, plan: Plan, environ: Mapping[str, str], first: Answer | None
) -> list[Problem]:
    """What of an answer is not as on this machine, or as on the host of rank 0."""
    found = []
    for what, its, ours in (
        ("Python", answer.python, own.python),
        ("rannd", answer.rannd, own.rannd),
        ("torch", answer.torch, own.torch),
    ):
        if its != ours:
            mend = f"{ours or 'none'} is here: install the same on all"
            found.append(Problem(name, what, its or "not installed", mend))
    if answer.config_error:
        found.append(Problem(name, "configuration", answer.config_error, "mend it there"))
    else:
        found += [
            Problem(name, "configuration", f"{item} = {value}", f"{own.config[item]} is here: make them the same")
            for item, value in answer.config.items()
            if own.config and own.config.get(item) != value
        ]
    folder = os.getcwd()
    if answer.folder != folder:
        found.append(Problem(name, "folder", f"no {folder}", "share it among the hosts (NFS), or copy it there"))
    elif not answer.script:
        found.append(Problem(name, "script", f"no {plan.script}", "share it among the hosts (NFS), or copy it there"))
    found += _too_many(name, plan, answer.gpus)
    if not plan.on_cpu and first is not None and bool(answer.gpus) != bool(first.gpus):
        mend = f"{plan.places[0].host} has {first.gpus or 'none'}; ranks use one kind of device: RANNC_DEVICE=cpu?"
        found.append(Problem(name, "GPUs", str(answer.gpus or "none"), mend))
    known = environ.get("MASTER_ADDR", "")
    if not answer.master:
        mend = "DNS or /etc/hosts has to know it everywhere, or set MASTER_ADDR to its address"
        found.append(Problem(name, "name", f"does not know {known}, where rank 0 is", mend))
    elif name != plan.places[0].host and answer.master.startswith("127."):
        mend = "mend /etc/hosts there, or set MASTER_ADDR to the address"
        found.append(Problem(name, "name", f"takes {known} for itself ({answer.master})", mend))
    if answer.back:
        mend = "a firewall? TCP has to be open among the hosts"
        found.append(Problem(name, "network", f"cannot reach rannc-run: {answer.back}", mend))
    if not answer.port:
        found.append(_taken(name, environ))
    return found


# --- asking ---------------------------------------------------------------------------------------


@dataclass
class _Asked:
    hosts: list[str]
    process: subprocess.Popen[bytes]
    output: IO[bytes]


def _ask(
    names: Sequence[str], plan: Plan, environ: Mapping[str, str], say: Callable[[str], None]
) -> tuple[dict[str, Answer], list[Problem]]:
    """(answers by host, hosts without one)."""
    answers: dict[str, Answer] = {}
    silent: list[Problem] = []
    # Slurm starts one step after the other: all hosts are one there.
    waiting = [[*names]] if plan.launcher.kind is Kind.SRUN and names else [[name] for name in names]
    remote = next((name for name in names if not placing.is_local(name)), None)
    end = time.monotonic() + plan.limit_s
    quiet_until = time.monotonic() + QUIET_S
    running: list[_Asked] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0), backlog=1024))
        stack.callback(lambda: [_end(each) for each in running])
        try:
            back = (address_towards(remote), listener.getsockname()[1]) if remote is not None else None
        except LaunchError:
            back = None  # that host will not answer
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(_start(waiting.pop(0), plan, environ, back))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                _take(each, answers, silent, plan)
            if time.monotonic() >= end:
                break
            if running and time.monotonic() >= quiet_until:
                quiet_until = end
                left = [name for each in running for name in each.hosts] + [name for each in waiting for name in each]
                say(f"asking whether {_few(left)} {'is' if len(left) == 1 else 'are'} ready ...")
            time.sleep(0.02)
        for each in running:
            _end(each)
            words = f"none within {plan.limit_s:g} s"
            said = _last_line(each)
            silent += [_no_answer(name, f"{words}: {said}" if said else words) for name in each.hosts]
        silent += [_no_answer(name, "not asked any more") for group in waiting for name in group]
    return answers, silent


def _start(names: list[str], plan: Plan, environ: Mapping[str, str], back: tuple[str, int] | None) -> _Asked:
    question = msgspec.json.encode(_question(plan, environ, names[0], back)).decode()
    root = os.path.dirname(os.path.dirname(os.path.abspath(rannd.__file__)))
    command = [sys.executable, "-c", _PROBE, root, question]
    if len(names) > 1 or not placing.is_local(names[0]):
        asked = [placing.Host(name, 1) for name in names]
        forwarded = forwarded_names(environ)
        command = command_line(plan.launcher, len(names), asked, forwarded, command)
    own_pid = os.getpid()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it has been read
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: processes.die_with_parent(own_pid, SIGTERM),
    )
    return _Asked(names, process, output)


def _end(asked: _Asked) -> None:
    if asked.process.poll() is None:
        processes.kill_session(asked.process.pid)
        asked.process.wait()


def _said(asked: _Asked) -> list[str]:
    asked.output.seek(0)
    return asked.output.read().decode(errors="replace").splitlines()


def _take(asked: _Asked, answers: dict[str, Answer], silent: list[Problem], plan: Plan) -> None:
    lines = _said(asked)
    found = []
    for line in lines:
        if MARK in line:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line[line.index(MARK) + len(MARK) :], type=Answer))
    if len(found) == len(asked.hosts):
        answers.update(zip(asked.hosts, found, strict=True))
        return
    said = _last_line(asked)
    code = asked.process.returncode
    words = f"{plan.launcher.kind.value} ended with {code}" + (f": {said}" if said else "")
    silent += [_no_answer(name, words) for name in asked.hosts]


def _last_line(asked: _Asked) -> str:
    """What of a failed start tells most: a line about a failure, else the last one."""
    lines = [line.strip() for line in _said(asked) if line.strip(" -*=\t") and MARK not in line]
    telling = [line for line in lines if any(word in line.lower() for word in _TELLING)]
    return (telling or lines or [""])[-1 if not telling else 0][:200]


_TELLING = ("error", "denied", "refused", "no route", "unreachable", "not found", "no such", "unable", "timed out")


def _no_answer(name: str, words: str) -> Problem:
    return Problem(
        name, "answer", words, f"does 'ssh {name} true' work without a password? is Python at the same path?"
    )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def refuse(problems: Sequence[Problem], hosts: int) -> None:
    """LaunchError with the table, where there are problems."""
    if problems:
        raise LaunchError(table(problems, hosts))
