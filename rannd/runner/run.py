"""The command ``rannc-run``: starts the ranks, watches them, and reports."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import rannd.config
from rannd import __version__
from rannd.config import ITEMS, Config
from rannd.errors import ConfigError, LaunchError, PlanError, RanndError
from rannd.ranks import planned
from rannd.runner.adoption import Adopted, adopt
from rannd.runner.hints import hints
from rannd.runner.job import Job, prepare
from rannd.runner.report import exit_code
from rannd.runner.resources.inherited import rank_here
from rannd.runner.run_options import Options, quietly, with_flags
from rannd.runner.starting import have_daemon, launch, ready, say, tell_end

_NOTIFY = "notify-preempt"


class _Command(click.Command):
    """Prints rannd's errors as one message and exits with their exit code. One first argument is a command itself."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] != [_NOTIFY]:
            return super().make_context(info_name, args, parent, **extra)
        from rannd.runner.elastic.notify_preempt import notify_preempt  # few calls need it

        return notify_preempt.make_context(f"{info_name} {_NOTIFY}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)
        except RanndError as error:
            say(str(error))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:  # while ranks run, the monitor handles it
            say("SIGINT: nothing was started")
            ctx.exit(128 + signal.SIGINT)


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
@click.option("--config", type=_PATH, metavar="FILE", help="Configuration in place of ~/.pyrannc/rannc_conf.toml.")
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
@click.option(
    "--verify",
    "verify_step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Replay training step N in one process, and name the first value or gradient that differs.",
)
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
@click.option(
    "--elastic/--no-elastic",
    default=None,
    show_default="no-elastic",
    help="Start the ranks again when the host file changes or a rank fails.",
)
@click.option("--min-np", type=click.IntRange(min=1), metavar="N", help="With --elastic: minimum number of ranks.")
@click.option("--max-np", type=click.IntRange(min=0), metavar="N", help="With --elastic: maximum; 0: all slots.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    show_default=_default("max_restarts"),
    metavar="N",
    help="With --elastic: how often the job is started again after failures.",
)
@click.option(
    "--leave-timeout",
    type=click.FloatRange(min=0),
    show_default=_default("leave_timeout"),
    metavar="S",
    help="With --elastic: seconds for ranks to save and end when hosts change.",
)
@click.option(
    "--drop-stragglers/--no-drop-stragglers",
    default=None,
    show_default="no-drop-stragglers",
    help="With --elastic: leave slow hosts out when the ranks are started again.",
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

    "rannc-run notify-preempt [HOST]" tells the elastic jobs of this machine that a host is going away: see its --help.
    A script of this name is ./notify-preempt.
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
    if items.elastic and not plan_only:
        from rannd.runner.supervisor import Supervisor  # few jobs need it

        supervisor = Supervisor(asked, items, os.environ, script="" if module else command[0])
        if dry_run:
            click.echo(supervisor.first().describe())
            return
        if items.cache != "off":
            have_daemon(items)
        ctx.exit(supervisor.run())
    job = prepare(asked, os.environ)
    if dry_run:
        click.echo(job.describe())
        return
    for line in () if quiet else hints(asked, job):
        say(line)
    if job.preflight and not plan_only:
        job = ready(job, items, script="" if module else command[0])
    if items.cache != "off":
        have_daemon(items)
    ctx.exit(_planned(job) if plan_only else _launch(job))


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
        say(f"./{there} is not read; use --config {there} to read it")


def _become(adopted: Adopted, items: Config, *, dry_run: bool) -> None:
    """Turn this process into a rank of the job that it is in; returns only from a dry run."""
    if dry_run:
        click.echo(adopted.describe())
        return
    if adopted.here.rank == 0:
        for line in adopted.lines:
            say(line)
    if items.cache != "off" and adopted.here.local_rank == 0:
        have_daemon(items)
    sys.stdout.flush()
    try:
        os.execve(adopted.command[0], adopted.command, {**os.environ, **adopted.added})
    except OSError as error:
        raise LaunchError(f"{adopted.command[0]} cannot be executed: {error}") from None


def _launch(job: Job) -> int:
    """Run a job that is started once; return the exit code."""
    result = launch(job)
    tell_end(job, result)
    return exit_code(result)


def _planned(job: Job) -> int:
    """Run `launch` for a plan; PlanError if the script ends without an error but made no plan."""
    with planned.awaited() as file:
        code = _launch(replace(job, added={**job.added, planned.VARIABLE: str(file)}))
        if code == 0 and not file.exists():
            raise PlanError(
                "nothing was planned: the script ended without calling a pyrannc.RaNNCModule; call the model once"
            )
    return code
