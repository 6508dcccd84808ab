"""Shared by the commands `rannd` and `rannc-cache`: configuration, error output, number formats."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from typing import Any

import click
import msgspec

import rannd.config
from rannd.config import Config
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.daemon.server.server import Settings
from rannd.daemon.store.database import ASIDE
from rannd.errors import RanndError

_UNWRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of writing to a file. click itself handles a closed pipe."""


class Commands(click.Group):
    """A click group that prints a RanndError as one line and exits with its exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command; an output that cannot be written, such as to a full disk, is told in one line."""
        try:
            return super().main(*args, **kwargs)
        except OSError as exc:
            if exc.filename is not None or exc.errno not in _UNWRITTEN:
                raise
            with contextlib.suppress(OSError):
                sys.stdout.close()  # else Python tries to write the rest again when it ends
            click.echo(f"{os.path.basename(sys.argv[0])}: the output cannot be written: {exc.strerror}", err=True)
            sys.exit(RanndError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand named on the command line."""
        try:
            return super().invoke(ctx)
        except RanndError as exc:
            click.echo(f"{ctx.info_name}: {exc}", err=True)
            ctx.exit(exc.exit_code)


def configured_session(config: Config | None = None, *, pinned: bool = False) -> DaemonSession:
    """Return a session with the limits of a configuration, by default the user's own. Does not contact the daemon.

    Raises:
        ConfigError: The configuration is wrong.
    """
    config = config if config is not None else rannd.config.load()
    max_bytes = int(config.cache_max_gb * 2**30)
    return DaemonSession(
        places(), Settings(config.daemon_idle_s, max_bytes, version(), pinned), config.daemon_timeout_s
    )


def warn_of_lost_store(session: DaemonSession) -> None:
    """Say on standard error that the cache was lost, for as long as the corrupt file lies there."""
    file = session.places.store + ASIDE
    with contextlib.suppress(FileNotFoundError):
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(file).st_mtime))
        click.echo(
            f"the store was corrupt on {moment} and an empty one was created; the corrupt file is {file} (delete it "
            "to end this message)",
            err=True,
        )


def print_json(value: object) -> None:
    """Print `value` as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def size_text(number: int) -> str:
    """Format a number of bytes: ``512 B``, ``1.5 KiB``."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def duration_text(seconds: float) -> str:
    """Format a time span in its largest unit: ``45 s``, ``3 min``, ``2 h``, ``9 d``."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
