"""Reports the end of a job, and derives the exit code."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection

from rannd.errors import LaunchError
from rannd.runner.last_words import NO_WORDS, last_words
from rannd.runner.watch.job_result import JobResult, RankEnd

_PLACE = re.compile(r" \(([^()]+:\d+)\)$")
"""The line of the script at the end of `last_words`."""
_SIGNAL_WORDS = {
    signal.SIGKILL: "out of memory is likely, unless someone killed it",
    signal.SIGSEGV: "invalid memory access in native code",
    signal.SIGBUS: "memory is not available: /dev/shm or a mapped file may be full",
    signal.SIGABRT: "native code aborted; its message is in standard error",
    signal.SIGILL: "the processor lacks an instruction",
    signal.SIGFPE: "integer division by zero in native code",
}


def status_words(status: int) -> str:
    """Describe an exit code, or minus a signal."""
    if status >= 0:
        return f"exit code {status}"
    try:
        signum = signal.Signals(-status)
    except ValueError:
        return f"killed by signal {-status}"
    words = _SIGNAL_WORDS.get(signum)
    return f"killed by {signum.name}" + (f" ({words})" if words else "")


def _end_words(end: RankEnd) -> str:
    return "host lost" if end.lost else status_words(end.status)


def shell_status(status: int) -> int:
    """Return the status as a shell reports it: the exit code, or 128 + signal."""
    return status if status >= 0 else 128 - status


def exit_code(result: JobResult) -> int:
    """Return rannc-run's own exit code.

    128 + signal after Ctrl-C, SIGTERM, SIGHUP or a closed standard output; else the first failing rank's, 128 + signal
    if it was killed, 7 if its host was lost; else the launcher's, if it ended under running ranks; 7 if ranks never
    started.
    """
    if result.signal:
        return 128 + result.signal
    if result.failures:
        first = result.failures[0]
        return LaunchError.exit_code if first.lost else shell_status(first.status)
    if result.missing or result.late:
        return LaunchError.exit_code
    ended = [end for end in result.ends if end.status != 0]
    if ended:
        return shell_status(result.launcher_status or ended[0].status)
    return 0


def report(result: JobResult, launcher: str, shown: Collection[int], log_dir: str | None) -> str:
    """Return the text for the user, empty if every rank ended without an error.

    Args:
        result: What happened.
        launcher: Name of the launcher.
        shown: Ranks whose output was shown; for others the end of standard error is repeated.
        log_dir: Log directory of the run, or None.
    """
    if exit_code(result) == 0:
        return ""
    lines: list[str] = []
    failures = result.failures[::-1]
    if failures:
        for end in failures:
            if end.rank not in shown and end.tail:
                lines.append(f"standard error of rank {end.rank} on {end.host} ends with:")
                lines += [f"  {line}" for line in end.tail.rstrip().splitlines()[-40:]]
        total = len(result.ends) + result.missing
        order = ", the first failure last" if len(failures) > 1 else ""
        lines.append(f"{len(failures)} of {total} ranks failed{order}:")
        lines += _table(failures)
    lines += _others(result, launcher)
    if log_dir is not None:
        lines.append(f"logs: {log_dir}")
    return "".join(f"rannc-run: {line}\n" for line in lines)


def _others(result: JobResult, launcher: str) -> list[str]:
    """Describe what happened besides failures: ranks that were ended or never ran, an end of the launcher."""
    lines = []
    ended = [end.rank for end in result.ends if end.status != 0 and not end.failed]
    if ended and (result.failures or result.signal or result.late):
        lines.append(f"ended by rannc-run: {_ranks(ended)}")
    # A launcher that loses its own process on another host may report success.
    early = result.launcher_status != 0 or (ended and not result.missing)
    broke = early and not result.failures and not result.signal and (result.missing or not result.late)
    if broke:
        words = status_words(result.launcher_status) if result.launcher_status else "it exited before its ranks"
        lines.append(f"{launcher} failed: {words}")
        if ended:
            lines.append(f"ended with it: {_ranks(ended)}")
    if result.missing and not result.signal:
        lines.append(f"{result.missing} of {len(result.ends) + result.missing} ranks never started")
    if (broke or (result.missing and not result.signal)) and result.launcher_output.strip():
        lines.append(f"output of {launcher}:")
        lines += [f"  {line}" for line in result.launcher_output.strip().splitlines()[-60:]]
    return lines


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _split(words: str) -> tuple[str, str]:
    """An error and the line that it came from, '' if there is none."""
    found = _PLACE.search(words)
    return (words[: found.start()], found[1]) if found else (words, "")


def _table(ends: list[RankEnd]) -> list[str]:
    rows = [("host", "rank", "pid", "time", "end", "error")]
    first = ends[-1]
    error, place = _split(last_words(first.tail))
    for end in ends:
        clock = time.strftime("%H:%M:%S", time.localtime(end.time)) + f".{int(end.time % 1 * 1000):03d}"
        words = last_words(end.tail)
        mine, here = _split(words)
        if words != NO_WORDS and end is not first and mine == error:
            words = f"the same as rank {first.rank}" + (f", at {here}" if here != place else "")
        rows.append((end.host, str(end.rank), str(end.pid), clock, _end_words(end), words))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
