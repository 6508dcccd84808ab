"""Random small models, and random single changes of them: code, attributes, tensors, modules, hooks, calls, modes.

A `Recipe` is plain data, and two recipes are the same model exactly when their `text` is the same.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NAME = "mutant_model"

SOURCE = """
import functools, math
import torch
import torch.nn.functional as F
from torch import nn

FLAG = {flag}
TABLE = {{"a": [{entry}, 2.0], "b": ({other},)}}
ORDER = {order}

class Settings:
    ratio = {ratio}
    def __init__(self, depth):
        self.depth = depth
    def total(self):
        return self.depth {settings_op} self.ratio

settings = Settings({depth})

def scaled(factor):
    def outer(function):
        @functools.wraps(function)
        def inner(*args, **named):
            return function(*args, **named) {wrap_op} factor
        return inner
    return outer

def power(x, exponent={exponent}):
    return {function}(x) {power_op} exponent

def activation(alpha):
    return lambda x: {act}(x) * alpha

class Base(nn.Module):
    slope = {slope}
    def before(self, x):
        return x {before_op} {before}

class Mixin:
    def mixed(self, x, *, gain={gain}):
        return x {mixin_op} gain

class Block({bases}):
    def __init__(self, width, p, eps, alpha):
        super().__init__()
        self.linear = nn.Linear(width, width, bias={bias})
        self.norm = nn.{norm}(width, eps=eps)
        self.drop = nn.Dropout(p)
        self.act = activation(alpha)
    @property
    def steep(self):
        return self.slope * {steep}
    @scaled({factor})
    def inner(self, x):
        return self.act(self.norm(self.linear(x)))
    @staticmethod
    def plain(x):
        return x {plain_op} {plain}
    def forward(self, x):
        return self.drop(self.inner(self.mixed(self.before(x)))) * self.steep

class Net(nn.Module):
    def __init__(self, layers, width, p, eps, alpha, out):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, p, eps, alpha) for _ in range(layers))
        self.head = nn.Linear(width, out)
        self.register_buffer("shift", torch.zeros(width))
        self.values = None
    def forward(self, x, *rest, extra=None, scale={scale}):
        if FLAG:
            x = x {flag_op} TABLE["a"][0]
        for block in self.blocks:
            x = block.plain(block(x)) + self.shift
        for name in ORDER:
            x = getattr(torch, name)(x) if name in ("relu", "tanh", "sigmoid") else x
        x = power(x) * settings.total() * TABLE["b"][0] + scale
        if isinstance(extra, (int, float)):
            x = x + extra
        return self.head(x).sum({dim})
"""

_OPERATORS = ("+", "-", "*", "/")
_NUMBERS = ("1", "2", "3", "1.0", "2.0", "0.5", "0.25", "True", "-1", "-1.0", "1e-3")
_PLACES = ("entry", "other", "ratio", "depth", "exponent", "slope", "before", "gain", "steep", "factor", "plain",
           "scale")  # fmt: skip
_FUNCTIONS = ("torch.relu", "torch.tanh", "F.gelu", "F.silu", "torch.sigmoid", "F.relu", "torch.sin")

SLOTS: dict[str, tuple[str, ...]] = {
    "flag": ("True", "False", "1", "0", "None"),
    "order": ('("relu", "tanh")', '("tanh", "relu")', '["relu", "tanh"]', '("relu",)', "()", '("sigmoid", "none")'),
    "bases": ("Mixin, Base", "Base, Mixin"),
    "bias": ("True", "False"),
    "norm": ("LayerNorm", "RMSNorm"),
    "function": _FUNCTIONS,
    "act": _FUNCTIONS,
    "dim": ("-1", "1", "(-1,)", "-1, keepdim=True"),
    **dict.fromkeys(("settings_op", "wrap_op", "power_op", "before_op", "mixin_op", "plain_op", "flag_op"), _OPERATORS),
    **dict.fromkeys(_PLACES, _NUMBERS),
}
"""Places in the source, and what may stand there."""

SIZES: dict[str, tuple[Any, ...]] = {
    "layers": (1, 2, 3),
    "width": (4, 6, 8),
    "out": (1, 2, 3),
    "p": (0.0, 0.1, 0.5, 0),
    "eps": (1e-5, 1e-6, 1e-3),
    "alpha": (1.0, 1, 2.0, -1.0, 0.5, True, 0.0, -0.0),
}
"""Arguments of the model."""


def _hook(module: nn.Module, args: Any) -> None:
    return None


def _double(module: nn.Module, args: Any, result: Any) -> Any:
    return result * 2


def _half(module: nn.Module, args: Any, result: Any) -> Any:
    return result / 2


def _then(one: Callable[[Any], Any], other: Callable[[Any], Any], x: Any) -> Any:
    return other(one(x))


class _After(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return -self.function(x)


def _transpose(model: Any) -> None:
    weight = model.head.weight.detach()
    model.head.weight = nn.Parameter(weight.t().contiguous().t())
    model.transposed = True  # a vector has one layout only


EDITS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "training": {
        "first block": lambda m: m.blocks[0].eval(),
        "last dropout": lambda m: m.blocks[-1].drop.eval(),
        "all": lambda m: m.eval(),
        "the model alone": lambda m: setattr(m, "training", False),
    },
    "sharing": {
        "weight": lambda m: setattr(m, "tied", m.head.weight),
        "block": lambda m: m.blocks.append(m.blocks[0]),
    },
    "activation": {
        "function": lambda m: setattr(m.blocks[0], "act", functools.partial(_then, m.blocks[0].act, torch.cos)),
        "other function": lambda m: setattr(m.blocks[0], "act", functools.partial(_then, m.blocks[0].act, torch.sin)),
        "module": lambda m: setattr(m.blocks[0], "act", _After(m.blocks[0].act)),
    },
    "norm": {
        "forward": lambda m: setattr(m.blocks[0].norm, "forward", lambda x: x),
        "other forward": lambda m: setattr(m.blocks[0].norm, "forward", lambda x: -x),
        "module": lambda m: setattr(m.blocks[0], "norm", nn.Sequential(m.blocks[0].norm, nn.Identity())),
        "flag": lambda m: setattr(m.blocks[0].norm, "elementwise_affine", None),
    },
    "method": {
        "before": lambda m: setattr(m.blocks[0], "before", lambda x: x),
        "plain": lambda m: setattr(m.blocks[0], "plain", lambda x: x),
        "forward": lambda m: setattr(m.head, "forward", lambda x: x * 2),
    },
    "weight": {
        "norm": lambda m: nn.utils.parametrizations.weight_norm(m.head),
        "attribute": lambda m: setattr(m.head.weight, "more", 1),
        "layout": _transpose,
        "gone": lambda m: setattr(m.head, "bias", None),
    },
    "frozen": {
        "weight": lambda m: m.blocks[0].linear.weight.requires_grad_(False),
        "head": lambda m: m.head.requires_grad_(False),
    },
    "tensors": {
        "buffer": lambda m: m.register_buffer("new", torch.zeros(2)),
        "buffer, not stored": lambda m: m.register_buffer("new", torch.zeros(2), persistent=False),
        "parameter": lambda m: m.register_parameter("new", nn.Parameter(torch.zeros(2))),
        "attribute": lambda m: setattr(m, "new", torch.zeros(2)),
        "no buffer": lambda m: m.register_buffer("shift", None),
        "longer": lambda m: m.register_buffer("shift", m.shift[None]),
    },
    "modules": {
        "new": lambda m: m.add_module("more", nn.ReLU()),
        "another": lambda m: m.add_module("more", nn.SiLU()),
        "hidden": lambda m: setattr(m, "more", [nn.ReLU()]),
    },
    "hooks": {
        "before": lambda m: m.head.register_forward_pre_hook(_hook),
        "after": lambda m: m.head.register_forward_hook(_double),
        "other": lambda m: m.head.register_forward_hook(_half),
        "of a block": lambda m: m.blocks[0].register_forward_hook(_double),
        "backward": lambda m: m.head.register_full_backward_hook(_double),
    },
    "attributes": {
        "model": lambda m: setattr(m, "extra", 1),
        "block": lambda m: setattr(m.blocks[0], "extra", 1),
        "float": lambda m: setattr(m, "extra", 1.0),
        "dropout": lambda m: setattr(m.blocks[-1].drop, "inplace", True),
    },
    "dtype": {"head": lambda m: m.head.double(), "all": lambda m: m.double(), "half": lambda m: m.half()},
}
"""Changes of a model that is built, one of each group at most, in this order; none hides what another one did."""

X = torch.ones(3, 4)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "list": (([1],), {}),
    "tuple": (((1,),), {}),
    "dict": (({"a": 1},), {}),
    "tensor": ((X,), {}),
    "tensor in a list": (([X],), {}),
    "whole tensor": ((torch.ones(5, 2),), {}),
    "integers": ((torch.ones(3, dtype=torch.long),), {}),
    **{f"extra {value!r}": ((), {"extra": value}) for value in (1, True, 1.0, 0.0, -0.0, "a", 2)},
    **{f"scale {value!r}": ((), {"scale": value}) for value in (3, 3.0)},
}
"""Further arguments of the call."""

INPUTS = ("float32", "float64", "bfloat16", "gradient", "third dimension")

MODES = ("plain", "no gradients", "autocast", "autocast to half", "doubles by default", "deterministic", "no mkldnn")


@dataclass
class Recipe:
    """A model, a call and a mode."""

    slots: dict[str, str]
    sizes: dict[str, Any]
    values: Any
    edits: dict[str, str]
    call: str = "plain"
    input: str = "float32"
    mode: str = "plain"

    @property
    def text(self) -> str:
        """Equal for equal recipes, exact about types and orders."""
        sizes = [(name, _text(value)) for name, value in self.sizes.items()]
        return repr((self.slots, sizes, _text(self.values), self.edits, self.call, self.input, self.mode))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"float {value.hex()}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(_text, value)))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, types.SimpleNamespace):
        return f"namespace {_text(vars(value))}"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {value.tolist()!r}"
    return f"{type(value).__name__} {value!r}"


_LEAVES = (None, True, False, 0, 1, 2, -1, 0.0, -0.0, 1.0, 0.5, "", "a", "b", "1", b"a", 1j, torch.float16,
           torch.float32, torch.device("cpu"), (), float("inf"))  # fmt: skip


def random_value(generator: random.Random, depth: int) -> Any:
    """Nested containers of plain values."""
    kind = generator.randrange(9) if depth else 8
    inner = [random_value(generator, depth - 1) for _ in range(generator.randrange(4))] if kind < 6 else []
    if kind in (0, 1):
        return inner
    if kind == 2:
        return tuple(inner)
    if kind in (3, 4):
        return {generator.choice("abcdef") + str(place): item for place, item in enumerate(inner)}
    if kind == 5:
        return types.SimpleNamespace(**{f"n{place}": item for place, item in enumerate(inner)})
    if kind == 6:
        return {generator.choice("abcdef") for _ in range(3)}
    if kind == 7:
        return torch.full((generator.randrange(1, 4),), generator.choice((0.0, 1.0, 2.0)))
    return generator.choice(_LEAVES)


def changed_value(generator: random.Random, value: Any) -> Any:
    """A value with one change somewhere inside (or none, by chance)."""
    choice = generator.random()
    if isinstance(value, (list, tuple)) and choice < 0.85:
        items = list(value)
        place = generator.randrange(len(items) + 1)
        if items and choice < 0.5:
            place = generator.randrange(len(items))
            items[place] = changed_value(generator, items[place])
        elif choice < 0.6:
            items.insert(place, random_value(generator, 1))
        elif choice < 0.7:
            del items[place:]
        elif choice < 0.75:
            items.reverse()
        else:
            return tuple(items) if isinstance(value, list) else items
        return type(value)(items)
    if isinstance(value, types.SimpleNamespace) and choice < 0.85:
        inner = changed_value(generator, vars(value))
        return types.SimpleNamespace(**inner) if isinstance(inner, dict) else inner
    if isinstance(value, dict) and choice < 0.85:
        pairs = list(value.items())
        if pairs and choice < 0.5:
            place = generator.randrange(len(pairs))
            pairs[place] = (pairs[place][0], changed_value(generator, pairs[place][1]))
        elif pairs and choice < 0.6:
            place = generator.randrange(len(pairs))
            pairs[place] = (f"k{generator.randrange(99)}", pairs[place][1])
        elif pairs and choice < 0.7:
            pairs.pop()
        elif choice < 0.75:
            pairs.reverse()
        else:
            pairs.append((f"z{generator.randrange(99)}", random_value(generator, 1)))
        return dict(pairs)
    if isinstance(value, set) and choice < 0.85:
        return value ^ {generator.choice("abcdefgh")} if choice < 0.7 else frozenset(value)
    if isinstance(value, torch.Tensor) and choice < 0.85:
        return value + 1 if choice < 0.5 else value.double() if choice < 0.7 else value[None]
    if type(value) in (int, bool, float) and choice < 0.4:
        return generator.choice((int, float, bool, str, lambda v: -v, lambda v: v + 1))(value)
    return random_value(generator, 1)


def random_recipe(generator: random.Random) -> Recipe:
    """A model with a few changes."""
    slots = {name: generator.choice(choices) for name, choices in SLOTS.items()}
    sizes = {name: generator.choice(choices) for name, choices in SIZES.items()}
    edits = {group: generator.choice(list(choices)) for group, choices in EDITS.items() if generator.random() < 0.1}
    values = [random_value(generator, 3) for _ in range(3)]
    return Recipe(slots, sizes, values, edits, generator.choice(list(CALLS)))


def mutated(generator: random.Random, recipe: Recipe) -> Recipe:
    """A recipe that differs in one place."""
    while True:
        other = copy.deepcopy(recipe)
        where = generator.randrange(20)
        if where < 6:
            name = generator.choice(list(SLOTS))
            other.slots[name] = generator.choice(SLOTS[name])
        elif where < 8:
            name = generator.choice(list(SIZES))
            other.sizes[name] = generator.choice(SIZES[name])
        elif where < 13:
            other.values = changed_value(generator, other.values)
        elif where < 17:
            group = generator.choice(list(EDITS))
            chosen = {**other.edits, group: generator.choice([*EDITS[group], ""])}
            other.edits = {each: chosen[each] for each in EDITS if chosen.get(each)}
        elif where < 18:
            other.call = generator.choice(list(CALLS))
        elif where < 19:
            other.input = generator.choice(INPUTS)
        else:
            other.mode = generator.choice(MODES)
        if other.text != recipe.text:
            return other


@functools.lru_cache(1000)
def _compiled(text: str) -> types.CodeType:
    return compile(text, "/nowhere/mutant_model.py", "exec")


@contextmanager
def realised(recipe: Recipe, rows: int = 3) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The model of a recipe, and the arguments of its call, in its mode."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    exec(_compiled(SOURCE.format(**recipe.slots)), vars(module))
    try:
        model: nn.Module = module.Net(**recipe.sizes)
        model.values = recipe.values  # type: ignore[assignment]
        for group, name in recipe.edits.items():
            EDITS[group][name](model)
        args, named = CALLS[recipe.call]
        width = recipe.sizes["width"]
        x = torch.randn((rows, 2, width) if recipe.input == "third dimension" else (rows, width))
        if recipe.input in ("float64", "bfloat16"):
            x = x.to(getattr(torch, recipe.input))
        x.requires_grad_(recipe.input == "gradient")
        args = tuple(_with_rows(arg, rows) for arg in args)
        with in_mode(recipe.mode):
            yield model, (x, *args), named
    finally:
        del sys.modules[NAME]


@contextmanager
def in_mode(mode: str) -> Iterator[None]:
    """One of MODES."""
    default, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    mkldnn = torch._C._get_mkldnn_enabled()
    try:
        with ExitStack() as stack:
            if mode == "no gradients":
                stack.enter_context(torch.no_grad())
            elif mode.startswith("autocast"):
                dtype = torch.float16 if mode.endswith("half") else torch.bfloat16
                stack.enter_context(torch.autocast("cpu", dtype=dtype))
            elif mode == "doubles by default":
                torch.set_default_dtype(torch.float64)
            elif mode == "deterministic":
                torch.use_deterministic_algorithms(True)
            elif mode == "no mkldnn":
                torch._C._set_mkldnn_enabled(False)
            yield
    finally:
        torch.set_default_dtype(default)
        torch.use_deterministic_algorithms(deterministic)
        torch._C._set_mkldnn_enabled(mkldnn)


def _with_rows(value: Any, rows: int) -> Any:
    if isinstance(value, list):
        return [_with_rows(item, rows) for item in value]
    if isinstance(value, torch.Tensor) and value.shape[0] == 3:
        return value[:1].expand(rows, *value.shape[1:]).clone()
    return value
