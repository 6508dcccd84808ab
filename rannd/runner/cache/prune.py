"""`rannc-cache prune`: shrinks the cache, least recently used entries first."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import click

from rannd.daemon.cli_common import print_json
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common import protocol
from rannd.daemon.common.keys import summary
from rannd.daemon.common.protocol import EntryInfo
from rannd.errors import UsageError
from rannd.runner.cache.entries import duration, greeted, json_option, size, total_text


@click.command()
@click.option("--max-size", metavar="SIZE", help="Shrink the cache to this size: 2GB, 500MB, 1.5GiB, 0.")
@click.option("--older-than", metavar="AGE", help="Remove entries not used for this long: 7d, 12h, 30m.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@json_option
def prune(max_size: str | None, older_than: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove entries by age, then least recently used ones down to a size. Entries that a job is computing now stay."""
    if max_size is None and older_than is None:
        raise UsageError("prune needs a limit; give --max-size, such as 2GB, or --older-than, such as 7d, or both")
    max_bytes = None if max_size is None else size(max_size)
    age_s = None if older_than is None else duration(older_than)
    session = greeted()
    gone = _chosen(session, max_bytes, age_s) if dry_run else _removed(session, max_bytes, age_s)
    if as_json:
        print_json(gone)
        return
    verb = "would remove" if dry_run else "removed"
    for entry in gone:
        click.echo(f"{verb} {entry.kind} {entry.key}  {summary(entry.kind, entry.components)}")
    click.echo(f"{verb} {total_text(gone)}")


def unused(entries: Iterable[EntryInfo], before: float, leased: Collection[str]) -> list[EntryInfo]:
    """Return entries last used at or before `before` (seconds since the epoch) and not leased, longest unused first."""
    found = [entry for entry in entries if entry.used <= before and entry.key not in leased]
    return sorted(found, key=lambda entry: (entry.used, entry.key))


def excess(entries: Collection[EntryInfo], max_bytes: int, leased: Collection[str]) -> list[EntryInfo]:
    """Return what the daemon would remove to reach `max_bytes`, in its order (`Store.prune`)."""
    found = []
    total = sum(entry.length for entry in entries)
    for entry in sorted(entries, key=lambda entry: (entry.used, entry.key)):
        if total <= max_bytes:
            break
        if entry.key not in leased:
            found.append(entry)
            total -= entry.length
    return found


def _chosen(session: DaemonSession, max_bytes: int | None, age_s: float | None) -> list[EntryInfo]:
    entries, leased = list(session.entries()), _leased(session)
    old = [] if age_s is None else unused(entries, time.time() - age_s, leased)
    if max_bytes is None:
        return old
    gone = {entry.key for entry in old}
    return old + excess([entry for entry in entries if entry.key not in gone], max_bytes, leased)


def _removed(session: DaemonSession, max_bytes: int | None, age_s: float | None) -> list[EntryInfo]:
    removed: list[EntryInfo] = []
    if age_s is not None:
        old = unused(session.entries(), time.time() - age_s, _leased(session))
        for first in range(0, len(old), protocol.MAX_BATCH):
            keys = [entry.key for entry in old[first : first + protocol.MAX_BATCH]]
            # Check the age again: an entry that was used meanwhile stays.
            removed += session.clear(older_than_s=age_s, keys=keys)
    if max_bytes is not None:
        removed += session.prune(max_bytes)
    return removed


def _leased(session: DaemonSession) -> set[str]:
    return {lease.key for lease in session.state().leases}
