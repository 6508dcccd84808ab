"""Custom autograd.Functions: each call is one operator, under whatever name and wherever it is, amid a graph."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leaf_models import WIDTH, Apart, Between, Root, check
from pieces import CPU, graph_of
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rannd.graph.model import ModelGraph, build
from rannd.graph.modules.autograd_functions import _with_parameters, function_part, function_path
from rannd.graph.stored.codec import decode, encode
from rannd.graph.stored.encoding import Uncodable

pytestmark = pytest.mark.usefixtures("double")


class Triple(torch.autograd.Function):
    """Its backward is three times the truth, so that a lost one is seen."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, scale: float = 1.0) -> Tensor:
        ctx.save_for_backward(a)
        return a.sin() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (a,) = ctx.saved_tensors
        return gradients[0] * a.cos() * 3, None


class Later(torch.autograd.Function):
    """In the newer form: the context is set up apart."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return a.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos() * 3


TRIPLE, LATER = function_path(Triple), function_path(Later)

alias = Triple.apply
partial = functools.partial(Triple.apply, scale=1.0) if torch.__version__ >= "2.15" else functools.partial(Triple.apply)


def ops(graph: ModelGraph) -> int:
    """Operators that can be placed on their own."""
    return len(graph.nodes)


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (lambda a: Triple.apply(a), TRIPLE),
        (lambda a: alias(a), TRIPLE),
        (Triple.apply, TRIPLE),
        (partial, TRIPLE),
        (functools.partial(Triple.apply), TRIPLE),
        (lambda a: Triple.apply(a, 0.5), TRIPLE),
        (lambda a: Later.apply(a), LATER),
        (Later.apply, LATER),
    ],
    ids=["direct", "alias", "attribute", "partial", "partial object", "constant", "newer form", "newer attribute"],
)
def test_a_call_is_an_operator_under_every_name(function: Callable[..., Any], path: str) -> None:
    graph = check(Root(function), (path,))
    assert ops(graph) > 3  # both layers and the call can be placed apart


class Pair(torch.autograd.Function):
    """Two results, of which one has no gradient, and a parameter among the arguments."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, flag: bool, nothing: None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, weight)
        order = a.argmax(dim=1)
        ctx.mark_non_differentiable(order)
        return (a * weight if flag else a), order

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * a).sum(0) * 3, None, None


class WithParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Any:
        b, order = Pair.apply(self.layer(a), self.weight, True, None)
        return b, order + 1


def test_parameters_constants_and_results_without_gradient() -> None:
    check(WithParameter(), (function_path(Pair),))


class Inner(torch.autograd.Function):
    """Calls another Function inside, with gradients enabled."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        with torch.enable_grad():
            given = a.detach().requires_grad_()
            result = Triple.apply(given)
        ctx.save_for_backward(given, result)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given, result = ctx.saved_tensors
        return torch.autograd.grad(result, given, gradients[0], retain_graph=True)[0]


def test_functions_inside_functions() -> None:
    check(Root(lambda a: alias(Inner.apply(a)) + Triple.apply(a)), (function_path(Inner), TRIPLE))


class Identity(torch.autograd.Function):
    """Gives back what it gets, as layers that reverse gradients do."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.view_as(a)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Same(Identity):
    """Inherits what it does."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a


@pytest.mark.parametrize("function", [Identity, Same])
def test_functions_that_return_their_argument(function: type[torch.autograd.Function]) -> None:
    check(Root(function.apply), (function_path(function),))


def test_a_function_and_its_base() -> None:
    class Further(Triple):
        pass

    check(Root(lambda a: Further.apply(Triple.apply(a))), (TRIPLE, function_path(Further)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def inner(self, a: Tensor) -> Tensor:
        return Triple.apply(self.layer(a))

    def forward(self, a: Tensor) -> Any:
        return checkpoint(self.inner, a, use_reentrant=self.reentrant).cos()


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_what_the_user_checkpoints(reentrant: bool) -> None:
    check(Checkpointed(reentrant), (TRIPLE,))


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 6


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], a: Tensor) -> Tensor:
        return function(a)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0] * 3


@pytest.mark.parametrize(
    "function",
    [lambda a: Writing.apply(a * 1), lambda a: Calling.apply(torch.sin, a)],
    ids=["writes into its argument", "gets a function"],
)
def test_what_no_operator_can_be_makes_its_module_one(function: Callable[..., Any]) -> None:
    graph = check(Between(Apart(function)), ("inner",))
    assert any("cannot run as one operator" in line for line in graph.traced.record)


def test_a_class_that_every_call_makes_anew() -> None:
    def function(a: Tensor) -> Any:
        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, a: Tensor) -> Tensor:
                return a.sin()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return gradients[0] * 3

        return Local.apply(a)

    check(Between(Apart(function)), ("inner",))


class Kernel:
    """In place of a Triton kernel: launched on a grid, it reads and writes memory by its address."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[Tensor, Tensor, int], None]:
        def launch(a: Tensor, out: Tensor, count: int) -> None:
            ctypes.memmove(out.data_ptr(), a.data_ptr(), count * a.element_size())

        return launch


kernel = Kernel()


class Launching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        out = torch.empty_like(a)
        kernel[(1,)](a.contiguous(), out, a.numel())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


def test_a_kernel_that_needs_addresses_inside_a_function() -> None:
    check(Root(Launching.apply), (function_path(Launching),))


@torch.library.custom_op("rannd_tests::tripled", mutates_args=())
def tripled(a: Tensor) -> Tensor:
    return a.sin()


@tripled.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 3


tripled.register_autograd(_backward)


def test_operators_of_torch_library_stand_in_the_graph() -> None:
    check(Root(tripled), ())


def test_a_trace_with_functions_is_kept_and_loaded() -> None:
    model = Root(alias)
    graph = graph_of(model, torch.randn(4, WIDTH))
    loaded, _ = decode(encode(graph.traced, None), model)
    assert loaded.leaf_paths == (TRIPLE,)
    other = build(model, graph.signature, [torch.randn(4, WIDTH)], CPU, loaded)
    assert other.task.graph_hash == graph.task.graph_hash


def test_a_class_that_no_other_run_would_find_is_not_kept() -> None:
    class Local(Triple):
        pass

    graph = graph_of(Root(Local.apply), torch.randn(4, WIDTH))
    with pytest.raises(Uncodable, match="Local"):
        encode(graph.traced, None)


def test_only_functions_are_found_by_their_names() -> None:
    with pytest.raises(LookupError):
        function_part("..function builtins:eval")
    with pytest.raises(LookupError):
        function_part("..function os:system")
    with pytest.raises(LookupError):
        function_part(f"..function {__name__}:Kernel")


def test_the_function_in_the_place_of_a_forward_has_its_parameters() -> None:
    """Newer versions of torch read them, to tell keyword arguments from others."""

    def own(ctx: Any, a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **others: int) -> None: ...

    made = _with_parameters(own, lambda *args, **kwargs: (args, kwargs))
    assert made(0, 1, c=3) == ((0, 1, 2), {"c": 3, "d": 4})
    assert made(0, 1, 5, 6, 7, c=3, e=8) == ((0, 1, 5, 6, 7), {"c": 3, "d": 4, "e": 8})

    def bare(*, only: int) -> None: ...

    assert _with_parameters(bare, lambda **kwargs: kwargs)(only=1) == {"only": 1}
    assert inspect.signature(made) == inspect.signature(own)


class Plain(nn.Module):
    """Calls a class's forward as any function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, a: Tensor) -> Any:
        return self.function(self.layer(a))


def test_a_forward_that_is_called_directly_is_no_apply() -> None:
    check(Plain(lambda a: Later.apply(a) + 0.1 * Later.forward(a)), (LATER,))
    check(Plain(lambda a: 0.1 * Later.forward(a) + Later.apply(a)), (LATER,))
