"""Formats the daemon's state as text, for `rannd status`."""

from __future__ import annotations

import time

from rannd.daemon.cli_common import duration_text, size_text
from rannd.daemon.common.printable import plain
from rannd.daemon.common.protocol import LeaseInfo, State

ERRORS_SHOWN = 5
"""Number of latest errors to show; `rannd status --json` shows all that the daemon remembers."""


def lines(state: State) -> list[str]:
    """Return the lines to print, with the latest error first."""
    idle = f"exits after {state.idle_s:g} s without work" if state.idle_s > 0 else "never exits by itself"
    return [
        f"rannd {state.version}, pid {state.pid}, up for {duration_text(state.uptime_s)}, {idle}",
        f"requests  {state.requests}, {state.rejected} rejected",
        f"clients   {state.clients} within the last minute",
        f"entries   {state.entries}, {size_text(state.bytes)} of {size_text(state.max_bytes)}",
        f"hits      {state.statistics.hits}{_by_kind({kind: each.hits for kind, each in state.kinds.items()})}",
        f"misses    {state.statistics.misses}{_by_kind({kind: each.misses for kind, each in state.kinds.items()})}",
        f"socket    {state.socket}",
        f"store     {state.store}",
        f"log       {state.log}",
        *(_lease(lease) for lease in state.leases),
        *(f"error     {_date(each.at)} {plain(each.text)}" for each in state.errors[: -ERRORS_SHOWN - 1 : -1]),
    ]


def _by_kind(counts: dict[str, int]) -> str:
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()) if count)
    return f" ({told})" if told else ""


def _lease(lease: LeaseInfo) -> str:
    holder = f"{plain(lease.who)} (process {lease.pid})" if lease.who else f"process {lease.pid}"
    progress = f", {plain(lease.progress)}" if lease.progress else ""
    return (
        f"lease     {lease.key[:12]} held by {holder} for {duration_text(lease.since_s)}{progress}, "
        f"{lease.waiting} waiting"
    )


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
