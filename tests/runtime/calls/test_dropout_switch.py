"""enable_dropout: on and off whatever the mode, for every way to write dropout; what it does not know stays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pyrannc
from rannd.errors import TraceError


class Written(nn.Module):
    """A forward of its own between two layers."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self, self.first(x)))
        return out


def _attention(m: Written, x: Tensor) -> Tensor:
    q = x[:, None].expand(-1, 5, -1) * torch.arange(1, 6, device=x.device)[:, None]
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.4 if m.training else 0.0)[:, 0]


def _frozen(m: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = functional.dropout(torch.ones_like(x), 0.5, m.training)
    return x * mask


def _opaque(m: Written, x: Tensor) -> Tensor:
    return m.inner(x)


class Opaque(nn.Module):
    """Runs as one operator: its code reads a number from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.layer(x)) * x.detach().abs().max().item()
        x = functional.dropout(x, 0.3, training=self.training)
        q = x[:, None].expand(-1, 3, -1)
        return self.attention(q, q, q, need_weights=False)[0][:, 0] + 1e-3 * x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: Written(lambda m, x: m.drop(x), drop=nn.Dropout(0.5)),
    "in place": lambda: Written(lambda m, x: m.drop(torch.relu(x)), drop=nn.Dropout(0.5, inplace=True)),
    "function": lambda: Written(lambda m, x: functional.dropout(x, 0.5, m.training)),
    "by name": lambda: Written(lambda m, x: functional.dropout(x, p=0.5, training=m.training, inplace=True)),
    "channels": lambda: Written(lambda m, x: functional.dropout1d(x[:, None], 0.5, m.training)[:, 0]),
    "alpha": lambda: Written(lambda m, x: m.drop(x), drop=nn.AlphaDropout(0.5)),
    "attention": lambda: Written(_attention),
    "multihead": lambda: Written(
        lambda m, x: m.inner(x[:, None], x[:, None], x[:, None])[0][:, 0],
        inner=nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
    ),
    "transformer": lambda: Written(
        lambda m, x: m.inner(x[:, None].expand(-1, 4, -1))[:, 0],
        inner=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
    ),
    "recurrent": lambda: Written(
        lambda m, x: m.inner(x[:, None].expand(-1, 4, -1))[0][:, -1],
        inner=nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True),
    ),
    "without gradients": lambda: Written(_frozen),
    "opaque": lambda: Written(_opaque, inner=Opaque()),
}


def wrapped(model: nn.Module, training: bool, dropout: bool | None) -> pyrannc.RaNNCModule:
    """A copy of a model, with the random numbers of every other copy."""
    model = copy.deepcopy(model)
    torch.manual_seed(11)
    module = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    module.train(training)
    module.enable_dropout(dropout)
    return module


@pytest.fixture(autouse=True)
def whole_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of a model draw the same numbers for the same microbatches: times that were measured do not choose."""
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")


ALIKE = ("by name", "channels", "alpha")
"""Ways to write dropout that the others stand for, but in `make test-full`."""


SLOW = {"transformer", "opaque", "recurrent"}
"""Of the others, those of `make test-long`."""


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.full,) if name in ALIKE else (pytest.mark.long,) if name in SLOW else ()


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        *(pytest.param(name, True, marks=marks_of(name)) for name in MODELS),
        pytest.param("transformer", False, marks=pytest.mark.long),
    ],
)
def test_off_is_evaluation_and_on_is_training(name: str, gradients: bool) -> None:
    model = MODELS[name]().double()
    x = torch.randn(6, 8, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        expected = copy.deepcopy(model).eval()(x)
        module = wrapped(model, True, None)
        trained = module(x)
        assert not torch.allclose(trained, expected), "the model drops nothing"
        module.enable_dropout(False)
        torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)
        module = wrapped(model, False, True)
        assert torch.equal(module(x), trained)
        for enabled in (False, None):
            module.enable_dropout(enabled)
            torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


def test_only_dropout_is_switched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).double()
    plain = copy.deepcopy(model).eval()
    x = torch.randn(64, 8, dtype=torch.float64)
    module = wrapped(model, False, True)
    out = module(x)
    kept = out != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(out[kept], 2 * plain(x)[kept])  # by the running statistics
    assert next(iter(module.buffers())).abs().sum() == 0


def test_a_frozen_module_drops_as_well() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double()
    model[1].eval()
    x = torch.randn(8, 8, dtype=torch.float64)
    module = pyrannc.RaNNCModule(model)
    assert torch.equal(module(x), module(x))
    module.enable_dropout(True)
    assert not torch.equal(module(x), module(x))


def test_gradients_follow() -> None:
    model = MODELS["transformer"]().double()
    x = torch.randn(6, 8, dtype=torch.float64)
    trained, forced = wrapped(model, True, None), wrapped(model, False, True)
    for each in (trained, forced):
        each(x).pow(2).mean().backward()
    for (name, one), (_, other) in zip(trained.named_parameters(), forced.named_parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_what_cannot_be_switched_on_is_told() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5) if m.training else x

    module = wrapped(Written(forward), False, True)
    with pytest.raises(TraceError, match=r"the model runs dropout 1 times in training and 0 times in evaluation"):
        module(torch.randn(4, 8))
    off = wrapped(Written(forward), True, False)
    assert torch.equal(off(torch.ones(4, 8)), off(torch.ones(4, 8)))


def test_random_numbers_that_are_no_dropout_stay() -> None:
    module = wrapped(Written(lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.5))), True, False)
    assert not torch.equal(module(torch.ones(4, 8)), module(torch.ones(4, 8)))
