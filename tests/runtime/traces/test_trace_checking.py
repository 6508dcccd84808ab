"""verify_trace: a graph that is wrong is found by its values, and the module that is to blame runs as one operator."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from thinned import first, one_in
from torch import nn

import pyrannc
from rannd.errors import TraceError
from rannd.graph.modules import autograd_functions
from rannd.graph.modules.foreign_rng import unchanged
from rannd.graph.tracing import export, hook_proofs, simplify
from rannd.runtime.traces import trace_checking

WIDTH = 6


class Triple(torch.autograd.Function):
    """Its backward is three times the truth."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3


alias = Triple.apply
partial = functools.partial(alias)


def hooked(a: torch.Tensor) -> torch.Tensor:
    b = a * 2
    if b.requires_grad:
        b.register_hook(lambda gradient: gradient * 3)
    return b


def saving(a: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
        return a.sin() * a


def inferring(a: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        scale = a.abs().mean()
    return a * scale.clone()


def node_hooked(a: torch.Tensor) -> torch.Tensor:
    b = a * 2
    if b.requires_grad:
        b.grad_fn.register_hook(lambda taken, given: (taken[0] * 3, *taken[1:]))
    return b


def numpy_draws(a: torch.Tensor) -> torch.Tensor:
    return a * np.random.rand()


def python_draws(a: torch.Tensor) -> torch.Tensor:
    return a * random.random()


def branching(a: torch.Tensor) -> torch.Tensor:
    return a * 2 if a.sum() > 0 else a.sin()


def detached(a: torch.Tensor) -> torch.Tensor:
    return a * a.data


class Inner(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.function(a)


class Model(nn.Module):
    """Layers, and something in the middle: in a module of its own, or in the model's own forward."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], apart: bool) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = Inner(function) if apart else None
        self.function = function

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        b = self.norm(self.before(a))
        return self.after(self.inner(b) if self.inner is not None else self.function(b))


@contextlib.contextmanager
def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def off(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Switch hooks of the tracer off, and let nobody know."""
    hook_proofs.assume(())
    for name in names:
        monkeypatch.setattr(export, name, unchanged if name == "watch_foreign_rng" else nothing)


@pytest.fixture(autouse=True)
def proofs() -> Iterator[None]:
    yield
    hook_proofs._known.clear()


def wrapped(plain: nn.Module) -> pyrannc.RaNNCModule:
    model = copy.deepcopy(plain)
    return pyrannc.RaNNCModule(model, torch.optim.SGD(list(model.parameters()), lr=0.1))


def trains_like_the_model(function: Callable[[torch.Tensor], torch.Tensor], apart: bool) -> pyrannc.RaNNCModule:
    """Two steps with the same losses and gradients as the model alone; the numbers drawn are the same."""
    torch.manual_seed(0)
    plain = Model(function, apart).double()
    model = wrapped(plain)
    data = [torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(2)]
    outcomes = []
    for each in (model, plain):
        np.random.seed(5)
        random.seed(5)
        found = []
        for a in data:
            out = each(a)
            out.pow(2).sum().backward()
            found.append(out.detach())
        gradients = {name: parameter.grad for name, parameter in each.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in each.named_buffers()}
        outcomes.append((found, gradients, buffers))
    for one, other in zip(outcomes[0][0], outcomes[1][0], strict=True):
        torch.testing.assert_close(one, other)
    for number in (1, 2):
        for name, value in outcomes[1][number].items():
            torch.testing.assert_close(outcomes[0][number][name], value, msg=name)
    return model


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "Functions, direct": (("watch_gradients",), lambda a: Triple.apply(a)),
    "Functions, alias": (("watch_gradients",), lambda a: alias(a)),
    "Functions, attribute": (("watch_gradients",), Triple.apply),
    "Functions, partial": (("watch_gradients",), partial),
    "gradient hooks": (("watch_gradients",), hooked),
    "saved tensors": (("watch_gradients",), saving),
    "inference mode": (("watch_gradients",), inferring),
    "node hooks": (("NodesUnseen",), node_hooked),
    "numpy": (("watch_foreign_rng",), numpy_draws),
    "python": (("watch_foreign_rng",), python_draws),
    "branches": (("no_checkpoints",), branching),
    "data": ((), detached),
}


@pytest.mark.parametrize("apart", first(1, [True, False]), ids=["module", "root"])
@pytest.mark.parametrize("name", one_in(3, (name for name, (hooks, _) in FAULTS.items() if hooks)))
def test_a_planted_fault_is_found(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, function = FAULTS[name]
    off(monkeypatch, *hooks)
    trains_like_the_model(function, apart)


@pytest.mark.parametrize("apart", first(1, [True, False]), ids=["module", "root"])
@pytest.mark.parametrize("name", one_in(3, FAULTS))
def test_with_the_hooks_on_nothing_is_found(
    name: str, apart: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    found: list[trace_checking.Verdict] = []
    verdict = trace_checking.TraceChecker.verdict

    def noted(*args: Any, **kwargs: Any) -> trace_checking.Verdict:
        found.append(verdict(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(trace_checking.TraceChecker, "verdict", noted)
    trains_like_the_model(FAULTS[name][1], apart)
    assert found
    assert all(each.checked == "" for each in found)


def test_the_fault_is_wrong_without_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is for: without it the gradients are wrong, in silence."""
    off(monkeypatch, "watch_gradients")
    monkeypatch.setenv("RANNC_VERIFY_TRACE", "false")
    with pytest.raises(AssertionError, match="weight"):
        trains_like_the_model(lambda a: alias(a), True)


def test_the_module_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    off(monkeypatch, "watch_gradients")
    with caplog.at_level(logging.WARNING):
        trains_like_the_model(lambda a: alias(a), True)
    assert "module inner (Inner)" in caplog.text
    assert "the gradient of parameter norm.bias differs by" in caplog.text


class Deep(nn.Module):
    """Three equal blocks with a Function each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Model(lambda a: alias(a), True) for _ in range(3))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            a = a + block(a)
        return a.pow(2).mean()


def test_all_modules_of_the_kind_are_found_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    off(monkeypatch, "watch_gradients")
    torch.manual_seed(0)
    plain = Deep().double()
    model = wrapped(plain)
    found: list[tuple[str, ...]] = []
    verdict = trace_checking.TraceChecker.verdict

    def noted(*args: Any, **kwargs: Any) -> trace_checking.Verdict:
        made = verdict(*args, **kwargs)
        found.append(made.opaque)
        return made

    monkeypatch.setattr(trace_checking.TraceChecker, "verdict", noted)
    a = torch.randn(4, WIDTH, dtype=torch.float64)
    for each in (model, plain):
        each(a).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad, msg=name)
    assert set(found[0]) == {"blocks.0.inner", "blocks.1.inner", "blocks.2.inner"}
    assert found[1] == ()


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewriting of the graph that is wrong, in one module alone."""
    right = simplify.simplify

    def wrong(root: Any) -> None:
        right(root)
        for node in root.graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default

    monkeypatch.setattr(export, "simplify", wrong)
    model = trains_like_the_model(torch.sin, True)
    assert isinstance(model, pyrannc.RaNNCModule)


def test_a_buffer_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            self.seen.add_(a.detach().abs().sum())
            return a * 2

    right = simplify.simplify

    def wrong(root: Any) -> None:
        right(root)
        for node in list(root.graph.nodes):
            if node.target is torch.ops.aten.add_.Tensor and not node.users and "seen" in str(node.args):
                root.graph.erase_node(node)

    monkeypatch.setattr(export, "simplify", wrong)
    counting = Counting()
    model = pyrannc.RaNNCModule(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), counting), None)
    data = torch.randn(4, WIDTH, dtype=torch.float64)
    model(data)
    assert counting.seen.item() > 0


def test_what_is_not_the_same_twice_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")

    class State:
        calls = 0

    def counted(a: torch.Tensor) -> torch.Tensor:
        State.calls += 1
        return a * State.calls

    model = pyrannc.RaNNCModule(Model(counted, True).double(), None)
    with caplog.at_level(logging.INFO):
        model(torch.randn(4, WIDTH, dtype=torch.float64))
    assert "The trace was not compared with the model: the model gives different results in two calls" in caplog.text


def test_what_a_closure_counts_is_put_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As what an attribute counts; the model is the same twice then."""
    monkeypatch.setenv("RANNC_LOG_LEVEL", "debug")
    state = {"calls": 0}

    def counted(a: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        return a * state["calls"]

    model = pyrannc.RaNNCModule(Model(counted, True).double(), None)
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            model(torch.randn(4, WIDTH, dtype=torch.float64))
    assert "The trace gives the same results as the model" in caplog.text
    assert "forward assigns attribute function of module inner" in caplog.text
    assert caplog.text.count("Tracing model") == 1
    assert state == {"calls": 0}


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    monkeypatch.setattr(trace_checking, "room", lambda world, model: 0)
    with caplog.at_level(logging.INFO):
        trains_like_the_model(torch.sin, True)
    assert "was not compared with the model: rank 0 would need" in caplog.text


def test_whole_model_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the model as a single operator is right, it does not train."""
    right = trace_checking.compare_few
    monkeypatch.setattr(
        trace_checking,
        "compare_few",
        lambda *args, **kwargs: right(*args, **kwargs) or trace_checking.Mismatch("it", 1.0),
    )
    with pytest.raises(TraceError, match="the whole model runs as one operator"):
        trains_like_the_model(torch.sin, True)


def test_evaluation_after_training_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    compare = trace_checking.compare_few

    def noted(model: Any, graph: Any, tensors: Any) -> Any:
        found.append(graph.signature.mode.training)
        return compare(model, graph, tensors)

    monkeypatch.setattr(trace_checking, "compare_few", noted)
    model = trains_like_the_model(torch.sin, True)
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, WIDTH, dtype=torch.float64))
    assert found == [True, False]


def test_functions_are_replaced_at_their_class_only_while_tracing() -> None:
    before = dict(vars(Triple))
    trains_like_the_model(lambda a: alias(a), True)
    assert dict(vars(Triple)) == before
    assert autograd_functions.function_path(Triple).endswith("test_trace_checking:Triple")


class Momentum(nn.Module):
    """Writes into a parameter that nobody trains, and gives a parameter other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.center = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        b = self.layer(a)
        with torch.no_grad():
            self.center.lerp_(b.mean(0), 0.1)
        return b - self.center


def test_parameters_that_the_model_writes_are_put_back() -> None:
    torch.manual_seed(0)
    plain = Momentum().double()
    model = wrapped(plain)
    for _ in range(2):
        a = torch.randn(4, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(model(a), plain(a))
        torch.testing.assert_close(model.get_param("center"), plain.center.detach())


GENERATOR = torch.Generator()


def test_generators_that_the_model_knows_are_put_back() -> None:
    GENERATOR.manual_seed(3)
    model = wrapped(Model(lambda a: a * torch.rand(a.shape, generator=GENERATOR, dtype=a.dtype), True).double())
    model(torch.randn(4, WIDTH, dtype=torch.float64))
    assert GENERATOR.initial_seed() == 3


def test_hooks_of_parameters_do_not_run() -> None:
    net = Model(torch.sin, True).double()
    seen: list[str] = []
    net.after.weight.register_hook(lambda gradient: seen.append("hook"))
    out = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))(torch.randn(4, WIDTH).double())
    assert seen == []
    out.sum().backward()
    assert seen == ["hook"]


def test_sparse_gradients(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "debug")
    net = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with caplog.at_level(logging.DEBUG):
        model(torch.randint(0, 10, (4,))).sum().backward()
    assert "The trace gives the same results as the model" in caplog.text


def test_a_model_that_needs_two_rows_gets_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "debug")
    with caplog.at_level(logging.DEBUG):
        model = wrapped(Model(torch.sin, True).double())
        model(torch.randn(2, WIDTH, dtype=torch.float64))
    assert "The trace gives the same results as the model" in caplog.text


def test_under_inference_mode_and_another_default_device(caplog: pytest.LogCaptureFixture) -> None:
    hook_proofs._known.clear()
    with torch.inference_mode(), torch.device("meta"):
        assert hook_proofs.failing() == ()


def test_other_threads_go_on_while_a_model_is_traced() -> None:
    problems: list[BaseException] = []
    ended = threading.Event()

    def background() -> None:
        a = torch.ones(2, requires_grad=True)
        while not ended.is_set():
            try:
                with torch.inference_mode():
                    a.detach() * 2
                alias(a).sum().backward()
                (a * 2).register_hook(lambda gradient: gradient)
            except BaseException as exc:
                problems.append(exc)
                return

    thread = threading.Thread(target=background)
    thread.start()
    try:
        trains_like_the_model(lambda a: alias(a), True)
    finally:
        ended.set()
        thread.join()
    assert problems == []
