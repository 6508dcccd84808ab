"""The command `rannc-cache`: inspects and clears this user's cache on this node.

Its larger subcommands are in show_entry.py, why.py, prune.py and export_import.py. It starts the daemon if it does not
run, as a job does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import rich.box
import rich.console
import rich.table
import rich.text

from rannd.daemon.cli_common import Commands, duration_text, print_json, size_text, warn_of_lost_store
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common.keys import summary
from rannd.daemon.common.protocol import EntryInfo, KindCount
from rannd.daemon.common.versions import version
from rannd.plan.plan_text import title
from rannd.runner.cache.entries import (
    checked_kind,
    duration,
    entries_text,
    greeted,
    json_option,
    only,
    prefix,
    total_text,
)
from rannd.runner.cache.export_import import export_command, import_command
from rannd.runner.cache.prune import prune
from rannd.runner.cache.show_entry import read_deployment, show
from rannd.runner.cache.why import why

CORRUPT = 1
"""Exit code of `rannc-cache verify` if entries were corrupt."""
NARROW = 80
"""Columns of a terminal below which `rannc-cache ls` cuts what an entry is, instead of folding it into many lines."""


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="rannc-cache")
def main() -> None:
    """Deployments, profiles and traces that are cached for later runs."""


@main.command()
@click.option("--kind", help="Only entries of this kind, such as deployment or profile.")
@json_option
def ls(kind: str | None, as_json: bool) -> None:
    """List the entries, latest used first."""
    checked_kind(kind)
    session = greeted()
    found = (entry for entry in session.entries() if kind in (None, entry.kind))
    entries = sorted(found, key=lambda entry: -entry.used)
    warn_of_lost_store(session)
    if as_json:
        print_json(entries)
        return
    console = rich.console.Console(soft_wrap=True)
    titles = _titles(session, entries)
    rows = [_row(entry, titles.get(entry.key, "")) for entry in entries]
    heads = ("KIND", "KEY", "AGE", "LAST USED", "SIZE", "WHAT")
    if not console.is_terminal:
        for row in (heads, *rows):
            click.echo("\t".join(row))
        return
    if not entries:
        console.print("the cache is empty" if kind is None else f"the cache has no {kind}")
        return
    narrow = console.width < NARROW
    box = None if narrow else rich.box.SIMPLE_HEAD
    table = rich.table.Table(*heads, box=box, collapse_padding=narrow, pad_edge=not narrow)
    table.columns[4].justify = "right"
    for column in table.columns[:-1]:
        column.no_wrap = narrow  # so that only the last one becomes narrower
    for entry, row in zip(entries, rows, strict=True):
        table.add_row(row[0], entry.key[:12], *row[2:5], rich.text.Text(row[5], no_wrap=narrow, overflow="ellipsis"))
    rich.console.Console().print(table)
    console.print(total_text(entries))


def _titles(session: DaemonSession, entries: Sequence[EntryInfo]) -> dict[str, str]:
    """Return the model and the stages of each deployment that names its model, by the key of its entry."""
    deployments = [entry for entry in entries if entry.kind == "deployment"]
    plans = (
        (entry, read_deployment(value)[0])
        for entry, value in zip(deployments, session.values(deployments), strict=True)
        if value is not None
    )
    return {entry.key: title(plan) for entry, plan in plans if plan is not None and plan.model}


@main.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--kind", help="Only entries of this kind, such as deployment or profile.")
@click.option("--older-than", metavar="AGE", help="Only entries not used for this long, such as 7d, 12h, 30m.")
@json_option
def clear(keys: tuple[str, ...], kind: str | None, older_than: str | None, as_json: bool) -> None:
    """Remove entries: all, or those whose key starts with a KEY and that match the options."""
    prefixes = [prefix(key) for key in keys]
    checked_kind(kind)
    age_s = None if older_than is None else duration(older_than)
    session = greeted()
    for key in keys:
        only(session, key, "; nothing is removed")
    removed = session.clear(kind=kind, older_than_s=age_s, keys=prefixes or None)
    if as_json:
        print_json(removed)
        return
    for entry in removed:
        click.echo(f"removed {entry.kind} {entry.key}  {summary(entry.kind, entry.components)}")
    click.echo(f"removed {total_text(removed)}")


@main.command()
@click.option("--zero", is_flag=True, help="Reset the counters after showing them.")
@json_option
def stats(zero: bool, as_json: bool) -> None:
    """Show sizes and counters."""
    session = greeted()
    state = session.state()
    warn_of_lost_store(session)
    kinds = {name: {"entries": 0, "bytes": 0, **_counts(count)} for name, count in state.kinds.items()}
    for entry in session.entries():
        of_kind = kinds.setdefault(entry.kind, {"entries": 0, "bytes": 0, **_counts(KindCount())})
        of_kind["entries"] += 1
        of_kind["bytes"] += entry.length
    if zero:
        session.zero()
    counted = state.statistics
    if as_json:
        sizes = {"entries": state.entries, "bytes": state.bytes, "max_bytes": state.max_bytes}
        print_json({**sizes, "store": state.store, "kinds": kinds, "statistics": counted})
        return
    click.echo(f"store      {state.store}")
    click.echo(f"entries    {state.entries}, {size_text(state.bytes)} of {size_text(state.max_bytes)}")
    for name, of_kind in sorted(kinds.items()):
        looked_up = f"hits {of_kind['hits']}, misses {of_kind['misses']}"
        click.echo(f"  {name:<12} {of_kind['entries']}, {size_text(of_kind['bytes'])}, {looked_up}")
    asked = counted.hits + counted.misses
    rate = f" ({100 * counted.hits / asked:.0f} % of {asked} look-ups)" if asked else ""
    click.echo(f"hits       {counted.hits}{rate}")
    for name in counted.__struct_fields__[1:]:
        click.echo(f"{name:<10} {getattr(counted, name)}")
    if zero:
        click.echo("the counters were reset to 0")


def _counts(count: KindCount) -> dict[str, int]:
    return {"hits": count.hits, "misses": count.misses}


@main.command()
@json_option
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Check every entry and set corrupt ones aside. Exit code 1: there were some."""
    sound, corrupt = greeted().verify()
    if as_json:
        print_json({"sound": sound, "corrupt": corrupt})
    else:
        for key in corrupt:
            click.echo(f"corrupt, set aside: {key}")
        click.echo(f"{entries_text(sound)} sound, {len(corrupt)} corrupt")
    if corrupt:
        ctx.exit(CORRUPT)


def _row(entry: EntryInfo, title: str) -> tuple[str, ...]:
    """Columns of an entry. A `title` says more than the hash of a graph."""
    now = time.time()
    ages = duration_text(now - entry.created), duration_text(now - entry.used)
    known = {name: text for name, text in entry.components.items() if not title or name != "graph"}
    what = ", ".join(filter(None, (title, summary(entry.kind, known))))
    return (entry.kind, entry.key, *ages, size_text(entry.length), what)


for _command in (show, why, prune, export_command, import_command):
    main.add_command(_command)
