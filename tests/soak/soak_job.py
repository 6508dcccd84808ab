"""A job of the soak: started as a user would, hit, and judged by what it printed, its exit code and what is left."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from soak_leaks import MARK, look_at_daemon, processes_of, temporary
from soak_plan import STEPS, Hit, Kind, Planned

ROOT = Path(__file__).resolve().parents[2]
TRAINING = str(ROOT / "tests/soak/programs/soak_training.py")
SOON = 240.0
"""Seconds from a hit, or the end of rannc-run, to that of the last process; generous: the machine may be busy."""
LONG = 480.0
"""Seconds for any job."""
TOLERANCE = 1e-9
"""Of losses, relative, where plans differ: the models are in float64, and rounding grows in some dozens of steps."""


@dataclass(frozen=True)
class Places:
    """Directories of a soak; `base` is short enough for sockets."""

    base: Path

    def __post_init__(self) -> None:
        """Make them."""
        for folder in (self.home, self.runtime, self.cache, self.base / "tmp", self.base / "jobs", self.base / "out"):
            folder.mkdir(mode=0o700)

    @property
    def home(self) -> Path:
        """HOME of the jobs."""
        return self.base / "home"

    @property
    def runtime(self) -> Path:
        """Where the daemon listens."""
        return self.base / "run"

    @property
    def cache(self) -> Path:
        """Where the store is."""
        return self.base / "cache"

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """Variables of a command, with a directory for temporary files of its own."""
        temporary = self.base / "tmp" / name
        temporary.mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RANNC_", "SOAK_"))}
        return {
            **inherited,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl": "^ofi",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(self.cache),
            "XDG_RUNTIME_DIR": str(self.runtime),
            **more,
        }


@dataclass
class Output:
    """What the ranks have printed so far."""

    text: str = ""
    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    """By rank and step, in hexadecimal digits."""
    begins: dict[int, int] = field(default_factory=dict)
    """First step, by rank."""
    saved: int = 0
    """Step of the newest checkpoint that a rank knows to be written."""
    plan: str = ""
    finished: set[int] = field(default_factory=set)

    def feed(self, text: str) -> None:
        """Take whole lines."""
        self.text += text
        for rank, words in re.findall(r"rank (\d+) ((?:begins|plan|step|saved|finished)\b.*)", text):
            match words.split():
                case ["begins", "with", "step", step]:
                    self.begins[int(rank)] = int(step)
                case ["plan", plan]:
                    self.plan = plan
                case ["step", step, "loss", loss]:
                    self.losses[int(rank), int(step)] = loss
                case ["saved", step]:
                    self.saved = max(self.saved, int(step))
                case ["finished"]:
                    self.finished.add(int(rank))

    def complete(self, kind: Kind) -> bool:
        """Whether every rank has come to the end of the script."""
        return len(self.finished) == kind.ranks

    @property
    def step(self) -> int:
        """The newest step that a rank has ended, here and not before its checkpoint."""
        return max((step for _, step in self.losses), default=0)

    @property
    def progress(self) -> int:
        """The newest step that a rank has ended, here or before."""
        return max(self.step, max(self.begins.values(), default=1) - 1)


class SoakJob:
    """A job that runs.

    Args:
        planned: What it is.
        places: The soak's.
        folder: Where its checkpoint is, or will be.
        known: Step of the checkpoint there that an earlier job knew to be written.
        seconds: How long such a job takes.
    """

    def __init__(self, planned: Planned, places: Places, folder: Path, known: int, seconds: float) -> None:
        self.planned, self.places, self.folder, self.known, self.seconds = planned, places, folder, known, seconds
        self.kind: Kind = planned.kind
        self.mark = f"{places.base.name}-{planned.number}"
        self.output = Output()
        self.output_file = places.base / "out" / f"{planned.number}.txt"
        self.code: int | None = None
        self.hits: dict[str, float] = {}
        """When the targets were hit."""
        self.early = False
        """Whether it was hit when half of its steps were still to come, so that it cannot end well."""
        self.strays: list[str] = []
        """Processes that had to be killed."""
        folder.mkdir(exist_ok=True)
        variables = {"RANNC_PARTITION_NUM": str(self.kind.stages), MARK: self.mark}
        if self.kind.anew:
            variables["RANNC_CACHE"] = "refresh"
        environment = places.environment(str(planned.number), **variables)
        command = ["rannc-run", "-np", str(self.kind.ranks), TRAINING]
        command += [self.kind.model, self.kind.saves, str(folder), str(STEPS)]
        with open(self.output_file, "wb") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = self.ended = time.monotonic()
        self._read = open(self.output_file, encoding="utf-8", errors="replace")  # noqa: SIM115
        self._rest = ""
        self._waits = [hit for hit in (planned.hit, planned.hits_daemon) if hit is not None]

    def turn(self) -> bool:
        """Read what it has printed, and hit what is due; whether it has ended, with all its processes."""
        self._hear()
        for hit in list(self._waits):
            if self.code is None and self._is_due(hit) and self._strike(hit):
                self._waits.remove(hit)
        now = time.monotonic()
        if self.code is None:
            self.code = self.process.poll()
            self.ended = now
        if self.code is not None and not processes_of(self.mark):
            self._hear()
            self._read.close()
            self.ended = now
            return True
        over = [moment for target, moment in self.hits.items() if target != "daemon"]
        over += [self.ended] if self.code is not None else []
        if now > min([self.started + LONG, *(moment + SOON for moment in over)]):
            self.end()
        return False

    @property
    def is_hit(self) -> bool:
        """Whether it was hit itself; a hit of the daemon is none."""
        return any(target != "daemon" for target in self.hits)

    @property
    def lasted(self) -> float:
        """Seconds from its hit to the end of its last process."""
        return self.ended - max(moment for target, moment in self.hits.items() if target != "daemon")

    def faults(self, right: Output | None) -> list[str]:
        """What is wrong with how it ended. `right`: what the first job of its kind printed."""
        wrong = [f"left behind: {stray}" for stray in self.strays]
        assert self.code is not None
        hit = {"hit": self.is_hit, "early": self.early}
        wrong += faults_of(self.kind, self.output, self.code, right, **hit, known=self.known)
        if left := temporary(self.places.base / "tmp" / str(self.planned.number)):
            wrong.append(f"temporary files: {left}")
        beside = set(os.listdir(self.folder)) - {"last"}
        if beside and (self.code == 0 or not all(name.startswith(".last.rannd-") for name in beside)):
            wrong.append(f"in its folder: {sorted(beside)}")
        return wrong

    def end(self) -> None:
        """Kill whatever still runs."""
        for pid, words in processes_of(self.mark).items():
            self.strays.append(f"{pid} {' '.join(words)[:200]}")
            kill(pid, signal.SIGKILL)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        text = self._rest + self._read.read()
        whole, newline, self._rest = text.rpartition("\n")
        self.output.feed(whole + newline)

    def _is_due(self, hit: Hit) -> bool:
        if hit.step:
            return self.output.step >= hit.step
        return time.monotonic() >= self.started + hit.moment * self.seconds

    def _strike(self, hit: Hit) -> bool:
        """Send the signal; False if the target is not there (yet)."""
        pid = self._pid_of(hit)
        if pid is None:
            return False
        try:
            os.kill(pid, hit.signum)
        except ProcessLookupError:
            return False
        self.hits[hit.target] = time.monotonic()
        if hit.target != "daemon":
            self.early = self.output.progress < STEPS // 2
        return True

    def _pid_of(self, hit: Hit) -> int | None:
        if hit.target == "daemon":
            daemon = look_at_daemon(self.places.runtime, 0)
            return daemon and daemon.pid
        if hit.target == "rannc-run":
            return self.process.pid
        mine = processes_of(self.mark)
        if hit.target == "launcher":
            # not one that is asked for its version
            found = [pid for pid, words in mine.items() if "-np" in words and _name(pid) in ("mpirun", "prterun")]
        else:
            ranks = [pid for pid, words in mine.items() if len(words) > 1 and words[1] == TRAINING]
            found = [pid for pid in ranks if _rank(pid) == hit.which]
            if hit.target == "watcher":
                found = [_parent(pid) for pid in found]
        return found[0] if found and found[0] in mine else None


def faults_of(
    kind: Kind, output: Output, code: int, right: Output | None, *, hit: bool, early: bool, known: int
) -> list[str]:
    """What is wrong with what a job printed and its exit code.

    Args:
        kind: Kind of the job.
        output: What it printed.
        code: Its exit code. 0 means that every rank has come to the end, also if a signal came too late to matter.
        right: What the first job of its kind printed; None: it is the first.
        hit: Whether a process of it got a signal.
        early: Whether that was when many steps were still to come.
        known: Step of the checkpoint from which it had to go on, at least.
    """
    wrong = []
    if code == 0 and not output.complete(kind):
        wrong.append("exit code 0, but ranks have not come to the end")
    if code == 0 and early:
        wrong.append("exit code 0, though it was hit long before its end")
    if code != 0 and not hit:
        wrong.append(f"exit code {code}, and nothing had hit it")
    first = min(output.begins.values(), default=known + 1)
    if first <= known:
        wrong.append(f"went on from step {first - 1}, but step {known} had been saved")
    if output.complete(kind):
        steps = {(rank, step) for rank in range(kind.ranks) for step in range(first, STEPS + 1)}
        if missing := steps - set(output.losses):
            wrong.append(f"losses are missing, of (rank, step): {sorted(missing)}")
    if right is not None:
        # To the last bit under the same plan, else but for rounding.
        allowed = 0.0 if output.plan == right.plan else TOLERANCE
        others = []
        for (rank, step), text in sorted(output.losses.items()):
            loss, wanted = float.fromhex(text), float.fromhex(right.losses[rank, step])
            if not abs(loss - wanted) <= allowed * abs(wanted):
                others.append(f"loss of rank {rank} in step {step}: {loss!r}, not {wanted!r}")
        wrong += others[:4]
    return wrong


def kill(pid: int, signum: signal.Signals) -> None:
    """Send a signal and wait for the end."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signum)
        select.select([pidfd], [], [], 15)
        os.close(pidfd)


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _rank(pid: int) -> int:
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return int(variable[5:])
    return -1
