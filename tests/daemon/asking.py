"""Asking the daemon of a test without a client."""

from __future__ import annotations

import time

from rannd.daemon.client import request_channel
from rannd.daemon.common import protocol
from rannd.daemon.common.paths import places


def state() -> protocol.State:
    """How it is; it has to run."""
    reply = request_channel.ask(places().socket, protocol.Status(), time.monotonic() + 60)
    assert isinstance(reply, protocol.State)
    return reply
