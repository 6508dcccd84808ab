"""Paths of the daemon and its store, and checks that no other user can tamper with them.

======================================  =================================================
``$XDG_RUNTIME_DIR/rannd/``             sockets, locks and logs, else ``/tmp/rannd-$UID/``
``  <id>.sock``                         the listening socket
``  <id>.life``                         lock that the daemon holds while it runs
``  <id>.spawn``                        lock of the process that starts a daemon
``  <id>.use``                          lock shared by every request, exclusive for the idle exit
``  <id>.log``                          log of the daemon
``$XDG_CACHE_HOME/rannd/<machine>/``    the store, else ``~/.cache/rannd/<machine>/``
``  compiled/``                         folders of compiled blocks
``  offload/``                          files without names, of ranks that run (`offload_optimizer`)
======================================  =================================================

``<id>`` is ``v<series>`` for the account's own cache directory and ``v<series>-<hash>`` for any other: there is one
daemon per user, cache directory and series of protocol versions that can at least refuse each other. The locks are in
the runtime directory because flock is unreliable on network filesystems.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rannd.daemon.common.protocol import SERIES, STORE
from rannd.errors import DaemonError
from rannd.ranks.host_name import host_name

MAX_SOCKET_PATH = 107
"""Maximum bytes of an AF_UNIX path on Linux, without the terminating zero."""


class DaemonPaths(msgspec.Struct, frozen=True):
    """Absolute paths of all files of one daemon."""

    runtime: str
    """Directory of sockets, locks and logs."""
    identity: str
    cache: str
    """Directory of the store."""
    short: str = ""
    """Directory of the socket only, if its path in `runtime` would be too long; else ''."""

    @property
    def socket(self) -> str:
        """Path of the listening socket, never longer than AF_UNIX allows."""
        if self.short:
            digest = hashlib.sha256(os.fsencode(self.runtime)).hexdigest()[:16]
            return f"{self.short}/{digest}-{self.identity}.sock"
        return f"{self.runtime}/{self.identity}.sock"

    @property
    def life(self) -> str:
        """Lock that the daemon holds while it runs."""
        return f"{self.runtime}/{self.identity}.life"

    @property
    def spawn(self) -> str:
        """Lock held while checking for, starting and waiting for a daemon."""
        return f"{self.runtime}/{self.identity}.spawn"

    @property
    def use(self) -> str:
        """Lock that requests share and that an idle exit takes exclusively."""
        return f"{self.runtime}/{self.identity}.use"

    @property
    def log(self) -> str:
        """Log of the daemon."""
        return f"{self.runtime}/{self.identity}.log"

    @property
    def store(self) -> str:
        """The SQLite file; its name contains the version of its schema."""
        return f"{self.cache}/cache-v{STORE}.sqlite"

    @property
    def compiled(self) -> str:
        """Folder of compiled blocks, one folder for each entry of this kind."""
        return f"{self.cache}/compiled"

    def secure_runtime(self) -> None:
        """Create the runtime directory, or refuse one that another user could have prepared.

        Raises:
            DaemonError: It is a symbolic link, belongs to another user, or does not have mode 0700.
        """
        for directory in filter(None, (self.runtime, self.short)):
            _secure(directory, "runtime", follow=False, forbidden=0o077)

    def secure_cache(self) -> None:
        """Create the cache directory, or refuse one that other users may write to.

        Raises:
            DaemonError: It belongs to another user, is writable for group or others, or cannot be created.
        """
        for directory in (os.path.dirname(self.cache), self.cache):
            # A symbolic link is fine here (caches are often linked to a larger disk): its target is checked.
            _secure(directory, "cache", follow=True, forbidden=0o022)

    def secure_compiled(self) -> str:
        """Create the folder of compiled blocks, which torch unpickles, or refuse one that others can enter.

        Raises:
            DaemonError: It is a symbolic link, belongs to another user, or does not have mode 0700.
        """
        self.secure_cache()
        _secure(self.compiled, "compiled code", follow=False, forbidden=0o077)
        return self.compiled

    def secure_offload(self) -> str:
        """Create the folder of optimizers' state, or refuse one that others can enter.

        Raises:
            DaemonError: It is a symbolic link, belongs to another user, or does not have mode 0700.
        """
        self.secure_cache()
        folder = f"{self.cache}/offload"
        _secure(folder, "offload", follow=False, forbidden=0o077)
        return folder


def places(environ: Mapping[str, str] | None = None) -> DaemonPaths:
    """Return the paths for this user on this machine, following the XDG variables of `environ` (default: os.environ).

    Does not access the files.

    Raises:
        DaemonError: The user has no home directory and XDG_CACHE_HOME is not set, or a path is not UTF-8.
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
    """Return 16 hex digits that identify this machine; from its host name if `path` is missing or empty.

    The machine id itself is confidential (machine-id(5)), so only a hash of it is used.
    """
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        text = ""
    return hashlib.sha256(f"rannd machine {text or host_name()}".encode()).hexdigest()[:16]


def _expressible(path: str) -> None:
    """Refuse a path that messages and SQLite cannot express."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DaemonError(
            f"the path {path!r} is not in UTF-8; set XDG_CACHE_HOME and XDG_RUNTIME_DIR to directories with other names"
        ) from None


def _usable_runtime(path: str, uid: int) -> bool:
    """Whether XDG_RUNTIME_DIR belongs to this user: su and sudo often pass on another user's, or one that is gone."""
    if not os.path.isabs(path):
        return False
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def _cache_home(env: Mapping[str, str]) -> str:
    named = env.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification says to ignore relative paths
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
            f"the {name} directory {path} cannot be created ({exc.strerror}: {exc.filename}); create it, or use another"
        ) from exc
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        raise DaemonError(f"the {name} directory {path} is a symbolic link; remove it, rannd creates its own")
    if not stat.S_ISDIR(found.st_mode):
        raise DaemonError(f"the {name} directory {path} is not a directory; remove it, rannd creates its own")
    if found.st_uid != os.getuid():
        raise DaemonError(
            f"the {name} directory {path} belongs to user {found.st_uid}, not to {os.getuid()}; "
            "ask its owner to remove it"
        )
    if mode & forbidden:
        raise DaemonError(f"the {name} directory {path} has mode {mode:04o}: others have access; run: chmod 700 {path}")
