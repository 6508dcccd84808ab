"""Finds out within seconds that the machine at the other end of a TCP connection is gone.

A machine that loses power, or its cable, says nothing: without probes a connection to it stays for ever, and one with
data under way for a quarter of an hour. Standard library only: the ranks' watchers run without site-packages.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

IDLE_S, INTERVAL_S, PROBES = 5, 3, 3
LOOK_S = 3.0
"""How often it is worth while to ask `is_lost`."""
LOST_S = IDLE_S + INTERVAL_S * PROBES + 1
"""After so many seconds without an answer of its kernel a machine is lost."""

#: Of Linux's struct tcp_info: retransmits is the third byte, last_ack_recv (milliseconds) the 13th number after eight.
_TCP_INFO = struct.Struct("8B13I")


def look_out(end: socket.socket, *, reads_at_once: bool) -> None:
    """Let the kernel probe the other machine while nothing travels; reading fails after `LOST_S` without an answer.

    Args:
        end: a connected TCP socket.
        reads_at_once: whether the process at the other end takes what comes, however long ours may be. Then data that
            is under way is given up after `LOST_S`, too; elsewhere the kernel would take a slow reader for a lost one,
            and `is_lost` tells them apart.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": INTERVAL_S, "TCP_KEEPCNT": PROBES}
    if reads_at_once:
        options["TCP_USER_TIMEOUT"] = LOST_S * 1000
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_lost(end: socket.socket, *, reads_at_once: bool) -> bool:
    """Whether the other machine has not answered for `LOST_S`; `look_out` sees to it that a living one does.

    The kernel itself may take longer: it starts to count anew when something is sent. Where the process at the other
    end may let things wait (`reads_at_once`), only data that was sent again and again counts.
    """
    if sys.platform != "linux" or end.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with contextlib.suppress(OSError, struct.error):
        fields = _TCP_INFO.unpack(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        retransmits, last_ack_ms = fields[2], fields[-1]
        return bool((reads_at_once or retransmits) and last_ack_ms > LOST_S * 1000)
    return False
