"""`rannc-cache export` and `import`: write cache entries to a file, and read them back.

export_file.py defines the file format.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from rannd.daemon.cli_common import print_json, size_text
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common.protocol import MAX_BATCH, MAX_BATCH_BYTES, NewEntry, weight
from rannd.daemon.common.versions import version
from rannd.errors import UsageError
from rannd.plain_file import PlainFile
from rannd.runner.cache import export_file
from rannd.runner.cache.entries import checked_kind, entries_text, greeted, json_option, only
from rannd.runner.cache.export_file import Exported

_FILE = PlainFile("cache export", "rannc-cache export", UsageError, 1 << 50)
_MODE = 0o600
"""Mode of a written file: for its owner only, like the cache."""


_KEY_FILE = PlainFile("key file", "`head -c 32 /dev/urandom > FILE`", UsageError, 4096)
_SHORTEST_KEY = 16
"""Bytes of a key file."""


def _key(file: Path | None) -> bytes | None:
    """Read a key file, which must be readable for its owner alone, the user or root."""
    if file is None:
        return None
    with _KEY_FILE.reading(file) as opened:
        about = os.fstat(opened.fileno())
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"the key file {file} can be read or changed by other users; chmod 600 {file}, or use another key"
            )
        if about.st_uid not in (os.getuid(), 0):
            raise UsageError(f"the key file {file} belongs to user {about.st_uid}; name a key of your own")
        key = opened.read()
    if len(key) < _SHORTEST_KEY:
        raise UsageError(
            f"the key file {file} has {len(key)} bytes, a key has at least {_SHORTEST_KEY}; make one with "
            f"head -c 32 /dev/urandom > {file}"
        )
    return key


class Imported(msgspec.Struct, frozen=True):
    """Counts of the entries of an imported file."""

    new: int = 0
    there: int = 0
    """Entries that existed already and were kept."""
    replaced: int = 0
    skipped: int = 0
    """Entries that are too large for this cache."""


@click.command("export")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--kind", help="Only entries of this kind, such as deployment or profile.")
@click.option("--sign", metavar="KEYFILE", type=click.Path(path_type=Path), help="Sign FILE with this key.")
@json_option
def export_command(file: Path, keys: tuple[str, ...], kind: str | None, sign: Path | None, as_json: bool) -> None:
    """Write entries to FILE: all, or those whose key starts with a KEY and that are of the given kind."""
    checked_kind(kind)
    secret = _key(sign)
    session = greeted()
    wanted = {only(session, key, "; nothing is exported").key for key in keys}
    # Only the listing is in memory: values are requested one message at a time.
    entries = [
        entry
        for entry in session.entries()
        if (not keys or entry.key in wanted) and kind in (None, entry.kind) and entry.kind != export_file.NEVER
    ]
    written = size = 0
    with _FILE.writing(file, _MODE) as opened:
        writer = export_file.ExportWriter(opened, version(), time.time(), secret)
        for entry, value in zip(entries, session.values(entries), strict=True):
            if value is not None:
                exported = Exported(
                    entry.key, entry.kind, entry.components, entry.rannd, entry.created, value.size, value.data
                )
                writer.add(exported)
                written, size = written + 1, size + len(value.data)
        writer.end()
    if as_json:
        print_json({"file": str(file), "entries": written, "bytes": size})
    else:
        click.echo(f"exported {entries_text(written)}, {size_text(size)}, to {file}")
        if written < len(entries):
            click.echo(f"{entries_text(len(entries) - written)} disappeared meanwhile")


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace existing entries.")
@click.option(
    "--verify", metavar="KEYFILE", type=click.Path(path_type=Path), help="Refuse what KEYFILE has not signed."
)
@json_option
def import_command(file: Path, overwrite: bool, verify: Path | None, as_json: bool) -> None:
    """Store the entries of FILE. They are trusted like the cache's own: import only files that you trust."""
    secret = _key(verify)
    with _FILE.reading(file) as opened, _FILE.named(file):
        # First check the whole file, so that nothing of a damaged one is stored.
        checked = [_digest(entry) for entry in export_file.read(opened, secret)]
        session = greeted()
        before = session.state().statistics.evicted
        done = _keep(session, opened, overwrite, checked)
    evicted = session.state().statistics.evicted - before
    if as_json:
        print_json(done)
        return
    replaced = f", {done.replaced} replaced" if overwrite else ""
    click.echo(f"{entries_text(done.new)} new, {done.there} existed already{replaced}, {done.skipped} skipped")
    if done.skipped:
        click.echo(f"skipped: larger than the whole cache, {size_text(session.settings.max_bytes)}; raise cache_max_gb")
    if evicted > 0:
        click.echo(f"{entries_text(evicted)} evicted to make room; raise cache_max_gb to keep more")


def _digest(entry: Exported) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(entry)).digest()


def _keep(session: DaemonSession, opened: BinaryIO, overwrite: bool, checked: Sequence[bytes]) -> Imported:
    there = {entry.key for entry in session.entries()}
    seen: set[str] = set()
    new = stayed = replaced = skipped = 0

    def wanted() -> Iterator[Exported]:
        nonlocal new, stayed, replaced, skipped
        opened.seek(0)
        for number, entry in enumerate(export_file.read(opened)):
            if checked[number : number + 1] != [_digest(entry)]:
                raise UsageError("it was changed while it was read; import it again")
            if len(entry.value) > session.settings.max_bytes:
                skipped += 1
            elif entry.key in seen or (entry.key in there and not overwrite):
                stayed += 1
            else:
                seen.add(entry.key)
                new, replaced = new + (entry.key not in there), replaced + (entry.key in there)
                yield entry

    for batch in _batches(wanted()):
        session.put(
            [NewEntry(entry.key, entry.kind, entry.components, entry.value, entry.size) for entry in batch],
            batch[0].rannd,
        )
    return Imported(new, stayed, replaced, skipped)


def _batches(entries: Iterator[Exported]) -> Iterator[list[Exported]]:
    """Split entries into batches for one message: of one version of rannd, at most MAX_BATCH and MAX_BATCH_BYTES."""
    batch: list[Exported] = []
    size = 0
    for entry in entries:
        more = weight(entry.components, entry.value)
        full = len(batch) == MAX_BATCH or size + more > MAX_BATCH_BYTES
        if batch and (full or entry.rannd != batch[0].rannd):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += more
    if batch:
        yield batch
