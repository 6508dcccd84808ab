"""What a deployment says to schedules and to the simulator."""

from __future__ import annotations

import msgspec
import pytest
from plan_graphs import GraphBuilder

from rannd.errors import DeploymentError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.deployment import FORMAT, Deployment, Slot, Stage, StageEstimate
from rannd.plan.simulate.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate.step_costs import BUCKET, FIRST_BUCKET, bucket_sizes
from rannd.profile.costs import LinkCost

NEAR = LinkCost(p2p_latency_us=1, p2p_bytes_per_us=100, allreduce_latency_us=2, allreduce_bytes_per_us=50)
FAR = LinkCost(p2p_latency_us=10, p2p_bytes_per_us=10, allreduce_latency_us=20, allreduce_bytes_per_us=5)
MIB = 1 << 20


def tied_graph(own: int = 400) -> TaskGraph:
    """Three ops in a row, the first of which is read by the last one too; the first and the last share a parameter."""
    builder = GraphBuilder()
    shared = builder.param(1000)
    value = builder.input(8)
    first = builder.op([value], params=[shared, builder.param(own)], size=100)
    second = builder.op([first], params=[builder.param(7, trainable=False)], size=200)
    builder.op([second, first], params=[shared], size=4, output=True)
    return builder.build()


def estimate(**changes: float) -> StageEstimate:
    given = {
        "forward_us": 80.0,
        "backward_us": 240.0,
        "allreduce_us": 0.0,
        "input_bytes": 0,
        "output_bytes": 30,
        "param_bytes": 10,
        "grad_bytes": 20,
        "activation_bytes": 600,
        "optimizer_bytes": 40,
        "comm_bytes": 0,
        "total_bytes": 0,
        "pieces": 8,
        "in_flight": 3,
        "weight_us": 96.0,
    }
    return StageEstimate(**(given | changes))  # type: ignore[arg-type]


def deployment(nodes: tuple[int, ...] = (0, 0, 0, 0), **changes: object) -> Deployment:
    """Op 0 on slots 0 and 1, op 1 on slot 2, op 2 on slot 3; two rows a piece."""
    given: dict[str, object] = {
        "format": FORMAT,
        "graph_hash": "hash",
        "slots": tuple(Slot(node, device) for device, node in enumerate(nodes)),
        "stages": (
            Stage("MERGE_0_0", ("op0",), (0, 1), False, estimate(pieces=4)),
            Stage("MERGE_1_1", ("op1",), (2,), True, estimate(weight_us=0.0)),
            Stage("MERGE_2_2", ("op2",), (3,), False, estimate()),
        ),
        "microbatches": 2,
        "schedule": "1f1b",
        "batch_rows": 16,
        "step_us": 0.0,
    }
    return Deployment(**(given | changes))  # type: ignore[arg-type]


def test_a_layout_knows_edges_and_tied_stages() -> None:
    layout = layout_of(tied_graph(), deployment())
    assert layout.edges == ((-1, 0), (0, 1), (0, 2), (1, 2), (2, 3))
    assert layout.grad_edges == ((0, 1), (0, 2), (1, 2), (2, 3))
    assert layout.tied == ((0, 2),)
    assert loss_layout(layout).grad_edges == ((0, 1), (0, 2), (1, 2))
    assert loss_layout(layout).tied == layout.tied


def test_costs_are_those_of_one_piece() -> None:
    costs = step_costs(tied_graph(), deployment(), NEAR)
    assert costs.forward_us == (20, 10, 10)
    assert costs.backward_us == (60, 30, 30)
    assert costs.weight_us == (24, 0, 12)
    assert costs.split == {0, 2}
    assert costs.values_us == {(-1, 0): 1.16, (0, 1): 3, (0, 2): 3, (1, 2): 5, (2, 3): 1.08}
    assert costs.values_bytes == {(-1, 0): 16, (0, 1): 200, (0, 2): 200, (1, 2): 400, (2, 3): 8}
    assert costs.state_bytes == (70, 70, 70)
    # Three pieces in flight have 600 bytes, also what a stage keeps that recomputes.
    assert costs.kept_bytes == costs.weight_bytes == (230, 230, 230)
    assert costs.working_bytes == (0, 0, 0)


def test_without_a_number_of_pieces_all_are_in_flight() -> None:
    stages = [
        Stage(each.name, each.ops, each.slots, False, estimate(pieces=1, in_flight=1)) for each in deployment().stages
    ]
    costs = step_costs(tied_graph(), deployment(stages=tuple(stages)), NEAR)
    assert costs.forward_us == (20, 10, 10)
    assert costs.kept_bytes == (180, 105, 105)


def test_reductions_are_over_those_who_hold_a_parameter() -> None:
    costs = step_costs(tied_graph(), deployment(), NEAR)
    assert costs.reduce_us == ((NEAR.allreduce_us(400, 2),), (), ())
    assert costs.tied_us == ((NEAR.allreduce_us(1000, 3),),)


def test_what_processors_do_for_messages_and_reductions_is_not_on_the_links() -> None:
    link = msgspec.structs.replace(NEAR, p2p_host_us=0.2 / NEAR.p2p_bytes_per_us, allreduce_host_us=0.001)
    costs = step_costs(tied_graph(), deployment(), link)
    assert costs.byte_us == link.p2p_host_us
    assert (
        costs.values_us[0, 1] == link.p2p_us(200) == pytest.approx(NEAR.p2p_us(200) - 0.4 * 200 / link.p2p_bytes_per_us)
    )
    (own, own_host), (tied, tied_host) = link.reduction_us(400, 2), link.reduction_us(1000, 3)
    assert (costs.reduce_us[0], costs.tied_us) == ((own,), ((tied,),))
    assert own + own_host == pytest.approx(NEAR.allreduce_us(400, 2))
    assert own_host == pytest.approx(0.4)
    (shared,) = layout_of(tied_graph(), deployment()).tied
    expected = [(own_host if stage == 0 else 0) + (tied_host if stage in shared else 0) for stage in range(3)]
    assert costs.after_us == pytest.approx(tuple(expected))


def test_far_links_are_for_slots_of_different_nodes() -> None:
    costs = step_costs(tied_graph(), deployment((0, 0, 1, 1)), NEAR, FAR)
    assert costs.nodes == (0, 0, 1, 1)
    assert costs.values_us[0, 1] == NEAR.p2p_us(200)
    assert costs.far_values_us is not None
    assert costs.far_values_us[0, 1] == FAR.p2p_us(200)
    assert costs.far_grads_us is not None
    assert costs.far_grads_us[0, 1] == FAR.p2p_us(200)
    assert costs.reduce_us[0] == (NEAR.allreduce_us(400, 2),)
    assert costs.tied_us == ((FAR.allreduce_us(1000, 3),),)


def test_large_gradients_are_reduced_in_buckets() -> None:
    graph = tied_graph(own=60 * MIB)
    sizes = (1 * MIB, 25 * MIB, 25 * MIB, 9 * MIB)
    assert step_costs(graph, deployment(), NEAR).reduce_us[0] == tuple(NEAR.allreduce_us(size, 2) for size in sizes)
    assert step_costs(graph, deployment(), NEAR, overlap=False).reduce_us[0] == (NEAR.allreduce_us(60 * MIB, 2),)


@pytest.mark.parametrize("nbytes", [0, 1, FIRST_BUCKET, FIRST_BUCKET + 1, FIRST_BUCKET + BUCKET, 10 * BUCKET])
def test_buckets_hold_everything(nbytes: int) -> None:
    sizes = bucket_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert all(0 < size <= BUCKET for size in sizes)


def test_another_model_s_deployment_is_refused() -> None:
    with pytest.raises(DeploymentError, match="belongs to another model"):
        layout_of(tied_graph(), deployment(stages=deployment().stages[:2]))
