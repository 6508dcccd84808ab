"""Detects within seconds that the host at the other end of a TCP connection is down.

A host that loses power or network sends nothing: without keep-alive probes an idle connection to it stays open forever,
and one with unacknowledged data for about 15 minutes. Standard library only: the ranks' watchers run without
site-packages.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

IDLE_S, INTERVAL_S, PROBES = 5, 3, 3
LOOK_S = 3.0
"""Recommended interval between calls of `is_lost`, in seconds."""
LOST_S = IDLE_S + INTERVAL_S * PROBES + 1
"""Seconds without a reply of its kernel after which a host counts as lost."""

#: Linux's struct tcp_info: retransmits is the third byte, last_ack_recv (milliseconds) the 13th number after 8 bytes.
_TCP_INFO = struct.Struct("8B13I")


def look_out(end: socket.socket, *, reads_at_once: bool) -> None:
    """Enable TCP keep-alive, so that reading from an idle connection fails after `LOST_S` without a reply.

    Args:
        end: A connected TCP socket.
        reads_at_once: Whether the process at the other end always reads without delay. If so, unacknowledged data also
            fails after `LOST_S`. If not, that timeout would take a slow reader for a lost host; `is_lost` tells the two
            apart.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": INTERVAL_S, "TCP_KEEPCNT": PROBES}
    if reads_at_once:
        options["TCP_USER_TIMEOUT"] = LOST_S * 1000
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_lost(end: socket.socket, *, reads_at_once: bool) -> bool:
    """Whether the other host has not replied for `LOST_S`; `look_out` makes sure that a running host does.

    The kernel itself may take longer, because it restarts its timer when something is sent. If the process at the other
    end may read late (`reads_at_once` is False), only retransmitted data counts.
    """
    if sys.platform != "linux" or end.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with contextlib.suppress(OSError, struct.error):
        fields = _TCP_INFO.unpack(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        retransmits, last_ack_ms = fields[2], fields[-1]
        return bool((reads_at_once or retransmits) and last_ack_ms > LOST_S * 1000)
    return False
