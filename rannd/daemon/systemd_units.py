"""systemd user units that listen for the daemon and start it on the first request (socket activation).

The socket belongs to systemd and exists before and after the daemon. The daemon gets it by `LISTEN_FDS` (boot.py) and
refuses one that is not where clients look, so the units contain the paths of this environment.

The service is restricted to what the daemon needs. All settings work for user units; those that need namespaces
(`ProtectSystem`, `PrivateNetwork`) are ignored by systemd before version 253, and if the kernel refuses user
namespaces.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rannd.daemon.common.paths import DaemonPaths
from rannd.errors import DaemonError, UsageError
from rannd.plain_file import PlainFile

SOCKET = "rannd.socket"
SERVICE = "rannd.service"

_FILE = PlainFile("unit", "rannd install-service", DaemonError, 1 << 20)

_SOCKET = """\
# {origin}
[Unit]
Description=Socket of rannd, the cache of deployments and profiles

[Socket]
ListenStream={socket}
SocketMode=0600
DirectoryMode=0700
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""

_SERVICE = """\
# {origin}
[Unit]
Description=rannd, the cache of deployments and profiles
Requires=rannd.socket
After=rannd.socket

[Service]
ExecStart={executable} run
{places}
UMask=0077
KillMode=mixed
MemoryMax=2G
TasksMax=64
LimitNOFILE=65536
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
PrivateNetwork=yes
ProtectSystem=strict
"""


class Units(msgspec.Struct, frozen=True):
    """Contents of the socket unit and the service unit."""

    socket: str
    service: str

    def files(self) -> dict[str, str]:
        """Return the text of each file by its name."""
        return {SOCKET: self.socket, SERVICE: self.service}


def sample() -> Units:
    """Return units for the default cache directory and ~/.local/bin/rannd: the samples in the folder systemd/.

    systemd itself substitutes the directories: %t is $XDG_RUNTIME_DIR, %h the home directory.
    """
    origin = "A sample; `rannd install-service` writes one for your environment (docs/daemon.md)."
    lines = "CacheDirectory=rannd\nCacheDirectoryMode=0700\nReadWritePaths=%t/rannd"
    return Units(
        _SOCKET.format(origin=origin, socket="%t/rannd/v1.sock"),
        _SERVICE.format(origin=origin, executable="%h/.local/bin/rannd", places=lines),
    )


def units(places: DaemonPaths, executable: str) -> Units:
    """Return units for the daemon with these paths.

    Args:
        places: Paths of the daemon, where clients of this environment look.
        executable: Absolute path of `rannd`.

    Raises:
        DaemonError: There is no $XDG_RUNTIME_DIR, or a path contains what a unit cannot express.
    """
    runtime, name = os.path.split(places.runtime)
    if name != "rannd":
        raise DaemonError(
            f"XDG_RUNTIME_DIR is not a directory of this user: clients use {places.socket}, but systemd's user manager "
            "uses another path; log in as this user (not by su or sudo) and try again"
        )
    if set(executable) & set("\"'\\"):
        raise DaemonError(f"systemd cannot start a program with quotes or backslashes in its path: {executable}")
    cache = os.path.dirname(places.cache)
    home = os.path.dirname(cache)
    environment = (f"XDG_RUNTIME_DIR={runtime}", f"XDG_CACHE_HOME={home}")
    writable = (places.runtime, *filter(None, (places.short,)), cache)
    lines = f"Environment={' '.join(map(_word, environment))}\nReadWritePaths={' '.join(map(_word, writable))}"
    origin = "Written by `rannd install-service`."
    return Units(
        _SOCKET.format(origin=origin, socket=_plain(places.socket)),
        _SERVICE.format(origin=origin, executable=_word(executable), places=lines),
    )


def executable() -> str:
    """Return the absolute path of this environment's `rannd`.

    Raises:
        DaemonError: It is not installed.
    """
    # Prefer the running command: there are several script folders, such as that of `pip install --user`.
    running = Path(sys.argv[0]).absolute()
    candidates = [running] if running.name == "rannd" else []
    candidates.append(Path(sysconfig.get_path("scripts"), "rannd"))
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return str(candidate)
    raise DaemonError(f"there is no rannd in {candidates[-1].parent}; install rannd into this environment")


def directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the user's own units (systemd.unit(5)).

    Raises:
        DaemonError: Neither XDG_CONFIG_HOME nor HOME is usable.
    """
    env = os.environ if environ is None else environ
    for name, below in (("XDG_CONFIG_HOME", ""), ("HOME", ".config")):
        if os.path.isabs(env.get(name, "")):
            return Path(env[name], below, "systemd", "user")
    raise DaemonError("neither XDG_CONFIG_HOME nor HOME is an absolute path; set HOME to your home directory")


def install(made: Units, folder: Path, *, force: bool) -> dict[Path, bool]:
    """Write unit files atomically, and return for each whether it was written; up-to-date files are left alone.

    Args:
        made: The units.
        folder: Their folder; created if it is missing.
        force: Replace files with other content.

    Raises:
        UsageError: A file has other content; nothing is written.
        DaemonError: A file is a symbolic link, or cannot be read or written.
    """
    wanted = {folder / name: text.encode() for name, text in made.files().items()}
    there = {file: _FILE.read(file) for file in wanted if os.path.lexists(file)}
    for file, text in there.items():
        if text != wanted[file] and not force:
            raise UsageError(
                f"{file} exists with other content; look at it, then overwrite it with "
                "`rannd install-service --force`. Nothing was written"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise DaemonError(
            f"the folder {folder} cannot be created: {exc.strerror}; create it, or set XDG_CONFIG_HOME"
        ) from exc
    for file, text in wanted.items():
        if there.get(file) != text:
            _FILE.write(text, file)
    return {file: there.get(file) != text for file, text in wanted.items()}


def _plain(path: str) -> str:
    """Return a path as the value of a unit's setting, where only % is special.

    Raises:
        DaemonError: A unit cannot express it.
    """
    if not path.isprintable():  # line feeds and the like, and bytes that are not UTF-8
        raise DaemonError(f"a systemd unit cannot contain the path {path!r}; use a directory with a printable name")
    return path.replace("%", "%%")


def _word(text: str) -> str:
    """Return a text as one quoted word of a unit's setting."""
    return '"{}"'.format(_plain(text).replace("\\", "\\\\").replace('"', '\\"'))
