"""Changes that a script makes to its model between two calls, in place: (what the model has, what is done to it)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_modules


class Settings:
    """An object of attributes."""

    shared = 1

    def __init__(self, alpha: Any = 1.0, inner: Any = None) -> None:
        self.alpha = alpha
        self.sizes = [1, 2]
        self.inner = inner

    def scaled(self, x: Any) -> Any:
        return x * self.alpha

    def __call__(self, *args: Any) -> None:
        return None


class Slotted:
    __slots__ = ("alpha", "empty")

    def __init__(self) -> None:
        self.alpha = 1


class Listed(list[Any]):
    """A container with attributes."""

    scale = 1


class Mapped(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@dataclasses.dataclass
class Data:
    alpha: Any = 1
    inner: Any = None


class Pair(tuple[Any, ...]):
    """A tuple with attributes."""


RATE = 1.0


def _closure() -> tuple[Callable[[Any], Any], Callable[[], None]]:
    scale = 1.0

    def scaled(x: Any) -> Any:
        return x * scale

    def more() -> None:
        nonlocal scale
        scale += 1

    return scaled, more


def _listed(scales: list[float]) -> Callable[..., Any]:
    return lambda *args: args[0] * scales[0] if scales[0] > 5 else None


def _defaults(x: Any = None, scales: Any = None) -> Any:
    return x


def function_with(scales: list[Any]) -> types.FunctionType:
    made = types.FunctionType(_defaults.__code__, {}, "made", (None, scales))
    made.rate = 1  # type: ignore[attr-defined]
    return made


def hidden() -> nn.Sequential:
    """A module that no module has as a submodule."""
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.Tanh()))


def _put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


def _rename(held: dict[str, Any], old: str, new: str) -> None:
    pairs = [(new if key == old else key, value) for key, value in held.items()]
    held.clear()
    held.update(pairs)


def _swap_names(model: Any) -> None:
    """Modules that are alike but for their class."""
    inside = model.two._modules
    pairs = list(zip(reversed(list(inside)), inside.values(), strict=True))
    inside.clear()
    inside.update(pairs)


def _flag_hook(model: Any) -> None:
    model._forward_hooks_with_kwargs[next(iter(model._forward_hooks))] = True


def _nested_get(model: Any) -> Any:
    return model.value


Make = Callable[[], Any]
VALUES: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2.0], lambda v: v.append(3)),
    "type of an item": (lambda: [1, 2.0], lambda v: v.__setitem__(0, 1.0)),
    "sign of zero": (lambda: [0.0], lambda v: v.__setitem__(0, -0.0)),
    "nested list": (lambda: [[[[1]]]], lambda v: v[0][0][0].append(2)),
    "nested floats": (lambda: [[[[1.0]]]], lambda v: v[0][0][0].append(2.0)),
    "nested mixture": (lambda: [[[1, 1.0, "a", None]]], lambda v: v[0][0].append(True)),
    "late item": (lambda: [1.0] * 5000, lambda v: v.__setitem__(4999, 2.0)),
    "late text": (lambda: {str(number): number for number in range(5000)}, lambda v: v.update({"4999": 0})),
    "late flag": (lambda: [True] * 5000, lambda v: v.__setitem__(4999, False)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda v: v.update({"a": v.pop("a")})),
    "key of a dict": (lambda: {1: 2}, lambda v: v.update({1.5: v.pop(1)})),
    "set": (lambda: {"a"}, lambda v: v.add("b")),
    "deque": (lambda: collections.deque([1], maxlen=5), lambda v: v.append(2)),
    "ordered dict": (lambda: collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "default dict": (lambda: collections.defaultdict(list, a=[1]), lambda v: v["a"].append(2)),
    "default factory": (lambda: collections.defaultdict(list), lambda v: setattr(v, "default_factory", dict)),
    "counter": (lambda: collections.Counter("ab"), lambda v: v.update("a")),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v.__setitem__(0, 0)),
    "object": (Settings, lambda v: setattr(v, "alpha", 2.0)),
    "new attribute": (Settings, lambda v: setattr(v, "more", 2.0)),
    "no attribute": (Settings, lambda v: delattr(v, "alpha")),
    "class of an object": (Settings, lambda v: setattr(v, "__class__", Data)),
    "list of an object": (Settings, lambda v: v.sizes.append(3)),
    "object in an object": (lambda: Settings(inner=Settings()), lambda v: setattr(v.inner, "alpha", 2.0)),
    "object below": (
        lambda: Settings(inner=Settings(inner=Settings())),
        lambda v: setattr(v.inner.inner, "alpha", 2.0),
    ),
    "object in a list": (lambda: [Settings()], lambda v: setattr(v[0], "alpha", 2.0)),
    "object in a dict": (lambda: {"a": Settings()}, lambda v: setattr(v["a"], "alpha", 2.0)),
    "object in a dict of objects": (
        lambda: Settings(inner={"a": Data()}),
        lambda v: setattr(v.inner["a"], "alpha", 2.0),
    ),
    "key that is an object": (lambda: {Settings(): 1}, lambda v: setattr(next(iter(v)), "alpha", 2.0)),
    "dataclass": (Data, lambda v: setattr(v, "alpha", 2.0)),
    "slot": (Slotted, lambda v: setattr(v, "alpha", 2.0)),
    "new slot": (Slotted, lambda v: setattr(v, "empty", 2.0)),
    "no slot": (Slotted, lambda v: delattr(v, "alpha")),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda v: setattr(v, "a", 2)),
    "namespace below": (
        lambda: types.SimpleNamespace(a=types.SimpleNamespace(b=[1])),
        lambda v: v.a.b.append(2),
    ),
    "attribute of a list": (lambda: Listed([1]), lambda v: setattr(v, "scale", 2)),
    "item of a list with attributes": (lambda: Listed([1]), lambda v: v.append(2)),
    "attribute of a tuple": (lambda: Pair((1,)), lambda v: setattr(v, "scale", 2)),
    "own dict": (lambda: Mapped(a=1), lambda v: v.update(a=2)),
    "proxy": (lambda: types.MappingProxyType({"a": [1]}), lambda v: v["a"].append(2)),
    "weak reference": (lambda: _weak(), lambda v: setattr(v(), "alpha", 2.0)),
    "closure": (lambda: _closure()[0], lambda v: _set_cell(v, 2.0)),
    "list in a closure": (lambda: _listed([1.0]), lambda v: v.__closure__[0].cell_contents.append(2)),
    "default": (lambda: function_with([1]), lambda v: v.__defaults__[1].append(2)),
    "other defaults": (lambda: function_with([1]), lambda v: setattr(v, "__defaults__", (None, 2))),
    "attribute of a function": (lambda: function_with([1]), lambda v: setattr(v, "rate", 2)),
    "code of a function": (lambda: function_with([1]), lambda v: setattr(v, "__code__", _other.__code__)),
    "argument of a partial": (lambda: functools.partial(_defaults, [1]), lambda v: v.args[0].append(2)),
    "keyword of a partial": (
        lambda: functools.partial(_defaults, scales=Settings()),
        lambda v: setattr(v.keywords["scales"], "alpha", 2.0),
    ),
    "object of a method": (lambda: Settings().scaled, lambda v: setattr(v.__self__, "alpha", 2.0)),
    "list of a method of C": (lambda: [1].index, lambda v: v.__self__.append(2)),
    "array": (lambda: np.ones(3), lambda v: v.__setitem__(0, 2.0)),
    "array in a list": (lambda: [np.ones(3)], lambda v: v[0].__setitem__(0, 2.0)),
    "attribute of a tensor": (lambda: torch.ones(2), lambda v: setattr(v, "more", 1)),
    "gradients of a tensor": (lambda: torch.ones(2), lambda v: v.requires_grad_()),
    "size of a tensor": (lambda: torch.ones(2), lambda v: v.resize_(1)),
    "type of a tensor": (lambda: torch.ones(2), lambda v: setattr(v, "data", v.double())),
    "mode of a hidden module": (lambda: [hidden()], lambda v: v[0].eval()),
    "mode below a hidden module": (lambda: [hidden()], lambda v: v[0][1][0].eval()),
    "attribute of a hidden module": (lambda: {"a": hidden()}, lambda v: setattr(v["a"][1][0], "p", 0.1)),
    "hook of a hidden module": (lambda: [hidden()], lambda v: v[0][1].register_forward_hook(_hook)),
    "module in a hidden module": (lambda: [hidden()], lambda v: v[0][1].append(nn.ReLU())),
    "parameter of a hidden module": (lambda: [hidden()], lambda v: v[0][0].weight.requires_grad_(False)),
}
"""What is in the attribute `value`, and what is done to it."""


def _weak() -> Any:
    target = Settings()
    _KEPT.append(target)
    return weakref.ref(target)


_KEPT: list[Any] = []


def _set_cell(function: Any, value: Any) -> None:
    function.__closure__[0].cell_contents = value


def _other(x: Any = None, scales: Any = None) -> Any:
    return scales


def _hook(*args: Any) -> None:
    return None


def _hooks(made: Any) -> Callable[[Any], Any]:
    return lambda model: model.last.register_forward_hook(made)


class Net(nn.Module):
    """A model with two layers that differ in their class alone, and whatever an attribute is wanted to hold."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sigmoid()})
        self.register_buffer("mask", torch.ones(4))
        self.recording = Settings()
        self.last.register_forward_hook(self.recording)
        self.last.register_forward_hook(_listed([1.0]))
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two["b"](self.two["a"](self.first(x)))) * self.mask


def _last_hook(model: Any, place: int) -> Any:
    return list(model.last._forward_hooks.values())[place]


MODULES: dict[str, Callable[[Any], Any]] = {
    "mode": lambda m: m.two.eval(),
    "class of a module": lambda m: setattr(m.two["a"], "__class__", nn.Sigmoid),
    "names of modules": _swap_names,
    "name of a parameter": lambda m: _rename(m.first._parameters, "bias", "more"),
    "name of a buffer": lambda m: _rename(m._buffers, "mask", "more"),
    "buffer that is not stored": lambda m: m._non_persistent_buffers_set.add("mask"),
    "frozen": lambda m: m.first.weight.requires_grad_(False),
    "type of parameters": lambda m: m.first.double(),
    "attribute of a parameter": lambda m: setattr(m.first.weight, "more", 1),
    "attribute of a buffer": lambda m: setattr(m.mask, "more", 1),
    "hook": lambda m: m.first.register_forward_hook(_hook),
    "hook before": lambda m: m.first.register_forward_pre_hook(_hook),
    "hook of gradients": lambda m: m.first.register_full_backward_hook(_hook),
    "flag of a hook": lambda m: _flag_hook(m.last),
    "order of hooks": lambda m: m.last._forward_hooks.move_to_end(next(iter(m.last._forward_hooks))),
    "object that is a hook": lambda m: setattr(_last_hook(m, 0), "alpha", 2.0),
    "closure of a hook": lambda m: _last_hook(m, 1).__closure__[0].cell_contents.append(2.0),
}
"""What is done to the modules."""


def _global_hook(model: Any) -> Callable[[], None]:
    return torch_modules.register_module_forward_hook(_hook).remove


def _setting(put: Callable[[Any], Any], before: Any, after: Any) -> Callable[[Any], Callable[[], None]]:
    def change(model: Any) -> Callable[[], None]:
        put(after)
        return lambda: put(before)

    return change


def _attribute(holder: Any, name: str, after: Any) -> Callable[[Any], Callable[[], None]]:
    def change(model: Any) -> Callable[[], None]:
        before = getattr(holder, name)
        assert before != after
        setattr(holder, name, after)
        return lambda: setattr(holder, name, before)

    return change


def _inference(model: Any) -> Callable[[], None]:
    mode = torch.inference_mode()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def _autocast_dtype(device: str, before: torch.dtype, after: torch.dtype) -> Callable[[Any], Callable[[], None]]:
    return _setting(functools.partial(torch.set_autocast_dtype, device), before, after)


def _einsum(model: Any) -> Callable[[], None]:
    """The value behind the property, which may not be set where the package opt_einsum is missing."""
    behind = vars(torch.backends.opt_einsum.m)
    before = behind["enabled"]
    behind["enabled"] = not before
    return lambda: behind.update(enabled=before)


def _warn_only(warn: bool) -> None:
    torch.use_deterministic_algorithms(False, warn_only=warn)


SWITCHED: dict[str, Callable[[Any], Callable[[], None]]] = {
    "autocast dtypes, cpu": _autocast_dtype("cpu", torch.bfloat16, torch.float16),
    "autocast dtypes, cuda": _autocast_dtype("cuda", torch.float16, torch.bfloat16),
    "autocast cache": _setting(torch.set_autocast_cache_enabled, True, False),
    "inference": _inference,
    "dtype": _setting(torch.set_default_dtype, torch.float32, torch.float64),
    "device": _setting(torch.set_default_device, None, "meta"),
    "deterministic": _setting(torch.use_deterministic_algorithms, False, True),
    "warn only": _setting(_warn_only, False, True),
    "fill": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "anomaly": _setting(torch.autograd.set_detect_anomaly, False, True),
    "matmul, cuda": _attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "matmul, cpu": _attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "sdp, flash": _setting(torch.backends.cuda.enable_flash_sdp, True, False),
    "sdp, memory efficient": _setting(torch.backends.cuda.enable_mem_efficient_sdp, True, False),
    "sdp, math": _setting(torch.backends.cuda.enable_math_sdp, True, False),
    "sdp, cudnn": _setting(torch.backends.cuda.enable_cudnn_sdp, True, False),
    "mkldnn": _setting(torch._C._set_mkldnn_enabled, True, False),
    "cudnn, enabled": _attribute(torch.backends.cudnn, "enabled", False),
    "cudnn, benchmark": _attribute(torch.backends.cudnn, "benchmark", True),
    "cudnn, deterministic": _attribute(torch.backends.cudnn, "deterministic", True),
    "fast path": _setting(torch.backends.mha.set_fastpath_enabled, True, False),
    "einsum, enabled": _einsum,
    "einsum, strategy": _attribute(torch.backends.opt_einsum, "strategy", "greedy"),
}
"""What is done to each of torch's switches, by its name in `SWITCHES`, and its part after a comma; the answer undoes
it."""

PROCESS: dict[str, Callable[[Any], Callable[[], None]]] = {"hook of all modules": _global_hook, **SWITCHED}
"""What is done beside the model; the answer undoes it."""
