"""Versions of torch: what is said outside of the tried range, and the table of torch's private names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from private_names import Project, Use, lines_of, resolve
from torch import nn

from rannd import torch_versions
from rannd.torch_versions import NEWEST, OLDEST, PRIVATE_NAMES, PrivateName, UntriedTorchWarning, doubt, minor

ROOT = Path(__file__).resolve().parents[1]
NAMES = [line.name for line in PRIVATE_NAMES]
FOLDERS = ("rannd", "pyrannc", "bench")

OTHERS = {
    "_abc_impl": "of Python's abstract classes",
    "_asdict": "of Python's named tuples",
    "_device": "of Lightning's modules",
    "_dtype": "of Lightning's modules",
    "_free": "of rannd's MessageBuffers, which bench/_tensor_bytes.py reads",
    "_graphs": "of rannd's Deployed, which bench/runtime.py reads",
    "_init_weights": "of transformers' models",
    "_inner": "of RaNNCModule, which rannd.runtime.checkpoint.checkpoint_api reads",
    "_is_hf_initialized": "of tensors in transformers' models",
    "_load_model_state_pre_hook": "of Accelerate's Accelerator",
    "_native": "a namespace of torch's operators, which trace_grammar.py refuses",
    "_keys_to_ignore_on_load_missing": "of transformers' models",
    "_keys_to_ignore_on_load_unexpected": "of transformers' models",
    "_player": "of rannd's Executor, which bench/_tensor_bytes.py reads",
    "_rannd_told": "of errors that rannd has told other ranks of",
    "_save_model_state_pre_hook": "of Accelerate's Accelerator",
    "_session": "of RaNNCModule, which rannd.runtime.checkpoint.checkpoint_api reads",
    "_tensors": "of rannd's Computing, which bench/runtime.py reads",
}
"""Private attributes that are used in another file than the one that defines them, and are not torch's."""

INSTANCES: dict[str, Callable[[], Any]] = {
    "torch.nn.Module": nn.Module,
    "torch.nn.Module.state_dict": lambda: nn.Module().state_dict(),
    "torch.nn.RNNBase": lambda: nn.LSTM(1, 1),
    "torch.optim.Optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
    "torch.utils.data.dataloader._BaseDataLoaderIter": lambda: iter(torch.utils.data.DataLoader([0])),
    "torch._dynamo.OptimizedModule": lambda: torch.compile(nn.Identity(), backend="eager"),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._ops.OpOverloadPacket": lambda: torch.ops.aten.add,
}
"""What has the attributes that a class gets in its constructor only."""


def project(**sources: str) -> Project:
    """Files of a project, ``module="text"``."""
    return Project({f"{name}.py": text for name, text in sources.items()}, OTHERS)


def found(text: str) -> list[str]:
    """Names of the uses in a file."""
    return [use.name for use in project(file=text).uses()]


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(files)}
    table = str(Path(torch_versions.__file__).relative_to(ROOT))
    before, begin, behind = sources[table].partition("PRIVATE_NAMES = (")
    lines, mark, behind = behind.partition('"""All private names of torch')
    sources[table] = before + begin + ")" + "\n" * lines.count("\n") + mark + behind  # the uses below count, too
    return Project(sources, OTHERS).uses()


def test_every_private_name_has_a_line(uses: list[Use]) -> None:
    missing = [f"{use.place}: {use.name}" for use in uses if not lines_of(use, NAMES)]
    assert not missing, (
        "these private names are torch's, or nobody's that is known. Add a line for each to PRIVATE_NAMES in "
        "rannd/torch_versions.py (its full name, what it is for, since when torch has it), or, where it is not "
        "torch's, to OTHERS in tests/test_torch_versions.py:\n" + "\n".join(missing)
    )


def test_every_line_is_used(uses: list[Use]) -> None:
    used = {name for use in uses for name in lines_of(use, NAMES)}
    assert not [name for name in NAMES if name not in used], "lines of PRIVATE_NAMES that nothing uses any more"
    seen = {use.name for use in Project(_sources(), ()).uses()}
    missing = {name for name in OTHERS if name not in seen}
    if not hasattr(torch, "_native"):  # before 2.13 the word is not taken for a name of torch's
        missing.discard("_native")
    assert not missing, "names of OTHERS that nothing uses any more"


def _sources() -> dict[str, str]:
    return {
        str(p.relative_to(ROOT)): p.read_text() for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))
    }


def test_lines_are_sound() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for line in PRIVATE_NAMES:
        assert line.why.endswith("."), line
        last = minor(line.until) if line.until else NEWEST
        assert OLDEST <= minor(line.since) <= last <= NEWEST, line


@pytest.mark.parametrize("line", PRIVATE_NAMES, ids=lambda line: line.name)
def test_this_torch_has_the_names_of_its_version(line: PrivateName) -> None:
    assert has(line.name) == line.is_in(torch.__version__)


def has(path: str) -> bool:
    """Whether this torch has what a path names, for attributes an instance of their class."""
    owner, _, name = path.rpartition(".")
    if owner in INSTANCES:
        return hasattr(INSTANCES[owner](), name)
    try:
        resolve(path)
    except (AttributeError, ImportError):
        return False
    return True


def test_names_that_are_not_there_are_told() -> None:
    assert not has("torch._C._no_such_name")
    assert not has("torch.nn.Module._no_such_name")
    assert not has("torch._no_such_module.name")


IMPORTS = {
    "import torch._dynamo": ["torch._dynamo"],
    "import torch.utils._pytree as pytree": ["torch.utils._pytree"],
    "from torch.utils import _pytree as pytree": ["torch.utils._pytree"],
    "from torch.overrides import _pop_mode": ["torch.overrides._pop_mode"],
    "from torch._subclasses.fake_tensor import FakeTensor": ["torch._subclasses.fake_tensor.FakeTensor"],
    "def f():\n    from torch._inductor import config": ["torch._inductor.config"],
    "import importlib\nimportlib.import_module('torch._inductor')": ["torch._inductor"],
}
CHAINS = {
    "import torch\ntorch._C._swap_tensor_impl(a, b)": ["torch._C._swap_tensor_impl"],
    "import torch as t\nt._C._x.y.z": ["torch._C._x.y.z"],
    "import torch\nx: torch._ops.OpOverload": ["torch._ops.OpOverload"],
    "from torch import nn\nnn.Module._apply": ["torch.nn.Module._apply"],
    "from torch.nn import functional as F\nF._pad(x)": ["torch.nn.functional._pad"],
    "import torch\nC = torch._C\nC._thing()": ["torch._C", "_thing"],
    "import torch\nsetattr(torch.autograd, '_run', f)": ["torch.autograd._run"],
    "import torch\ndeclare('a name', torch.autograd, '_run', 'why')": ["torch.autograd._run"],
    "import torch\ntorch.ops.aten._softmax.default": ["torch.ops.aten._softmax.default"],
    "import torch\ntorch.save(x, y, _no_such_option=True)": ["_no_such_option"],
}
ATTRIBUTES = {
    "tensor._version": ["_version"],
    "a.b()[0]._schema.arguments": ["_schema"],
    "module._flat_weights = []": ["_flat_weights"],
    "del module._parameters": ["_parameters"],
    "module.__dict__['_parameters']": ["_parameters"],
    "vars(module)['_parameters'] = {}": ["_parameters"],
    "module.__dict__.get('_buffers')": ["_buffers"],
    "getattr(state, '_metadata', None)": ["_metadata"],
    "hasattr(anything, '_nobodys')": ["_nobodys"],
    "anything._nobodys": ["_nobodys"],
    "match x:\n    case Thing(_nobodys=1): pass": ["_nobodys"],
    "NAMES = ('_parameters', 'weight')": ["_parameters"],
    "NAMES = 'forward _apply train'": ["_apply"],
    "NAMES = ('aten::_to_copy', 'aten::_assert_async.msg')": [
        "torch.ops.aten._to_copy",
        "torch.ops.aten._assert_async",
    ],
    "f'see torch._C._x and {y}'": ["torch._C._x"],
}
SUBCLASSES = {
    "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        return self._parameters": ["_parameters"],
    "from torch.nn import Module\nclass A(Module):\n    def f(this):\n        this._buffers = {}": [
        "_buffers",
        "_buffers",
    ],
    "from torch import nn\nclass A(nn.Module):\n    def _apply(self, fn): pass": ["_apply"],
    "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        super()._apply(g)": ["_apply"],
    "import torch\nclass A(torch.Tensor): pass\nclass B(A):\n    def f(self):\n        return self._version": [
        "_version"
    ],
    "import torch\nclass A(torch.optim.Optimizer):\n    def f(self):\n        self._optimizer_step_code()": [
        "_optimizer_step_code"
    ],
}
OWN = (
    "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n        return other._x",
    "class A:\n    _parameters = 1\n    def f(self):\n        return self._parameters",  # no module: its own
    "class A:\n    __slots__ = ('_buffers',)\n    def f(self):\n        return self._buffers",
    "class A:\n    def _set(self): pass\nTABLE = {1: A._set}",
    "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        self._own = 1\n        return self._own",
    "x.__dict__['_sparse'] = 1\nx._sparse",  # a name of a module, torch._C, alone
    "import sys, os\nsys._getframe(1)\nos._exit(1)",
    "def f(_hidden): pass\nf(_hidden=1)",
    "from typing import TypeVar\n_T = TypeVar('_T')",
    "'''Names torch._C._x and _parameters.'''\nx = 1\n'''_version'''",
    "import torch\ntorch.nn.Module.__dict__\ntorch.Tensor.__torch_function__",
)


@pytest.mark.parametrize(
    ("text", "names"), [*IMPORTS.items(), *CHAINS.items(), *ATTRIBUTES.items(), *SUBCLASSES.items()]
)
def test_a_use_is_found(text: str, names: list[str]) -> None:
    assert sorted(found(text)) == sorted(names)


@pytest.mark.parametrize("text", OWN)
def test_what_is_not_torchs_is_left_alone(text: str) -> None:
    assert found(text) == []


def test_imports_are_followed_through_other_files() -> None:
    made = project(one="import torch.utils._pytree as tree", two="from one import tree\ntree.tree_map(f, x)")
    assert [(use.name, use.place) for use in made.uses()] == [
        ("torch.utils._pytree", "one.py:1"),
        ("torch.utils._pytree.tree_map", "two.py:2"),
    ]
    made = project(
        one="from torch import nn\nclass A(nn.Module): pass",
        two="from one import A\nclass B(A):\n    def f(self):\n        return self._modules",
    )
    assert [(use.name, use.place) for use in made.uses()] == [("_modules", "two.py:4")]


def test_a_line_covers_what_a_class_has_but_not_what_a_module_has() -> None:
    def covered(use: str, *names: str) -> list[str]:
        return lines_of(Use(use, "file.py:1"), names)

    assert covered("torch.utils._pytree.TreeSpec.type", "torch.utils._pytree.TreeSpec") == [
        "torch.utils._pytree.TreeSpec"
    ]
    assert covered("torch.utils._pytree.tree_map", "torch.utils._pytree") == []
    assert covered("torch._ops.OpOverload._schema", "torch._ops.OpOverload") == []
    assert covered("_version", "torch.Tensor._version", "torch.Tensor._x") == ["torch.Tensor._version"]
    assert covered("_hooks", "torch.A._hooks", "torch.B._hooks") == ["torch.A._hooks", "torch.B._hooks"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.15.0", (2, 15)),
        ("2.15.0+cu132", (2, 15)),
        ("2.16.0.dev20261101", (2, 16)),
        ("2.15.0a0+git123", (2, 15)),
        ("2.11", (2, 11)),
        ("3.0.1rc2", (3, 0)),
    ],
)
def test_minor(version: str, expected: tuple[int, int]) -> None:
    assert minor(version) == expected


def test_minor_of_no_version() -> None:
    with pytest.raises(ValueError, match=r"'git123' is not a version of torch: .* as 2\.15\.0 does"):
        minor("git123")


def test_lines_end_with_versions() -> None:
    line = PrivateName("torch._x", "A name.", since="2.12", until="2.13")
    assert [line.is_in(f"2.{number}.0+cpu") for number in (11, 12, 13, 14)] == [False, True, True, False]


def test_nothing_is_said_inside_the_range() -> None:
    for number in range(OLDEST[1], NEWEST[1] + 1):
        assert doubt(f"2.{number}.1+cu130") is None
    assert doubt("2.15.0a0+git123") is None
    assert doubt(torch.__version__) is None or minor(torch.__version__) > NEWEST


def test_the_range_is_said_once_everywhere() -> None:
    """pyproject, Makefile and the pages name the same range."""
    oldest, newest = (f"{major}.{number}" for major, number in (OLDEST, NEWEST))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}" in dependencies
    default = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert default is not None
    assert minor(default[1]) == NEWEST
    assert f"torch {oldest} to {newest}" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "testing.md").read_text()
    for number in range(OLDEST[1], NEWEST[1] + 1):
        assert re.search(rf"^\| 2\.{number}\.\d", page, re.MULTILINE), (
            f"docs/testing.md has no row for torch 2.{number}"
        )


def imported(version: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`import pyrannc` in a process of its own, where torch says that it is another version."""
    script = f"import torch\ntorch.__version__ = {version!r}\nimport pyrannc\nimport pyrannc\nprint(pyrannc.get_rank())"
    launched = re.compile(r"OMPI_|PMI|RANK$|SLURM_|WORLD_SIZE$|PYTHONWARNINGS$")
    kept = {name: value for name, value in os.environ.items() if not launched.search(name)}
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=120, check=False)


def test_a_newer_torch_gives_one_warning_at_import() -> None:
    version = "2.16.0.dev20261101"
    done = imported(version)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"
    assert done.stderr.count("UntriedTorchWarning") == 1
    assert f"<string>:3: UntriedTorchWarning: rannd was tested with torch 2.11 to 2.15; this is torch {version}, which is newer." in done.stderr  # fmt: skip  # noqa: E501
    assert "report it with this version, and use torch 2.15 meanwhile" in done.stderr


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.99.1+cu140", ["this is torch 2.99.1+cu140, which is newer", "use torch 2.15 meanwhile"]),
        ("3.0.0", ["this is torch 3.0.0, which is newer", "use torch 2.15 meanwhile"]),
        ("2.10.0+cpu", ["this is torch 2.10.0+cpu, which is older", "Install torch 2.11 or later"]),
        ("git123", ["'git123' is not a version of torch"]),
    ],
)
def test_what_is_said_outside_the_range(version: str, words: list[str]) -> None:
    told = doubt(version)
    assert told is not None
    assert all(each in told for each in words), told


def test_none_at_import_inside_the_range() -> None:
    assert "UntriedTorchWarning" not in imported("2.15.7+cu132").stderr


def test_of_several_ranks_rank_0_alone_warns() -> None:
    told = [imported("2.16.0", RANK=str(rank), WORLD_SIZE="2").stderr for rank in range(2)]
    assert [each.count("UntriedTorchWarning") for each in told] == [1, 0]


def test_users_can_hide_it() -> None:
    assert imported("2.16.0", "-W", "ignore").stderr == ""
    with pytest.warns(UntriedTorchWarning, match=r"2\.11 to 2\.15"):
        torch_versions.warn_if_untried("2.16.0")
