"""Messages between clients and the daemon.

A message on the wire is three ZeroMQ frames after the routing id::

    (empty)                      delimiter of REQ/ROUTER
    rannd/1                      PROTOCOL, readable whatever the rest looks like
    msgpack                      one Request or one Reply, tagged by its "t" field

A client (REQ) sends one request and gets one reply. All requests may be sent twice (a client whose daemon
went away asks the next one again), hence all are idempotent; a lease is known by a token its client chose.
The reply to `Acquire` may be held back for `wait_s`, all others come at once.

Every field has a limit, and a message that breaks one is answered with `Failed` or dropped.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from rannd.errors import ProtocolError

PROTOCOL = 1
"""Counts changes of this grammar and of the store's. Part of the socket's and the store's name."""
HEADER = b"rannd/%d" % PROTOCOL

MAX_VALUE = 64 << 20
"""Bytes of one value."""
MAX_MESSAGE = MAX_VALUE + (4 << 20)
"""Bytes of one message; libzmq hangs up on a peer that sends more."""
MAX_BATCH = 256
"""Keys or entries in one message."""
MAX_BATCH_BYTES = 16 << 20
"""Bytes of values after which a batch is split; one value alone may be larger."""

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
Prefix = Annotated[str, Meta(pattern="^[0-9a-f]{1,40}$")]
Kind = Annotated[str, Meta(pattern="^[a-z][a-z_]{0,31}$")]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Text = Annotated[str, Meta(max_length=4096)]
Components = Annotated[
    dict[Annotated[str, Meta(max_length=200)], Annotated[str, Meta(max_length=1 << 20)]], Meta(max_length=1024)
]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    pass


# -- requests ----------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """Who asks. The daemon adopts the limits of its latest client, so that configuration changes take effect."""

    version: Text
    idle_s: Seconds
    max_bytes: Count


class Get(_Message, frozen=True, tag="get"):
    """Values of these keys. Answered by `Values`."""

    keys: Annotated[list[Digest], Meta(min_length=1, max_length=MAX_BATCH)]


class NewEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value to keep. `key` must be the digest of `kind` and `components`."""

    key: Digest
    kind: Kind
    components: Components
    value: Value


class Put(_Message, frozen=True, tag="put"):
    """Store these. Answered by `Done` once they would survive a kill."""

    version: Text
    entries: Annotated[list[NewEntry], Meta(min_length=1, max_length=MAX_BATCH)]


class Acquire(_Message, frozen=True, tag="acquire"):
    """The value of a key, or the right to make it. Answered by `Values`, `Granted` or, after `wait_s`, `Busy`."""

    key: Digest
    token: Token
    pid: Annotated[int, Meta(ge=1)]
    wait_s: Annotated[float, Meta(ge=0, le=60)]
    stored_after: Annotated[float, Meta(ge=0)] = 0.0
    """Ignore a value stored before (seconds since the epoch)."""


class Release(_Message, frozen=True, tag="release"):
    """Give a lease back, whether or not a value was put. Answered by `Done`."""

    key: Digest
    token: Token


class Discard(_Message, frozen=True, tag="discard"):
    """Set an entry aside because it turned out to be wrong. Answered by `Done`."""

    key: Digest
    reason: Text


class Status(_Message, frozen=True, tag="status"):
    """How the daemon is. Answered by `State`."""


class List(_Message, frozen=True, tag="list"):
    """Entries whose key follows `after` and starts with `prefix`. Answered by a page of `Entries`."""

    after: Annotated[str, Meta(max_length=40)] = ""
    prefix: Prefix | None = None


class Clear(_Message, frozen=True, tag="clear"):
    """Remove the entries that match everything given. Answered by a page of `Entries`, those it removed."""

    kind: Kind | None = None
    older_than_s: Seconds | None = None
    keys: Annotated[list[Prefix], Meta(max_length=MAX_BATCH)] | None = None


class Verify(_Message, frozen=True, tag="verify"):
    """Check the entries whose key follows `after`, a page at a time. Answered by `Verified`."""

    after: Annotated[str, Meta(max_length=40)] = ""


class Stop(_Message, frozen=True, tag="stop"):
    """Answer what is queued, then exit. Answered by `Done`."""

    reason: Text


Request: TypeAlias = (
    Hello | Get | Put | Acquire | Release | Discard | Status | List | Clear | Verify | Stop
)  # fmt: skip


# -- replies -----------------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """Who answers."""

    version: str
    pid: int


class Values(_Message, frozen=True, tag="values"):
    """Values in the order of the keys, None where there is none. May be shorter than asked: ask for the rest."""

    values: list[bytes | None]


class Done(_Message, frozen=True, tag="done"):
    """It is done, `count` things were changed by it."""

    count: int = 0


class Granted(_Message, frozen=True, tag="granted"):
    """You hold the lease."""


class Busy(_Message, frozen=True, tag="busy"):
    """Process `pid` has held the lease for `since_s` seconds."""

    pid: int
    since_s: float


class LeaseInfo(msgspec.Struct, frozen=True):
    """A lease that is held."""

    key: str
    pid: int
    since_s: float
    waiting: int


class Statistics(msgspec.Struct, frozen=True):
    """Counted since the store was made; they survive restarts."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    removed: int = 0
    discarded: int = 0
    corrupt: int = 0
    waited: int = 0
    """Requests that waited for another process to make the value."""


class State(_Message, frozen=True, tag="state"):
    """How the daemon is. Sizes in bytes, times in seconds."""

    version: str
    protocol: int
    pid: int
    uptime_s: float
    idle_s: float
    requests: int
    rejected: int
    """Messages that broke the protocol."""
    entries: int
    bytes: int
    max_bytes: int
    socket: str
    store: str
    log: str
    leases: list[LeaseInfo]
    statistics: Statistics


class EntryInfo(msgspec.Struct, frozen=True):
    """What an entry tells about itself. Times are seconds since the epoch."""

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


class Entries(_Message, frozen=True, tag="entries"):
    """One page; `more` when others follow it."""

    entries: list[EntryInfo]
    more: bool


class Verified(_Message, frozen=True, tag="verified"):
    """One page of a check: how many are sound, which were set aside, where to go on (None: done)."""

    sound: int
    corrupt: list[str]
    next: str | None


class Failed(_Message, frozen=True, tag="failed"):
    """The request was not carried out. `code`: protocol, store, lease."""

    code: str
    text: str


Reply: TypeAlias = Welcome | Values | Done | Granted | Busy | State | Entries | Verified | Failed

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> list[bytes]:
    """The frames of a message, without routing id and delimiter."""
    return [HEADER, _encoder.encode(message)]


def decode_request(frames: list[bytes]) -> Request:
    """A request out of its frames (without routing id and delimiter).

    Raises:
        ProtocolError: other protocol, wrong number of frames, not msgpack, wrong types, over a limit.
    """
    return _decode(frames, _requests)


def decode_reply(frames: list[bytes]) -> Reply:
    """A reply out of its frames. Raises ProtocolError as `decode_request` does."""
    return _decode(frames, _replies)


def _decode(frames: list[bytes], decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    if len(frames) != 2:
        raise ProtocolError(f"a message has {len(frames)} frames instead of 2; is this a rannd client?")
    if frames[0] != HEADER:
        raise ProtocolError(f"a message speaks {frames[0][:16]!r}, this is {HEADER!r}; use one version of rannd")
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"a message is not of {HEADER!r}: {exc}") from None
