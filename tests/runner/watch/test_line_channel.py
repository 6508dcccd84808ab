"""A watcher's way to the monitor: what stands in it ends in an error, not in waiting without end."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from rannd.errors import LaunchError
from rannd.runner.watch import line_channel


def test_a_queue_that_stays_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_channel, "TURN_S", 1.0)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind("")
        listener.listen(0)
        first.connect(listener.getsockname())
        with pytest.raises(TimeoutError, match="does not accept"):
            line_channel.connect(["unix", listener.getsockname()[1:].decode()], "token")


@pytest.mark.parametrize(("host", "kind"), [("127.0.0.1", "tcp"), ("::1", "tcp"), (None, "unix")])
def test_a_watcher_gets_to_the_monitor_by_the_address_that_it_is_told(host: str | None, kind: str) -> None:
    listener = line_channel.Listener(host)
    assert listener.address[0] == kind
    reception = listener.reception(pytest.fail)
    with ThreadPoolExecutor(1) as pool:
        channel = pool.submit(line_channel.connect, listener.address, listener.token)
        admitted: list[socket.socket] = []
        while not admitted:
            select.select([reception], [], [], reception.due())
            admitted = reception.admit()
        channel.result().close()
    admitted[0].close()
    reception.close()


def test_a_host_that_nobody_knows_is_a_launch_error() -> None:
    for name in ("nowhere.invalid", "a..b"):
        with pytest.raises(LaunchError, match=f"host {name} cannot be reached: .*; check its name"):
            line_channel.Listener(name)
