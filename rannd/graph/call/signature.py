"""Signature of a model call: which arguments are tensors, and which of them carry the batch.

Arguments may be nested (tuples, lists, dicts, dataclasses). Tensors become graph inputs: *batch* tensors have the
samples in dimension 0 and are sliced into microbatches, *whole* tensors are passed unsliced with every microbatch.
All other leaves (None, numbers, strings) are constants of the graph, but for those that no code reads (`unread.py`),
and numbers that change from call to call, which become whole tensors (`plain_arguments.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.device.autocast import AUTOCAST_TYPES, usable_autocast_types
from rannd.errors import UsageError
from rannd.graph.call.containers import is_plain_list, register_containers
from rannd.graph.call.plain_arguments import NUMBERS, PlainArguments, without_unread
from rannd.graph.call.refusal import refusal
from rannd.graph.call.unread import Unread, UnreadArgument

_TYPICAL = (torch.Tensor, torch.nn.Parameter, type(None), bool)
CONSTANT_TYPES = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of one tensor argument; `shape` omits dimension 0 for batch tensors."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    batch: bool
    requires_grad: bool


@dataclass(frozen=True)
class Mode:
    """Global state that selects the graph in addition to the inputs: training, grad mode, autocast, dropout."""

    training: bool
    grad: bool
    autocast: str
    dropout: bool | None = None
    """Dropout forced on or off regardless of the training flags; None: follow the flags."""

    @staticmethod
    def current(training: bool, dropout: bool | None = None) -> Mode:
        """The mode of a call made now; `autocast` lists enabled device types with their dtypes."""
        regions = [
            f"{device}:{torch.get_autocast_dtype(device)}"
            for device in AUTOCAST_TYPES
            if torch.is_autocast_enabled(device)
        ]
        return Mode(training, torch.is_grad_enabled(), ",".join(regions), dropout)

    @property
    def float16(self) -> bool:
        """Whether autocast uses float16, whose gradients may overflow."""
        return "torch.float16" in self.autocast

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        """Context manager that restores the mode's autocast state; backward runs outside the user's autocast region."""
        wanted = dict(region.split(":") for region in self.autocast.split(",") if region)
        with contextlib.ExitStack() as stack:
            for device in usable_autocast_types():
                enabled = device in wanted
                dtype = getattr(torch, wanted[device].removeprefix("torch.")) if enabled else None
                here = torch.is_autocast_enabled(device)
                if here != enabled or (enabled and torch.get_autocast_dtype(device) != dtype):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


@dataclass(frozen=True)
class Signature:
    """Describes all calls that run the same graph, independent of their batch size."""

    spec: pytree.TreeSpec
    tensors: tuple[TensorSpec, ...]
    positions: tuple[int, ...]
    """Leaf index of each tensor."""
    constants: tuple[tuple[int, Any], ...]
    """(leaf index, value) of all other leaves."""
    mode: Mode
    fixed_rows: int | None = None
    """Batch size that the graph is specialized to, None if it is dynamic."""
    open: tuple[tuple[int, int], ...] = ()
    """(tensor, dimension of its `shape`) of further dimensions to trace as dynamic."""
    numbers: tuple[int, ...] = ()
    """Tensors that are numbers in the call."""

    def open_dims(self, tensor: int) -> list[int]:
        """Dynamic dimensions of a tensor, batch dimension included."""
        batch = self.tensors[tensor].batch
        found = [0] if batch and self.fixed_rows is None else []
        return found + [dim + batch for number, dim in self.open if number == tensor]

    def family(self) -> str:
        """Key that is equal for signatures that differ only in sizes."""
        tensors = [replace(spec, shape=(0,) * len(spec.shape)) for spec in self.tensors]
        return replace(self, tensors=tuple(tensors)).key()

    def key(self) -> str:
        """Short hash that is equal on ranks that run the same graph."""
        text = repr(
            (
                str(self.spec),
                self.tensors,
                self.positions,
                [(i, repr(c)) for i, c in self.constants],
                self.mode,
                self.fixed_rows,
                self.open,
                self.numbers,
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Describe the call for messages: tensors with dtypes and shapes (B: the batch size), and the mode."""
        batch = "B" if self.fixed_rows is None else str(self.fixed_rows)
        tensors = ", ".join(
            f"{spec.name} {str(spec.dtype).removeprefix('torch.')}"
            f"({', '.join([batch, *map(str, spec.shape)] if spec.batch else map(str, spec.shape))})"
            for spec in self.tensors
        )
        mode = "in training" if self.mode.training else "in evaluation"
        return f"{tensors} {mode}{'' if self.mode.grad else ' without gradients'} {self.mode.autocast}".rstrip()

    def rows(self, leaves: Sequence[torch.Tensor]) -> int:
        """Batch size of a call's tensors, 1 if none of them carries the batch."""
        for spec, leaf in zip(self.tensors, leaves, strict=True):
            if spec.batch:
                return leaf.shape[0]
        return 1

    def whole(self, numbers: Collection[int], rows: int) -> Signature:
        """Copy in which the tensors `numbers`, of `rows` rows like the batch, count as whole tensors."""
        tensors = [
            replace(spec, batch=False, shape=(rows, *spec.shape)) if number in numbers else spec
            for number, spec in enumerate(self.tensors)
        ]
        return replace(self, tensors=tuple(tensors))

    def with_values(self, values: Mapping[str, Any]) -> Signature:
        """Copy in which these arguments, by their names, have values although no code reads them."""
        constants = [(i, values.get(c.name, c) if type(c) is Unread else c) for i, c in self.constants]
        return replace(self, constants=tuple(constants))

    def matches(self, call: Call, mode: Mode) -> bool:
        """Whether `call` runs the same graph."""
        if mode != self.mode or call.spec != self.spec or call.positions != self.positions:
            return False
        if call.numbers != self.numbers:
            return False
        if [(i, type(c), c) for i, c in call.constants] != [(i, type(c), c) for i, c in self.constants]:
            return False
        rows = {
            leaf.shape[0] if leaf.ndim else -1 for s, leaf in zip(self.tensors, call.tensors, strict=True) if s.batch
        }
        if len(rows) > 1 or -1 in rows or (self.fixed_rows is not None and rows != {self.fixed_rows}):
            return False
        return all(
            leaf.dtype == s.dtype
            and not leaf.is_meta
            and leaf.requires_grad == s.requires_grad
            and tuple(leaf.shape[1:] if s.batch else leaf.shape) == s.shape
            for s, leaf in zip(self.tensors, call.tensors, strict=True)
        )

    def unflatten(self, tensors: Sequence[Any], *, traced: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild (args, kwargs) with `tensors` as the tensor leaves; numbers stay tensors if `traced`."""
        leaves: list[Any] = [None] * (len(self.positions) + len(self.constants))
        for number, (position, tensor) in enumerate(zip(self.positions, tensors, strict=True)):
            plain = number in self.numbers and not traced and isinstance(tensor, torch.Tensor)
            leaves[position] = tensor.item() if plain else tensor
        for position, value in self.constants:
            leaves[position] = UnreadArgument(value) if type(value) is Unread else value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class Call:
    """The arguments of one call, flattened."""

    spec: pytree.TreeSpec
    names: tuple[str, ...]
    """Readable names of the tensors, for messages."""
    tensors: tuple[torch.Tensor, ...]
    positions: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    numbers: tuple[int, ...] = ()
    """Tensors that are numbers in the call."""

    @property
    def unread(self) -> list[Unread]:
        """The arguments that are taken for unread."""
        return [value for _, value in self.constants if type(value) is Unread]

    @property
    def unread_values(self) -> dict[str, Any]:
        """The values of the arguments that are taken for unread, by their names."""
        return {each.name: each.value for each in self.unread}

    @property
    def home(self) -> torch.device:
        """Device of the call's tensors."""
        return next(tensor.device for number, tensor in enumerate(self.tensors) if number not in self.numbers)

    def shapes(self) -> list[list[int]]:
        """Shape of every tensor, to be sent to the other ranks."""
        return [list(t.shape) for t in self.tensors]


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], plain: PlainArguments | None = None) -> Call:
    """Flatten a call's arguments; UsageError for leaves that are neither dense tensors nor plain values.

    `plain` says what is known of arguments that are not tensors; None: all are part of the call, with their values.
    """
    ordered = {name: kwargs[name] for name in sorted(kwargs)}
    tree = (tuple(args), ordered)
    register_containers(tree)
    paths, spec = pytree.tree_flatten_with_path(tree, is_leaf=is_plain_list)
    if any(type(leaf) not in _TYPICAL for _, leaf in paths):
        rows = {leaf.shape[0] for _, leaf in paths if isinstance(leaf, torch.Tensor) and leaf.ndim}
        # A call without tensors is told with its values.
        if plain is not None and any(isinstance(leaf, torch.Tensor) for _, leaf in paths):
            parts = [
                without_unread(each, plain, argument_name, rows, (pytree.SequenceKey(number),))
                for number, each in enumerate(tree)
            ]
            tree = (parts[0], parts[1])
        paths, spec = pytree.tree_flatten_with_path(tree)
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    positions: list[int] = []
    constants: list[tuple[int, Any]] = []
    numbers: list[int] = []
    for position, (path, leaf) in enumerate(paths):
        name = argument_name(path)
        if isinstance(leaf, torch.Tensor):
            if leaf.is_nested or leaf.layout is not torch.strided:
                raise UsageError(refusal(name, leaf))
            names.append(name)
            tensors.append(leaf)
            positions.append(position)
        elif plain is not None and plain.is_input(name, leaf):
            numbers.append(len(tensors))
            names.append(name)
            tensors.append(torch.tensor(leaf, dtype=NUMBERS[type(leaf)], device="cpu"))
            positions.append(position)
        elif isinstance(leaf, (Unread, *CONSTANT_TYPES)):
            constants.append((position, leaf))
        else:
            raise UsageError(refusal(name, leaf))
    return Call(spec, tuple(names), tuple(tensors), tuple(positions), tuple(constants), tuple(numbers))


def classify(
    call: Call, mode: Mode, shapes: Sequence[Sequence[Sequence[int]]], whole: Collection[int] = ()
) -> Signature:
    """Decide which tensors carry the batch.

    `shapes[rank][i]` is the shape of tensor i on each rank, so that all ranks decide alike. A rank's batch size is the
    most frequent first dimension of its tensors (the earliest one on ties), but for the state of an LSTM; a tensor
    carries the batch if its first dimension has that size on every rank, and it is not one of `whole`, of which earlier
    calls have shown otherwise.
    """
    if not call.tensors:
        given = ", ".join([*(repr(value) for _, value in call.constants[:3]), *(["..."] if call.constants[3:] else [])])
        raise UsageError(
            f"the model is called without any tensor{f' (with {given})' if given else ''}; it needs at least one batch "
            "of samples. Make tensors of lists of numbers: torch.tensor(x)"
        )
    for rank, other in enumerate(shapes):
        if len(other) != len(call.tensors):
            raise UsageError(
                f"rank {rank} calls the model with {len(other)} tensors, this rank with {len(call.tensors)}; "
                "all ranks have to make the same call"
            )
    rows = []
    for other in shapes:
        rows.append(_rows([shape for number, shape in enumerate(other) if shape and number not in whole]))
    specs = []
    for index, (name, tensor) in enumerate(zip(call.names, call.tensors, strict=True)):
        batch = index not in whole and all(
            bool(other[index]) and other[index][0] == count for other, count in zip(shapes, rows, strict=True)
        )
        shape = tuple(tensor.shape[1:] if batch else tensor.shape)
        specs.append(TensorSpec(name, tensor.dtype, shape, batch, tensor.requires_grad))
    if not any(spec.batch for spec in specs):
        described = ", ".join(f"{n}: {tuple(t.shape)}" for n, t in zip(call.names, call.tensors, strict=True))
        raise UsageError(f"no argument carries the batch in its first dimension ({described})")
    constants = [(i, replace(c, value=None) if type(c) is Unread else c) for i, c in call.constants]
    return Signature(call.spec, tuple(specs), call.positions, tuple(constants), mode, numbers=call.numbers)


def sized(signature: Signature, call: Call) -> Signature:
    """The signature of a call that differs from the signature's in sizes alone."""
    pairs = list(zip(signature.tensors, call.tensors, strict=True))
    tensors = tuple(replace(spec, shape=tuple(tensor.shape[spec.batch :])) for spec, tensor in pairs)
    return replace(signature, tensors=tensors)


def _rows(shapes: Sequence[Sequence[int]]) -> int:
    """Most frequent first dimension; that of the first shape if only the state of an LSTM, (layers, batch, size) twice,
    has the most frequent one. 0 without shapes."""
    if not shapes:
        return 0
    found = Counter(shape[0] for shape in shapes).most_common(1)[0][0]
    first, having = shapes[0][0], [shape for shape in shapes if shape[0] == found]
    state = len(having) == 2 and having[0] == having[1] and len(having[0]) == 3 and having[0][1] == first
    return first if state else found


def argument_name(path: tuple[Any, ...]) -> str:
    """Readable name of a leaf: 'x[0]' in keyword argument x, 'argument 1' for a positional argument."""
    kind, first, *rest = path
    head = f"argument {first.idx}" if kind.idx == 0 else str(first.key)
    return head + pytree.keystr(tuple(rest))
