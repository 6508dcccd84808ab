"""Each call for the sockets of failure detection fails in turn: all ranks hear of a failure, and the hub goes on.

Argument: how many calls of each kind fail, with one error each, or ``all`` with all errors.
"""

from __future__ import annotations

import contextlib
import sys
import time

from faults.faulty import SOCKET_CALLS, Faults, failures, words
from hub_thread import LONG_S, HubThread, heard

from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.side_channel import Channel, Left, RankHello, Told, connect

most = None if sys.argv[1] == "all" else int(sys.argv[1])
faults = Faults()
seen: dict[str, int] = {}
"""Calls of the latest attempt."""


def failed(rank: int) -> Told:
    return Told(Failure(rank, "host", 7, "raised", "step 3", "ValueError: no"))


def hears(channel: Channel | None) -> bool:
    """Whether a rank hears of a failure; otherwise its connection has ended, which its detector takes for one."""
    return channel is not None and any(isinstance(message, Told) for message in heard(channel))


def joined(hub: HubThread, rank: int) -> Channel | None:
    """The connection of a rank; None: it cannot connect, which its detector tells."""
    channel = connect(["127.0.0.1"], hub.port, hub.token)
    if channel is not None:
        channel.send(RankHello(rank, "host", 7))
    return channel


def attempt(call: str = "", number: int = 0, error: int = 0) -> str:
    """Three ranks connect, one fails; who heard of it. A hub that cannot listen is rank 0's error."""
    hub = HubThread(4)
    faults.plan(call, number, error)
    ranks: dict[int, Channel | None] = {}
    try:
        hub.rank_0.send(RankHello(0, "host", 6))
        ranks = {rank: joined(hub, rank) for rank in (1, 2)}
        if ranks[2] is not None:
            ranks[2].send(failed(2))
        if not hears(ranks[2]):  # its process ends, and rank 1 notices
            assert ranks[1] is not None
            ranks[1].send(failed(1))
        well = [hears(ranks[1]), hears(hub.rank_0)]
        assert well[1], "rank 0 hears nothing"
        seen.update({call: faults.seen(call) for call in SOCKET_CALLS})
        faults.plan()
        # One that comes later is served, and hears of it as well.
        ranks[3] = joined(hub, 3)
        assert hears(ranks[3]), "a later rank hears nothing"
        assert ranks[3] is not None
        ranks[3].send(Left(3, 0))
        assert any(message == Left(3, 0) for message in heard(ranks[3])), "a later rank is not served"
        assert hub.error is None, hub.error
        return "all heard" if all(well) and ranks[2] is not None else "one had no connection"
    finally:
        faults.plan()
        hub.stop()
        for channel in ranks.values():
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.close()


attempt()
counts = {call: count for call, count in seen.items() if count}
outcomes: dict[str, int] = {}
tried, slowest = 0, 0.0
for call, number, error in failures(counts, most):
    where = words(call, number, error)
    begin = time.monotonic()
    try:
        outcome = attempt(call, number, error)
        assert time.monotonic() - begin < LONG_S
    except BaseException as exc:
        exc.add_note(where)
        raise
    slowest = max(slowest, time.monotonic() - begin)
    outcomes[outcome] = outcomes.get(outcome, 0) + 1
    tried += 1
print(f"failure detection: {tried} failing calls, {outcomes}; slowest {slowest:.1f} s; {counts}")
