"""Asking the daemon of a test without a client."""

from __future__ import annotations

import time

from rannd.daemon import channel, protocol
from rannd.daemon.places import places


def state() -> protocol.State:
    """How it is; it has to run."""
    reply = channel.ask(places().socket, protocol.Status(), time.monotonic() + 60)
    assert isinstance(reply, protocol.State)
    return reply
