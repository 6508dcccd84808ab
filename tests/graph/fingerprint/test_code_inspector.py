"""Fingerprints and code: scripts, files of the user's, globals, closures, and the user's code inside libraries."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from user_code import differences, modules, seen

from rannd.graph.fingerprint.fingerprint import Fingerprint

SCRIPT = '''
"""A training script: the model beside everything else."""
import os, random, sys, time
import torch
from torch import nn

import helper
from helper import Block, widen
from rannd.graph.fingerprint.fingerprint import fingerprint
from rannd.graph.call.signature import Mode, classify, flatten_call

started = time.time()
random.seed(int(sys.argv[1]))
torch.manual_seed(int(sys.argv[1]))
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(dataset, batch_size=int(sys.argv[2]))
output = os.environ.get("OUTPUT", "model.pt")
SCALE = 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = {"b", "a", "c"}
        self.block = Block(4, torch.tanh)
        self.register_buffer("noise", torch.randn(4))

    def forward(self, x):
        return (widen(self.block(x)) * SCALE + self.noise * helper.RATE).sum()

    def save(self):
        torch.save(self.state_dict(), output)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=random.random())
(x,) = next(iter(loader))
call = flatten_call((x,), {})
found = fingerprint(model, classify(call, Mode.current(True), [call.shapes()]), torch.device("cpu"))
print(found)
'''

HELPER = """
import torch
from torch import nn

RATE = 0.25


def widen(x):
    return torch.cat([x, half(x)], 1)


def half(x):
    return x / 2


class Block(nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.linear(x))
"""


def run_script(folder: Path, seed: int, rows: int, *, script: str = SCRIPT, helper: str = HELPER) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    (folder / "helper.py").write_text(helper)
    done = subprocess.run(
        [sys.executable, "-B", "train.py", str(seed), str(rows)],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(seed), "OUTPUT": f"model-{seed}.pt"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fingerprint("), done.stdout
    return done.stdout


@pytest.mark.long
def test_a_script_has_the_same_in_every_process(tmp_path: Path) -> None:
    """With other weights, another batch size, another place of the files, and other globals beside the model."""
    first = run_script(tmp_path / "one", 1, 4)
    assert run_script(tmp_path / "two", 2, 8) == first
    helper = HELPER.replace("x / 2", "x / 3")
    assert run_script(tmp_path / "three", 1, 4, helper=helper) != first


USER = '''
import functools, math
import torch
from torch import nn
import torch.nn.functional as F
import user_helper
from user_helper import shift, Mixin, Settings

FLAG = True
TABLE = {"a": [1, 2.5]}
UNUSED = object()
settings = Settings(3)


def decorate(factor):
    def outer(function):
        @functools.wraps(function)
        def inner(*args, **named):
            return function(*args, **named) * factor
        return inner
    return outer


def power(x, exponent=2):
    return x ** exponent


class Base(nn.Module):
    slope = 0.1

    def before(self, x):
        return x + 1


class Net(Mixin, Base):
    """A model."""

    order = ("a", "b")

    def __init__(self, alpha=1.5):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = lambda x: torch.tanh(x) * alpha
        self.kind = "one"

    @property
    def ratio(self):
        return self.slope * 2

    @staticmethod
    def fixed(x):
        return x - 1

    @decorate(2.0)
    def inner(self, x, *, bias=0.5):
        return self.act(self.linear(x)) + bias

    def forward(self, x, scale=1.0):
        x = self.mixed(self.before(x)) * self.ratio
        if FLAG:
            x = x + TABLE["a"][0]
        x = self.inner(x) * settings.depth
        return shift(self.fixed(power(x))) * user_helper.RATE * len(self.order) * scale + user_helper.nested.VALUE

    def never(self):
        return user_helper.never()
'''

USER_HELPER = """
import types

RATE = 0.5
OTHER = 1
nested = types.SimpleNamespace(VALUE=3)
limit = 10


class Settings:
    def __init__(self, depth):
        self.depth = depth

    def unused(self):
        return 1


class Mixin:
    gain = 2

    def mixed(self, x):
        return x * self.gain


def clamp(x):
    return x.clamp(max=limit)


def shift(x):
    return clamp(x) + 1


def never():
    return 1
"""


def coded(folder: Path, user: str = USER, helper: str = USER_HELPER, change: str = "") -> Fingerprint:
    """The fingerprint of the model in these files, after the statement `change` where `user` and `helper` are modules
    and `model` is the model."""
    with modules(folder, {"user_helper": helper, "user_model": user}) as loaded:
        model = loaded["user_model"].Net()
        names = {"user": loaded["user_model"], "helper": loaded["user_helper"], "model": model, "torch": torch, "F": F}
        exec(change, names)
        return seen(model)


CODE = {
    "constant in forward": ('["a"][0]', '["a"][1]'),
    "default of forward": ("scale=1.0", "scale=1"),
    "flag": ("FLAG = True", "FLAG = False"),
    "flag of another type": ("FLAG = True", "FLAG = 1"),
    "global in a list in a dict": ("2.5]", "2.0]"),
    "argument of a global object": ("Settings(3)", "Settings(4)"),
    "factor of a decorator": ("decorate(2.0)", "decorate(2)"),
    "function inside a decorator": ("**named) * factor", "**named) + factor"),
    "default of a function": ("exponent=2", "exponent=3"),
    "body of a function": ("x ** exponent", "x * exponent"),
    "attribute of a base class": ("slope = 0.1", "slope = 0.2"),
    "method of a base class": ("return x + 1\n", "return x + 2\n"),
    "attribute of the class": ('order = ("a", "b")', 'order = ("b", "a")'),
    "closure of a lambda": ("alpha=1.5", "alpha=1.25"),
    "body of a lambda": ("torch.tanh(x)", "torch.relu(x)"),
    "attribute": ('"one"', '"two"'),
    "property": ("self.slope * 2", "self.slope * 3"),
    "static method": ("x - 1", "x - 2"),
    "default of a keyword": ("bias=0.5", "bias=0.25"),
    "order of the base classes": ("class Net(Mixin, Base)", "class Net(Base, Mixin)"),
    "comment": ("UNUSED = object()", "UNUSED = object()  # not used"),
    "renamed class": ("class Base", "class Basis"),
    "method that is never called": ("user_helper.never()", "user_helper.never"),
}
HELPER_CODE = {
    "global of an imported module": ("RATE = 0.5", "RATE = 0.75"),
    "attribute of an object there": ("VALUE=3", "VALUE=4"),
    "global of a function there": ("limit = 10", "limit = 11"),
    "function that a function calls": ("clamp(max=limit)", "clamp(min=limit)"),
    "attribute of a mixin": ("gain = 2", "gain = 3"),
    "method of a mixin": ("x * self.gain", "x / self.gain"),
    "method of a class there": ("        return 1\n", "        return 2\n"),
}
RUNNING = {
    "global": "user.FLAG = False",
    "global of a module": "helper.RATE = 1.0",
    "global of a module that a function reads": "helper.limit = 5",
    "inside a global": "user.TABLE['a'].append(1)",
    "attribute of a global": "user.settings.depth = 5",
    "new attribute of a global": "user.settings.more = 5",
    "new global before a builtin": "user.len = lambda x: 2",
    "function that was imported": "user.shift = lambda x: x",
    "function deeper": "helper.clamp = lambda x: x",
    "module of a module": "user.user_helper = type(helper)('stranger')\nuser.user_helper.RATE = 1\n"
    "user.user_helper.nested = helper.nested",
    "class attribute": "user.Net.slope = 0.3",
    "attribute of the base class": "user.Base.slope = 0.3",
    "method of the class": "user.Net.fixed = staticmethod(lambda x: x)",
    "method of the base class": "user.Base.before = lambda self, x: x",
    "method of one instance": "model.before = lambda x: x",
    "code of a function": "helper.shift.__code__ = (lambda x: x).__code__",
    "default of a function": "user.power.__defaults__ = (4,)",
    "default of a keyword": "user.Net.inner.__wrapped__.__kwdefaults__ = {'bias': 1}",
    "attribute of a function": "user.power.flag = 1",
    "value in a closure": "user.Net().act.__closure__\nmodel.act.__closure__[0].cell_contents = 7",
    "base classes": "user.Net.__bases__ = (helper.Mixin, torch.nn.Module, user.Base)[:2] + ()\n"
    "user.Net.before = user.Base.before\nuser.Net.slope = 0.1",
}


@pytest.fixture(scope="module")
def from_files(tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    return coded(tmp_path_factory.mktemp("reference"))


def test_code_loaded_again_is_the_same(tmp_path: Path, from_files: Fingerprint) -> None:
    assert coded(tmp_path / "elsewhere") == from_files


@pytest.mark.parametrize("name", CODE)
def test_code_in_the_file_of_the_class(name: str, tmp_path: Path, from_files: Fingerprint) -> None:
    old, new = CODE[name]
    assert USER.count(old) >= 1
    text = USER.replace(old, new)
    if name == "renamed class":
        text = text.replace("(Mixin, Base)", "(Mixin, Basis)")
    assert coded(tmp_path, text) != from_files


@pytest.mark.parametrize("name", HELPER_CODE)
def test_code_in_another_file(name: str, tmp_path: Path, from_files: Fingerprint) -> None:
    old, new = HELPER_CODE[name]
    assert old in USER_HELPER
    assert coded(tmp_path, helper=USER_HELPER.replace(old, new)) != from_files


@pytest.mark.parametrize("name", RUNNING)
def test_code_and_globals_changed_while_running(name: str, tmp_path: Path, from_files: Fingerprint) -> None:
    found = coded(tmp_path, change=RUNNING[name])
    assert differences(found, from_files) & {"modules", "code", "globals"}


UNSEEN_CHANGES = (
    "user.UNUSED = 3",
    "helper.shift = None",
    "user.super = None",
    "helper.OTHER = 2",
    "user.unrelated = open",
    "helper.environ = __import__('os')",
)


@pytest.mark.parametrize("change", UNSEEN_CHANGES)
def test_what_the_models_code_does_not_read_does_not_matter(
    change: str, tmp_path: Path, from_files: Fingerprint
) -> None:
    assert coded(tmp_path, change=change) == from_files


def test_bytecode_counts_where_files_cannot_be_read(tmp_path: Path) -> None:
    """As in a notebook: the text of a class is gone, and its bytecode is all there is."""

    def made(source: str) -> Fingerprint:
        module = types.ModuleType("cell")
        sys.modules["cell"] = module
        try:
            exec(compile(source, "<cell 1>", "exec"), vars(module))
            return seen(module.Net())
        finally:
            del sys.modules["cell"]

    source = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    assert made(source) == made(source.replace("x + 1", "x  +  1"))
    assert differences(made(source), made(source.replace("x + 1", "x + 2"))) == {"code"}
    assert differences(made(source), made(source.replace("x + 1", "x + 1.0"))) == {"code"}
    assert differences(made(source), made(source.replace("x + 1", "x - 1"))) == {"code"}


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: Tensor, approximate: str = "none") -> Tensor:
        return x * self.factor


def test_a_function_of_the_users_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    before = seen(model)
    seen_so_far = [before]
    for target, name, value in (
        (F, "gelu", lambda x, approximate="none": x * 2),
        (F, "gelu", lambda x, approximate="none": x * 3),
        (F, "gelu", functools.partial(F.leaky_relu, negative_slope=0.1)),
        (F, "gelu", functools.partial(F.leaky_relu, negative_slope=0.2)),
        (F, "gelu", Scale(2)),
        (F, "gelu", Scale(3)),
        (F, "linear", F.bilinear),
        (torch.Tensor, "float", torch.Tensor.double),
        (torch.Tensor, "mul", lambda self, other: self),
        (nn.GELU, "forward", lambda self, x: x),
        (nn.GELU, "forward", nn.Identity.forward),
        (nn.Module, "__call__", lambda self, x: x),
        (nn.Module, "_call_impl", lambda self, x: x),
        (nn.modules.linear.Linear, "forward", torch.no_grad()(lambda self, x: x)),
        (nn.Linear, "forward", functools.wraps(nn.Linear.forward)(lambda self, x: x * 5)),
        (torch, "relu", lambda x: x),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            found = seen(model)
        assert found not in seen_so_far, name
        seen_so_far.append(found)
    assert seen(model) == before


class Checkpointing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_what_torchs_compiler_notes_of_a_function_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has called the function, as one that measures a leaf, has the same key as the others."""
    noted = inspect.unwrap(torch.utils.checkpoint.checkpoint).__dict__
    monkeypatch.delitem(noted, "__dynamo_disable", raising=False)
    model = Checkpointing(4, 4)
    before = seen(model)
    model(torch.randn(2, 4, requires_grad=True))
    assert "__dynamo_disable" in noted
    assert seen(model) == before


def test_how_many_hooks_the_process_has_registered_does_not_matter() -> None:
    """Transformers keeps a handle of a hook for gradient checkpointing; ranks register different numbers of hooks."""
    keys = []
    for _ in range(2):
        model = nn.Linear(4, 4)
        model.handle = model.register_forward_hook(lambda module, inputs, output: output)
        keys.append(seen(model))
    assert keys[0] == keys[1]


def test_functions_that_users_register_with_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = importlib.import_module("transformers")
    modeling = importlib.import_module("transformers.modeling_utils")
    gpt2 = importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    masks = importlib.import_module("transformers.masking_utils")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.ones(2, 5, dtype=torch.long)
    before = seen(model, input_ids=ids)
    assert before.components["versions"].count("transformers") == 1
    functions = modeling.ALL_ATTENTION_FUNCTIONS._global_mapping
    found = [before]
    for number in (1, 2):
        monkeypatch.setitem(functions, "mine", lambda *a, number=number, **k: number)
        found.append(seen(model, input_ids=ids))
    monkeypatch.delitem(functions, "mine")
    assert seen(model, input_ids=ids) == before
    for module, name in ((gpt2, "eager_attention_forward"), (masks, "create_causal_mask"), (gpt2.GPT2MLP, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *a, **k: None)
            found.append(seen(model, input_ids=ids))
        with monkeypatch.context() as patch:
            patch.setattr(module, name, F.gelu if module is gpt2 else lambda *a, **k: 1)
            found.append(seen(model, input_ids=ids))
    model.config.layer_norm_epsilon = 1e-3
    found.append(seen(model, input_ids=ids))
    for place, one in enumerate(found):
        assert one not in found[:place]
