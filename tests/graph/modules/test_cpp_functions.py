"""Autograd functions of C++ extensions: opaque where torch's dispatcher does not see them, operators where it does."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from leaf_models import WIDTH, Apart, Between, Root, check
from pieces import graph_of
from torch import Tensor

from rannd.graph.modules import cpp_functions
from rannd.graph.modules.cpp_functions import watch_cpp_functions
from rannd.graph.modules.source_location import Offence

pytestmark = pytest.mark.usefixtures("double")

SOURCE = """
#include <torch/extension.h>
struct Triple : public torch::autograd::Function<Triple> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor a) {
    ctx->save_for_backward({a});
    return a.sin();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list gradients) {
    return {gradients[0] * ctx->get_saved_variables()[0].cos() * 3};
  }
};
torch::Tensor triple(torch::Tensor a) { return Triple::apply(a); }
PYBIND11_MODULE(rannd_tests_extension, m) { m.def("triple", &triple); }
TORCH_LIBRARY(rannd_tests_extension, m) { m.def("triple(Tensor a) -> Tensor", &triple); }
"""


def _sin(a: Tensor) -> Tensor:
    return a.sin()


def _past(a: Tensor) -> Tensor:
    """As a C++ extension calls operators: nothing of Python sees it."""
    with torch._C.DisableTorchFunction():
        return a.sin()


def test_nodes_that_no_function_of_torch_has_made_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sin's node in the place of the one that an extension makes."""
    monkeypatch.setattr(cpp_functions, "_KIND", "SinBackward0")
    a = torch.randn(2, WIDTH)
    for function, seen in ((_sin, False), (torch.ops.aten.sin.default, False), (_past, True)):
        model = Between(Apart(function))
        with watch_cpp_functions(model):
            if seen:
                with pytest.raises(Offence, match="C\\+\\+ extension") as caught:
                    model(a)
                assert caught.value.place.modules[0] == "inner"
            else:
                model(a)


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiled as its users do, but for ninja: half a minute."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    cpp = pytest.importorskip("torch.utils.cpp_extension")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "extension.cpp").write_text(SOURCE)
    target = folder / "rannd_tests_extension.so"
    standard = "-std=c++20" if torch.__version__ >= "2.12" else "-std=c++17"
    flags = ["-O0", standard, "-shared", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=rannd_tests_extension"]
    flags += [f"-I{path}" for path in (*cpp.include_paths(), sysconfig.get_path("include"))]
    flags += [f"-L{path}" for path in cpp.library_paths()]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    command = [compiler, *flags, str(folder / "extension.cpp"), "-o", str(target), *libraries]
    subprocess.run(command, check=True, capture_output=True, text=True)
    spec = importlib.util.spec_from_file_location("rannd_tests_extension", Path(target))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Keyword(torch.nn.Module):
    """Hands on by keyword what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        result: Tensor = self.layer(input=_past(a))
        return result


def test_what_is_handed_on_by_keyword_is_seen_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_functions, "_KIND", "SinBackward0")
    model = Keyword()
    with watch_cpp_functions(model), pytest.raises(Offence, match="C\\+\\+ extension") as caught:
        model(torch.randn(2, WIDTH, requires_grad=True))
    assert caught.value.place.modules == ("layer", "")


@pytest.mark.full
def test_functions_of_an_extension(extension: Any) -> None:
    check(Between(Apart(extension.triple)), ("inner",))
    check(Root(extension.triple), ("",))
    check(Root(lambda a: extension.triple(a) * 2), ("",))
    graph = graph_of(Root(extension.triple), torch.randn(4, WIDTH))
    assert "CppNode<Triple> of a C++ extension" in graph.traced.record[0]
    assert "TORCH_LIBRARY" in graph.traced.record[0]


@pytest.mark.full
def test_registered_functions_of_an_extension(extension: Any) -> None:
    check(Root(torch.ops.rannd_tests_extension.triple), ())
