"""What separates, and what stays whole: gradients are those of plain autograd in either case."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from halves import Halves
from thinned import one_in
from torch import Tensor, nn

from rannd.graph.weight_gradients.weight_queue import WeightQueue

pytestmark = pytest.mark.usefixtures("double")
ROWS, TIME, WIDTH = 5, 3, 6


class Model(nn.Module):
    """A model whose forward is a function of itself and one argument, with parameters to use."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.matrix, self.vector = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(9, WIDTH, padding_idx=2)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.grouped = nn.Conv1d(TIME, 6, 3, groups=3, dilation=2, bias=False)
        self.across = nn.ConvTranspose2d(2, 3, 2, stride=2, output_padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def halves(function: Callable[[Any, Tensor], Any], x: Tensor) -> Halves:
    return Halves(Model(function), x)


def x() -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def seq() -> Tensor:
    return torch.randn(ROWS, TIME, WIDTH, requires_grad=True)


def img() -> Tensor:
    return torch.randn(ROWS, 2, 4, 4, requires_grad=True)


def words() -> Tensor:
    return torch.randint(0, 9, (ROWS, TIME))


SEPARATE: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Tensor], tuple[str, ...]]] = {
    "linear": (lambda m, a: m.one(a).tanh(), x, ("one.weight", "one.bias")),
    "linear of a sequence": (lambda m, a: m.one(a).tanh(), seq, ("one.weight", "one.bias")),
    "linear without bias": (lambda m, a: m.two(a.tanh()), seq, ("two.weight",)),
    "linear of a transposed matrix": (lambda m, a: F.linear(a, m.matrix.t()), x, ("matrix",)),
    "written into": (lambda m, a: m.two(m.one(a).relu_()), seq, ("one.weight", "one.bias", "two.weight")),
    "matmul": (lambda m, a: (a @ m.matrix).tanh(), seq, ("matrix",)),
    "mm": (lambda m, a: torch.mm(a, m.matrix).tanh(), x, ("matrix",)),
    "mm of a view": (lambda m, a: torch.mm(a, m.two.weight.t()), x, ("two.weight",)),
    "addmm": (lambda m, a: torch.addmm(m.vector, a.tanh(), m.matrix), x, ("matrix", "vector")),
    "conv": (lambda m, a: m.conv(a).tanh(), img, ("conv.weight", "conv.bias")),
    "conv1d in groups": (lambda m, a: m.grouped(a), seq, ("grouped.weight",)),
    "conv_transpose": (lambda m, a: m.across(a).tanh(), img, ("across.weight", "across.bias")),
    "embedding": (lambda m, a: m.table(a), words, ("table.weight",)),
    "tied": (lambda m, a: F.linear(m.table(a), m.table.weight), words, ("table.weight",)),
    "twice": (lambda m, a: m.one(m.one(a).tanh()), x, ("one.weight", "one.bias")),
    "shared through views": (lambda m, a: F.linear(a @ m.two.weight, m.two.weight), x, ("two.weight",)),
    "beside what does not": (lambda m, a: m.norm(m.one(a)), x, ("one.weight", "one.bias")),
    "a parameter of the other operator": (
        lambda m, a: m.two(a) * m.one.bias + m.two(a), x, ("two.weight",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(3, SEPARATE))
def test_gradients_in_two_halves_are_those_of_autograd(name: str) -> None:
    function, make, names = SEPARATE[name]
    found = halves(function, make())
    assert found.separated is not None
    assert found.separated.names == set(names)
    found.check(*names)


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda m, a: m.norm(a), x),
        (lambda m, a: m.two(a) + m.two.weight.sum(), x),
        (lambda m, a: m.one(a) * m.one.bias, x),
        (lambda m, a: m.two(a @ m.two.weight.detach()), x),
        (lambda m, a: m.matrix.t() @ a[0], x),
        (lambda m, a: torch.addmm(m.vector, a, m.matrix, beta=2), x),
        (lambda m, a: torch.addmm(a[:, :4], a, m.matrix), x),
        (lambda m, a: F.embedding(a, m.table.weight * 2), words),
        (lambda m, a: F.linear(a, m.two.weight.relu()), x),
        (lambda m, a: F.conv2d(a, m.conv.weight, padding="same"), img),
        (lambda m, a: F.linear(m.two.weight, m.two.weight) + a.sum(), x),
    ],
)
def test_what_shares_a_parameter_with_another_operator_stays_whole(
    function: Callable[[Any, Tensor], Any], make: Callable[[], Tensor]
) -> None:
    assert halves(function, make()).separated is None


def test_a_parameter_that_is_not_trained_gets_no_gradient() -> None:
    found = halves(lambda m, a: m.two(m.one(a)).tanh(), x())
    model = found.model
    model.one.weight.requires_grad_(False)
    found.check("one.bias", "two.weight")
    model.one.bias.requires_grad_(False)
    assert set(found.check("two.weight").whole) == {"two.weight"}


def test_an_input_without_a_gradient_needs_none() -> None:
    found = halves(lambda m, a: m.two(m.one(a)).tanh(), x().detach())
    assert found.check("one.weight", "one.bias", "two.weight").inputs == [None]


def test_an_output_that_gets_no_gradient_leaves_its_parameters_without_one() -> None:
    found = halves(lambda m, a: (m.one(a), m.two(a)), x())
    assert set(found.check("one.weight", "one.bias", upstream=[torch.randn(ROWS, WIDTH)]).whole) == {
        "one.weight", "one.bias"
    }  # fmt: skip


@pytest.mark.parametrize("make", [x, seq])
def test_a_gradient_may_lie_in_memory_in_any_way(make: Callable[[], Tensor]) -> None:
    found = halves(lambda m, a: m.one(a), make())
    shape = found.run(halves=False).outputs[0].shape
    spread = torch.randn(*shape[:-1], 2 * WIDTH)[..., ::2]
    found.check("one.weight", "one.bias", upstream=[spread])
    found.check("one.weight", "one.bias", upstream=[torch.randn(*shape[::-1]).permute(*reversed(range(len(shape))))])
    found.check("one.weight", "one.bias", upstream=[torch.randn(()).expand(shape)])


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda m, a: F.linear(m.table(a), m.table.weight), True),
        (lambda m, a: m.table(a) @ m.two.weight + m.two(m.table(a)), True),
        (lambda m, a: m.table(a) @ m.two.weight.t() + m.two(m.table(a)), False),
    ],
)
def test_a_parameter_arrives_once_for_all_its_operators(function: Callable[[Any, Tensor], Any], told: bool) -> None:
    found = halves(function, words())
    calls: list[Tensor] = []
    for parameter in found.model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    ran = found.run(halves=True)
    names = {id(parameter): name for name, parameter in found.model.named_parameters()}
    assert sorted([*ran.told, *(names[id(each)] for each in calls)]) == sorted(ran.whole)
    assert bool(calls) is not told


@pytest.mark.parametrize(
    "which", [(lambda m, a: m.one(a), x), (lambda m, a: m.conv(a), img), (lambda m, a: m.table(a), words)]
)
def test_a_queue_that_is_never_played_lets_its_tensors_go(which: Any) -> None:
    """At once, not when cycles are collected: they are as large as the model."""
    found = halves(which[0], which[1]())
    state = dict(found.model.named_parameters())
    queue = WeightQueue()
    assert found.separated is not None
    made = found.separated.module(found.tensors[0], *(state[name] for name in found.part.tensors), queue)[0]
    upstream = torch.randn_like(made)
    held = weakref.ref(upstream)
    gc.collect()
    gc.disable()
    try:
        made.backward(upstream)
        del made, upstream
        assert len(queue) == 1
        assert held() is not None
        del queue
        assert held() is None
    finally:
        gc.enable()


def test_gradients_of_several_pieces_add_up() -> None:
    found = halves(lambda m, a: m.two(m.one(a)).tanh(), x())
    once = found.run(halves=True).whole
    queues = [WeightQueue(), WeightQueue()]
    found.model.zero_grad()
    for queue in queues:
        assert found.separated is not None
        state = dict(found.model.named_parameters())
        made = found.separated.module(found.tensors[0], *(state[name] for name in found.part.tensors), queue)
        generator = torch.Generator().manual_seed(3)
        made[0].backward(torch.randn(made[0].shape, generator=generator))
    assert [len(queue) for queue in queues] == [2, 2]
    for queue in queues:
        queue.accumulate(lambda _: None)
        assert len(queue) == 0
    for name, parameter in found.model.named_parameters():
        if name in once:
            torch.testing.assert_close(parameter.grad, 2 * once[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["linear", "linear of a sequence", "matmul", "addmm", "conv", "embedding", "written into"]
)
def test_under_autocast_the_casts_are_differentiated_too(name: str, dtype: torch.dtype) -> None:
    function, make, names = SEPARATE[name]
    torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        found = halves(function, make())
    gradients = found.check(*names, tolerance=2e-3 if dtype == torch.float16 else 2e-2).whole
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


@pytest.mark.parametrize("name", ["linear", "matmul", "conv", "embedding", "tied"])
def test_gradients_may_have_another_type_than_their_parameters(name: str) -> None:
    """As with master weights."""
    function, make, names = SEPARATE[name]
    torch.set_default_dtype(torch.bfloat16)
    found = halves(function, make())
    for parameter in found.model.parameters():
        parameter.grad_dtype = torch.float32
    gradients = found.check(*names, tolerance=2e-2).whole
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
