"""The server of the daemon: one thread, one ROUTER socket, one store.

::

    listening descriptor ──► ROUTER ──► decode ──► handler ──► reply
    pidfd of each lease holder ──► lease ends, next waiter gets it
    wake-up pipe of the signal handlers ──► drain and exit
    a connection comes or goes ──► listen only while there are descriptors
    no request for idle_s, no lease, no client (the `use` lock) ──► exit

The caller of `serve` holds the `life` lock and provides a listening AF_UNIX socket. Torch and numpy are never imported
here.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq

from rannd.daemon.common import descriptors, file_locks, protocol
from rannd.daemon.common.compression import PackedValue
from rannd.daemon.common.paths import DaemonPaths
from rannd.daemon.server.holders import Holders, peer_pid
from rannd.daemon.server.leases import Leases, Waiter
from rannd.daemon.store.filesystem import identity
from rannd.daemon.store.store import Store
from rannd.errors import DaemonError, ProtocolError

FLUSH_S = 1.0
"""Seconds without a request after which last-use times are written."""
CHECK_S = 10.0
"""Interval of the check that the socket still is where clients look for it, in seconds."""
DRAIN_S = 1.0
"""Maximum seconds to answer the last requests at exit, and to send the last replies."""
CLIENT_S = 60.0
"""Seconds after its latest request for which a process counts as a client."""
DESCRIPTORS = 64
"""File descriptors to keep free of clients, at least; it begins with some more. One more client would end the daemon:
libzmq aborts when it accepts one and has no descriptor."""
MOST_CLIENTS = 1024
"""Number of processes above which former clients are dropped before `status` asks."""
ERRORS = 16
"""Number of errors to remember."""


class Route(NamedTuple):
    """Address of a client."""

    identity: bytes
    version: int = protocol.PROTOCOL
    """Protocol version of the client."""


class Settings(msgspec.Struct, frozen=True):
    """Limits of a daemon."""

    idle_s: float
    """Exit after so many seconds without a request; 0: never."""
    max_bytes: int
    """Maximum bytes of stored values."""
    version: str
    pinned: bool = False
    """Keep `idle_s` whatever clients ask for (`rannd run`)."""

    def __post_init__(self) -> None:
        """Clamp the limits to what a message can express."""
        msgspec.structs.force_setattr(self, "idle_s", min(self.idle_s, protocol.MAX_SECONDS))
        msgspec.structs.force_setattr(self, "max_bytes", min(self.max_bytes, protocol.MAX_COUNT))


class Server:
    """Answers requests until it is stopped or idle for too long."""

    def __init__(
        self, places: DaemonPaths, settings: Settings, listener: socket.socket, life: int, *, owns_socket: bool
    ) -> None:
        """Open the store and the socket.

        Args:
            places: Paths of the daemon.
            settings: Limits.
            listener: Listening socket at `places.socket`; ownership is taken over.
            life: Descriptor of the `life` lock, which the caller holds.
            owns_socket: Unlink the socket at exit. False under socket activation, where systemd keeps listening.

        Raises:
            DaemonError: The store cannot be used, or there are too few file descriptors.
        """
        descriptors.require(DESCRIPTORS + 16, "the daemon")
        self.places = places
        self.settings = settings
        self._owns_socket = owns_socket
        self._life = life
        self._log = logging.getLogger("rannd.Daemon")
        self._store = Store(places.store, max_bytes=settings.max_bytes)
        self._leases: Leases[Route] = Leases()
        self._clients: dict[int, float] = {}  # pid of a client -> time of its latest request
        self._errors: deque[protocol.Trouble] = deque(maxlen=ERRORS)
        self._requests = self._rejected = 0
        self._started = self._active = self._checked = time.monotonic()
        self._worked = False
        self._stop: str | None = None
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, int(DRAIN_S * 1000))
        self._router.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an undeliverable reply must raise an error
        self._router.setsockopt(zmq.SNDTIMEO, 0)
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())  # SO_PEERCRED, checked by libzmq at accept
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._listener = listener
        self._listener.setblocking(False)
        self._accepting = os.dup(listener.fileno())
        self._deaf: socket.socket | None = None
        """Socket that libzmq listens at instead, while there are too few descriptors for new clients."""
        # Clients may come many at a time, while a request is carried out.
        self._reserve = max(DESCRIPTORS, min(1024, descriptors.limit() // 8))
        self._router.setsockopt(zmq.USE_FD, self._accepting)
        self._router.bind(f"ipc://{places.socket}")
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._holders = Holders(self._poller, self._reserve)
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            end.setblocking(False)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._use = file_locks.open_lock(places.use)
        self._inode = identity(places.socket)

    def serve(self) -> None:
        """Answer requests until the daemon is stopped. Main thread only: handles SIGTERM and SIGINT."""
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
        events = dict(self._poller.poll(self._patience_ms()))
        if events.pop(self._monitor, None):
            self._admit()
        if events.pop(self._listener.fileno(), None):
            self._refuse()
        self._worked = bool(events)
        for source in events:
            if source is self._router:
                self._receive()
            elif source == self._wake.fileno():
                with suppress(BlockingIOError):
                    self._wake.recv(64)
            else:
                self._holder_died(source)
        now = time.monotonic()
        for key, token in self._leases.silent(now):
            self._trouble(f"the holder of the lease of {key[:12]} has been silent for {protocol.LEASE_S:g} s: it ends")
            self._pass_on(key, token)
        for key, waiter in self._leases.expired(now):
            self._say_busy(waiter.route, key, now)
        if self._worked:
            self._active = now
        elif not events:
            self._store.flush()
            self._rest(now)

    def _admit(self) -> None:
        """After a client came or went: let libzmq accept more only while there are descriptors for them.

        libzmq has no call for that: its `unbind` would end all connections. So its descriptor of the listening socket
        becomes one of a socket that nobody knows, at which it finds no client.
        """
        with suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        free = descriptors.free()
        if self._deaf is None and free < self._reserve:
            self._deaf = socket.socket(socket.AF_UNIX)
            self._deaf.setblocking(False)
            self._deaf.bind("")  # a name that the kernel chooses
            self._deaf.listen()
            os.dup2(self._deaf.fileno(), self._accepting, inheritable=False)
            self._poller.register(self._listener.fileno(), zmq.POLLIN)
            self._trouble(
                f"new clients are refused: of the {descriptors.limit()} file descriptors of this process, {free} are "
                f"free, and {self._reserve} are kept; raise the hard limit (ulimit -Hn, or LimitNOFILE= in the unit), "
                "then `rannd restart`"
            )
        elif free > self._reserve + 1:  # `_deaf` has one, too
            self._accept_again()

    def _accept_again(self) -> None:
        if self._deaf is not None:
            os.dup2(self._listener.fileno(), self._accepting, inheritable=False)
            self._poller.unregister(self._listener.fileno())
            self._deaf.close()
            self._deaf = None

    def _refuse(self) -> None:
        """Hang up on new clients: they try again until their timeout, and then continue without a cache."""
        with suppress(OSError):
            while True:
                self._listener.accept()[0].close()

    def _patience_ms(self) -> int:
        now = time.monotonic()
        ends = [now + CHECK_S, self._leases.deadline()]
        if self._active + FLUSH_S > now:
            ends.append(self._active + FLUSH_S)
        if self.settings.idle_s > 0 and not self._leases:
            ends.append(self._active + self.settings.idle_s)
        return math.ceil(max(0.0, min(end for end in ends if end is not None) - now) * 1000)

    def _rest(self, now: float) -> None:
        """Without requests: exit if the daemon is idle, or if clients cannot find its socket."""
        if now - self._checked >= CHECK_S:
            self._checked = now
            self._admit()  # libzmq tells of a client that left before it closes the descriptor
            if identity(self.places.socket) != self._inode:
                self._stop = f"the socket {self.places.socket} was removed"
                self._owns_socket = False
                return
            self._keep_locks()
            if self._stop is not None:
                return
        if self.settings.idle_s <= 0 or self._leases or now - self._active < self.settings.idle_s:
            return
        # Clients share this lock from before they look for the daemon until they have their reply.
        if not file_locks.try_lock(self._use):
            self._active = now
        elif self._router.poll(0):
            file_locks.unlock(self._use)
        else:
            self._stop = f"nothing to do for {self.settings.idle_s:g} s"

    def _keep_locks(self) -> None:
        """Make lock files again that were deleted; exit if another daemon has the new `life`."""
        if not file_locks.is_at(self._use, self.places.use):
            os.close(self._use)
            self._use = file_locks.open_lock(self.places.use)
        if file_locks.is_at(self._life, self.places.life):
            return
        life = file_locks.open_lock(self.places.life)
        if not file_locks.try_lock(life):
            os.close(life)
            self._stop = f"the lock {self.places.life} was removed, and another daemon holds the new one"
            return
        file_locks.write_pid(life)
        os.dup2(life, self._life, inheritable=False)
        os.close(life)
        self._trouble(f"the lock {self.places.life} was removed; it was made again")

    def _receive(self) -> None:
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        self._requests += 1
        route, raw = frames[0].bytes, [frame.bytes for frame in frames[1:]]
        if not raw or raw[0] != b"":
            self._rejected += 1  # not a REQ socket: it could not understand a reply
            return
        peer = peer_pid(frames[-1])
        self._clients[peer] = now = time.monotonic()
        if len(self._clients) > MOST_CLIENTS:
            self._count_clients(now)
        to = Route(route)
        try:
            request, to = self._understand(route, raw[1:])
            reply = self._carry_out(request, to, peer)
            if reply is not None:
                self._send(to, reply)
            return
        except ProtocolError as exc:
            self._rejected += 1
            self._trouble(f"process {peer or 'unknown'}: {exc}", level=logging.DEBUG)
            failed = protocol.Failed("version" if isinstance(exc, protocol.VersionError) else "protocol", str(exc))
        except DaemonError as exc:
            self._trouble(str(exc))
            failed = protocol.Failed("store", str(exc))
        except Exception as exc:  # one request must not stop the daemon that all jobs share
            self._log.exception("a request failed because of an internal error")
            self._trouble(f"internal error: {type(exc).__name__}: {exc}", level=logging.DEBUG)
            failed = protocol.Failed("fault", f"internal error of the daemon: {type(exc).__name__}: {exc}; see its log")
        self._send(to, failed)

    def _carry_out(self, request: protocol.Request, to: Route, peer: int) -> protocol.Reply | None:
        # Status requests, such as those of a monitoring system, do not keep the daemon running.
        self._worked = not isinstance(request, protocol.Status)
        if isinstance(request, protocol.Acquire):
            return self._acquire(request, to, peer)
        if isinstance(request, protocol.Get):
            return self._get(request, to)
        if isinstance(request, protocol.Why):
            if sum(map(len, request.components.values())) > protocol.MAX_COMPARED:
                return protocol.Failed(
                    "protocol", f"at most {protocol.MAX_COMPARED:,} characters of components are compared"
                )
            return self._store.nearest(request.kind, request.components, peer, remember=request.remember)
        return _HANDLERS[type(request)](self, request)

    @staticmethod
    def _understand(route: bytes, frames: list[bytes]) -> tuple[protocol.Request, Route]:
        """Decode a request, and determine the address for the reply."""
        request, version = protocol.decode_request(frames)
        return request, Route(route, version)

    def _trouble(self, text: str, level: int = logging.WARNING) -> None:
        """Log an error, and remember it for `status`."""
        self._log.log(level, "%s", text)
        if self._errors and self._errors[-1].text == text:
            self._errors.pop()  # keep one, with its latest time
        self._errors.append(protocol.Trouble(time.time(), text))

    def _send(self, to: Route, reply: protocol.Reply) -> bool:
        """Send a reply; return whether the client still exists."""
        try:
            self._router.send_multipart([to.identity, b"", *protocol.encode(reply, to.version)])
        except zmq.ZMQError as exc:
            if exc.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _drain(self) -> None:
        if self._owns_socket:
            with suppress(FileNotFoundError):
                os.unlink(self.places.socket)
        deadline = time.monotonic() + DRAIN_S  # clients that keep asking find the next daemon
        while self._router.poll(0) and time.monotonic() < deadline:
            self._receive()

    def _close(self) -> None:
        self._accept_again()  # libzmq has to close the socket that it was given
        self._listener.close()
        self._router.disable_monitor()
        self._monitor.close()
        self._router.close()
        self._context.term()  # waits until the last replies are sent, DRAIN_S at most
        self._store.close()
        self._holders.close()
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

    def _get(self, request: protocol.Get, to: Route) -> protocol.Reply:
        known = len(request.kinds) == len(request.keys)
        kinds = request.kinds if known else ["unknown"] * len(request.keys)
        found: list[PackedValue | None] = []
        total = 0
        for key, kind in zip(request.keys, kinds, strict=True):
            value = self._store.get(key, kind, peek=request.peek)
            total += len(value.data) if value is not None else 0
            found.append(value)
            if total >= protocol.MAX_BATCH_BYTES:
                break  # the client asks for the rest
        return _values(found, to)

    def _put(self, request: protocol.Put) -> protocol.Reply:
        self._store.put(request.entries, request.version, keep=self._leases.keys())
        for entry in request.entries:
            for waiter in self._leases.settle(entry.key):
                self._send(waiter.route, _values([PackedValue(entry.value, entry.size)], waiter.route))
        self._forget_idle_holders()
        return protocol.Done(len(request.entries))

    def _acquire(self, request: protocol.Acquire, to: Route, peer: int) -> protocol.Reply | None:
        if self._store.stored_since(request.key, request.stored_after):
            value = self._store.get(request.key, request.kind or "unknown")
            if value is not None:
                return _values([value], to)
        now = time.monotonic()
        patience = protocol.LEASE_S if request.beats else math.inf
        if not self._holders.watch(request.pid, peer) and not request.beats:
            return protocol.Failed("lease", f"the daemon cannot watch process {request.pid}, so it gets no lease")
        standing = self._leases.grant(request.key, request.token, request.pid, now, request.who, patience)
        if standing is None:
            self._store.missed(request.kind or "unknown")
            if not self._send(to, protocol.Granted()):
                self._pass_on(request.key, request.token)
            return None
        if request.wait_s <= 0:
            self._say_busy(to, request.key, now)
            return None
        self._store.count("waited")
        deadline = now + request.wait_s
        waiter = Waiter(to, request.token, request.pid, deadline, request.who, patience)
        self._leases.wait(request.key, waiter)
        return None

    def _beat(self, request: protocol.Beat) -> protocol.Reply:
        return protocol.Done(int(self._leases.beat(request.key, request.token, request.progress, time.monotonic())))

    def _release(self, request: protocol.Release) -> protocol.Reply:
        return protocol.Done(int(self._pass_on(request.key, request.token)))

    def _discard(self, request: protocol.Discard) -> protocol.Reply:
        return protocol.Done(int(self._store.discard(request.key, request.reason)))

    def _status(self, request: protocol.Status) -> protocol.Reply:
        now = time.monotonic()
        entries, length, statistics, kinds = 0, 0, protocol.Statistics(), dict[str, protocol.KindCount]()
        try:
            entries, length = self._store.size()
            statistics, kinds = self._store.statistics(), self._store.kinds()
        except DaemonError as exc:  # all else can be reported, and this is listed among the errors
            self._trouble(str(exc))
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
                protocol.LeaseInfo(key, lease.pid, now - lease.since, len(lease.waiters), lease.who, lease.progress)
                for key, lease in self._leases.items()
            ],
            statistics=statistics,
            kinds=kinds,
            clients=self._count_clients(now),
            errors=list(self._errors),
        )

    def _count_clients(self, now: float) -> int:
        self._clients = {pid: asked for pid, asked in self._clients.items() if now - asked < CLIENT_S}
        return len(self._clients)

    def _list(self, request: protocol.List) -> protocol.Reply:
        return protocol.Entries(*self._store.page(after=request.after, prefix=request.prefix))

    def _clear(self, request: protocol.Clear) -> protocol.Reply:
        removed = self._store.clear(kind=request.kind, older_than_s=request.older_than_s, keys=request.keys)
        return protocol.Entries(*removed)

    def _verify(self, request: protocol.Verify) -> protocol.Reply:
        return protocol.Verified(*self._store.verify(request.after))

    def _misses(self, request: protocol.Misses) -> protocol.Reply:
        return protocol.Missed(self._store.misses())

    def _prune(self, request: protocol.Prune) -> protocol.Reply:
        return protocol.Entries(*self._store.prune(request.max_bytes, keep=self._leases.keys()))

    def _zero(self, request: protocol.Zero) -> protocol.Reply:
        self._store.zero()
        return protocol.Done()

    def _stopped(self, request: protocol.Stop) -> protocol.Reply:
        self._stop = request.reason
        return protocol.Done()

    # -- leases --------------------------------------------------------------------------------------------------

    def _say_busy(self, to: Route, key: str, now: float) -> None:
        lease = dict(self._leases.items())[key]
        self._send(to, protocol.Busy(lease.pid, now - lease.since, lease.who, lease.progress))

    def _pass_on(self, key: str, token: str) -> bool:
        """End the lease of `token` and grant it to the first reachable waiter; return whether `token` held it."""
        if not self._leases.release(key, token):
            return False
        while (waiter := self._leases.next(key, time.monotonic())) is not None:
            if self._send(waiter.route, protocol.Granted()):
                break
            self._leases.release(key, waiter.token)
        self._forget_idle_holders()
        return True

    def _holder_died(self, fd: int) -> None:
        pid = self._holders.died(fd)
        if pid is None:
            return  # already forgotten by an earlier event of this turn
        self._leases.give_up(pid)
        for key, token in self._leases.held_by(pid):
            self._log.info("process %d died while it held the lease of %.12s", pid, key)
            self._pass_on(key, token)

    def _forget_idle_holders(self) -> None:
        leases = [lease for _, lease in self._leases.items()]
        self._holders.keep({lease.pid for lease in leases} | {each.pid for lease in leases for each in lease.waiters})


_HANDLERS: dict[type, Callable[[Server, Any], protocol.Reply]] = {
    protocol.Hello: Server._hello,
    protocol.Put: Server._put,
    protocol.Beat: Server._beat,
    protocol.Release: Server._release,
    protocol.Discard: Server._discard,
    protocol.Status: Server._status,
    protocol.List: Server._list,
    protocol.Clear: Server._clear,
    protocol.Verify: Server._verify,
    protocol.Misses: Server._misses,
    protocol.Prune: Server._prune,
    protocol.Zero: Server._zero,
    protocol.Stop: Server._stopped,
}


def _values(found: Sequence[PackedValue | None], to: Route) -> protocol.Values:
    """Encode values for a client; one that is too old for compression gets them decompressed."""
    if to.version < 2:
        return protocol.Values([None if each is None else each.plain() for each in found])
    sizes = [0 if each is None else each.size for each in found]
    return protocol.Values([None if each is None else each.data for each in found], sizes)
