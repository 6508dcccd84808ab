"""Thousands of changed models, calls and modes: not one of them has the fingerprint of another."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from mutants import Recipe, mutated, random_recipe, realised
from pieces import graph_of, signature_of

from rannd.errors import RanndError
from rannd.graph.fingerprint.fingerprint import Fingerprint, fingerprint

FROM_ONE = 50
"""Changes of each random model."""


def components(recipe: Recipe, rows: int = 3) -> tuple[tuple[str, str], ...]:
    with realised(recipe, rows) as (model, args, named):
        signature, _ = signature_of(model, *args, **named)
        found = fingerprint(model, signature, torch.device("cpu"))
    assert isinstance(found, Fingerprint), found
    # the package's own files are the same in all of them, but for an editor that saves one meanwhile
    return tuple(sorted((name, text) for name, text in found.components.items() if name != "tracer"))


@pytest.mark.parametrize(
    "mutants", [200, pytest.param(1000, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.full)]
)
def test_changes_have_fingerprints_of_their_own(mutants: int) -> None:
    gc.collect()
    gc.freeze()  # a collection every few models would look at all of torch
    generator = random.Random(0)
    texts: dict[tuple[tuple[str, str], ...], str] = {}
    for _ in range(mutants // FROM_ONE):
        recipe = random_recipe(generator)
        before = components(recipe)
        texts[before] = recipe.text
        for _ in range(FROM_ONE):
            other = mutated(generator, recipe)
            found = components(other)
            assert found != before, (recipe.text, other.text)
            assert texts.setdefault(found, other.text) == other.text
    gc.unfreeze()


def test_the_same_recipe_has_the_same_fingerprint() -> None:
    """Made again, with other weights and other batch sizes."""
    generator = random.Random(1)
    for number in range(100):
        recipe = random_recipe(generator)
        torch.manual_seed(number)
        assert components(recipe) == components(recipe, rows=generator.choice((1, 2, 4, 6)))


def graph_hash(recipe: Recipe, rows: int) -> str:
    with realised(recipe, rows) as (model, args, named):
        try:
            return graph_of(model, *args, **named).task.graph_hash
        except RanndError as exc:
            return f"cannot be traced: {str(exc)[:80]}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "traced", [pytest.param(40, marks=pytest.mark.long), pytest.param(500, marks=pytest.mark.full)]
)
def test_equal_fingerprints_mean_equal_graphs(traced: int) -> None:
    """Graphs of the same recipe are the same; where two graphs differ, so do the fingerprints."""
    generator = random.Random(traced)
    differ = 0
    for _ in range(traced // 5):
        recipe = random_recipe(generator)
        before, text = components(recipe), graph_hash(recipe, 3)
        assert graph_hash(recipe, 7) == text
        for _ in range(4):
            other = mutated(generator, recipe)
            if graph_hash(other, 3) != text:
                differ += 1
                assert components(other) != before
    assert differ > traced // 5
