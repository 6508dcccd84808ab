"""Compiled stages compute what uncompiled ones do: losses, gradients, buffers, random numbers.

torch's backend `aot_eager` compiles as inductor does, but makes no code, which would take ten seconds for each block.
tests/e2e/test_compiled_jobs.py runs inductor.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thinned import first, one_in
from torch import Tensor, nn

import pyrannc
from rannd.runtime.compiling import compiler


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the kinds that a test compiles; what an earlier one has compiled is known already."""
    found: list[str] = []
    own = compiler.compile_kind

    def noted(kind: Any, *rest: Any) -> Any:
        code = own(kind, *rest)
        found.append(kind.digest)
        return code

    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    monkeypatch.setattr("rannd.runtime.compiling.sharing.compile_kind", noted)
    monkeypatch.setenv("RANNC_COMPILE_STAGES", "blocks")
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")  # each microbatch has random numbers of its own
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the kinds whose code a test runs, in the order of its calls."""
    found: list[str] = []
    own = compiler.Code.__call__

    def noted(code: compiler.Code, *arguments: Any) -> Any:
        output = own(code, *arguments)
        found.append(code.kind.digest)
        return output

    monkeypatch.setattr(compiler.Code, "__call__", noted)
    return found


class Layer(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """Tied embedding, equal layers with dropout, a loss."""

    def __init__(self, layers: int = 3, drop: float = 0.3) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer(8, drop) for _ in range(layers))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Normed(nn.Module):
    """Buffers that are written, images, a view, an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = x + F.relu_(norm(conv(x)))
        return F.mse_loss(self.last(x.mean((2, 3))), y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3  # its own, so that a traced forward would be noticed


class Opaque(Decoder):
    """A layer in the middle whose backward is the user's own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](self.table(x))
        h = self.layers[1](Doubled.apply(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class TwoHeads(nn.Module):
    """Returns two results of one block, of which a script may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.one(x), self.other(x)


def tokens(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))


def images(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4, 5, 5).double(), torch.randn(rows, 2).double()


def strided(rows: int = 6) -> tuple[Tensor, Tensor]:
    x, y = images(rows)
    return x.to(memory_format=torch.channels_last), y


Trained = dict[str, Tensor | None]


def train(
    make: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]], steps: int = 3, backwards: int = 1
) -> Trained:
    """Losses, and gradients, parameters and buffers after some steps of AdamW."""
    torch.manual_seed(7)
    inner = make().double()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.05, weight_decay=0.2)
    model = pyrannc.RaNNCModule(inner, optimizer)
    found: Trained = {}
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        output = model(*batch())
        loss = output if isinstance(output, Tensor) else output[0].square().mean()
        for number in range(backwards):
            loss.backward(retain_graph=number + 1 < backwards)
        found[f"loss {step}"] = loss.detach()
        found |= {
            f"grad {name}": p.grad.clone() if p.grad is not None else None for name, p in inner.named_parameters()
        }
        optimizer.step()
    found |= {name: each.detach().clone() for name, each in inner.state_dict().items()}
    model.undeploy()
    pyrannc.clear()
    return found


def same(make: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]], **kwargs: int) -> None:
    """Whether compiled training equals uncompiled training."""
    compiled = train(make, batch, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANNC_COMPILE_STAGES", "off")
        plain = train(make, batch, **kwargs)
    assert compiled.keys() == plain.keys()
    for name, expected in plain.items():
        given = compiled[name]
        assert (given is None) == (expected is None), name
        if expected is not None and given is not None:
            torch.testing.assert_close(
                given, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


CASES = {
    "dropout and a tied table": (Decoder, tokens),
    "batch norm": (Normed, images),
    "channels last": (Normed, strided),
    "an operator of the user's": (Opaque, tokens),
}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_training_is_the_same(name: str, ran: list[str]) -> None:
    make, batch = CASES[name]
    same(make, batch)
    assert ran


@pytest.mark.parametrize("setting", first(1, ["stages", "RANNC_CHECKPOINTING", "RANNC_PIPELINE_NUM", "asked"]))
def test_in_other_ways_of_running(setting: str, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    values = {"RANNC_CHECKPOINTING": "true", "RANNC_PIPELINE_NUM": "4"}
    if setting in values:
        monkeypatch.setenv(setting, values[setting])
    if setting == "asked":
        monkeypatch.setenv("RANNC_INTERLEAVE_LOSS", "false")
    if setting == "stages":
        monkeypatch.setenv("RANNC_COMPILE_STAGES", "stages")
    same(Decoder, tokens)
    assert ran


def test_a_second_backward_through_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_INTERLEAVE_LOSS", "false")
    same(Decoder, tokens, backwards=2)


def test_a_parameter_without_a_gradient_gets_none() -> None:
    """Zeros would let its weight decay move it."""
    same(TwoHeads, lambda: (torch.randn(6, 4).double(),))


@pytest.mark.long
def test_frozen_parameters() -> None:
    def frozen() -> nn.Module:
        model = Decoder()
        model.layers[1].requires_grad_(False)
        return model

    same(frozen, tokens)


def test_equal_layers_are_compiled_once(made: list[str], ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_known", {})
    train(lambda: Decoder(6), tokens, steps=1)
    few = len(made)
    assert few == len(set(made)) == 6, "an embedding, a layer and a head, for the two sizes that are measured"
    ran.clear()
    train(lambda: Decoder(9), tokens, steps=1)
    assert len(made) == few, "a deeper model has no other kinds"
    assert Counter(ran).most_common(1)[0][1] > 9


@pytest.mark.long
def test_evaluation_and_a_third_size(ran: list[str], monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    torch.manual_seed(0)
    inner = Decoder(2, 0.0).double()
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "4")
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), 0.1))
    for rows in (6, 6, 12, 2):  # pieces of 2 and 1 rows, then 3, then 1
        x, y = tokens(rows)
        loss = model(x, y)
        torch.testing.assert_close(loss, inner(x, y), rtol=1e-12, atol=0)
    third = [line for line in told if "run eagerly" in line]
    assert len(third) == 1
    assert "Pieces of 3 rows" in third[0]
    assert "2 and 1 rows" in third[0]
    model.eval()
    ran.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(x, y), inner(x, y), rtol=1e-12, atol=0)
    assert ran, "evaluation is compiled, too"
    model.train()
    model.undeploy()
    x, y = tokens(6)
    torch.testing.assert_close(model(x, y), inner(x, y), rtol=1e-12, atol=0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the log says."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept()
    logger = logging.getLogger("rannd.RaNNCModule")
    before = logger.level
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(
    monkeypatch: pytest.MonkeyPatch, told: list[str], made: list[str]
) -> None:
    def broken(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        raise OSError("no compiler here\nand more about it")

    monkeypatch.setattr(compiler, "_known", {})
    monkeypatch.setattr(compiler, "BACKEND", broken)
    same(Decoder, tokens)
    assert not made
    lines = [line for line in told if "no compiler here" in line]
    assert len(lines) == 1, lines
    assert "eagerly" in lines[0]


def test_code_that_torch_has_forgotten_is_made_again(made: list[str]) -> None:
    torch.manual_seed(0)
    inner = Decoder(2, 0.0).double()
    model = pyrannc.RaNNCModule(inner)
    x, y = tokens()
    expected = inner(x, y)
    torch.testing.assert_close(model(x, y), expected, rtol=1e-12, atol=0)
    before = len(made)
    torch.compiler.reset()
    torch.testing.assert_close(model(x, y), expected, rtol=1e-12, atol=0)
    assert len(made) > before


@pytest.mark.long
def test_evaluation_in_inference_mode(ran: list[str], told: list[str]) -> None:
    torch.manual_seed(0)
    inner = Decoder(2, 0.0).double()
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), 0.1))
    for training in (True, False, True):
        model.train(training)
        ran.clear()
        with torch.inference_mode(not training):
            x, y = tokens()  # in this mode, tensors of another kind
            torch.testing.assert_close(model(x, y), inner(x, y), rtol=1e-12, atol=0)
        assert ran
    assert not [line for line in told if "eagerly" in line or "again" in line]


@pytest.mark.long
def test_why_blocks_are_compiled_again(told: list[str]) -> None:
    torch.manual_seed(0)
    inner = Decoder(2, 0.0).double()
    model = pyrannc.RaNNCModule(inner)
    x, y = tokens()
    model(x, y)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        torch.testing.assert_close(model(x, y), inner(x, y), rtol=1e-12, atol=0)
    finally:
        torch.set_num_threads(threads)
    model(x, y)
    again = [line for line in told if "again" in line]
    assert len(again) == 1, again
    assert "num_threads" in again[0]


def test_what_no_cache_of_torch_has_is_not_said_to_be_from_one(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts nothing for this backend, as for inductor without caches (TORCHINDUCTOR_FORCE_DISABLE_CACHES)."""
    monkeypatch.setattr(compiler, "_known", {})
    train(Decoder, tokens, steps=1)
    lines = [line for line in told if "kinds of blocks" in line]
    assert len(lines) == 1, lines
    assert "Compiled 3 kinds of blocks" in lines[0]


def test_a_reason_for_all_blocks_is_one_reason(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's message has the number of each block's code."""
    monkeypatch.setattr(compiler, "_known", {})
    with torch._dynamo.config.patch(disable=True):  # as TORCH_COMPILE_DISABLE does
        train(Decoder, tokens, steps=1)
    lines = [line for line in told if "cannot be compiled" in line]
    assert len(lines) == 1, lines
    assert "Dynamo tracing is disabled" in lines[0]
