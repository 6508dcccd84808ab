"""What newcomers do with a wrapped model: it trains as the model alone does, or the error says what to do."""

from __future__ import annotations

import copy
import io
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import PlanError, ProfileError, RanndError, StepError, TraceError, UsageError
from rannd.runtime.parameters.state_elsewhere import StateElsewhere, TensorElsewhere


class Model(nn.Module):
    """A forward of one's own, a layer, a table, a parameter that nobody reads."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(6, 6)
        self.table = nn.Embedding(9, 6)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def wrapped(model: nn.Module) -> pyrannc.RaNNCModule:
    parameters = list(model.parameters())
    return pyrannc.RaNNCModule(model, torch.optim.SGD(parameters, lr=0.1) if parameters else None)


def assert_trains_like(function: Callable[..., Any], *args: Any) -> None:
    """Same outputs and gradients as the model alone, in two steps."""
    torch.manual_seed(0)
    plain = Model(function).double()
    model = wrapped(copy.deepcopy(plain))
    for _ in range(2):
        outputs = []
        for each in (model, plain):
            out = each(*args)
            outputs.append(out)
            if out.requires_grad:
                out.pow(2).sum().backward()
        torch.testing.assert_close(*outputs)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


X = torch.randn(4, 6, dtype=torch.float64)


class Attributes(UserDict):  # type: ignore[type-arg]
    """What tokenizers hand out looks like this."""


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda m, x: m.layer(x), (X,)),
        (lambda m, x: m.layer(x), (X[:1],)),
        (lambda m, x: m.layer(x).argmax(1), (X,)),
        (lambda m, x: x, (X,)),
        (lambda m, x, y: m.layer(x), (X, torch.zeros(4))),
        (lambda m, x, y: m.layer(x) + y, (X, X)),
        (lambda m, x: m.layer(x), (X.t().contiguous().t(),)),
        (lambda m, x, y: m.layer(x) + y.sum(), (X, torch.randn(3, 2, dtype=torch.float64))),
        (lambda m, *xs: m.layer(sum(xs)), (X, X)),
        (lambda m, p: m.layer(p["x"]), (Attributes(x=X),)),
        (lambda m, p, scale: m.layer(p[0]) * scale[1], ([X], [1.0, 3.0])),
    ],
    ids=[
        "unused parameter", "batch of one", "whole numbers", "input is output", "unread input", "same input twice",
        "not contiguous", "other rows", "star args", "UserDict", "list",
    ],
)  # fmt: skip
def test_trains_like_the_model_alone(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert_trains_like(function, *args)


def test_gradients_of_inputs_come_back() -> None:
    plain = nn.Linear(6, 6).double()
    model = wrapped(copy.deepcopy(plain))
    first, second = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(first * 2).sum().backward()
    plain(second * 2).sum().backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_models_without_parameters_or_gradients_run() -> None:
    assert torch.equal(wrapped(nn.ReLU())(X), torch.relu(X))
    model = wrapped(nn.Linear(6, 6).double().requires_grad_(False))
    assert not model(X).requires_grad


def test_half_precision_on_the_cpu_trains() -> None:
    model = wrapped(nn.Linear(6, 6).half())
    model(X.half()).sum().backward()
    assert all(parameter.grad.dtype == torch.float16 for parameter in model.parameters())


def test_an_empty_first_batch_is_told_and_the_next_one_runs() -> None:
    model = wrapped(nn.Linear(6, 6).double())
    with pytest.raises(StepError, match="the mini-batches of all ranks are empty; skip the step"):
        model(X[:0])
    assert model(X).shape == (4, 6)


def test_tensors_without_values_are_told_at_any_call() -> None:
    model = wrapped(nn.Linear(6, 6).double())
    for _ in range(2):
        with pytest.raises(UsageError, match="argument 0 of the model is on the meta device"):
            model(X.to("meta"))
        model(X)


@pytest.mark.parametrize(
    ("model", "args", "error", "message"),
    [
        (lambda: nn.LazyLinear(6), (X,), UsageError, "parameter weight of the model has no shape yet"),
        (lambda: nn.Linear(6, 6), ([1.0, 2.0],), UsageError, r"without any tensor \(with 1.0, 2.0\)"),
        (lambda: nn.Linear(6, 6), (X.numpy(),), UsageError, "numpy.ndarray; make a tensor of it"),
        (lambda: nn.Linear(6, 5), (X[:, :5].float(),), TraceError, r"the model \(Linear\) fails"),
        (
            lambda: nn.Linear(6, 6).half(),
            (X.float(),),
            (ProfileError, TraceError),
            "the model.*mat1 and mat2 must have the same dtype",
        ),
        (
            lambda: Model(lambda m, x: m.layer(m.table(x))),
            (torch.full((4, 2), 50),),
            ProfileError,
            "aten::embedding in module table, .*: IndexError: index out of range.*"
            "the same call fails without RaNNCModule",
        ),
    ],
    ids=["lazy", "numbers", "numpy", "width", "types", "index"],
)
def test_a_wrong_first_call_is_told(
    model: Callable[[], nn.Module], args: tuple[Any, ...], error: type[RanndError], message: str
) -> None:
    made = model()
    lazy = any(isinstance(parameter, nn.UninitializedParameter) for parameter in made.parameters())
    module = pyrannc.RaNNCModule(made) if lazy else wrapped(made)
    with pytest.raises(error, match=f"(?s){message}"):
        module(*args)


def test_another_ranks_state_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script for one process saves on all ranks, in the end: rank 0 has to be able to."""
    wrapped(nn.Linear(6, 6))
    file = tmp_path / "state.pt"
    torch.save({"epoch": 3}, file)
    model = {"weight": TensorElsewhere.of("weight", (2, 3), torch.float64)}
    for state in (model, StateElsewhere(), {"epoch": 4, "model": model}, [{"model": StateElsewhere()}]):
        torch.save(state, file)
        torch.save(obj=state, f=str(file))
        with pytest.raises(UsageError, match="this rank uses a state that another rank has"):
            torch.save(state, io.BytesIO())
    assert torch.load(file) == {"epoch": 3}
    assert caplog.text.count("torch.save writes nothing to") == 1
    assert str(file) in caplog.text
    pyrannc.clear()
    torch.save({"epoch": 5}, file)


def test_what_cannot_be_wrapped_is_told() -> None:
    with pytest.raises(UsageError, match="optimizer has none of the model's parameters"):
        pyrannc.RaNNCModule(nn.Linear(6, 6), torch.optim.SGD(nn.Linear(6, 6).parameters(), lr=0.1))
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):  # the second since torch 2.14
        scripted = torch.jit.script(nn.Linear(6, 6))
    with pytest.raises(UsageError, match="wrap the module that it was made from"):
        pyrannc.RaNNCModule(scripted)


@pytest.mark.parametrize("export", [torch.export.export, torch.jit.trace])
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")  # since torch 2.14
def test_a_deployed_model_is_not_exported_and_an_undeployed_one_is(export: Callable[..., Any]) -> None:
    plain = nn.Linear(6, 6).double()
    model = wrapped(plain)
    model(X)
    model.eval()
    with pytest.raises(UsageError, match=r"export it in evaluation, after model\.undeploy\(\)"):
        export(plain, (X,))
    model.undeploy()
    exported = export(model.module, (X,))
    callable_ = exported.module() if export is torch.export.export else exported
    torch.testing.assert_close(callable_(X), plain(X))
    model.train()
    model(X).sum().backward()


def test_who_starts_a_script_alone_learns_how_to_start_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """`python train.py` in place of `rannc-run train.py` trains, on one rank."""
    model = wrapped(nn.Linear(6, 2))
    with caplog.at_level("INFO", logger="rannd"):
        model(torch.randn(3, 6)).sum().backward()
    assert "training begins (rannc-run -np N starts a script on N ranks)" in caplog.text


def test_a_mini_batch_that_cannot_be_divided_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "2")
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(PlanError, match=r"couples the rows of a batch \(batch_norm normalises over the batch"):
        model(torch.ones(4, 4))
