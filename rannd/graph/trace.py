"""Trace a module to a flat graph of ATen operators whose batch dimension is a symbol.

``torch.export`` in its non-strict form is the front-end. The result keeps the user's own parameter objects,
and has one placeholder per tensor argument, in the order of the signature.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node

from rannd.errors import TraceError
from rannd.graph.pystate import kept
from rannd.graph.signature import Signature
from rannd.graph.sizes import PROBE_ROWS, condition, shape_at

PREFIX = "model."
"""The user's module is called `model` inside the wrapper that is exported."""

MOST_ROWS = 2**20
"""A batch size that no model may forbid."""

LARGEST_EXAMPLE = 256
"""Largest batch to trace with."""

LARGEST_CONDITION = 65
"""Conditions on the batch are tried for fewer rows than this. Two rows are not: torch excludes slices of one."""

DROPPED = ("aten::_assert_tensor_metadata", "aten::_assert_scalar", "aten::sym_constrain_range_for_size",
           "aten::sym_constrain_range", "aten::_assert_async.msg")  # fmt: skip
"""Checks that export adds; the first bakes the device of the tracing machine in."""


@dataclass(frozen=True)
class OutputSpec:
    """How the user's output is put together again from the graph's outputs."""

    spec: pytree.TreeSpec
    constants: Mapping[int, Any]
    """Leaf number and value of leaves that are not computed."""
    positions: tuple[int, ...]
    """Leaf number of each output of the graph."""

    def unflatten(self, values: list[Any]) -> Any:
        """The user's output with `values` in the places of the computed leaves."""
        leaves: list[Any] = [None] * (len(self.constants) + len(self.positions))
        for position, value in self.constants.items():
            leaves[position] = value
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Traced:
    """A traced model.

    `attributes` names, for each get_attr node that holds a tensor, the parameter or buffer (its first name in
    the model; tied names are one) or the constant it reads; `constants` has the values of the latter.
    """

    graph: Graph
    root: GraphModule
    outputs: OutputSpec
    attributes: Mapping[Node, str]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """Attributes of modules that the forward changed in vain: no graph shows that."""

    def tensor(self, node: Node) -> torch.Tensor:
        """The parameter, buffer or constant that a get_attr node reads."""
        value = attribute(self.root, str(node.target))
        assert isinstance(value, torch.Tensor)
        return value

    def named(self, name: str) -> torch.Tensor:
        """The tensor behind one of `attributes`' names."""
        return self.tensor(next(node for node, each in self.attributes.items() if each == name))

    def is_state(self, node: Node) -> bool:
        """Whether a node reads a parameter or buffer of the model."""
        return node in self.attributes and self.attributes[node] not in self.constants

    def is_parameter(self, node: Node) -> bool:
        """Whether a node reads a parameter (not a buffer or constant)."""
        return node in self.attributes and isinstance(self.tensor(node), nn.Parameter)

    def trainable(self, node: Node) -> bool:
        """Whether a node reads a tensor that gets a gradient."""
        return self.tensor(node).requires_grad

    @property
    def placeholders(self) -> list[Node]:
        """One node per tensor argument, in the order of the signature."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes whose values are handed back to the user."""
        output: Node = next(iter(reversed(self.graph.nodes)))
        nodes: tuple[Node, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        return nodes


class _Flat(nn.Module):
    """Takes the tensor leaves of a call as its only arguments."""

    def __init__(self, model: nn.Module, signature: Signature, changes: set[str] | None) -> None:
        super().__init__()
        self.model = model
        self._signature = signature
        self._changes = changes
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self._signature.unflatten(tensors)
        if self._changes is None:  # strict tracing runs no code of ours
            return self.model(*args, **kwargs)
        with kept(self.model, self._changes):
            result = self.model(*args, **kwargs)
        _check_output(result)
        return result


def _check_output(result: Any) -> None:
    """TraceError where the model's output holds something that ranks cannot hand back."""
    leaves = pytree.tree_leaves(result)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, (torch.Tensor, torch.SymInt, bool, int, float, str))):
            raise TraceError(
                f"the model's output contains a {type(leaf).__module__}.{type(leaf).__qualname__}; it has to be made "
                "of tensors, None, numbers, strings and containers of them (with Hugging Face models, use_cache=False "
                "keeps the cache out of the output)"
            )
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise TraceError("the model returns no tensor; there is nothing to train or to return")


def trace(model: nn.Module, signature: Signature, leaves: list[torch.Tensor]) -> Traced:
    """Trace `model` as it is called with tensors like `leaves` (one per tensor of the signature).

    Raises TraceError, naming the user's module and line, for code that cannot be traced, for custom
    ``autograd.Function`` (their backward would be lost silently), and where a batch dimension would be
    fixed to the size of the example.
    """
    program = None
    changes: set[str] = set()
    problem: BaseException | None = None
    for strict in (False, True):
        try:
            program = _export(model, signature, example_inputs(signature, leaves), strict, changes)
        except TraceError:
            raise
        except Exception as exc:
            problem = problem or exc
            continue
        fixed = _fixed_batch(program, signature) or _excluded_batch(program, signature)
        if fixed is None:
            break
        name, low, high = fixed
        if low < high and _same_beyond(model, signature, leaves, program, high, strict):
            break
        sizes = f"{low} to {high}" if low < high else str(low)
        problem = problem or TraceError(
            f"the batch dimension of {name} is fixed by the model's code to {sizes} "
            "(a shape used as a number, or a comparison with it); make the code independent of the batch size"
        )
        program = None
    if program is None:
        assert problem is not None
        if isinstance(problem, TraceError):
            raise problem
        raise _explain(model, problem) from problem
    with _quiet():
        root = program.module(check_guards=False)
    return dataclasses.replace(_clean(model, root, program.call_spec.out_spec), changes=tuple(sorted(changes)))


def _export(
    model: nn.Module,
    signature: Signature,
    examples: tuple[torch.Tensor, ...],
    strict: bool,
    changes: set[str] | None = None,
) -> Any:
    dynamic = tuple({0: Dim.AUTO} if spec.batch else None for spec in signature.tensors)
    with _quiet(), _refuse_custom_functions(model):
        flat = _Flat(model, signature, None if strict else set() if changes is None else changes)
        return torch.export.export(flat, examples, dynamic_shapes=(dynamic,), strict=strict)


def example_inputs(signature: Signature, leaves: list[torch.Tensor], least: int = 2) -> tuple[torch.Tensor, ...]:
    """Tensors to trace with: real rows, repeated to a batch size of at least `least` that no other dimension has.

    A batch of 1 would be fixed silently, and a size that occurs elsewhere could be mistaken for it.
    """
    taken = {size for spec in signature.tensors for size in spec.shape}
    rows = next(size for size in range(least, least + len(taken) + 1) if size not in taken)
    examples = []
    for spec, leaf in zip(signature.tensors, leaves, strict=True):
        value = leaf.detach()
        if spec.batch:
            count = value.shape[0]
            if count == 0:
                value = value.new_zeros((rows, *spec.shape))
            else:
                value = value[torch.arange(rows, device=value.device) % count]
        examples.append(value.requires_grad_(spec.requires_grad))
    return tuple(examples)


def _fixed_batch(program: Any, signature: Signature) -> tuple[str, int, int] | None:
    """A batch argument whose first dimension the traced program does not leave open, and the sizes it may have."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec, name in zip(signature.tensors, program.graph_signature.user_inputs, strict=True):
        if not spec.batch or not isinstance(name, str):
            continue
        size = placeholders[name].meta["val"].shape[0]
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
        if not symbols:
            return spec.name, int(size), int(size)
        for symbol in symbols:
            bounds = program.range_constraints.get(symbol)
            if bounds is not None and not (bounds.lower <= 2 and bounds.upper >= MOST_ROWS):
                return spec.name, int(bounds.lower), int(min(bounds.upper, MOST_ROWS))
    return None


def _excluded_batch(program: Any, signature: Signature) -> tuple[str, int, int] | None:
    """Like `_fixed_batch`, for a size of the batch that the model's code treats in another way (odd or even)."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec, name in zip(signature.tensors, program.graph_signature.user_inputs, strict=True):
        if spec.batch and isinstance(name, str):
            size = placeholders[name].meta["val"].shape[0]
            for guard in size.node.shape_env.guards:
                held = condition(guard.expr)
                for rows in range(3, LARGEST_CONDITION):
                    if not held(rows):
                        return spec.name, 2, rows - 1
            return None
    return None


def _same_beyond(
    model: nn.Module, signature: Signature, leaves: list[torch.Tensor], program: Any, high: int, strict: bool
) -> bool:
    """Whether a program that was traced for at most `high` rows is the same for more (a choice among kernels)."""
    if high > LARGEST_EXAMPLE:
        return False
    try:
        other = _export(model, signature, example_inputs(signature, leaves, high + 1), strict)
    except Exception:
        return False
    return _lines(program.graph) == _lines(other.graph)


def _lines(graph: Graph) -> list[str]:
    """What a graph does, with all shapes at one number of rows."""
    lines = []
    for node in graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        made = [shape_at(value, PROBE_ROWS) for value in values if isinstance(value, torch.Tensor)]
        lines.append(f"{node.op} {node.target} {node.args} {node.kwargs} {made}")
    return lines


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what export warns of and prints (whole graphs, where it fails): the error says it better."""
    logger = logging.getLogger("torch")
    level = logger.level
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextlib.contextmanager
def _refuse_custom_functions(model: nn.Module) -> Iterator[None]:
    """Raise where the model's code runs a custom autograd.Function while it is traced.

    Non-strict export runs through the Function's forward and forgets its backward: gradients would be
    silently wrong.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] != "torch":
            module, line = _user_frame(model, _callers())
            raise TraceError(
                f"{module} runs the custom autograd.Function {cls.__module__}.{cls.__qualname__}{line}; its backward "
                "would be lost in the traced graph. Write it with differentiable torch operators instead"
            )
        return original.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _callers() -> list[types.FrameType]:
    """The frames that led here, innermost first."""
    frames = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _explain(model: nn.Module, problem: BaseException) -> TraceError:
    """A TraceError that names the user's module and line where `problem` arose."""
    frames: list[types.FrameType] = []
    seen: set[int] = set()
    cause: BaseException | None = problem
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)][::-1] + frames
        cause = cause.__cause__ or cause.__context__
    module, line = _user_frame(model, frames)
    first = str(problem).strip().splitlines() or [type(problem).__name__]
    hint = ""
    if "data-dependent" in str(problem).lower() or "DataDependent" in type(problem).__name__:
        hint = " (Python code whose way depends on the values of tensors cannot be part of a graph)"
    return TraceError(f"{module} cannot be traced{line}: {type(problem).__name__}: {first[0]}{hint}")


def _user_frame(model: nn.Module, frames: list[types.FrameType]) -> tuple[str, str]:
    """(name of the module, ', at FILE:LINE') of the innermost frame in the user's code; `frames` innermost first."""
    names = {id(module): name for name, module in model.named_modules()}
    own = (sys.modules["torch"].__path__[0], __file__)
    module = ""
    line = ""
    for frame in frames:
        filename = frame.f_code.co_filename
        users = not filename.startswith((*own, "<"))
        if not line and users and (id(frame.f_locals.get("self")) in names or frame.f_code.co_name == "forward"):
            line = f", at {filename}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if not module and isinstance(owner, nn.Module) and id(owner) in names:
            name = names[id(owner)]
            kind = type(owner).__qualname__
            module = f"module {name} ({kind})" if name else f"the model ({kind})"
        if module and line:
            break
    return module or f"the model ({type(model).__qualname__})", line


def _clean(model: nn.Module, root: GraphModule, spec: pytree.TreeSpec) -> Traced:
    """Drop export's checks, name attributes by the user's model, make every output an op of its own."""
    graph = root.graph
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and operator_name(node.target) in DROPPED and not node.users:
            graph.erase_node(node)
    outputs = _outputs_are_ops(graph, spec)
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), name)
    attributes: dict[Node, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        if not node.users:
            graph.erase_node(node)
            continue
        value = attribute(root, str(node.target))
        if not isinstance(value, torch.Tensor):
            continue
        known = names.get(id(value))
        if known is None:
            known = f"constant:{node.target}"
            constants[known] = value.detach()
        attributes[node] = known
    return Traced(graph, root, outputs, attributes, constants)


def _outputs_are_ops(graph: Graph, spec: pytree.TreeSpec) -> OutputSpec:
    """Give outputs that are an argument, a parameter, or an output twice, an op of their own."""
    output = next(iter(reversed(graph.nodes)))
    constants: dict[int, Any] = {}
    positions: list[int] = []
    results: list[Node] = []
    for position, leaf in enumerate(pytree.tree_leaves(output.args[0])):
        if not isinstance(leaf, Node):
            constants[position] = leaf
            continue
        if leaf.op in ("placeholder", "get_attr") or leaf in results:
            with graph.inserting_before(output):
                alias = graph.call_function(torch.ops.aten.alias.default, (leaf,))
            alias.meta = dict(leaf.meta)
            leaf = alias
        positions.append(position)
        results.append(leaf)
    output.args = (tuple(results),)
    return OutputSpec(spec, constants, tuple(positions))


def retarget(traced: Traced, device: torch.device) -> Traced:
    """Let every operator that names a device (tensors made on the way) make its result on `device`."""
    _retarget(traced.root, device)
    return traced


def _retarget(root: GraphModule, device: torch.device) -> None:
    def replaced(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in root.graph.nodes:
        if node.op == "call_function":
            node.args = pytree.tree_map(
                replaced, node.args, is_leaf=lambda value: isinstance(value, (Node, torch.device))
            )
            node.kwargs = pytree.tree_map(
                replaced, node.kwargs, is_leaf=lambda value: isinstance(value, (Node, torch.device))
            )
        elif node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                _retarget(inner, device)
                inner.recompile()


def attribute(root: nn.Module, target: str) -> Any:
    """The attribute of `root` with a dotted name."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def operator_name(target: Callable[..., Any] | str) -> str:
    """'aten::linear' for a default overload, 'aten::add.Tensor' for others, a dotted name for Python functions."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call of an ATen operator by the names of its schema, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    named: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            named[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named
