"""The command ``rannc-run``: starts the ranks, watches them, and reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import rannd.config
from rannd import __version__, open_files, planned
from rannd.config import ITEMS, Config
from rannd.errors import ConfigError, LaunchError, PlanError, RanndError, UsageError
from rannd.runner.adoption import Adopted, adopt
from rannd.runner.hints import hints
from rannd.runner.job import Job, prepare
from rannd.runner.launch import launcher_ports, session_folder
from rannd.runner.launch.mpi import LauncherKind
from rannd.runner.report import exit_code, report
from rannd.runner.resources.inherited import rank_here
from rannd.runner.run_options import Options, quietly, with_flags
from rannd.runner.watch import processes
from rannd.runner.watch.line_channel import Listener
from rannd.runner.watch.monitor import Monitor
from rannd.runner.watch.watcher import SETTINGS_VARIABLE


class _Command(click.Command):
    """Prints rannd's errors as one message and exits with their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RanndError as error:
            _say(str(error))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:  # while ranks run, the monitor handles it
            _say("SIGINT: nothing was started")
            ctx.exit(128 + signal.SIGINT)


#: Open files of the MPI launcher for each rank of this machine (rannc-run has one for each rank), and of either beside.
_LAUNCHER_FILES = 2
_OTHER_FILES = 96

_PATH = click.Path(path_type=Path)


def _default(name: str) -> str:
    """Return the default of an item, for the help of its flag."""
    return f"{ITEMS[name].default:g}"


@click.command(cls=_Command, context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "-np",
    "-n",
    "--nproc",
    "nproc",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks. Default: the slots of the hosts; else one per GPU; without GPUs one per pair of cores.",
)
@click.option("-m", "--module", is_flag=True, help="COMMAND starts with a module name, as in python -m.")
@click.option(
    "--hosts", metavar="A:4,B:4", help="Hosts and their numbers of ranks. Default: --hostfile, or the batch system's."
)
@click.option("--hostfile", metavar="FILE", help="File with hosts, one per line: name slots=N.")
@click.option("--config", type=_PATH, metavar="FILE", help="Configuration to read instead of rannc_conf.toml.")
@click.option("--dry-run", is_flag=True, help="Print each rank's host, device, environment, command; start nothing.")
@click.option("--show-config", is_flag=True, help="Print every configuration item, its value and its source.")
@click.option("--check", is_flag=True, help="Check all that a job needs, try it with two ranks, say what to fix.")
@click.option(
    "--tune/--no-tune",
    default=None,
    show_default="tune",
    help="Choose threads and malloc settings of the ranks.",
)
@click.option(
    "--preflight/--no-preflight",
    default=None,
    show_default="preflight",
    help="Check the other hosts before any rank starts.",
)
@click.option("--show-ranks", metavar="0,2-3", help="Ranks whose output is shown. Default: all.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings, errors and the script's output (log_level = warn).")
@click.option("--log-dir", metavar="DIR", help="Keep the ranks' output in DIR/<run>/rank_<R>/.")
@click.option(
    "--grace-period",
    type=click.FloatRange(min=0),
    show_default=_default("grace_period"),
    metavar="S",
    help="Seconds between asking ranks to end and SIGKILL.",
)
@click.option(
    "--timeout-start",
    type=click.FloatRange(min=0),
    show_default=_default("timeout_start"),
    metavar="S",
    help="Seconds within which all ranks must start; 0: no limit.",
)
@click.option("--plan-only", is_flag=True, help="Print the partition for -np devices, which need not exist, and exit.")
@click.option(
    "--cluster",
    metavar="NAME|FILE",
    help="With --plan-only: the devices to plan for: a100x8, or a .toml file. Default of -np: one node of them.",
)
@click.version_option(__version__, prog_name="rannc-run")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def main(
    ctx: click.Context,
    /,
    command: tuple[str, ...],
    module: bool,
    config: Path | None,
    dry_run: bool,
    show_config: bool,
    check: bool,
    plan_only: bool,
    cluster: str | None,
    quiet: bool,
    **flags: Any,
) -> None:
    """Start COMMAND, a Python script with its arguments, as the ranks of one job.

    All arguments after the script are passed to it. Flags override RANNC_<ITEM> variables, these override
    rannc_conf.toml: docs/configuration.md lists the items.
    """
    _open_closed_streams()
    here = None if check or show_config else rank_here(os.environ)
    if here is None or here.rank == 0:
        _tell_unread(config)
    if check:
        from rannd.runner import doctor  # its import takes a third of the time of all others

        ctx.exit(doctor.tell(doctor.check(config, os.environ), click.echo))
    items = with_flags(rannd.config.load(file=config), flags)
    if quiet:
        items = quietly(items)
    if show_config:
        click.echo("\n".join(items.lines()))
        return
    asked = Options.of(items, command, module=module, file=config, plan_only=plan_only, cluster=cluster)
    if here is not None and here.size > 1:
        _become(adopt(asked, here, os.environ), items, dry_run=dry_run)
        return
    job = prepare(asked, os.environ)
    if dry_run:
        click.echo(job.describe())
        return
    for line in () if quiet else hints(asked, job):
        _say(line)
    if job.preflight and not plan_only:
        job = _ready(job, items, script="" if module else command[0])
    if items.cache != "off":
        _have_daemon(items)
    ctx.exit(_planned(job) if plan_only else launch(job))


def _open_closed_streams() -> None:
    """Open standard streams that were closed (``>&-``) on /dev/null: a socket would take their numbers."""
    for fd in (0, 1, 2):  # in this order: each open takes the lowest free number
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _tell_unread(file: Path | None) -> None:
    """Warn that a rannc_conf.toml in the working directory is not read, because other programs would read theirs."""
    there = Path(rannd.config.CONF_FILE)
    try:
        read = rannd.config.file_to_read(os.environ, file)
    except ConfigError:  # reported by the code that reads it
        return
    if there.is_file() and not (read is not None and read.exists() and read.samefile(there)):
        _say(f"./{there} is not read; use --config {there} to read it")


def _become(adopted: Adopted, items: Config, *, dry_run: bool) -> None:
    """Turn this process into a rank of the job that it is in; returns only from a dry run."""
    if dry_run:
        click.echo(adopted.describe())
        return
    if adopted.here.rank == 0:
        for line in adopted.lines:
            _say(line)
    if items.cache != "off" and adopted.here.local_rank == 0:
        _have_daemon(items)
    sys.stdout.flush()
    try:
        os.execve(adopted.command[0], adopted.command, {**os.environ, **adopted.added})
    except OSError as error:
        raise LaunchError(f"{adopted.command[0]} cannot be executed: {error}") from None


def launch(job: Job) -> int:
    """Start the ranks, wait until the job has ended, report, and return the exit code.

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
        _say(f"logs: {job.log_dir}")
    if job.tuning_line and not job.quiet:
        _say(job.tuning_line)
    listener = Listener(job.remote_host)
    settings = {
        "address": listener.address,
        "token": listener.token,
        "grace": job.grace,
        "log_dir": job.log_dir,
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
    ).run()
    guard.close()
    processes.kill_session(launcher.pid)  # a login to a host that never answered
    session_folder.remove(own_folder)
    text = report(result, job.launcher.kind.value, job.shown, job.log_dir)
    _tell(text)
    return exit_code(result)


def _close_ports(job: Job, launcher: int) -> str:
    """Close the launcher's ports to other machines, unless ranks run there; return a line if that is not possible."""
    if job.remote_host is not None or job.launcher.kind is not LauncherKind.OPEN_MPI:
        return ""
    try:
        launcher_ports.close_session_to_others(launcher)
    except OSError as error:
        return "" if job.quiet else f"ports of {job.launcher.kind.value} stay open to other machines: {error}"
    return ""


def _ready(job: Job, items: Config, script: str) -> Job:
    """Return the job if every host is ready for it; LaunchError with a table of problems otherwise."""
    if not job.hosts and not job.gpus and {"MASTER_ADDR", "MASTER_PORT"} <= job.added.keys():
        return job  # there is nothing to ask
    from rannd.runner.launch import preflight  # its import takes as long as many of the others

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
    problems, port = preflight.inspect(plan, environ, _say)
    preflight.refuse(problems, len({place.host for place in job.places}) if job.hosts else 0)
    if port is not None and plan.chosen_port:
        return replace(job, added={**job.added, "MASTER_PORT": str(port)})
    return job


def _planned(job: Job) -> int:
    """Run `launch` for a plan; PlanError if the script ends without an error but made no plan."""
    with planned.awaited() as file:
        code = launch(replace(job, added={**job.added, planned.VARIABLE: str(file)}))
        if code == 0 and not file.exists():
            raise PlanError(
                "nothing was planned: the script ended without calling a pyrannc.RaNNCModule; call the model once"
            )
    return code


def _have_daemon(config: Config) -> None:
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
        _say(f"no daemon, nothing will be cached: {error}")


def _say(message: str) -> None:
    _tell(f"rannc-run: {message}\n")


def _tell(text: str) -> None:
    try:
        click.echo(text, nl=False, err=True)
    except OSError:  # a full disk must neither stop the job nor hide how it ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # buffered text has to go somewhere
