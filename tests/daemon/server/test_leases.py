"""One holder a key; first come, first served."""

from __future__ import annotations

from rannd.daemon.server.leases import Leases, Waiter


def waiter(token: str, pid: int = 1, deadline: float = 100.0) -> Waiter[str]:
    return Waiter(f"route-{token}", token, pid, deadline)


def test_one_holder_at_a_time() -> None:
    leases: Leases[str] = Leases()
    assert leases.grant("k", "a", 1, 0.0) is None
    standing = leases.grant("k", "b", 2, 1.0)
    assert standing is not None
    assert (standing.token, standing.pid, standing.since) == ("a", 1, 0.0)
    assert leases.grant("other", "b", 2, 1.0) is None


def test_asking_twice_is_asking_once() -> None:
    leases: Leases[str] = Leases()
    leases.grant("k", "a", 1, 0.0)
    assert leases.grant("k", "a", 1, 5.0) is None
    leases.wait("k", waiter("b"))
    leases.wait("k", waiter("b", deadline=200.0))
    assert leases.settle("k") == [waiter("b", deadline=200.0)]


def test_a_released_lease_goes_to_who_came_first() -> None:
    leases: Leases[str] = Leases()
    leases.grant("k", "a", 1, 0.0)
    leases.wait("k", waiter("b", 2))
    leases.wait("k", waiter("c", 3))
    assert not leases.release("k", "c"), "a waiter holds nothing, it leaves the queue"
    assert leases.release("k", "a")
    assert leases.next("k", 7.0) == waiter("b", 2)
    assert leases.held_by(2) == [("k", "b")]
    assert leases.release("k", "b")
    assert leases.next("k", 8.0) is None
    assert "k" not in leases


def test_a_stored_value_ends_the_lease() -> None:
    leases: Leases[str] = Leases()
    leases.grant("k", "a", 1, 0.0)
    leases.wait("k", waiter("b"))
    leases.wait("k", waiter("c"))
    assert leases.settle("k") == [waiter("b"), waiter("c")]
    assert leases.settle("k") == []
    assert not leases.release("k", "a")
    assert len(leases) == 0


def test_waiters_have_deadlines() -> None:
    leases: Leases[str] = Leases()
    assert leases.deadline() is None
    leases.grant("k", "a", 1, 0.0)
    leases.wait("k", waiter("b", deadline=10.0))
    leases.wait("k", waiter("c", deadline=5.0))
    assert leases.deadline() == 5.0
    assert leases.expired(4.9) == []
    assert leases.expired(5.0) == [("k", waiter("c", deadline=5.0))]
    assert leases.deadline() == 10.0


def test_the_dead_wait_no_more() -> None:
    leases: Leases[str] = Leases()
    leases.grant("a", "first", 1, now=0.0)
    leases.wait("a", Waiter("two", "second", 2, 1000.0))
    leases.wait("a", Waiter("three", "third", 3, 1000.0))
    leases.give_up(2)
    leases.release("a", "first")
    found = leases.next("a", 1.0)
    assert found is not None
    assert found.route == "three"
