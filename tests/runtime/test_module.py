"""What a script sees of a wrapped model, in a world of one rank; tests/parity has the others."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pyrannc
from rannd import log
from rannd.errors import ConfigError, DeploymentError, StepError, TraceError, UsageError


class Tied(nn.Module):
    """Tied weights, a buffer, a loss or an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.label = "mine"

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, object]:
        self.calls += 1
        out = self.last(torch.relu(self.first(x)))
        loss = None if target is None else nn.functional.mse_loss(out, target)
        return {"out": out, "loss": loss, "rows": x.shape[0], "name": "tied"}


def wrapped(model: nn.Module, **options: object) -> pyrannc.RaNNCModule:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pyrannc.RaNNCModule(model, optimizer, **options)  # type: ignore[arg-type]


def test_outputs_keep_their_structure() -> None:
    model = wrapped(Tied())
    found = model(torch.randn(3, 6))
    assert found["loss"] is None
    assert found["rows"] == 3
    assert found["name"] == "tied"
    assert found["out"].shape == (3, 6)
    assert model(torch.randn(5, 6))["rows"] == 5
    assert model(torch.randn(1, 6), target=torch.randn(1, 6))["loss"].shape == ()


def test_state_is_complete_and_loads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")  # without a cache, measured costs could choose another number
    model = wrapped(Tied())
    before = model.state_dict()
    model(torch.randn(3, 6))
    state = model.state_dict()
    assert list(state) == list(before) == ["calls", "first.weight", "first.bias", "last.weight", "last.bias"]
    assert state["calls"] == 1
    assert torch.equal(state["first.weight"], state["last.weight"])
    other = wrapped(Tied())
    x = torch.randn(2, 6)
    other(x)
    other.load_state_dict(state)
    assert torch.equal(other(x)["out"], model(x)["out"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("first.bias"), r'Missing key.* "first.bias"'),
        (lambda state: state.update(other=torch.zeros(1)), r'Unexpected key.* "other"'),
        (
            lambda state: state.update({"first.bias": torch.zeros(7)}),
            r"size mismatch for first.bias: .*\[7\].*\[6\]",
        ),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(change: object, message: str) -> None:
    model = wrapped(Tied())
    model(torch.randn(3, 6))
    before = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(before)
    for tensor in state.values():
        tensor.add_(1)
    change(state)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        model.load_state_dict(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_other_attributes_are_the_models() -> None:
    model = wrapped(Tied())
    assert model.label == "mine"
    assert isinstance(model.first, nn.Linear)
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_train_and_eval_are_graphs_of_their_own() -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)))
    x = torch.randn(64, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert not model.training
    model.train()
    assert not torch.equal(model(x), model(x))


def test_random_numbers_of_the_script_stay_untouched() -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    state = torch.get_rng_state()
    model(torch.ones(8, 4)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_the_same_in_two_runs_of_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "2")  # without a cache, measured costs could choose another number

    def run() -> torch.Tensor:
        torch.manual_seed(7)
        model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
        return torch.cat([model(torch.ones(8, 4)) for _ in range(2)])

    assert torch.equal(run(), run())


def test_parameter_hooks_run_once_on_the_reduced_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "4")
    plain = nn.Linear(4, 4)
    model = wrapped(copy.deepcopy(plain))
    seen: list[torch.Tensor] = []
    weight = dict(model.named_parameters())["weight"]
    weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    x = torch.randn(8, 4)
    model(x).pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain.weight.grad)
    torch.testing.assert_close(weight.grad, 2 * plain.weight.grad)


def test_clipping_is_that_of_torch() -> None:
    plain = nn.Linear(4, 4)
    model = wrapped(copy.deepcopy(plain))
    x = torch.randn(8, 4)
    model(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    torch.testing.assert_close(
        model.clip_grad_norm(0.1).float(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    )
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_recomputing_gives_the_same_gradients_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).double())
        model(torch.randn(8, 4, dtype=torch.float64)).pow(2).mean().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    kept = run()
    monkeypatch.setenv("RANNC_CHECKPOINTING", "true")
    again = run()
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_unfreezing_a_layer_gives_it_gradients() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[0].requires_grad_(False)
    model = wrapped(copy.deepcopy(plain))
    x = torch.randn(8, 4)
    model(x).sum().backward()
    assert next(iter(model.parameters())).grad is None
    for each in (model, plain):
        each.zero_grad()
        for parameter in each.parameters():
            parameter.requires_grad_(True)
        each(x).pow(2).sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_using_a_deployment_file(tmp_path: Path) -> None:
    model = wrapped(Tied())
    with pytest.raises(StepError, match="before its first call; call it first"):
        _ = model.deployment
    model(torch.randn(3, 6))
    file = tmp_path / "plan"
    model.save_deployment(file)
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]
    again = wrapped(Tied(), load_deployment=file)
    again(torch.randn(3, 6))
    assert again.deployment == model.deployment
    with pytest.raises(DeploymentError, match="run without it to plan again"):
        wrapped(nn.Linear(6, 6), load_deployment=file)(torch.randn(3, 6))
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(DeploymentError, match="not a deployment"):
        wrapped(Tied(), load_deployment=file)(torch.randn(3, 6))
    with pytest.raises(DeploymentError, match="cannot be read"):
        wrapped(Tied(), load_deployment=tmp_path / "none")(torch.randn(3, 6))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state:UserWarning")
def test_tensors_of_other_layouts_are_refused(layout: torch.layout, kind: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    value = torch.eye(4).to_sparse(layout=layout)
    if kind == "buffer":
        net[1].register_buffer("graph", value)
    else:
        net[1].graph = nn.Parameter(value) if kind == "parameter" else value
    with pytest.raises(UsageError, match=rf"1\.graph of the model has the layout {layout}; .* to_dense\(\)"):
        pyrannc.RaNNCModule(net)


def test_misuse_is_told() -> None:
    model = wrapped(Tied())
    loss = model(torch.randn(3, 6))["out"].sum()
    loss.backward()
    with pytest.raises(StepError, match="second time"):
        loss.backward()
    with pytest.raises(UsageError, match="already wrapped in a RaNNCModule"):
        pyrannc.RaNNCModule(model._inner)
    with pytest.raises(UsageError, match=r"wraps a torch.nn.Module, not a int"):
        pyrannc.RaNNCModule(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"enable_apex_amp=True\): Apex is not supported"):
        wrapped(Tied(), enable_apex_amp=True)
    with pytest.raises(
        UsageError, match=r"zero_stage=1 divides the optimizer's state: RaNNCModule\(model, optimizer\)"
    ):
        pyrannc.RaNNCModule(Tied(), enable_zero=True)(torch.randn(2, 6))
    with pytest.raises(UsageError, match="without any tensor"):
        wrapped(Tied())(3)
    with pytest.raises(StepError, match="empty"):
        model(torch.randn(0, 6))
    pyrannc.clear()
    with pytest.raises(StepError, match=r"dropped by pyrannc\.clear"):
        model(torch.randn(3, 6))


def test_a_graph_that_differs_from_the_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(nn.Module):
        """Does something else at every call, by what lies outside of it, which no graph can show."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * next(calls)

    calls = itertools.count(1)
    monkeypatch.setenv("RANNC_VERIFY_TRACE", "false")
    monkeypatch.setenv("RANNC_VERIFY_PARTITIONING", "true")
    with pytest.raises(TraceError, match="a graph cannot contain"):
        wrapped(Changing())(torch.randn(3, 4))


def test_a_wrong_configuration_stops_the_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_MEM_MARGIN", "a lot")
    with pytest.raises(ConfigError, match="RANNC_MEM_MARGIN"):
        wrapped(Tied())


def test_models_feed_each_other() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    mine = wrapped(copy.deepcopy(first)), wrapped(copy.deepcopy(second))
    x = torch.randn(8, 4, dtype=torch.float64)
    mine[1](mine[0](x)).pow(2).mean().backward()
    second(first(x)).pow(2).mean().backward()
    for model, plain in zip(mine, (first, second), strict=True):
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=0)


class Switched(nn.Module):
    """Python attributes steer the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 1.0
        self.sizes = [1, 2]
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale * self.mask * self.sizes[0]


def _scale(model: Switched) -> None:
    model.scale = 3.0


def _sizes(model: Switched) -> None:
    model.sizes[0] = 5


def _freeze(model: Switched) -> None:
    model.norm.eval()


def _replace(model: Switched) -> None:
    model.mask = torch.tensor([0.0, 1.0, 0.0, 1.0])


def _hook(model: Switched) -> None:
    model.layer.register_forward_hook(lambda module, inputs, output: output * 2)


@pytest.mark.parametrize("change", [_scale, _sizes, _freeze, _replace, _hook])
def test_changes_of_the_python_state_are_seen(change: Callable[[Switched], None]) -> None:
    plain = Switched()
    inner = copy.deepcopy(plain)
    model = wrapped(inner)
    for turn in range(4):
        if turn == 2:
            change(plain)
            change(inner)
        x = torch.randn(8, 4)
        torch.testing.assert_close(model(x), plain(x))
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_counter_of_the_script_is_not_traced_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    inner = nn.Linear(4, 4)
    model = wrapped(inner)
    with caplog.at_level(log.DETAIL, logger="rannd"):
        for step in range(10):
            inner.step = step
            model(torch.randn(2, 4))
    traced = [record for record in caplog.records if record.message.startswith("Tracing model")]
    assert len(traced) == 2
    assert "Attribute step of the model changed, but no code of the model reads an attribute" in caplog.text


def test_what_forward_changes_in_vain_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    class Remembering(nn.Linear):
        last: torch.Tensor | None = None

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.last = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    wrapped(Counting(4, 4))(torch.randn(2, 4))
    assert "forward assigns attribute calls of the model" in caplog.text
    model = Remembering()
    made = wrapped(model)(torch.randn(2, 4))  # its own code runs, in one operator
    assert "keeps a tensor from call to call in last" in caplog.text
    assert model.last is not None
    assert torch.equal(model.last, made)


def test_a_parameter_replaced_after_the_deployment_is_refused() -> None:
    inner = nn.Linear(4, 4)
    model = wrapped(inner)
    model(torch.randn(2, 4))
    inner.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StepError, match="weight was replaced by another object"):
        model(torch.randn(2, 4))


def test_a_parameter_written_while_it_is_trained_is_refused() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    with pytest.raises(TraceError, match="writes into weight while it is trained"):
        wrapped(Clipped(4, 4))(torch.randn(2, 4))


class MessagePassing(nn.Module):
    """A layer of a graph network, which makes a sparse matrix of its edges."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.linear, self.layout = nn.Linear(4, 4), layout
        self.register_buffer("edges", torch.tensor([[0, 1, 2], [1, 2, 0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.sparse_coo_tensor(self.edges, torch.ones(3, dtype=x.dtype), (4, 4))
        if self.layout is not torch.sparse_coo:
            sums = sums.to_dense().to_sparse(layout=self.layout)
        return (sums @ self.linear(x).t()).t()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state:UserWarning")
def test_a_module_that_makes_a_sparse_tensor_runs_as_one_operator(
    layout: torch.layout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    caplog.set_level(logging.INFO)
    net = nn.Sequential(nn.Linear(4, 4), MessagePassing(layout), nn.Linear(4, 4)).double()
    plain = copy.deepcopy(net)
    model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 0.1))
    for rows in (3, 5):
        x = torch.randn(rows, 4, dtype=torch.float64)
        found, wanted = model(x), plain(x)
        torch.testing.assert_close(found, wanted)
        found.pow(2).sum().backward()
        wanted.pow(2).sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert "module 1 (MessagePassing) runs as one operator" in caplog.text


def test_a_sparse_result_is_refused() -> None:
    class Sparse(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).to_sparse()

    with pytest.raises(TraceError, match=r"it returns a tensor of layout torch.sparse_coo: make it dense"):
        pyrannc.RaNNCModule(Sparse(4, 4), None)(torch.randn(3, 4))


def test_printing_shows_the_model_as_data_parallel_does() -> None:
    inner = nn.Sequential(nn.Linear(4, 2), nn.Sequential(nn.ReLU()))
    shown = repr(pyrannc.RaNNCModule(inner)).splitlines()
    assert shown[:2] == ["RaNNCModule(", "  (module): Sequential("]
    assert shown[-2:] == ["  )", ")"]
    assert [line.removeprefix("  ").replace("(module): ", "") for line in shown[1:-1]] == repr(inner).splitlines()


class Keeping(nn.Module):
    """Keeps in a buffer what it computes, as a cache of keys does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        self.seen[:2] = made[:2]
        return made * self.seen.sum()


def test_a_first_call_without_gradients_may_keep_what_it_computes_in_a_buffer() -> None:
    model = Keeping()
    other = copy.deepcopy(model)
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        x = torch.randn(8, 4)
        with torch.no_grad():
            torch.testing.assert_close(wrapped(x), other(x))
    torch.testing.assert_close(model.seen, other.seen)
    assert not model.seen.requires_grad


def test_no_phase_of_the_first_call_is_silent_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def noted(logger: str, text: str, *, shown: bool) -> contextlib.AbstractContextManager[None]:
        assert logger in log.LOGGERS
        assert shown
        told.append(text)
        return contextlib.nullcontext()

    monkeypatch.setattr(log, "long_phase", noted)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(2, 4))
    assert told == [
        "Tracing the model",
        "Comparing the trace with the model",
        "Planning",
        "Distributing the parameters",
        "Preparing the stages",
    ]
