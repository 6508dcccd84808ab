"""Finds the network interface on which gloo has to listen, for GLOO_SOCKET_IFNAME.

gloo listens on the address that the machine's host name resolves to. Other machines may reach that although all ranks
are on this one: then it is the loopback interface. Or many installations (Debian and Ubuntu among them) resolve the
name to 127.0.1.1, which other nodes cannot reach: ranks on several nodes would wait for each other forever.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, MutableMapping

import psutil

from rannd import log
from rannd.ranks.host_name import addresses_towards, own_names
from rannd.ranks.rank_variables import torch_variables

_VARIABLE = "GLOO_SOCKET_IFNAME"

_chosen = ""


def choose(environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME for the process groups of this process, rannd's and the script's own, where needed.

    Called when pyrannc is imported, which scripts do before they make a process group, and before rannd makes one.
    """
    global _chosen
    master = environ.get("MASTER_ADDR", "")
    if not master or environ.get(_VARIABLE):
        return
    if is_one_machine(environ):
        environ[_VARIABLE] = _with_address("127.0.0.1")
        return
    _chosen = _to_others(master)
    if _chosen:
        environ[_VARIABLE] = _chosen


def is_one_machine(environ: Mapping[str, str]) -> bool:
    """Whether all ranks of the job are on this machine: so say the numbers of ranks, or where rank 0 listens."""
    ranks = torch_variables(environ) or environ
    if "WORLD_SIZE" in ranks and ranks["WORLD_SIZE"] == ranks.get("LOCAL_WORLD_SIZE"):
        return True
    master = environ.get("MASTER_ADDR", "")
    return loopback_address(master) != "" and not _is_own_name(master)


def loopback_address(name: str) -> str:
    """The loopback address that a host name resolves to; '' if it resolves to another address, or to none."""
    with contextlib.suppress(OSError, UnicodeError):
        found = _resolved(name)
        return found if name and ipaddress.ip_address(found).is_loopback else ""
    return ""


def tell() -> None:
    """Log what `choose` has chosen; not before logging is set up."""
    if _chosen:
        log.get("RaNNCProcess").info(
            "This machine's host name resolves to a loopback address; using interface %s for gloo", _chosen
        )


def _to_others(master: str) -> str:
    """Name of the interface to use; '' if gloo finds the right one itself.

    Args:
        master: Host name or address of rank 0's machine.
    """
    try:
        addresses = addresses_towards(master)
    except OSError:
        return ""  # connecting to it gives a better error message
    address = next((each for each in addresses if not ipaddress.ip_address(each).is_loopback), "")
    with contextlib.suppress(OSError, UnicodeError):
        if not ipaddress.ip_address(_resolved(socket.gethostname())).is_loopback:
            return ""
    if name := _with_address(address):
        return name
    names = psutil.net_if_addrs()
    up = psutil.net_if_stats()
    for name, entries in names.items():  # rank 0's own machine, which reaches itself by the loopback interface only
        if name in up and up[name].isup and any(_is_outside(entry) for entry in entries):
            return name
    return ""


def _is_own_name(name: str) -> bool:
    return name in own_names()


def _with_address(address: str) -> str:
    """Name of the interface with an address; '' if none has it."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), "")


def _resolved(name: str) -> str:
    """Address that a host name resolves to. OSError if it cannot be resolved."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]).split("%")[0]


def _is_outside(entry: object) -> bool:
    family, address = getattr(entry, "family", None), str(getattr(entry, "address", ""))
    if family != socket.AF_INET:
        return False
    found = ipaddress.ip_address(address)
    return not found.is_loopback and not found.is_link_local
