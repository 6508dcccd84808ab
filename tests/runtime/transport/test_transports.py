"""Each body of the transport moves what a step moves; the strict one hangs where GPUs would, and says so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipelines import pipeline
from steps import CPU, run

from rannd.errors import LaunchError, StepError
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.schedules import SCHEDULES, gpipe, planned_program
from rannd.plan.schedule.stream_checker import StreamRules, Streams
from rannd.plan.schedule.virtual_stages import INTERLEAVED_1F1B, ZB_V
from rannd.runtime.transport.choice import group_backend, make_transport, transport_name
from rannd.runtime.transport.gloo_transport import GlooTransport
from rannd.runtime.transport.nccl_transport import NcclTransport
from rannd.runtime.transport.staged_transport import StagedTransport
from rannd.runtime.transport.strict_transport import POISON, StrictTransport
from rannd.runtime.transport.transport import Transport, finish, pair

LIMIT_S = 3.0
"""Seconds after which a planted hang is one; nothing here waits so long otherwise, and nothing is judged by it."""


class PairGroups(NcclTransport):
    """NCCL's body over gloo: groups, order and buffers, without streams."""

    backend = "gloo"


def _group(_: str, ranks: Sequence[int] | None) -> dist.ProcessGroup | None:
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo")
    return made


def gloo(_: int, values: dist.ProcessGroup, gradients: dist.ProcessGroup) -> Transport:
    return GlooTransport(CPU, values, gradients)


def staged(_: int, values: dist.ProcessGroup, gradients: dist.ProcessGroup) -> Transport:
    return StagedTransport(CPU, values, gradients)


def pair_groups(rank: int, _: dist.ProcessGroup, __: dist.ProcessGroup) -> Transport:
    return PairGroups(CPU, rank, _group)


def strict(
    rank: int,
    values: dist.ProcessGroup,
    gradients: dist.ProcessGroup,
    *,
    rules: StreamRules = StrictTransport.rules,
    posting: Posting = Posting.MATCHED,
    limit_s: float = 120.0,
) -> Transport:
    return StrictTransport(CPU, rank, values, gradients, rules=rules, posting=posting, limit_s=limit_s)


LAYOUTS = [
    pipeline(2, 2, microbatches=2),
    pipeline(1, 1, 1, 1, microbatches=3, outputs=True, skip=True),
    pipeline(1, 3, microbatches=2, outputs=True),
]
_EDGES = ((-1, 0), (0, 1), (0, 3), (1, 2), (2, 3), (3, 4))
SEVERAL = {
    INTERLEAVED_1F1B: Layout(4, 2, ((0, 1), (2, 3), (0, 1), (2, 3)), _EDGES, _EDGES[1:5]),
    ZB_V: Layout(4, 2, ((0, 1), (2, 3), (2, 3), (0, 1)), _EDGES, _EDGES[1:5]),
}
"""Layouts with several stages per slot, by the schedule that they are for."""


@pytest.mark.ranks
def test_messages_arrive(tmp_path: Path) -> None:
    programs = [planned_program(schedule, layout, {0, 1}) for layout in LAYOUTS for schedule in SCHEDULES]
    programs += [gpipe(layout) for layout in (*LAYOUTS, *SEVERAL.values())]
    programs += [planned_program(schedule, layout, {0, 3}) for schedule, layout in SEVERAL.items()]
    makers = [
        gloo,
        staged,
        pair_groups,
        strict,
        functools.partial(strict, rules=StreamRules(Streams.SLOT, opened=False)),
        functools.partial(strict, rules=StreamRules(Streams.CHANNEL)),
    ]
    assert run(tmp_path, makers, programs) == {}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("replicas", "rules"),
    [
        pytest.param((2, 2), StreamRules(Streams.PAIR, opened=False, synchronises=False), marks=pytest.mark.long),
        ((2, 2), StreamRules(Streams.SLOT, synchronises=False)),
        pytest.param((1, 1), StreamRules(Streams.PAIR), marks=pytest.mark.long),
    ],
    ids=["communicators at the first use", "one stream", "a host that waits for its device"],
)
def test_planted_hangs_are_found(replicas: tuple[int, ...], rules: StreamRules, tmp_path: Path) -> None:
    """The order of posts of before, which gloo allows."""
    program = planned_program("1f1b", pipeline(*replicas))
    planted = functools.partial(strict, rules=rules, posting=Posting.AHEAD, limit_s=LIMIT_S)
    errors = run(tmp_path, [planted], [program])
    assert errors
    assert any("under NCCL's rules. Its transfers that are not done, by stream: " in text for text in errors.values())


def _different_sizes(rank: int, values: dist.ProcessGroup, gradients: dist.ProcessGroup) -> Transport:
    transport = StrictTransport(CPU, rank, values, gradients)
    if rank == 0:
        transport.settle(transport.send(torch.zeros(3, dtype=torch.uint8), 1, gradients=False))
    else:
        transport.take(transport.post(torch.zeros(4, dtype=torch.uint8), 0, gradients=False))
    return transport


@pytest.mark.ranks
def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    errors = run(tmp_path, [_different_sizes], [planned_program("1f1b", pipeline(1, 1))])
    assert "rank 0 sends 3 bytes, rank 1 expects 4" in errors[0]
    assert "rank 0 sends 3 bytes, rank 1 expects 4" in errors[1]


def _poisoned(rank: int, values: dist.ProcessGroup, gradients: dist.ProcessGroup) -> Transport:
    transport = StrictTransport(CPU, rank, values, gradients)
    if rank == 0:
        transport.settle(transport.send(torch.arange(4, dtype=torch.uint8), 1, gradients=True))
    else:
        buffer = torch.zeros(4, dtype=torch.uint8)
        posted = transport.post(buffer, 0, gradients=True)
        transport.before_computation()  # it has arrived
        assert buffer.tolist() == [POISON] * 4
        assert buffer.repeat(2).view(torch.float64).isnan().all()
        transport.take(posted)
        assert buffer.tolist() == [0, 1, 2, 3]
    return transport


@pytest.mark.ranks
def test_buffers_are_of_no_use_before_they_are_taken(tmp_path: Path) -> None:
    assert run(tmp_path, [_poisoned], [planned_program("1f1b", pipeline(1, 1))]) == {}


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "device", "name"),
    [
        ("auto", CPU, "gloo"),
        ("auto", CUDA, "nccl"),
        ("staged", CUDA, "staged"),
        ("staged", CPU, "staged"),
        ("strict", CPU, "strict"),
        ("gloo", CPU, "gloo"),
    ],
)
def test_which_is_used(wanted: str, device: torch.device, name: str) -> None:
    assert transport_name(wanted, device) == name
    assert group_backend(name) == ("nccl" if name == "nccl" else "gloo")
    if device == CPU:
        assert make_transport(name, device, 0, None, _group).name == name


@pytest.mark.parametrize(("wanted", "device"), [("nccl", CPU), ("gloo", CUDA), ("strict", CUDA)])
def test_what_cannot_move_tensors_of_the_device_is_refused(wanted: str, device: torch.device) -> None:
    with pytest.raises(LaunchError, match=f"transport={wanted} moves tensors"):
        transport_name(wanted, device)


def test_a_pair_has_one_name_on_both_ranks() -> None:
    assert pair(True, 3, 1) == pair(True, 1, 3) == (True, 1, 3)
    with pytest.raises(StepError, match="on a rank outside its group"):
        finish(None)
