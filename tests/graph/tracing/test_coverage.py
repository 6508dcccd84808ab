"""The zoo: models of all families are traced, most of them without leaves, and compute the same whole and cut."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch
from pieces import signature_of
from specimens import TRACED_ROWS, Specimen, specimen_of
from stages import balanced_stages, random_stages
from zoo import ZOO, Entry

from rannd.errors import TraceError
from rannd.graph.comparison import NotComparable, compare_few
from rannd.graph.model import build

MOST_IN_LEAVES = 0.2
"""A model counts as traced with at most this share of its parameters in leaves."""
TRACED_SHARE = 0.95

FEW = {
    "gpt2", "llama", "bloom", "mixtral", "qwen2-moe", "olmoe", "mamba", "rwkv", "bert", "distilbert", "deberta",
    "deberta-v2", "xlnet", "longformer", "big bird", "t5", "longt5, global", "mbart", "vit", "swin", "beit", "regnet",
    "mobilenet-v2", "segformer", "clip", "siglip", "wav2vec2", "patchtst", "informer", "autoencoder", "generator",
    "u-net", "graph network", "codebook", "BatchNorm", "siamese", "lstm, packed", "lstm, time first", "gru, both ways",
    "einsum attention", "dataclass", "nested inputs", "tied", "checkpointed", "control flow", "autograd.Function",
    "experts, looped", "experts, scattered", "moving averages",
}  # fmt: skip
"""Those that CI looks at: they have all operators of the zoo."""
SLOW = {
    "informer", "big bird", "wav2vec2", "longt5, global", "clip", "longformer", "xlnet", "deberta-v2", "bloom",
    "qwen2-moe", "olmoe", "mbart", "siglip", "segformer", "rwkv", "mobilenet-v2", "deberta", "vit", "beit", "regnet",
    "distilbert", "t5", "swin", "patchtst", "autoencoder", "generator", "einsum attention", "checkpointed", "mixtral",
    "gru, both ways", "lstm, packed", "graph network", "nested inputs", "tied", "control flow", "experts, scattered",
    "experts, looped", "u-net", "lstm, time first", "moving averages", "codebook", "llama", "dataclass",
}  # fmt: skip
"""Of these, those that `make test-long` looks at."""


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name not in FEW:
        return (pytest.mark.full,)
    return (pytest.mark.long,) if name in SLOW else ()


_seen: dict[str, Specimen] = {}
"""The models that were traced."""


def specimen_named(name: str) -> Specimen:
    if name not in _seen:
        _seen[name] = specimen_of(next(entry for entry in ZOO if entry.name == name))
    return _seen[name]


@pytest.fixture(
    scope="module",
    params=[pytest.param(e, marks=marks_of(e.name)) for e in ZOO],
    ids=str,
)
def traced(request: pytest.FixtureRequest) -> Specimen:
    return specimen_named(request.param.name)


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


def test_comparing_the_trace_raises_no_false_alarm(specimen: Specimen) -> None:
    torch.manual_seed(0)
    batch = specimen.entry.batch(TRACED_ROWS)
    _, tensors = signature_of(specimen.model, **dict(sorted(batch.items())))
    assert compare_few(specimen.model, specimen.graph, tensors) is None


OWN_LIMITS = {
    "rwkv": "writes into a parameter in evaluation while it is trained",
    "deberta": "fills with the smallest float, which bfloat16 does not have",
    "big bird": "scatters values of another type under autocast",
    "graph network": "adds values of another type under autocast",
    "codebook": "moves its codes by values of another type under autocast",
    "experts, looped": "puts in values of another type under autocast",
}
"""Models that do not run themselves in some of the modes below."""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["evaluation", "float32", "bfloat16", "bfloat16 in evaluation"])
@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_no_false_alarm_in_other_modes(entry: Entry, mode: str) -> None:
    with contextlib.ExitStack() as stack:
        if mode == "evaluation":
            stack.enter_context(entry.precision())
        torch.manual_seed(0)
        model = entry.build().train("evaluation" not in mode)
        batch = entry.batch(TRACED_ROWS)
        if mode.startswith("bfloat16"):
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        signature, tensors = signature_of(model, **dict(sorted(batch.items())))
        try:
            graph = build(model, signature, tensors, torch.device("cpu"))
            difference = compare_few(model, graph, tensors)
        except (TraceError, RuntimeError, NotComparable):
            assert entry.name in OWN_LIMITS
            return
        assert difference is None


def test_cut_at_random_places(specimen: Specimen) -> None:
    generator = random.Random(specimen.entry.name)
    stagings = [random_stages(specimen.graph, generator.randint(2, 5), generator) for _ in range(3)]
    torch.manual_seed(2)
    specimen.compare(specimen.entry.batch(3), *stagings)


def test_names_are_of_the_zoo() -> None:
    assert {*FEW, *OWN_LIMITS} <= {entry.name for entry in ZOO}
    assert len(ZOO) >= 50


@pytest.mark.full
def test_nearly_all_models_are_traced() -> None:
    """At least 95 % of the models have at least 80 % of their parameters outside leaves."""
    shares = {entry.name: specimen_named(entry.name).share_in_leaves for entry in ZOO}
    opaque = {name: share for name, share in shares.items() if share > MOST_IN_LEAVES}
    assert len(opaque) <= (1 - TRACED_SHARE) * len(ZOO), opaque


@pytest.mark.full
def test_the_few_have_every_operator() -> None:
    operators = {
        entry.name: {str(node.target) for node in specimen_named(entry.name).graph.placement.placed} for entry in ZOO
    }
    assert set().union(*operators.values()) == set().union(*(operators[name] for name in FEW))
