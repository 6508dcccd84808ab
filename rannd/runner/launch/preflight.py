"""Checks the hosts of a job before any rank starts, and lists in one table what would make it hang or fail.

Each other host runs a probe that the launcher itself starts there (so the probe sees what ranks will see), all hosts in
parallel. On a single machine nothing is started: its GPUs and port are checked here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rannd.runner.launch.ask_hosts import ask
from rannd.runner.launch.mpi import Launcher
from rannd.runner.launch.probe import Answer, Question, here, is_free, usable_gpus
from rannd.runner.resources import host_list

ANSWER_S = 60.0
"""Default seconds after which a host without an answer counts as not ready."""


@dataclass(frozen=True)
class Plan:
    """What is checked of the job."""

    launcher: Launcher
    places: Sequence[host_list.RankHost]
    hosts: Sequence[host_list.Host]
    """Empty if all ranks run on this machine."""
    gpus: int
    """GPUs of this machine."""
    on_cpu: bool
    """No rank uses a GPU, even if there are some."""
    script: str
    """Path of the script, '' for a module."""
    limit_s: float
    """Seconds for all answers."""
    chosen_port: bool
    """Whether MASTER_PORT was chosen by rannc-run, not by the user."""


@dataclass(frozen=True)
class Problem:
    """A problem of one host."""

    host: str
    what: str
    found: str
    mend: str
    """What to do."""


def table(problems: Sequence[Problem], hosts: int) -> str:
    """Format all problems for the user, without the program's name; `hosts`: number of hosts asked, 0: this machine."""
    wrong = len({each.host for each in problems})
    rows = [("host", "what", "found", "what to do")]
    rows += [(each.host, each.what, each.found, each.mend) for each in problems]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    are = "is" if wrong == 1 else "are"
    head = (
        f"{wrong} of {hosts} host{'s' if hosts > 1 else ''} {are} not ready" if hosts else "this machine is not ready"
    )
    return "\n".join([f"{head}, nothing was started (--no-preflight skips this check):", *lines])


def inspect(plan: Plan, environ: Mapping[str, str], say: Callable[[str], None]) -> tuple[list[Problem], int | None]:
    """Return the problems, and a free port on the host of rank 0 (None if that was not asked).

    `environ`: environment of the ranks.
    """
    if not plan.hosts:
        return _alone(plan, environ), None
    names = [host.name for host in plan.hosts if any(place.host == host.name for place in plan.places)]
    problems = [found for name in names if (found := _unknown(name)) is not None]
    bad = {each.host for each in problems}
    first = plan.places[0].host
    answers, silent = ask(
        [name for name in names if name not in bad],
        plan.launcher,
        environ,
        lambda name, back: _question(plan, environ, name, back),
        plan.limit_s,
        say,
    )
    own = here(_question(plan, environ, None, back=None), environ)
    by_host = {each.host: each for each in problems} | {name: _no_answer(name, why) for name, why in silent.items()}
    wrong: list[Problem] = _no_port(first, plan, environ)
    for name in names:
        if name in by_host:
            wrong.append(by_host[name])
        elif name in answers:
            wrong += _compare(name, answers[name], own, plan, environ, answers.get(first))
    return wrong, answers[first].free_port if first in answers else None


# --- one machine ----------------------------------------------------------------------------------


def _alone(plan: Plan, environ: Mapping[str, str]) -> list[Problem]:
    name = plan.places[0].host
    found = _too_many(name, plan, 0 if plan.on_cpu else usable_gpus(plan.gpus))
    given = _given_port(plan, environ)
    if given and not is_free(given):
        found.append(_taken(name, environ))
    found += _no_port(name, plan, environ)
    address = environ.get("MASTER_ADDR", "")
    if (unknown := _unknown(address)) is not None:  # otherwise ranks would try to resolve it for half an hour
        found.append(Problem(name, "name", f"MASTER_ADDR={address}: {unknown.found}", "leave MASTER_ADDR unset"))
    return found


def _too_many(name: str, plan: Plan, gpus: int) -> list[Problem]:
    ranks = sum(place.host == name for place in plan.places)
    if plan.on_cpu or gpus == 0 or ranks <= gpus:
        return []
    mend = f"a GPU takes one rank: at most {gpus} of them here, or RANNC_DEVICE=cpu"
    return [Problem(name, "GPUs", f"{gpus} for {ranks} ranks", mend)]


def _given_port(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return the user's MASTER_PORT, 0 if it is not set or not a port."""
    given = "" if plan.chosen_port else environ.get("MASTER_PORT", "")
    return int(given) if given.isdecimal() and int(given) < 65536 else 0


def _no_port(name: str, plan: Plan, environ: Mapping[str, str]) -> list[Problem]:
    if plan.chosen_port or _given_port(plan, environ):
        return []
    mend = "leave MASTER_PORT unset, or set it to a free port"
    return [Problem(name, "port", f"MASTER_PORT={environ.get('MASTER_PORT')} is not a port (1 to 65535)", mend)]


def _taken(name: str, environ: Mapping[str, str]) -> Problem:
    mend = "leave MASTER_PORT unset, or set it to a free port"
    return Problem(name, "port", f"MASTER_PORT={environ.get('MASTER_PORT')} is in use", mend)


# --- several --------------------------------------------------------------------------------------


def _unknown(name: str) -> Problem | None:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as exc:  # UnicodeError: not a valid host name
        why = getattr(exc, "strerror", None) or exc
        return Problem(name, "name", f"not known here: {why}", "check the name; DNS or /etc/hosts must have it")
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
    """Return the differences between a host's answer and this machine, or the host of rank 0."""
    found = []
    for what, its, ours in (
        ("Python", answer.python, own.python),
        ("rannd", answer.rannd, own.rannd),
        ("torch", answer.torch, own.torch),
    ):
        if its != ours:
            mend = f"{ours or 'none'} on this host: install the same on all"
            found.append(Problem(name, what, its or "not installed", mend))
    if answer.config_error:
        found.append(Problem(name, "configuration", answer.config_error, "fix it there"))
    else:
        found += [
            Problem(name, "configuration", f"{item} = {value}", f"{own.config[item]} on this host: set the same on all")
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
        mend = f"{plan.places[0].host} has {first.gpus or 'none'}; all ranks need the same kind: try RANNC_DEVICE=cpu"
        found.append(Problem(name, "GPUs", str(answer.gpus or "none"), mend))
    known = environ.get("MASTER_ADDR", "")
    if not answer.master:
        mend = "add it to DNS or /etc/hosts everywhere, or set MASTER_ADDR to its address"
        found.append(Problem(name, "name", f"does not know {known}, where rank 0 is", mend))
    elif name != plan.places[0].host and answer.master.startswith("127."):
        mend = "fix /etc/hosts there, or set MASTER_ADDR to the address"
        found.append(Problem(name, "name", f"resolves {known} to itself ({answer.master})", mend))
    if answer.back:
        mend = "check the firewall: TCP must be open between the hosts"
        found.append(Problem(name, "network", f"cannot reach rannc-run: {answer.back}", mend))
    if not answer.port:
        found.append(_taken(name, environ))
    return found


def _no_answer(name: str, words: str) -> Problem:
    mend = f"does 'ssh {name} true' work without a password? is Python at the same path?"
    return Problem(name, "answer", words, mend)
