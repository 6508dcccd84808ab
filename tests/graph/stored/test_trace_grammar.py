"""What a cached trace may not contain: each case was accepted once, or would be without a rule of the grammar."""

from __future__ import annotations

import re
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
from thinned import one_in
from torch import nn

from rannd.graph.fx.symbolic_values import ROWS
from rannd.graph.rows.rules.moe_routing import SORTED_RULES
from rannd.graph.rows.rules.rule_table import RULES
from rannd.graph.stored import codec, operator_grammar
from rannd.graph.stored.codec import decode, encode
from rannd.graph.stored.encoding import Broken, Uncodable
from rannd.graph.stored.operator_grammar import check_operator
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


def plain_trace(model: nn.Module, x: torch.Tensor | None = None) -> dict[str, Any]:
    """A sound trace as plain data."""
    signature, tensors = signature_of(model, torch.randn(4, 6) if x is None else x)
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
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
    node = ["call_function", "more", ["py", "_operator", name], ["t", *args], None, 0, "", ""]
    data["graph"]["nodes"].insert(-1, node)


def symbols(count: int, first: int = 0) -> list[Any]:
    """A sum of symbols."""
    return ["Add", *[["y", f"u{number}"] for number in range(first, first + count)]]


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
    "code as a source line": lambda data: node(data, "placeholder").__setitem__(7, [CODE]),
    "a source line without end": lambda data: node(data, "placeholder").__setitem__(7, "x" * 2**20),
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
    "a remainder of polynomials": size(["Mod", ["Pow", symbols(60), 8], symbols(60, 100)]),
    "a remainder of polynomials in few symbols": size(["Mod", ["Pow", symbols(4), 4], symbols(4, 4)]),
    "a remainder in an absolute value": size(["Abs", ["Mod", ["Pow", symbols(6), 3], ["Mul", symbols(6), symbols(6)]]]),
    "an index of polynomials": size(["ModularIndexing", ["Pow", symbols(8), 2], 7, symbols(8)]),
    "a quotient of products of sums": size(["FloorDiv", ["Mul", symbols(25), symbols(25, 30)], symbols(20, 90)]),
    "a sum of many terms": size(["Add", *[["Mul", n, ["y", "n0"], ["y", f"n{n % 6 + 1}"]] for n in range(129)]]),
    "many symbols": size(symbols(9)),
    "many functions inside of each other": size(eval("['Abs'," * 20 + "['y', 'n0']" + "]" * 20)),
    "many sizes": lambda data: data["graph"]["values"].__setitem__(
        0, ["t", *[["T", "float32", ["Mul", ["y", "n0"], n]] for n in range(2000)]]
    ),
    "text that is no float": size(["Mul", ["y", "n0"], ["f", "e5"]]),
    "a class with many dots": output('[1, {"type": "' + "a." * 10_000 + 'b", "context": null, "children_spec": []}]'),
    "a class with a long name": output('[1, {"type": "' + "a" * 1_000 + '", "context": null, "children_spec": []}]'),
    "a constant without values": lambda data: data["constants"].update(c=["float32", [2], None]),
    "a layout": called("gelu", 4, ["d", "layout", ["layout", "sparse_coo"]]),
}


@pytest.mark.parametrize("name", one_in(3, ATTACKS))
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


OUTPUT_NODE = ["output", "output", "output", ["t", None], None, 0, "", ""]
GRAPH_OF_OUTPUT = {"nodes": [OUTPUT_NODE], "values": [None], "inner": {}}


@pytest.mark.parametrize("target", ["to_folder", "_\uff3fclass__._\uff3finit__", "inner", "numpy"])
def test_a_graph_calls_nothing_but_graphs(target: str, tmp_path: Path) -> None:
    """torch's `wrap` calls its first argument; it wrote files when that was a method of the graph's own module."""
    model, made = Model(), tmp_path / "made"
    data = plain_trace(model)
    call = ["call_function", "y", ["hop", "wrap", ""], ["t", ["n", 1], str(made), "M"], None, 0, "", ""]
    nodes = [
        ["placeholder", "x", "placeholder", ["t"], None, 0, "", ""],
        ["get_attr", "f", target, ["t"], None, 0, "", ""],
        call,
        ["output", "output", "output", ["t", ["t"]], None, 0, "", ""],
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


class Refused(nn.Module):
    """Calls an operator that a cached trace may not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._foreach_add.Scalar([x], 1.0)[0]


def test_what_is_refused_is_not_written() -> None:
    with pytest.raises(Uncodable, match="an operator"):
        plain_trace(Refused())


REFUSED = {
    "files": ["from_file.default", "save.default"],
    "sizes that nobody checks": ["_reshape_alias.default", "_sparse_csr_tensor_unsafe.default"],
    "indices that nobody checks": [
        "_convert_indices_from_coo_to_csr.default",
        "_convert_indices_from_csr_to_coo.default",
        "_embedding_bag.default",
        "_pad_packed_sequence.default",
        "segment_reduce.default",
        "sparse_coo_tensor.indices_size",
    ],
    "backward": [
        "max_pool2d_with_indices_backward.default",
        "adaptive_max_pool2d_backward.default",
        "_segment_reduce_backward.default",
        "batch_norm_backward_elemt.default",
    ],
    "inner tensors of sparse ones": ["_indices.default", "_to_dense.default", "to_sparse.default"],
    "the terminal": ["_print.default"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_operators_that_do_not_check_their_arguments_are_refused(why: str) -> None:
    for name in REFUSED[why]:
        base, overload = name.split(".")
        with pytest.raises(Broken, match="an operator"):
            check_operator(getattr(getattr(torch.ops.aten, base), overload))


def test_operators_of_other_namespaces_are_refused() -> None:
    for operator in (torch.ops.c10d.barrier.default, torch.ops.inductor._reinterpret_tensor.default):
        with pytest.raises(Broken, match="an operator"):
            check_operator(operator)


def test_operators_that_compute_tensors_are_allowed() -> None:
    aten = torch.ops.aten
    for operator in (aten.gelu.default, torch.ops.prims.add.default, aten.einsum.default, aten._to_copy.default):
        check_operator(operator)


def test_internal_operators_are_those_with_row_rules_and_a_few_others() -> None:
    ruled = {name for name in {*RULES, *SORTED_RULES} if name.startswith("_") and hasattr(torch.ops.aten, name)}
    ruled -= {"_reshape_alias"}  # it does not check sizes
    bitwise = {f"__{way}{name}__" for way in ("", "i") for name in ("and", "or", "xor", "lshift", "rshift")}
    others = {"_safe_softmax", "_standard_gamma", "_unique2", "_weight_norm"}
    assert ruled | bitwise | others == operator_grammar.INTERNAL
    for name in operator_grammar.INTERNAL:
        assert getattr(torch.ops.aten, name).overloads()


def test_namespaces_of_torchs_own_operators_are_known() -> None:
    """Operators of others may be the program's own."""
    program = "import torch; print(*{name.split('::')[0] for name in torch._C._dispatch_get_all_op_names()})"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(told.split()) - operator_grammar.TORCHS_OTHERS == {"aten", "prims"}


MADE = re.compile(r"""\b(?:Library|custom_op|triton_op)\(\s*f?["']([A-Za-z_]\w*)["':]""")
EXAMPLES = {"_", "example", "mylib", "mylibrary", "mymodule"}
"""Namespaces in torch's docstrings."""


def test_namespaces_that_parts_of_torch_make_when_they_are_imported_are_known() -> None:
    home = Path(torch.__file__).parent
    found = {name for file in home.rglob("*.py") for name in MADE.findall(file.read_text(errors="replace"))}
    assert {"onnx", "streams"} <= found
    # torch_nn: the loss of a linear layer, a function for all (torch 2.13 and later).
    assert found - EXAMPLES - operator_grammar.TORCHS_OTHERS - {"torch_nn"} == {"aten", "prims"}


class Dumping(Masking):
    """A method that forward never calls, and one whose name it does not have."""

    def dump(self, a: torch.Tensor, *, sign: Any) -> torch.Tensor:
        ran.append(str(sign))
        return a


@pytest.mark.parametrize("path", ["..apply", "layers..__setattr__", "..state_dict", "..register_buffer", "..a b"])
def test_methods_of_every_module_do_not_run_as_operators(path: str) -> None:
    data = plain_trace(Masking())
    next(iter(data["leaves"].values()))[0] = path
    with pytest.raises(Broken, match="a method"):
        decode(sealed(data), Masking())


def test_a_method_that_no_forward_calls_does_not_run_as_an_operator() -> None:
    data = plain_trace(Dumping())
    decode(sealed(data), Dumping())
    for call in data["leaves"].values():
        call[0] = "..dump"
    with pytest.raises(Broken, match="which no forward calls"):
        decode(sealed(data), Dumping())


PATH = "/etc/passwd"


@pytest.mark.parametrize(
    "value", [PATH, "word", ["l", PATH], ["t", ["l", PATH]], ["d", PATH, 1], ["s", PATH, None, None]]
)
def test_methods_get_no_strings(value: Any) -> None:
    data = plain_trace(Masking())
    next(iter(data["leaves"].values()))[5] = [[1, value]]
    with pytest.raises(Broken, match=r"a string for \.\.masked|a container for \.\.masked"):
        decode(sealed(data), Masking())


class Reducing(nn.Module):
    """A module that takes a word, and runs as one operator."""

    def forward(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x if reduction == "sum" and x.sum() > 0 else -x


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), Reducing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x), reduction="sum")


@pytest.mark.parametrize("text", [PATH, "a b", "x" * 65, "model.pt"])
def test_a_forward_gets_words_only(text: str) -> None:
    data = plain_trace(Words())
    decode(sealed(data), Words())
    call = data["leaves"]["inner#0"]
    (constant,) = call[5]
    constant[1] = text
    with pytest.raises(Broken, match="a string for inner"):
        decode(sealed(data), Words())
    constant[1] = "sum"
    call[1] = call[1].replace("reduction", text)
    with pytest.raises(Broken, match="a string for inner"):
        decode(sealed(data), Words())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(6, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


def test_a_trace_with_a_constant_without_values_is_not_kept() -> None:
    with pytest.raises(Uncodable, match="a constant"):
        plain_trace(Bare(), torch.randn(4, 6, device="meta"))


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
    for module, names in operator_grammar.FUNCTIONS.items():
        for name in names:
            assert callable(getattr(codec._PYTHON[module], name))
