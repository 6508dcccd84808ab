"""Every element of every parameter has one owner, and owners have equally much."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.zero.division import ALONE, MOST, Piece, divide

WIDTH = 4
SIZES = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, 10**5), st.sampled_from([ALONE // WIDTH, ALONE // WIDTH - 1, 10**7])),
    min_size=1,
    max_size=40,
)


@given(sizes=SIZES, replicas=st.integers(1, 9), kinds=st.integers(1, 3))
def test_every_element_has_one_owner(sizes: list[int], replicas: int, kinds: int) -> None:
    named = {f"p{place}": size for place, size in enumerate(sizes)}
    buckets = divide([(n, s, WIDTH, str(i % kinds)) for i, (n, s) in enumerate(named.items())], replicas)
    owned: dict[str, list[Piece]] = defaultdict(list)
    for bucket in buckets:
        lengths = []
        for replica in range(replicas):
            pieces = bucket.pieces(replica)
            lengths.append(sum(piece.size for piece in pieces.values()))
            for name, piece in pieces.items():
                owned[name].append(piece)
        assert max(lengths) <= bucket.length
        assert sum(lengths) == sum(bucket.sizes)
        assert lengths[: sum(bucket.sizes) // bucket.length] == [bucket.length] * (sum(bucket.sizes) // bucket.length)
    assert owned.keys() == named.keys()
    for name, pieces in owned.items():
        assert pieces[0].start == 0
        assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
        assert pieces[-1].stop == named[name]


@given(sizes=SIZES, replicas=st.integers(1, 9))
def test_large_parameters_are_alone_and_small_ones_share_buckets(sizes: list[int], replicas: int) -> None:
    buckets = divide([(f"p{place}", size, WIDTH, "") for place, size in enumerate(sizes)], replicas)
    for bucket in buckets:
        if any(size * WIDTH >= ALONE for size in bucket.sizes):
            assert len(bucket.sizes) == 1
        assert len(bucket.sizes) == 1 or sum(bucket.sizes) * WIDTH <= MOST
    small = sum(size for size in sizes if size * WIDTH < ALONE) * WIDTH
    assert sum(bucket.sizes[0] * WIDTH < ALONE for bucket in buckets) <= 2 * small / MOST + 1


def test_dtypes_are_apart() -> None:
    buckets = divide([("a", 3, 4, "float32"), ("b", 3, 2, "bfloat16"), ("c", 3, 4, "float32")], 2)
    assert sorted(bucket.names for bucket in buckets) == [("a", "c"), ("b",)]
