"""What a soak is to do: its jobs in order, of which kind each is, and which are hit, by what and when."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

STEPS = 24
"""Steps that a job trains."""


@dataclass(frozen=True)
class Kind:
    """Jobs that have the same losses.

    Attributes:
        model: Its name in soak_models.py.
        saves: How it saves checkpoints: none, plain, asynchronous.
        anew: Whether it traces, measures and plans as if nothing were cached, and stores what it finds. It holds a
            lease while it plans.
    """

    ranks: int
    stages: int
    model: str
    saves: str
    anew: bool = False

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{ranks}, {stages}, {self.model}, {self.saves}{', planned anew' if self.anew else ''}"


KINDS = (
    Kind(2, 2, "layers", "asynchronous"),
    Kind(2, 1, "tokens", "plain"),
    Kind(1, 1, "layers", "asynchronous"),
    Kind(2, 2, "images", "none"),
    Kind(1, 1, "images", "none"),
    Kind(2, 2, "tokens", "asynchronous"),
    Kind(2, 2, "images", "none", anew=True),  # without dropout, which differs between plans
)


@dataclass(frozen=True)
class Hit:
    """A signal to a process of a job, or to the daemon.

    Attributes:
        target: rank, rannc-run, launcher (mpirun), watcher (of a rank), daemon.
        which: The rank, for rank and watcher.
        step: After this step of any rank; 0: at a moment of the job's life.
        moment: That moment, as a part of the time that such a job takes, 0 to 1.
    """

    target: str
    signum: signal.Signals
    which: int = 0
    step: int = 0
    moment: float = 0.0

    def __str__(self) -> str:
        who = f"{self.target} {self.which}" if self.target in ("rank", "watcher") else self.target
        return f"{self.signum.name} to {who} " + (f"after step {self.step}" if self.step else f"at {self.moment:.2f}")


WHO = (
    ("rank", signal.SIGKILL),
    ("rannc-run", signal.SIGKILL),
    ("rank", signal.SIGTERM),
    ("rannc-run", signal.SIGINT),
    ("rank", signal.SIGINT),
    ("rannc-run", signal.SIGTERM),
    ("launcher", signal.SIGKILL),
    ("watcher", signal.SIGKILL),
    ("launcher", signal.SIGTERM),
)
"""Who gets which signal: each once, in this order, then in random orders."""
OF_THE_DAEMON = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True)
class Planned:
    """A job that will be started."""

    number: int
    kind: Kind
    hit: Hit | None = None
    hits_daemon: Hit | None = None
    """Beside: the daemon is hit while this job runs, which it has to survive."""


def draw(jobs: int, seed: int) -> list[Planned]:
    """Jobs of a soak. The first of each kind are not hit, of the others every second one.

    The daemon is hit while one of the others runs, in the first half only: then it is watched for growth.
    """
    numbers = random.Random(seed)
    kinds = KINDS[: max(1, min(len(KINDS), jobs * 3 // 8))]
    rest = range(len(kinds), jobs)
    hit = set(numbers.sample(rest, (len(rest) + 1) // 2))
    others = [number for number in rest if number not in hit]
    early = others[: (len(others) + 1) // 2]
    daemon = dict(zip(numbers.sample(early, min(len(early), 1 + jobs // 40)), OF_THE_DAEMON * jobs, strict=False))
    deck: list[tuple[str, signal.Signals]] = list(WHO)
    planned = [Planned(number, kind) for number, kind in enumerate(kinds)]
    for number in rest:
        kind = numbers.choice(kinds)
        drawn = None
        if number in hit:
            deck = deck or numbers.sample(WHO, len(WHO))
            target, signum = deck.pop(0)
            drawn = Hit(target, signum, numbers.randrange(kind.ranks), *_moment(numbers))
        of_daemon = Hit("daemon", daemon[number], 0, *_moment(numbers)) if number in daemon else None
        planned.append(Planned(number, kind, drawn, of_daemon))
    return planned


def _moment(numbers: random.Random) -> tuple[int, float]:
    """(step, moment) of a hit: one half while it trains, the other at any time."""
    if numbers.random() < 0.5:
        return numbers.randrange(1, STEPS), 0.0
    return 0, numbers.random()
