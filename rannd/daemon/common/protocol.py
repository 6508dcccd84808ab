"""Messages between clients and the daemon; docs/protocol.md documents the protocol.

A message on the wire is three ZeroMQ frames after the routing id::

    (empty)                      delimiter of REQ/ROUTER
    rannd/2                      the protocol version, readable whatever the rest looks like
    msgpack                      one Request or one Reply, tagged by its "t" field

A client (REQ) sends one request and gets one reply. Every request may be sent twice (a client whose daemon disappears
sends it again to the next one), so all are idempotent; a lease is identified by a token that its client chose. The
reply to `Acquire` may be delayed by up to `wait_s`, all others come at once.

A daemon answers requests of its own version and the previous one, in the version of the request: fields that were added
later (`ADDED`) have defaults in requests and are left out of replies. Any other version is refused with the reason.
`Hello`, `Stop`, `Welcome`, `Done` and `Failed` never change, so that any two versions can refuse each other.

Every field has a limit, and a message that violates one is answered with `Failed` or dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from rannd.errors import ProtocolError

PROTOCOL = 2
"""Version of the protocol."""
HEADER = b"rannd/%d" % PROTOCOL
OLDEST = PROTOCOL - 1
"""The oldest version that is answered."""
SERIES = 1
"""Counts changes after which two versions cannot even refuse each other. Part of the socket's name."""
STORE = 2
"""Version of the store's schema (store.py), and part of its file's name."""

MAX_VALUE = 64 << 20
"""Maximum bytes of one value."""
MAX_MESSAGE = MAX_VALUE + (4 << 20)
"""Maximum bytes of one message; libzmq disconnects a peer that sends more."""
MAX_BATCH = 256
"""Maximum number of keys or entries in one message."""
COMPRESSED = 1 << 20
"""Bytes above which a value is compressed."""
LEASE_S = 30.0
"""Seconds without a `Beat` after which a lease ends, if its holder promised to send them."""
MAX_COMPARED = 1 << 20
"""Characters of the components of a key that is compared with others: all other clients wait meanwhile."""
MAX_BATCH_BYTES = 16 << 20
"""Bytes of values above which a batch is split; a single value may be larger."""

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
Prefix = Annotated[str, Meta(pattern="^[0-9a-f]{1,40}$")]
Kind = Annotated[str, Meta(pattern="^[a-z][a-z_]{0,31}$")]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Text = Annotated[str, Meta(max_length=4096)]
Components = Annotated[
    dict[Annotated[str, Meta(max_length=200)], Annotated[str, Meta(max_length=1 << 20)]], Meta(max_length=1024)
]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE)]
MAX_SECONDS = 1e9
MAX_COUNT = (1 << 62) - 1
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class _Request(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    pass


class _Reply(msgspec.Struct, frozen=True, tag_field="t"):
    """Base class of replies; unknown fields come from a newer version and are ignored."""


# -- requests ----------------------------------------------------------------------------------------------------


class Hello(_Request, frozen=True, tag="hello"):
    """First message of a client. The daemon adopts its latest client's limits, so configuration changes take effect."""

    version: Text
    idle_s: Seconds
    max_bytes: Count


class Get(_Request, frozen=True, tag="get"):
    """Get the values of these keys. Answered by `Values`."""

    keys: Annotated[list[Digest], Meta(min_length=1, max_length=MAX_BATCH)]
    kinds: Annotated[list[Kind], Meta(max_length=MAX_BATCH)] = []
    """Kind of each key, for the statistics of misses."""
    peek: bool = False
    """Do not count this as a use, hit or miss."""


class NewEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry to store. `key` must be the digest of `kind` and `components`."""

    key: Digest
    kind: Kind
    components: Components
    value: Value
    size: Annotated[int, Meta(ge=0, le=MAX_VALUE)] = 0
    """Bytes of the value before zlib compression; 0: not compressed."""


def weight(components: Mapping[str, str], value: bytes) -> int:
    """Estimate the bytes that an entry takes in a message, rather too high than too low."""
    return len(value) + sum(4 * len(name) + 4 * len(text) for name, text in components.items())


class Put(_Request, frozen=True, tag="put"):
    """Store these entries. Answered by `Done` once they are durable."""

    version: Text
    entries: Annotated[list[NewEntry], Meta(min_length=1, max_length=MAX_BATCH)]


class Acquire(_Request, frozen=True, tag="acquire"):
    """Get the value of a key, or a lease to compute it. Answered by `Values`, `Granted` or, after `wait_s`, `Busy`."""

    key: Digest
    token: Token
    pid: Annotated[int, Meta(ge=1)]
    wait_s: Annotated[float, Meta(ge=0, le=60)]
    stored_after: Annotated[float, Meta(ge=0)] = 0.0
    """Ignore a value stored before (seconds since the epoch)."""
    kind: Kind | None = None
    """Kind of the key, for the statistics."""
    who: Text = ""
    """Description of the holder, for those who wait: 'rank 0 of job 4711'."""
    beats: bool = False
    """The holder sends `Beat` regularly; the lease ends after LEASE_S without one."""


class Beat(_Request, frozen=True, tag="beat"):
    """Keep a lease and report progress. Answered by `Done`, count 0: the lease was lost."""

    key: Digest
    token: Token
    progress: Text = ""


class Release(_Request, frozen=True, tag="release"):
    """Release a lease, whether or not a value was put. Answered by `Done`."""

    key: Digest
    token: Token


class Discard(_Request, frozen=True, tag="discard"):
    """Set an entry aside because it turned out to be wrong. Answered by `Done`."""

    key: Digest
    reason: Text


class Status(_Request, frozen=True, tag="status"):
    """Get the state of the daemon. Answered by `State`."""


class List(_Request, frozen=True, tag="list"):
    """List the entries whose key follows `after` and starts with `prefix`. Answered by a page of `Entries`."""

    after: Annotated[str, Meta(max_length=40)] = ""
    prefix: Prefix | None = None


class Clear(_Request, frozen=True, tag="clear"):
    """Remove the entries that match all given conditions. Answered by a page of `Entries`, the removed ones."""

    kind: Kind | None = None
    older_than_s: Seconds | None = None
    keys: Annotated[list[Prefix], Meta(max_length=MAX_BATCH)] | None = None


class Verify(_Request, frozen=True, tag="verify"):
    """Check the entries whose key follows `after`, one page at a time. Answered by `Verified`."""

    after: Annotated[str, Meta(max_length=40)] = ""


class Why(_Request, frozen=True, tag="why"):
    """Find the entry nearest to a key that was missed. Answered by `Nearest`; `Failed` above `MAX_COMPARED`."""

    kind: Kind
    components: Components
    remember: bool = True
    """Remember the miss for `Misses`."""


class Misses(_Request, frozen=True, tag="misses"):
    """Get the latest remembered misses. Answered by `Missed`."""


class Prune(_Request, frozen=True, tag="prune"):
    """Remove least recently used entries, except leased ones, until values take at most `max_bytes`.

    Answered by a page of `Entries`, the removed ones.
    """

    max_bytes: Count


class Zero(_Request, frozen=True, tag="zero"):
    """Reset the statistics. Answered by `Done`."""


class Stop(_Request, frozen=True, tag="stop"):
    """Answer queued requests, then exit. Answered by `Done`."""

    reason: Text


Request: TypeAlias = (
    Hello | Get | Put | Acquire | Beat | Release | Discard | Status | List | Clear | Verify | Why | Misses | Prune
    | Zero | Stop
)  # fmt: skip


# -- replies -----------------------------------------------------------------------------------------------------


class Welcome(_Reply, frozen=True, tag="welcome"):
    """Version and process of the daemon; the answer to `Hello`."""

    version: str
    pid: int


class Values(_Reply, frozen=True, tag="values"):
    """Values in the order of the keys, None if there is none. May be shorter than the request: ask for the rest."""

    values: list[bytes | None]
    sizes: list[int] = []
    """Bytes of each value before compression; 0: not compressed."""


class Done(_Reply, frozen=True, tag="done"):
    """The request was carried out and changed `count` things."""

    count: int = 0


class Granted(_Reply, frozen=True, tag="granted"):
    """The client holds the lease."""


class Busy(_Reply, frozen=True, tag="busy"):
    """Process `pid` has held the lease for `since_s` seconds."""

    pid: int
    since_s: float
    who: str = ""
    progress: str = ""
    """Progress as the holder reports it."""


class LeaseInfo(msgspec.Struct, frozen=True):
    """A lease that is held."""

    key: str
    pid: int
    since_s: float
    waiting: int
    who: str = ""
    progress: str = ""


class Statistics(msgspec.Struct, frozen=True):
    """Counters since the store was created; they survive restarts."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    removed: int = 0
    discarded: int = 0
    corrupt: int = 0
    waited: int = 0
    """Requests that waited for another process to compute the value."""


class KindCount(msgspec.Struct, frozen=True):
    """Look-ups of one kind since the store was created."""

    hits: int = 0
    misses: int = 0


class Trouble(msgspec.Struct, frozen=True):
    """An error, `at` seconds since the epoch."""

    at: float
    text: str


class State(_Reply, frozen=True, tag="state"):
    """State of the daemon. Sizes in bytes, times in seconds."""

    version: str
    protocol: int
    pid: int
    uptime_s: float
    idle_s: float
    requests: int
    rejected: int
    """Messages that violated the protocol."""
    entries: int
    bytes: int
    max_bytes: int
    socket: str
    store: str
    log: str
    leases: list[LeaseInfo]
    statistics: Statistics
    kinds: dict[str, KindCount] = {}
    clients: int = 0
    """Processes that sent a request within the last minute."""
    errors: list[Trouble] = []
    """The latest errors."""


class EntryInfo(msgspec.Struct, frozen=True):
    """Metadata of an entry. Times are seconds since the epoch."""

    key: str
    kind: str
    format: int
    rannd: str
    created: float
    used: float
    hits: int
    length: int
    checksum: str
    components: dict[str, str]
    size: int = 0
    """Bytes of the value before compression; 0: not compressed."""


class Entries(_Reply, frozen=True, tag="entries"):
    """One page of entries; `more`: others follow."""

    entries: list[EntryInfo]
    more: bool


class Verified(_Reply, frozen=True, tag="verified"):
    """One page of a check: number of sound entries, keys set aside as corrupt, and where to continue (None: done)."""

    sound: int
    corrupt: list[str]
    next: str | None


class Difference(msgspec.Struct, frozen=True):
    """A component in which an entry differs from the requested key; None if one of them lacks it."""

    name: str
    wanted: str | None
    there: str | None


class Nearest(_Reply, frozen=True, tag="nearest"):
    """The entry of the same kind that differs least (None if there is none), and its differences."""

    entry: EntryInfo | None
    differences: list[Difference]


class Miss(msgspec.Struct, frozen=True):
    """A look-up that found nothing, `at` seconds since the epoch, and the nearest entry at that time."""

    at: float
    kind: str
    key: str
    components: dict[str, str]
    nearest: str
    """Key of the entry; empty: there was none of this kind."""
    differences: list[Difference]
    pid: int = 0
    """Process that missed it, which identifies the misses of one run; 0: not known."""


class Missed(_Reply, frozen=True, tag="missed"):
    """The latest misses, last one first."""

    misses: list[Miss]


class Failed(_Reply, frozen=True, tag="failed"):
    """The request was not carried out. `code`: protocol, version, store, lease, fault."""

    code: str
    text: str


Reply: TypeAlias = (
    Welcome | Values | Done | Granted | Busy | State | Entries | Verified | Nearest | Missed | Failed
)  # fmt: skip

ADDED: dict[int, dict[str, frozenset[str]]] = {
    2: {
        "values": frozenset({"sizes"}),
        "busy": frozenset({"who", "progress"}),
        "state": frozenset({"kinds", "clients", "errors"}),
        "state.leases": frozenset({"who", "progress"}),
        "entries.entries": frozenset({"size"}),
    }
}
"""Fields of replies that were added in a version, by the reply's tag, or by tag and name of a list of structs."""

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply, version: int = PROTOCOL) -> list[bytes]:
    """Encode a message as frames in a version of the protocol, without routing id and delimiter.

    Raises:
        ProtocolError: A text has surrogates, which stand for bytes that are not UTF-8.
    """
    content: object = message
    if version < PROTOCOL and isinstance(message, _Reply):
        content = msgspec.to_builtins(message, builtin_types=(bytes,))
        for added in (fields for since, fields in ADDED.items() if since > version):
            _strip(content, added)
    try:
        return [b"rannd/%d" % version, _encoder.encode(content)]
    except UnicodeEncodeError as exc:
        raise ProtocolError(f"a message cannot contain text that is not UTF-8: {exc.object[:200]!r}") from None


class VersionError(ProtocolError):
    """The other side speaks another `version` of the protocol."""

    def __init__(self, text: str, version: int) -> None:
        super().__init__(text)
        self.version = version


def decode_request(frames: list[bytes]) -> tuple[Request, int]:
    """Decode a request from its frames (without routing id and delimiter); also return its version.

    Raises:
        VersionError: Its version is not supported.
        ProtocolError: Wrong number of frames, not msgpack, wrong types, or over a limit.
    """
    version = _version(frames)
    if not OLDEST <= version <= PROTOCOL:
        age = "an older" if version < OLDEST else "a newer"
        raise VersionError(
            f"a message has protocol version {version}, this daemon supports {PROTOCOL} and {OLDEST}: it comes from "
            f"{age} rannd; install one version of rannd in all environments",
            version,
        )
    return _decode(frames, _requests), version


def decode_reply(frames: list[bytes], version: int = PROTOCOL) -> Reply:
    """Decode a reply that should have `version` from its frames.

    Raises:
        VersionError: The daemon speaks another version; the message has the daemon's text.
        ProtocolError: As for `decode_request`.
    """
    spoken = _version(frames)
    if spoken == version:
        return _decode(frames, _replies)
    try:
        text = msgspec.msgpack.decode(frames[1], type=Failed).text
    except (msgspec.DecodeError, UnicodeError):
        text = "it gives no reason"
    raise VersionError(f"the daemon has protocol version {spoken}, this process {version}: {text}", spoken)


def _decode(frames: list[bytes], decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise ProtocolError(f"a message violates the protocol: {exc}") from None


def _version(frames: list[bytes]) -> int:
    if len(frames) != 2:
        raise ProtocolError(f"a message has {len(frames)} frames instead of 2; is this a rannd client?")
    found = re.fullmatch(rb"rannd/([1-9][0-9]{0,3})", frames[0])
    if found is None:
        raise ProtocolError(f"a message begins with {frames[0][:16]!r}, not rannd/{PROTOCOL}; is this a rannd client?")
    return int(found[1])


def _strip(content: Any, added: dict[str, frozenset[str]]) -> None:
    """Remove fields from a reply, and from structs in its lists."""
    tag = content["t"]
    for name in added.get(tag, ()):
        content.pop(name, None)
    for field, value in content.items():
        for name in added.get(f"{tag}.{field}", ()):
            for each in value:
                each.pop(name, None)
