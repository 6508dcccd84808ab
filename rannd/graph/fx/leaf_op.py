"""Opaque operator ``rannd::leaf``: runs a submodule, method or autograd.Function that cannot be traced.

Such code has data-dependent control flow or its own backward. The operator runs the user's module itself, with its
hooks, and with tensors of the graph in place of its parameters and buffers; autograd records inside. A table maps
each call to its module, the structure of its arguments and results, and the shapes of its results;
`rannd.graph.tracing.leaf_recorder.Recorder` obtains these by running the model.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rannd.errors import UsageError
from rannd.graph.fx.symbolic_values import ROWS, Dim, TensorValue
from rannd.graph.modules.autograd_functions import FunctionPart, direct_checkpoints, function_name, is_function
from rannd.graph.modules.dropout_override import forced
from rannd.graph.modules.methods import Method, part_of, split_path

NAME = "rannd::leaf"

_LIBRARY = torch.library.Library("rannd", "DEF")
_LIBRARY.define("leaf(str key, Tensor[] tensors, Tensor(a!)[] written, SymInt[] numbers) -> Tensor[]")
_tables: weakref.WeakValueDictionary[int, LeafTable] = weakref.WeakValueDictionary()
_tokens = itertools.count(1)


@dataclass(frozen=True)
class LeafOutput:
    """Metadata of one tensor returned by an opaque call; `shape` has None for data-dependent sizes."""

    dtype: torch.dtype
    shape: tuple[Dim | None, ...]
    requires_grad: bool

    @property
    def value(self) -> TensorValue | None:
        """Its symbolic value, None if a size is data-dependent."""
        known = tuple(size for size in self.shape if size is not None)
        return TensorValue(self.dtype, known) if len(known) == len(self.shape) else None


@dataclass(frozen=True)
class LeafCall:
    """One opaque call within a run of the model, as plain data.

    `tensors` and `written` list, for the operator's arguments of these names, the source of each tensor: a parameter
    or buffer of the module (str: name within the module) or a tensor among its arguments (int: leaf index). The
    operator's `numbers` are the number of rows, and then the arguments that depend on it (`numbers`: leaf indices).
    """

    path: str
    spec: pytree.TreeSpec
    """Structure of (args, kwargs)."""
    tensors: tuple[str | int, ...]
    written: tuple[str | int, ...]
    numbers: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    """(leaf index, value) of all other arguments."""
    made: tuple[LeafOutput, ...]
    result: pytree.TreeSpec
    places: tuple[int, ...]
    """Leaf index in the result of each tensor in `made`."""
    result_constants: tuple[tuple[int, Any], ...]
    shares: bool
    """Whether results alias each other or the arguments. The operator copies them, which is wrong if they are written
    in place later."""


class LeafTable:
    """The opaque calls of one traced model."""

    def __init__(self, model: nn.Module, calls: Mapping[str, LeafCall]) -> None:
        self.model = model
        self.calls = dict(calls)
        """Calls by key without the model's token: ``path#call number``."""
        self._modules = {call.path: part_of(model, call.path) for call in calls.values()}
        self.token = next(_tokens)
        self.dropout: bool | None = None
        """Dropout forced on or off regardless of the modules' training flags, see tracing/dropout.py."""
        _tables[self.token] = self

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the opaque modules, methods and autograd.Functions; '' is the whole model."""
        return tuple(self._modules)

    @property
    def functions(self) -> frozenset[type[torch.autograd.Function]]:
        """The opaque autograd.Functions."""
        return frozenset(each.function for each in self._modules.values() if isinstance(each, FunctionPart))

    def key(self, name: str) -> str:
        """The operator's key for a call."""
        return f"{self.token}|{name}"

    def module(self, path: str) -> nn.Module:
        """The user's module at a path."""
        return self._modules[path]


def call_name(key: str) -> str:
    """Strip the model's token from an operator's key."""
    return key.split("|", 1)[1]


def is_whole_model(key: str) -> bool:
    """Whether the operator with this key runs the whole model, not a submodule."""
    return call_name(key).startswith("#")


def call_of(key: str) -> tuple[LeafTable, LeafCall]:
    """Look up the table and the call of an operator's key."""
    token, name = key.split("|", 1)
    table = _tables.get(int(token))
    if table is None:
        raise RuntimeError(f"the model of leaf {name} is gone; keep the traced model as long as its parts run")
    return table, table.calls[name]


def _leaf(key: str, tensors: list[torch.Tensor], written: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
    table, call = call_of(key)
    if any(isinstance(tensor, FakeTensor) for tensor in (*tensors, *written)):
        return _fake(call, (*tensors, *written), numbers[0])
    return _run(table, call, tensors, written, numbers)


_LIBRARY.impl("leaf", _leaf, "Autograd")
_LIBRARY.impl("leaf", _leaf, "CompositeExplicitAutograd")


def _fake(call: LeafCall, given: Sequence[torch.Tensor], rows: Any) -> list[torch.Tensor]:
    """Fake implementation for tracing: tensors of the recorded shapes."""
    mode = next(tensor.fake_mode for tensor in given if isinstance(tensor, FakeTensor))
    device = next((tensor.device for tensor in given if tensor.device.type != "cpu"), given[0].device)
    found = []
    for made in call.made:
        shape = [_size(size, rows, mode) for size in made.shape]
        tensor = torch.empty(shape, dtype=made.dtype, device=device)
        if made.requires_grad and torch.is_grad_enabled():
            tensor = tensor.requires_grad_().clone()  # not a leaf tensor, so that in-place writes are allowed
        found.append(tensor)
    return found


def _size(size: Dim | None, rows: Any, mode: Any) -> Any:
    if size is None:
        symbol = mode.shape_env.create_unbacked_symint()
        torch._check(symbol >= 0)
        return symbol
    if isinstance(size, int):
        return size
    factor = int(size.coeff(ROWS, 1))
    return factor * rows + int(size.coeff(ROWS, 0))


def _run(
    table: LeafTable,
    call: LeafCall,
    tensors: list[torch.Tensor],
    written: list[torch.Tensor],
    numbers: Sequence[int],
) -> list[torch.Tensor]:
    """Run the user's module with the given tensors as its parameters, buffers and arguments."""
    module = table.module(call.path)
    state: dict[str, torch.Tensor] = {}
    leaves: list[Any] = [None] * call.spec.num_leaves
    for sources, values in ((call.tensors, tensors), (call.written, written)):
        for source, value in zip(sources, values, strict=True):
            if isinstance(source, str):
                state[source] = value
            else:
                leaves[source] = value
    for place, number in zip(call.numbers, numbers[1:], strict=True):
        leaves[place] = number
    for place, constant in call.constants:
        leaves[place] = constant
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    for name, _ in module.named_parameters():
        if name in state and type(state[name]) is torch.Tensor and not state[name].requires_grad:
            state[name] = nn.Parameter(state[name], requires_grad=False)  # no other tensor may be assigned to its name
    memory = {name: value.data for name, value in state.items()}
    with _substituted(module, state), direct_checkpoints(), forced(module, table.dropout):
        # A call of the whole model would run its RaNNCModule.
        result = module(*args, **kwargs) if call.path else module._call_impl(*args, **kwargs)
        with torch.no_grad():
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if name not in state:
                    continue
                given, here = state[name], memory[name]
                if given.data_ptr() != here.data_ptr():  # its `.data` was replaced, which is no new version
                    here.copy_(given)
                    given.data = here
                if value is not given:  # it was replaced
                    given.copy_(value)
    flat, spec = pytree.tree_flatten(result)
    if (
        spec != call.result
        or any(not isinstance(flat[place], torch.Tensor) for place in call.places)
        or any(type(flat[place]) is not type(value) or flat[place] != value for place, value in call.result_constants)
    ):
        recorded = _outline(_recorded_result(call))
        if (selected := _selected(call.path, module)) is not None:
            raise UsageError(
                f"a tensor selects an item of {selected}: item {_outline(result)}, but {recorded} when the model was "
                "traced, and a graph always runs the same modules. Pass the index as a Python int in place of a "
                "tensor: each value then gets a graph of its own"
            )
        raise RuntimeError(
            f"{_called(call.path)} returned {_outline(result)}, but when the model was traced {recorded}; a module "
            "whose code cannot be traced has to return the same kind of result, and the same numbers, in every call"
        )
    return _own([flat[place] for place in call.places], [*tensors, *written])


def _called(path: str) -> str:
    if is_function(path):
        return f"autograd.Function {function_name(path)}"
    return f"module {path}" if path else "the model"


def _selected(path: str, part: nn.Module) -> str | None:
    """The list of modules or parameters whose own method for indices a leaf is, for messages; None for other leaves."""
    if not isinstance(part, Method) or not isinstance(part.owner, (nn.ModuleList, nn.Sequential, nn.ParameterList)):
        return None
    if not getattr(type(part.owner), part.name).__module__.startswith("torch."):
        return None  # a method of the script
    return f"{split_path(path)[0]} ({type(part.owner).__qualname__})"


def _own(results: list[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make results contiguous, as traced, and clone those that alias the arguments or each other."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}
    found = []
    for tensor in results:
        tensor = tensor.contiguous()
        if tensor.numel() and tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        found.append(tensor)
    return found


def _recorded_result(call: LeafCall) -> Any:
    """The result recorded during tracing, with "a tensor" for each tensor."""
    leaves: list[Any] = ["a tensor"] * call.result.num_leaves
    for place, value in call.result_constants:
        leaves[place] = value
    return pytree.tree_unflatten(leaves, call.result)


def _outline(result: Any) -> str:
    """Printable form of a result, with "a tensor" for each tensor."""
    return repr(pytree.tree_map(lambda leaf: "a tensor" if isinstance(leaf, torch.Tensor) else leaf, result))


@contextlib.contextmanager
def _substituted(module: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Temporarily replace a module's parameters and buffers by `state`, under all of their (tied) names."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = {id(named[name]): tensor for name, tensor in state.items()}
    places = [
        (held, key, tensor)
        for each in module.modules()
        for held in (each._parameters, each._buffers)
        for key, tensor in held.items()
        if id(tensor) in given
    ]
    flat = [
        (each, each._flat_weights, each._flat_weight_refs) for each in module.modules() if isinstance(each, nn.RNNBase)
    ]
    for held, key, tensor in places:
        held[key] = given[id(tensor)]  # type: ignore[assignment]
    # nn.RNNBase keeps a second list of its parameters, and looks whether it is that of now.
    for each, weights, _ in flat:
        each._flat_weights = [given.get(id(weight), weight) for weight in weights]
        each._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in each._flat_weights]
    try:
        yield
    finally:
        for held, key, tensor in places:
            held[key] = tensor  # type: ignore[assignment]
        for each, weights, references in flat:
            each._flat_weights, each._flat_weight_refs = weights, references
