"""Messages survive the wire, and nothing else gets through."""

from __future__ import annotations

import msgspec
import pytest
from daemon_requests import KEY, REQUESTS
from hypothesis import given
from hypothesis import strategies as st

from rannd.daemon.common import protocol
from rannd.errors import ProtocolError


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_requests_round_trip(request_: protocol.Request) -> None:
    assert protocol.decode_request(protocol.encode(request_)) == (request_, protocol.PROTOCOL)


def test_every_request_is_tried_above() -> None:
    assert {type(request) for request in REQUESTS} == set(protocol.Request.__args__)


@pytest.mark.parametrize(
    "message",
    [
        {"t": "get", "keys": []},
        {"t": "get", "keys": [KEY] * (protocol.MAX_BATCH + 1)},
        {"t": "get", "keys": ["../../etc/passwd"]},
        {"t": "get", "keys": [KEY.replace("0", "G")]},
        {"t": "get", "keys": KEY},
        {"t": "get"},
        {"t": "steal", "keys": [KEY]},
        {"t": "status", "more": 1},
        {"t": "acquire", "key": KEY, "token": "f" * 32, "pid": 1, "wait_s": 1e6},
        {"t": "acquire", "key": KEY, "token": "f" * 32, "pid": 0, "wait_s": 1},
        {"t": "acquire", "key": KEY, "token": "f" * 32, "pid": 1, "wait_s": float("nan")},
        {"t": "discard", "key": KEY, "reason": "x" * 5000},
        {"t": "hello", "version": "1", "idle_s": -1.0, "max_bytes": 1},
        {"t": "hello", "version": "1", "idle_s": 1.0, "max_bytes": -1},
        {"t": "clear", "keys": ["%"]},
        [],
        None,
        "x",
        7,
    ],
)
def test_what_breaks_the_grammar_is_refused(message: object) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_request([protocol.HEADER, msgspec.msgpack.encode(message)])


@pytest.mark.parametrize("frames", [[], [protocol.HEADER], [b"rannd/999", b""], [protocol.HEADER, b"", b""]])
def test_what_is_not_framed_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_request(frames)


@given(st.binary(max_size=200))
def test_bytes_are_a_request_or_an_error(data: bytes) -> None:
    try:
        request, _ = protocol.decode_request([protocol.HEADER, data])
    except ProtocolError:
        return
    assert isinstance(request, protocol.Request.__args__)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_request([protocol.HEADER, b"\x81\xa1t" + b"\x91" * 100_000])
