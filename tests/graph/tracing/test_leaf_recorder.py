"""Opaque submodules: whatever their code does, the graph computes what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from leaf_models import WIDTH, Between, Counting, Deciding, Function, Masking, Nested, Pair, Scaled, check
from pieces import assert_same, eager, graph_of, in_pieces
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rannd.errors import TraceError, UsageError
from rannd.graph.modules.autograd_functions import function_path

pytestmark = pytest.mark.usefixtures("double")


def test_control_flow_that_depends_on_values() -> None:
    check(Between(Deciding()), ("inner",), rows=(4, 1, 3, 5, 2))


def test_functions_with_gradients_of_their_own() -> None:
    check(Between(Function()), (function_path(Scaled),))


class Caught(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        try:
            return Scaled.apply(a)
        except Exception:
            return a.sin()


def test_code_that_catches_every_exception_goes_its_usual_way() -> None:
    check(Between(Caught()), (function_path(Scaled),))


alias = Scaled.apply


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = Scaled.apply

    def forward(self, a: Tensor) -> Tensor:
        return alias(a) + self.function(a * 2)


def test_functions_under_another_name() -> None:
    check(Between(Aliased()), (function_path(Scaled),))


class NodeHooking(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = a * 2
        if b.requires_grad:
            b.grad_fn.register_hook(lambda taken, given: (taken[0] * 3, *taken[1:]))
        return b


class Saving(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
            return a.sin() * a


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, a: Tensor) -> Tensor:
        return a * self.scale.data * a.data


@pytest.mark.parametrize("inner", [NodeHooking, Saving, Detached], ids=["nodes", "saved tensors", "data"])
def test_what_else_a_graph_cannot_show(inner: type[nn.Module]) -> None:
    check(Between(inner()), ("inner",))


class Borrowing(nn.Module):
    """Uses a layer that is not its own."""

    def __init__(self, others: list[nn.Module]) -> None:
        super().__init__()
        self.others = others

    def forward(self, a: Tensor) -> Tensor:
        return self.others[0](a) if a.sum() > 0 else -self.others[0](a)


def test_a_leaf_that_uses_the_parameters_of_others_grows() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    pair = nn.ModuleDict({"layer": layer, "borrowing": Borrowing([layer])})

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = pair

        def forward(self, a: Tensor) -> Tensor:
            return self.pair["borrowing"](self.pair["layer"](a))

    check(Between(Pair()), ("inner",))


class Sharing(nn.Module):
    """Has one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = self.one

    def forward(self, a: Tensor) -> Tensor:
        return self.other(self.one(a)) if a.sum() > 0 else self.one(a)


def test_a_leaf_with_one_layer_under_two_names() -> None:
    model = Between(Sharing())
    weight = model.inner.one.weight
    graph = check(model, ("inner",))
    stage = in_pieces(graph, model, [torch.randn(4, WIDTH)], [4])
    assert stage
    assert model.inner.other.weight is model.inner.one.weight is weight


class Hooking(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = a * 2
        if b.requires_grad:
            b.register_hook(lambda gradient: gradient * 3)
        return b


def test_hooks_of_tensors() -> None:
    check(Between(Hooking()), ("inner",))


def test_backward_hooks_of_modules() -> None:
    model = Between(nn.Linear(WIDTH, WIDTH))
    model.inner.register_full_backward_hook(lambda module, taken, given: (taken[0] * 5,))
    graph = check(model, ("inner",))
    assert graph.traced.record == ("module inner (Linear) has backward hooks: runs as one operator",)


def test_forward_hooks_of_a_leaf_run_with_it() -> None:
    model = Between(Deciding())
    model.inner.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    model.inner.register_forward_hook(lambda module, given, made: made * 2 if made.sum() > 0 else made)
    check(model, ("inner",))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_user_are_looked_through(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, a: Tensor) -> Any:
            return checkpoint(lambda b: self.inner(b).sin(), a, use_reentrant=reentrant)

    check(Between(Checkpointed()), ())


def test_buffers_that_a_leaf_changes() -> None:
    graph = check(Between(Counting()), ("inner",))
    statistics = {f"inner.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert graph.placement.written == {"inner.count", "inner.mean", *statistics}


class Averaging(nn.Module):
    """Replaces a buffer, and keeps a tensor in an attribute; nothing else of it is hard to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.last: Tensor | None = None

    def forward(self, a: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + a.detach().mean(0) * 0.1
        made = a - self.mean
        self.last = made.detach()
        return made


def test_tensors_that_are_kept_from_call_to_call() -> None:
    graph = check(Between(Averaging()), ("inner",))
    assert graph.placement.written == {"inner.mean"}


class InPlace(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        if a.sum() > 0:
            return a.mul_(2)
        return a.mul_(3)


def test_arguments_that_a_leaf_changes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), InPlace()

        def forward(self, a: Tensor) -> Tensor:
            b = self.first(a)
            return self.inner(b) + b.sin()

    check(Model(), ("inner",))


class Views(nn.Module):
    """Returns its argument, a parameter, and two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, a: Tensor) -> Any:
        b = a * (2 if a.sum() > 0 else 3)
        return a, self.scale, b, b.t()


@pytest.mark.parametrize("writes", [False, True])
def test_results_that_share_memory(writes: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.views = nn.Linear(WIDTH, WIDTH), Views()

        def forward(self, a: Tensor) -> Tensor:
            a, scale, b, turned = self.views(self.first(a))
            return (a + scale) * (b.add_(1) if writes else b + 1) + turned.t()

    check(Between(Inner()), ("inner" if writes else "inner.views",))


def test_nested_arguments_and_results() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), Nested()

        def forward(self, a: Tensor) -> Any:
            b = self.first(a)
            return self.inner(Pair(b, {"two": b * 2}), scale=0.5, rows=a.shape[0], names=("x", "y"))

    check(Model(), ("inner",))


def test_a_leaf_that_is_called_twice() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Deciding()

        def forward(self, a: Tensor) -> Tensor:
            return self.inner(self.inner(a)[:, None]).flatten(1)

    check(Model(), ("inner",))


class Picking(nn.Module):
    """Makes as many rows as there are positive ones."""

    def forward(self, a: Tensor) -> Tensor:
        return a[a[:, 0] > 0] if a.abs().sum() > 0 else a[a[:, 1] > 0]


def test_sizes_that_depend_on_values() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), Picking()

        def forward(self, a: Tensor) -> Tensor:
            return self.inner(self.first(a)).sum(0)

    check(Model(), ("inner",), rows=(8, 3, 5))


def test_layers_of_one_kind_become_leaves_together() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.inner = nn.Linear(WIDTH, WIDTH), Deciding()

        def forward(self, a: Tensor) -> Tensor:
            return self.inner(self.attention(a))

    graph = check(nn.Sequential(Layer(), Layer(), Layer()), ("0.inner", "1.inner", "2.inner"))
    assert len([line for line in graph.traced.record if line.startswith("export failed")]) == 1


class Fixing(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in a])


def test_a_submodule_that_fixes_the_batch_is_found() -> None:
    deep = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), Between(Fixing())))
    check(Between(deep), ("inner.1.1.inner",))


def test_a_method_of_a_large_module_is_a_leaf_of_its_own() -> None:
    graph = check(Masking(), ("..masked",))
    assert graph.traced.record[-1] == "method masked of the model (Masking) runs as one operator"
    assert graph.placement.written == {"calls"}
    graph = check(Between(Masking()), ("inner..masked",))
    assert graph.placement.written == {"inner.calls"}


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ParameterList])
def test_a_tensor_that_selects_another_submodule_than_when_traced_is_told_as_such(kind: type[nn.Module]) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)
            layers = [nn.Linear(WIDTH, 2) for _ in range(3)]
            self.heads: Any = kind(layers if kind is nn.ModuleList else [each.weight for each in layers])

        def forward(self, a: Tensor, task: Tensor) -> Tensor:
            head = self.heads[task]
            return head(self.body(a)) if kind is nn.ModuleList else self.body(a) @ head.T

    model, rows = Heads(), torch.randn(4, WIDTH)
    graph = graph_of(model, rows, torch.tensor(0))
    assert_same(in_pieces(graph, model, [rows, torch.tensor(0)], [4]), eager(graph, model, [rows, torch.tensor(0)]))
    told = rf"a tensor selects an item of heads \({kind.__name__}\): item '1', but '0' when .* as a Python int"
    with pytest.raises(UsageError, match=told):
        in_pieces(graph, model, [rows, torch.tensor(1)], [4])


def test_a_method_that_uses_submodules_is_none() -> None:
    class Using(Masking):
        def masked(self, a: Tensor, *, sign: float) -> Tensor:
            return self.layers(a) * sign if a.sum() > 0 else a

    check(Between(Using()), ("inner",))

    class Reading(Masking):
        def masked(self, a: Tensor, *, sign: float) -> Tensor:
            weight = next(iter(self.parameters())) if sign > 2 else dict(self.named_parameters())["layers.0.weight"]
            return a @ weight if a.sum() > 0 else a

    check(Between(Reading()), ("inner",))


def test_a_model_that_nobody_can_trace_runs_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, a: Tensor) -> Tensor:
            return self.one(a) if float(a.sum()) > 0 else self.two(a)  # the code that stops it

    graph = check(Model(), ("",), rows=(4, 1, 3, 5))
    assert graph.traced.record[-1].startswith("the whole model runs as one operator, and cannot be cut: the model")
    assert __file__ in graph.traced.record[-1]
    assert len(graph.task.ops) == 2  # the operator, and the getitem that takes its result


def test_errors_of_the_model_itself_are_told_as_such() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH + 1, WIDTH)))
    with pytest.raises(TraceError, match=r"module 1\.0 \(Linear\) fails.*mat1 and mat2 shapes cannot be multiplied"):
        graph_of(model, torch.randn(3, WIDTH))


def test_tracing_leaves_no_trace_in_the_model() -> None:
    model = Between(Counting())
    model.inner.register_forward_hook(lambda module, given, made: made)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    graph_of(model, torch.randn(3, WIDTH))
    torch.set_rng_state(state)
    graph_of(model, torch.zeros(3, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    for name, module in model.named_modules():
        assert dict(module.__dict__) == before[name]
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
