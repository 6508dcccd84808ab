"""Fingerprints: equal wherever a trace would be equal, different after every change that a trace may see."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from pieces import graph_of, signature_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from user_code import differences, seen

from rannd.graph.fingerprint import provenance
from rannd.graph.fingerprint.fingerprint import Fingerprint, fingerprint
from rannd.sources import TRACING, digest_of


class Act(enum.Enum):
    RELU = 1
    TANH = 2


class Level(enum.IntEnum):
    LOW = 1


class Count(int):
    pass


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Options:
    rate: float = 0.5
    names: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])
    inner: dict[str, Any] = dataclasses.field(default_factory=dict)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: object) -> None:
        self.a = a


class Net(nn.Module):
    """Something of everything."""

    def __init__(self, *, layers: int = 2, width: int = 4, tied: bool = False, act: Any = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.1)) for _ in range(layers)
        )
        if tied:
            self.layers[1][0].weight = self.layers[0][0].weight
        self.act = act
        self.options = Options()
        self.value: Any = None
        self.constant = torch.ones(3)
        self.register_buffer("state", torch.zeros(width))

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x)) + self.state
        return x


def reference() -> Fingerprint:
    """Made anew in each test: libraries that are imported on the way may put functions of theirs into torch."""
    return seen(Net())


def test_weights_and_batch_size_do_not_matter() -> None:
    torch.manual_seed(3)
    assert seen(Net()) == reference()
    for rows in (1, 2, 7):
        assert seen(Net(), torch.randn(rows, 4)) == reference()
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert seen(model) == reference()


def test_a_tensor_whose_memory_was_let_go_of() -> None:
    """As parameters that replicas divide are outside of their use: to read one would end the process."""
    model = Net()
    model.value = [torch.ones(2000)[1000:]]  # part of a bucket
    model.value[0].untyped_storage().resize_(0)
    assert differences(seen(model), reference()) == {"modules"}
    graph_of(model, torch.randn(2, 4))


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"layers": 3}, {"modules", "tensors"}),
        ({"tied": True}, {"tensors"}),
        ({"act": torch.relu}, {"modules"}),
        ({"act": F.gelu}, {"modules"}),
        ({"act": torch.nn.functional.silu}, {"modules", "code"}),
    ],
    ids=["layers", "tied", "relu", "gelu", "silu"],
)
def test_another_model(options: dict[str, Any], where: set[str]) -> None:
    assert differences(seen(Net(**options)), reference()) == where


def test_width() -> None:
    assert differences(seen(Net(width=8), torch.ones(3, 8)), reference()) >= {"modules", "tensors", "call"}


VALUES: tuple[Any, ...] = (
    None, False, True, 0, 1, 2, -1, 2**80, 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e-5, 1e-6, 0j, -0j, 1 + 0j,
    "", "1", "None", "a", "a,b", "a'", "\ud800", b"", b"1", b"a", (), [], {}, set(), frozenset(), (1,), [1], (1.0,),
    (True,), (1, 2), (2, 1), [1, 2], [[1], 2], [1, [2]], [(1, 2)], ((1, 2),), ("a", "b"), ("a,b",), ["a", "b"],
    {1: 2}, {"1": 2}, {1: 2.0}, {1: 2, 3: 4}, {3: 4, 1: 2}, {"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"c": 1}},
    {1}, {"a"}, {"a", "b"}, frozenset({"a"}), frozenset({1}), OrderedDict(a=1), OrderedDict(b=1), {"a": 1},
    defaultdict(int, a=1), defaultdict(list, a=1), deque([1]), deque([1], 3), range(3), range(0, 3, 2), range(4),
    slice(1), slice(1, None), slice(0, 1), Act.RELU, Act.TANH, Level.LOW, Count(1), Pair(1, 2), Pair(2, 1),
    Options(), Options(rate=1.0), Options(names=["a"]), Options(inner={"a": 1}), Options(inner={"a": Act.RELU}),
    Slotted(1), Slotted(1.0), types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), types.SimpleNamespace(b=1),
    torch.float32, torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), torch.device("meta"),
    torch.Size([1]), torch.Size([2]), torch.ones(2), torch.ones(3), torch.zeros(2), torch.ones(2, 1),
    torch.ones(2).double(), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int32), -torch.zeros(2),
    torch.ones(2, 2), torch.ones(2, 3).T, torch.ones(3, 2), torch.empty(2, device="meta"), nn.Parameter(torch.ones(2)),
    np.ones(2), np.zeros(2), np.ones(2, np.float32), np.ones((1, 2)), np.float64(1), np.float32(1), np.int64(1),
    np.dtype("f4"), np.dtype("f8"), functools.partial(F.gelu), functools.partial(F.gelu, approximate="tanh"),
    functools.partial(torch.add, 1), functools.partial(torch.add, 2), F.relu, F.gelu, torch.relu, torch.add, max, min,
    len, math.sin, math.cos, nn.Linear, nn.LayerNorm, int, float, Act, Options, Ellipsis, NotImplemented,
    lambda x: x, lambda x: x + 1, lambda x: x + 1.0, lambda x: x * 1, lambda y: y, lambda x, y=1: x, lambda x, y=2: x,
    torch.ops.aten.relu, torch.ops.aten.gelu, torch.ops.aten.relu.default, [nn.Linear(2, 2, bias=False).weight],
)  # fmt: skip


def held(value: Any) -> Fingerprint:
    model = Net()
    model.value = value
    return seen(model)


def test_every_value_of_an_attribute_is_another() -> None:
    found: dict[tuple[str, ...], list[Any]] = {}
    for value in VALUES:
        components = held(value).components
        found.setdefault(tuple(components[name] for name in sorted(components)), []).append(value)
    same = [values for values in found.values() if len(values) > 1]
    assert not same


def test_every_value_is_another_inside_containers_and_objects() -> None:
    """Nothing is lost on the way down."""
    for wrap in (lambda v: [v], lambda v: {"k": (v,)}, lambda v: Options(inner={"x": [v]}), Slotted):
        found = {tuple(sorted(held(wrap(value)).components.items())) for value in VALUES}
        assert len(found) == len(VALUES)


def test_keys_of_dicts_are_another() -> None:
    keys = [value for value in VALUES if value.__hash__ is not None and not isinstance(value, (Tensor, Options))]
    assert len({tuple(sorted(held({key: 1}).components.items())) for key in keys}) == len(keys)


def test_equal_values_have_equal_fingerprints() -> None:
    for one, other in (
        ([1, {"a": (2.5, "b")}], [1, {"a": (2.5, "b")}]),
        ({"b", "a", "c"}, {"c", "b", "a"}),
        (Options(inner={"a": Slotted(3)}), Options(inner={"a": Slotted(3)})),
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3)),
        (np.arange(3.0), np.arange(3.0)),
        (float("nan"), math.nan),
        (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu, approximate="tanh")),
    ):
        assert held(one) == held(other)


def test_sharing_and_cycles() -> None:
    shared = [1]
    assert held([shared, shared]) != held([[1], [1]])
    assert held([shared, [1], shared]) != held([shared, [1], [1]])
    cycle: list[Any] = []
    cycle.append(cycle)
    assert held(cycle) != held([[]])
    other: list[Any] = []
    other.append(other)
    assert held(cycle) == held(other)
    parent = Net()
    parent.value = (parent, parent.layers[1])
    swapped = Net()
    swapped.value = (swapped.layers[1], swapped)
    assert seen(parent) != seen(swapped)


def first(model: Net) -> nn.Linear:
    return model.layers[0][0]  # type: ignore[no-any-return,index]


def hook(module: nn.Module, args: Any) -> None: ...


def other_hook(module: nn.Module, args: Any) -> None:
    print(args)


def double_hook(module: nn.Module, args: Any, result: Any) -> Any:
    return result * 2


def two_layers(model: Net) -> nn.Module:
    return model.layers[1][2]  # type: ignore[no-any-return,index]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "one submodule in eval": lambda m: two_layers(m).eval(),
    "another submodule in eval": lambda m: m.layers[0][2].eval(),
    "dropout": lambda m: setattr(two_layers(m), "p", 0.2),
    "eps": lambda m: setattr(m.layers[0][1], "eps", 1e-6),
    "requires_grad": lambda m: first(m).weight.requires_grad_(False),
    "parameter of another dtype": lambda m: setattr(first(m), "bias", nn.Parameter(first(m).bias.double())),
    "parameter of another shape": lambda m: setattr(first(m), "bias", nn.Parameter(torch.zeros(1))),
    "parameter of another layout": lambda m: setattr(
        first(m), "weight", nn.Parameter(torch.zeros(4, 4).T.contiguous().T)
    ),
    "parameter is none": lambda m: setattr(first(m), "bias", None),
    "parameters share memory": lambda m: setattr(
        m.layers[1][0], "weight", nn.Parameter(first(m).weight.detach().view(4, 4))
    ),
    "attribute of a parameter": lambda m: setattr(first(m).weight, "scale", 2),
    "tied": lambda m: setattr(m.layers[1][0], "bias", first(m).bias),
    "shared module": lambda m: m.layers[1].__setitem__(0, first(m)),
    "new buffer": lambda m: m.register_buffer("more", torch.zeros(2)),
    "new buffer, not stored": lambda m: m.register_buffer("more", torch.zeros(2), persistent=False),
    "buffer is a parameter": lambda m: (delattr(m, "state"), setattr(m, "state", nn.Parameter(torch.zeros(4)))),
    "new module": lambda m: m.add_module("more", nn.Identity()),
    "place of a module": lambda m: m.register_module("more", None),
    "module of another class": lambda m: m.layers[0].__setitem__(1, nn.RMSNorm(4)),
    "modules in another order": lambda m: setattr(m.layers, "0", nn.Sequential(*[m.layers[0][k] for k in (1, 0, 2)])),
    "renamed module": lambda m: (m.add_module("stages", m.layers), delattr(m, "layers"), m.stages),
    "new attribute": lambda m: setattr(m, "more", 1),
    "attribute of a submodule": lambda m: setattr(two_layers(m), "more", 1),
    "attribute gone": lambda m: delattr(m, "value"),
    "in a list in an object": lambda m: m.options.names.append("c"),
    "in a dict in an object": lambda m: m.options.inner.update(a=1),
    "contents of a tensor": lambda m: m.constant.fill_(2),
    "forward of one module": lambda m: setattr(two_layers(m), "forward", lambda x: x),
    "another forward of one module": lambda m: setattr(two_layers(m), "forward", lambda x: x + 1),
    "forward of the model": lambda m: setattr(m, "forward", lambda x: x),
    "forward of another class": lambda m: setattr(m, "forward", types.MethodType(nn.Identity.forward, m)),
    "another class": lambda m: setattr(m.layers[0][2], "__class__", nn.AlphaDropout),
    "pre-hook": lambda m: first(m).register_forward_pre_hook(hook),
    "another pre-hook": lambda m: first(m).register_forward_pre_hook(other_hook),
    "pre-hook with keywords": lambda m: first(m).register_forward_pre_hook(hook, with_kwargs=True),
    "hook": lambda m: first(m).register_forward_hook(double_hook),
    "hook that is always called": lambda m: first(m).register_forward_hook(double_hook, always_call=True),
    "hook of another module": lambda m: two_layers(m).register_forward_hook(double_hook),
    "backward hook": lambda m: first(m).register_full_backward_hook(double_hook),
    "backward pre-hook": lambda m: first(m).register_full_backward_pre_hook(hook),
    "hidden module": lambda m: setattr(m, "value", [nn.Linear(2, 2)]),
    "hidden module, other weights": lambda m: setattr(m, "value", [nn.Linear(2, 2).requires_grad_(False)]),
    "spectral norm": lambda m: parametrizations.spectral_norm(first(m)),
    "weight norm": lambda m: parametrizations.weight_norm(first(m)),
    "weight norm of another dimension": lambda m: parametrizations.weight_norm(first(m), dim=1),
    "orthogonal": lambda m: parametrizations.orthogonal(first(m)),
    "double": lambda m: m.double(),
    "meta": lambda m: m.to("meta"),
    "eval": lambda m: m.eval(),
}


def changed(name: str) -> Net:
    torch.manual_seed(0)
    model = Net()
    CHANGES[name](model)
    return model


def test_every_change_is_another() -> None:
    found = {name: tuple(sorted(seen(changed(name)).components.items())) for name in CHANGES}
    found["none"] = tuple(sorted(reference().components.items()))
    for one in found:
        assert [other for other in found if found[other] == found[one]] == [one]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_made_again_is_the_same(name: str) -> None:
    assert seen(changed(name)) == seen(changed(name))


def test_hooks_count_by_order_not_by_number() -> None:
    model = Net()
    first(model).register_forward_pre_hook(hook).remove()
    first(model).register_forward_pre_hook(hook)
    assert seen(model) == seen(changed("pre-hook"))
    both, swapped = Net(), Net()
    for target, order in ((both, (hook, other_hook)), (swapped, (other_hook, hook))):
        for each in order:
            first(target).register_forward_pre_hook(each)
    assert seen(both) != seen(swapped)


def test_hooks_of_all_modules() -> None:
    before = reference()
    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        assert differences(seen(Net()), before) == {"modules", "code"}
    finally:
        handle.remove()
    assert seen(Net()) == before


# ---- the call


class Cell:
    """A container of the user's, registered with torch."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def take(cell: Cell) -> tuple[list[Any], str]:
    return [cell.a, cell.b], "ab"


def make(values: Any, context: str) -> Cell:
    return Cell(*values)


def take_with_keys(cell: Cell) -> tuple[list[Any], str]:
    return [(pytree.MappingKey("a"), cell.a), (pytree.MappingKey("b"), cell.b)], "ab"


pytree.register_pytree_node(Cell, take, make, flatten_with_keys_fn=take_with_keys)

X = torch.ones(3, 4)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "keyword": ((), {"x": X}),
    "double": ((X.double(),), {}),
    "gradient": ((X.clone().requires_grad_(),), {}),
    "wider": ((torch.ones(3, 5),), {}),
    "deeper": ((torch.ones(3, 4, 1),), {}),
    "two": ((X, X), {}),
    "whole": ((X, torch.ones(5, 4)), {}),
    "list": ((X, [X]), {}),
    "tuple": ((X, (X,)), {}),
    "dict": ((X, {"a": X}), {}),
    "other key": ((X, {"b": X}), {}),
    "cell": ((X, Cell(X, 1)), {}),
    "cell, constant": ((X, Cell(X, 2)), {}),
    "cell, swapped": ((X, Cell(1, X)), {}),
    "named": ((X,), {"a": X}),
    "otherwise named": ((X,), {"b": X}),
    **{f"constant {value!r}": ((X, value), {}) for value in (None, 1, True, 1.0, 0.0, -0.0, "1", 1j, torch.float16)},
    "named constant": ((X,), {"a": 1}),
}


def test_every_call_is_another() -> None:
    found = {name: seen(Net(), *args, **named).components["call"] for name, (args, named) in CALLS.items()}
    found["none"] = reference().components["call"]
    for one in found:
        assert [other for other in found if found[other] == found[one]] == [one]


def test_functions_that_take_containers_apart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    args, named = CALLS["cell"]
    before = seen(Net(), *args, **named)
    node = pytree.SUPPORTED_NODES[Cell]
    monkeypatch.setitem(
        pytree.SUPPORTED_NODES, Cell, node._replace(unflatten_fn=lambda values, context: Cell(*reversed(list(values))))
    )
    assert differences(seen(Net(), *args, **named), before) >= {"call"}


@contextmanager
def switched(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


cuda = torch.backends.cuda
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "type of autocast": lambda: switched(
        lambda: torch.get_autocast_dtype("cpu"), lambda v: torch.set_autocast_dtype("cpu", v), torch.float16
    ),
    "type": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "flash": lambda: switched(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "memory efficient": lambda: switched(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    "math": lambda: switched(cuda.math_sdp_enabled, cuda.enable_math_sdp, False),
    "mkldnn": lambda: switched(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "fast path": lambda: switched(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
}  # fmt: skip


def test_every_mode_is_another() -> None:
    model = Net()
    before = reference()
    found = {"none": before.components["mode"]}
    signature, _ = signature_of(model, X)
    for name, mode in MODES.items():
        with mode():
            one = seen(model, X)
            # the signature says nothing of most switches
            other = fingerprint(model, signature, torch.device("cpu"))
        assert differences(one, before) - {"call"} == {"mode"}, name
        assert isinstance(other, Fingerprint)
        found[name] = one.components["mode"]
    assert len(set(found.values())) == len(found)
    assert seen(model) == before


class Boxed(nn.Module):
    """Gives back a container of the user's."""

    def forward(self, x: Tensor) -> Cell:
        return Cell(x, x * 2)


def test_how_containers_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seen(Boxed())
    node = pytree.SUPPORTED_NODES[Cell]
    monkeypatch.setitem(pytree.SUPPORTED_NODES, Cell, node._replace(flatten_fn=lambda cell: ([cell.b, cell.a], "ba")))
    assert differences(seen(Boxed()), before) == {"code"}


class Reader(nn.Module):
    """Looks into a buffer while it is traced."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("flag", torch.full((1,), value))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.flag > 0 else self.linear(-x) * float(self.flag)


def test_buffers_are_no_part_of_graphs_even_where_code_reads_them() -> None:
    """Or fingerprints, which do not know their values, would be equal for graphs that differ."""
    assert seen(Reader(1.0)) == seen(Reader(-1.0))
    one, other = (graph_of(Reader(value), X).task.graph_hash for value in (1.0, -1.0))
    assert one == other


def test_versions_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    real = provenance.installed

    def pretended(distribution: str, version: str) -> Fingerprint:
        with monkeypatch.context() as patch:
            patch.setattr(
                provenance, "installed", lambda name: (version, real(name)[1]) if name == distribution else real(name)
            )
            provenance.requirements_of.cache_clear()
            return seen(Net())

    before = reference()
    try:
        assert pretended("torch", provenance.version_of("torch")) == before
        for name in ("torch", "sympy"):
            assert differences(pretended(name, "0.1.2"), before) == {"versions"}
        assert pretended("rannd", "0.1.2") == before  # metadata of an editable install that went on
        with monkeypatch.context() as patch:
            patch.setattr(provenance, "__version__", "0.1.2")
            assert differences(seen(Net()), before) == {"versions"}
    finally:
        provenance.requirements_of.cache_clear()


def test_the_sources_of_the_tracer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files these are: tests/test_sources.py."""
    before = seen(Net())
    assert before.components["tracer"] == digest_of(TRACING)
    monkeypatch.setattr(importlib.import_module("rannd.graph.fingerprint.fingerprint"), "digest_of", "of {}".format)
    assert differences(seen(Net()), before) == {"tracer"}


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("a = 1\n")
    before = provenance.file_digest(str(path))
    path.write_text("a = 12\n")
    assert provenance.file_digest(str(path)) != before
    path.unlink()
    assert provenance.file_digest(str(path)) == "no file"


# ---- nothing is touched


class Watchful(nn.Module):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__["asked"] = []
        self.__dict__["shy"] = Shy()

    def __getattr__(self, name: str) -> Any:
        self.__dict__["asked"].append(name)
        return super().__getattr__(name)

    @property
    def costly(self) -> int:
        self.__dict__["asked"].append("costly")
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.costly


class Shy:
    """Raises whatever is done with it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def _never(self, *args: Any) -> Any:
        raise AssertionError("something of the user's was run")

    __eq__ = __repr__ = __str__ = __len__ = __iter__ = __bool__ = __call__ = __getstate__ = _never  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def test_nothing_of_the_users_is_run_and_nothing_changes() -> None:
    torch.manual_seed(0)
    model = Watchful()
    generator, state = torch.get_rng_state().clone(), {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    model.__dict__["asked"].clear()
    signature, _ = signature_of(model, X)
    model.__dict__["asked"].clear()
    assert isinstance(fingerprint(model, signature, torch.device("cpu")), Fingerprint)
    assert model.__dict__["asked"] == []
    assert torch.equal(torch.get_rng_state(), generator)
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    with nullcontext():
        assert fingerprint(model, signature, torch.device("cpu")) == fingerprint(model, signature, torch.device("cpu"))
