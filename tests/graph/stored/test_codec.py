"""A traced model as data: the same graph comes back, whatever is in it, and broken data is seen."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
import row_cases
import row_operators
import torch
from leaf_models import Between, Counting, Deciding, Masking, Nested, Outer, Pair
from pieces import CPU, assert_same, eager, in_pieces, signature_of
from thinned import one_in
from torch import Tensor, nn
from zoo import ZOO, Entry

from rannd.graph.fx.traced import Traced
from rannd.graph.model import ModelGraph, build
from rannd.graph.partition.graph_hash import graph_hash
from rannd.graph.stored.codec import decode, encode
from rannd.graph.stored.encoding import Broken, Uncodable
from rannd.graph.tracing.frontend import trace

NAMES = ("gpt2", "t5", "clip", "swin", "mamba", "control flow", "dataclass", "nested inputs", "moving averages", "lstm")

pytestmark = pytest.mark.usefixtures("double")


def there_and_back(model: nn.Module, **kwargs: object) -> tuple[ModelGraph, ModelGraph, list[Tensor]]:
    """The graph of a call, as traced and as stored."""
    signature, tensors = signature_of(model, **kwargs)
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    data = encode(traced, signature.fixed_rows)
    loaded, rows = decode(data, model)
    assert rows == signature.fixed_rows
    assert graph_hash(loaded, signature, model) == graph_hash(traced, signature, model)
    assert encode(loaded, rows) == data
    assert (loaded.record, loaded.changes, loaded.leaf_paths) == (traced.record, traced.changes, traced.leaf_paths)
    first = build(model, signature, tensors, CPU, traced)
    return first, build(model, signature, tensors, CPU, loaded), tensors


@pytest.mark.parametrize("entry", one_in(4, (entry for entry in ZOO if entry.name in NAMES)), ids=str)
def test_public_models(entry: Entry) -> None:
    model = entry.build().to(entry.dtype)
    one, other, tensors = there_and_back(model, **entry.batch(4))
    assert one.task == other.task
    assert one.results == other.results
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = in_pieces(one, model, tensors, [4])
    for name, buffer in model.named_buffers():
        buffer.data.copy_(before[name])
    assert_same(in_pieces(other, model, tensors, [4]), expected, exact=True)


CASES = {
    **row_cases.INDEPENDENT,
    **row_cases.COUPLED,
    **row_operators.INDEPENDENT,
    **row_operators.COUPLED,
}
FEW = [*CASES][::20]
NOT_STORED = {"determinant": "torch.return_types has no name by which pytree finds it again"}
"""Traces that are made anew in each job."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in CASES])
def test_every_operator(name: str) -> None:
    from pieces import Small

    function, arguments = CASES[name]
    model = Small(function)
    signature, tensors = signature_of(model, *[make() for make in arguments])
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    if name in NOT_STORED:
        with pytest.raises(Uncodable, match="return_types"):
            encode(traced, signature.fixed_rows)
        return
    loaded, _ = decode(encode(traced, signature.fixed_rows), model)
    assert graph_hash(loaded, signature, model) == graph_hash(traced, signature, model)


def test_another_model_gets_its_own_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.table = Between(Deciding()), nn.Embedding(6, 6)
            self.head = nn.Linear(6, 6, bias=False)
            self.head.weight = self.table.weight
            self.scale = torch.arange(6.0)

        def forward(self, a: Tensor) -> Tensor:
            return self.head(self.body(a) * self.scale) + self.table.weight.sum()

    torch.manual_seed(0)
    one, other = Model(), Model()
    a = torch.randn(4, 6)
    signature, tensors = signature_of(one, a)
    traced, signature = trace(one, signature, tensors, torch.device("cpu"))
    loaded, _ = decode(encode(traced, None), other)
    graph = build(other, signature, tensors, CPU, loaded)
    assert graph.traced.named("table.weight") is other.table.weight
    assert_same(in_pieces(graph, other, tensors, [4]), eager(graph, other, tensors))


def test_methods_as_leaves() -> None:
    one, other, tensors = there_and_back(Masking(), a=torch.randn(4, 6))
    assert one.traced.leaf_paths == ("..masked",)
    assert one.task == other.task
    assert len(tensors) == 1


def test_structures_with_dataclasses() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), Nested()

        def forward(self, pair: Pair) -> Pair:
            found = self.inner(Pair(self.first(pair.one), pair.more), scale=0.5, rows=1, names=("x",))
            return Pair(found["sum"], {"more": [found["count"], None]})

    there_and_back(Model(), pair=Pair(torch.randn(4, 6), {"two": torch.randn(4, 6)}))


def _data() -> tuple[bytes, nn.Module]:
    model = Outer(Counting())
    signature, tensors = signature_of(model, torch.randn(4, 6))
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    return encode(traced, None), model


def test_broken_data_is_seen() -> None:
    data, model = _data()
    generator = random.Random(3)
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        if bytes(broken) != data:
            with pytest.raises(Broken):  # zlib's checksum sees it
                decode(bytes(broken), model)
    for length in range(0, len(data) - 1, 50):
        with pytest.raises(Broken):
            decode(data[:length], model)


@pytest.mark.parametrize(
    "target",
    one_in(2, [["py", "os", "system"], ["py", "builtins", "eval"], ["py", "torch", "load"], ["hop", "__class__", ""],
     ["py", "operator", "nothing"], ["op", "aten::nothing", "default"], ["what", "is", "this"]]),
    ids=lambda target: ".".join(target),
)  # fmt: skip
def test_nothing_but_operators_is_called(target: list[str]) -> None:
    data, model = _data()
    content = msgspec.msgpack.decode(zlib.decompress(data))
    node = next(node for node in content["graph"]["nodes"] if node[0] == "call_function")
    node[2] = target
    with pytest.raises(Broken):
        decode(zlib.compress(msgspec.msgpack.encode(content)), model)


def test_a_model_without_the_tensor_is_seen() -> None:
    data, _ = _data()
    with pytest.raises(Broken, match="no attribute `blocks`"):
        decode(data, nn.Linear(6, 6))


def test_what_has_no_form_as_data_is_told() -> None:
    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6))
            self.constant = torch.zeros(2**24)

        def forward(self, a: Tensor) -> Tensor:
            return a * self.w + self.constant.sum()

    model = Meta()
    signature, tensors = signature_of(model, torch.randn(4, 6))
    traced: Traced
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    with pytest.raises(Uncodable, match="constants of 134217728 bytes"):
        encode(traced, None)
