"""What is told of failures, and how: places, messages on the side channel, memory, NaN."""

from __future__ import annotations

import errno
import logging
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import pyrannc
from rannd.errors import CheckpointError, NotANumberError, RankFailedError, StepError, UsageError
from rannd.plan.schedule.program import Action, ActionKind
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.runtime.failure import late_error, stack_dump
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.detector import FailureDetector
from rannd.runtime.failure.failure_report import Failure, describe, failure_of, is_broken
from rannd.runtime.failure.nan_check import Finite
from rannd.runtime.failure.position import Where
from rannd.runtime.failure.side_channel import Channel, ChannelError, Heard, Left, Told
from rannd.runtime.planning import memory_fit

FAILURE = Failure(1, "host", 7, "raised", "step 3, stage 1, microbatch 2, action F2 (forward)", "ValueError: no")


# -- places ------------------------------------------------------------------------------------------------------


def test_a_place_in_words() -> None:
    where = Where()
    assert where.words() == "the script, before the first step"
    where.step, where.stage, where.piece, where.action, where.call = 3, 1, 2, Action(ActionKind.FORWARD, 2), "forward"
    assert where.words() == "step 3, stage 1, microbatch 2, action F2 (forward)"
    where.ranks = (1, 0)
    assert where.words() == "step 3, stage 1, microbatch 1 of rank 1's mini-batch, action F2 (forward)"
    where.ranks = ()
    where.call, where.piece, where.action = "", None, None
    assert where.words() == "the script, after step 3"


def test_errors_before_an_action_are_in_doubt_and_others_are_not() -> None:
    where = Where()
    where.call = "forward"
    place = {"rank": 0, "host": "h", "pid": 1}
    assert not failure_of(UsageError("x"), where, **place).certain  # type: ignore[arg-type]
    assert failure_of(ValueError("x"), where, **place).certain  # type: ignore[arg-type]
    where.action = Action(ActionKind.FORWARD, 2)
    assert failure_of(StepError("x"), where, **place).certain  # type: ignore[arg-type]


def test_long_texts_are_cut() -> None:
    assert len(describe(ValueError("x" * 10_000))) < 2100
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_what_a_broken_connection_is() -> None:
    assert is_broken(
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    )
    assert not is_broken(RuntimeError("shapes cannot be multiplied"))
    assert not is_broken(ValueError("gloo"))


def test_what_the_main_thread_does_is_seen_from_another() -> None:
    where = Where()
    found: list[str] = []

    def look() -> None:
        found.extend([stack_dump.doing(where), stack_dump.line(where), stack_dump.dump()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0] == "script"
    assert "thread MainThread" in found[2]
    assert "test_what_the_main_thread_does_is_seen_from_another" in found[2]


def test_a_thread_beside_the_script_has_a_position_of_its_own() -> None:
    watch, waits, goes_on = FailureDetector(), threading.Event(), threading.Event()
    found: list[bool] = []

    def save() -> None:
        with watch.beside("asynchronous save"), watch.inside("gather"):
            waits.set()
            goes_on.wait()
        with watch.inside("gather"):
            found.append(watch.where.depth == 1)  # as any thread: torch has threads for backward

    saver = threading.Thread(target=save)
    saver.start()
    waits.wait()
    with watch.inside("forward"):
        assert (watch.where.call, watch.where.calls, watch.where.turns) == ("forward", 1, 1)
        assert watch.where.user_line.startswith("test_detector.py:")
    assert watch.where.call == watch.where.user_line == ""
    watch.failure = FAILURE
    with pytest.raises(RankFailedError, match=r"rank 1 .* failed in step 3.*restart the job"), watch.inside("forward"):
        pass
    watch.failure = None
    goes_on.set()
    saver.join()
    assert found == [True]


def test_a_rank_does_not_wait_at_its_end_for_news_that_nobody_hears(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher thread has stopped, by an error of its own."""
    monkeypatch.setattr(late_error, "known", lambda: CheckpointError("the last save failed"))
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "last_exc", raising=False)
    watch = FailureDetector()
    watch._channel, watch._thread = Channel(ends[0].socket.dup()), threading.Thread(target=lambda: None)
    watch._thread.start()
    watch._thread.join()
    leaving = threading.Thread(target=watch._leave, daemon=True)
    leaving.start()
    leaving.join(30)
    assert not leaving.is_alive()


def test_ctrl_c_ends_a_rank_that_waits_at_its_end(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word: what is raised in an exit handler, Python prints with a traceback."""
    monkeypatch.setattr(late_error, "known", lambda: CheckpointError("the last save failed"))
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "last_exc", raising=False)
    watch, ended = FailureDetector(), threading.Event()
    watch._channel, watch._thread = Channel(ends[0].socket.dup()), threading.Thread(target=ended.wait)
    watch._thread.start()
    told = threading.Thread(target=lambda: (ends[1].recv(1), signal.raise_signal(signal.SIGINT)))
    told.start()
    try:
        watch._at_exit()  # waits for the thread of the watch until Ctrl-C
    finally:
        ended.set()
        told.join()
        watch._channel.close()


@pytest.mark.parametrize(("error", "told"), [("KeyboardInterrupt", []), ("ValueError: no", ["ERROR"])])
def test_ctrl_c_on_another_rank_is_no_error_of_the_log(
    error: str, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    watch = FailureDetector()
    watch._take(msgspec.structs.replace(FAILURE, error=error))
    assert watch.failure is not None
    assert [each.levelname for each in caplog.records if each.levelno >= logging.INFO] == told


def test_the_watch_sees_that_the_script_joins_a_thread() -> None:
    where, release = Where(), threading.Event()
    assert not stack_dump.joins(where)

    def look() -> None:
        while not stack_dump.joins(where):
            time.sleep(0.01)
        release.set()

    threads = [threading.Thread(target=release.wait), threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- the side channel --------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    one, other = socket.socketpair()
    channel = Channel(one)
    yield channel, other
    channel.close()
    other.close()


def test_messages_arrive_whole_however_they_are_torn(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    sent = [Told(FAILURE), Left(2, 5), Heard()]
    catcher_end, sender_end = socket.socketpair()
    sender = Channel(sender_end)
    for message in sent:
        sender.send(message)
    sender.close()
    data = b""
    while part := catcher_end.recv(1 << 16):
        data += part
    catcher_end.close()
    found: list[object] = []
    for byte in data:
        other.sendall(bytes([byte]))
        found += channel.receive() or []
    assert found == sent


@pytest.mark.parametrize("data", [struct.pack(">I", 1 << 30), struct.pack(">I", 3) + b"abc"])
def test_what_is_no_message_is_refused(ends: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, other = ends
    other.sendall(data)
    with pytest.raises(ChannelError):
        channel.receive()


def test_the_end_of_a_connection_is_seen_and_sending_into_it_is_harmless(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    assert channel.receive() is None
    channel.send(Heard())
    channel.send(Heard())


def test_connections_made_meanwhile_are_cut_and_others_are_not() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pairs = []

    def pair() -> tuple[socket.socket, socket.socket]:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        pairs.append((mine, theirs))
        return mine, theirs

    before, _ = pair()
    connections = Connections()
    with connections.recording():
        inside, _ = pair()
    after, its = pair()
    connections.cut()
    assert inside.recv(1) == b""
    its.sendall(b"x")
    assert after.recv(1) == b"x"
    before.sendall(b"x")
    for each in [listener, *(end for ends in pairs for end in ends)]:
        each.close()


# -- memory ------------------------------------------------------------------------------------------------------


def test_out_of_memory_is_known_in_all_its_forms() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 46)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "no"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_lower_limits_are_few() -> None:
    limits = {there: memory_fit.lower_limit(there, 0.1) for there in range(1 << 30, 2 << 30, 12345678)}
    assert len(set(limits.values())) <= 2**memory_fit.BITS
    assert all(0.85 * 0.9 * there <= limit <= 0.9 * there for there, limit in limits.items())
    assert memory_fit.lower_limit(0, 0.1) == 1


def test_room_counts_the_model_once_and_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(1024, 1024, bias=False)
    model = nn.Sequential(layer, layer)
    world = SimpleNamespace(device=torch.device("cpu"), local_size=1)
    here = memory_fit.room(world, model)  # type: ignore[arg-type]
    assert here >= 4 << 20
    vms = psutil.Process().memory_info().vms
    monkeypatch.setattr(memory_fit.resource, "getrlimit", lambda _: (vms, vms))
    assert memory_fit.room(world, model) <= 5 << 20  # type: ignore[arg-type]


# -- NaN ---------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.log(x + 1) * 2,)


def test_the_first_operator_that_makes_a_nan_is_named() -> None:
    part = symbolic_trace(Root())
    finite = Finite("all")
    (value,) = finite.run(part, [torch.zeros(3)])
    assert value.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(NotANumberError, match=r"the operator log made a NaN of float32\(3,\) from -4 to -4"):
        finite.run(part, [torch.full((3,), -5.0)])
    finite.run(part, [torch.tensor([float("nan")])])  # somebody else's
    Finite("loss").run(part, [torch.full((3,), -5.0)])


def test_gradients_are_checked_with_all() -> None:
    nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
    with pytest.raises(NotANumberError, match="the gradient of x is NaN"):
        Finite("all").gradients({"y": one}, {"x": nan})
    Finite("all").gradients({"y": nan}, {"x": nan})
    Finite("loss").gradients({"y": one}, {"x": nan})


def test_a_loss_that_is_nan_in_one_process() -> None:
    net = nn.Linear(4, 1)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(self.net(x)).mean()

    model = pyrannc.RaNNCModule(WithLoss(), torch.optim.SGD(net.parameters(), 0.1))
    with torch.no_grad():
        net.weight.zero_()
        net.bias.fill_(1.0)
    assert float(model(torch.ones(2, 4)).detach()) == 0.0
    with torch.no_grad():
        net.bias.fill_(-1.0)
    with pytest.raises(NotANumberError, match=r"the operator log\w* made a NaN"):
        model(torch.ones(2, 4))
    with pytest.raises(NotANumberError, match="because input argument 0 of this rank contains NaN"):
        model(torch.full((2, 4), float("nan")))
    with torch.no_grad():
        net.bias.fill_(float("nan"))
    with pytest.raises(NotANumberError, match=r"because parameter net\.bias of this rank contains NaN"):
        model(torch.ones(2, 4))
    model.eval()
    assert torch.isnan(model(torch.ones(2, 4)).detach())  # nothing is lost by a look


class Opaque(nn.Module):
    """Has code that torch does not see, and counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if float(x.sum()) > 100:
            raise ValueError("too much")
        return x * 2


def test_code_that_torch_does_not_see_runs_once_though_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "off")
    inner = Opaque()
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    model = pyrannc.RaNNCModule(nn.Sequential(layer, inner))
    model(torch.ones(2, 4))
    before = inner.calls
    with pytest.raises(ValueError, match=r"^too much\n"):
        model(torch.full((2, 4), 1e6))
    assert inner.calls == before + 1


def test_a_process_alone_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")  # without a cache, measured costs could choose another number

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    model = pyrannc.RaNNCModule(Picky())
    model(torch.tensor([1, 2]))
    with pytest.raises(IndexError) as found:
        model(torch.tensor([1, 9]))
    assert "this was rank 0, step 1, stage 0, microbatch 0, action F0 (forward)" in "".join(found.value.__notes__)
    assert re.fullmatch(
        r"index out of range in self \(aten::embedding in module table, .*test_detector\.py:\d+\)", str(found.value)
    )
    assert model(torch.tensor([1, 3])).shape == (2, 4)


def test_an_exception_whose_text_fails_is_described_all_the_same() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert describe(Mute()) == "Mute: (no text: its __str__ raises ValueError)"
    assert not is_broken(Mute())
    assert not is_out_of_memory(Mute())
