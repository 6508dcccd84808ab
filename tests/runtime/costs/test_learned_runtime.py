"""What steps say of the runtime's own time, for plans of all graphs of a machine."""

from __future__ import annotations

import msgspec
import pytest

from rannd.plan.measured_step import MEASURED_FORMAT, EdgeWaits, Flight, MeasuredStep, RankTimes
from rannd.profile.costs import LinkCost, RuntimeCost
from rannd.runtime.costs.learned_runtime import (
    CALL_US,
    EACH_US,
    MOST_FACTOR,
    MOST_HOSTS,
    MOST_REDUCTIONS,
    MOST_TRANSFERS,
    HostTook,
    LearnedRuntime,
    ReductionsTook,
    TransferTook,
)

GRAPH, OTHER = "a" * 64, "b" * 64


def steps(*hosts: tuple[int, float]) -> MeasuredStep:
    """Steps of ranks that handle so many messages, in so many microseconds."""
    ranks = [
        RankTimes(slot, 20, (), (EdgeWaits(0, 1, handled, 0.0),), us, 0, 0, 0, 0, 0, 0, 0, us)
        for slot, (handled, us) in enumerate(hosts)
    ]
    return MeasuredStep(MEASURED_FORMAT, tuple(ranks))


def test_before_anything_is_measured_usual_times_count() -> None:
    cost = LearnedRuntime().cost(GRAPH, 3.0, queued=False)
    assert cost.action_us == 3.0
    assert (cost.call_us, cost.host_us) == pytest.approx((CALL_US[0], EACH_US[0]))
    assert LearnedRuntime().cost(GRAPH, 3.0, queued=True) == RuntimeCost(3.0), "hosts that work ahead do not count"


def test_steps_of_several_plans_tell_calls_from_actions() -> None:
    learned = LearnedRuntime()
    for handled in (2, 12, 40, 80):
        learned = learned.and_those(
            OTHER, steps((handled, 900.0 + 31.0 * handled), (handled, 990.0 + 31.0 * handled)), {}
        )
    assert len(learned.hosts) == 4, "of ranks that are alike, the quicker one counts"
    for graph, exactly in ((OTHER, 0.1), (GRAPH, 0.2)):
        cost = learned.cost(graph, 0.0, queued=False)
        assert cost.call_us + 2 * cost.host_us == pytest.approx(900 + 2 * 31, rel=exactly)
        assert cost.call_us + 60 * cost.host_us == pytest.approx(900 + 60 * 31, rel=exactly)


def test_a_single_plan_is_predicted_as_measured_and_counts_more_than_other_graphs() -> None:
    others = LearnedRuntime().and_those(OTHER, steps((10, 1000.0), (40, 2000.0)), {})
    learned = others.and_those(GRAPH, steps((20, 2000.0)), {})
    own, before = learned.cost(GRAPH, 0.0, queued=False), others.cost(GRAPH, 0.0, queued=False)
    assert own.call_us + 20 * own.host_us == pytest.approx(2000.0, rel=0.1)
    assert before.call_us + 20 * before.host_us < 1600.0
    other = learned.cost(OTHER, 0.0, queued=False)
    assert other.call_us + 40 * other.host_us == pytest.approx(2000.0, rel=0.1)


def test_no_time_is_negative() -> None:
    few_or_many = LearnedRuntime().and_those(GRAPH, steps((10, 1.0), (1000, 200_000.0)), {})
    assert few_or_many.cost(GRAPH, 0.0, queued=False).call_us == 0
    all_alike = LearnedRuntime().and_those(GRAPH, steps((10, 20_000.0), (1000, 1.0)), {})
    assert all_alike.cost(GRAPH, 0.0, queued=False).host_us == 0


def test_hosts_that_have_recorded_nothing_say_nothing() -> None:
    assert LearnedRuntime().and_those(GRAPH, steps((10, 0.0), (20, 0.0)), {}) == LearnedRuntime()


def test_the_latest_hosts_are_kept_once_each() -> None:
    learned = LearnedRuntime()
    for number in range(MOST_HOSTS + 9):
        learned = learned.and_those(GRAPH, steps((number, 1.0)), {})
    again = learned.and_those(GRAPH, steps((20, 2.0)), {})
    assert len(learned.hosts) == len(again.hosts) == MOST_HOSTS
    assert again.hosts[0] == HostTook(GRAPH[:16], 20, 2.0)
    assert [each.handled for each in again.hosts].count(20) == 1
    assert again.is_plausible


def test_what_plans_count_for_bytes_is_not_of_the_runtime() -> None:
    # Each rank has got 10 messages of 100 bytes, and sent as many.
    learned = LearnedRuntime().and_those(GRAPH, steps((10, 5000.0)), {(0, 1): 100}, byte_us=0.5)
    assert learned.hosts == (HostTook(GRAPH[:16], 10, 5000.0 - 2 * 10 * 100 * 0.5),)


NEAR, FAR = LinkCost(100.0, 1000.0, 50.0, 500.0), LinkCost(400.0, 100.0, 200.0, 50.0)


def sent(*flights: Flight) -> MeasuredStep:
    return MeasuredStep(MEASURED_FORMAT, (), flights)


def test_links_are_as_quick_as_messages_in_steps() -> None:
    assert LearnedRuntime().links(NEAR, FAR) == (NEAR, FAR)
    learned = LearnedRuntime()
    sizes = {(0, 1): 10**5, (1, 2): 10**6, (2, 3): 4 * 10**6}
    for edge, nbytes in sizes.items():
        took = 1.3 * NEAR.p2p_latency_us + 2.0 * nbytes / NEAR.p2p_bytes_per_us
        learned = learned.and_those(GRAPH, sent(Flight(*edge, False, took)), sizes)
    near, far = learned.links(NEAR, FAR)
    assert far == FAR, "nothing went from one node to another"
    for nbytes in sizes.values():
        took = 1.3 * NEAR.p2p_latency_us + 2.0 * nbytes / NEAR.p2p_bytes_per_us
        assert near.p2p_us(nbytes) == pytest.approx(took, rel=0.1)
    assert near.allreduce_us(10**6, 4) == NEAR.allreduce_us(10**6, 4)
    between = learned.and_those(GRAPH, sent(Flight(0, 1, True, 0.5 * FAR.p2p_us(10**5))), sizes)
    assert between.links(NEAR, FAR)[0] == near
    assert between.links(NEAR, FAR)[1].p2p_us(10**5) == pytest.approx(0.5 * FAR.p2p_us(10**5), rel=0.15)
    assert between.links(NEAR, None) == (near, None)


def test_messages_of_the_same_size_are_known_once_and_wild_ones_change_little() -> None:
    learned = LearnedRuntime()
    for us in (1e9, 200.0):
        learned = learned.and_those(GRAPH, sent(Flight(0, 1, False, us), Flight(1, 2, False, 1.0)), {(0, 1): 10**5})
    assert learned.transfers == (TransferTook(False, 10**5, 200.0),), "nothing was sent on the other edge"
    wild = LearnedRuntime(transfers=(TransferTook(False, 10**5, 1e9),)).links(NEAR, None)[0]
    assert wild.p2p_us(10**5) <= MOST_FACTOR * NEAR.p2p_us(10**5)


def test_reductions_take_as_long_as_in_steps() -> None:
    copied = LinkCost(100.0, 1000.0, 50.0, 500.0, 1e-4, 2e-3)
    learned = LearnedRuntime()
    for buckets, nbytes in ((1, 10**5), (4, 10**6), (8, 10**7)):
        took = 0.8 * buckets * 50.0 + 1.5 * nbytes / 500.0
        learned = learned.and_those(GRAPH, sent(), {}, reduced=[ReductionsTook(False, buckets, nbytes, took)])
    near, far = learned.links(copied, FAR)
    assert far == FAR, "nothing was reduced between nodes"
    for nbytes in (10**6, 10**7):
        assert near.allreduce_us(nbytes, 2) == pytest.approx(0.8 * 50.0 + 1.5 * nbytes / 500.0, rel=0.05)
    assert near.allreduce_host_us == pytest.approx(1.5 * 2e-3, rel=0.05)
    assert (near.p2p_us(10**6), near.p2p_host_us) == (copied.p2p_us(10**6), 1e-4)
    between = learned.and_those(GRAPH, sent(), {}, reduced=[ReductionsTook(True, 1, 10**6, 1.5 * 10**6 / 50.0)])
    assert between.links(copied, FAR)[0] == near
    assert between.links(copied, FAR)[1].allreduce_us(10**6, 2) == pytest.approx(1.5 * 10**6 / 50.0, rel=0.1)


def test_the_same_reductions_are_known_once() -> None:
    learned = LearnedRuntime()
    for us in (9.0, 5.0):
        learned = learned.and_those(GRAPH, sent(), {}, reduced=[ReductionsTook(False, 2, 100, us)])
    assert learned.reductions == (ReductionsTook(False, 2, 100, 5.0),)
    for nbytes in range(MOST_REDUCTIONS + 3):
        learned = learned.and_those(GRAPH, sent(), {}, reduced=[ReductionsTook(False, 2, nbytes + 1, 5.0)])
    assert len(learned.reductions) == MOST_REDUCTIONS
    assert learned.is_plausible


@pytest.mark.parametrize(
    "wrong",
    [
        LearnedRuntime(9),
        LearnedRuntime(hosts=(HostTook("", -1, 1.0),)),
        LearnedRuntime(hosts=(HostTook("", 1, -1.0),)),
        LearnedRuntime(hosts=(HostTook("", 1, float("nan")),)),
        LearnedRuntime(hosts=(HostTook("", 1, 1.0),) * (MOST_HOSTS + 1)),
        LearnedRuntime(transfers=(TransferTook(False, 0, 1.0),)),
        LearnedRuntime(transfers=(TransferTook(False, 1, float("inf")),)),
        LearnedRuntime(transfers=(TransferTook(False, 1, 1.0),) * (MOST_TRANSFERS + 1)),
        LearnedRuntime(reductions=(ReductionsTook(False, 0, 1, 1.0),)),
        LearnedRuntime(reductions=(ReductionsTook(False, 1, 0, 1.0),)),
        LearnedRuntime(reductions=(ReductionsTook(False, float("nan"), 1, 1.0),)),
        LearnedRuntime(reductions=(ReductionsTook(False, 1, 1, -1.0),)),
        LearnedRuntime(reductions=(ReductionsTook(False, 1, 1, 1.0),) * (MOST_REDUCTIONS + 1)),
    ],
)
def test_what_cannot_have_been_measured_is_known(wrong: LearnedRuntime) -> None:
    data = msgspec.msgpack.encode(wrong)
    assert not msgspec.msgpack.decode(data, type=LearnedRuntime).is_plausible
