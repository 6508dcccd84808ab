"""Each call for sockets between rannc-run and the ranks' watchers fails in turn: the job ends well, or with a reason.

Argument: how many calls of each kind fail, with one error each, or ``all`` with all errors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "runner"))

from faults.faulty import SOCKET_CALLS, Faults, FaultsElsewhere, failures, words
from monitored import MPIRUN, run

from rannd.runner.report import report
from rannd.runner.watch import monitor, processes
from rannd.runner.watch.line_channel import Listener
from rannd.runner.watch.monitor import JobResult

most = None if sys.argv[1] == "all" else int(sys.argv[1])
monitor._LAUNCHER_EXIT = 0.5  # an order to exit that is lost is made up for after this
GRACE_S = 0.5
LONG_S = 60.0
RANK = "import os, pathlib, sys; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); print('the output')"
folder = Path(tempfile.mkdtemp(prefix="rannd-monitors-"))
shown, pids = folder / "shown", folder / "pids"
here, in_watchers = Faults(), FaultsElsewhere(folder / "control")


def attempt(remote: str | None, faults: Faults | FaultsElsewhere) -> tuple[JobResult, str, dict[str, int]]:
    """A job of two ranks: what became of it, what was shown, and the calls that `faults` has seen."""
    pids.mkdir(exist_ok=True)
    listener = Listener(remote)
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    with shown.open("wb") as output:
        for fd in (1, 2):
            os.dup2(output.fileno(), fd)
        try:
            variables = {"FAULTS_CONTROL": str(folder / "control")}
            result = run(
                listener, 2, "-c", RANK, str(pids), grace=GRACE_S, start=LONG_S, variables=variables, launched=MPIRUN
            )
            seen = {call: faults.seen(call) for call in SOCKET_CALLS}
        finally:
            here.plan()
            in_watchers.plan()
            for fd, old in zip((1, 2), kept, strict=True):
                os.dup2(old, fd)
                os.close(old)
    return result, shown.read_text(), {call: count for call, count in seen.items() if count}


def judge(result: JobResult, text: str) -> str:
    """Check what became of a job, and describe it."""
    for pid in pids.iterdir():
        deadline = time.monotonic() + LONG_S
        while processes.session_members(int(pid.name)):
            assert time.monotonic() < deadline, f"rank {pid.name} goes on"
            time.sleep(0.01)
        pid.unlink()
    if [end.status for end in result.ends] == [0, 0]:
        assert text.count("the output") == 2, text
        return "ended well"
    told = report(result, "srun", range(2), None)
    reasons = [end.tail for end in result.failures] + ([result.launcher_output] if result.missing else [])
    reasons += [line for line in text.splitlines() if line.startswith("rannc-run: ")]
    assert told, result
    assert any(reasons), result
    return "told"


def fail_in_turn(remote: str | None, side: str) -> None:
    """Let each call of the monitor, or of the watchers, fail in turn."""
    faults = here if side == "monitor" else in_watchers
    faults.plan()
    counts = attempt(remote, faults)[2]
    tried, slowest, outcomes = 0, 0.0, dict.fromkeys(("ended well", "told"), 0)
    for call, number, error in failures(counts, most):
        if side == "monitor" and call in ("socket", "bind", "listen", "connect"):
            continue  # before there are ranks: rannc-run's own error
        where = f"{side}, {remote or 'AF_UNIX'}: {words(call, number, error)}"
        faults.plan(call, number, error)
        begin = time.monotonic()
        try:
            result, text, _ = attempt(remote, faults)
            slowest = max(slowest, time.monotonic() - begin)
            outcomes[judge(result, text)] += 1
            assert slowest < LONG_S
        except BaseException as exc:
            exc.add_note(where)
            raise
        tried += 1
    assert outcomes["ended well"]
    place = "TCP" if remote else "AF_UNIX"
    print(f"{side}, {place}: {tried} failing calls, {outcomes}; slowest {slowest:.1f} s; {counts}")


fail_in_turn(None, "monitor")
fail_in_turn("127.0.0.1", "watchers")
if most is None:
    fail_in_turn("127.0.0.1", "monitor")
    fail_in_turn(None, "watchers")
with contextlib.suppress(OSError):
    for each in (shown, folder / "control", pids):
        each.rmdir() if each.is_dir() else each.unlink()
    folder.rmdir()
