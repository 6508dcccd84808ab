"""Run selected submodules as leaves: record the arguments and results of their calls, then trace them as operators.

For both, `_replaced` temporarily substitutes the module's forward and removes its hooks, which run together with the
module inside the leaf.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from rannd.device.generators import kept_generators
from rannd.graph.call.containers import register_containers
from rannd.graph.call.signature import CONSTANT_TYPES
from rannd.graph.fx.leaf_op import LeafCall, LeafOutput, LeafTable
from rannd.graph.fx.symbolic_values import ROWS, Dim
from rannd.graph.modules.autograd_functions import FunctionPart, direct_checkpoints, observed_forward, replaced_forward
from rannd.graph.modules.contained_objects import Contents, modules_of, same_values, write_back
from rannd.graph.modules.foreign_rng import unchanged
from rannd.graph.modules.methods import ForeignUse, Method, own_state_only, part_of, replaced
from rannd.graph.modules.parameter_undo import Writes, kept_parameters, noted_writes
from rannd.graph.python_state.guards import HOOKS, hooks_of
from rannd.graph.tracing.on_device import on_host


class NotALeaf(Exception):
    """A module cannot run as a leaf, so that the module which calls it has to."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make calls of a module run `forward` instead of its own forward and hooks."""
    if isinstance(module, Method):
        with replaced(module, forward):
            yield
        return
    own = module.__dict__
    before = {name: own[name] for name in (*HOOKS, "forward") if name in own}
    for name in HOOKS:
        if name in own:
            own[name] = type(own[name])()
    own["forward"] = forward
    try:
        yield
    finally:
        own.pop("forward", None)
        own.update(before)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Undo the side effects of running a model: on attributes of its modules, their contents, buffers and generators.

    Nested objects are restored within the limits of `Contents`.
    """
    modules = list(modules_of(model))
    attributes = [(module, dict(module.__dict__)) for _, module in modules]
    inner = [
        (held, dict(held))
        for _, module in modules
        for held in [module.__dict__["_parameters"], module.__dict__["_buffers"], *hooks_of(module)]
    ]
    contents = Contents(modules, arrays=True)
    buffers = [(each, each.detach().clone(), each.requires_grad) for each in model.buffers() if not each.is_meta]
    devices = sorted({tensor.device for tensor in [*model.parameters(), *model.buffers()]}, key=str)
    with unchanged(model), kept_generators(devices):
        try:
            yield
        finally:
            for module, before in attributes:
                for name in module.__dict__.keys() - before.keys():
                    del module.__dict__[name]
                module.__dict__.update(before)
            for held, content in inner:
                held.clear()
                held.update(content)
            contents.put_back()
            for buffer, value, trained in buffers:
                if buffer.requires_grad and not trained:  # a value with a gradient was written into it
                    with contextlib.suppress(RuntimeError):  # views have that from their base
                        buffer.detach_()
                write_back(buffer, value)


@contextlib.contextmanager
def undone(model: nn.Module) -> Iterator[Writes]:
    """Undo what running a model does to it, see `preserved`, and writes into its parameters; yields these writes."""
    with preserved(model), kept_parameters(model) as writes:
        yield writes


@dataclass
class _Seen:
    """One call of a part, recorded with one number of rows."""

    spec: pytree.TreeSpec
    leaves: list[Any]
    changed: set[str | int]
    result: pytree.TreeSpec
    results: list[Any]
    shares: bool


def record(model: nn.Module, paths: Sequence[str], runs: Sequence[tuple[int, Callable[[], Any]]]) -> LeafTable:
    """Record the calls of the parts at `paths`.

    `runs` has at least two pairs (number of rows, function that calls the model with them). NotALeaf if a part has
    arguments or results that an operator cannot have, or other calls in each run.
    """
    seen: list[dict[str, list[_Seen]]] = []
    parts = {path: part_of(model, path) for path in paths}
    for _, run in runs:
        found: dict[str, list[_Seen]] = {path: [] for path in paths}
        running: list[str] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(undone(model))
            stack.enter_context(direct_checkpoints())
            for path, part in parts.items():
                stack.enter_context(_watched(model, path, part, found[path], running))
            run()
        for each in itertools.chain(*found.values()):
            each.results = [_outline(leaf) for leaf in each.results]
        seen.append(found)
    rows = [count for count, _ in runs]
    calls: dict[str, LeafCall] = {}
    for path, part in parts.items():
        if len({len(found[path]) for found in seen}) != 1:
            raise NotALeaf(path, "its number of calls depends on the batch size")
        for number, same in enumerate(zip(*(found[path] for found in seen), strict=True)):
            calls[f"{path}#{number}"] = _call(path, part, rows, same)
    return LeafTable(model, calls)


@contextlib.contextmanager
def _watched(model: nn.Module, path: str, part: nn.Module, found: list[_Seen], running: list[str]) -> Iterator[None]:
    """Record the calls of a part, except those inside the call of another part (`running`)."""
    own = dict(part.__dict__)

    def observed(call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if running:
            return call()
        running.append(path)
        try:
            result, seen = _see(model, path, part, args, kwargs, call)
        finally:
            running.pop()
        found.append(seen)
        return result

    def forward(*args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            with _as_it_is(part, own):
                return part(*args, **kwargs)

        return observed(call, args, kwargs)

    with observed_forward(part, observed) if isinstance(part, FunctionPart) else _replaced(part, forward):
        yield


def _see(
    model: nn.Module, path: str, part: nn.Module, args: Any, kwargs: Any, call: Callable[[], Any]
) -> tuple[Any, _Seen]:
    """Run a call of a part and record its arguments, in-place changes and results. NotALeaf."""
    register_containers((args, kwargs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    state: dict[str, torch.Tensor] = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    given: dict[str | int, torch.Tensor] = dict(state.items())
    given.update((place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    versions = {name: tensor._version for name, tensor in given.items()}
    contents = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}
    applied = isinstance(part, FunctionPart)
    try:
        with own_state_only(model, part, given.values() if applied else ()), noted_writes(part) as writes:
            result = call()
    except ForeignUse as exc:
        raise NotALeaf(path, str(exc)) from exc
    changed = {*writes.values()} | {name for name, tensor in given.items() if tensor._version != versions[name]}
    if changed and applied:
        raise NotALeaf(path, "it writes into its arguments")
    for name, parameter in part.named_parameters():
        if name in state and parameter.shape != state[name].shape:
            raise NotALeaf(path, f"it replaces parameter {name} by one of another shape, {tuple(parameter.shape)}")
    for name, buffer in part.named_buffers():  # some writes do not increment the version
        if buffer is not state.get(name) or not same_values(buffer, contents[name]):
            changed.add(name)
    changed |= _statistics(part)
    register_containers(result)
    results, made = pytree.tree_flatten(result)
    for leaf in results:
        if not isinstance(leaf, (torch.Tensor, *CONSTANT_TYPES)):
            raise NotALeaf(path, f"it returns a {type(leaf).__module__}.{type(leaf).__qualname__}")
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise NotALeaf(path, f"it returns a tensor of layout {leaf.layout}: make it dense with to_dense()")
        if isinstance(leaf, torch.Tensor) and on_host(leaf, model):
            raise NotALeaf(path, "it returns a tensor on the CPU")
    tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
    shares = _share(tensors, list(given.values()))
    # Inside of a Function's forward, results do not require grad yet: torch creates their node when it returns.
    outlines = results if applied else [_outline(leaf) for leaf in results]
    return result, _Seen(spec, [_outline(leaf) for leaf in leaves], changed, made, outlines, shares)


@contextlib.contextmanager
def _as_it_is(module: nn.Module, own: Mapping[str, Any]) -> Iterator[None]:
    """Restore the forward and hooks of a replaced module, from its attributes `own`, for one call."""
    if isinstance(module, Method):  # always calls the class's function
        yield
        return
    current = {name: module.__dict__[name] for name in (*HOOKS, "forward") if name in module.__dict__}
    module.__dict__.pop("forward")
    module.__dict__.update({name: own[name] for name in (*HOOKS, "forward") if name in own})
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        module.__dict__.update(current)


def _share(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether results share memory with each other or with the arguments."""
    storages = [tensor.untyped_storage()._cdata for tensor in results]
    return len(set(storages)) < len(storages) or bool({t.untyped_storage()._cdata for t in given} & set(storages))


def _statistics(module: nn.Module) -> set[str]:
    """Buffers that normalization layers update in training, even if their content does not change."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, each in module.named_modules()
        if isinstance(each, nn.modules.batchnorm._NormBase) and each.training and each.track_running_stats
        for buffer in each._buffers
    }


@dataclass(frozen=True)
class _Outline:
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


def _outline(leaf: Any) -> Any:
    return _Outline(leaf.dtype, tuple(leaf.shape), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _call(path: str, module: nn.Module, rows: Sequence[int], seen: Sequence[_Seen]) -> LeafCall:
    first = seen[0]
    if any(each.spec != first.spec for each in seen):
        raise NotALeaf(path, "the structure of its arguments depends on the batch size")
    if any(each.result != first.result for each in seen):
        raise NotALeaf(path, "the structure of its results depends on the batch size")
    changed = set().union(*(each.changed for each in seen))
    tensors: list[str | int] = []
    written: list[str | int] = []
    numbers: list[int] = []
    constants: list[tuple[int, Any]] = []
    for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
        (written if name in changed else tensors).append(name)
    for place, leaf in enumerate(first.leaves):
        values = [each.leaves[place] for each in seen]
        if isinstance(leaf, _Outline):
            (written if place in changed else tensors).append(place)
        elif not isinstance(leaf, CONSTANT_TYPES):
            raise NotALeaf(path, f"it takes a {type(leaf).__module__}.{type(leaf).__qualname__}")
        elif all(type(value) is type(leaf) and value == leaf for value in values):
            constants.append((place, leaf))
        elif all(type(value) is int for value in values):
            numbers.append(place)
        else:
            raise NotALeaf(path, f"it takes values that depend on the batch: {values}")
    if not tensors and not written:
        raise NotALeaf(path, "it has no tensors among its arguments, parameters and buffers")
    made: list[LeafOutput] = []
    places: list[int] = []
    fixed: list[tuple[int, Any]] = []
    for place, leaf in enumerate(first.results):
        values = [each.results[place] for each in seen]
        if isinstance(leaf, _Outline):
            if any(
                not isinstance(v, _Outline) or v.dtype != leaf.dtype or len(v.shape) != len(leaf.shape) for v in values
            ):
                raise NotALeaf(path, f"the type, dtype or number of dimensions of its result {place} changes")
            sizes = tuple(_size(rows, [value.shape[dim] for value in values]) for dim in range(len(leaf.shape)))
            made.append(LeafOutput(leaf.dtype, sizes, any(value.requires_grad for value in values)))
            places.append(place)
        elif all(type(value) is type(leaf) and value == leaf for value in values):
            fixed.append((place, leaf))
        else:
            raise NotALeaf(path, f"it returns numbers that depend on the batch: {values}")
    return LeafCall(
        path, first.spec, tuple(tensors), tuple(written), tuple(numbers), tuple(constants), tuple(made), first.result,
        tuple(places), tuple(fixed), any(each.shares for each in seen),
    )  # fmt: skip


def _size(rows: Sequence[int], sizes: Sequence[int]) -> Dim | None:
    """A size as a linear function of the number of rows; None if it is not one."""
    if len(set(sizes)) == 1:
        return sizes[0]
    if rows[0] == rows[1]:
        return None
    slope, rest = divmod(sizes[1] - sizes[0], rows[1] - rows[0])
    start = sizes[0] - slope * rows[0]
    if rest or slope < 0 or any(size != start + slope * count for count, size in zip(rows, sizes, strict=True)):
        return None
    return start + slope * ROWS if slope else start


@contextlib.contextmanager
def in_place(table: LeafTable, model: nn.Module, rows: Callable[[], Any]) -> Iterator[None]:
    """Trace calls of the table's modules as leaf operators within the context; `rows` returns the batch size."""
    counts = dict.fromkeys(table.paths, 0)

    def called(path: str, *args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        name = f"{path}#{counts[path]}"
        counts[path] += 1
        return _traced(table, name, table.module(path), rows(), args, kwargs)

    with contextlib.ExitStack() as stack:
        for path in table.paths:
            part = table.module(path)
            if isinstance(part, FunctionPart):
                stack.enter_context(replaced_forward(part, partial(called, path)))
            else:
                stack.enter_context(
                    _replaced(part, lambda *args, _path=path, **kwargs: called(_path, *args, **kwargs)[0])
                )
        yield


def _traced(
    table: LeafTable, name: str, module: nn.Module, rows: Any, args: Any, kwargs: Any
) -> tuple[Any, list[torch.Tensor]]:
    """Trace a call of a leaf as its operator; returns the result, and those of its tensors that need no gradient."""
    call = table.calls.get(name)
    path = name.rsplit("#", 1)[0]
    register_containers((args, kwargs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if call is None or spec != call.spec:
        raise NotALeaf(path, "the structure of its arguments or its number of calls differs during tracing")
    state: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def tensors(sources: Sequence[str | int]) -> list[torch.Tensor]:
        found = [state[source] if isinstance(source, str) else leaves[source] for source in sources]
        if not all(isinstance(tensor, torch.Tensor) for tensor in found):
            raise NotALeaf(path, "during tracing, it is called with other types of arguments")
        return found

    for place, constant in call.constants:
        if isinstance(leaves[place], (torch.SymInt, torch.Tensor)) or leaves[place] != constant:
            raise NotALeaf(path, "during tracing, it is called with other values")
    numbers = [rows, *(leaves[place] for place in call.numbers)]
    values = torch.ops.rannd.leaf(table.key(name), tensors(call.tensors), tensors(call.written), numbers)
    results: list[Any] = [None] * call.result.num_leaves
    for place, value in zip(call.places, values, strict=True):
        results[place] = value
    for place, value in call.result_constants:
        results[place] = value
    constants = [value for value, made in zip(values, call.made, strict=True) if not made.requires_grad]
    return pytree.tree_unflatten(results, call.result), constants
