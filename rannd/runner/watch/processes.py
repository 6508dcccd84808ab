"""Processes of a rank, found by session, so that what a rank forked ends with it.

A rank leads its own session. A process that calls setsid() leaves it on purpose (the daemon does) and is not touched.
Standard library only: the rank's watcher runs without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here because a forked child must not load libraries.
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int) -> None:
    """Ask the kernel to send `signum` when the process that forked this one ends. Call it right after fork.

    Args:
        parent: Pid of that process; if it has ended already, the signal is raised at once.
        signum: The signal; the request survives exec, unlike a handler.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that their end raises SIGCHLD here."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def session_members(session: int) -> list[int]:
    """Return the pids of the running processes of a session, without zombies."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # it ended meanwhile
            continue
        # The name, in parentheses, may itself contain parentheses and spaces: the fields start after the last one.
        state, _ppid, _pgrp, sid = stat[stat.rindex(b")") + 2 :].split()[:4]
        if int(sid) == session and state not in (b"Z", b"X"):
            members.append(int(entry))
    return members


def signal_session(session: int, signum: int) -> list[int]:
    """Send `signum` to every running process of a session and return their pids."""
    members = session_members(session)
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
    return members


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of a session, repeatedly until no new one appears."""
    # A process may fork between listing and killing; killed ones may take a moment to disappear.
    seen: set[int] = set()
    while new := set(signal_session(session, signal.SIGKILL)) - seen:
        seen |= new


class Guard:
    """A process that kills a session when the process that created the guard ends, for whatever reason.

    The parent-death signal alone is not enough: a launcher may then wait for a host that never answers.

    Args:
        leader: Pid of a child that leads a session of its own; the guard ends with it.
        grace: Seconds between the end of this process and SIGKILL for the session.
        folder: A directory to remove after the leader has ended, '' for none.
    """

    def __init__(self, leader: int, grace: float, folder: str = "") -> None:
        parent = os.getpid()
        try:
            ends = [os.pidfd_open(parent), os.pidfd_open(leader)]
        except OSError:  # a kernel before 5.3, or it has ended already
            self._pid = 0
            return
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setsid()
                close_all_but(ends)
                _wait_and_end(ends, leader, grace)
                if folder:
                    remove_folder(folder)
            finally:
                os._exit(0)
        for fd in ends:
            os.close(fd)

    def close(self) -> None:
        """Wait for the end of the guard, which is that of the leader."""
        if self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0


def close_all_but(kept: list[int]) -> None:
    """Close inherited descriptors: a pipe held by the guard would never reach its end."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _wait_and_end(ends: list[int], leader: int, grace: float) -> None:
    both = select.poll()
    for fd in ends:
        both.register(fd, select.POLLIN)
    if ends[0] not in {fd for fd, _ in both.poll()}:
        return  # the leader has ended, and the guard's parent takes care of its session
    alone = select.poll()
    alone.register(ends[1], select.POLLIN)
    alone.poll(grace * 1000)
    kill_session(leader)  # a leader that exits may leave its children, such as logins that wait


def remove_folder(folder: str) -> None:
    """Remove a directory and its content, as far as possible."""
    import shutil  # not needed by a rank's watcher, which imports this file, too

    shutil.rmtree(folder, ignore_errors=True)


def process_name(pid: int) -> str:
    """Return the command name of a process, or '?' if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
