"""One trace for many lengths: every graph out of a template computes what the model computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pieces import CPU, assert_same, eager, in_pieces, signature_of
from thinned import first
from torch import Tensor, nn
from zoo import ZOO

from rannd.graph.call.signature import Signature
from rannd.graph.model import build
from rannd.graph.stored.encoding import Broken
from rannd.graph.tracing.dynamic_shapes import NoTemplate, instance, template

pytestmark = pytest.mark.usefixtures("double")


def opened(signature: Signature) -> Signature:
    """All dimensions behind the batch of integer tensors."""
    dims = [
        (number, dim)
        for number, spec in enumerate(signature.tensors)
        for dim in range(len(spec.shape))
        if not spec.dtype.is_floating_point
    ]
    return dataclasses.replace(signature, open=tuple(dims))


def cut_to(batch: dict[str, Any], length: int) -> dict[str, Any]:
    return {name: value[:, :length].contiguous() for name, value in batch.items()}


@pytest.mark.parametrize("name", first(2, ["gpt2", "bert", "llama", "opt", "deberta-v2"]))
def test_language_models_of_any_length(name: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    with entry.precision():
        model = entry.build().to(entry.dtype)
        whole = entry.batch(4)
        signature, tensors = signature_of(model, **whole)
        data = template(model, opened(signature), tensors, torch.device("cpu"))
        longest = min(value.shape[1] for value in whole.values())
        for length in (longest, longest - 1, 3, 2):
            batch = cut_to(whole, length)
            small, given = signature_of(model, **batch)
            graph = build(model, small, given, CPU, instance(data, model, small))
            assert_same(in_pieces(graph, model, given, [4]), eager(graph, model, given))
            if graph.coupled is None:
                assert_same(in_pieces(graph, model, given, [1, 3]), eager(graph, model, given))


@pytest.mark.parametrize("name", first(1, ["mamba", "bloom"]))
def test_loops_over_the_length_and_leaves_have_no_template(name: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    model = entry.build()
    signature, tensors = signature_of(model, **entry.batch(4))
    with pytest.raises(NoTemplate):
        template(model, opened(signature), tensors, torch.device("cpu"))


class Convolution(nn.Module):
    """Images of any size; only even widths are halved, and large ones go another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3), nn.Linear(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        a = self.first(image).relu()
        if image.shape[-1] > 20:
            a = nn.functional.max_pool2d(a, 2)
        return self.head(self.second(a).mean((2, 3)))


def test_sizes_that_the_code_treats_differently_are_not_covered() -> None:
    model = Convolution()
    signature, tensors = signature_of(model, torch.randn(5, 2, 8, 10))
    data = template(model, dataclasses.replace(signature, open=((0, 1), (0, 2))), tensors, torch.device("cpu"))
    for height, width in ((8, 10), (9, 7), (30, 20)):
        small, given = signature_of(model, torch.randn(5, 2, height, width))
        graph = build(model, small, given, CPU, instance(data, model, small))
        assert graph.coupled is None
        assert_same(in_pieces(graph, model, given, [2, 3]), eager(graph, model, given))
    large, _ = signature_of(model, torch.randn(5, 2, 8, 21))
    with pytest.raises(NoTemplate, match="runs differently for these sizes"):
        instance(data, model, large)
    other, _ = signature_of(model, torch.randn(5, 3, 8, 10))
    with pytest.raises(NoTemplate, match="has the shape"):
        instance(data, model, other)
    one, _ = signature_of(model, torch.randn(5, 2, 1, 10))
    with pytest.raises(NoTemplate, match="is 1"):
        instance(data, model, one)


class CentreCrop(nn.Module):
    """A way up through a U-Net that is cut to the size of the way down; odd sizes come out larger."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ConvTranspose2d(3, 2, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        up = self.up(self.down(image))
        top, left = (up.shape[2] - image.shape[2]) // 2, (up.shape[3] - image.shape[3]) // 2
        return image + up[:, :, top : top + image.shape[2], left : left + image.shape[3]]


def test_a_condition_on_several_sizes_at_once_is_part_of_a_template() -> None:
    model = CentreCrop()
    signature, tensors = signature_of(model, torch.randn(5, 2, 8, 10))
    data = template(model, dataclasses.replace(signature, open=((0, 1), (0, 2))), tensors, torch.device("cpu"))
    for height, width in ((8, 10), (6, 12)):
        small, given = signature_of(model, torch.randn(5, 2, height, width))
        graph = build(model, small, given, CPU, instance(data, model, small))
        assert_same(in_pieces(graph, model, given, [2, 3]), eager(graph, model, given))


class EvenSizes(nn.Module):
    """Odd sizes are padded before they are halved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[2] % 2 or (image.shape[3] - 5) % 3:
            image = nn.functional.pad(image, (0, 1, 0, 1))
        return nn.functional.avg_pool2d(self.layer(image), 2)


def test_a_condition_on_a_remainder_is_part_of_a_template() -> None:
    model = EvenSizes()
    signature, tensors = signature_of(model, torch.randn(5, 2, 8, 11))
    data = template(model, dataclasses.replace(signature, open=((0, 1), (0, 2))), tensors, torch.device("cpu"))
    small, given = signature_of(model, torch.randn(5, 2, 6, 17))
    graph = build(model, small, given, CPU, instance(data, model, small))
    assert_same(in_pieces(graph, model, given, [2, 3]), eager(graph, model, given))
    for height, width in ((7, 17), (6, 15), (7, 3)):
        other, _ = signature_of(model, torch.randn(5, 2, height, width))
        with pytest.raises(NoTemplate, match="runs differently for these sizes"):
            instance(data, model, other)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, a: Tensor) -> Tensor:
        return self.layer(a) + a.shape[1]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)

    def forward(self, a: Tensor) -> Tensor:
        return a + self.table.weight[: a.shape[1]]


def test_a_dimension_that_the_model_fixes_has_no_template() -> None:
    signature, tensors = signature_of(Fixed(), torch.randn(4, 6))
    with pytest.raises(NoTemplate, match="fixed by the model's code"):
        template(Fixed(), dataclasses.replace(signature, open=((0, 0),)), tensors, torch.device("cpu"))


def test_the_longest_length_is_kept() -> None:
    model = Positions()
    signature, tensors = signature_of(model, torch.randn(4, 5, 6))
    data = template(model, dataclasses.replace(signature, open=((0, 0),)), tensors, torch.device("cpu"))
    for length, fits in ((11, True), (12, True), (13, False)):
        small, given = signature_of(model, torch.randn(4, length, 6))
        if fits:
            graph = build(model, small, given, CPU, instance(data, model, small))
            assert_same(in_pieces(graph, model, given, [4]), eager(graph, model, given))
        else:
            with pytest.raises(NoTemplate):
                instance(data, model, small)


def test_lengths_that_belong_together_have_to_agree() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a) * b

    model = Pair()
    signature, tensors = signature_of(model, torch.randn(4, 5, 6), torch.randn(4, 5, 6))
    data = template(model, dataclasses.replace(signature, open=((0, 0), (1, 0))), tensors, torch.device("cpu"))
    small, given = signature_of(model, torch.randn(4, 7, 6), torch.randn(4, 7, 6))
    graph = build(model, small, given, CPU, instance(data, model, small))
    assert_same(in_pieces(graph, model, given, [2, 2]), eager(graph, model, given))
    uneven, _ = signature_of(model, torch.randn(4, 7, 6), torch.randn(4, 3, 6))
    with pytest.raises(NoTemplate):
        instance(data, model, uneven)


def test_broken_templates_are_seen() -> None:
    model = Positions()
    signature, _ = signature_of(model, torch.randn(4, 5, 6))
    with pytest.raises(Broken):
        instance(b"nothing", model, signature)
