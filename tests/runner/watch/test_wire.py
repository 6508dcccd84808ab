"""Frames between watcher and monitor."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannd.runner.watch import wire

FRAMES = st.lists(st.tuples(st.sampled_from(sorted(wire.KINDS)), st.binary(max_size=40)), max_size=8)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 400)))
def test_frames_survive_any_cutting(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(wire.encode(kind, payload) for kind, payload in frames)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = wire.FrameReader()
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


def test_json_round_trip() -> None:
    ((kind, payload),) = wire.FrameReader().feed(wire.encode_json(wire.EXIT, status=-9, tail="ü\n"))
    assert kind == wire.EXIT
    assert wire.decode_json(payload) == {"status": -9, "tail": "ü\n"}


@pytest.mark.parametrize("payload", [b"[1]", b"{", b"\xff", b"[" * 200_000, b'{"rank": ' + b"9" * 10_000 + b"}"])
def test_a_payload_that_is_no_object(payload: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_json(payload)


def test_an_unknown_kind_and_a_length_beyond_the_limit() -> None:
    with pytest.raises(wire.WireError, match="unknown kind"):
        list(wire.FrameReader().feed(b"GET / HTTP/1.1\r\n"))
    with pytest.raises(wire.WireError, match="over the limit"):
        list(wire.FrameReader().feed(wire.STDOUT + b"\xff\xff\xff\xff"))
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.encode(wire.STDOUT, bytes(wire.MAX_PAYLOAD + 1))
