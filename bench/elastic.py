"""Benchmarks of elastic jobs: what a job gets done while its hosts come and go, and what a change costs.

    python bench/elastic.py [simulate] [--trace FILE ..] [--hosts 8 128] [--devices 8] [--hours 24] [--seeds 3]
                                       [--save S] [--start S] [--stop S] [--plan S] [--step S] [--every STEPS]
    python bench/elastic.py changes [--rows N] [--layers N] [--width N] [--words N] [--length N] [--steps N]
                                    [--warm GIB]
    python bench/elastic.py costs   [the same] [--rounds N] [--every STEPS]

simulate  plays traces of hosts that come, are given notice, and fail, with given costs of saving, starting and
          planning. A job of n hosts makes steps n / N times as fast as one of all N (the global batch is the same).
          Printed are useful steps (those that the job keeps) as a share of an oracle's, which loses no time at all:

          rannd        what `rannc-run --elastic` does. At a failure the step in progress is lost (every rank has its
                       neighbour's part in memory; neighbours that fail at the same moment are not played). Hosts that
                       were given notice are left 20 s before they go, together. Hosts that come are joined at the next
                       start, or when rannd/runner/elastic/patience.py says so, which is played itself
          at once      the same, but each notice and each host that comes is followed by a restart at once
          varuna       its manager looks for hosts once a minute, and waits two minutes after a notice (upstream's
                       code); ranks save and leave. After a failure it goes on from the last checkpoint. Plans are made
                       at each start
          restart-all  as torchelastic: a change ends all ranks without saving, and the next start goes on from the last
                       checkpoint; 30 s more for the rendezvous (pytorch/elastic#99)

          Below it is what rannd lacks of the oracle, by cause, in percent.
changes   real jobs on this machine: see _elastic_jobs.py
costs     steps that save beside steps that do not: see _elastic_jobs.py

Traces are files of lines 'seconds event host': 'join', 'notice' (the host goes two minutes later, as spot instances
do), 'fail'. Without --trace they are drawn: each host is taken away after an exponential time of mean 6 hours, a
quarter of them without notice, and comes back after one of mean half an hour; bursts take a fifth of the hosts within
five minutes, twice a day. They are synthetic: no provider's trace is in this repository.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from _results import Table, found

from rannd.runner.elastic.host_file import LOOK_S, SETTLE_S
from rannd.runner.elastic.patience import Patience
from rannd.runner.elastic.preemption import LEAD_S

NOTICE_S = 120.0
"""From a notice to the end of the host."""
JOIN, NOTICE, FAIL, GONE = "join", "notice", "fail", "gone"
HOUR = 3600.0


@dataclass(frozen=True)
class Event:
    """Something that happens to a host."""

    at_s: float
    what: str
    host: int


@dataclass(frozen=True)
class Costs:
    """Seconds, of a job on any number of hosts."""

    step_s: float
    """A step on all hosts."""
    save_s: float
    """Saving when the ranks are asked to leave."""
    stop_s: float
    """From a failure, or the end of saving, until all ranks have ended."""
    start_s: float
    """From the start of the ranks to their first step: imports, the checkpoint, the cached trace and plan."""
    plan_s: float
    """Profiling and planning, where no plan is there."""
    silent_s: float
    """Until a host that fails is known to be lost."""
    every: int
    """Steps between checkpoints."""


@dataclass(frozen=True)
class Policy:
    """How a job answers to changes."""

    name: str
    saves: bool
    """Whether ranks save before they leave."""
    look_s: float
    """Seconds from a change until it is seen."""
    after_notice_s: float
    """Seconds for which it goes on after a notice."""
    ahead: bool
    """Whether plans are made in advance."""
    more_s: float
    """Seconds that each start takes in addition."""
    keeps: bool = False
    """Whether a failure costs the step in progress alone."""
    patient: bool = False
    """Whether hosts that come wait for other changes."""


POLICIES = (
    Policy("rannd", True, LOOK_S + SETTLE_S, NOTICE_S - LEAD_S, True, 0.0, keeps=True, patient=True),
    Policy("at once", True, LOOK_S + SETTLE_S, 0.0, True, 0.0, keeps=True),
    Policy("varuna", True, 60.0, NOTICE_S, ahead=False, more_s=0.0),
    Policy("restart-all", False, LOOK_S, NOTICE_S, ahead=True, more_s=30.0),
)
CAUSES = ("failures", "notices", "joins", "waiting", "again")
"""What a job loses time by: starts after these, hosts that it does not use, steps that it makes twice."""


def drawn(hosts: int, hours: float, seed: int) -> list[Event]:
    """Draw a trace, see above; all hosts are there at the beginning."""
    random = Random(seed)
    end = hours * HOUR
    found = [Event(0.0, JOIN, host) for host in range(hosts)]
    bursts = sorted(random.uniform(0, end) for _ in range(max(round(hours / 12), 1)))
    hit = [set(random.sample(range(hosts), max(hosts // 5, 1))) for _ in bursts]
    for host in range(hosts):
        now = 0.0
        while True:
            now += random.expovariate(1 / (6 * HOUR))
            burst = next((at for at, some in zip(bursts, hit, strict=True) if host in some and at < now), None)
            if burst is not None:
                now = burst + random.uniform(0, 300)
                for each in hit:
                    each.discard(host)
            if now >= end:
                break
            found.append(Event(now, FAIL if random.random() < 0.25 else NOTICE, host))
            now += NOTICE_S + random.expovariate(1 / (0.5 * HOUR))
            found.append(Event(now, JOIN, host))
    return sorted(found, key=lambda event: event.at_s)


def read(path: Path) -> list[Event]:
    """Read a trace."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or words[1] not in (JOIN, NOTICE, FAIL):
            raise SystemExit(f"{path}:{number}: {line!r} is not 'seconds join|notice|fail host'")
        found.append(Event(float(words[0]), words[1], int(words[2])))
    return sorted(found, key=lambda event: event.at_s)


def with_ends(events: Iterable[Event]) -> Iterator[Event]:
    """Add the moments in which hosts that were given notice are gone."""
    for event in events:
        yield event
        if event.what == NOTICE:
            yield Event(event.at_s + NOTICE_S, GONE, event.host)


@dataclass
class Run:
    """A job under one policy. Work is counted in steps."""

    costs: Costs
    policy: Policy
    total: int
    """Number of hosts of the job at most."""
    there: set[int] = field(default_factory=set)
    """Hosts that can be used."""
    leaving: dict[int, float] = field(default_factory=dict)
    """Those of them that were given notice, and when the job is to be without them."""
    used: frozenset[int] = frozenset()
    """Hosts that train; empty between two starts."""
    done: float = 0.0
    saved: float = 0.0
    now: float = 0.0
    starts: int = 0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Seconds of all hosts together, by cause."""
    _due: list[tuple[float, int, str]] = field(default_factory=list)
    """What the job itself does next: 'look' for other hosts, 'start', 'begin' and 'end' the first step."""
    _ticks: int = 0
    _next: frozenset[int] = frozenset()
    _cause: str = "joins"
    _patience: Patience = field(default_factory=Patience)

    def plan(self, after_s: float, what: str) -> None:
        """Do something later."""
        self._ticks += 1
        heapq.heappush(self._due, (self.now + after_s, self._ticks, what))

    def advance(self, until: float) -> None:
        """Train until a moment, and do what is due on the way."""
        while self._due and self._due[0][0] <= until:
            at, _, what = heapq.heappop(self._due)
            self._train(at)
            getattr(self, f"_{what}")()
        self._train(until)

    def take(self, event: Event) -> None:
        """Take an event, at its moment."""
        if event.what == JOIN:
            self.there.add(event.host)
            self.leaving.pop(event.host, None)
            self._patience.change(self.now)
            self.plan(self.policy.look_s, "look")
        elif event.what == NOTICE:
            wait = max(self.policy.look_s, self.policy.after_notice_s)
            self.leaving[event.host] = self.now + wait
            self.plan(wait, "look")
        else:
            self._lose(event.host, known_s=self.costs.silent_s if event.what == FAIL else 0.0)

    def _lose(self, host: int, known_s: float) -> None:
        self.there.discard(host)
        self.leaving.pop(host, None)
        if host not in self.used and host not in self._next:
            return
        if self.used:
            self.lost["again"] += (self.done - self.saved) * self.costs.step_s * self.total
            self.done = self.saved
        self._stop("failures", known_s)

    def _stop(self, cause: str, after_s: float) -> None:
        """End the ranks after a while, and start others."""
        self._cause, self.used, self._next = cause, frozenset(), frozenset()
        self._due.clear()
        self.plan(after_s + self.costs.stop_s, "start")

    def _train(self, until: float) -> None:
        seconds = until - self.now
        if self.used:
            self.done += seconds / self.costs.step_s * len(self.used) / self.total
            every = 1 if self.policy.keeps else self.costs.every
            self.saved = max(self.saved, self.done // every * every)
            self.lost["waiting"] += seconds * len(self.there - self.used)
        else:
            self.lost[self._cause] += seconds * len(self.there)
        self.now = until

    def _wanted(self) -> frozenset[int]:
        return frozenset(self.there - self.leaving.keys())

    def _look(self) -> None:
        if not self.used:
            return  # a start is due already
        new = len(self._wanted() - self.used)
        if any(self.leaving.get(host, math.inf) <= self.now for host in self.used):
            self._leave("notices")
        elif self.policy.patient:
            join_at = self._patience.join_at(self.now, new, len(self.used))
            if new and join_at <= self.now:
                self._leave("joins")
            elif new:
                self.plan(join_at - self.now, "look")
        elif new:
            self._leave("joins")

    def _leave(self, cause: str) -> None:
        if self.policy.saves:
            self.saved = self.done
        self.lost["again"] += (self.done - self.saved) * self.costs.step_s * self.total
        self.done = self.saved
        if cause == "joins":  # any other start is a change that patience sees by itself
            self._patience.ask(self.now)
        self._stop(cause, self.costs.save_s if self.policy.saves else 0.0)

    def _start(self) -> None:
        self._next = self._wanted()
        if not self._next:
            self.plan(1.0, "start")
            return
        self.starts += 1
        self._patience.start(self.now)
        plan_s = 0.0 if self.policy.ahead and self.starts > 1 else self.costs.plan_s
        self.plan(self.costs.start_s + plan_s + self.policy.more_s, "begin")

    def _begin(self) -> None:
        self.used, self._next = self._next, frozenset()
        self.plan(self.costs.step_s * self.total / len(self.used), "end")
        self.plan(self.policy.look_s, "look")  # for what has changed meanwhile
        for host in self.leaving.keys() & self.used:
            self.plan(max(self.leaving[host] - self.now, self.policy.look_s), "look")

    def _end(self) -> None:
        self._patience.step(self.now)


def played(events: list[Event], costs: Costs, policy: Policy, total: int, end: float) -> Run:
    """Play a trace up to a moment; returns the job as it is then."""
    job = Run(costs, policy, total)
    job.plan(0.0, "start")
    for event in sorted(with_ends(events), key=lambda event: event.at_s):
        if event.at_s >= end:
            break
        if event.at_s > 0:
            job.advance(event.at_s)
        if event.what != GONE or event.host in job.leaving:
            job.take(event)
    job.advance(end)
    return job


def oracle(events: list[Event], costs: Costs, total: int, end: float) -> float:
    """Steps of a job that trains on whatever is there at each moment, and loses nothing."""
    there: set[int] = set()
    leaving: set[int] = set()
    done = now = 0.0
    for event in sorted(with_ends(events), key=lambda event: event.at_s):
        at = min(event.at_s, end)
        done += (at - now) / costs.step_s * len(there) / total
        now = at
        if event.what == JOIN:
            there.add(event.host)
            leaving.discard(event.host)
        elif event.what == NOTICE:
            leaving.add(event.host)
        elif event.what == FAIL or event.host in leaving:
            there.discard(event.host)
            leaving.discard(event.host)
    return done + (end - now) / costs.step_s * len(there) / total


JUDGED = 256
"""Devices for which the goal is."""


def simulate(given: argparse.Namespace) -> None:
    """Play the traces, and print a table."""
    costs = Costs(given.step, given.save, given.stop, given.start, given.plan, given.silent, given.every or 100)
    end = given.hours * HOUR
    traces: list[tuple[str, int, list[Event]]] = [
        (f"{hosts * given.devices} devices, seed {seed}", hosts, drawn(hosts, given.hours, seed))
        for hosts in given.hosts
        for seed in range(given.seeds)
    ]
    for path in given.trace:
        events = read(path)
        traces.append((path.name, len({event.host for event in events}), events))
    table = Table(
        "Useful steps of a day, of an oracle's that loses no time (simulated)", "trace", "changes",
        *(policy.name for policy in POLICIES), "starts of rannd",
    )  # fmt: skip
    lacks, worst = [], 1.0
    for name, hosts, events in traces:
        best = oracle(events, costs, hosts, end)
        jobs = [played(events, costs, policy, hosts, end) for policy in POLICIES]
        shares = [job.done / best for job in jobs]
        changes = sum(event.at_s > 0 for event in events)
        table.row(name, changes, *shares, jobs[0].starts)
        lacks.append((name, [lost / costs.step_s / hosts / best for lost in jobs[0].lost.values()]))
        if hosts * given.devices == JUDGED:
            worst = min(worst, shares[0])
    causes = Table("What rannd lacks of it, by cause", "trace", *((cause, "{:.2%}") for cause in CAUSES))
    for name, parts in lacks:
        causes.row(name, *parts)
    if any(hosts * given.devices == JUDGED for hosts in given.hosts):
        found("elastic-share", worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["simulate", "changes", "costs"], default="simulate")
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--hosts", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--devices", type=int, default=8, help="per host, for the headings")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", type=float, default=5.0)
    parser.add_argument("--start", type=float, default=10.0)
    parser.add_argument("--stop", type=float, default=2.0)
    parser.add_argument("--plan", type=float, default=20.0)
    parser.add_argument("--step", type=float, default=2.0)
    parser.add_argument("--silent", type=float, default=15.0)
    parser.add_argument("--every", type=int, default=0, help="steps between checkpoints (100; costs: 4)")
    jobs = parser.add_argument_group("changes and costs")
    jobs.add_argument("--rows", type=int, default=12, help="of the global batch")
    jobs.add_argument("--length", type=int, default=128, help="tokens of a row")
    jobs.add_argument("--layers", type=int, default=12)
    jobs.add_argument("--width", type=int, default=768, help="a multiple of 64")
    jobs.add_argument("--words", type=int, default=16384)
    jobs.add_argument("--steps", type=int, default=3, help="new steps before each change")
    jobs.add_argument("--rounds", type=int, default=3, help="of costs: jobs of each kind, in turns")
    jobs.add_argument("--warm", type=float, default=0.0, metavar="GIB", help="see _warm_memory.py, on virtual machines")
    given = parser.parse_args()
    if given.what == "simulate":
        simulate(given)
        return
    import _elastic_jobs
    from _warm_memory import warm_memory

    with warm_memory(given.warm):
        getattr(_elastic_jobs, given.what)(given)


if __name__ == "__main__":
    main()
