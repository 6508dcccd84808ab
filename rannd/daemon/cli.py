"""The command `rannd`: starts, stops and inspects this user's daemon on this node."""

from __future__ import annotations

import logging
import os
import shlex
import time

import click

from rannd.daemon import systemd_units
from rannd.daemon.cli_common import Commands, configured_session, print_json, warn_of_lost_store
from rannd.daemon.client import spawn
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common import protocol
from rannd.daemon.common.listening import answers
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.daemon.prometheus import exposition
from rannd.daemon.server import boot
from rannd.daemon.status_text import lines
from rannd.errors import DaemonError, UsageError

NOT_RUNNING = 3
"""Exit code of `rannd status` if no daemon runs, as for systemctl and LSB scripts."""


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="rannd")
def main() -> None:
    """The daemon that caches traces, profiles and deployments. Jobs start it when they need it."""


@main.command()
def start() -> None:
    """Start the daemon; succeeds if it runs already."""
    _tell(configured_session().greet())


@main.command()
def stop() -> None:
    """Stop the daemon after it has answered its queued requests."""
    stopped = _stop(configured_session(), "rannd stop")
    click.echo("the daemon has ended" if stopped else "no daemon runs")


@main.command()
def restart() -> None:
    """Stop the daemon if it runs, and start it again."""
    session = configured_session()
    _stop(session, "rannd restart")
    _tell(session.greet())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--prometheus", is_flag=True, help="Print metrics in Prometheus' text format.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, prometheus: bool) -> None:
    """Show the state of the daemon without starting it. Exit code 3: it does not run."""
    if as_json and prometheus:
        raise UsageError("--json and --prometheus are two formats; give one of them")
    session = configured_session()
    if os.path.lexists(session.places.runtime):  # not created only to look at it
        session.places.secure_runtime()
    if not (boot.lives(session.places) and answers(session.places.socket)):
        if as_json:
            print_json({"running": False, "socket": session.places.socket, "store": session.places.store})
        elif prometheus:
            click.echo(exposition(None), nl=False)
        else:
            click.echo(f"no daemon runs (it would listen at {session.places.socket})")
        ctx.exit(NOT_RUNNING)
    state = session.state()
    warn_of_lost_store(session)
    if as_json:
        print_json({"running": True, **_fields(state)})
    elif prometheus:
        click.echo(exposition(state), nl=False)
    else:
        click.echo("\n".join(lines(state)))


@main.command()
@click.option("--idle", type=click.FloatRange(min=0), help="Exit after this many seconds without requests; 0: never.")
def run(idle: float | None) -> None:
    """Run the daemon in the foreground, for systemd or debugging."""
    session = configured_session(pinned=True)
    settings = session.settings
    if idle is not None:
        settings = type(settings)(idle, settings.max_bytes, settings.version, pinned=True)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] [%(process)d] [%(levelname)s] %(message)s")
    told = f"rannd {settings.version}, pid {os.getpid()}, listens at {session.places.socket}"
    if not boot.run(session.places, settings, on_ready=told):
        raise DaemonError(f"a daemon listens at {session.places.socket} already; see `rannd status`")


@main.command()
@click.option("--print", "only_print", is_flag=True, help="Print the units and write nothing.")
@click.option("--force", is_flag=True, help="Overwrite units that have other content.")
def install_service(only_print: bool, force: bool) -> None:
    """Write systemd user units that start the daemon on demand. Does not enable them."""
    where = places()
    made, folder = systemd_units.units(where, systemd_units.executable()), systemd_units.directory()
    if only_print:
        for name, text in made.files().items():
            click.echo(f"# {folder / name}\n{text}")
        return
    where.secure_cache()  # the service may write there, but cannot create it
    files = systemd_units.install(made, folder, force=force)
    for file, written in files.items():
        click.echo(f"wrote {file}" if written else f"{file} is up to date")
    click.echo(_HOW_TO.format(files=" ".join(map(shlex.quote, map(str, files)))))


_HOW_TO = """
To let systemd listen for the daemon, from now on and after each login:
  rannd stop
  systemctl --user daemon-reload
  systemctl --user enable --now rannd.socket

To undo it:
  systemctl --user disable --now rannd.socket rannd.service
  rm {files}
  systemctl --user daemon-reload"""


def _stop(session: DaemonSession, reason: str) -> bool:
    return spawn.stop(session.places, reason, time.monotonic() + session.timeout_s)


def _tell(daemon: spawn.Daemon) -> None:
    click.echo(f"rannd {daemon.version}, pid {daemon.pid}, {'started' if daemon.started else 'runs already'}")


def _fields(state: protocol.State) -> dict[str, object]:
    return {name: getattr(state, name) for name in state.__struct_fields__}
