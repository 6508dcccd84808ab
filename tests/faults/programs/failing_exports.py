"""Each call for files fails in turn while an export of the cache, and the daemon's store, is written."""

from __future__ import annotations

import errno
import sys
import time
from pathlib import Path

from faults.faulty import CALLS, ERRORS, Faults

from rannd.daemon.common.keys import make_key
from rannd.errors import RanndError, UsageError
from rannd.plain_file import PlainFile
from rannd.runner.cache import export_file
from rannd.runner.cache.export_file import Exported, ExportWriter

root = Path(sys.argv[1])
faults = Faults()
file = PlainFile("cache export", "rannc-cache export", UsageError, 1 << 30)
path = root / "cache.rannd"
number_of_entries = 0


def export() -> None:
    """Write a file with one entry more than before."""
    global number_of_entries
    number_of_entries += 1
    with file.writing(path, 0o600) as opened:
        writer = ExportWriter(opened, "0.1.0", time.time())
        for number in range(number_of_entries):
            key = make_key("trace", {"number": number})
            writer.add(Exported(key.digest, key.kind, key.components, "0.1.0", 1e9, 0, bytes(5000)))
        writer.end()


export()
faults.plan()
export()
counts = {call: faults.seen(call) for call in CALLS}
last, tried, told = number_of_entries, 0, 0
for call, count in counts.items():
    for number in range(1, count + 1):
        for error in (*ERRORS.values(), *((0,) if call == "write" else ())):
            number_of_entries = 2
            faults.plan(call, number, error)
            raised = None
            try:
                export()
            except RanndError as exc:
                raised = exc
                told += 1
            finally:
                faults.plan()
            where = f"{call} {number} of {count} with {errno.errorcode.get(error, 'half of the data')}"
            tried += 1
            with path.open("rb") as opened:
                found = len(list(export_file.read(opened)))
            assert found == (3 if raised is None else last), f"{where}: {found} entries, {raised}"
            last = found
            assert [each.name for each in root.iterdir() if each.suffix != ".sqlite"] == [path.name], where
assert told
print(f"exports: {tried} failing calls, {told} told; {counts}")
