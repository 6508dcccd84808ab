"""Plans with several stages per slot: chosen where they are faster, forced, and refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from plan_graphs import GraphBuilder, chain
from plan_instances import WHAT

from rannd.errors import DoesNotFitError, PlanError
from rannd.graph.fx.ir import Size, TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.plan_options import PlanOptions
from rannd.plan.plan_text import plan_line, show
from rannd.plan.run_modes import LEAST_GAIN, VIRTUAL_GAIN, RunMode, virtual_gain
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.schedule.stream_checker import StreamRules, check_streams
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import layout_of, loss_layout
from rannd.plan.slot_memory import device_bytes, fullest_bytes
from rannd.plan.virtual import virtual_plans, virtual_search
from rannd.plan.virtual.virtual_plans import VirtualPlans
from rannd.profile.costs import BlockCost, CostTable, LinkCost

PLENTY = 10**15
SHARED = 200_000_000
"""Bytes of each layer's parameters, whose reduction takes long: pipelines are worth while."""
LARGE = 3 * SHARED
MS = 1000.0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made of plans with several stages per slot: cuts, and simulated steps."""
    found: list[str] = []
    for name in ("costs_of", "deployment", "simulated"):
        real = getattr(VirtualPlans, name)

        def told(self: VirtualPlans, *given: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            found.append(name)
            return real(self, *given, **more)

        monkeypatch.setattr(VirtualPlans, name, told)
    return found


def deep(
    world: int = 4,
    *,
    graph: TaskGraph | None = None,
    memory: int = PLENTY,
    rows: int = 2,
    forward: float = 20 * MS,
    weight: float = 0.0,
    **items: object,
) -> Deployment:
    """A plan of many equal layers with few rows: with one stage per slot, the bubble is large."""
    graph = graph or chain(24, param=SHARED)
    options = PlanOptions(**{"zero_stage": "0", **items})  # type: ignore[arg-type]
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    each = BlockCost(Size(0, forward), Size(0, 2 * forward), Size(0, 1e6), Size(0, weight))
    return plan(
        graph, blocks, CostTable((each,) * len(blocks), LinkCost(5, 20_000, 10, 1000)), world=world,
        slots=tuple(Slot(0, device) for device in range(world)), batch_rows=rows * world, memory_bytes=memory,
        options=options, ranked=True,
    )  # fmt: skip


def _why(found: Deployment) -> dict[str, tuple[str, str]]:
    return {each.what: (each.chosen, each.why) for each in found.reasons}


def _runs(graph: TaskGraph, found: Deployment) -> None:
    """Its file is valid, and so are its programs, also on devices with streams."""
    assert decode(encode(found)) == found
    layout = loss_layout(layout_of(graph, found))
    split = {number for number, stage in enumerate(found.stages) if stage.estimate.weight_us > 0}
    program = planned_program(found.schedule, layout, split)
    check(program)
    check_streams(program, Posting.MATCHED, StreamRules(meets=found.zero >= 2))


@pytest.mark.parametrize("virtual", ["2", "auto"])
def test_offloaded_parameters_are_divided_though_no_stage_has_replicas(virtual: str) -> None:
    found = deep(virtual_stages=virtual, offload_params="true", zero_stage="auto")
    assert len(found.stages) > 4
    assert {len(stage.slots) for stage in found.stages} == {1}
    assert (found.zero, found.offload_params) == (3, True)
    _runs(chain(24, param=SHARED), found)


# -- chosen ---------------------------------------------------------------------------------------------------


def test_a_pipeline_with_a_large_bubble_gets_several_stages_per_slot() -> None:
    one, free = deep(virtual_stages="1"), deep()
    assert (len(one.stages), one.schedule) == (4, "1f1b")
    assert (len(free.stages), free.schedule) == (16, "interleaved_1f1b")
    assert free.step_us < (1 - VIRTUAL_GAIN) * one.step_us
    _runs(chain(24, param=SHARED), free)
    assert free.alternatives[0].name == "4 stages, 2 microbatches"
    assert free.alternatives[0].step_us == one.step_us
    assert free.alternatives[0].most_bytes == fullest_bytes(one)
    why = _why(free)
    assert list(why) == WHAT
    assert why["virtual stages"][0] == "4"
    assert why["virtual stages"][1].startswith("1 per slot (4 stages, 2 microbatches) ")
    assert why["schedule"][0] == "interleaved_1f1b"
    assert why["schedule"][1].startswith("of the simulated plans with several per slot: ")
    assert _why(one)["virtual stages"] == ("no", "set by virtual_stages=1")
    assert msgspec.structs.replace(one, reasons=()) == msgspec.structs.replace(
        deep(schedule="1f1b"), reasons=(), searched_all=one.searched_all
    )
    assert _why(deep(schedule="1f1b"))["virtual stages"] == ("no", "schedule=1f1b has one stage per slot")
    assert _why(deep(partition_num=4))["virtual stages"] == ("no", "set by partition_num=4")


def test_delayed_gradients_go_with_them() -> None:
    one, free = deep(weight=19 * MS, virtual_stages="1"), deep(weight=19 * MS)
    assert one.schedule == "zb_h1"
    assert (len(free.stages), free.schedule) == (8, "zb_v")
    assert free.step_us < (1 - VIRTUAL_GAIN) * one.step_us
    _runs(chain(24, param=SHARED), free)


def test_the_best_simulated_plan_is_taken() -> None:
    """Against all plans with two or four stages per slot, as bench/interleaving.py tries them."""
    free = deep(weight=19 * MS)
    forced = [
        deep(weight=19 * MS, virtual_stages=passes, schedule=schedule, pipeline_num=count, partition_num=stages)
        for schedule, passes in (("zb_v", "2"), ("interleaved_1f1b", "2"), ("interleaved_1f1b", "4"))
        for count in (1, 2)
        for stages in (2 * int(passes), 4 * int(passes))
    ]
    assert free.step_us == min(each.step_us for each in forced)
    assert len({each.step_us for each in forced}) == len(forced)


def test_what_saves_too_little_is_told_and_not_taken() -> None:
    one, free = deep(rows=32, virtual_stages="1"), deep(rows=32)
    assert len(one.stages) == len(free.stages)
    assert free.step_us == one.step_us
    told = _why(free)["virtual stages"]
    assert told[0] == "no"
    assert "3% that are asked for" in told[1] or "(3% are asked for)" in told[1]


def test_where_there_is_nothing_to_try_that_is_told() -> None:
    assert _why(deep(1))["virtual stages"] == ("no", "there is one device")
    few = _why(deep(graph=chain(3, param=SHARED)))["virtual stages"]
    assert few == ("no", "there are too few blocks, or devices in a pipeline")


def test_small_models_pay_the_host_for_more_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"forward": 0.05 * MS, "graph": chain(24, param=SHARED // 100)}
    small = deep(**given)
    assert _why(small)["virtual stages"][0] == "no"
    monkeypatch.setattr(virtual_plans, "HOST_US", 0.0)
    assert len(small.stages) < len(deep(**given).stages) == 16


def test_few_plans_are_cut_and_simulated(made: list[str]) -> None:
    deep(8, weight=19 * MS, rows=32)
    deep(8, weight=19 * MS)
    assert made.count("simulated") <= 2 * (virtual_search.MOST_PLAYED + 2)
    assert made.count("costs_of") <= 4 * virtual_search.MOST_CUT
    made.clear()
    deep(8, graph=chain(24, param=10))  # data parallel, without a bubble
    assert made.count("simulated") <= 1
    assert "deployment" not in made


def test_what_brings_more_has_to_save_more() -> None:
    plain = RunMode("1f1b")
    assert virtual_gain(RunMode("interleaved_1f1b"), plain) == VIRTUAL_GAIN
    assert virtual_gain(RunMode("interleaved_1f1b", 3), plain) == LEAST_GAIN
    assert virtual_gain(RunMode("interleaved_1f1b", 3), RunMode("1f1b", 1)) == VIRTUAL_GAIN
    assert virtual_gain(RunMode("zb_v"), plain) == LEAST_GAIN
    assert virtual_gain(RunMode("zb_v"), RunMode("zb_h1")) == VIRTUAL_GAIN


# -- forced ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "schedule", "stages"),
    [
        ({"virtual_stages": "2"}, "interleaved_1f1b", 8),
        ({"virtual_stages": "4"}, "interleaved_1f1b", 16),
        ({"virtual_stages": "2", "schedule": "zb_v"}, "zb_v", 8),
        ({"schedule": "zb_v"}, "zb_v", 8),
        ({"schedule": "interleaved_1f1b"}, "interleaved_1f1b", 16),
        ({"virtual_stages": "2", "partition_num": 4}, "interleaved_1f1b", 4),
        ({"virtual_stages": "4", "replica_num": 2}, "interleaved_1f1b", 8),
        ({"virtual_stages": "2", "replica_num": 2, "partition_num": 4, "pipeline_num": 1}, "interleaved_1f1b", 4),
        ({"virtual_stages": "2", "offload_optimizer": "true"}, "interleaved_1f1b", 8),
        ({"virtual_stages": "2", "checkpointing": True}, "interleaved_1f1b", 8),
    ],
)
def test_as_many_as_are_asked_for(items: dict[str, object], schedule: str, stages: int) -> None:
    found = deep(**items)  # type: ignore[arg-type]
    assert (found.schedule, len(found.stages)) == (schedule, stages)
    _runs(chain(24, param=SHARED), found)
    each = items.get("virtual_stages", "4" if stages == 16 else "2")
    name = "virtual_stages" if "virtual_stages" in items else "schedule"
    assert _why(found)["virtual stages"] == (each, f"set by {name}={items[name]}")
    assert found.offload == (items.get("offload_optimizer") == "true")
    assert found.stages[0].recompute == bool(items.get("checkpointing"))
    assert found.microbatches == items.get("pipeline_num", found.microbatches)
    text, sizes = show(found), device_bytes(found)
    assert f"{stages} stages, {each} on each device" in plan_line(found)
    assert "together per device" in text
    assert f"0:0      {', '.join(map(str, range(0, stages, 4)))}  " in text or len(sizes) < 4 or schedule == "zb_v"
    whole = sum(stage.estimate.total_bytes for stage in found.stages if 0 in stage.slots)
    assert max(stage.estimate.total_bytes for stage in found.stages) < fullest_bytes(found) <= whole


@pytest.mark.parametrize(
    ("world", "items", "message"),
    [
        (1, {"virtual_stages": "2"}, "no plan with 2 stages per slot (virtual_stages=2, schedule=auto) for 1 device: "),
        (4, {"virtual_stages": "2", "partition_num": 3}, "partition_num=3 counts all stages"),
        (4, {"virtual_stages": "4", "partition_num": 6}, "partition_num=6 counts all stages"),
        (4, {"virtual_stages": "2", "replica_num": 4}, "replica_num=4"),
        (4, {"virtual_stages": "2", "schedule": "1f1b"}, "schedule=1f1b has one stage per slot, but virtual_stages=2"),
        (4, {"virtual_stages": "1", "schedule": "zb_v"}, "schedule=zb_v has several stages per slot, but virtual_stag"),
        (4, {"virtual_stages": "4", "schedule": "zb_v"}, "schedule=zb_v cannot have virtual_stages=4"),
        (4, {"virtual_stages": "3"}, "virtual_stages='3'; use one of auto, 1, 2, 4"),
    ],
)
def test_what_is_impossible_is_named(world: int, items: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        deep(world, **items)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_backward_after_the_call_excludes_them() -> None:
    graph = chain(8)
    for items in ({"virtual_stages": "2"}, {"schedule": "zb_v"}):
        options = PlanOptions(**items)  # type: ignore[arg-type]
        blocks = make_blocks(Partitioning.of(graph), options, world=2)
        each = BlockCost(Size(0, 1), Size(0, 1), Size(0, 1))
        with pytest.raises(PlanError, match="needs a backward inside the call: the model has to return its loss"):
            plan(
                graph, blocks, CostTable((each,) * len(blocks), LinkCost(1, 1, 1, 1)), world=2,
                slots=(Slot(0, 0), Slot(0, 1)), batch_rows=8, memory_bytes=PLENTY, options=options, interleaved=False,
            )  # fmt: skip


def test_more_stages_need_more_parts() -> None:
    with pytest.raises(PlanError, match="not more stages than the 3 parts"):
        deep(graph=chain(3), virtual_stages="2")
    assert len(deep(2, graph=chain(8), virtual_stages="4", max_partition_num=8).stages) == 8


def test_what_does_not_fit_names_the_memory_of_what_was_tried() -> None:
    with pytest.raises(DoesNotFitError, match=r"no plan with 2 stages per slot .* fits 4 devices") as caught:
        deep(virtual_stages="2", memory=10**6, offload_optimizer="false")
    found = deep(virtual_stages="2", memory=caught.value.needed, offload_optimizer="false")
    assert fullest_bytes(found) <= caught.value.needed
    offloaded = deep(virtual_stages="2", memory=caught.value.needed * 9 // 10)
    assert offloaded.offload
    assert _why(offloaded)["offload"] == ("yes", "no plan fits without it")
    for schedule in ("interleaved_1f1b", "zb_v"):  # the second cannot have ZeRO 3, which offloaded parameters need
        with pytest.raises(DoesNotFitError, match="the smallest one that was tried needs"):
            deep(schedule=schedule, memory=1, zero_stage="auto")


def test_a_forced_plan_is_looked_for_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_search, "MOST_CUT", 1)
    given: dict[str, Any] = {
        "virtual_stages": "2",
        "graph": chain(24, param=SHARED // 40),
        "offload_optimizer": "false",
    }
    first, small = deep(**given), deep(partition_num=8, **given)
    assert len(first.stages) == 4
    assert fullest_bytes(small) < 0.6 * fullest_bytes(first)
    assert len(deep(memory=fullest_bytes(small), **given).stages) == 8


def test_coupled_rows_run_whole() -> None:
    coupled = msgspec.structs.replace(chain(24, param=SHARED), rows_coupled=True)
    found = deep(graph=coupled, virtual_stages="2")
    assert found.microbatches == 1
    _runs(coupled, found)


def test_stages_begin_at_cut_points_only() -> None:
    graph = chain(24, param=SHARED)
    marked = msgspec.structs.replace(
        graph, ops=tuple(msgspec.structs.replace(op, segment=number // 3) for number, op in enumerate(graph.ops))
    )
    found = deep(graph=marked, virtual_stages="2")
    assert {int(stage.ops[0].removeprefix("op")) % 3 for stage in found.stages} == {0}
    with pytest.raises(PlanError, match=r"no plan with 4 stages per slot .* the 8 parts that the model may be"):
        deep(graph=marked, virtual_stages="4", replica_num=1)


def test_shared_parameters_are_held_once_by_a_slot() -> None:
    """A tied embedding is in the first and the last stage, which are those of one slot under zb_v."""

    def tied(shared: bool) -> TaskGraph:
        builder = GraphBuilder()
        embedding = builder.param(LARGE)
        value = builder.input()
        for index in range(24):
            ends = index in (0, 23)
            own = embedding if ends and shared else builder.param(LARGE if ends else SHARED)
            value = builder.op([value], params=[own], output=index == 23, module=f"layers.{index}")
        return builder.build()

    whole, once = (deep(graph=tied(shared), schedule="zb_v", partition_num=8) for shared in (False, True))
    first, last = (stage.estimate for stage in (once.stages[0], once.stages[-1]))
    assert first.param_bytes == whole.stages[0].estimate.param_bytes
    assert last.param_bytes == whole.stages[-1].estimate.param_bytes - LARGE
    assert last.optimizer_bytes == whole.stages[-1].estimate.optimizer_bytes - 2 * LARGE
    apart = whole.stages[-1].estimate
    assert last.total_bytes - last.whole_bytes == apart.total_bytes - apart.whole_bytes - 5 * LARGE
    tight = deep(graph=tied(True), schedule="zb_v", partition_num=8, memory=fullest_bytes(once))
    assert tight.stages == once.stages, "what is held once needs no memory twice"
