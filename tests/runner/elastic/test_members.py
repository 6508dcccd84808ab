"""Which hosts take part in the next start."""

from __future__ import annotations

import pytest

from rannd.runner.elastic import members
from rannd.runner.elastic.members import Members, size_of, words
from rannd.runner.resources.host_list import Host

A, B, C = Host("a", 2), Host("b", 4), Host("c", 1)


def _members(*named: Host, least: int = 1, most: int = 0) -> Members:
    made = Members(least, most)
    made.name(named)
    return made


def test_all_slots_are_used_up_to_the_maximum() -> None:
    assert _members(A, B, C).chosen() == [A, B, C]
    assert _members(A, B, C, most=5).chosen() == [A, Host("b", 3)]
    assert _members(A, B, C, most=2).chosen() == [A]


def test_a_script_that_can_have_few_ranks_gets_no_more() -> None:
    made = _members(A, B, C, most=6)
    made.possible = 3
    assert made.chosen() == [A, Host("b", 1)]


def test_too_few_slots_are_none() -> None:
    assert _members(A, C, least=4).chosen() == []
    assert _members(A, C, least=3).chosen() == [A, C]
    assert _members().chosen() == []


def test_a_host_that_is_left_out_is_back_when_its_entry_changes() -> None:
    made = _members(A, B, C)
    made.leave_out("b")
    assert made.left_out == ["b"]
    assert made.chosen() == [A, C]
    made.name([A, B, C])
    assert made.chosen() == [A, C], "other lines may have changed"
    made.name([A, Host("b", 3), C])
    assert made.chosen() == [A, Host("b", 3), C]
    made.leave_out("b")
    made.name([A, C])
    made.name([A, B, C])
    assert made.chosen() == [A, B, C], "it was removed, and named again"


def test_a_host_that_is_left_out_may_try_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _members(A, B)
    monkeypatch.setattr(members, "RETRY_S", 0.0)
    made.leave_out("a")
    assert made.chosen() == [A, B]


def test_a_host_that_nobody_named_is_not_left_out() -> None:
    made = _members(A)
    made.leave_out("z")
    assert made.left_out == []


def test_a_host_is_spared_if_enough_slots_are_left() -> None:
    made = _members(A, B, C, least=4)
    assert made.spare("c")
    assert made.chosen() == [A, B]
    assert made.spare("a")
    assert made.chosen() == [B]
    assert not made.spare("b")
    assert made.chosen() == [B]


def test_words() -> None:
    assert size_of([A, B]) == 6
    assert words([A, B]) == "6 ranks on a:2, b:4"
    assert words([C]) == "1 rank on c:1"
