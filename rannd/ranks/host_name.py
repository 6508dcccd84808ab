"""The names and addresses of this machine, and names from outside, as text that messages, files and logs can hold."""

from __future__ import annotations

import contextlib
import socket

_DISCARD = 9
"""Port of the UDP sockets that find the routes; nothing is sent."""


def host_name() -> str:
    """Return the name of this machine, made `encodable`."""
    return encodable(socket.gethostname())


def own_names() -> set[str]:
    """Return the names of this machine as the system gives them: whole, without domain, as its resolver knows it."""
    own = socket.gethostname()
    try:
        return {own, own.split(".")[0], socket.getfqdn()}
    except UnicodeError:  # no resolver knows such a name
        return {own, own.split(".")[0]}


def encodable(name: str) -> str:
    """Return a name with bytes that are not UTF-8, which Python reads as surrogates, written as ``\\udcff``."""
    return name.encode(errors="backslashreplace").decode()


def addresses_towards(host: str) -> list[str]:
    """Return the source addresses of this machine's connections to a host, IPv4 first; none if there is no route.

    Raises:
        OSError, UnicodeError: The name is not known, or not valid.
    """
    found = []
    places = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    for family, kind, _, _, place in sorted(places, key=lambda each: each[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)
            found.append(str(probe.getsockname()[0]))
    return found
