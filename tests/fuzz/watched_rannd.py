"""`rannd run` that watches what it does; its argument is a file to which it writes what it must not have done."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from fuzz.watched import Found

from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.daemon.server import boot
from rannd.daemon.server.server import Server, Settings

found, where, serve = Found(), places(), Server.serve


def _allowed(event: str, arguments: tuple[Any, ...]) -> bool:
    return event == "socket.__new__" or (event == "os.remove" and arguments[0] == where.socket)


def _watched(server: Server) -> None:
    with found.watched(_allowed):
        serve(server)


logging.basicConfig(level=logging.INFO)
Server.serve = _watched  # type: ignore[method-assign]
boot.run(where, Settings(0.0, 1 << 30, version(), pinned=True), on_ready="ready")
Path(sys.argv[1]).write_text("\n".join(found.violations))
