"""Deployments as bytes: what comes back, and that nothing made of garbage does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import chain
from plan_instances import deploy

from rannd.errors import DeploymentError
from rannd.plan.compatibility import check_belongs, differences, plain
from rannd.plan.deployment import (
    FORMAT,
    MAX_BYTES,
    Alternative,
    BlockTimes,
    Deployment,
    EdgeCost,
    OpTable,
    PlannedStep,
    Provenance,
    Slot,
    decode,
    encode,
)
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES

MADE = Provenance("Box", "measured", "0.1.0", "2.13.0")


def some() -> Deployment:
    made = msgspec.structs.replace(
        deploy(chain(10), 4, rows=16, partition_num=2, pipeline_num=2),
        made=MADE,
        alternatives=(Alternative("4-way data parallel", 10.0, 1000, 0), Alternative("1 stage", 0.0, 9, 7)),
    )
    assert len(made.stages) == 2
    count = sum(len(stage.ops) for stage in made.stages)
    zeros = (0,) * count
    columns = (zeros, zeros, zeros, zeros, zeros, (10,) * count, zeros, zeros)
    edges = (EdgeCost(-1, 0, 8, 1.0, 2.0, False), EdgeCost(0, 1, 8, 1.0, 2.0, True, 8, 1.0, 2.0))
    planned = PlannedStep((1.0, 2.0), (2.0, 3.0), (0.5, 0.0), edges, ((), (3.0,)), tied=((0, 1),), tied_us=((1.0,),))
    table = OpTable(("", "layers"), *columns, (BlockTimes(1.0, 2.0),))
    return msgspec.structs.replace(made, planned=planned, table=table)


def placed(made: Deployment, slots: Sequence[tuple[int, ...]]) -> Deployment:
    stages = zip(made.stages, slots, strict=True)
    return msgspec.structs.replace(
        made, stages=tuple(msgspec.structs.replace(stage, slots=each) for stage, each in stages)
    )


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    told = msgspec.msgpack.decode(encode(some()))
    change(told)
    return msgspec.msgpack.encode(told)


def test_what_is_encoded_comes_back() -> None:
    assert decode(encode(some())) == some()
    # As the first ones of this format were: without a word of how they were made.
    assert decode(changed(lambda told: told.pop("made"))).made is None
    assert decode(changed(lambda told: [told.pop("planned"), told.pop("table")])).table is None


def test_a_plan_with_more_microbatches_than_rows_wanted_is_one() -> None:
    """More would be without rows; a deployment that has them is refused."""
    made = deploy(chain(10), 4, rows=1, partition_num=2, pipeline_num=8)
    assert made.microbatches == made.batch_rows == 4
    assert decode(encode(made)) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.update(format=FORMAT + 1, stages="other"),
            f"has format {FORMAT + 1}, this version of rannd reads {FORMAT}",
        ),
        (lambda d: d.pop("stages"), "not a deployment .*missing required field `stages`"),
        (lambda d: d.update(slots=[]), "has 2 stages on 0 slots"),
        (lambda d: d.update(stages=[]), "has 0 stages on 4 slots"),
        (lambda d: d["slots"].reverse(), "slots are not sorted"),
        (lambda d: d["slots"].__setitem__(0, d["slots"][1]), "one of them occurs twice"),
        (lambda d: d["slots"].__setitem__(0, [-1, 0]), r"slots\[0\].node is -1"),
        (lambda d: d["stages"][0]["slots"].__setitem__(0, 9), "stages use 4 slots, not each of 4 once"),
        (lambda d: d["stages"][0]["slots"].append(-1), "stages use 5 slots, not each of 4 once"),
        (lambda d: d["stages"].append({**d["stages"][0], "slots": []}), r"stages\[2\] has 0 slots"),
        (lambda d: d["stages"][1].update(ops=[]), r"stages\[1\] has 2 slots and 0 operators"),
        (lambda d: d["stages"][1]["ops"].append(d["stages"][0]["ops"][0]), r"operator of stages\[1\] occurs twice"),
        (lambda d: d["stages"][1]["ops"].append(d["stages"][1]["ops"][0]), r"operator of stages\[1\] occurs twice"),
        (lambda d: d["planned"]["edges"].reverse(), r"planned.edges are \[\(0, 1\), \(-1, 0\)\] of 2 stages"),
        (lambda d: d["planned"]["edges"][1].__setitem__(1, 5), "planned.edges are"),
        (lambda d: d["planned"]["edges"][1].__setitem__(0, 1), "planned.edges are"),
        (lambda d: d["planned"]["edges"][1].__setitem__(2, -1), "planned.edges has a negative number"),
        (lambda d: d["planned"]["edges"][1].__setitem__(3, math.nan), "planned.edges has a number out of range"),
        (lambda d: d["planned"]["forward_us"].pop(), "planned.forward_us has 1 numbers for 2 stages"),
        (lambda d: d["planned"]["reduce_us"].append([]), "planned.reduce_us has 3 numbers for 2 stages"),
        (lambda d: d["planned"]["reduce_us"].__setitem__(0, [math.inf]), "planned.reduce_us has a number out of"),
        (lambda d: d["planned"].update(after_us=[1.0]), "planned.after_us has 1 numbers for 2 stages"),
        (lambda d: d["planned"].update(weight_us=[9.0, 0.0]), "weight_us is more than planned.backward_us"),
        (lambda d: d["planned"].update(host_us=-1.0), "planned.host_us has a number out of range"),
        (lambda d: d["planned"].update(tied=[[1, 0]]), r"planned.tied is \(\(1, 0\),\) with 1 reductions"),
        (lambda d: d["planned"].update(tied=[[0, 7]]), "planned.tied is"),
        (lambda d: d["planned"].update(tied_us=[]), "planned.tied is .* with 0 reductions"),
        (lambda d: d["table"]["flops"].pop(), "table.flops has 9 entries for 10 operators"),
        (lambda d: d["table"]["modules"].__setitem__(3, 2), "table.modules has a number out of range"),
        (lambda d: d["table"]["sources"].__setitem__(3, -1), "table.sources has a number out of range"),
        (lambda d: d["table"]["flops"].__setitem__(3, 1 << 60), "table.flops has a number out of range"),
        (lambda d: d["table"]["blocks"].__setitem__(3, -1), "table.blocks has a number out of range"),
        (lambda d: d["table"].update(texts=[1]), "not a deployment"),
        (lambda d: d["table"].update(block_times=[[-1.0, 0.0]]), "table.block_times has a number out of range"),
        (lambda d: d.update(microbatches=0), "microbatches is 0"),
        (lambda d: d.update(microbatches=-3), "microbatches is -3"),
        (lambda d: d.update(microbatches=1 << 60), "microbatches is 1152921504606846976"),
        (lambda d: d.update(microbatches=True), "not a deployment .*Expected `int`"),
        (lambda d: d.update(microbatches=65), "it has 65 microbatches for 64 rows"),
        (lambda d: d.update(microbatches=1 << 40, batch_rows=1 << 40), "microbatches on 4 slots are more than 1048576"),
        (lambda d: d.update(batch_rows=0), "batch_rows is 0"),
        (lambda d: d.update(step_us=math.nan), "step_us is nan"),
        (lambda d: d.update(step_us=math.inf), "step_us is inf"),
        (lambda d: d["stages"][0]["estimate"].update(forward_us=-1.0), r"stages\[0\].estimate.forward_us is -1"),
        (lambda d: d["alternatives"][1].update(over_bytes=-7), r"alternatives\[1\].over_bytes is -7"),
        (lambda d: d["stages"][0].update(ops=[3]), "not a deployment .*Expected `str`"),
        (
            lambda d: d["stages"][0].update(slots=[0, 0, 1, 1, 2, 3]),
            "stages use 8 slots, not each of 4 once, or all of",
        ),
        (lambda d: [each.update(slots=[0, 0, 1, 1]) for each in d["stages"]], "stages use 8 slots, not each of 4"),
        (
            lambda d: (d["stages"][0].update(slots=[0, 0, 1, 1]), d["stages"][1].update(slots=[2, 2, 3, 3])),
            "a slot twice",
        ),
        (
            lambda d: d["stages"][1]["estimate"].update(offloaded_bytes=5),
            r"stages\[1\] offloads 5 bytes of a plan that",
        ),
    ],
)
def test_what_cannot_be_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(DeploymentError, match=message) as caught:
        decode(changed(change))
    assert str(caught.value).endswith("run without it to plan again")
    assert len(str(caught.value)) < 300


def test_a_deployment_cut_short_anywhere_is_none() -> None:
    data = encode(some())
    for length in range(len(data)):
        with pytest.raises(DeploymentError):
            decode(data[:length])


@given(st.data())
def test_a_changed_byte_gives_an_error_or_a_sound_deployment(data: st.DataObject) -> None:
    whole = bytearray(encode(some()))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(whole))
    except DeploymentError:
        return
    used = sorted(slot for stage in found.stages for slot in stage.slots)
    assert used == sorted([*range(len(found.slots))] * (len(used) // len(found.slots)))


@given(st.binary(max_size=200))
def test_garbage_is_none(data: bytes) -> None:
    with pytest.raises(DeploymentError):
        decode(data)


def test_what_is_nested_or_large_is_none() -> None:
    with pytest.raises(DeploymentError, match="not a deployment"):
        decode(b"\x91" * 100_000)
    with pytest.raises(DeploymentError, match="not a deployment"):
        decode(b"\x82\xa6format\x02\xa5other" + b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(DeploymentError, match="are too many for a deployment"):
        decode(bytes(MAX_BYTES + 1))


# -- belonging to a job ---------------------------------------------------------------------------------------


def test_what_makes_a_deployment_wrong_is_an_error() -> None:
    mine = some()
    check_belongs(mine, graph_hash=mine.graph_hash, world=4, rows=64)
    with pytest.raises(DeploymentError, match="made for the graph hash, this model's is 0123456789ab: another model"):
        check_belongs(mine, graph_hash="0123456789abcdef", world=4, rows=64)
    with pytest.raises(DeploymentError, match="made for 4 ranks, this job has 2; start 4 ranks, or"):
        check_belongs(mine, graph_hash=mine.graph_hash, world=2, rows=64)
    other = msgspec.structs.replace(mine, schedule="\x1b[2Jmine")
    with pytest.raises(DeploymentError, match=r"schedule '\?\[2Jmine', this version of rannd supports .*1f1b"):
        check_belongs(other, graph_hash=mine.graph_hash, world=4, rows=64)
    check_belongs(mine, graph_hash=mine.graph_hash, world=4, rows=2)
    several = placed(mine, ((0, 1, 2, 3), (0, 1, 2, 3)))
    assert decode(encode(several)) == several
    with pytest.raises(DeploymentError, match="it has 2 stages per slot, the schedule 1f1b runs one; run without"):
        check_belongs(several, graph_hash=mine.graph_hash, world=4, rows=64)
    for schedule in VIRTUAL_SCHEDULES:
        several = msgspec.structs.replace(several, schedule=schedule)
        check_belongs(several, graph_hash=mine.graph_hash, world=4, rows=64)
        for stages in (((0, 1), (2, 3)), ((0, 1, 2, 3), (1, 0, 2, 3))):
            with pytest.raises(DeploymentError, match=f"damaged: .*are not placed as {schedule} needs them; run"):
                check_belongs(placed(several, stages), graph_hash=mine.graph_hash, world=4, rows=64)
    with pytest.raises(DeploymentError, match=r"has 2 microbatches, but the batch of this call has 1 rows?; call the"):
        check_belongs(mine, graph_hash=mine.graph_hash, world=4, rows=1)


def test_what_makes_it_slow_is_told() -> None:
    mine = some()

    def told(**job: Any) -> list[str]:
        return differences(mine, **{"here": MADE, "slots": mine.slots, "rows": mine.batch_rows, **job})

    assert told() == []
    spread = [Slot(number // 2, number % 2) for number in range(4)]
    assert told(slots=spread) == ["it was planned for 4 ranks on one node, this job has 2 nodes of 2 ranks"]
    uneven = [Slot(0, 0), Slot(1, 0), Slot(1, 1), Slot(1, 2)]
    assert told(slots=uneven) == ["it was planned for 4 ranks on one node, this job has 2 nodes of 1 to 3 ranks"]
    assert told(rows=9) == ["it was planned for a global batch of 64 rows, this call has 9"]
    assert told(here=Provenance("H100", "measured", "0.2.0", "2.14.0")) == [
        "it was planned for the device 'Box', this job has 'H100'",
        "it was planned with rannd 0.1.0, this is 0.2.0",
        "it was planned with torch 2.13.0, this is 2.14.0",
    ]
    mine = msgspec.structs.replace(mine, made=Provenance("Box", "cluster a100x8", "0.1.0", "2.13.0"))
    assert told() == ["its times are from cluster a100x8, not measured"]
    mine = msgspec.structs.replace(mine, made=None)
    assert told(here=Provenance("H100", "measured", "9", "9")) == []


def test_text_of_a_file_is_printed_plainly() -> None:
    assert plain("abc") == "abc"
    assert plain("a\nb\x1b[31mc\u202e") == "a?b?[31mc?"
    assert plain("x" * 100) == "x" * 78 + ".."
