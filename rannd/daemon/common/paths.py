"""Where the daemon and its store live, and the checks that nobody else can get between.

======================================  =================================================
``$XDG_RUNTIME_DIR/rannd/``             sockets, locks and logs, else ``/tmp/rannd-$UID/``
``  <id>.sock``                         the listening socket
``  <id>.life``                         held by the daemon as long as it lives
``  <id>.spawn``                        held by who starts a daemon
``  <id>.use``                          shared by every request, exclusive for the idle exit
``  <id>.log``                          the daemon's own log
``$XDG_CACHE_HOME/rannd/<machine>/``    the store, else ``~/.cache/rannd/<machine>/``
======================================  =================================================

``<id>`` is ``v<series>`` for the account's own cache directory and ``v<series>-<hash>`` for any other: there is one
daemon per user, cache directory and series of protocol versions that can at least refuse each other. The locks are in
the runtime directory because flock is not to be trusted on network filesystems.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rannd.daemon.common.protocol import SERIES, STORE
from rannd.errors import DaemonError

MAX_SOCKET_PATH = 107
"""Bytes of an AF_UNIX path on Linux without the closing zero."""


class DaemonPaths(msgspec.Struct, frozen=True):
    """Absolute paths of everything one daemon owns."""

    runtime: str
    """Directory of sockets, locks and logs."""
    identity: str
    cache: str
    """Directory of the store."""
    short: str = ""
    """Directory of the socket alone, where its path in `runtime` would be too long."""

    @property
    def socket(self) -> str:
        """Path of the listening socket, never longer than AF_UNIX allows."""
        if self.short:
            digest = hashlib.sha256(os.fsencode(self.runtime)).hexdigest()[:16]
            return f"{self.short}/{digest}-{self.identity}.sock"
        return f"{self.runtime}/{self.identity}.sock"

    @property
    def life(self) -> str:
        """Lock that the daemon holds as long as it lives."""
        return f"{self.runtime}/{self.identity}.life"

    @property
    def spawn(self) -> str:
        """Lock around probe, start and readiness."""
        return f"{self.runtime}/{self.identity}.spawn"

    @property
    def use(self) -> str:
        """Lock that requests share and that an idle exit needs for itself."""
        return f"{self.runtime}/{self.identity}.use"

    @property
    def log(self) -> str:
        """The daemon's own log."""
        return f"{self.runtime}/{self.identity}.log"

    @property
    def store(self) -> str:
        """The SQLite file; its name carries the version of its grammar."""
        return f"{self.cache}/cache-v{STORE}.sqlite"

    def secure_runtime(self) -> None:
        """Make the runtime directory, or refuse one that others could have prepared.

        Raises:
            DaemonError: it is a symbolic link, somebody else's, or not mode 0700.
        """
        for directory in filter(None, (self.runtime, self.short)):
            _secure(directory, "runtime", follow=False, forbidden=0o077)

    def secure_cache(self) -> None:
        """Make the cache directory, or refuse one that others may write to.

        Raises:
            DaemonError: it is somebody else's, or writable for group or others, or cannot be made.
        """
        for directory in (os.path.dirname(self.cache), self.cache):
            # A link is fine here (caches are often linked to a larger disk): what it leads to is checked.
            _secure(directory, "cache", follow=True, forbidden=0o022)


def places(environ: Mapping[str, str] | None = None) -> DaemonPaths:
    """The places of this user on this machine, following the XDG variables of `environ` (default: os.environ).

    Touches nothing on the disk.

    Raises:
        DaemonError: the user has no home directory and XDG_CACHE_HOME is not set, or a path is no text.
    """
    env = os.environ if environ is None else environ
    uid = os.getuid()
    fallback = f"/tmp/rannd-{uid}"
    runtime_home = env.get("XDG_RUNTIME_DIR", "")
    runtime = f"{os.path.normpath(runtime_home)}/rannd" if _usable_runtime(runtime_home, uid) else fallback
    cache_root = os.path.normpath(_cache_home(env)) + "/rannd"
    identity = f"v{SERIES}"
    if cache_root != _account_cache_root(uid):
        identity += "-" + hashlib.sha256(os.fsencode(cache_root)).hexdigest()[:12]
    for path in (runtime, cache_root):
        _expressible(path)
    found = DaemonPaths(runtime=runtime, identity=identity, cache=f"{cache_root}/{machine_id()}")
    if len(os.fsencode(found.socket)) > MAX_SOCKET_PATH:
        found = msgspec.structs.replace(found, short=fallback)
    return found


def machine_id(path: str = "/etc/machine-id") -> str:
    """Sixteen hex digits that name this machine; from its host name where `path` is missing or empty.

    The id itself is confidential (machine-id(5)), so that only its hash is shown.
    """
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        text = ""
    return hashlib.sha256(f"rannd machine {text or socket.gethostname()}".encode()).hexdigest()[:16]


def _expressible(path: str) -> None:
    """Refuse a path that neither a message nor SQLite can name."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DaemonError(
            f"the path {path!r} is not in UTF-8; set XDG_CACHE_HOME and XDG_RUNTIME_DIR to directories with other names"
        ) from None


def _usable_runtime(path: str, uid: int) -> bool:
    """Whether XDG_RUNTIME_DIR is this user's: su and sudo often hand down another's or one that is gone."""
    if not os.path.isabs(path):
        return False
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def _cache_home(env: Mapping[str, str]) -> str:
    named = env.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification says to ignore relative ones
        return named
    home = env.get("HOME", "")
    if os.path.isabs(home):
        return f"{home}/.cache"
    try:
        return pwd.getpwuid(os.getuid()).pw_dir + "/.cache"
    except KeyError:
        raise DaemonError(
            f"user {os.getuid()} has no home directory to keep the cache in; set XDG_CACHE_HOME to a directory"
        ) from None


def _account_cache_root(uid: int) -> str:
    try:
        return os.path.normpath(pwd.getpwuid(uid).pw_dir) + "/.cache/rannd"
    except KeyError:
        return ""


def _secure(path: str, name: str, *, follow: bool, forbidden: int) -> None:
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.stat(path, follow_symlinks=follow)
    except OSError as exc:
        raise DaemonError(
            f"the {name} directory {path} cannot be made ({exc.strerror}: {exc.filename}); make it, or name another"
        ) from exc
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        raise DaemonError(f"the {name} directory {path} is a symbolic link; remove it, rannd makes its own")
    if not stat.S_ISDIR(found.st_mode):
        raise DaemonError(f"the {name} directory {path} is not a directory; remove it, rannd makes its own")
    if found.st_uid != os.getuid():
        raise DaemonError(
            f"the {name} directory {path} belongs to user {found.st_uid}, not to {os.getuid()}; "
            "have it removed by its owner"
        )
    if mode & forbidden:
        raise DaemonError(f"the {name} directory {path} has mode {mode:04o}: others get in; run: chmod 700 {path}")
