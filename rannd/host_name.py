"""The name of this machine, and other names from outside, as text that messages, files and logs can hold."""

from __future__ import annotations

import socket


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
