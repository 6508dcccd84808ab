"""Deployments as text."""

from __future__ import annotations

import math

import msgspec
import pytest
from plan_graphs import chain
from plan_instances import deploy

from rannd.errors import UsageError
from rannd.plan.deployment import Alternative, Deployment, Provenance, Slot
from rannd.plan.plan_text import aligned, bubble, piece_rows, plan_line, scaled, show, title
from rannd.plan.slot_memory import fullest_bytes


def some() -> Deployment:
    found = deploy(chain(10), 4, rows=16, partition_num=2, pipeline_num=2)
    first, second = found.stages
    return msgspec.structs.replace(
        found,
        slots=(Slot(0, 0), Slot(0, 1), Slot(0, 3), Slot(1, 0)),
        stages=(msgspec.structs.replace(first, slots=(0, 1, 2)), msgspec.structs.replace(second, slots=(3,))),
        made=Provenance("Box", "cluster box", "0.1.0", "2.13.0"),
        model="Net 11.1M",
        e_us=found.step_us,
        bound_us=found.step_us / 1.25,
        searched_all=False,
        memory_bytes=3 << 30,
        alternatives=(
            Alternative("4-way data parallel", found.step_us * 2, 1000, 0),
            Alternative("4 stages", 0.0, 4 << 30, 1 << 30),
        ),
    )


def test_all_that_a_person_asks_is_there() -> None:
    found = some()
    text = show(found)
    assert text.startswith(f"plan      {plan_line(found)}\nmodel     Net 11.1M\ngraph ")
    for wanted in (
        "graph     hash\n",
        "device    Box\n",
        "times     cluster box, by rannd 0.1.0 and torch 2.13.0\n",
        "devices   4 on 2 nodes, 2 stages\n",
        "batch     64 rows: 4 ranks x 2 microbatches of 8 at most\n",
        f"step      {found.step_us / 1e3:.3f} ms predicted, of which {bubble(found):.1%} is not computing\n",
        ": gap 25.0%\n",
        "search    cut off: a better plan may exist\n",
        "of 3.00 GiB allowed on the fullest device\n",
        "  0:0-1,3  ",
        "  1:0  ",
        "not chosen (64 rows)",
        "4-way data parallel",
        "2.000x",
        "does not fit: 1.00 GiB too much",
    ):
        assert wanted in text, text
    assert found.stages[0].name in text
    assert "rough estimate" not in text
    heads = next(line for line in text.splitlines() if line.startswith("stage  parameters"))
    for kind in ("gradients", "optimizer", "activations", "transfers"):
        assert kind in heads


def test_what_is_not_known_is_left_out() -> None:
    found = deploy(chain(10), 4)
    one = msgspec.structs.replace(
        found.stages[0], estimate=msgspec.structs.replace(found.stages[0].estimate, weight_us=0)
    )
    bare = msgspec.structs.replace(found, stages=(one,), bound_us=0.0, memory_bytes=0, alternatives=(), made=None)
    text = show(bare)
    for word in ("device  ", "bound", "search", "allowed", "not chosen", "weight grad"):
        assert word not in text, text


def test_a_table_that_is_too_wide_goes_on_below_beside_its_first_column() -> None:
    heads, rows = ("stage", "modules", "blocks", "why"), [("0", "a.b", "x" * 9, "it is so, and for more of these")]
    whole = "stage  modules  blocks     why\n0      a.b      xxxxxxxxx  it is so, and for more of these"
    assert aligned(heads, rows) == aligned(heads, rows, 60) == whole
    assert aligned(heads, rows, 57) == whole.replace(" these", "\n" + " " * 27 + "these"), "wrapped"
    below = "stage  modules  blocks\n0      a.b      xxxxxxxxx\n\nstage  why\n0      it is so, and for more of these"
    assert aligned(heads, rows, 55) == below
    text = show(some(), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert set(text.split()) == set(show(some()).split())


def test_another_batch_is_estimated_in_proportion() -> None:
    found = some()
    text = show(found, 128)
    assert "batch     128 rows: 4 ranks x 2 microbatches of 16 at most" in text
    assert "rough estimate: planned for 64 rows" in text
    assert "bound" not in text
    assert show(found, 64) == show(found)
    other = scaled(found, 128)
    assert (piece_rows(found), piece_rows(other)) == (8, 16)
    for before, after in zip(found.stages, other.stages, strict=True):
        old, new = before.estimate, after.estimate
        assert new.forward_us == 2 * old.forward_us
        assert new.activation_bytes == 2 * old.activation_bytes
        assert (new.param_bytes, new.allreduce_us) == (old.param_bytes, old.allreduce_us)
        parts = new.param_bytes + new.grad_bytes + new.optimizer_bytes + new.activation_bytes + new.comm_bytes
        assert new.total_bytes == parts + new.working_bytes
    assert found.step_us < other.step_us < 2 * found.step_us
    with pytest.raises(UsageError, match="a batch of 0 rows"):
        show(found, 0)


def test_names_out_of_a_file_do_nothing_to_a_terminal() -> None:
    found = some()
    hostile = msgspec.structs.replace(found, graph_hash="\x1b[2J" + "x" * 500, schedule="a\nb", placement="\u202e")
    hostile = msgspec.structs.replace(
        hostile, stages=tuple(msgspec.structs.replace(s, name="\x07", ops=("\r", *s.ops)) for s in hostile.stages)
    )
    for letter in show(hostile).replace("\n", ""):
        assert letter.isprintable()
    assert len(show(hostile).splitlines()) == len(show(found).splitlines())


def test_bubble_of_one_stage_that_reduces_nothing_is_none() -> None:
    found = deploy(chain(10), 1)
    assert bubble(found) == pytest.approx(0.0, abs=1e-9)
    assert bubble(msgspec.structs.replace(found, step_us=0.0)) == 0.0


def test_nodes_that_are_used_alike_are_told_together() -> None:
    found = deploy(chain(10), 16, rows=4, partition_num=1)
    slots = tuple(Slot(number // 4, number % 4) for number in range(12)) + tuple(Slot(5, n) for n in (0, 2, 3, 7))
    assert "  0-2:0-3 5:0,2-3,7  " in show(msgspec.structs.replace(found, slots=slots))


def test_the_plan_in_one_line_is_what_a_person_asks_first() -> None:
    first, second = msgspec.structs.replace(some(), microbatches=8, step_us=880_000.0).stages
    most = max(stage.estimate.total_bytes for stage in (first, second))
    found = msgspec.structs.replace(
        some(),
        microbatches=8,
        step_us=880_000.0,
        memory_bytes=10_847 << 20,
        stages=(
            msgspec.structs.replace(first, modules="embed..layers.3"),
            msgspec.structs.replace(second, modules="layers.4..head"),
        ),
    )
    assert plan_line(found, [3, 2, 1, 0]) == (
        "2 stages: embed..layers.3 on ranks 1-3, layers.4..head on rank 0; 8 microbatches; step about 0.88 s; "
        f"{math.ceil(most / 2**20):,} of 10,847 MiB per device"
    )
    assert "embed..layers.3 on devices 0:0-1,3, layers.4..head on device 1:0;" in plan_line(found)
    assert title(found) == "Net 11.1M, 2 stages"
    short = msgspec.structs.replace(found, microbatches=1, step_us=9_644.0, memory_bytes=0)
    assert "; 1 microbatch; step about 9.6 ms; 1 MiB per device" in plan_line(short)


def test_a_plan_that_fits_does_not_read_as_one_above_its_limit() -> None:
    found = deploy(chain(2, param=4_000_000), 1)
    most = fullest_bytes(found)
    assert most % 2**20
    tight = plan_line(msgspec.structs.replace(found, memory_bytes=most))
    assert tight.endswith(f"; {most >> 20} of {most >> 20} MiB per device")


def test_one_stage_is_the_whole_model_and_of_many_stages_the_first_and_last_are_named() -> None:
    assert plan_line(deploy(chain(2), 2), [0, 1]).startswith("1 stage: the whole model on ranks 0-1; ")
    many = deploy(chain(10), 10, partition_num=10)
    assert [len(stage.slots) for stage in many.stages] == [1] * 10
    line = plan_line(many, range(10))
    assert line.count(" on rank ") == 7
    assert "layers.5 on rank 5, 3 more, layers.9 on rank 9;" in line


def test_an_older_deployment_without_names_is_shown_by_its_operators() -> None:
    stages = tuple(msgspec.structs.replace(stage, modules="") for stage in some().stages)
    old = msgspec.structs.replace(some(), model="", stages=stages)
    assert plan_line(old).startswith("2 stages: op0..op4 on devices 0:0-1,3, op5..op9 on device 1:0;")
    assert "\nmodel" not in show(old)
    assert title(old) == "a model, 2 stages"
