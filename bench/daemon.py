"""Benchmarks of the daemon: look-ups by many clients, puts, start-up time and memory. Needs neither torch nor ranks.

    python bench/daemon.py [--clients 1 8 64] [--lookups 2000] [--entries 1000 10000] [--deployments 500] [--starts 15]

All requests go through `rannd.daemon.client.cache.Client`, as a job's do, over open connections from processes that
have already sent requests. Entries are 1 kB of random bytes under profile keys. The runtime and cache folders are
temporary.

in turn   each client sends its next request as soon as it has the answer: the daemon's maximum throughput. With 64
          clients the latency is that of 64 look-ups, and the clients compete for the cores as well
now and   each client sends ten requests per second at random times: as jobs that all start at once do. The goal is for
then      this case
start     from a client without a running daemon to its first answer: process, imports, store, socket, handshake and
          look-up
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import zmq
from _results import Table, found

from rannd.config import Config
from rannd.daemon.client import spawn
from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key, deployment_key, profile_key
from rannd.daemon.common.paths import places

KB, MIB = 1000, 1 << 20
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "rannd": "0.1.0"}
MANY = 64
"""Clients for which the goals are."""
PAUSE_S = 0.1
"""Mean pause in seconds between the requests of a client in the case 'now and then'."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64], help="numbers of concurrent clients")
    parser.add_argument("--lookups", type=int, default=2000, help="minimum number of look-ups per row, of all clients")
    parser.add_argument("--entries", type=int, nargs="+", default=[1000, 10_000], help="numbers of stored entries")
    parser.add_argument("--deployments", type=int, default=500, help="number of deployments to search for the nearest")
    parser.add_argument("--starts", type=int, default=15, help="number of starts of the daemon")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rannd-bench-"))
    for name, variable in (("run", "XDG_RUNTIME_DIR"), ("cache", "XDG_CACHE_HOME")):
        (home / name).mkdir(mode=0o700)
        os.environ[variable] = str(home / name)
    table = Rows()
    try:
        starts(table, options.starts)
        with client() as one:
            for number, entries in enumerate(sorted(options.entries)):
                fill(one, entries)
                if not number:
                    lookups(table, options.clients, options.lookups, entries)
                    writes(table, one, max(5, options.lookups // 20))
                memory(table, entries)
            nearest(table, one, options.deployments, max(5, options.lookups // 40))
    finally:
        spawn.stop(places(), "bench", time.monotonic() + 60)
        shutil.rmtree(home)


def client() -> Client:
    made = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)
    if not made.connected:
        sys.exit("the daemon could not be started; see the message above")
    return made


def profile(number: int) -> Key:
    return profile_key(block_hash=f"{number:064x}", device_model="bench", threads=1, versions=VERSIONS, flags={})


def noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def fill(one: Client, entries: int) -> None:
    one.put_many((profile(number), noise(KB)) for number in range(entries))


class Rows:
    """The table of all requests."""

    def __init__(self) -> None:
        ms = "{:.2f} ms"
        self.table = Table(
            "Requests to the daemon", "what", ("median", ms), ("p99", ms), ("per second", "{:,.0f}"),
            ("memory", "{:.1f} MiB"),
        )  # fmt: skip

    def times(self, name: str, times: Sequence[float], a_second: float | None = None) -> tuple[float, float]:
        """Print a row; `times` in seconds. Returns median and 99th percentile in milliseconds."""
        late = sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]
        told = statistics.median(times) * 1e3, late * 1e3
        self.table.row(name, *told, a_second, None)
        return told


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return found


# -- look-ups ------------------------------------------------------------------------------------------------------


def lookups(table: Rows, clients: Sequence[int], wanted: int, entries: int) -> None:
    for number in clients:
        each = max(10, wanted // number)
        times, took = herd(number, each, entries, 0.0)
        table.times(f"look-up, {number} {'client' if number == 1 else 'clients'} in turn", times, len(times) / took)
        times, took = herd(number, max(10, min(each, int(5 / PAUSE_S))), entries, PAUSE_S)
        median, late = table.times(f"look-up, {number} now and then", times, len(times) / took)
    if max(clients) == MANY:
        found("look-up-median", median)
        found("look-up-p99", late)


def herd(clients: int, each: int, entries: int, pause_s: float) -> tuple[list[float], float]:
    """Run look-ups in `clients` processes; returns the latencies of all look-ups and the total time, in seconds."""
    gate, opened = os.pipe()
    ready, told = os.pipe()
    pipes = [os.pipe() for _ in range(clients)]
    children = []
    for number, (_, result) in enumerate(pipes):
        child = os.fork()
        if child == 0:
            try:
                os.close(opened)
                latencies = member(number, each, entries, pause_s, gate, told)
                with os.fdopen(result, "w") as file:
                    file.write(" ".join(map(repr, latencies)))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
        os.close(result)
    for _ in children:
        os.read(ready, 1)
    begun = time.perf_counter()
    os.close(opened)
    times = []
    for source, _ in pipes:
        with os.fdopen(source) as file:
            times += [float(word) for word in file.read().split()]
    took = time.perf_counter() - begun
    for each_end in (gate, ready, told):
        os.close(each_end)
    if [os.waitpid(child, 0)[1] for child in children] != [0] * clients:
        sys.exit("a client failed; see the messages above")
    return times, took


def member(number: int, each: int, entries: int, pause_s: float, gate: int, told: int) -> list[float]:
    """Run one client process; returns the latencies of its look-ups in seconds."""
    chance = random.Random(number)
    many = [profile(chance.randrange(entries)) for _ in range(each)]
    found = []
    with client() as mine:
        for _ in range(5):
            mine.get(many[0])
        os.write(told, b"+")
        os.read(gate, 1)
        for key in many:
            if pause_s:
                time.sleep(chance.random() * 2 * pause_s)
            begun = time.perf_counter()
            value = mine.get(key)
            found.append(time.perf_counter() - begun)
            assert value is not None
    return found


# -- other requests ------------------------------------------------------------------------------------------------


def writes(table: Rows, one: Client, repeats: int) -> None:
    small, large = noise(KB), noise(MIB)
    table.times("put of 1 kB", timed(lambda: one.put(profile(0), small), repeats))
    table.times("put of 1 MiB", timed(lambda: one.put(profile(0), large), repeats))
    table.times("look-up of 1 MiB", timed(lambda: one.get(profile(0)), repeats))
    one.put(profile(0), small)
    batch = [(profile(number), small) for number in range(256)]
    keys = [key for key, _ in batch]
    table.times("put of 256 entries of 1 kB, one message", timed(lambda: one.put_many(batch), repeats))
    table.times("look-up of the 256, one message", timed(lambda: one.get_many(keys), repeats))


def memory(table: Rows, entries: int) -> None:
    with client() as one:  # measured after all entries were read
        for first in range(0, entries, 256):
            one.get_many([profile(number) for number in range(first, min(first + 256, entries))])
    pid = int(Path(places().life).read_text())
    size = psutil.Process(pid).memory_info().rss
    table.table.row(f"memory of the daemon, {entries} entries", None, None, None, size / MIB)
    found("daemon-memory", size / 1e6, f"{entries} entries")


def nearest(table: Rows, one: Client, deployments: int, repeats: int) -> None:
    """Measure the request for the nearest deployment, which a job sends after a cache miss."""

    def key(batch: int) -> Key:
        return deployment_key(
            graph_hash=f"{batch % 7:064x}",
            inputs=[("input_ids", "torch.int64", (batch, 1024)), ("labels", "torch.int64", (batch, 1024))],
            global_batch=batch,
            world_size=8,
            topology=[(0, device) for device in range(8)],
            device_model="bench",
            device_memory=32 << 30,
            backend="gloo",
            versions=VERSIONS,
            flags={},
            plan_items=Config().plan_items(),
            optimizer="torch.optim.adamw.AdamW",
        )

    one.put_many((key(batch), noise(10 * KB)) for batch in range(1, deployments + 1))
    table.times(f"why, {deployments} deployments", timed(lambda: one.why(key(deployments + 1)), repeats))


def starts(table: Rows, repeats: int) -> None:
    python = [sys.executable, "-I", "-S", "-c"]
    bare = timed(lambda: subprocess.run([*python, "pass"], check=True), repeats)
    site = str(Path(zmq.__file__).parents[1])
    zeromq = timed(lambda: subprocess.run([*python, f"import sys; sys.path.append({site!r}); import zmq"]), repeats)
    whole = []
    for _ in range(repeats):
        begun = time.perf_counter()
        with client() as one:
            one.get(profile(0))
            whole.append(time.perf_counter() - begun)
        spawn.stop(places(), "bench", time.monotonic() + 60)
    beyond = statistics.median(bare)
    table.times("python -I -S -c pass", bare)
    table.times("python -I -S -c 'import zmq'", zeromq)
    table.times("start to first answer", whole)
    own, _ = table.times("start to first answer, without Python's own start", [each - beyond for each in whole])
    found("daemon-start", own)


if __name__ == "__main__":
    main()
