"""The zoo: models of all families are traced, most of them without leaves, and compute the same whole and cut."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from specimens import Specimen, specimen_of
from stages import balanced_stages, random_stages
from zoo import ZOO

MOST_IN_LEAVES = 0.2
"""A model counts as traced with at most this share of its parameters in leaves."""
TRACED_SHARE = 0.95

_shares: dict[str, float] = {}
"""Share of the parameters in leaves, of each model that was traced."""


@pytest.fixture(scope="module", params=ZOO, ids=str)
def traced(request: pytest.FixtureRequest) -> Specimen:
    made = specimen_of(request.param)
    _shares[made.entry.name] = made.share_in_leaves
    return made


@pytest.fixture
def specimen(traced: Specimen) -> Iterator[Specimen]:
    with traced.entry.precision():
        yield traced


def test_whole_and_in_three_stages(specimen: Specimen) -> None:
    graph = specimen.graph
    whole = dict.fromkeys(graph.placement.placed, 0)
    three = balanced_stages(graph, 3)
    if "" not in graph.traced.leaf_paths:
        assert set(three.values()) == {0, 1, 2}
    for rows in (1, 3, 4):
        torch.manual_seed(rows)
        specimen.compare(specimen.entry.batch(rows), whole, three)


def test_cut_at_random_places(specimen: Specimen) -> None:
    generator = random.Random(specimen.entry.name)
    stagings = [random_stages(specimen.graph, generator.randint(2, 5), generator) for _ in range(3)]
    torch.manual_seed(2)
    specimen.compare(specimen.entry.batch(3), *stagings)


def test_nearly_all_models_are_traced() -> None:
    """At least 95 % of the models have at least 80 % of their parameters outside leaves."""
    assert len(ZOO) >= 50
    for entry in ZOO:
        if entry.name not in _shares:  # only this test was asked for
            made = specimen_of(entry)
            _shares[entry.name] = made.share_in_leaves
    opaque = {name: share for name, share in _shares.items() if share > MOST_IN_LEAVES}
    assert len(opaque) <= (1 - TRACED_SHARE) * len(ZOO), opaque
