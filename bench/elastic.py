"""Benchmarks of elastic jobs: what a job gets done while its hosts come and go, under several policies.

    python bench/elastic.py [simulate] [--trace FILE ..] [--hosts 8 128] [--devices 8] [--hours 24] [--seeds 3]
                                       [--save S] [--start S] [--stop S] [--plan S] [--step S] [--every STEPS]

simulate  plays traces of hosts that come, are given notice, and fail, with given costs of saving, starting and
          planning. A job of n hosts makes steps n / N times as fast as one of all N (the global batch is the same).
          Printed are useful steps (those that the job keeps) as a share of an oracle's, which loses no time at all:

          rannd        what `rannc-run --elastic` does: at a notice, and when hosts come, it saves, leaves and starts
                       again at once; after a failure it goes on from the last checkpoint, with hosts that are there
          varuna       the same, but its manager looks for hosts once a minute, and waits two minutes after a notice
                       (upstream's code); plans are made at each start
          restart-all  as torchelastic: a change ends all ranks without saving, and the next start goes on from the last
                       checkpoint; 30 s more for the rendezvous (pytorch/elastic#99)

Traces are files of lines 'seconds event host': 'join', 'notice' (the host goes two minutes later, as spot instances
do), 'fail'. Without --trace they are drawn: each host is taken away after an exponential time of mean 6 hours, a
quarter of them without notice, and comes back after one of mean half an hour; bursts take a fifth of the hosts within
five minutes, twice a day. They are synthetic: no provider's trace is in this repository.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

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
    """Seconds between two looks at the hosts."""
    after_notice_s: float
    """Seconds for which it goes on after a notice."""
    ahead: bool
    """Whether plans are made in advance."""
    more_s: float
    """Seconds that each start takes in addition."""


POLICIES = (
    Policy("rannd", saves=True, look_s=0.25, after_notice_s=0.5, ahead=True, more_s=0.0),
    Policy("varuna", saves=True, look_s=60.0, after_notice_s=NOTICE_S, ahead=False, more_s=0.0),
    Policy("restart-all", saves=False, look_s=0.25, after_notice_s=NOTICE_S, ahead=True, more_s=30.0),
)


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
    leaving: set[int] = field(default_factory=set)
    """Those of them that were given notice."""
    used: frozenset[int] = frozenset()
    """Hosts that train; empty between two starts."""
    done: float = 0.0
    saved: float = 0.0
    now: float = 0.0
    starts: int = 0
    _due: list[tuple[float, int, str]] = field(default_factory=list)
    """What the job itself does next: 'look' for other hosts, 'start', 'train' (the first step begins)."""
    _ticks: int = 0
    _next: frozenset[int] = frozenset()

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
            self.leaving.discard(event.host)
            self.plan(self.policy.look_s, "look")
        elif event.what == NOTICE:
            self.leaving.add(event.host)
            self.plan(max(self.policy.look_s, self.policy.after_notice_s), "look")
        else:
            self._lose(event.host, known_s=self.costs.silent_s if event.what == FAIL else 0.0)

    def _lose(self, host: int, known_s: float) -> None:
        self.there.discard(host)
        self.leaving.discard(host)
        if host in self.used:
            self.done, self.used = self.saved, frozenset()
            self._due.clear()
            self.plan(known_s + self.costs.stop_s, "start")
        elif host in self._next:
            self._due.clear()
            self.plan(known_s + self.costs.stop_s, "start")

    def _train(self, until: float) -> None:
        if self.used:
            self.done += (until - self.now) / self.costs.step_s * len(self.used) / self.total
            self.saved = max(self.saved, self.done // self.costs.every * self.costs.every)
        self.now = until

    def _wanted(self) -> frozenset[int]:
        return frozenset(self.there - self.leaving)

    def _look(self) -> None:
        if not self.used or self._wanted() == self.used:
            return  # a start is due already, or nothing has changed
        if self.policy.saves:
            self.saved = self.done
        else:
            self.done = self.saved
        self.used = frozenset()
        self.plan((self.costs.save_s if self.policy.saves else 0.0) + self.costs.stop_s, "start")

    def _start(self) -> None:
        self._next = self._wanted()
        if not self._next:
            self.plan(1.0, "start")
            return
        self.starts += 1
        plan_s = 0.0 if self.policy.ahead and self.starts > 1 else self.costs.plan_s
        self.plan(self.costs.start_s + plan_s + self.policy.more_s, "begin")

    def _begin(self) -> None:
        self.used, self._next = self._next, frozenset()
        self.plan(self.policy.look_s, "look")  # for what has changed meanwhile


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["simulate", []], help="benchmarks (default: all)")
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--hosts", type=int, nargs="*", default=[8, 128])
    parser.add_argument("--devices", type=int, default=8, help="per host, for the headings")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", type=float, default=5.0)
    parser.add_argument("--start", type=float, default=10.0)
    parser.add_argument("--stop", type=float, default=2.0)
    parser.add_argument("--plan", type=float, default=20.0)
    parser.add_argument("--step", type=float, default=2.0)
    parser.add_argument("--silent", type=float, default=15.0)
    parser.add_argument("--every", type=int, default=100)
    given = parser.parse_args()
    costs = Costs(given.step, given.save, given.stop, given.start, given.plan, given.silent, given.every)
    end = given.hours * HOUR
    traces: list[tuple[str, int, list[Event]]] = [
        (f"{hosts * given.devices} devices, seed {seed}", hosts, drawn(hosts, given.hours, seed))
        for hosts in given.hosts
        for seed in range(given.seeds)
    ]
    for path in given.trace:
        events = read(path)
        traces.append((path.name, len({event.host for event in events}), events))
    print(f"{'trace':28}{'changes':>9}" + "".join(f"{policy.name:>14}" for policy in POLICIES) + "   starts of rannd")
    for name, hosts, events in traces:
        best = oracle(events, costs, hosts, end)
        jobs = [played(events, costs, policy, hosts, end) for policy in POLICIES]
        shares = "".join(f"{job.done / best:14.3f}" for job in jobs)
        changes = sum(event.at_s > 0 for event in events)
        print(f"{name:28}{changes:9d}{shares}{jobs[0].starts:18d}")


if __name__ == "__main__":
    main()
