"""Starts the ranks of a decided job, and watches them to the end; checks before, reports after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from rannd.config import Config
from rannd.errors import LaunchError, RanndError, UsageError
from rannd.ranks import open_files
from rannd.runner.job import Job
from rannd.runner.launch import launcher_ports, session_folder
from rannd.runner.launch.mpi import LauncherKind
from rannd.runner.report import report
from rannd.runner.watch import processes
from rannd.runner.watch.errand import Errand
from rannd.runner.watch.job_result import JobResult
from rannd.runner.watch.line_channel import Listener
from rannd.runner.watch.monitor import Monitor
from rannd.runner.watch.watcher import SETTINGS_VARIABLE

if TYPE_CHECKING:
    from rannd.runner.launch.preflight import Problem

#: Open files of the MPI launcher for each rank of this machine (rannc-run has one for each rank), and of either beside.
_LAUNCHER_FILES = 2
_OTHER_FILES = 96


def launch(job: Job, errand: Errand | None = None) -> JobResult:
    """Start the ranks, and return what happened when the job has ended.

    `errand`: what to do meanwhile; then ranks can say how far they are (rannd/ranks/rank_notes.py).

    Raises:
        UsageError: The log directory cannot be created.
        LaunchError: The launcher cannot be executed, or too few files may be open for so many ranks.
    """
    local_ranks = max(place.local_rank for place in job.places) + 1
    files = max(len(job.places), _LAUNCHER_FILES * local_ranks) + _OTHER_FILES
    if too_few := open_files.make_room(files, f"rannc-run and MPI for {len(job.places)} ranks"):
        raise LaunchError(f"{too_few}; nothing was started")
    if job.log_dir is not None:
        try:
            os.makedirs(job.log_dir)
        except (OSError, ValueError) as error:  # ValueError: it contains a zero byte
            raise UsageError(f"--log-dir: {job.log_dir} cannot be created: {error}") from None
    if job.log_dir is not None and not job.quiet:
        say(f"logs: {job.log_dir}")
    if job.tuning_line and not job.quiet:
        say(job.tuning_line)
    listener = Listener(job.remote_host)
    settings = {
        "address": listener.address,
        "token": listener.token,
        "grace": job.grace,
        "log_dir": job.log_dir,
        "notes": errand is not None,
    }
    own_pid = os.getpid()
    command = job.launcher_command()
    own_folder = session_folder.make(job.launcher.kind, os.environ)
    try:
        launcher = subprocess.Popen(
            command,
            env={**job.environment(os.environ), **own_folder, SETTINGS_VARIABLE: json.dumps(settings)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Only rannc-run forwards a Ctrl-C of the terminal; if rannc-run ends, even by SIGKILL, so does the
            # launcher.
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(own_pid, signal.SIGTERM),
        )
    except OSError as error:
        session_folder.remove(own_folder)
        raise LaunchError(f"{command[0]} cannot be executed: {error}") from None
    guard = processes.Guard(launcher.pid, job.grace, own_folder.get(session_folder.VARIABLE, ""))
    sys.stdout.flush()
    result = Monitor(
        listener,
        launcher,
        len(job.places),
        job.shown,
        job.grace,
        job.start,
        started=lambda: _close_ports(job, launcher.pid),
        errand=errand,
    ).run()
    guard.close()
    processes.kill_session(launcher.pid)  # a login to a host that never answered
    session_folder.remove(own_folder)
    return result


def tell_end(job: Job, result: JobResult) -> None:
    """Report how a job has ended, if it did not end well."""
    tell(report(result, job.launcher.kind.value, job.shown, job.log_dir))


def _close_ports(job: Job, launcher: int) -> str:
    """Close the launcher's ports to other machines, unless ranks run there; return a line if that is not possible."""
    if job.remote_host is not None or job.launcher.kind is not LauncherKind.OPEN_MPI:
        return ""
    try:
        launcher_ports.close_session_to_others(launcher)
    except OSError as error:
        return "" if job.quiet else f"ports of {job.launcher.kind.value} stay open to other machines: {error}"
    return ""


def ready(job: Job, items: Config, script: str) -> Job:
    """Return the job if every host is ready for it; LaunchError with a table of problems otherwise."""
    problems, job = not_ready(job, items, script)
    if problems:
        raise LaunchError(problem_table(job, problems))
    return job


def problem_table(job: Job, problems: Sequence[Problem]) -> str:
    """Format the problems of hosts for the user."""
    from rannd.runner.launch.preflight import table  # its import takes as long as many of the others

    return table(problems, len({place.host for place in job.places}) if job.hosts else 0)


def not_ready(job: Job, items: Config, script: str) -> tuple[list[Problem], Job]:
    """Return what is wrong with the hosts of a job, and the job with what is known now."""
    if not job.hosts and not job.gpus and {"MASTER_ADDR", "MASTER_PORT"} <= job.added.keys():
        return [], job  # there is nothing to ask
    from rannd.runner.launch import preflight  # as above

    environ = job.environment(os.environ)
    plan = preflight.Plan(
        job.launcher,
        job.places,
        job.hosts,
        gpus=job.gpus,
        on_cpu=items.device == "cpu",
        script=script,
        limit_s=min(job.start or preflight.ANSWER_S, preflight.ANSWER_S),
        chosen_port="MASTER_PORT" in job.added,
    )
    problems, port = preflight.inspect(plan, environ, say)
    if port is not None and plan.chosen_port:
        job = replace(job, added={**job.added, "MASTER_PORT": str(port)})
    return problems, job


def have_daemon(config: Config) -> None:
    """Start the node's daemon if it does not run; without it the job runs uncached."""
    from rannd.daemon.common.listening import answers
    from rannd.daemon.common.paths import places

    try:
        if answers(places().socket):
            return  # ranks connect to it, and replace an older one
    except RanndError:
        pass  # reported below, where it is started
    from rannd.daemon.client import spawn  # imports zmq and psutil, so only where it is needed

    max_bytes = int(config.cache_max_gb * 2**30)
    try:
        spawn.ensure(idle_s=config.daemon_idle_s, max_bytes=max_bytes, timeout_s=config.daemon_timeout_s)
    except (RanndError, OSError) as error:
        say(f"no daemon, nothing will be cached: {error}")


def say(message: str) -> None:
    tell(f"rannc-run: {message}\n")


def tell(text: str) -> None:
    try:
        click.echo(text, nl=False, err=True)
    except OSError:  # a full disk must neither stop the job nor hide how it ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # buffered text has to go somewhere
