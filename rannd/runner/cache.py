"""The command `rannc-cache`: look into this user's cache on this node, and clear it.

Works whether or not the daemon runs: it is started just in time, as by a job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import click
import rich.box
import rich.console
import rich.table

from rannd.daemon import protocol
from rannd.daemon.command import Commands, configured_session, duration_text, print_json, size_text
from rannd.daemon.keys import summary
from rannd.daemon.protocol import EntryInfo
from rannd.daemon.session import Session
from rannd.daemon.version import version
from rannd.errors import DeploymentError, UsageError
from rannd.plan.deployment import Deployment, decode
from rannd.plan.show import show as plan_text

CORRUPT = 1
"""Exit code of `rannc-cache verify` where entries were corrupt."""
MIN_PREFIX = 4
"""Digits of a key that are enough to name it, where they are unique."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_Command = TypeVar("_Command", bound=Callable[..., None])


def _json_option(command: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="rannc-cache")
def main() -> None:
    """Deployments, profiles and traces that are kept for the next run."""


@main.command()
@_json_option
def ls(as_json: bool) -> None:
    """List the entries, the latest used first."""
    entries = sorted(_greeted().entries(), key=lambda entry: -entry.used)
    if as_json:
        print_json(entries)
        return
    console = rich.console.Console(soft_wrap=True)
    rows = [_row(entry) for entry in entries]
    heads = ("KIND", "KEY", "AGE", "LAST USED", "SIZE", "WHAT")
    if not console.is_terminal:
        for row in (heads, *rows):
            click.echo("\t".join(row))
        return
    if not entries:
        console.print("the cache is empty")
        return
    table = rich.table.Table(*heads, box=rich.box.SIMPLE_HEAD)
    table.columns[4].justify = "right"
    for entry, row in zip(entries, rows, strict=True):
        table.add_row(row[0], entry.key[:12], *row[2:])
    rich.console.Console().print(table)
    total = sum(entry.length for entry in entries)
    console.print(f"{len(entries)} {_entries(len(entries))}, {size_text(total)}")


@main.command()
@click.argument("key")
@_json_option
def show(key: str, as_json: bool) -> None:
    """Show everything about the entry whose key starts with KEY; of a deployment, the plan as well."""
    session = _greeted()
    found = list(session.entries(_prefix(key)))
    if len(found) != 1:
        raise UsageError(_not_one(key, found))
    entry = found[0]
    plan, problem = _deployment(session, entry)
    if as_json:
        told = {name: getattr(entry, name) for name in entry.__struct_fields__}
        print_json({**told, "deployment": plan} if entry.kind == "deployment" else told)
        return
    now = time.time()
    click.echo(f"key        {entry.key}")
    click.echo(f"kind       {entry.kind}, format {entry.format}, written by rannd {entry.rannd}")
    click.echo(f"created    {_date(entry.created)}, {duration_text(now - entry.created)} ago")
    click.echo(f"last used  {_date(entry.used)}, {duration_text(now - entry.used)} ago, {entry.hits} hits")
    click.echo(f"length     {entry.length} bytes")
    click.echo(f"checksum   {entry.checksum}")
    click.echo("components")
    for name, text in sorted(entry.components.items()):
        click.echo(f"  {name} = {text}")
    if problem:
        click.echo(f"\nThe deployment cannot be shown: {problem}")
    elif plan is not None:
        click.echo("\n" + plan_text(plan))


def _deployment(session: Session, entry: EntryInfo) -> tuple[Deployment | None, str]:
    """(the deployment in an entry, why it cannot be had); nothing of both for entries of other kinds."""
    if entry.kind != "deployment":
        return None, ""
    values = session.ask(protocol.Get([entry.key]), protocol.Values).values
    value = values[0] if values else None
    if value is None:
        return None, "it is not there any more"
    try:
        return decode(value), ""
    except DeploymentError as exc:
        return None, str(exc)


@main.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--kind", help="Only entries of this kind, as deployment or profile.")
@click.option("--older-than", metavar="AGE", help="Only entries not used for so long, as 7d, 12h, 30m.")
@_json_option
def clear(keys: tuple[str, ...], kind: str | None, older_than: str | None, as_json: bool) -> None:
    """Remove entries: all, or those whose key starts with a KEY and that match the options."""
    prefixes = [_prefix(key) for key in keys]
    if kind is not None and not re.fullmatch("[a-z][a-z_]{0,31}", kind):
        raise UsageError(f"--kind {kind!r} is not a kind; `rannc-cache ls` shows the kinds there are")
    age_s = None if older_than is None else duration(older_than)
    session = _greeted()
    for key, prefix in zip(keys, prefixes, strict=True):
        found = list(session.entries(prefix))
        if len(found) != 1:
            raise UsageError(_not_one(key, found) + "; nothing is removed")
    removed = session.clear(kind=kind, older_than_s=age_s, keys=prefixes or None)
    if as_json:
        print_json(removed)
        return
    for entry in removed:
        click.echo(f"removed {entry.kind} {entry.key}  {summary(entry.kind, entry.components)}")
    click.echo(
        f"removed {len(removed)} {_entries(len(removed))}, {size_text(sum(entry.length for entry in removed))}"
    )  # fmt: skip


@main.command()
@_json_option
def stats(as_json: bool) -> None:
    """Show sizes and counts."""
    session = _greeted()
    state = session.state()
    kinds: dict[str, dict[str, int]] = {}
    for entry in session.entries():
        of_kind = kinds.setdefault(entry.kind, {"entries": 0, "bytes": 0})
        of_kind["entries"] += 1
        of_kind["bytes"] += entry.length
    counted = state.statistics
    if as_json:
        sizes = {"entries": state.entries, "bytes": state.bytes, "max_bytes": state.max_bytes}
        print_json({**sizes, "store": state.store, "kinds": kinds, "statistics": counted})
        return
    click.echo(f"store      {state.store}")
    click.echo(f"entries    {state.entries}, {size_text(state.bytes)} of {size_text(state.max_bytes)}")
    for name, of_kind in sorted(kinds.items()):
        click.echo(f"  {name:<12} {of_kind['entries']}, {size_text(of_kind['bytes'])}")
    asked = counted.hits + counted.misses
    rate = f" ({100 * counted.hits / asked:.0f} % of {asked} look-ups)" if asked else ""
    click.echo(f"hits       {counted.hits}{rate}")
    for name in counted.__struct_fields__[1:]:
        click.echo(f"{name:<10} {getattr(counted, name)}")


@main.command()
@_json_option
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Check every entry; corrupt ones are set aside. Exit code 1: there were some."""
    sound, corrupt = _greeted().verify()
    if as_json:
        print_json({"sound": sound, "corrupt": corrupt})
    else:
        for key in corrupt:
            click.echo(f"corrupt, set aside: {key}")
        click.echo(f"{sound} {_entries(sound)} sound, {len(corrupt)} corrupt")
    if corrupt:
        ctx.exit(CORRUPT)


def duration(text: str) -> float:
    """Seconds of ``7d``, ``12h``, ``30m``, ``45s``, ``2w``.

    Raises:
        UsageError: it is none of those.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if matched is None:
        raise UsageError(f"{text!r} is not a time span; write a number and one of s, m, h, d, w, as 7d")
    return float(matched[1]) * _UNITS[matched[2]]


def _greeted() -> Session:
    session = configured_session()
    session.greet()
    return session


def _row(entry: EntryInfo) -> tuple[str, ...]:
    now = time.time()
    ages = duration_text(now - entry.created), duration_text(now - entry.used)
    return (entry.kind, entry.key, *ages, size_text(entry.length), summary(entry.kind, entry.components))


def _prefix(key: str) -> str:
    if not re.fullmatch(f"[0-9a-f]{{{MIN_PREFIX},40}}", key):
        raise UsageError(
            f"{key!r} is not the start of a key: {MIN_PREFIX} to 40 digits 0-9a-f, as `rannc-cache ls` shows"
        )
    return key


def _not_one(key: str, found: Sequence[EntryInfo]) -> str:
    if not found:
        return f"no entry's key starts with {key}; `rannc-cache ls` shows what there is"
    return (
        f"{len(found)} entries' keys start with {key}: {', '.join(entry.key[:16] for entry in found)}; give more digits"
    )


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _entries(number: int) -> str:
    return "entry" if number == 1 else "entries"
