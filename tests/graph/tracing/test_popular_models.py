"""The samples of public models: where they are independent, every value is where the analysis says."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from pieces import assert_same, graph_of, in_pieces, signature_of
from probe import probe, restored
from stages import run_eager
from thinned import one_in
from zoo import ZOO, Entry

ROWS = 5
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}

COUPLED = {
    "resnet": "batch_norm",
    "regnet": "batch_norm",
    "mobilenet-v2": "batch_norm",
    "segformer": "batch_norm",
    "patchtst": "batch_norm",
    "u-net": "batch_norm",
    "generator": "batch_norm",
    "clip": "matmul multiplies all samples with each other",
    "siglip": "matmul multiplies all samples with each other",
    "graph network": "argument index of index_add depends on the samples",
    "experts, scattered": "not linear",  # the square of how many tokens of the batch an expert gets
    "moving averages": "not linear",  # of features, and the features are centred by them
    "codebook": "",  # the codes follow all samples
    "BatchNorm": "",
}
"""Samples that depend on each other, and what says so."""

UNSEEN = {
    "bloom", "mixtral, looped", "olmoe", "deberta", "longformer", "detr", "wav2vec2", "hubert",
    "time series transformer", "informer", "lstm, packed", "nn.Transformer", "autograd.Function", "control flow",
    "experts, looped",
}  # fmt: skip
"""Nobody sees into some modules of these, or where tokens go is in the data: they may be called coupled."""

FEW = {
    "gpt2", "mixtral", "mamba", "bert, pairs", "big bird", "t5", "vit", "swin", "clip", "whisper", "gru, both ways",
    "siamese", "u-net",
}  # fmt: skip
"""Those that CI looks at."""
QUICK = {"gpt2", "vit", "siamese", "u-net"}
"""Of these, those of `make test`."""


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in QUICK else (pytest.mark.long,) if name in FEW else (pytest.mark.full,)


def test_names_are_of_the_zoo() -> None:
    assert {*COUPLED, *UNSEEN, *FEW} <= {entry.name for entry in ZOO}


@pytest.mark.parametrize("entry", one_in(3, ZOO), ids=str)
def test_outputs_and_gradients_are_numbers(entry: Entry) -> None:
    """What is compared with NaN is equal whatever is wrong."""
    with entry.precision():
        torch.manual_seed(3)
        model = entry.build()
        torch.manual_seed(100)
        found = torch.utils._pytree.tree_leaves(model(**entry.batch(4)))
        trained = [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]
        if trained:  # no dataclasses
            torch.stack([each.double().sum() for each in trained]).sum().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert not any(each.isnan().any() for each in [*found, *gradients] if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("entry", [pytest.param(e, marks=marks_of(e.name)) for e in ZOO], ids=str)
def test_samples(entry: Entry) -> None:
    """Coupled where they are; otherwise pieces give the outputs and gradients of the whole, and so does each value."""
    with entry.precision():
        torch.manual_seed(3)
        model, batch, others = entry.build(), entry.batch(ROWS), entry.batch(ROWS)
        graph = graph_of(model, **batch)
        if entry.name in COUPLED:
            assert COUPLED[entry.name] in (graph.coupled or "independent")
            return
        if graph.coupled is not None:
            assert entry.name in UNSEEN, graph.coupled
            return
        (_, tensors), (_, given) = signature_of(model, **batch), signature_of(model, **others)
        assert probe(graph, model, tensors, given, entry.name) > 0
        if graph.placement.random or entry.random:
            return
        random.seed(5)
        np.random.seed(5)
        with restored(model):
            expected = run_eager(graph, model, tensors)
        with restored(model):
            found = in_pieces(graph, model, tensors, [2, 1, 2])
        assert_same(found, expected, within=TOLERANCE[entry.dtype])
