"""Leases: which client may compute the value of a key, and which clients wait for it. No clock and no sockets.

::

    acquire ──free──► held ──released, holder dead or silent──► next waiter holds, or free
       │                 └───────value stored───────► all waiters get it, free
       └──held──► waiting ──deadline──► Busy
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

import msgspec

Route = TypeVar("Route")


class Waiter(msgspec.Struct, Generic[Route], frozen=True):
    """A client whose reply is delayed until the key is free, has a value, or `deadline` (seconds) has passed."""

    route: Route
    """Address of the client."""
    token: str
    pid: int
    deadline: float
    who: str = ""
    patience: float = math.inf
    """Seconds without a beat after which it loses the lease, once it holds it."""


class HeldLease(msgspec.Struct, Generic[Route]):
    """A lease: its holder, the time it was granted (seconds), and the waiting clients in order of arrival."""

    token: str
    pid: int
    since: float
    waiters: deque[Waiter[Route]]
    who: str = ""
    patience: float = math.inf
    beaten: float = 0.0
    """Time of its last beat."""
    progress: str = ""


class Leases(Generic[Route]):
    """All leases, by key. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self._held: dict[str, HeldLease[Route]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def items(self) -> list[tuple[str, HeldLease[Route]]]:
        """Return keys and their leases."""
        return list(self._held.items())

    def keys(self) -> set[str]:
        """Return the leased keys."""
        return set(self._held)

    def grant(
        self, key: str, token: str, pid: int, now: float, who: str = "", patience: float = math.inf
    ) -> HeldLease[Route] | None:
        """Give the lease to `token` and return None, or return the existing lease if another token holds it."""
        lease = self._held.get(key)
        if lease is None:
            self._held[key] = HeldLease(token, pid, now, deque(), who, patience, now)
        elif lease.token != token:
            return lease
        return None

    def beat(self, key: str, token: str, progress: str, now: float) -> bool:
        """Record a beat and the progress of a holder; return whether `token` holds the lease."""
        lease = self._held.get(key)
        if lease is None or lease.token != token:
            return False
        lease.beaten, lease.progress = now, progress
        return True

    def silent(self, now: float) -> list[tuple[str, str]]:
        """Return key and token of each lease whose holder has not sent a beat in time."""
        return [(key, lease.token) for key, lease in self._held.items() if now - lease.beaten >= lease.patience]

    def wait(self, key: str, waiter: Waiter[Route]) -> None:
        """Append a waiter to the lease of `key`; an older wait of the same token is dropped without a reply."""
        lease = self._held[key]
        self._drop(lease, waiter.token)
        lease.waiters.append(waiter)

    def release(self, key: str, token: str) -> bool:
        """Take the lease from `token`; return whether it held it. Waiters stay: call `next` for them."""
        lease = self._held.get(key)
        if lease is None:
            return False
        if lease.token != token:
            self._drop(lease, token)
            return False
        lease.token = ""
        return True

    def next(self, key: str, now: float) -> Waiter[Route] | None:
        """Grant a released lease to its first waiter and return it; without waiters free the key and return None."""
        lease = self._held[key]
        if not lease.waiters:
            del self._held[key]
            return None
        waiter = lease.waiters.popleft()
        lease.token, lease.pid, lease.since, lease.beaten = waiter.token, waiter.pid, now, now
        lease.who, lease.patience, lease.progress = waiter.who, waiter.patience, ""
        return waiter

    def settle(self, key: str) -> list[Waiter[Route]]:
        """End the lease because a value was stored; return the clients that wait for it."""
        lease = self._held.pop(key, None)
        return list(lease.waiters) if lease is not None else []

    def held_by(self, pid: int) -> list[tuple[str, str]]:
        """Return key and token of each lease that process `pid` holds."""
        return [(key, lease.token) for key, lease in self._held.items() if lease.pid == pid]

    def give_up(self, pid: int) -> None:
        """Remove all waiters of process `pid`."""
        for lease in self._held.values():
            for waiter in [waiter for waiter in lease.waiters if waiter.pid == pid]:
                lease.waiters.remove(waiter)

    def expired(self, now: float) -> list[tuple[str, Waiter[Route]]]:
        """Remove and return the waiters whose deadline has passed."""
        found = []
        for key, lease in self._held.items():
            late = [waiter for waiter in lease.waiters if waiter.deadline <= now]
            for waiter in late:
                lease.waiters.remove(waiter)
                found.append((key, waiter))
        return found

    def deadline(self) -> float | None:
        """Return the earliest deadline of a waiter, or of a holder's next beat; None if there is none."""
        waiting = (waiter.deadline for lease in self._held.values() for waiter in lease.waiters)
        beats = (lease.beaten + lease.patience for lease in self._held.values() if lease.patience < math.inf)
        return min((*waiting, *beats), default=None)

    @staticmethod
    def _drop(lease: HeldLease[Route], token: str) -> None:
        for waiter in [waiter for waiter in lease.waiters if waiter.token == token]:
            lease.waiters.remove(waiter)
