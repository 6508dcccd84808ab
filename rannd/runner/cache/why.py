"""`rannc-cache why`: shows in which components two keys differ, and why the last run had to plan again."""

from __future__ import annotations

import time

import click

from rannd.daemon.cli_common import duration_text, print_json
from rannd.daemon.common.near_misses import differences
from rannd.daemon.common.protocol import Difference, Miss
from rannd.errors import UsageError
from rannd.runner.cache.entries import checked_kind, date, greeted, json_option, only, print_table

RUN_S = 3600.0
"""Seconds before the last miss beyond which a miss belongs to another run: process numbers are reused."""
NOTHING = "(nothing)"


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY KEY]")
@click.option("--last", is_flag=True, help="Show the last misses, and the nearest entry for each.")
@click.option("--kind", help="With --last: only the last miss of this kind, such as deployment or trace.")
@json_option
def why(keys: tuple[str, ...], last: bool, kind: str | None, as_json: bool) -> None:
    """Show in which components two keys differ, or with --last: why did the last run plan again?"""
    if last and not keys:
        _last(checked_kind(kind), as_json)
    elif len(keys) == 2 and not last and kind is None:
        _between(*keys, as_json)
    else:
        raise UsageError("name two keys (rannc-cache why KEY KEY), or ask for the last miss (rannc-cache why --last)")


def latest(misses: list[Miss], kind: str | None = None) -> list[Miss]:
    """Select from misses, last one first: the last one of `kind`, or the last one of each kind of the last run.

    A run may miss its trace and then its deployment; both are reported.
    """
    found: dict[str, Miss] = {}
    for miss in misses:
        same_run = miss.pid == misses[0].pid and misses[0].at - miss.at <= RUN_S
        if miss.kind == kind or (kind is None and same_run):
            found.setdefault(miss.kind, miss)
    return list(found.values())


def _between(first: str, second: str, as_json: bool) -> None:
    session = greeted()
    one, other = only(session, first), only(session, second)
    found = differences(one.components, other.components)
    if as_json:
        named = [{"name": each.name, "first": each.wanted, "second": each.there} for each in found]
        keys = {name: {"key": entry.key, "kind": entry.kind} for name, entry in (("first", one), ("second", other))}
        print_json({**keys, "differences": named})
    elif one.key == other.key:
        click.echo(f"{first} and {second} are the same entry, {one.kind} {one.key}")
    elif one.kind != other.kind:
        click.echo(f"the kinds differ: {one.key[:12]} is a {one.kind}, {other.key[:12]} a {other.kind}")
    else:
        _print_differences(found, "first", "second")


def _last(kind: str | None, as_json: bool) -> None:
    found = latest(greeted().misses(), kind)
    if as_json:
        print_json(found)
        return
    if not found:
        of_kind = "" if kind is None else f" of kind {kind}"
        click.echo(f"no miss{of_kind} is recorded: no job on this node has had a cache miss")
    for number, miss in enumerate(found):
        if number:
            click.echo()
        _print_miss(miss)


def _print_miss(miss: Miss) -> None:
    ago = duration_text(time.time() - miss.at)
    click.echo(f"{miss.kind} {miss.key[:12]} was missed at {date(miss.at)}, {ago} ago")
    if not miss.nearest:
        click.echo(f"the cache had no other {miss.kind} then")
        return
    click.echo(f"the nearest {miss.kind} in the cache was {miss.nearest[:12]}; what differs:")
    _print_differences(miss.differences, "wanted", "there")


def _print_differences(found: list[Difference], first: str, second: str) -> None:
    rows = [[each.name, *(NOTHING if text is None else text for text in (each.wanted, each.there))] for each in found]
    print_table(("component", first, second), rows)
