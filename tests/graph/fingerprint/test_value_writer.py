"""What cannot be seen gives no fingerprint, and says why; what is harmless gives one."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import random
import re
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from user_code import answer, modules, seen

from rannd.graph.fingerprint import state_rules
from rannd.graph.fingerprint.fingerprint import Fingerprint, Unseen

HELPER = """
import random
RATE = 1.0
def roll(): return random.random()
def __getattr__(name): return 3
"""

FILE = """
import os, random, time, sys, importlib, math, inspect, operator
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
import torch.nn.functional as F
import hidden_helper
from os import environ, getenv
from time import time as now
from operator import attrgetter as getter
from random import choice, random as uniform
COUNT = 0
get = getattr
RANDOM = np.random.default_rng(0)
LARGE = torch.zeros({numbers})
class Thing:
    def __init__(self): self.rate = random.random()
    def rare(self): return time.time()
    def __float__(self): return 1.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = random.random() if False else 0.5
        self.thing = Thing()
        {init}
    def helper(self, x):
        return x * random.random()
    def save(self, path):
        with open(path, "w") as file:
            file.write(os.environ["HOME"])
    def forward(self, x):
        {body}
"""


def unseen(folder: Path, body: str) -> str | None:
    """Why a model with this forward has no fingerprint, None where it has one."""
    text = (
        FILE.replace("{body}", body)
        .replace("{init}", "self.get = getattr" if "self.get(" in body else "")
        .replace("{numbers}", str(state_rules.KEY_BYTES // 4 + 1))
    )
    with modules(folder, {"hidden_helper": HELPER, "hidden_model": text}) as loaded:
        found = answer(loaded["hidden_model"].Net())
    return found.reason if isinstance(found, Unseen) else None


BODIES = {
    "return x * random.random()": "module random of the standard library",
    "return x * uniform()": "module random of the standard library",
    "return x * choice([1, 2])": "module random of the standard library",
    "return x * time.time()": "module time of the standard library",
    "return x * now()": "module time of the standard library",
    "return x * float(os.environ.get('A', 1))": "module os of the standard library",
    "return x * float(environ.get('A', 1))": "module os of the standard library",
    "return x * float(getenv('A', 1))": "module os of the standard library",
    "return x * len(sys.argv)": "module sys of the standard library",
    "return x * importlib.import_module('a').b": "module importlib of the standard library",
    "return x * len(inspect.stack())": "module inspect of the standard library",
    "return x * len(open('a').read())": "uses open",
    "return eval('x')": "uses eval",
    "exec('y = x'); return x": "uses exec",
    "return x * len(globals())": "uses globals",
    "return x * len(locals())": "uses locals",
    "return x * hash('a')": "uses hash",
    "return x * id(x)": "uses id",
    "return x * float(input())": "uses input",
    "return __import__('os').environ": "uses __import__",
    "import time; return x * time.time()": "module time of the standard library",
    "from random import random; return x * random()": "module random of the standard library",
    "import hidden_helper; return x * hidden_helper.RATE": "imports the module hidden_helper when it is called",
    "import not_there; return x * not_there.RATE": "imports not_there, which has not been imported yet",
    "from hidden_helper import MISSING; return x * MISSING": "imports MISSING from hidden_helper",
    "h = hidden_helper; return x * h.RATE": "uses the module hidden_helper as a value",
    "return x * getattr(hidden_helper, 'RATE')": "uses the module hidden_helper as a value",
    "return x * hidden_helper.MISSING": "which the module's __getattr__ creates on access",
    "hidden_helper.RATE = 2; return x": "uses the module hidden_helper as a value",
    "return x * hidden_helper.roll()": "function hidden_helper.roll uses module random",
    "global COUNT; COUNT += 1; return x": "assigns the global COUNT",
    "return x * self.forward.__func__.__globals__['COUNT']": "uses __globals__",
    "return x * len(nn.Module.__subclasses__())": "uses __subclasses__",
    "return x * dist.get_world_size()": "uses torch.distributed",
    "return x * torch.distributed.get_world_size()": "uses torch.distributed",
    "t = torch; return x * t.distributed.get_world_size()": "may read torch.distributed",
    "import torch as t; return x * t.initial_seed()": "may read torch.initial_seed",
    "return x * torch.initial_seed()": "uses torch.initial_seed",
    "return x * torch.get_num_threads()": "uses torch.get_num_threads",
    "return x + torch.load('a')": "uses torch.load",
    "return x * torch.cuda.memory_allocated()": "uses torch.cuda",
    "return x * len(torch.os.environ)": "uses torch.os",
    "return x * np.random.rand()": "uses numpy.random",
    "return x + np.load('a')": "uses numpy.load",
    "return x * RANDOM.random()": "numpy.random",
    "return x + LARGE[0]": "too large to read",
    "return torch.ops.mine.relu(x)": "custom operators torch.ops.mine",
    "return self.helper(x)": "helper uses module random of the standard library",
    "return getattr(self, 'helper')(x)": "helper uses module random of the standard library",
    "return getattr(self, 'hel' + 'per')(x)": "of the standard library",
    "return vars(type(self))['helper'](self, x)": "of the standard library",
    "return operator.methodcaller('helper', x)(self)": "helper uses module random",
    "return getter('hel' + 'per')(self)(x)": "helper uses module random",
    "return get(self, 'hel' + 'per')(x)": "helper uses module random",
    "return self.get(self, 'hel' + 'per')(x)": "helper uses module random",
    "return x * self.thing.rare()": "rare uses module time of the standard library",
    "return x * Thing().rate": "__init__ uses module random of the standard library",
    "return x * type(self.thing)().rate": "__init__ uses module random of the standard library",
    "return x * self.thing.__class__().rate": "__init__ uses module random of the standard library",
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_code_that_reads_the_outside(body: str, tmp_path: Path) -> None:
    reason = unseen(tmp_path, body)
    assert reason is not None
    assert BODIES[body] in reason


HARMLESS = (
    "return x * math.pi",
    "return F.gelu(torch.relu(x)) + np.pi",
    "return x * float(self.thing)",
    "return x if isinstance(x, torch.Tensor) and len(x) else max(x, -x)",
    "return x * getattr(self, 'rate', 1.0)",
    "return sum(x for _ in range(3)) + torch.randn(4)",
    "import math; return x * math.pi",
    "from torch.nn.functional import relu; return relu(x)",
    "return torch.ops.aten.relu(x)",
    "with torch.autocast('cpu'): return x @ x.T",
    "return super().forward(x) if False else x",
    "from hidden_helper import RATE; return x * RATE",
    "return x * hidden_helper.RATE",
)


@pytest.mark.parametrize("body", HARMLESS)
def test_harmless_code(body: str, tmp_path: Path) -> None:
    """Although other methods of the class, and the rest of the file, read files and random numbers."""
    assert unseen(tmp_path, body) is None


class Lazy:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2


class Tagged(torch.Tensor):
    pass


@functools.cache
def remembered(n: int) -> int:
    return n


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(3000):
        found = [found]
    return found


ATTRIBUTES: dict[str, tuple[Callable[[], Any], str]] = {
    "generator of numbers": (torch.Generator, "a torch._C.Generator has state that cannot be read from Python"),
    "random": (lambda: random.Random(0), "module random of the standard library"),
    "numpy's generator": (lambda: np.random.default_rng(0), "numpy.random"),
    "lock": (threading.Lock, "module thread of the standard library"),
    "event": (threading.Event, "module threading of the standard library"),
    "file": (lambda: open(os.devnull), "module io of the standard library"),  # noqa: SIM115
    "path": (pathlib.Path, "module pathlib of the standard library"),
    "environment": (lambda: os.environ, "module os of the standard library"),
    "generator": (lambda: (n for n in range(3)), "a builtins.generator has state that cannot be read from Python"),
    "iterator": (lambda: iter([1]), "has state that cannot be read from Python"),
    "function that remembers": (lambda: remembered, "caches results between calls"),
    "module": (lambda: types.ModuleType("mine"), "the module mine is used as a value"),
    "library's module": (lambda: os, "module os of the standard library"),
    "builtin": (lambda: open, "module io of the standard library"),
    "eval": (lambda: eval, "uses eval"),
    "method of a C object": (lambda: random.Random(0).random, "module random of the standard library"),
    "long": (lambda: list(range(state_rules.KEY_ITEMS + 1)), "too long to read"),
    "many": (lambda: [[0.5] * 100_000] * 1 + [[0.5] * 100_000 for _ in range(10)], "more than 1000000 values"),
    "deep": (deep, "nested too deeply"),
    "large": (lambda: torch.zeros(state_rules.KEY_BYTES + 1, dtype=torch.uint8), "too large to read"),
    "large in sum": (
        lambda: [torch.zeros(state_rules.KEY_BYTES // 2 + 1, dtype=torch.uint8) for _ in range(2)],
        "too large to read",
    ),
    "large array": (lambda: np.zeros(state_rules.KEY_BYTES + 1, np.uint8), "too large to read"),
    "large bytes": (lambda: bytes(state_rules.KEY_BYTES + 1), "MiB of data"),
    "array of objects": (lambda: np.array([object()], dtype=object), "holds Python objects"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "of layout torch.sparse_coo is not supported"),
    "tensor of another class": (lambda: torch.ones(2).as_subclass(Tagged), "is a tensor of another class"),
    "lazy module": (lambda: nn.LazyLinear(3), "is a tensor of another class"),
    "compiled": (lambda: torch.jit.trace(nn.ReLU(), torch.ones(2)), "has state that cannot be read from Python"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*")
@pytest.mark.filterwarnings("ignore:.*Lazy modules.*")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_cannot_be_seen(name: str) -> None:
    make, reason = ATTRIBUTES[name]
    value = make()
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].value = value
    try:
        found = answer(model)
        assert isinstance(found, Unseen)
        assert reason in found.reason
        assert name == "deep" or "0.value" in found.reason or "attribute value of module 0" in found.reason
    finally:
        if name == "file":
            value.close()


SEEN: dict[str, Callable[[], Any]] = {
    "lazy object": Lazy,
    "class": lambda: Function,
    "logger": lambda: logging.getLogger("a"),
    "pattern": lambda: re.compile("a"),
    "method": lambda: Lazy().__init__,
    "bound method of a list": lambda: [1].append,
    "alias": lambda: list[int],
    "union": lambda: int | None,
    "wrapped": lambda: torch.no_grad()(lambda x: x),
    "object": object,
}


@pytest.mark.parametrize("name", SEEN)
def test_attributes_that_can_be_seen(name: str) -> None:
    model = nn.Linear(4, 4)
    model.value = SEEN[name]()
    assert isinstance(answer(model), Fingerprint)


def test_parameters_that_cannot_be_seen() -> None:
    found = answer(nn.Sequential(nn.Linear(4, 4), nn.ParameterList([nn.UninitializedParameter()])))
    assert isinstance(found, Unseen)
    assert found.reason.startswith("parameter 1.0: a torch.nn.parameter.UninitializedParameter")


def test_modes_that_cannot_be_seen() -> None:
    class Mine(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Deep(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for mode in (Mine(), Deep()):
        with mode:
            found = answer(nn.Linear(4, 4))
        assert isinstance(found, Unseen)
        assert f"runs inside a {__name__}.{type(mode).__qualname__}" in found.reason
    assert isinstance(answer(nn.Linear(4, 4)), Fingerprint)


def test_custom_operators() -> None:
    with torch.library._scoped_library("rannd_test_unseen", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        model = nn.Linear(4, 4)
        model.value = torch.ops.rannd_test_unseen.twice
        found = answer(model)
        assert isinstance(found, Unseen)
        assert "the code of the custom operator rannd_test_unseen::twice cannot be read" in found.reason
        model.value = torch.ops.rannd_test_unseen.twice.default
        assert isinstance(answer(model), Unseen)
    model.value = torch.ops.aten.relu
    assert isinstance(answer(model), Fingerprint)


def test_what_is_found_in_libraries_has_to_be_seen_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "gelu", lambda x: x * time.time())
    found = answer(nn.GELU())
    assert isinstance(found, Unseen)
    assert "uses module time of the standard library" in found.reason


def test_library_code_counts_by_version_whatever_it_uses() -> None:
    """Its locks, caches and modules are no reason."""
    assert seen(nn.TransformerEncoderLayer(4, 2)) == seen(nn.TransformerEncoderLayer(4, 2))


def test_the_reason_names_the_place(tmp_path: Path) -> None:
    reason = unseen(tmp_path, "return x * hidden_helper.roll()")
    assert reason == "function hidden_helper.roll uses module random of the standard library"
