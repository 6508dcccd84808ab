"""The network interface of this machine that other nodes reach.

gloo listens where this machine's own name leads. Many installations (Debian's and Ubuntu's among them) have that name
on 127.0.1.1, where no other node can come; then ranks on several nodes wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil

_DISCARD = 9
"""A port; nothing is sent there."""


def to_others(master: str) -> str:
    """The name of the interface to use, '' where gloo finds the right one itself.

    Args:
        master: name or address of the machine of rank 0.
    """
    try:
        if _is_loopback(master) and not _is_own_name(master):
            return ""  # all ranks are on this machine
        address = _address_towards(master)
    except OSError:
        return ""  # what connects to it has the better error
    with contextlib.suppress(OSError):
        if not _is_loopback(socket.gethostname()):
            return ""
    names = psutil.net_if_addrs()
    for name, entries in names.items():
        if any(entry.address == address for entry in entries):
            return name
    up = psutil.net_if_stats()
    for name, entries in names.items():  # rank 0's own machine: it has no way to itself but the loopback
        if name in up and up[name].isup and any(_is_outside(entry) for entry in entries):
            return name
    return ""


def _is_own_name(name: str) -> bool:
    return name in (socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn())


def _is_loopback(name: str) -> bool:
    """Whether a name leads to this machine alone. OSError where it leads nowhere."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return ipaddress.ip_address(str(found[0][4][0]).split("%")[0]).is_loopback


def _address_towards(host: str) -> str:
    """The address that this machine shows to another one, '' where it has none but the loopback for it."""
    for family, kind, _, _, place in socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)
            address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return ""


def _is_outside(entry: object) -> bool:
    family, address = getattr(entry, "family", None), str(getattr(entry, "address", ""))
    if family != socket.AF_INET:
        return False
    found = ipaddress.ip_address(address)
    return not found.is_loopback and not found.is_link_local
