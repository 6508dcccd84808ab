"""What newcomers do with a model: it works, or the error names what was wrong, the value, and what to do."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from pieces import CPU, Small, assert_same, eager, in_pieces
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rannd.errors import RanndError, TraceError, UsageError
from rannd.graph.call.call_errors import check_ready
from rannd.graph.call.signature import Mode, classify, flatten_call
from rannd.graph.model import ModelGraph, build
from rannd.graph.stored import container_text

X = torch.arange(24.0).reshape(4, 6).double() / 24
"""A batch of four samples."""


def called(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[ModelGraph, list[Tensor]]:
    """The graph of the first call of a model, found as a rank does."""
    call = flatten_call(args, kwargs)
    check_ready(model, call.names, call.tensors)
    signature = classify(call, Mode.current(model.training), [call.shapes()])
    return build(model, signature, list(call.tensors), CPU), list(call.tensors)


def small(function: Callable[..., Any]) -> Small:
    torch.manual_seed(0)
    return Small(function).double()


# -- what simply works ----------------------------------------------------------------------------------------


class Pair(collections.namedtuple("Pair", "x y")):
    pass


class Listed(list):  # type: ignore[type-arg]
    pass


class Tupled(tuple):  # type: ignore[type-arg]
    def __new__(cls, first: Tensor, second: Tensor) -> Tupled:
        return super().__new__(cls, (first, second))


class Named(dict):  # type: ignore[type-arg]
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__(tensors)
        self.scale = 3.0
        self.extra = tensors["x"] * 2


class Ordered(collections.OrderedDict):  # type: ignore[type-arg]
    pass


class Attributes(collections.UserDict):  # type: ignore[type-arg]
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__(tensors)
        self.scale = 2.0
        self.own = object()


@dataclasses.dataclass
class Fields:
    x: Tensor
    y: Tensor
    scale: float = 2.0


class Count(enum.IntEnum):
    TWO = 2


def _frozen(model: Small) -> Small:
    return model.requires_grad_(False)


NONE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (lambda m, x: x @ m.w, (X,), NONE),
        (lambda m, x: x, (X,), NONE),
        (lambda m, x: (x, x @ m.w, x), (X,), NONE),
        (lambda m, x: (x @ m.w).argmax(1), (X,), NONE),
        (lambda m, x: (x @ m.w, 7, None, "seven"), (X,), NONE),
        (lambda m, x, y: x @ m.w, (X, torch.zeros(4)), NONE),
        (lambda m, x, y: x @ m.w + y, (X, X), NONE),
        (lambda m, *xs: sum(xs) @ m.w, (X, X, X), NONE),
        (lambda m, **xs: xs["a"] @ m.w + xs["b"], (), {"b": X, "a": X}),
        (lambda m, x, y: x @ m.w * y, (X, torch.tensor(2.0).double()), NONE),
        (lambda m, x, y: x @ m.w + y.sum(), (X, torch.randn(5, 6).double()), NONE),
        (lambda m, x, y: x @ m.w * y[0], (X, [1.0, 2.0, 3.0, 4.0]), NONE),
        (lambda m, x: x * m.running, (X,), NONE),
        (lambda m, x: torch.relu(x), (X,), NONE),
        (lambda m, x: x @ m.w, (X.t().contiguous().t(),), NONE),
        (lambda m, x: x @ m.w, (X[:1].expand(4, 6),), NONE),
        (lambda m, x: x @ m.w, (X.clone().requires_grad_(),), NONE),
        (lambda m, x: x @ m.w, (nn.Parameter(X),), NONE),
        (lambda m, x, n: x @ m.w * n, (X, Count.TWO), NONE),
        (lambda m, p: p.x @ m.w + p.y, (Pair(X, X),), NONE),
        (lambda m, p: p[0] @ m.w + p[1], (Tupled(X, X),), NONE),
        (lambda m, p: p[0] @ m.w + p[1] * len(p), (Listed([X, X]),), NONE),
        (lambda m, p: p["x"] @ m.w * p.scale + p.extra, (Named(x=X),), NONE),
        (lambda m, p: next(iter(p.values())) @ m.w, (Ordered(b=X, a=X * 2),), NONE),
        (lambda m, p: p["x"] @ m.w, (collections.OrderedDict(x=X),), NONE),
        (lambda m, p: p["x"] @ m.w, (collections.defaultdict(list, x=X),), NONE),
        (lambda m, p: p[0] @ m.w, (collections.deque([X]),), NONE),
        (lambda m, p: p["x"] @ m.w * p.scale, (Attributes(x=X),), NONE),
        (lambda m, p: p.x @ m.w * p.scale + p.y, (Fields(X, X),), NONE),
        (lambda m, p: Named(x=p["x"][0] @ m.w), ({"x": [X, None]},), NONE),
        (lambda m, p: Attributes(x=p @ m.w), (X,), NONE),
    ],
    ids=[
        "plain", "input is output", "input is output twice", "integer output", "constants among outputs", "unread",
        "same twice", "star args", "keywords", "scalar tensor", "other rows", "list of numbers", "buffer only",
        "no parameter used", "not contiguous", "expanded", "input gradient", "parameter as input", "int enum",
        "namedtuple", "tuple", "list", "dict", "ordered", "OrderedDict", "defaultdict", "deque", "UserDict",
        "dataclass", "dict out", "UserDict out",
    ],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_works(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frozen: bool) -> None:
    """And gives what the model gives, whole and in pieces, although most parameters are unused."""
    model = small(function)
    if frozen:
        model.requires_grad_(False)
    graph, tensors = called(model, *args, **kwargs)
    assert "" not in graph.traced.leaf_paths
    assert graph.task.unused_params
    expected = eager(graph, model, tensors)
    assert_same(in_pieces(graph, model, tensors, [4]), expected)
    if graph.coupled is None:
        assert_same(in_pieces(graph, model, tensors, [1, 3]), expected)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_small_first_batch_works(rows: int) -> None:
    model = small(lambda m, x: torch.relu(x @ m.w).sum(1))
    graph, _ = called(model, X[:rows])
    assert graph.signature.fixed_rows is None
    assert graph.task.graph_hash == called(model, X)[0].task.graph_hash
    assert_same(in_pieces(graph, model, [X], [1, 3]), eager(graph, model, [X]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_the_cpu_works(dtype: torch.dtype) -> None:
    model = small(lambda m, x: m.norm(x @ m.w)).to(dtype)
    graph, tensors = called(model, X.to(dtype))
    assert graph.task.values[-1].bytes.at(4) == 4 * 6 * 2
    assert_same(in_pieces(graph, model, tensors, [4]), eager(graph, model, tensors), within=1e-2)


def test_a_model_without_parameters_works() -> None:
    graph, tensors = called(nn.Sequential(nn.ReLU(), nn.Flatten()), X)
    assert graph.task.params == ()
    assert_same(in_pieces(graph, nn.ReLU(), tensors, [2, 2]), eager(graph, nn.ReLU(), tensors))


def test_a_frozen_model_has_no_gradient_anywhere() -> None:
    graph, _ = called(_frozen(small(lambda m, x: x @ m.w)), X)
    assert not any(value.requires_grad for value in graph.task.values)


def test_what_tokenizers_hand_out_works() -> None:
    from transformers import BatchEncoding

    model = small(lambda m, batch: m.table(batch["input_ids"]).sum(1) + batch.attention_mask.sum(1, keepdim=True))
    encoded = BatchEncoding({"input_ids": torch.ones(4, 3).long(), "attention_mask": torch.ones(4, 3).long()})
    graph, tensors = called(model, encoded)
    assert [spec.name for spec in graph.signature.tensors] == [
        "argument 0['input_ids']", "argument 0['attention_mask']"
    ]  # fmt: skip
    assert_same(in_pieces(graph, model, tensors, [1, 3]), eager(graph, model, tensors))


@pytest.mark.parametrize(
    "value",
    [Tupled(X, X), Listed([X, 2]), Named(x=X), Ordered(b=X, a=X), Attributes(x=X)],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_made_again_as_they_were(value: Any) -> None:
    import torch.utils._pytree as pytree

    call = flatten_call((value,), {})
    assert container_text.from_text(container_text.to_text(call.spec)) == call.spec
    signature = classify(call, Mode.current(True), [call.shapes()])
    ((again,), _) = signature.unflatten(call.tensors)
    assert type(again) is type(value)
    assert list(again) == list(value)
    held = [(name, each) for name, each in vars(again).items() if name != "own"]
    assert held == [(name, each) for name, each in vars(value).items() if name != "own"]
    assert pytree.tree_structure(again) == pytree.tree_structure(value)


# -- what is told ---------------------------------------------------------------------------------------------


class Thing:
    """Something that is no container."""


class Colour(enum.Enum):
    RED = 1


ANY = small(lambda m, *args, **kwargs: args[0] @ m.w)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (numpy.zeros((4, 6)), r"argument 1 of the model is a numpy.ndarray; make a tensor of it, torch.as_tensor\(x\)"),
        (numpy.float32(2), r"a numpy.float32; make a tensor .*, or x.item\(\)"),
        ((i for i in range(3)), "a builtins.generator; it can be read only once; pass a list"),
        ({1, 2}, "a builtins.set; it has no order; pass a sorted list"),
        (Colour.RED, r"Colour; pass its value"),
        (types.MappingProxyType({"x": X}), "a builtins.mappingproxy; pass a dict of it"),
        (range(3), "a builtins.range; pass a tuple of it"),
        (nn.Linear(2, 2), "Linear; make it an attribute of the model, so that its parameters are"),
        (torch.relu, "make it an attribute of the model"),
        (Thing(), r"Thing; the model takes tensors, None, numbers.*register_pytree_node"),
        (types.SimpleNamespace(x=X), "a types.SimpleNamespace; the model takes tensors"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_are_refused_with_advice(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        called(ANY, X, value)
    with pytest.raises(UsageError, match=message.replace("argument 1", r"options\['a'\]\[0\]")):
        called(ANY, X, options={"a": [value]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (X.to_sparse, r"argument 1 of the model is a sparse \(torch.sparse_coo\) tensor.* x.to_dense\(\)"),
        (X.to_sparse_csr, r"a sparse \(torch.sparse_csr\) tensor"),
        (
            lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged),
            "nested tensor.* a padded tensor and a mask",
        ),
        (lambda: torch.nested.nested_tensor([X, X[:2]]), "a nested tensor"),
        (
            lambda: X.to("meta"),
            "argument 1 of the model is on the meta device, .* the model is on cpu; make",
        ),
    ],
    ids=["sparse", "csr", "jagged", "nested", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_tensors_are_refused_with_advice(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        called(ANY, X, make())


class Lost(nn.Module):
    """Half of it is somewhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(6, 6)
        self.there = nn.Linear(6, 6, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.there(self.here(x))


def _ids(model: Small, x: Tensor) -> Tensor:
    return model.table(x)


@pytest.mark.parametrize(
    ("model", "args", "error", "message"),
    [
        (nn.Linear(6, 6), (), UsageError, "called without any tensor; it needs at least one batch"),
        (nn.Linear(6, 6), (3, None), UsageError, r"without any tensor \(with 3, None\)"),
        (nn.Linear(6, 6), ([[1.0] * 6] * 4,), UsageError, r"\(with 1.0, 1.0, 1.0, ...\).* torch.tensor\(x\)"),
        (nn.Linear(6, 6), (torch.tensor(1.0),), UsageError, r"no argument carries the batch .*argument 0: \(\)"),
        (nn.LazyLinear(6), (X,), UsageError, "parameter weight of the model has no shape yet .*call the model once"),
        (Lost(), (X.float(),), TraceError, "there .*parameters are on several devices: here.* on cpu, there.* on meta"),
        (small(_ids), (X,), TraceError, r"module table \(Embedding\) fails, at \S*pieces.py:\d+: RuntimeError"),
        (
            nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 6)),
            (X.float(),),
            TraceError,
            r"module 1 \(Linear\) fails.*\(2x5 and 6x6\) \(tried .* the shapes 2x6; those of the call have 4x6\)",
        ),
        (
            small(lambda m, x, y: cross_entropy(x @ m.w, y)),
            (X, torch.zeros(5, dtype=torch.long)),
            TraceError,
            "Note: argument 1 has 5 rows and argument 0 has 4: tensors with another number of rows",
        ),
        (
            small(lambda m, x, y: x @ m.w * torch.tensor(y)[:, None]),
            (X, [1.0, 2.0, 3.0, 4.0]),
            TraceError,
            r"Note: argument 1 is a list of 4 numbers, .* make a tensor of it",
        ),
        (small(lambda m, x: 7), (X,), TraceError, "the model returns no tensor; it has to return tensors"),
        (small(lambda m, x: None), (X,), TraceError, "the model returns no tensor"),
        (small(lambda m, x: Thing()), (X,), TraceError, r"the model returns no tensor, only the result \(\S+Thing\)"),
        (small(lambda m, x, y: x), (X,), TraceError, "missing 1 required positional argument: 'y'"),
    ],
    ids=[
        "nothing", "numbers", "lists", "scalar", "lazy", "two devices", "float ids", "width", "rows differ",
        "list of labels", "number out", "none out", "object out", "missing argument",
    ],
)  # fmt: skip
def test_calls_are_refused_with_advice(
    model: nn.Module, args: tuple[Any, ...], error: type[RanndError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        called(model, *args)


def test_a_meta_tensor_is_another_call() -> None:
    """It must not be taken for one that the graph can run."""
    call = flatten_call((X,), {})
    mode = Mode.current(True)
    signature = classify(call, mode, [call.shapes()])
    assert signature.matches(call, mode)
    assert not signature.matches(flatten_call((X.to("meta"),), {}), mode)


def test_a_whole_model_on_meta_is_planned() -> None:
    """Its tensors may be there, too."""
    model = nn.Linear(6, 6, device="meta")
    graph, _ = called(model, torch.empty(4, 6, device="meta"))
    assert [param.bytes for param in graph.task.params] == [144, 24]
