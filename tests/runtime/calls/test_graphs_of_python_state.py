"""Changes of the model's Python state between calls: outputs and gradients are those of the plain model."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from thinned import one_in
from torch import nn

import pyrannc
from rannd import log


class Settings:
    def __init__(self, inner: Any = None) -> None:
        self.alpha = 1.0
        self.steps = 0
        self.inner = inner


class Scaled:
    """A function that has a number."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _times(x: torch.Tensor, scales: Any) -> torch.Tensor:
    return x * scales[0]


class Doubling:
    """A hook that has a number."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.scale


class Steered(nn.Module):
    """All kinds of attributes steer the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.config = Settings()
        self.named = {"alpha": 1.0}
        self.nested = [[1.0, 2.0]]
        self.long = [1.0] * 40
        self.array = np.ones(4, dtype=np.float32)
        self.scalar = np.float64(1)
        self.tensor = torch.ones(4)
        self.tensors = [torch.ones(4)]
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.layer = nn.Sigmoid()
        self.deep = Settings(Settings())
        self.listed = [Settings()]
        self.namespace = types.SimpleNamespace(alpha=1.0)
        self.partial = functools.partial(_times, scales=[1.0])
        self.scaled = [Scaled()]
        self.method = Scaled().__call__
        self.hidden = [nn.Dropout(1.0).eval()]
        self.byte = bytearray([1])
        self.last.register_forward_hook(Doubling())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.act(self.first(x))) * self.config.alpha * self.named["alpha"] * self.nested[0][1]
        y = y * self.deep.inner.alpha * self.listed[0].alpha * self.namespace.alpha * self.byte[0]
        y = self.hidden[0](self.method(self.scaled[0](self.partial(y)))) * float(self.array[0])
        y = y * self.long[-1] * torch.from_numpy(self.array) * float(self.scalar) * self.tensor * self.tensors[0]
        return self.last(y)


def _config(model: Any) -> None:
    model.config.alpha += 1


def _dict(model: Any) -> None:
    model.named["alpha"] += 1


def _nested(model: Any) -> None:
    model.nested[0][1] += 1


def _long(model: Any) -> None:
    model.long[-1] += 1


def _array(model: Any) -> None:
    model.array = model.array * 2


def _scalar(model: Any) -> None:
    model.scalar = model.scalar + 1


def _tensor(model: Any) -> None:
    model.tensor = model.tensor + 1


def _in_place(model: Any) -> None:
    """A tensor of equal content, which is another one later."""
    model.tensor = model.tensor.clone()


def _listed(model: Any) -> None:
    model.tensors[0] = model.tensors[0] + 1


def _function(model: Any) -> None:
    model.act = torch.tanh


def _module(model: Any) -> None:
    model.layer = nn.Tanh()


def _method(model: Any) -> None:
    model.last.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 2, model.last)


def _doubled(*arguments: Any) -> Any:
    gradients = arguments[-2] if len(arguments) == 3 else arguments[-1]
    return tuple(each if each is None else each * 2 for each in gradients)


def _backward(model: Any) -> None:
    model.last.register_full_backward_hook(_doubled)


def _before_backward(model: Any) -> None:
    model.last.register_full_backward_pre_hook(_doubled)


def _deep(model: Any) -> None:
    model.deep.inner.alpha += 1


def _object_in_a_list(model: Any) -> None:
    model.listed[0].alpha += 1


def _namespace(model: Any) -> None:
    model.namespace.alpha += 1


def _partial(model: Any) -> None:
    model.partial.keywords["scales"][0] += 1


def _called(model: Any) -> None:
    model.scaled[0].scale += 1


def _bound(model: Any) -> None:
    model.method.__self__.scale += 1


def _hidden(model: Any) -> None:
    model.hidden[0].train()


def _byte(model: Any) -> None:
    model.byte[0] += 1


def _array_in_place(model: Any) -> None:
    model.array[0] = 3


def _hook(model: Any) -> None:
    next(iter(model.last._forward_hooks.values())).scale += 1


def _class(model: Any) -> None:
    model.layer.__class__ = nn.Tanh


@pytest.mark.parametrize(
    "change",
    one_in(2, [
        _config, _dict, _nested, _long, _array, _scalar, _tensor, _in_place, _listed, _function, _module, _method,
        _backward, _before_backward, _deep, _object_in_a_list, _namespace, _partial, _called, _bound, _hidden, _byte,
        _array_in_place, _hook, _class,
    ]),
)  # fmt: skip
def test_changes_between_calls_are_seen(change: Callable[[nn.Module], None]) -> None:
    plain = Steered()
    inner = copy.deepcopy(plain)
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    for turn in range(5):
        if turn == 2:
            change(plain)
            change(inner)
        if turn == 4 and change is _in_place:
            plain.tensor.mul_(3)
            inner.tensor.mul_(3)
        x = torch.randn(3, 4)
        found, wanted = model(x), plain(x)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        for mine, other in zip(inner.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


class WarmUp(nn.Linear):
    """Does something else from some epoch on."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.epoch = 0
        self.config = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.config.alpha > 6:
            y = y * 3
        return y if self.epoch < 6 else y * 2


def _traces(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("Tracing model") for record in caplog.records)


def test_an_attribute_that_code_mentions_is_never_ignored(caplog: pytest.LogCaptureFixture) -> None:
    plain = WarmUp()
    inner = copy.deepcopy(plain)
    model = pyrannc.RaNNCModule(inner)
    for epoch in range(9):
        plain.epoch = inner.epoch = epoch
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), plain(x))
    for alpha in range(9):
        plain.config.alpha = inner.config.alpha = alpha
        torch.testing.assert_close(model(x), plain(x))
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert sum("Attribute epoch of the model changed 3 times" in each for each in warned) == 1
    assert sum("Attribute config.alpha of the model changed 3 times" in each for each in warned) == 1


def test_values_that_come_back_are_not_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    inner = WarmUp()
    model = pyrannc.RaNNCModule(inner)
    with caplog.at_level(log.DETAIL, logger="rannd"):
        for turn in range(12):
            inner.epoch = turn % 3
            inner.config.alpha = float("nan")
            model(torch.randn(2, 4))
    assert _traces(caplog) == 3


def test_what_no_code_mentions_is_ignored_until_some_does(caplog: pytest.LogCaptureFixture) -> None:
    inner = WarmUp()
    plain = copy.deepcopy(inner)
    model = pyrannc.RaNNCModule(inner)
    x = torch.randn(2, 4)
    with caplog.at_level(log.DETAIL, logger="rannd"):
        for step in range(6):
            inner.config.steps = step
            model(x)
    assert _traces(caplog) == 2
    assert "Attribute config.steps of the model changed, but no code of the model reads an attribute" in caplog.text
    for each in (inner, plain):
        each.register_forward_hook(lambda module, inputs, output: output * module.config.steps)
    for step in range(7, 10):
        inner.config.steps = plain.config.steps = step
        torch.testing.assert_close(model(x), plain(x))


class Threshold(nn.Linear):
    """Branches on a tensor by a number that the script changes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.threshold = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > self.threshold).any():
            x = x * 2
        return super().forward(x)


def test_branches_are_taken_by_the_numbers_of_the_call() -> None:
    plain = Threshold()
    inner = copy.deepcopy(plain)
    model = pyrannc.RaNNCModule(inner)
    for threshold, size in ((0.0, 1.0), (0.0, -1.0), (5.0, 6.0), (5.0, 1.0), (0.0, 1.0), (5.0, 4.0), (9.0, 7.0)):
        plain.threshold = inner.threshold = threshold
        x = torch.full((3, 4), size)
        torch.testing.assert_close(model(x), plain(x))


class Counting(nn.Linear):
    """Keeps numbers from call to call."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.cache = {"n": 0}
        self.seen: list[int] = []
        self.config = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache["n"] += 1
        self.seen.append(1)
        self.config.steps += 1
        return super().forward(x) * self.cache["n"]


def test_what_forward_keeps_in_containers_and_objects_is_told(caplog: pytest.LogCaptureFixture) -> None:
    inner = Counting()
    pyrannc.RaNNCModule(inner)(torch.randn(2, 4))
    for name in ("cache", "seen", "config.steps"):
        assert f"forward assigns attribute {name} of the model" in caplog.text
    assert (inner.cache, inner.seen, inner.config.steps) == ({"n": 0}, [], 0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_that_an_rnn_lists_anew_are_not_told(kind: type[nn.RNNBase], caplog: pytest.LogCaptureFixture) -> None:
    """While it is traced its weights are others, and it lists them anew; they are back afterwards."""
    inner = kind(4, 4)
    model = pyrannc.RaNNCModule(inner)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(model(x)[0], inner(x)[0])
    assert "forward assigns" not in caplog.text


def test_a_loss_that_hugging_face_chooses_by_its_labels_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inner = BertForSequenceClassification(config)
    plain = copy.deepcopy(inner)
    model = pyrannc.RaNNCModule(inner)
    ids = torch.randint(0, 8, (2, 3))
    for labels in (torch.tensor([0, 2]), torch.rand(2, 3)):
        wanted = plain(ids, labels=labels).loss
        torch.testing.assert_close(model(ids, labels=labels).loss.detach(), wanted.detach())
        plain.config.problem_type = None  # which the graph of each kind of labels does not keep
    assert "forward assigns" not in caplog.text


def test_hooks_of_hugging_face_that_collect_outputs_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8)
    inner = BertModel(config).eval()
    model, plain, ids = pyrannc.RaNNCModule(inner), copy.deepcopy(inner), torch.randint(0, 8, (2, 3))
    for _ in range(2):
        for found, wanted in zip(
            model(ids, output_hidden_states=True).hidden_states,
            plain(ids, output_hidden_states=True).hidden_states,
            strict=True,
        ):
            torch.testing.assert_close(found, wanted)
    assert plain._output_capturing_hooks_installed
    assert "forward assigns" not in caplog.text


def test_switches_of_torch_between_calls_are_seen() -> None:
    """The code makes a tensor of the default type."""

    class Made(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.ones(()).to(x.device)[None]

    plain = Made(4, 4)
    model = pyrannc.RaNNCModule(copy.deepcopy(plain))
    x = torch.randn(2, 4)
    assert model(x).dtype == plain(x).dtype
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert model(x).dtype == plain(x).dtype
    finally:
        torch.set_default_dtype(before)


def test_what_hooks_and_objects_do_while_traced_is_not_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks that note what they see, and objects in objects that count: the second call is the first one's."""
    noted: dict[str, Any] = {}
    inner = Counting()
    inner.deep = Settings(Settings())  # type: ignore[assignment]

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        noted["last"] = output
        module.deep.inner.steps += 1

    inner.register_forward_hook(note)
    model = pyrannc.RaNNCModule(inner)
    with caplog.at_level(log.DETAIL, logger="rannd"):
        for _ in range(3):
            model(torch.randn(2, 4))
    assert _traces(caplog) == 1
    assert "forward assigns attribute deep.inner.steps of the model" in caplog.text
    assert not noted


def test_a_method_that_was_replaced_for_nothing_is_looked_at_again(caplog: pytest.LogCaptureFixture) -> None:
    """torch reads `forward` of every module, though no code of the model's mentions it."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = pyrannc.RaNNCModule(inner)
    x = torch.randn(2, 4)
    wanted = inner[1](inner[0](x)).detach()
    torch.testing.assert_close(model(x), wanted)
    inner[1].forward = lambda x: torch.tanh(x)
    torch.testing.assert_close(model(x), wanted)
    inner[1].forward = lambda x: torch.tanh(x) * 2
    torch.testing.assert_close(model(x), wanted * 2)
