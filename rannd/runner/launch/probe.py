"""Reports whether one host is ready for ranks: rannc-run's preflight starts it, one process per host."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

import rannd.config
from rannd import __version__
from rannd.errors import RanndError
from rannd.ranks.host_name import host_name
from rannd.runner.resources import host_list
from rannd.runner.resources.rank_environment import free_port

MARK = "rannd probe "
CONNECT_S = 10.0
_SHARED = ("device", "cache")
"""Items that do not affect plans, but must be the same on all ranks."""


class Question(msgspec.Struct, frozen=True):
    """Arguments of the probe on one host."""

    folder: str
    """Working directory of the ranks."""
    script: str
    """Path of the script, '' for a module."""
    master: str
    """Name or address of the host of rank 0."""
    port: int
    """Port that rank 0 will use on this host, to be checked; 0: rank 0 is elsewhere or may use any port."""
    back: tuple[str, int] | None
    """Address of rannc-run, None on its own machine."""


class Answer(msgspec.Struct, frozen=True):
    """What the probe found on one host."""

    host: str
    """Name of the host, as it reports it."""
    python: str
    rannd: str
    torch: str
    """Versions, '' if not installed."""
    gpus: int
    """Number of GPUs that torch can use."""
    config: dict[str, str]
    """Configuration items that must be the same on all ranks; {} if the configuration is wrong."""
    config_error: str
    folder: str
    """The working directory."""
    script: bool
    """Whether the script can be read."""
    master: str
    """Address of rank 0's host as resolved here, '' if its name is unknown."""
    port: bool
    """Whether the requested port is free."""
    free_port: int
    """A free port."""
    back: str
    """Why rannc-run cannot be reached, '' if it can."""


def here(question: Question, environ: Mapping[str, str]) -> Answer:
    """Return the answer of this machine."""
    config, error = _configuration(environ)
    return Answer(
        host=host_name(),
        python=platform.python_version(),
        rannd=__version__,
        torch=_version("torch"),
        gpus=usable_gpus(host_list.gpu_count(environ)),
        config=config,
        config_error=error,
        folder=os.getcwd(),
        script=not question.script or os.access(question.script, os.R_OK),
        master=_address(question.master),
        port=not question.port or is_free(question.port),
        free_port=free_port(),
        back=_unreachable(question.back),
    )


def usable_gpus(count: int) -> int:
    """Return `count`, the number of GPUs, or 0 if torch is a CPU build. Does not import torch."""
    spec = importlib.util.find_spec("torch") if count else None
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            builds = re.findall(r"^(?:cuda|hip)\b.*= *(.*)$", text, re.MULTILINE)
            if builds and all(each == "None" for each in builds):
                return 0
    return count


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _configuration(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    try:
        config = rannd.config.load(environ)
    except RanndError as exc:
        return {}, str(exc)
    names = [name for name, item in rannd.config.ITEMS.items() if item.plan_affecting or name in _SHARED]
    return {name: str(getattr(config, name)) for name in names}, ""


def _address(name: str) -> str:
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def is_free(port: int) -> bool:
    """Whether rank 0 can listen on a port of this machine."""
    with socket.socket() as probe:
        # As rank 0 will: a port whose last connection is closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _unreachable(place: tuple[str, int] | None) -> str:
    if place is None:
        return ""
    try:
        socket.create_connection(place, timeout=CONNECT_S).close()
    except OSError as exc:
        return str(exc)
    return ""


def main() -> None:
    """Entry point: ``sys.argv[1]`` is the question as JSON; the answer is one line of standard output."""
    question = msgspec.json.decode(sys.argv[1], type=Question)
    answer = msgspec.json.encode(here(question, os.environ)).decode()
    # ASCII, whatever the locale of that host.
    print(MARK + json.dumps(json.loads(answer)), flush=True)
