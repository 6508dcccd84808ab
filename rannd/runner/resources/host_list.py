"""Host lists, the placement of ranks on hosts, and the devices of this machine."""

from __future__ import annotations

import glob
import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rannd.errors import UsageError
from rannd.ranks.host_name import own_names

#: More than any machine has: a larger number is a mistake, and must not fill the memory.
_NUMBER = re.compile("[0-9]{1,6}")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Host:
    """A host and its number of slots."""

    name: str
    slots: int


@dataclass(frozen=True)
class RankHost:
    """Host of one rank."""

    rank: int
    host: str
    local_rank: int
    """Index among the ranks of its host."""


def parse_hosts(text: str) -> list[Host]:
    """Parse ``a:4,b:4``; a host without a number has one slot.

    Raises:
        UsageError: An entry is empty or repeated, or has an invalid number.
    """
    return _distinct([_host(entry.strip(), f"--hosts {text}") for entry in text.split(",")], f"--hosts {text}")


def read_hostfile(path: Path) -> list[Host]:
    """Read a host file: per line a name, then ``slots=N`` or ``:N`` or nothing (one slot); ``#`` comments.

    Raises:
        UsageError: The file is missing or unreadable, names no host, or a line is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        where = f"{path}:{number}"
        entry = words[0]
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key != "slots":
                raise UsageError(f"{where}: {word!r} is not understood; write 'name slots=N'")
            entry = f"{words[0]}:{value}"
        hosts.append(_host(entry, where))
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host; write a line 'name slots=N' for each")
    return _distinct(hosts, str(path))


def _host(entry: str, where: str) -> Host:
    name, colon, slots = entry.partition(":")
    if not name or (colon and not (_NUMBER.fullmatch(slots) and int(slots) > 0)):
        raise UsageError(f"{where}: {entry!r} is not a host; write name:slots with slots 1 or more, as in node1:4")
    return Host(name, int(slots) if colon else 1)


def _distinct(hosts: list[Host], where: str) -> list[Host]:
    if not all(is_local(host.name) for host in hosts):
        # Launchers tell other hosts where to connect: a loopback name would be themselves.
        own = socket.gethostname()
        hosts = [Host(own if _is_loopback(host.name) else host.name, host.slots) for host in hosts]
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{where}: host {name} is named more than once; give it all its slots in one entry")
    return hosts


def is_local(name: str) -> bool:
    """Whether a host name means this machine."""
    return _is_loopback(name) or name in own_names() or _is_own_address(name)


def _is_own_address(name: str) -> bool:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(name).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((name, 0))  # an address of another machine cannot be bound
    except (ValueError, OSError):
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name.startswith("127.") or name in ("localhost", "::1")


def place(size: int, hosts: Sequence[Host]) -> list[RankHost]:
    """Place each rank: hosts in their order, each filled before the next.

    Raises:
        UsageError: There are more ranks than slots.
    """
    slots = sum(host.slots for host in hosts)
    if size > _MOST_RANKS:
        raise UsageError(f"-np {size} asks for more ranks than a job can have ({_MOST_RANKS})")
    if size > slots:
        raise UsageError(f"-np {size} asks for more ranks than the hosts have slots ({slots}); raise their slots")
    places = [(host.name, local_rank) for host in hosts for local_rank in range(host.slots)]
    return [RankHost(rank, *where) for rank, where in enumerate(places[:size])]


def default_size(gpus: int, cores: int) -> int:
    """Return the default number of ranks on a machine: one per GPU; without GPUs one per pair of cores."""
    return gpus or max(1, cores // 2)


def gpu_count(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that a rank would see, without importing torch.

    nvidia-smi lists the GPUs (if it is missing, /dev/nvidia0 and on), CUDA_VISIBLE_DEVICES those that may be used:
    entries after one that does not exist do not count, as in CUDA.
    """
    there = _gpus_by_tool()
    if there is None:
        there = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or there == 0:
        return there
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        # A GPU or MIG device may be named by its UUID.
        if not (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < there)):
            break
        count += 1
    return count


def _gpus_by_tool() -> int | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver: no GPUs
        return None
    return sum(line.startswith("GPU ") for line in listing.splitlines())
