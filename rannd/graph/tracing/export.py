"""Export a module with ``torch.export`` to a flat graph of ATen operators with a symbolic batch dimension.

The graph refers to the user's own parameter objects, and has one placeholder per tensor argument, in the order of the
signature. The exported program is cleaned: metadata become plain data (`symbolic_values.py`), runtime assertions, some
of which fix the device of the tracing machine, are removed, and every output becomes a separate node.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributions import Distribution
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node

import rannd.graph.fx.fake_kernels  # noqa: F401  (registers kernels with torch)
from rannd.graph.branches.branch_selection import BranchTrace
from rannd.graph.branches.concrete_values import Shadows
from rannd.graph.branches.data_dependent import Deciding, split_off
from rannd.graph.call.containers import plain_output
from rannd.graph.call.signature import Signature
from rannd.graph.fx.fx_names import any_name
from rannd.graph.fx.leaf_op import LeafTable
from rannd.graph.fx.memory_layout import keep_without_gaps, reshape_in_regions, without_gaps
from rannd.graph.fx.symbolic_values import Number, TensorValue, abstract
from rannd.graph.fx.traced import Decisions, OutputSpec, Traced, attribute, operator_name
from rannd.graph.modules.autograd_functions import no_checkpoints
from rannd.graph.modules.contained_objects import same_arrays
from rannd.graph.modules.cpp_functions import watch_cpp_functions
from rannd.graph.modules.foreign_rng import unchanged, watch_foreign_rng
from rannd.graph.modules.source_location import NodesUnseen, source_line, watch_gradients
from rannd.graph.python_state.guards import kept
from rannd.graph.tracing.leaf_recorder import in_place
from rannd.graph.tracing.on_device import seen_on
from rannd.graph.tracing.simplify import simplify
from rannd.patches import declare, patched
from rannd.torch_mends import tracing

_VALIDATED = declare(
    "arguments of distributions",
    Distribution,
    "_validate_args",
    "validation branches on values of tensors, only to raise",
)

DROPPED = ("aten::_assert_tensor_metadata", "aten::_assert_scalar", "aten::sym_constrain_range_for_size",
           "aten::sym_constrain_range", "aten::_assert_async.msg")  # fmt: skip
"""Assertions that export adds; the first fixes the device of the tracing machine."""


class _Flat(nn.Module):
    """Wraps a model so that the flattened tensors of a call are its only arguments."""

    def __init__(
        self,
        model: nn.Module,
        signature: Signature,
        notes: Notes | None,
        table: LeafTable | None,
        deciding: Callable[[Sequence[torch.Tensor]], Deciding] | None,
    ) -> None:
        super().__init__()
        self.model = model
        self._signature = signature
        self._notes = notes
        self._table = table
        self._deciding = deciding
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self._signature.unflatten(tensors, traced=True)
        if self._notes is None or self._deciding is None:  # strict export would trace through our code
            return self.model(*args, **kwargs)
        batch = next(tensor for tensor, spec in zip(tensors, self._signature.tensors, strict=True) if spec.batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept(self.model, self._notes.changes))
            if self._table is not None:
                stack.enter_context(in_place(self._table, self.model, lambda: batch.shape[0]))
            stack.enter_context(NodesUnseen(self.model))
            stack.enter_context(watch_cpp_functions(self.model))
            deciding = stack.enter_context(self._deciding(tensors))
            try:
                result = self.model(*args, **kwargs)
            finally:
                self._notes.decided = tuple(value for _, value in deciding.noted)
                self._notes.chances = len(deciding.chances)
        result = plain_output(result, self._notes.dropped)
        handed = [*(tensor for tensor, _ in deciding.noted), *deciding.chances]
        return (result, handed) if handed else result


class Notes:
    """Observations about user code during an export."""

    def __init__(self) -> None:
        self.changes: set[str] = set()
        """Attributes of modules that the code changes."""
        self.dropped: list[str] = []
        """Parts of the output that ranks cannot return."""
        self.decided: tuple[bool, ...] = ()
        """Outcomes of branches on the call's tensors. The program returns the conditions after the model's outputs."""
        self.chances = 0
        """Number of branches on random numbers. Their conditions are the last outputs of the program."""


def export(
    model: nn.Module,
    signature: Signature,
    examples: tuple[torch.Tensor, ...],
    sample: TracedCall,
    *,
    device: torch.device,
    strict: bool = False,
    table: LeafTable | None = None,
    notes: Notes | None = None,
    chance: Callable[[int], bool] = lambda _: False,
) -> Any:
    """Export a call with tensors like `examples`, as on `device`; the batch dimension is dynamic unless the signature
    fixes it.

    Branches on the values of tensors have the outcomes of `sample`; `chance` maps the number of a random branch to its
    outcome. In strict mode, such branches fail. Raises what the model's code and torch.export raise, Offence for
    effects that export would drop, and NotALeaf.
    """
    dynamic = tuple(dict.fromkeys(signature.open_dims(number), Dim.AUTO) for number in range(len(examples)))
    if strict:
        flat = _Flat(model, signature, None, None, None)
    else:

        def deciding(traced: Sequence[torch.Tensor]) -> Deciding:
            return Deciding(_shadows(model, sample, traced), sample.assumed, chance)

        flat = _Flat(model, signature, notes or Notes(), table, deciding)
    # Strict export does not run user code, but interprets its bytecode, and would trace through our hooks.
    rng = unchanged(model) if strict else watch_foreign_rng(model)
    gradients = watch_gradients(model, table.functions if table is not None else ())
    there = seen_on(device, (*model.parameters(), *model.buffers(), *examples))
    with quiet(), any_name(), same_arrays(model), gradients, no_checkpoints(), tracing(), rng, unvalidated(), there:
        return torch.export.export(flat, examples, dynamic_shapes=(dynamic,), strict=strict)


@dataclass(frozen=True)
class TracedCall:
    """The call that determines the outcomes of data-dependent branches during tracing."""

    tensors: Sequence[torch.Tensor]
    """Tensors of the call with all rows, in the order of the signature."""
    assumed: Sequence[bool] | None = None
    """Outcomes to use, in order, if the tensors have no rows to evaluate the conditions with."""


def _shadows(model: nn.Module, sample: TracedCall, traced: Sequence[torch.Tensor]) -> Shadows:
    found = Shadows(model)
    for tensor, real in zip(traced, sample.tensors, strict=True):
        found.give(tensor, real)
    return found


def example_inputs(signature: Signature, leaves: list[torch.Tensor], least: int = 2) -> tuple[torch.Tensor, ...]:
    """Example tensors for tracing: real rows, repeated to a batch size of at least `least` unlike every other size.

    torch.export specializes on size 1, and the batch size must not be confused with other dimensions.
    """
    if signature.fixed_rows is not None:
        return tuple(
            leaf.detach().requires_grad_(spec.requires_grad)
            for spec, leaf in zip(signature.tensors, leaves, strict=True)
        )
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


def unvalidated() -> contextlib.AbstractContextManager[None]:
    """Disable argument validation of torch.distributions, which branches on the values of tensors."""
    return patched(_VALIDATED.by(False))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and output of export, which prints whole graphs on failure; the exception is enough."""
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


@dataclass(frozen=True)
class Shown(BranchTrace):
    """A cleaned exported program."""

    decisions: Decisions | None


def shown(
    model: nn.Module,
    program: Any,
    notes: Notes,
    device: torch.device,
    lengths: Mapping[sympy.Symbol, sympy.Symbol] | None = None,
) -> Shown:
    """Clean an exported program. Undecidable if a branch condition depends on more than the arguments.

    `notes` and `device` are those of its export; `lengths` maps symbols of the program other than the batch size to
    ours.
    """
    with quiet(), any_name():
        root = program.module(check_guards=False)
    graph, spec = root.graph, program.call_spec.out_spec
    dense = without_gaps(root)
    _make_plain(root, lengths, device)
    keep_without_gaps(root, dense)
    simplify(root)
    reshape_in_regions(root)
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        # Assertions, and numbers that only they use.
        if operator_name(node.target) in DROPPED or isinstance(node.meta["val"], Number):
            graph.erase_node(node)
    count = len(notes.decided) + notes.chances
    if not count:
        return Shown(root, spec, (), None)
    output = next(iter(reversed(graph.nodes)))
    leaves = pytree.tree_leaves(output.args[0])
    output.args = (tuple(leaves[:-count]),)
    decided, drawn = leaves[-count:][: len(notes.decided)], leaves[-count:][len(notes.decided) :]
    decisions = None
    if decided:
        state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        decisions = split_off(root, decided, notes.decided, state)
    chances = []
    for node in drawn:
        if operator_name(node.target) == "aten::clone":  # the copy made by Deciding
            chances.append(node.args[0])
            graph.erase_node(node)
        else:  # the copy is in a nested graph
            chances.append(node)
    return Shown(root, spec.children()[0], chances, decisions)


def traced_of(model: nn.Module, shown: Shown, device: torch.device) -> Traced:
    """Convert to Traced: rename attributes after the user's model; every output becomes a separate node on `device`."""
    root, graph = shown.root, shown.root.graph
    outputs = _outputs_are_ops(graph, shown.spec, device)
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
    return Traced(graph, root, outputs, attributes, constants, decisions=shown.decisions)


def _outputs_are_ops(graph: Graph, spec: pytree.TreeSpec, device: torch.device) -> OutputSpec:
    """Insert an alias for every output that is an argument, a parameter, or the same node as another output.

    Outputs on the CPU, of a graph for another device, are moved to that, from where ranks send them.
    """
    output = next(iter(reversed(graph.nodes)))
    constants: dict[int, Any] = {}
    positions: list[int] = []
    results: list[Node] = []
    host: list[int] = []
    for position, leaf in enumerate(pytree.tree_leaves(output.args[0])):
        if not isinstance(leaf, Node):
            constants[position] = leaf
            continue
        value = leaf.meta["val"]
        if isinstance(value, TensorValue) and value.host:
            host.append(position)
            with graph.inserting_before(output):
                there = graph.call_function(torch.ops.aten.to.device, (leaf, device, value.dtype))
            there.meta = {**leaf.meta, "val": replace(value, host=False)}
            leaf = there
        elif leaf.op in ("placeholder", "get_attr") or leaf in results:
            with graph.inserting_before(output):
                alias = graph.call_function(torch.ops.aten.alias.default, (leaf,))
            alias.meta = dict(leaf.meta)
            leaf = alias
        positions.append(position)
        results.append(leaf)
    output.args = (tuple(results),)
    return OutputSpec(spec, constants, tuple(positions), tuple(host))


def _make_plain(root: GraphModule, lengths: Mapping[sympy.Symbol, sympy.Symbol] | None, device: torch.device) -> None:
    """Reduce the metadata of all nodes to value, module and the line that called it, as plain data."""
    for node in root.graph.nodes:
        source = source_line(node.meta.get("stack_trace") or "")
        value = abstract(node.meta.get("val"), lengths, device.type)
        node.meta = {"val": value, "module": _module_of(node), "line": source}
        if node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                _make_plain(inner, lengths, device)


def _module_of(node: Node) -> str:
    """Dotted path of the module that ran the operator; '' for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    name = path.removeprefix("L['self'].").removeprefix("model").removeprefix(".")
    return "" if name.startswith("_empty") else name
