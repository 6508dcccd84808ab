from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from plan_graphs import GraphBuilder, chain, costs_for, transformer
from plan_instances import Instance, deploy

from rannd.errors import DeploymentError, DoesNotFitError, PlanError
from rannd.graph.fx.ir import Size, TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.compatibility import check_belongs
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.plan_lines import alternative_lines, assignment_lines, estimate_lines
from rannd.plan.run_modes import RunMode
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.schedules import gpipe
from rannd.plan.search.candidates import even_starts
from rannd.plan.search.planner import PlanOptions, microbatch_counts, plan
from rannd.plan.search.ranking import simulated_us
from rannd.plan.simulate.layout import layout_of
from rannd.plan.topology import place
from rannd.profile.costs import BlockCost, CostTable, LinkCost


def test_the_tutorial_s_small_model_is_data_parallel() -> None:
    deployment = deploy(chain(10), 2)
    assert estimate_lines(deployment) == [
        "Estimated profiles of subgraphs: batch_size=128 np=2 pipeline=1 use_amp=0 zero=0",
        "  graph=MERGE_0_9 repl=2 fwd_time=64000 bwd_time=128000 ar_time=40 in_size=6400 out_size=6400 "
        "fp32param_size=10000 fp16param_size=0 total_mem=733000 (fwd+bwd=693800 opt=20000 comm=19200)",
    ]
    assert assignment_lines(deployment, [1, 0]) == ["Assigned subgraph MERGE_0_9 to rank[1,0]"]
    assert deployment.schedule == "1f1b"


def test_less_memory_makes_stages() -> None:
    graph = chain(10, param=100_000)
    whole = deploy(graph, 2).stages[0].estimate.total_bytes
    deployment = deploy(graph, 2, memory=whole * 3 // 4, zero_stage="0")
    assert [stage.name for stage in deployment.stages] == ["MERGE_0_4", "MERGE_5_9"]
    assert max(stage.estimate.total_bytes for stage in deployment.stages) <= whole * 3 // 4


def test_forced_stages_replicas_and_microbatches() -> None:
    deployment = deploy(transformer(4), 4, partition_num=3, pipeline_num=4)
    assert sorted(len(stage.slots) for stage in deployment.stages) == [1, 1, 2]
    assert deployment.microbatches == 4
    deployment = deploy(transformer(4), 6, replica_num=3)
    assert [len(stage.slots) for stage in deployment.stages] == [3, 3]


def test_every_op_is_in_one_stage_and_the_program_holds() -> None:
    graph = transformer(4)
    deployment = deploy(graph, 4, partition_num=3, pipeline_num=2)
    assert sorted(name for stage in deployment.stages for name in stage.ops) == sorted(op.name for op in graph.ops)
    assert decode(encode(deployment)) == deployment
    check(gpipe(layout_of(graph, deployment)))


def test_edges_follow_the_values() -> None:
    builder = GraphBuilder()
    tokens = builder.input(8)
    mask = builder.input(8, grad=True)
    first = builder.op([tokens])
    second = builder.op([first, mask])
    third = builder.op([second], grad=False, output=True)
    builder.op([third, first], output=True)
    deployment = deploy(builder.build(), 4, partition_num=4)
    layout = layout_of(builder.build(), deployment)
    assert layout.edges == ((-1, 0), (-1, 1), (0, 1), (0, 3), (1, 2), (2, 3), (2, 4), (3, 4))
    assert layout.grad_edges == ((-1, 1), (0, 1), (0, 3), (1, 2), (3, 4))


def test_a_deployment_of_another_model_has_no_layout() -> None:
    with pytest.raises(DeploymentError, match="belongs to another model"):
        layout_of(chain(9), deploy(chain(10), 2))


def test_neighbouring_stages_get_neighbouring_slots() -> None:
    assert place([4], "stages") == ((0, 1, 2, 3),)
    # As in the tutorial: MERGE_0_4 on ranks 0, 2, 4, 6 and MERGE_5_9 on 1, 3, 5, 7.
    assert place([4, 4], "stages") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert place([2, 1], "stages") == ((0, 2), (1,))
    assert place([1, 3], "stages") == ((1,), (0, 2, 3))


def test_unused_parameters_are_counted_with_the_first_stage() -> None:
    builder = GraphBuilder()
    left, extra = builder.input(), builder.param(12_345)
    builder.op([builder.op([left])], output=True)
    with_extra = deploy(builder.build(unused=[extra]), 2, partition_num=2)
    without = deploy(builder.build(), 2, partition_num=2)
    sizes = [
        a.estimate.total_bytes - b.estimate.total_bytes for a, b in zip(with_extra.stages, without.stages, strict=True)
    ]
    assert sizes == [12_345, 0]
    assert with_extra.unused_params == ("p0",)


def test_what_does_not_fit_names_the_memory_that_would_do_and_the_block() -> None:
    builder = GraphBuilder()
    value = builder.input()
    for index, size in enumerate((1000, 50_000_000, 1000)):
        value = builder.op([value], params=[builder.param(size)], output=index == 2, module=f"layers.{index}")
    with pytest.raises(DoesNotFitError) as caught:
        deploy(builder.build(), 2, memory=10_000_000, mem_margin=0.0, zero_stage="0")
    message = str(caught.value)
    assert "no plan fits 2 devices: the best one needs 333.8 MiB of a device, recomputing included" in message
    assert "; the limit is 9.537 MiB. mem_limit_gb=0.326 (with mem_margin=0) would allow it" in message
    assert "block MERGE_1_1 (layers.1) needs most" in message
    assert deploy(builder.build(), 2, memory=int(0.326 * 1024**3)).stages


def opaque_graph() -> TaskGraph:
    builder = GraphBuilder()
    value = builder.op([builder.input()], params=[builder.param(1000)])
    value = builder.op([value], opaque="module inner (Deciding)")
    builder.op([value], params=[builder.param(50_000_000)], opaque="the autograd.Function net.Triple", output=True)
    return builder.build(rows_coupled=True)


@pytest.mark.parametrize(
    ("world", "items"),
    [(8, {"partition_num": 8}), (2, {"pipeline_num": 2}), (2, {"memory": 1000})],
    ids=["stages", "microbatches", "memory"],
)
def test_code_that_cannot_be_cut_is_named(world: int, items: dict[str, Any]) -> None:
    with pytest.raises((PlanError, DoesNotFitError)) as caught:
        deploy(opaque_graph(), world, **items)
    told = "Nothing inside module inner (Deciding), the autograd.Function net.Triple can be split over stages"
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("world", "items", "message"),
    [
        (4, {"partition_num": 2, "replica_num": 3}, "partition_num=2 times replica_num=3 is 6, but there are 4"),
        (4, {"replica_num": 3}, "replica_num=3 does not divide 4 devices; use one of [1, 2, 4]"),
        (2, {"partition_num": 3}, "3 stages for 2 devices; use partition_num=2 at most"),
        (12, {"partition_num": 11}, "into 10 blocks only; use at most 10 stages"),
        (12, {"replica_num": 1}, "into 10 blocks only; use at most 10 stages"),
        (7, {"partition_num": 2, "limit_dev_num_pot": True}, "set limit_dev_num_pot=false"),
        (2, {"min_pipeline_bs": 65}, "leaves microbatches of 64 of a rank's 64 rows, fewer than min_pipeline_bs=65"),
        (2, {"pipeline_num": 16, "min_pipeline_bs": 5}, "take at most 12 microbatches"),
        (2, {"pipeline_num": 13, "min_pipeline_bs": 5}, "leaves microbatches of 4 of a rank's 64 rows"),
        (2, {"min_pipeline": 4, "max_pipeline": 2}, "min_pipeline=4 is above max_pipeline=2"),
        (2, {"max_partition_num": 3}, "min_partition_num=5 is above max_partition_num=3"),
        (2, {"partition_num": -1}, "partition_num=-1 is below 0"),
        (2, {"opt_param_factor": -1.0}, "opt_param_factor=-1.0 is negative"),
        (2, {"mem_margin": 1.0}, "mem_margin=1.0 is not in [0, 1)"),
    ],
)
def test_demands_that_clash_are_named(world: int, items: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        deploy(chain(10), world, **items)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_coupled_rows_run_in_whole_mini_batches() -> None:
    coupled = msgspec.structs.replace(chain(10), rows_coupled=True)
    assert deploy(coupled, 4, partition_num=4).microbatches == 1
    for items in ({"pipeline_num": 2}, {"min_pipeline": 2}):
        with pytest.raises(PlanError, match="couples the rows"):
            deploy(coupled, 4, **items)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"the rows of a batch \(index combines samples\), so each mini-batch has to"):
        microbatch_counts(PlanOptions(pipeline_num=2), rows_per_rank=4, coupled=True, reason="index combines samples")


def test_microbatches_double_while_there_are_rows() -> None:
    assert microbatch_counts(PlanOptions(), rows_per_rank=64, coupled=False) == [1, 2, 4, 8, 16, 32]
    assert microbatch_counts(PlanOptions(), rows_per_rank=5, coupled=False) == [1, 2, 4]
    assert microbatch_counts(PlanOptions(min_pipeline=3, max_pipeline=13), rows_per_rank=64, coupled=False) == [
        3,
        6,
        12,
    ]
    assert microbatch_counts(PlanOptions(min_pipeline_bs=3), rows_per_rank=9, coupled=False) == [1, 2]
    assert microbatch_counts(PlanOptions(min_pipeline_bs=3), rows_per_rank=12, coupled=False) == [1, 2, 4]
    assert microbatch_counts(PlanOptions(pipeline_num=7), rows_per_rank=5, coupled=False) == [7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": (Slot(0, 0),)}, "1 slots"),
        ({"slots": (Slot(0, 1), Slot(0, 0))}, "sorted"),
        ({"batch_rows": 0}, "0 rows"),
        ({"costs": costs_for(3)}, "costs of 3 blocks for a model of 10"),
        ({"graph": chain(11)}, "blocks hold 10 of 11 ops"),
    ],
)
def test_inputs_that_do_not_belong_together_are_refused(change: dict[str, object], message: str) -> None:
    graph = chain(10)
    given = {
        "graph": graph,
        "blocks": make_blocks(Partitioning.of(graph), PlanOptions(), world=2),
        "costs": costs_for(10),
        "world": 2,
        "slots": (Slot(0, 0), Slot(0, 1)),
        "batch_rows": 8,
        "memory_bytes": 10**12,
        "options": PlanOptions(),
    }
    with pytest.raises(PlanError) as caught:
        plan(**(given | change))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_same_plan_every_time() -> None:
    assert encode(deploy(transformer(6), 6)) == encode(deploy(transformer(6), 6))


def test_sixty_four_devices_take_seconds_at_most() -> None:
    graph = transformer(24)
    heavy = tuple(msgspec.structs.replace(param, bytes=param.bytes * 1000) for param in graph.params)
    began = time.process_time()
    deployment = deploy(msgspec.structs.replace(graph, params=heavy), 64)
    assert time.process_time() - began < 20
    assert len(deployment.stages) > 1


def test_of_the_best_plans_the_fastest_is_taken_and_the_others_are_told() -> None:
    graph = chain(8, param=100_000)
    free = deploy(graph, 4, ranked=True)
    assert [other.name for other in free.alternatives] == ["2 stages x 2, 32 microbatches", "4 stages, 32 microbatches"]
    for other, stages in zip(free.alternatives, (2, 4), strict=True):
        forced = deploy(graph, 4, partition_num=stages, replica_num=4 // stages, ranked=True)
        assert other.at_least, "it cannot win, and was not simulated"
        assert free.step_us <= other.step_us <= forced.step_us
        assert other.most_bytes == max(stage.estimate.total_bytes for stage in forced.stages)
        assert other.over_bytes == 0
    slower = [f"at least {other.step_us / free.step_us - 1:.1%} slower" for other in free.alternatives]
    assert [line.rpartition(": ")[2] for line in alternative_lines(free)] == slower


def test_what_does_not_fit_is_told_with_what_it_lacks() -> None:
    tight = deploy(chain(8, param=100_000), 4, memory=2_000_000, ranked=True, zero_stage="0", virtual_stages="1")
    assert len(tight.stages) == 4
    assert [other.name for other in tight.alternatives][-1] == "4-way data parallel"
    lacking = [other for other in tight.alternatives if other.over_bytes]
    assert lacking
    assert all(other.step_us == 0 and other.most_bytes == 2_000_000 + other.over_bytes for other in lacking)
    lines = alternative_lines(tight)
    assert any(line.startswith("Not chosen: 4-way") and line.endswith("GiB too much on each device") for line in lines)


def _freely(weight_us: float, memory: int, **items: object) -> Deployment:
    """A plan of four stages whose backward has a part that may be delayed, under the fastest schedule."""
    graph, options = chain(4), PlanOptions(partition_num=4, pipeline_num=2, **items)  # type: ignore[arg-type]
    blocks = make_blocks(Partitioning.of(graph), options, world=4)
    each = BlockCost(Size(30), Size(50), Size(0, 100_000), Size(weight_us))
    return plan(
        graph, blocks, CostTable((each,) * 4, LinkCost(0, 1e12, 0, 1e12)), world=4,
        slots=tuple(Slot(0, device) for device in range(4)), batch_rows=32, memory_bytes=memory, options=options,
        ranked=True,
    )  # fmt: skip


def test_a_free_schedule_is_the_one_that_is_simulated_fastest() -> None:
    plenty = 10**15
    free, forced = _freely(20, plenty), _freely(20, plenty, schedule="1f1b")
    assert (free.schedule, forced.schedule) == ("zb_h1", "1f1b")
    assert free.step_us < 0.95 * forced.step_us
    assert [stage.slots for stage in free.stages] == [stage.slots for stage in forced.stages]
    assert _freely(20, plenty, schedule="zb_h1").step_us == free.step_us
    assert _freely(0, plenty).schedule == "1f1b", "nothing can be delayed"
    assert _freely(0.5, plenty).schedule == "1f1b", "what is gained is not worth it"


def test_a_schedule_that_delays_gradients_is_not_combined_with_their_sharding() -> None:
    with pytest.raises(PlanError, match="'zb_h1' cannot be planned with ZeRO stage 2: gradients are sharded"):
        _freely(20, 10**15, schedule="zb_h1", zero_stage="2")
    assert _freely(20, 10**15, zero_stage="2").schedule == "1f1b"


def test_a_schedule_that_does_not_fit_is_not_taken() -> None:
    most = [
        max(stage.estimate.total_bytes for stage in each.stages) for each in (_freely(20, 10**15), _freely(0, 10**15))
    ]
    assert most[0] >= most[1]
    late = [_freely(20, 10**15).stages[-1].estimate, _freely(0, 10**15).stages[-1].estimate]
    assert late[0].total_bytes > late[1].total_bytes, "late stages keep as many microbatches as the first"
    assert _freely(20, most[0]).schedule == "zb_h1"
    if most[0] > most[1]:
        assert _freely(20, most[1]).schedule == "1f1b"


def test_run_modes_are_planned_if_asked_for() -> None:
    graph = chain(8, param=100_000)
    tight = deploy(graph, 4, memory=2_400_000, ranked=True, zero_stage="0", virtual_stages="1")
    assert (tight.schedule, tight.zero) == ("1f1b", 0)
    assert not [other.name for other in tight.alternatives if "ZeRO" in other.name]
    for way in (RunMode("zb_h1"), RunMode("zb_h1", 1), RunMode("1f1b", 3)):
        options = PlanOptions()
        blocks = make_blocks(Partitioning.of(graph), options, world=4)
        costs = costs_for(len(blocks))
        found = plan(
            graph, blocks, costs, world=4, slots=tuple(Slot(0, device) for device in range(4)), batch_rows=256,
            memory_bytes=2_400_000, options=options, way=way,
        )  # fmt: skip
        assert (found.schedule, found.zero) == (way.schedule, way.zero)
        assert decode(encode(found)) == found
        check_belongs(found, graph_hash=graph.graph_hash, world=4, rows=found.batch_rows)


def test_zero_is_chosen_where_memory_asks_for_it() -> None:
    given: dict[str, Any] = {"rows": 1, "max_pipeline": 1}
    plenty = deploy(chain(1, param=1_000_000), 2, **given)
    assert plenty.zero == 0
    tight = deploy(chain(1, param=1_000_000), 2, memory=6_100_000, zero_stage="1", **given)
    assert (tight.zero, len(tight.stages)) == (1, 1)
    assert tight.step_us >= deploy(chain(1, param=1_000_000), 2, memory=6_100_000, **given).step_us
    assert tight.stages[0].estimate.optimizer_bytes * 2 == plenty.stages[0].estimate.optimizer_bytes
    with pytest.raises(DoesNotFitError, match="recomputing, ZeRO 3 and offload_params included") as caught:
        deploy(chain(1, param=1_000_000), 2, memory=900_000, **given)
    assert "would do" not in str(caught.value)
    forced = deploy(chain(1, param=1_000_000), 2, zero_stage="1", **given)
    assert forced.zero == 1
    assert forced.step_us > plenty.step_us
    with pytest.raises(PlanError, match="need equally many replicas of all stages, which 2 stages"):
        deploy(chain(4), 3, zero_stage="2", partition_num=2)
    alone = deploy(chain(1, param=1_000_000), 1, zero_stage="1", **given)
    assert alone.zero == 0  # nobody to share with


def test_the_last_stage_can_be_left_out_of_recomputing() -> None:
    graph = transformer(4)
    every = deploy(graph, 3, partition_num=3, checkpointing=True)
    assert [stage.recompute for stage in every.stages] == [True] * 3
    but_last = deploy(graph, 3, partition_num=3, checkpointing=True, checkpointing_no_last=True)
    assert [stage.recompute for stage in but_last.stages] == [True, True, False]
    assert but_last.step_us < every.step_us
    alone = deploy(graph, 2, partition_num=1, checkpointing=True, checkpointing_no_last=True)
    assert [stage.recompute for stage in alone.stages] == [False]


def test_zero_bubble_with_zero_2_is_no_plan() -> None:
    instance = Instance(0, way=RunMode("zb_h1", 2))
    with pytest.raises(PlanError, match="schedule 'zb_h1' cannot be planned with ZeRO stage 2: gradients are sharded"):
        instance.plan()


def test_ranked_plans_are_never_slower_than_even_splits() -> None:
    faster = 0
    for seed in range(60):
        instance = Instance(seed, world=8, ops=8)
        given = dict(zip(("world", "slots"), (instance.world, instance.slots), strict=True))
        first, ranked = (
            plan(
                instance.graph, instance.blocks, instance.costs, **given, batch_rows=instance.batch_rows,
                memory_bytes=10**15, options=instance.options, interleaved=instance.interleaved, ranked=which,
            )
            for which in (False, True)
        )  # fmt: skip
        took = simulated_us(instance.graph, instance.costs, first, PlanOptions())
        assert ranked.step_us == simulated_us(instance.graph, instance.costs, ranked, PlanOptions()) <= took, seed
        assert first.e_us == first.step_us
        assert ranked.e_us >= first.e_us or ranked.schedule != first.schedule
        assert ranked.bound_us == (first.bound_us if ranked.schedule == first.schedule else 0.0)
        faster += ranked.step_us < took
        for stages in range(1, min(instance.world, len(instance.blocks)) + 1):
            sizes = [len(block.ops) for block in instance.blocks]
            starts = even_starts(sizes, stages)
            if instance.world % stages == 0 and starts:
                names = [other.name for other in ranked.alternatives]
                replicas = {len(stage.slots) for stage in ranked.stages}
                told = any(name.startswith((f"{stages} stages", f"{instance.world}-way")) for name in names)
                assert told or (len(ranked.stages) == stages and len(replicas) == 1), (seed, names)
    assert faster


def test_where_memory_ran_out_while_measuring_pieces_stay_smaller() -> None:
    """Of 64 rows a rank, one block has been measured with 9 at most, although 10 times that would fit by its bytes."""
    graph = chain(6)
    options = PlanOptions()
    blocks = make_blocks(Partitioning.of(graph), options, world=2)
    costs = costs_for(len(blocks))
    bounded = list(costs.blocks)
    bounded[3] = msgspec.structs.replace(bounded[3], most_rows=9)

    def made(**items: int) -> Deployment:
        return plan(
            graph,
            blocks,
            msgspec.structs.replace(costs, blocks=tuple(bounded)),
            world=2,
            slots=(Slot(0, 0), Slot(0, 1)),
            batch_rows=128,
            memory_bytes=1 << 40,
            options=PlanOptions(**items),
        )

    assert made().microbatches == 8
    assert made(partition_num=2).microbatches >= 8
    with pytest.raises(DoesNotFitError, match=r"MERGE_3_3 \(.*\) ran out of memory with 10 rows .* have 16 rows each"):
        made(max_pipeline=4)
