"""The monitor with real watchers and other launchers than MPI: its promises do not hang on Open MPI's habits."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time

import pytest
from monitored import SRUN, run
from transcript import program

from rannd.ranks.admission import introduce
from rannd.runner.watch import monitor, wire
from rannd.runner.watch.line_channel import Listener


def test_another_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(Listener(None), 3, program("no_newline.py"))
    assert sorted((end.rank, end.status) for end in result.ends) == [(0, 0), (1, 0), (2, 0)]
    assert (result.missing, result.launcher_status, result.launcher_output) == (0, 0, "")
    out, err = capfd.readouterr()
    host = socket.gethostname().split(".")[0]
    assert sorted(out.splitlines()) == sorted(f"[{host}:{r}] {line}" for r in range(3) for line in ("first", "last"))
    assert sorted(err.splitlines()) == [f"[{host}:{r}] error without end" for r in range(3)]


def test_a_launcher_that_lets_others_run_on_after_a_failure() -> None:
    code = "import os, signal, sys; sys.exit(3) if os.environ['SLURM_PROCID'] == '1' else signal.pause()"
    result = run(Listener(None), 3, "-c", code)
    assert [(end.rank, end.status) for end in result.failures] == [(1, 3)]
    assert sorted((end.rank, end.status) for end in result.ends if end.ordered) == [(0, -15), (2, -15)]


def test_other_ranks_may_say_what_they_know_of_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that hears of another's end half a second later than rannc-run still says so, in its own words."""
    code = """
import os, sys, time
if os.environ["SLURM_PROCID"] == "1":
    sys.exit(3)
try:
    time.sleep(0.5)
finally:
    print("rank 1 has left", flush=True)
time.sleep(300)
"""
    result = run(Listener(None), 2, "-c", code)
    assert [(end.rank, end.status) for end in result.failures] == [(1, 3)]
    assert [(end.rank, end.status) for end in result.ends if end.ordered] == [(0, -15)]
    assert "rank 1 has left" in capfd.readouterr().out


def test_a_failure_while_the_launcher_still_starts_ranks_is_not_waited_for() -> None:
    """The only rank that has started fails; its launcher waits for the others for ever."""
    begun = time.monotonic()
    starting = SRUN.replace("sys.exit(", "import time; time.sleep(300); sys.exit(")
    result = run(Listener(None), 3, "-c", "import sys; sys.exit(3)", started=1, grace=200.0, launched=starting)
    assert [(end.rank, end.status) for end in result.failures] == [(0, 3)]
    assert result.missing == 2
    assert result.launcher_status < 0, "it was ended"
    assert time.monotonic() - begun < 100.0, "half of the grace period, in which nobody was left"


def test_a_launcher_has_time_to_end_after_all_ranks_have_failed() -> None:
    slow = SRUN.replace(
        "sys.exit(max(rank.wait() for rank in ranks))",
        """
import time
[rank.wait() for rank in ranks]
time.sleep(5)
sys.exit(9)
""",
    )
    result = run(Listener(None), 2, "-c", "import sys; sys.exit(3)", launched=slow)
    assert [end.status for end in result.failures] == [3, 3]
    assert result.launcher_status == 9, "it was ended"


def test_over_tcp(capfd: pytest.CaptureFixture[str]) -> None:
    listener = Listener("127.0.0.1")
    assert listener.address[:2] == ["tcp", "127.0.0.1"]
    result = run(listener, 2, program("no_newline.py"))
    assert [end.status for end in result.ends] == [0, 0]
    assert capfd.readouterr().out.count("] last\n") == 2


def test_a_wrong_token_starts_nobodys_job() -> None:
    result = run(Listener("127.0.0.1"), 1, "-c", "import signal; signal.pause()", token="0" * 32)
    assert (result.ends, result.missing) == ([], 1)
    assert "it is of another job, or this one has ended" in result.launcher_output


def test_a_watcher_that_is_lost_before_it_has_told_its_rank_ends_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    listener = Listener("127.0.0.1")

    def come_and_go() -> None:
        with socket.create_connection(("127.0.0.1", int(listener.address[2]))) as channel:
            introduce(channel, listener.token)

    watcher = threading.Thread(target=come_and_go)
    watcher.start()
    result = run(listener, 2, "-c", "import signal; signal.pause()", started=1, grace=1.0)
    watcher.join()
    assert [end.ordered for end in result.ends] == [True] * len(result.ends)
    assert "before it had told which rank" in capfd.readouterr().err


def test_it_listens_only_where_the_other_machines_connect() -> None:
    listener = Listener("127.0.0.1")
    assert listener.socket.getsockname()[0] == "127.0.0.1"
    listener.socket.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", marks=pytest.mark.long),
        wire.encode_json(wire.HELLO, rank=0, token=1),
        wire.encode(wire.HELLO, b"[" * 200_000),
        wire.encode(wire.HELLO, b"\xff" * 1000),
        wire.encode(wire.HELLO, b'{"rank": ' + b"9" * 10_000 + b"}"),
    ],
    ids=["HTTP", "no token", "deep nesting", "no UTF-8", "a huge number"],
)
def test_strangers_on_the_port_do_no_harm(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    listener = Listener("127.0.0.1")
    with socket.create_connection((str(listener.address[1]), int(listener.address[2]))) as stranger:
        stranger.sendall(sent)
        result = run(listener, 2, program("no_newline.py"))
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionError):  # it was closed with bytes that nobody has read
            while stranger.recv(100):
                pass
    assert [end.status for end in result.ends] == [0, 0]


def test_a_stranger_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_HELLO_S", 0.2)
    listener = Listener("127.0.0.1")
    with socket.create_connection((str(listener.address[1]), int(listener.address[2]))) as silent:
        result = run(listener, 2, program("no_newline.py"))
        assert silent.recv(100)
        assert silent.recv(100) == b""
    assert [end.status for end in result.ends] == [0, 0]


def test_a_lost_host_that_is_noticed_while_it_is_told_something() -> None:
    class Gone(socket.socket):
        """What the kernel does with a connection that it has given up."""

        def send(self, *_: object) -> int:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    with Gone() as channel:
        link = monitor._Link(channel)
        link.send(wire.encode(wire.KILL))
        assert link.lost


def test_a_launcher_that_starts_nothing() -> None:
    result = run(Listener(None), 3, program("no_newline.py"), started=0)
    assert (result.ends, result.missing, result.launcher_status) == ([], 3, 1)
    assert "max()" in result.launcher_output


def test_ranks_that_do_not_start_in_time_end_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(Listener(None), 3, "-c", "import signal; signal.pause()", started=2, start=3.0)
    assert sorted((end.rank, end.status) for end in result.ends) == [(0, -15), (1, -15)]
    assert not result.failures
    assert result.missing == 1
    assert "rannc-run: only 2 of 3 ranks have started within 3 s: ending the job. Is every" in capfd.readouterr().err


def test_ranks_that_start_in_time_may_run_longer() -> None:
    result = run(Listener(None), 2, "-c", "import time; time.sleep(4)", start=3.0)
    assert [end.status for end in result.ends] == [0, 0]
