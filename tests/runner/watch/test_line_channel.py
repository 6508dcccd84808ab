"""A watcher's way to the monitor: what stands in it ends in an error, not in waiting without end."""

from __future__ import annotations

import socket

import pytest

from rannd.runner.watch import line_channel


def test_a_queue_that_stays_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_channel, "TURN_S", 1.0)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind("")
        listener.listen(0)
        first.connect(listener.getsockname())
        with pytest.raises(TimeoutError, match="does not accept"):
            line_channel.connect(["unix", listener.getsockname()[1:].decode()], "token")
