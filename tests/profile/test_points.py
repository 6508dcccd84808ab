"""What is measured, what that says of other numbers of rows, and profiles as files have them."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import GraphBuilder

from rannd.errors import ProfileError
from rannd.graph.fx.ir import Size
from rannd.profile.costs import BlockCost
from rannd.profile.graph_profile import FORMAT, GraphProfile, decode, encode
from rannd.profile.kept_values import Memory
from rannd.profile.points import Measured, Point, lacking, ladder, total


def at(*rows: int, fixed: float = 10.0) -> Measured:
    """A block that takes `fixed` and 2 us a row."""
    return Measured(tuple(Point(n, fixed + 2.0 * n, 3.0 * n, 1.0 * n, 100.0 * n) for n in rows))


def test_a_line_goes_through_the_points_that_are_nearest() -> None:
    bent = Measured((Point(1, 50, 0, 0, 0), Point(4, 56, 0, 0, 0), Point(16, 80, 0, 0, 0), Point(64, 400, 0, 0, 0)))
    assert bent.cost(16).forward_us == Size(48, 2)
    assert bent.cost(9).forward_us == Size(48, 2)
    assert bent.cost(64).forward_us.at(64) == pytest.approx(400)
    assert bent.cost(64).forward_us.at(16) == pytest.approx(80)
    assert bent.cost(64).forward_us.at(0) == 0, "each row takes longer than the one before"
    steep = Measured((Point(1, 1, 0, 0, 0), Point(4, 100, 0, 0, 0)))
    assert steep.cost(4).forward_us.at(4) == pytest.approx(100)
    assert steep.cost(4).forward_us.at(2) == pytest.approx(25)
    assert at(8).cost(8) == BlockCost(Size(0, 26 / 8), Size(0, 3), Size(0, 100), Size(0, 1)), "one point: proportional"
    falling = Measured((Point(1, 90, 0, 0, 0), Point(4, 60, 0, 0, 0)))
    assert falling.cost(4).forward_us == Size(60, 0), "never less with more rows"
    assert Measured((Point(2, 10, 0, 0, 0),), too_many=5).cost(8).most_rows == 4


@given(st.integers(1, 3000), st.integers(1, 3000), st.booleans())
def test_what_was_measured_for_larger_mini_batches_is_enough_for_smaller_ones(a: int, b: int, whole: bool) -> None:
    most, less = max(a, b), min(a, b)
    if not whole:
        known = at(*ladder(most, whole=False))
        assert lacking(known, less, whole=False) == ()
        cost = known.cost(less).forward_us
        for rows in (less, max(less // 2, 1)):
            assert cost.at(rows) == pytest.approx(10 + 2 * rows)
    wanted = lacking(None, most, whole=whole)
    assert wanted[-1] == most
    assert lacking(at(*wanted), most, whole=whole) == ()
    more = lacking(at(*wanted), less, whole=whole)
    assert not set(more) & set(wanted), "nothing is measured twice"
    assert lacking(at(*wanted).joined(at(*more)), less, whole=whole) == ()


def test_pieces_that_are_whole_mini_batches_are_measured_as_such() -> None:
    assert lacking(at(4, 16), 16, whole=True) == ()
    assert lacking(at(4, 16), 15, whole=True) == (15,)
    assert ladder(15, whole=True) == (15,)
    assert ladder(15, whole=False) == (1, 3, 15)


def test_only_what_is_missing_is_measured() -> None:
    assert lacking(at(4, 16), 16, whole=False) == ()
    assert lacking(at(16), 16, whole=False) == (4,)
    assert lacking(at(4, 16), 4, whole=False) == (1,)
    assert lacking(at(4, 16), 17, whole=False) == (17,), "4 is there"
    assert lacking(at(4, 16), 3, whole=False) == (1,)
    assert lacking(at(64, 256), 8, whole=False) == (2, 8), "too far away"


def test_points_of_two_measurements_are_joined() -> None:
    new, old = at(4, 16, fixed=20), at(1, 4, fixed=10)
    assert new.joined(None) == new
    joined = new.joined(old)
    assert [point.rows for point in joined.points] == [1, 4, 16]
    assert joined.points[1].forward_us == 28


def test_of_two_measurements_of_a_point_the_newer_counts_or_the_one_with_less_noise() -> None:
    def point(forward: float, spread: float) -> Measured:
        return Measured((Point(4, forward, 1000, 0, 0, spread),))

    calm, noisy, noisier = point(1000, 0.01), point(3000, 0.3), point(2000, 0.9)
    assert calm.joined(noisy) == calm == noisy.joined(calm)
    assert point(1100, 0.04).joined(calm) == point(1100, 0.04), "both are calm: conditions may have changed"
    assert noisier.joined(noisy) == noisy == noisy.joined(noisier)
    assert noisy.noisy(4) == (4,)
    assert calm.noisy(4) == ()
    assert Measured((Point(4, 10, 10, 0, 0, 0.5),)).noisy(4) == (), "ten microseconds"
    assert noisy.given.noisy(4) == (), "what a user gives is taken"
    assert noisy.given.joined(calm) == noisy.given
    three = Measured((*at(1).points, *noisy.points, Point(64, 9000, 0, 0, 0, 0.2)))
    assert three.noisy(16) == three.noisy(64) == (4, 64)
    assert three.noisy(4) == (4,), "and 1, which is not"


def test_parts_add_up_and_the_tightest_bound_holds() -> None:
    parts = [at(4, 16).cost(16), Measured(at(4).points, too_many=9).cost(16), Measured(at(4).points, 7).cost(16)]
    memory = Memory(GraphBuilder().build())
    whole = total(parts, memory)
    assert whole.most_rows == 6
    assert whole.backward_us.at(10) == pytest.approx(90)
    assert total(parts[:1], memory) == parts[0]


def test_what_several_parts_keep_counts_once_and_a_view_as_what_it_is_of() -> None:
    builder = GraphBuilder()
    whole = builder.op([builder.input(8)], size=1000)
    view = builder.op([whole], size=100, target="aten::slice")
    other = builder.op([view], size=10, output=True)
    memory = Memory(builder.build())
    assert memory.home[view] == whole
    parts = [
        msgspec.structs.replace(at(4).cost(4), kept=kept, activation_bytes=Size(0, 5000))
        for kept in ((other,), (view, other), (whole,))
    ]
    found = total(parts, memory)
    assert found.activation_bytes == Size(0, 15_000 - 2 * 10 - 100 - 1000 + 1000 + 10)
    assert found.kept == (other, whole)
    measured = Measured(at(4).points, 0, (0, 2, 7))
    assert measured.cost(4, (30, 31, 32)).kept == (30, 32)
    assert measured.lasting.kept == measured.joined(at(8)).kept == at(8).joined(measured).kept == (0, 2, 7)


PROFILE = GraphProfile(FORMAT, "cpu", "0.1", "2.13", {}, {"aa": at(1, 4), "bb": at(4)})


def test_a_profile_as_bytes() -> None:
    assert decode(encode(PROFILE)) == PROFILE
    assert PROFILE.rows == (1, 4)
    more = msgspec.structs.replace(PROFILE, blocks={"bb": at(16), "cc": at(2)})
    assert {key: len(value.points) for key, value in more.joined(PROFILE).blocks.items()} == {"aa": 2, "bb": 2, "cc": 1}


@pytest.mark.parametrize(
    "bad",
    [
        Measured(()),
        at(4, 1),
        at(0),
        Measured((Point(1, math.nan, 0, 0, 0),)),
        Measured((Point(1, 1, -1, 0, 0),)),
        Measured((Point(1, 1, 1, 2, 0),)),
        Measured((Point(1, 1, 1, 0, math.inf),)),
        Measured(at(1).points, too_many=-1),
        Measured((Point(1, 1, 1, 0, 0, -0.1),)),
        Measured((Point(1, 1, 1, 0, 0, math.nan),)),
    ],
)
def test_what_cannot_have_been_measured_is_refused(bad: Measured) -> None:
    with pytest.raises(ProfileError, match="damaged: block 'bb'"):
        decode(encode(msgspec.structs.replace(PROFILE, blocks={"aa": at(1), "bb": bad})))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"text", msgspec.msgpack.encode({"format": FORMAT}), encode(PROFILE)[:-3]]
)
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(ProfileError, match="not a graph profile"):
        decode(data)


def test_another_format_is_named() -> None:
    with pytest.raises(ProfileError, match="format 99, this version of rannd reads 3"):
        decode(encode(msgspec.structs.replace(PROFILE, format=99)))


def test_that_memory_ran_out_is_not_kept() -> None:
    bounded = msgspec.structs.replace(PROFILE, blocks={"aa": Measured(at(1, 4).points, too_many=8)})
    assert bounded.blocks["aa"].cost(4).most_rows == 7
    assert bounded.lasting.blocks == {"aa": at(1, 4)}
