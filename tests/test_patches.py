"""The registry of process-wide patches: whatever happens, torch, numpy and Python are as they were before."""

from __future__ import annotations

import ast
import contextlib
import importlib
import logging
import pkgutil
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pieces import graph_of
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from zoo.peculiar import PECULIAR

import pyrannc
import rannd.graph
import rannd.runtime
from rannd.errors import TraceError
from rannd.graph.tracing import hook_proofs
from rannd.patches import (
    MODULE_ENTERED,
    MODULE_LEFT,
    Patch,
    active,
    caller,
    declared,
    install,
    patched,
    remove,
)

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 6


# -- nothing stays behind -----------------------------------------------------------------------------------------

_LIBRARIES = ("torch", "numpy", "random", "sys", "threading", "warnings", "logging", "builtins")
_KINDS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType,
    types.WrapperDescriptorType, staticmethod, classmethod, property, type,
)  # fmt: skip


def everything() -> dict[tuple[str, ...], Any]:
    """All functions, classes and methods of the libraries, by their places."""
    found: dict[tuple[str, ...], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where some of its names are looked at
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType) or name.partition(".")[0] not in _LIBRARIES:
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, _KINDS):
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    inside = vars(value).items()
                    found.update(((name, key, k), v) for k, v in list(inside) if isinstance(v, _KINDS))
    return found


def targets() -> dict[str, Any]:
    """What the declared patches would replace."""
    return {
        patch.name: vars(patch.target).get(patch.attribute)
        for patch in declared()
        if isinstance(patch, Patch) and patch.target is not None
    }


def global_hooks() -> dict[str, list[Any]]:
    """torch's hooks of all modules."""
    return {
        name: list(value.values())
        for name, value in vars(torch_modules).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """All files that declare something, and what torch imports late."""
    for package in (rannd.graph, rannd.runtime):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(info.name)
    graph_of(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH))


@pytest.fixture
def unchanged() -> Iterator[None]:
    """The test leaves nothing behind."""
    everywhere, declared_ones, hooks, lasting = everything(), targets(), global_hooks(), active()
    yield
    assert active() == lasting
    assert global_hooks() == hooks
    now = targets()
    assert [name for name, value in declared_ones.items() if now[name] is not value] == []
    found = everything()
    assert [place for place, value in everywhere.items() if found.get(place) is not value] == []


def test_patches_are_declared_with_a_reason() -> None:
    patches = [each for each in declared() if isinstance(each, Patch)]
    assert len(patches) >= 14
    assert len({each.name for each in declared()}) == len(declared())
    for patch in declared():
        assert patch.why, patch.name
    for patch in patches:
        assert patch.versions or hasattr(patch.target, patch.attribute), patch.name


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, a: Tensor) -> Any:
        return self.after(self.function(self.before(a)))


class Later(torch.autograd.Function):
    """In the newer form: the context is set up apart."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return a.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos() * 3


def _saving(a: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each * 2, lambda each: each):
        return a * a


def _inferring(a: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = a.abs().mean()
    return a * scale.clone()


def _hooked(a: Tensor) -> Tensor:
    b = a * 2
    if b.requires_grad:
        b.register_hook(lambda gradient: gradient * 3)
    return b


def _branching(a: Tensor) -> Tensor:
    return a[a > 0][:, None].sum() + a if a[a > 0].shape[0] > 3 else a


def _drawn(a: Tensor) -> Tensor:
    return torch.distributions.Bernoulli(probs=a.sigmoid()).sample() * a


WAYS: Mapping[str, Callable[[Tensor], Any]] = {
    "a Function": Later.apply,
    "hooks of gradients": _hooked,
    "hooks of saved tensors": _saving,
    "inference mode": _inferring,
    "numpy": lambda a: a * np.random.rand(),
    "numpy, seeded": lambda a: (np.random.seed(3), a * np.random.rand())[1],
    "python": lambda a: a * random.random(),
    "a size that depends on data": _branching,
    "a distribution": _drawn,
}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("entry", PECULIAR, ids=str)
def test_nothing_stays_behind_a_model_of_the_zoo(entry: Any) -> None:
    with entry.precision():
        graph_of(entry.build(), **entry.batch(4))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", WAYS)
def test_nothing_stays_behind_code_that_patches_look_at(name: str) -> None:
    graph_of(Model(WAYS[name]), torch.randn(4, WIDTH, requires_grad=True))


@pytest.mark.usefixtures("unchanged")
def test_nothing_stays_behind_the_proofs_of_hooks() -> None:
    before = list(hook_proofs._known)
    hook_proofs._known.clear()
    assert hook_proofs.failing() == ()
    hook_proofs._known[:] = before or hook_proofs._known


@pytest.mark.usefixtures("unchanged")
def test_nothing_stays_behind_a_trace_that_fails() -> None:
    def fails(a: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(TraceError, match="no"):
        graph_of(Model(fails), torch.randn(4, WIDTH))


class Interrupted(torch.autograd.Function):
    """Ctrl-C while its forward runs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        raise KeyboardInterrupt

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class ContextInterrupted(Later):
    """Ctrl-C while its context is set up."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise KeyboardInterrupt


def _interrupted(a: Tensor) -> Tensor:
    raise KeyboardInterrupt


def _later(a: Tensor) -> Tensor:
    """While the calls of a leaf are recorded: it is not traced then."""
    if type(a) in (Tensor, nn.Parameter):
        raise KeyboardInterrupt
    return a * np.random.rand()


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "function", [_interrupted, _later, lambda a: Interrupted.apply(a), lambda a: ContextInterrupted.apply(a)]
)
def test_nothing_stays_behind_a_trace_that_is_interrupted(function: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Model(function))
    forwards = [dict(vars(each)) for each in (Interrupted, ContextInterrupted, Later)]
    with pytest.raises(KeyboardInterrupt):
        graph_of(model, torch.randn(4, WIDTH))
    assert forwards == [dict(vars(each)) for each in (Interrupted, ContextInterrupted, Later)]


@pytest.mark.usefixtures("daemon_home")
def test_nothing_stays_behind_a_wrapped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "off")
    monkeypatch.setenv("RANNC_LOG_LEVEL", "warn")

    def step() -> None:
        with pyrannc.DistributeModelParams():
            inner = Model(lambda a: Later.apply(a))
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = pyrannc.RaNNCModule(inner, optimizer)
        assert {use.of.name for use in active()} >= {
            "torch.nn.utils.clip_grad_norm_",
            "gradients with respect to given inputs",
        }
        model(torch.randn(4, WIDTH)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pyrannc.clear()

    step()  # imports, and excepthook
    declared_ones, hooks, everywhere, lasting = targets(), global_hooks(), everything(), active()
    step()
    assert active() == lasting
    assert (targets(), global_hooks()) == (declared_ones, hooks)
    found = everything()
    assert [place for place, value in everywhere.items() if found.get(place) is not value] == []


# -- the registry itself ------------------------------------------------------------------------------------------


class Library:
    """Somebody else's."""

    flag = True

    def method(self, a: int) -> str:
        return f"method {a}"

    @staticmethod
    def static(a: int) -> str:
        return f"static {a}"

    @classmethod
    def of_class(cls, a: int) -> str:
        return f"{cls.__name__} {a}"


class Derived(Library):
    """Inherits all of it."""


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    before, lasting = (dict(vars(Library)), dict(vars(Derived))), active()
    yield
    assert (dict(vars(Library)), dict(vars(Derived))) == before
    assert active() == lasting


def patch(attribute: str, target: Any = Library) -> Patch:
    return Patch(f"{target.__name__}.{attribute}", target, attribute, "a test")


def marked(mark: str) -> Callable[..., str]:
    return lambda original, *args: f"{mark}({original(*args)})"


@pytest.mark.parametrize("target", [Library, Derived])
@pytest.mark.parametrize(
    ("attribute", "call"),
    [
        ("method", lambda target: target().method(1)),
        ("static", lambda target: target.static(1)),
        ("of_class", lambda target: target.of_class(1)),
    ],
)
def test_an_attribute_of_any_kind(attribute: str, call: Callable[[Any], str], target: Any) -> None:
    plain = call(target)
    with patched(patch(attribute, target).around(marked("a"))):
        assert call(target) == f"a({plain})"
        with patched(patch(attribute, target).around(marked("b"))):
            assert call(target) == f"b(a({plain}))"
        assert call(target) == f"a({plain})"
    assert call(target) == plain


def test_a_value_and_a_module() -> None:
    module = types.ModuleType("library")
    module.__dict__.update(function=lambda a: a, flag=True)
    before = dict(vars(module))
    with patched(
        patch("function", module).around(lambda original, a: original(a) + 1), patch("flag", module).by(False)
    ):
        assert (module.function(1), module.flag) == (2, False)
        with patched(patch("flag", module).by(False)):
            pass
        assert module.flag is False
    assert dict(vars(module)) == before


def test_other_threads_get_the_original() -> None:
    found: list[str] = []
    with patched(patch("static").around(marked("a"))):
        thread = threading.Thread(target=lambda: found.append(Library.static(1)))
        thread.start()
        thread.join()
        assert Library.static(1) == "a(static 1)"
    assert found == ["static 1"]


def test_threads_leave_in_any_order() -> None:
    """The first to enter is the first to leave: it is below the other one."""
    inside, go, lasting = threading.Event(), threading.Event(), len(active())
    found: list[str] = []

    def other() -> None:
        with patched(patch("static").around(marked("b"))):
            inside.set()
            go.wait(30)
            found.append(Library.static(1))

    thread = threading.Thread(target=other)
    with patched(patch("static").around(marked("a"))):
        thread.start()
        assert inside.wait(30)
        assert Library.static(1) == "a(static 1)"
    assert Library.static(1) == "static 1"
    assert len(active()) == 1 + lasting
    go.set()
    thread.join()
    assert found == ["b(static 1)"]


def test_installed_ones_hold_in_all_threads_until_they_are_removed() -> None:
    one = patch("static")
    found: list[str] = []
    install(one.around(marked("a")))
    install(one.around(marked("b")))
    thread = threading.Thread(target=lambda: found.append(Library.static(1)))
    thread.start()
    thread.join()
    assert str(active()[-1]) == "Library.static (a test), in all threads"
    remove(one)
    remove(one)
    assert found == ["a(static 1)"]


def test_what_is_active_is_told() -> None:
    with patched(patch("static").around(marked("a")), MODULE_LEFT.by(lambda *_: None)):
        assert [use.of.name for use in active()[-2:]] == ["Library.static", MODULE_LEFT.name]
        assert str(threading.get_ident()) in str(active()[-1])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_however_a_block_ends(kind: type[BaseException]) -> None:
    with pytest.raises(kind), patched(patch("static").around(marked("a")), patch("flag").by(False)):
        raise kind


def test_a_use_that_cannot_be_placed_undoes_the_others() -> None:
    with pytest.raises(AttributeError), patched(patch("static").around(marked("a")), patch("none").around(marked("b"))):
        pass


@contextlib.contextmanager
def somebodys(attribute: str = "static") -> Iterator[Callable[[], None]]:
    """Somebody else patches the library, without looking: gives what puts it in place."""
    original = vars(Library)[attribute]

    def place() -> None:
        before = getattr(Library, attribute)
        setattr(Library, attribute, staticmethod(lambda a: f"theirs({before(a)})"))

    yield place
    setattr(Library, attribute, original)


def test_somebody_elses_change_on_top_stays(caplog: pytest.LogCaptureFixture) -> None:
    with somebodys() as theirs, caplog.at_level(logging.WARNING):
        with patched(patch("static").around(marked("a"))):
            theirs()
            assert Library.static(1) == "theirs(a(static 1))"
        assert Library.static(1) == "theirs(static 1)"  # ours is below, and does nothing
        assert "Library.static was patched by other code while rannd had patched it" in caplog.text


def test_somebody_elses_change_in_between_stays(caplog: pytest.LogCaptureFixture) -> None:
    with somebodys() as theirs, patched(patch("static").around(marked("a"))):
        theirs()
        with patched(patch("static").around(marked("b"))):
            assert Library.static(1) == "b(theirs(a(static 1)))"
        assert Library.static(1) == "theirs(a(static 1))"
        assert not caplog.records


def test_somebody_else_may_put_the_original_back(caplog: pytest.LogCaptureFixture) -> None:
    original = vars(Library)["static"]
    with patched(patch("static").around(marked("a"))):
        Library.static = original  # type: ignore[method-assign]
    assert not caplog.records


def test_hooks_of_modules_run_in_the_thread_of_the_block() -> None:
    before, seen = global_hooks(), []
    model = nn.Linear(2, 2)
    uses = MODULE_ENTERED.by(lambda module, _: seen.append("in")), MODULE_LEFT.by(lambda *_: seen.append("out"))
    with patched(*uses):
        model(torch.ones(1, 2))
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
    model(torch.ones(1, 2))
    assert seen == ["in", "out"]
    assert global_hooks() == before


def test_who_called_a_patched_function() -> None:
    def function(original: Callable[[int], str], a: int) -> str:
        return caller().f_code.co_name

    with patched(patch("static").around(lambda original, a: original(a)), patch("static").around(function)):
        assert Library.static(1) == "test_who_called_a_patched_function"


def test_an_interrupt_at_any_line_leaves_nothing_behind() -> None:
    """Ctrl-C at each line of the registry in turn: as uses are placed, as one is called, as they are undone."""
    file = patched.__wrapped__.__code__.co_filename  # type: ignore[attr-defined]
    hooks = global_hooks()
    before, lasting = (dict(vars(Library)), dict(vars(Derived))), active()

    def run() -> None:
        with patched(
            patch("static").around(marked("a")), patch("of_class", Derived).around(marked("b")),
            patch("flag").by(False), MODULE_LEFT.by(lambda *_: None),
        ):  # fmt: skip
            Library.static(1)

    def interrupted(line: int) -> bool:
        """Whether there was such a line."""
        left = [line]

        def trace(frame: types.FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != file:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return trace

        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(tracing)
        assert left[0] > 0
        return False

    line = 1
    while interrupted(line):
        assert (dict(vars(Library)), dict(vars(Derived))) == before, line
        assert global_hooks() == hooks, line
        assert active() == lasting, line
        line += 1
    assert line > 100


# -- no patch beside the registry ---------------------------------------------------------------------------------

BESIDE = {
    ("pyrannc/integrations/lightning.py", "rank_zero_only.rank"): "Lightning's strategies have to set it",
    ("rannd/daemon/server/boot.py", "sys.path"): "of a process that is the daemon",
    ("rannd/runner/run.py", "sys.stdout"): "opened where the process has none",
    ("rannd/runner/run.py", "sys.stderr"): "opened where the process has none",
    ("rannd/runtime/notebook_launcher.py", "sys.stdout"): "of a rank's own process, which passes on whole lines",
    ("rannd/runtime/notebook_launcher.py", "sys.stderr"): "of a rank's own process, which passes on whole lines",
    ("rannd/runtime/notebook_launcher.py", "sys.last_exc"): "of a rank's own process: an earlier cell's error",
    ("rannd/runtime/notebook_launcher.py", "sys.last_value"): "of a rank's own process: an earlier cell's error",
    ("rannd/runtime/failure/detector.py", "sys.excepthook"): "calls the one before, as long as the process lives",
    ("rannd/runtime/failure/user_traceback.py", "sys.excepthook"): "calls the one before, as long as the process lives",
}
"""Attributes of others' objects that are set elsewhere."""


def assigned(text: str) -> list[str]:
    """Attributes of what is imported from others that a file sets or deletes, and hooks of all modules."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({(a.asname or a.name).partition(".")[0]: a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    foreign = {name for name, home in names.items() if home.partition(".")[0] not in ("rannd", "pyrannc")}

    def root(node: ast.AST) -> str:
        while isinstance(node, (ast.Attribute, ast.Call)):
            node = node.value if isinstance(node, ast.Attribute) else node.func
        return node.id if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):  # functional: Any = torch.nn.functional
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if not isinstance(value, (ast.Attribute, ast.Name)) or root(value) not in foreign:
            continue
        if not any(part.isupper() for part in ast.unparse(value).split(".")):  # a module or class, MPI.COMM_WORLD not
            whole = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
            foreign |= {each.id for each in whole if isinstance(each, ast.Name)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and root(node) in foreign:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if root(node.args[0]) in foreign:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1].startswith("register_module_"):
            found.append(ast.unparse(node.func))
    return found


def test_there_is_no_patch_beside_the_registry() -> None:
    found = {
        (str(file.relative_to(ROOT)), name)
        for package in ("rannd", "pyrannc")
        for file in sorted((ROOT / package).rglob("*.py"))
        for name in assigned(file.read_text())
    }
    assert found == set(BESIDE)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.fx.graph._format_target = f",
        "import torch\ndel torch.Tensor.sin",
        "from torch import SymBool\nsetattr(SymBool, '__bool__', f)",
        "import torch\nfunctional: object = torch.nn.functional\nfunctional.gelu = f",
        "from torch.nn.modules.module import register_module_forward_hook\nregister_module_forward_hook(f)",
        "import numpy.random\nnumpy.random.seed, x = f, 1",
    ],
)
def test_a_patch_beside_the_registry_is_found(text: str) -> None:
    assert len(assigned(text)) == 1


def test_what_is_no_patch() -> None:
    assert assigned("import torch\nx = torch.ones(1)\nx.grad = None\nfrom rannd import flags\nflags.on = True") == []
