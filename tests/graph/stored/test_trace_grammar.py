"""What a cached trace may not contain: each case was accepted once, or would be without a rule of the grammar."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from leaf_models import Masking
from pieces import signature_of
from torch import nn

from rannd.graph.fx.symbolic_values import ROWS
from rannd.graph.stored import codec, trace_grammar
from rannd.graph.stored.codec import decode, encode
from rannd.graph.stored.encoding import Broken
from rannd.graph.stored.trace_grammar import check_operator
from rannd.graph.tracing.dynamic_shapes import instance
from rannd.graph.tracing.frontend import trace

ran: list[str] = []
"""What code from a trace has run."""


def evil(*_: Any) -> None:
    ran.append("code of a trace")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.nn.functional.gelu(self.layer(x) + torch.arange(6.0), approximate="tanh").reshape(-1, 3)}


def plain_trace(model: nn.Module) -> dict[str, Any]:
    """A sound trace as plain data."""
    signature, tensors = signature_of(model, torch.randn(4, 6))
    traced, signature = trace(model, signature, tensors)
    found: dict[str, Any] = msgspec.msgpack.decode(zlib.decompress(encode(traced, signature.fixed_rows)))
    return found


def sealed(data: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(data), 1)


def node(data: dict[str, Any], op: str) -> list[Any]:
    """The first node of a kind."""
    found: list[Any] = next(each for each in data["graph"]["nodes"] if each[0] == op)
    return found


def called(name: str, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change a part of the first node that calls a function of this name."""

    def change(data: dict[str, Any]) -> None:
        found = next(each for each in data["graph"]["nodes"] if each[0] == "call_function" and name in each[2][1])
        found[place] = value

    return change


def attribute(name: str) -> Callable[[dict[str, Any]], None]:
    """Give a parameter another place in the graph's module."""

    def change(data: dict[str, Any]) -> None:
        found = node(data, "get_attr")
        data["attributes"][name] = data["attributes"].pop(found[2])
        found[2] = name

    return change


def output(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["outputs"].__setitem__(0, text)


def size(data: Any) -> Callable[[dict[str, Any]], None]:
    return lambda trace: trace["graph"]["values"].__setitem__(0, ["T", "float32", data])


def extra_node(data: dict[str, Any], name: str, *args: Any) -> None:
    """Call a function of Python's operator module."""
    data["graph"]["nodes"].insert(-1, ["call_function", "more", ["py", "_operator", name], ["t", *args], None, 0, ""])


LEAF = '[{"type": null, "context": null, "children_spec": []}]'
ENUM = f'[1, {{"type": "builtins.dict", "context": %s, "children_spec": {LEAF}}}]'
DEFAULT = (
    '[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "this", '
    f'"default_factory_name": "s", "dict_context": ["out"]}}, "children_spec": {LEAF}}}]'
)
CODE = "x=__import__('test_trace_grammar').evil()"

ATTACKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "code as the target of a placeholder": lambda data: node(data, "placeholder").__setitem__(2, CODE),
    "code as a node's name": lambda data: node(data, "placeholder").__setitem__(1, CODE),
    "code as a keyword": called("gelu", 4, ["d", CODE, 1]),
    "a keyword of Python's": lambda data: node(data, "placeholder").__setitem__(1, "lambda"),
    "the module itself": lambda data: node(data, "placeholder").__setitem__(1, "self"),
    "an argument after other nodes": lambda data: data["graph"]["nodes"].append(node(data, "placeholder")),
    "an enum": output(ENUM % '"[{\\"__enum__\\": true, \\"fqn\\": \\"this:s\\", \\"name\\": \\"x\\"}]"'),
    "a default of a dict": output(DEFAULT),
    "an enum behind a blank": output(
        ENUM % '" [{\\"__enum__\\": true, \\"fqn\\": \\"this:s\\", \\"name\\": \\"x\\"}]"'
    ),
    "deep JSON": output("[" * 100_000),
    "deep JSON that a container keeps": output(ENUM % f'"{"[" * 100_000}"'),
    "attrgetter": called("gelu", 2, ["py", "_operator", "attrgetter"]),
    "methodcaller": called("gelu", 2, ["py", "_operator", "methodcaller"]),
    "operator.call": called("gelu", 2, ["py", "_operator", "call"]),
    "a function of another module": called("gelu", 2, ["py", "os", "system"]),
    "torch.load": called("gelu", 2, ["py", "torch", "load"]),
    "aten.save": called("gelu", 2, ["op", "aten::save", "default"]),
    "aten.from_file": called("gelu", 2, ["op", "aten::from_file", "default"]),
    "load_library": called("gelu", 2, ["op", "load_library::__func__", "__call__"]),
    "an operator with text": called("gelu", 2, ["op", "profiler::_record_function_enter_new", "default"]),
    "a collective": called("gelu", 2, ["op", "c10d::barrier", "default"]),
    "a higher-order operator": called("gelu", 2, ["hop", "call_torchbind", ""]),
    "a leaf without a table": called("gelu", 2, ["op", "rannd::leaf", "default"]),
    "call_method": lambda data: node(data, "call_function").__setitem__(0, "call_method"),
    "call_module": lambda data: node(data, "call_function").__setitem__(0, "call_module"),
    "a later node": called("gelu", 3, ["t", ["n", 99]]),
    "an attribute of all modules": attribute("forward"),
    "a private attribute": attribute("_parameters.x"),
    "a magic attribute": attribute("layer.__class__"),
    "a magic attribute that Python normalizes": attribute("layer._\uff3fclass__"),
    "a method of a graph's module": attribute("to_folder"),
    "a path of many modules": attribute("a." * 100 + "weight"),
    "an attribute that is no tensor": lambda data: data["attributes"].clear(),
    "text for a function of Python": lambda data: extra_node(data, "mod", "%9999999999d", 1),
    "a list for a function of Python": lambda data: extra_node(data, "mul", ["l", 1], 10**10),
    "a shift": lambda data: extra_node(data, "lshift", 1, 2**40),
    "a power in a node": lambda data: extra_node(data, "pow", 10, 10**9),
    "an exponent of another node": lambda data: extra_node(data, "pow", 10, ["n", 0]),
    "more values than nodes": lambda data: data["graph"]["values"].extend([None] * 1000),
    "a huge power": size(["Pow", 9, ["Pow", 9, 9999]]),
    "a power of a huge power": size(["Pow", 9, 99999]),
    "powers inside of each other": size(["Pow", ["Pow", 9, 64], 64]),
    "a power of a power of large numbers": size(["Pow", ["Pow", ["Mul", *[2**62] * 990], 64], 64]),
    "a huge number that is rounded": size(["floor", ["Pow", 10, ["f", "1e10"]]]),
    "a huge number of text": size(["floor", ["f", "1e999"]]),
    "a product that is expanded": size(
        ["FloorDiv", ["Mul", *[["Add", ["y", f"n{n % 3}"], n] for n in range(2, 32)]], 3]
    ),
    "a fraction that is a large power": size(["FloorDiv", ["Pow", ["Add", ["y", "n0"], 1], ["q", 64, 1]], 3]),
    "a power that is expanded": size(["FloorDiv", ["Pow", ["Add", ["y", "n0"], ["y", "n1"], 1], 64], 3]),
    "a tensor of many dimensions": lambda data: data["graph"]["values"].__setitem__(0, ["T", "float32", *[1] * 65]),
    "a constant of many dimensions": lambda data: data["constants"].update(c=["float32", [2**31 - 1] * 100_000, None]),
    "constants that are lists": lambda data: data["constants"].update(c=[[]] * 1000),
    "a float that is none": lambda data: data["graph"]["values"].append(["N", "float", ["f", "nan()"]]),
    "a dtype that is none": lambda data: data["graph"]["values"].append(["T", "nn", 3]),
    "a device that is none": called("gelu", 4, ["d", "device", ["device", "cpu; evil()"]]),
    "a constant without its bytes": lambda data: data["constants"].update(c=["float32", [1 << 20, 1 << 20], b""]),
    "a constant of other bytes": lambda data: data["constants"].update(c=["float32", [2], b"123"]),
    "a field more": lambda data: data.update(more=1),
    "deep arguments": called("gelu", 3, eval("['t'," * 60 + "1" + "]" * 60)),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_trace_is_refused_before_anything_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    data = plain_trace(model)
    ATTACKS[name](data)
    monkeypatch.setattr(codec, "_decoded", lambda *_: pytest.fail("it was built"))
    if name in ("aten.save", "aten.from_file", "an operator with text", "a collective", "load_library"):
        monkeypatch.undo()  # these are found out where the operator is looked up
    with pytest.raises(Broken):
        decode(sealed(data), model)
    assert ran == []


GRAPH_OF_OUTPUT = {"nodes": [["output", "output", "output", ["t", None], None, 0, ""]], "values": [None], "inner": {}}


@pytest.mark.parametrize("target", ["to_folder", "_\uff3fclass__._\uff3finit__", "inner", "numpy"])
def test_a_graph_calls_nothing_but_graphs(target: str, tmp_path: Path) -> None:
    """torch's `wrap` calls its first argument; it wrote files when that was a method of the graph's own module."""
    model, made = Model(), tmp_path / "made"
    data = plain_trace(model)
    call = ["call_function", "y", ["hop", "wrap", ""], ["t", ["n", 1], str(made), "M"], None, 0, ""]
    nodes = [
        ["placeholder", "x", "placeholder", ["t"], None, 0, ""],
        ["get_attr", "f", target, ["t"], None, 0, ""],
        call,
        ["output", "output", "output", ["t", ["t"]], None, 0, ""],
    ]
    inner = {"to_folder": GRAPH_OF_OUTPUT} if target == "to_folder" else {}
    data["decisions"] = [{"nodes": nodes, "values": [None], "inner": inner}, {}, [], []]
    with pytest.raises(Broken, match=r"a path|an attribute"):
        decode(sealed(data), model)
    assert not made.exists()


def test_conditions_of_a_template_are_sizes(tmp_path: Path) -> None:
    """sympy evaluates a list of texts as Python: a condition of a cached template ran on all ranks."""
    made = tmp_path / "made"
    signature, _ = signature_of(Model(), torch.randn(4, 6))
    for condition in (["q", [f"__import__('os').mkdir('{made}')"]], ["Pow", 9, ["Pow", 9, 9999]], ["y", ["x"]]):
        data = msgspec.msgpack.encode({"traced": b"", "lengths": [], "conditions": [condition]})
        with pytest.raises(Broken, match="a size"):
            instance(data, Model(), signature)
    assert not made.exists()


def test_a_condition_that_cannot_be_computed_for_some_rows_is_broken() -> None:
    signature, _ = signature_of(Model(), torch.randn(4, 6))
    condition = ["Ge", ["FloorDiv", 6, ["Add", ["y", ROWS.name], -2]], 1]
    data = msgspec.msgpack.encode({"traced": b"", "lengths": [], "conditions": [condition]})
    with pytest.raises(Broken, match="division by zero"):
        instance(data, Model(), signature)


class Named(nn.Module):
    """Submodules with the names of attributes that the module of a graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code, self.meta = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.meta(self.code(self.graph(x)))


def test_submodules_may_have_names_of_a_graphs_module() -> None:
    model = Named()
    decode(sealed(plain_trace(model)), model)


def test_a_sound_trace_is_read() -> None:
    model = Model()
    decode(sealed(plain_trace(model)), model)


def test_operators_that_touch_files_or_take_text_are_refused() -> None:
    for operator in (
        torch.ops.aten.from_file.default,
        torch.ops.aten.save.default,
        torch.ops.aten._reshape_alias.default,
        torch.ops.aten._sparse_csr_tensor_unsafe.default,
        torch.ops.c10d.barrier.default,
        torch.ops.inductor._reinterpret_tensor.default,
    ):
        with pytest.raises(Broken, match="an operator"):
            check_operator(operator)
    for operator in (torch.ops.aten.gelu.default, torch.ops.prims.add.default, torch.ops.aten.einsum.default):
        check_operator(operator)


def test_namespaces_of_torchs_own_operators_are_known() -> None:
    """Operators of others may be the program's own."""
    program = "import torch; print(*{name.split('::')[0] for name in torch._C._dispatch_get_all_op_names()})"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(told.split()) - trace_grammar.TORCHS_OTHERS == {"aten", "prims"}


def test_only_methods_of_the_users_own_run_as_operators() -> None:
    data = plain_trace(Masking())
    name = next(iter(data["leaves"]))
    for path in ("..apply", "layers..__setattr__", "..state_dict", "..register_buffer", "..a b"):
        data["leaves"][name][0] = path
        with pytest.raises(Broken, match="a method"):
            decode(sealed(data), Masking())
    data["leaves"][name][0] = "..masked"
    data["leaves"][name][5] = [[1, "/etc/passwd"]]
    with pytest.raises(Broken, match="a string for the method masked"):
        decode(sealed(data), Masking())


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with pytest.raises(Broken, match="bytes"):
        decode(zlib.compress(bytes(200 * 2**20), 9), model)  # 200 KiB become 200 MiB
    with pytest.raises(Broken, match="cut off"):
        decode(sealed(plain_trace(model))[:-9], model)
    data = sealed(plain_trace(model))
    monkeypatch.setattr(codec, "MOST_GRAPH_BYTES", 200)
    with pytest.raises(Broken, match="beside the values of its constants"):
        decode(data, model)


def test_every_function_of_the_grammar_exists() -> None:
    for module, names in trace_grammar.FUNCTIONS.items():
        for name in names:
            assert callable(getattr(codec._PYTHON[module], name))
