"""Shared by the subcommands of `rannc-cache`: parses and formats entries, ages and sizes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import click
import rich.box
import rich.console
import rich.markup
import rich.table

from rannd.daemon.cli_common import configured_session, size_text
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common.keys import KINDS
from rannd.daemon.common.printable import plain
from rannd.daemon.common.protocol import MAX_SECONDS, EntryInfo
from rannd.errors import UsageError

MIN_PREFIX = 4
"""Minimum number of digits of a key prefix."""
MAX_SIZE = 1 << 60
"""Bytes: more than any disk has, less than a message can express."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
Command = TypeVar("Command", bound=Callable[..., None])


def json_option(command: Command) -> Command:
    """Add the option ``--json``, as parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def greeted() -> DaemonSession:
    """Return a session with the daemon, which is started if it does not run.

    Raises:
        ConfigError: The configuration is wrong.
        DaemonError: The daemon cannot be started or does not answer.
    """
    session = configured_session()
    session.greet()
    return session


def prefix(key: str) -> str:
    """Validate a key prefix; UsageError if it is not one."""
    if not re.fullmatch(f"[0-9a-f]{{{MIN_PREFIX},40}}", key):
        raise UsageError(
            f"{key!r} is not the start of a key: {MIN_PREFIX} to 40 digits 0-9a-f, as `rannc-cache ls` shows"
        )
    return key


def only(session: DaemonSession, key: str, otherwise: str = "") -> EntryInfo:
    """Return the only entry whose key starts with `key`.

    Raises:
        UsageError: There is none, or more than one; `otherwise` is appended to the message.
    """
    found = list(session.entries(prefix(key)))
    if not found:
        raise UsageError(f"no entry's key starts with {key}; see `rannc-cache ls`{otherwise}")
    if len(found) > 1:
        keys = ", ".join(entry.key[:16] for entry in found)
        raise UsageError(f"{len(found)} entries' keys start with {key}: {keys}; give more digits{otherwise}")
    return found[0]


def checked_kind(kind: str | None) -> str | None:
    """Validate a kind; UsageError if there is none of that name."""
    if kind is not None and kind not in KINDS:
        raise UsageError(f"--kind {kind!r}: there is no such kind of entry; kinds are {', '.join(KINDS)}")
    return kind


def duration(text: str) -> float:
    """Parse a duration to seconds: ``7d``, ``12h``, ``30m``, ``45s``, ``2w``.

    Raises:
        UsageError: It is none of those, or longer than a message can express.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip(), re.ASCII)
    if matched is None:
        raise UsageError(f"{text!r} is not a time span; write a number and one of s, m, h, d, w, such as 7d")
    found = float(matched[1]) * _SECONDS[matched[2]]
    if found > MAX_SECONDS:
        raise UsageError(f"{text!r} is more than thirty years; give a shorter time span, such as 7d")
    return found


def size(text: str) -> int:
    """Parse a size to bytes: ``500MB``, ``2GB`` (powers of 1000), ``1.5GiB`` (powers of 1024), ``100B``, ``0``.

    Raises:
        UsageError: It is none of those, or MAX_SIZE or more.
    """
    matched = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]?)(i?)B", text.strip(), re.ASCII)
    if text.strip() == "0":
        return 0
    if matched is None or (matched[3] and not matched[2]):
        raise UsageError(f"{text!r} is not a size; write a number and one of B, KB, MB, GB, KiB, MiB, GiB, such as 2GB")
    found = int(float(matched[1]) * (1024 if matched[3] else 1000) ** _PREFIXES[matched[2]])
    if found >= MAX_SIZE:
        raise UsageError(f"{text!r} is more than {MAX_SIZE} bytes; give a smaller size, such as 2GB")
    return found


def entries_text(number: int) -> str:
    """Format a number of entries: ``1 entry``, ``2 entries``."""
    return f"{number} entry" if number == 1 else f"{number} entries"


def total_text(entries: Sequence[EntryInfo]) -> str:
    """Format number and size: ``2 entries, 1.5 KiB``."""
    return f"{entries_text(len(entries))}, {size_text(sum(entry.length for entry in entries))}"


def date(moment: float) -> str:
    """Format seconds since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with all texts at full length: folded on a terminal, else tab-separated lines."""
    rows = [[plain(text) for text in row] for row in rows]
    console = rich.console.Console()
    if not console.is_terminal:
        for row in (heads, *rows):
            click.echo("\t".join(row))
        return
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(rich.markup.escape(text) for text in row))
    console.print(table)
