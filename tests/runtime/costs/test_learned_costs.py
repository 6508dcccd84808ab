"""What measured steps say of costs, from the cache and for the next plan."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from plan_graphs import GraphBuilder

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.grains import make_grains
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.profile.costs import CostTable, LinkCost, RuntimeCost
from rannd.profile.points import Measured, Point
from rannd.runtime.costs.correction import Correction, class_of
from rannd.runtime.costs.known_costs import MeasuredParts, with_costs
from rannd.runtime.costs.learned_costs import LEARNED_FORMAT, MOST_STAGES, LearnedCosts, StageTook

ROWS = 8


def layers() -> TaskGraph:
    """Four products and four sums in turns, each a grain."""
    builder = GraphBuilder()
    value = builder.input()
    for layer in range(4):
        value = builder.op([value], params=[builder.param(1000)], flops=100_000)
        value = builder.op([value], params=[builder.param(10)], flops=10, target="aten::layer_norm", output=layer == 3)
    return builder.build()


@pytest.fixture
def parts() -> MeasuredParts:
    graph = layers()
    return MeasuredParts(graph, make_grains(graph, make_atoms(graph)))


@pytest.fixture
def profile(parts: MeasuredParts) -> dict[str, Measured]:
    """1,000 and 2,000 us of products, 100 and 300 us of sums; 10 us to accumulate."""
    found = {}
    for key, alike in parts.wanted([tuple(range(8))]).items():
        times = (1000.0, 2000.0) if parts.task.ops[alike[0][0]].target == "aten::linear" else (100.0, 300.0)
        few = Point(ROWS // 4, 0.4 * times[0], 0.5 * times[1], 0.0, 0.0)
        found[key] = Measured((few, Point(ROWS, *times, 0.0, 0.0)), add_us=10.0)
    return found


def by_class(kinds: Mapping[str, float]) -> dict[str, float]:
    """Sums of kinds that are of one class."""
    return {name: sum(us for kind, us in kinds.items() if class_of(kind) == name) for name in map(class_of, kinds)}


def blocks_of(parts: MeasuredParts) -> tuple[Block, ...]:
    return make_blocks(Partitioning.of(parts.task), PlanOptions(), world=2)


def test_the_work_of_stages_is_that_of_their_parts_by_kind(parts: MeasuredParts, profile: dict[str, Measured]) -> None:
    first, second = parts.work([(0, 1, 2), (3, 4, 5, 6, 7)], profile, ROWS, ROWS)
    assert by_class(first.forward_us) == {"products": 2000.0, "others": 100.0}
    assert by_class(second.backward_us) == {"products": 4000.0, "others": 900.0}
    assert len(second.backward_us) == 2, "parts that are alike are of one kind"
    assert len(first.forward_us) == 3, "the first product has the model's input"
    assert (first.add_us, second.add_us) == (30, 50)
    (part,) = parts.work([(2,)], profile, 2 * ROWS, 2 * ROWS)
    assert by_class(part.forward_us) == {"products": pytest.approx(200 + 16 * 100)}
    (part,) = parts.work([(2,)], profile, 1, ROWS)
    assert by_class(part.forward_us) == {"products": pytest.approx(200 + 100)}, "as the planner has it"
    with pytest.raises(KeyError):
        parts.work([(0,)], {}, ROWS, ROWS)


def test_costs_of_blocks_are_corrected_by_kind(parts: MeasuredParts, profile: dict[str, Measured]) -> None:
    blocks = blocks_of(parts)
    plain = parts.costs(blocks, profile, ROWS, Correction())
    found = parts.costs(blocks, profile, ROWS, Correction({"products": 2.0}, {"others": 3.0}))
    assert sum(each.forward_us.at(ROWS) for each in plain) == pytest.approx(4400)
    assert sum(each.forward_us.at(ROWS) for each in found) == pytest.approx(8400)
    assert sum(each.backward_us.at(ROWS) for each in found) == pytest.approx(8000 + 3 * 1200)
    assert [each.add_us for each in found] == [each.add_us for each in plain]


def test_what_stages_took_becomes_a_correction_of_what_is_measured_now(
    parts: MeasuredParts, profile: dict[str, Measured]
) -> None:
    took = [
        StageTook((0, 1, 2, 3), ROWS, ROWS, 1.3 * 2200, 1.3 * 4600),
        StageTook((4, 5, 6, 7), ROWS, ROWS, 1.3 * 2200, 1.3 * 4600),
    ]
    learned = LearnedCosts().and_those(took, doubts=False)
    correction = learned.correction(parts, profile)
    assert correction.forward_us({"products": 1000.0}) == pytest.approx(1300, rel=0.05)
    # Measured anew, without what had made the parts look quicker: nothing is left to correct.
    right = {
        key: Measured(
            tuple(Point(each.rows, 1.3 * each.forward_us, 1.3 * each.backward_us, 0, 0) for each in old.points)
        )
        for key, old in profile.items()
    }
    assert learned.correction(parts, right).forward_us({"products": 1000.0}) == pytest.approx(1000, rel=0.03)
    assert learned.correction(parts, {}) == Correction(), "their parts are not known"
    assert LearnedCosts().correction(parts, profile) == Correction()


def test_the_latest_stages_are_kept() -> None:
    learned = LearnedCosts()
    for number in range(1, MOST_STAGES + 1):
        new = [StageTook((op,), number, MOST_STAGES, float(number), 1.0) for op in (0, 1)]
        learned = learned.and_those(new, doubts=True)
    assert len(learned.stages) == MOST_STAGES
    assert learned.stages[0].forward_us == MOST_STAGES
    assert learned.doubts == MOST_STAGES
    assert learned.is_plausible(2)
    for _ in range(MOST_STAGES):
        again = learned.and_those([StageTook((0,), MOST_STAGES, MOST_STAGES, 7.0, 1.0)], doubts=False)
    assert again.stages[0].forward_us == 7.0
    assert set(again.stages[1:]) == set(learned.stages[1:]), "a plan that runs often displaces none"


@pytest.mark.parametrize(
    "wrong",
    [
        LearnedCosts(LEARNED_FORMAT + 1),
        LearnedCosts(doubts=-1),
        LearnedCosts(stages=(StageTook((0, 8), 1, 1, 1.0, 1.0),)),
        LearnedCosts(stages=(StageTook((0, 0), 1, 1, 1.0, 1.0),)),
        LearnedCosts(stages=(StageTook((0,), 0, 1, 1.0, 1.0),)),
        LearnedCosts(stages=(StageTook((0,), 1, 1, 0.0, 1.0),)),
        LearnedCosts(stages=(StageTook((0,), 1, 1, 1.0, float("inf")),)),
        LearnedCosts(stages=(StageTook((0,), 1, 1, 1.0, 1.0),) * (MOST_STAGES + 1)),
    ],
)
def test_what_cannot_have_been_learned_is_known(wrong: LearnedCosts) -> None:
    data = msgspec.msgpack.encode(wrong)
    assert not msgspec.msgpack.decode(data, type=LearnedCosts).is_plausible(8)


def test_a_deployment_with_other_costs(parts: MeasuredParts, profile: dict[str, Measured]) -> None:
    blocks = blocks_of(parts)
    link = LinkCost(1, 1e6, 1, 1e6)

    def planned(correction: Correction) -> Deployment:
        costs = CostTable(
            parts.costs(blocks, profile, 4 * ROWS, correction), link, None, RuntimeCost(correction.action_us, 0.0)
        )
        return plan(
            parts.task,
            blocks,
            costs,
            world=2,
            slots=(Slot(0, 0), Slot(0, 1)),
            batch_rows=8 * ROWS,
            memory_bytes=10**12,
            options=PlanOptions(partition_num=2, pipeline_num=16, schedule="1f1b"),
        )

    correction = Correction({"products": 1.5, "others": 1.5}, {"products": 1.2, "others": 1.2}, 20.0)
    plain, wanted = planned(Correction()), planned(correction)
    found = with_costs(parts.task, plain, parts, profile, correction)
    for one, other in zip(found.stages, wanted.stages, strict=True):
        assert one.ops == other.ops
        assert one.estimate.forward_us == pytest.approx(other.estimate.forward_us)
        assert one.estimate.backward_us == pytest.approx(other.estimate.backward_us)
