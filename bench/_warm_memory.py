"""Keeps free memory with a virtual machine: some hosts take it back at once, and give it again slowly.

    python bench/_warm_memory.py GIB

Uses so much memory, and frees all but one page of each 2 MiB. What the host takes back are whole blocks of 2 MiB (free
page reporting, /sys/module/page_reporting), so that most of the rest stays. Ends with its standard input.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BLOCK = 2 << 20


@contextmanager
def warm_memory(gib: float) -> Iterator[None]:
    """Keep so many GiB meanwhile; 0: nothing is done."""
    if not gib:
        yield
        return
    command = [sys.executable, __file__, str(gib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            sys.exit(f"{gib:g} GiB of memory could not be used")
        try:
            yield
        finally:
            holder.stdin.close()


def main() -> None:
    size = int(float(sys.argv[1]) * (1 << 30)) // _BLOCK * _BLOCK
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for place in range(0, size, mmap.PAGESIZE):
        memory[place] = 1
    for place in range(0, size, _BLOCK):
        memory.madvise(mmap.MADV_DONTNEED, place + mmap.PAGESIZE, _BLOCK - mmap.PAGESIZE)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
