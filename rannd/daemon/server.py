"""The daemon: one thread, one ROUTER socket, one store.

::

    listening descriptor ──► ROUTER ──► decode ──► handler ──► reply
    pidfd of each lease holder ──► lease ends, next waiter gets it
    wake-up pipe of the signal handlers ──► drain and exit
    nothing for idle_s, nothing leased, nobody asking (the `use` lock) ──► exit

The caller of `serve` holds the `life` lock and gives a listening AF_UNIX socket. Torch and numpy are never
imported here.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from rannd.daemon import locks, protocol
from rannd.daemon.leases import Leases, Waiter
from rannd.daemon.places import Places
from rannd.daemon.store import Store
from rannd.errors import DaemonError, ProtocolError

FLUSH_S = 1.0
"""Last-use times are written when nothing has come for so long."""
CHECK_S = 60.0
"""How often the daemon looks whether its socket still is where clients look for it."""
DRAIN_S = 1.0
"""How long the last replies may take to leave."""


class Settings(msgspec.Struct, frozen=True):
    """What a daemon is started with."""

    idle_s: float
    """Exit after so many seconds without a request; 0: never."""
    max_bytes: int
    """Bytes of values to keep."""
    version: str
    pinned: bool = False
    """Keep `idle_s` whatever clients ask for (`rannd run`)."""


class Server:
    """Answers requests until it is told to stop or nobody needs it."""

    def __init__(self, places: Places, settings: Settings, listener: socket.socket, *, owns_socket: bool) -> None:
        """Open the store and the socket.

        Args:
            places: Where everything is.
            settings: Limits.
            listener: Listening socket at `places.socket`; taken over.
            owns_socket: Unlink the socket at exit. Not under socket activation, where systemd goes on listening.

        Raises:
            DaemonError: the store cannot be used.
        """
        self.places = places
        self.settings = settings
        self._owns_socket = owns_socket
        self._log = logging.getLogger("rannd.Daemon")
        self._store = Store(places.store, max_bytes=settings.max_bytes)
        self._leases: Leases[bytes] = Leases()
        self._watched: dict[int, int] = {}  # pid of a lease holder -> its pidfd
        self._requests = self._rejected = 0
        self._started = self._active = self._checked = time.monotonic()
        self._stop: str | None = None
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, int(DRAIN_S * 1000))
        self._router.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a client that is gone must be noticed
        self._router.setsockopt(zmq.SNDTIMEO, 0)
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())  # SO_PEERCRED, checked by libzmq at accept
        self._router.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
        self._router.bind(f"ipc://{places.socket}")
        listener.close()
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            end.setblocking(False)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._use = locks.open_lock(places.use)
        self._inode = _inode(places.socket)

    def serve(self) -> None:
        """Answer until the end. Main thread only: takes SIGTERM and SIGINT."""
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        self._log.info("rannd %s, pid %d, listens at %s", self.settings.version, os.getpid(), self.places.socket)
        try:
            while self._stop is None:
                self._turn()
            self._drain()
            self._log.info("ends: %s", self._stop)
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._close()

    # -- the loop ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        events = self._poller.poll(self._patience_ms())
        for source, _ in events:
            if source is self._router:
                self._receive()
            elif source == self._wake.fileno():
                with suppress(BlockingIOError):
                    self._wake.recv(64)
            else:
                self._holder_died(source)
        now = time.monotonic()
        for key, waiter in self._leases.expired(now):
            self._say_busy(waiter.route, key, now)
        if events:
            self._active = now
        else:
            self._store.flush()
            self._rest(now)

    def _patience_ms(self) -> int:
        now = time.monotonic()
        ends = [now + CHECK_S, self._leases.deadline()]
        if self._active + FLUSH_S > now:
            ends.append(self._active + FLUSH_S)
        if self.settings.idle_s > 0 and not self._leases:
            ends.append(self._active + self.settings.idle_s)
        return math.ceil(max(0.0, min(end for end in ends if end is not None) - now) * 1000)

    def _rest(self, now: float) -> None:
        """Nothing has come: exit if nobody needs the daemon any more, or nobody finds it."""
        if now - self._checked >= CHECK_S:
            self._checked = now
            if _inode(self.places.socket) != self._inode:
                self._stop = f"the socket {self.places.socket} was taken away"
                self._owns_socket = False
                return
        if self.settings.idle_s <= 0 or self._leases or now - self._active < self.settings.idle_s:
            return
        # Clients share this lock from before they look for the daemon until they have their answer.
        if not locks.try_lock(self._use):
            self._active = now
        elif self._router.poll(0):
            locks.unlock(self._use)
        else:
            self._stop = f"nothing to do for {self.settings.idle_s:g} s"

    def _receive(self) -> None:
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        self._requests += 1
        route, raw = frames[0].bytes, [frame.bytes for frame in frames[1:]]
        if not raw or raw[0] != b"":
            self._rejected += 1  # not a REQ: no way to answer it that it would understand
            return
        reply: protocol.Reply | None
        try:
            request = protocol.decode_request(raw[1:])
            if isinstance(request, protocol.Acquire):
                reply = self._acquire(request, route, _peer_pid(frames[-1]))
            else:
                reply = _HANDLERS[type(request)](self, request)
        except ProtocolError as exc:
            self._rejected += 1
            reply = protocol.Failed("protocol", str(exc))
        except DaemonError as exc:
            self._log.warning("%s", exc)
            reply = protocol.Failed("store", str(exc))
        if reply is not None:
            self._send(route, reply)

    def _send(self, route: bytes, reply: protocol.Reply) -> bool:
        """Send a reply; whether there still is somebody to get it."""
        try:
            self._router.send_multipart([route, b"", *protocol.encode(reply)])
        except zmq.ZMQError as exc:
            if exc.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _drain(self) -> None:
        if self._owns_socket:
            with suppress(FileNotFoundError):
                os.unlink(self.places.socket)
        while self._router.poll(0):
            self._receive()

    def _close(self) -> None:
        self._router.close()
        self._context.term()  # waits until the last replies have left, DRAIN_S at most
        self._store.close()
        for fd in self._watched.values():
            os.close(fd)
        self._wake.close()
        self._wake_end.close()
        os.close(self._use)

    def _signalled(self, number: int, frame: object) -> None:
        self._stop = signal.Signals(number).name

    # -- requests ------------------------------------------------------------------------------------------------

    def _hello(self, request: protocol.Hello) -> protocol.Reply:
        idle_s = self.settings.idle_s if self.settings.pinned else request.idle_s
        self.settings = msgspec.structs.replace(self.settings, idle_s=idle_s, max_bytes=request.max_bytes)
        self._store.max_bytes = request.max_bytes
        return protocol.Welcome(self.settings.version, os.getpid())

    def _get(self, request: protocol.Get) -> protocol.Reply:
        values: list[bytes | None] = []
        total = 0
        for key in request.keys:
            value = self._store.get(key)
            total += len(value or b"")
            values.append(value)
            if total >= protocol.MAX_BATCH_BYTES:
                break  # the client asks for the rest
        return protocol.Values(values)

    def _put(self, request: protocol.Put) -> protocol.Reply:
        self._store.put(request.entries, request.version, keep=self._leases.keys())
        for entry in request.entries:
            for waiter in self._leases.settle(entry.key):
                self._send(waiter.route, protocol.Values([entry.value]))
        self._forget_idle_holders()
        return protocol.Done(len(request.entries))

    def _acquire(self, request: protocol.Acquire, route: bytes, peer: int) -> protocol.Reply | None:
        if self._store.stored_since(request.key, request.stored_after):
            value = self._store.get(request.key)
            if value is not None:
                return protocol.Values([value])
        now = time.monotonic()
        if not self._watch(request.pid, peer):
            return protocol.Failed("lease", f"process {request.pid} cannot be watched from here: it gets no lease")
        standing = self._leases.grant(request.key, request.token, request.pid, now)
        if standing is None:
            if not self._send(route, protocol.Granted()):
                self._pass_on(request.key, request.token)
            return None
        if request.wait_s <= 0:
            self._say_busy(route, request.key, now)
            return None
        self._store.count("waited")
        self._leases.wait(request.key, Waiter(route, request.token, request.pid, now + request.wait_s))
        return None

    def _release(self, request: protocol.Release) -> protocol.Reply:
        return protocol.Done(int(self._pass_on(request.key, request.token)))

    def _discard(self, request: protocol.Discard) -> protocol.Reply:
        return protocol.Done(int(self._store.discard(request.key, request.reason)))

    def _status(self, request: protocol.Status) -> protocol.Reply:
        entries, length = self._store.size()
        now = time.monotonic()
        return protocol.State(
            version=self.settings.version,
            protocol=protocol.PROTOCOL,
            pid=os.getpid(),
            uptime_s=now - self._started,
            idle_s=self.settings.idle_s,
            requests=self._requests,
            rejected=self._rejected,
            entries=entries,
            bytes=length,
            max_bytes=self.settings.max_bytes,
            socket=self.places.socket,
            store=self.places.store,
            log=self.places.log,
            leases=[
                protocol.LeaseInfo(key, lease.pid, now - lease.since, len(lease.waiters))
                for key, lease in self._leases.items()
            ],
            statistics=self._store.statistics(),
        )

    def _list(self, request: protocol.List) -> protocol.Reply:
        return protocol.Entries(*self._store.page(after=request.after, prefix=request.prefix))

    def _clear(self, request: protocol.Clear) -> protocol.Reply:
        removed = self._store.clear(kind=request.kind, older_than_s=request.older_than_s, keys=request.keys)
        return protocol.Entries(removed, bool(removed))

    def _verify(self, request: protocol.Verify) -> protocol.Reply:
        return protocol.Verified(*self._store.verify(request.after))

    def _stopped(self, request: protocol.Stop) -> protocol.Reply:
        self._stop = request.reason
        return protocol.Done()

    # -- leases --------------------------------------------------------------------------------------------------

    def _say_busy(self, route: bytes, key: str, now: float) -> None:
        lease = dict(self._leases.items())[key]
        self._send(route, protocol.Busy(lease.pid, now - lease.since))

    def _pass_on(self, key: str, token: str) -> bool:
        """End the lease of `token` and give it to the first waiter that can be reached; whether it was one."""
        if not self._leases.release(key, token):
            return False
        while (waiter := self._leases.next(key, time.monotonic())) is not None:
            if self._send(waiter.route, protocol.Granted()):
                break
            self._leases.release(key, waiter.token)
        self._forget_idle_holders()
        return True

    def _watch(self, pid: int, peer: int) -> bool:
        """Be told when process `pid` dies. The kernel's word (`peer`) must be the same: pids of another
        namespace would name somebody else here."""
        if pid in self._watched:
            return True
        if pid != peer:
            return False
        try:
            fd = os.pidfd_open(pid)
        except OSError as exc:
            self._log.warning("process %d cannot be watched: %s", pid, exc)
            return False
        self._watched[pid] = fd
        self._poller.register(fd, zmq.POLLIN)
        return True

    def _holder_died(self, fd: int) -> None:
        pid = next(pid for pid, watched in self._watched.items() if watched == fd)
        self._forget(pid)
        for key, token in self._leases.held_by(pid):
            self._log.info("process %d died while it held the lease of %.12s", pid, key)
            self._pass_on(key, token)

    def _forget_idle_holders(self) -> None:
        leases = [lease for _, lease in self._leases.items()]
        needed = {lease.pid for lease in leases} | {waiter.pid for lease in leases for waiter in lease.waiters}
        for pid in self._watched.keys() - needed:
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        self._poller.unregister(fd)
        os.close(fd)


_HANDLERS: dict[type, Callable[[Server, Any], protocol.Reply]] = {
    protocol.Hello: Server._hello,
    protocol.Get: Server._get,
    protocol.Put: Server._put,
    protocol.Release: Server._release,
    protocol.Discard: Server._discard,
    protocol.Status: Server._status,
    protocol.List: Server._list,
    protocol.Clear: Server._clear,
    protocol.Verify: Server._verify,
    protocol.Stop: Server._stopped,
}


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _peer_pid(frame: zmq.Frame) -> int:
    """Pid of the process that sent `frame`, 0 where it is in another pid namespace or gone."""
    try:
        fd = os.dup(frame.get(zmq.SRCFD))
    except (OSError, zmq.ZMQError):
        return 0
    with socket.socket(fileno=fd) as peer:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
