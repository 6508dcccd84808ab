"""Tape of recorded operators, from which individual tensors can be replayed.

A `Tape` is a list of operators that write, each with the storages that it reads and writes. `replay` runs, in order,
only those that the storage of one tensor depends on. The idea is that of torchdistx's deferred initialization;
tracking storages instead of tensors handles views, `.data` and in-place operators without special cases.

Random operators do not use the script's generators. Each has its own seed, derived from the name of the first tensor
that depends on it (`Tape.name_draws`), so that values do not depend on which tensors are replayed where. Operators
called with an explicit generator draw the same numbers as in the script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.device.generators import kept_generators, seed_all
from rannd.errors import UsageError

CPU = torch.device("cpu")

_EMPTY = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)


class Unrepeatable(UsageError):
    """A tensor cannot be replayed; the message says why."""


@dataclass(frozen=True)
class View:
    """Metadata of a tensor as a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Create the tensor on another storage of the same size."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.size, self.stride)
        made = torch._conj(made) if self.conj else made
        return torch._neg_view(made) if self.neg else made


@dataclass
class Storage:
    """A storage used by the recorded code."""

    device: torch.device
    """Device on which the recorded code created it."""
    kept: torch.UntypedStorage
    """Kept alive so that its address is not reused."""
    value: torch.Tensor | None = None
    """A constant: a tensor with values in a real storage."""
    version: int = 0
    blank: bool = False
    """Whether it existed, without values, before the recording."""
    writers: list[int] = field(default_factory=list)


@dataclass
class TapeOp:
    """A recorded operator that writes; tensors among its arguments are Views."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    random: bool
    generator: torch.Tensor | None = None
    """State of the generator passed by the code."""
    seed: int | None = None


class Tape:
    """Recorded operators in execution order.

    Args:
        seed: Base seed; seeds of random operators are derived from it and the names of tensors.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._ops: list[TapeOp] = []
        self.storages: list[Storage] = []

    def __len__(self) -> int:
        return len(self._ops)

    def note(self, op: TapeOp) -> None:
        """Append an operator."""
        for storage in op.writes:
            self.storages[storage].writers.append(len(self._ops))
        self._ops.append(op)

    def add(self, storage: Storage) -> int:
        """Register a storage and return its number."""
        self.storages.append(storage)
        return len(self.storages) - 1

    def written(self, view: View) -> bool:
        """Whether the storage of a tensor is a constant or has been written."""
        storage = self.storages[view.storage]
        return storage.value is not None or bool(storage.writers)

    def peek(self, view: View) -> torch.Tensor:
        """Current value of a tensor, for code that reads values during the recording."""
        for number in self._slice(view.storage):
            op = self._ops[number]
            if op.random and op.seed is None:
                op.seed = _seed(self._seed, "read", number)
        with kept_generators():
            made, _ = self.replay(view)
        return made

    def _slice(self, storage: int) -> list[int]:
        """Indices of the operators that the final content of a storage depends on, in order."""
        found: set[int] = set()
        done: dict[int, int] = {}
        stack = [(storage, len(self._ops))]
        while stack:
            number, before = stack.pop()
            known = done.get(number, 0)
            if before <= known:
                continue
            done[number] = before
            for writer in self.storages[number].writers:
                if known <= writer < before and writer not in found:
                    found.add(writer)
                    op = self._ops[writer]
                    stack += [(each, writer) for each in op.reads | op.writes]
        return sorted(found)

    def name_draws(self, views: Iterable[tuple[str, View]]) -> None:
        """Seed each random operator from the first of these tensors that depends on it, and its index in that slice."""
        for name, view in views:
            drawn = 0
            for number in self._slice(view.storage):
                op = self._ops[number]
                if op.random and op.seed is None:
                    op.seed = _seed(self._seed, name, drawn)
                    drawn += 1

    def digest(self, view: View) -> bytes:
        """Hash of all inputs of a tensor's value: equal in processes that would replay the same values."""
        numbers: dict[int, int] = {}
        told = hashlib.sha256()

        def tell(leaf: Any) -> None:
            if isinstance(leaf, View):
                if leaf.storage not in numbers:
                    numbers[leaf.storage] = len(numbers)
                    value = self.storages[leaf.storage].value
                    if value is not None:
                        told.update(_content(value.untyped_storage()))
                leaf = (numbers[leaf.storage], leaf.dtype, leaf.size, leaf.stride, leaf.offset, leaf.conj, leaf.neg)
            elif isinstance(leaf, torch.device):
                leaf = leaf.type  # the device index differs between ranks
            told.update(f"{leaf!r};".encode())

        for number in self._slice(view.storage):
            op = self._ops[number]
            told.update(f"{op.function}|{op.seed}|{op.random}".encode())
            if op.generator is not None:
                told.update(_content(op.generator.untyped_storage()))
            for leaf in pytree.tree_leaves((op.args, op.kwargs, op.results)):
                tell(leaf)
        tell(view)
        return told.digest()[:8]

    def replay(self, view: View) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Replay a tensor; returns it and a mask of its uninitialized elements (None if there are none).

        Must be called inside `kept_generators`. Raises Unrepeatable.
        """
        made, blank = self._replay(view, 0xFF)
        if not blank:
            return made, None
        number = made.is_floating_point() or made.is_complex()
        hole = _all_ones(made) if number else made != self._replay(view, 0)[0]
        return made, hole if bool(hole.any()) else None

    def _replay(self, view: View, fill: int) -> tuple[torch.Tensor, bool]:
        """Replay a tensor with uninitialized memory set to the byte `fill`; returns it and whether there was any."""
        slots: dict[int, torch.UntypedStorage] = {}
        blank = False

        def tensor_of(each: View) -> torch.Tensor:
            nonlocal blank
            if each.storage not in slots:
                slots[each.storage] = self._initial(each.storage, fill)
                blank = blank or self.storages[each.storage].blank
            return each.on(slots[each.storage])

        ops = [self._ops[number] for number in self._slice(view.storage)]
        last = {storage: number for number, op in enumerate(ops) for storage in op.reads | op.writes}
        with torch.no_grad():
            for number, op in enumerate(ops):
                args, kwargs = pytree.tree_map_only(View, tensor_of, (op.args, op.kwargs))
                if op.random:
                    seed_all(op.seed if op.seed is not None else self._seed)
                if op.generator is not None:
                    home = kwargs.get("device") or next(iter(pytree.tree_leaves(args))).device
                    kwargs["generator"] = torch.Generator(home)
                    kwargs["generator"].set_state(op.generator)
                result = op.function(*args, **kwargs)
                leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                for leaf, place in zip(leaves, op.results, strict=True):
                    if place is None or place.storage in slots:
                        continue
                    slots[place.storage] = _storage_as_recorded(leaf, place)
                    if op.function._schema.name in _EMPTY:
                        blank = True
                        _bytes(slots[place.storage]).fill_(fill)
                for storage in op.reads | op.writes:  # free storages after their last use
                    if last[storage] == number and storage != view.storage:
                        slots.pop(storage, None)
            made = tensor_of(view)
            whole = made.numel() * made.element_size() == made.untyped_storage().nbytes() and not made.is_conj()
            return made if whole and not made.is_neg() else made.clone(), blank

    def _initial(self, number: int, fill: int) -> torch.UntypedStorage:
        storage = self.storages[number]
        if storage.value is not None:
            if storage.value._version != storage.version:
                raise Unrepeatable("a tensor that it was computed from has been modified since")
            # a copy, because replayed operators may write into it
            copy: torch.UntypedStorage = storage.value.untyped_storage().clone()
            return copy
        real = torch.UntypedStorage(storage.kept.nbytes(), device=storage.device)
        _bytes(real).fill_(fill)
        return real


def _seed(job: int, name: str, number: int) -> int:
    digest = hashlib.sha256(f"{job}/{number}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def view_of(number: int, tensor: torch.Tensor) -> View:
    return View(
        number,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _content(storage: torch.UntypedStorage) -> memoryview:
    return _bytes(storage).cpu().numpy().data


def _storage_as_recorded(tensor: torch.Tensor, place: View) -> torch.UntypedStorage:
    """Storage of a replayed tensor, copied if its strides or offset differ from the recorded ones."""
    if tensor.stride() == place.stride and tensor.storage_offset() == place.offset:
        kept: torch.UntypedStorage = tensor.untyped_storage()
        return kept
    span = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True)) + 1
    room = place.offset + (span if all(place.size) else 0)
    storage: torch.UntypedStorage = torch.UntypedStorage(room * tensor.element_size(), device=tensor.device)
    place.on(storage).copy_(tensor)
    return storage


def _all_ones(tensor: torch.Tensor) -> torch.Tensor:
    """Mask of elements with all bits set, a NaN pattern that arithmetic does not produce."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = parts.reshape(-1, 1).contiguous().view(torch.uint8).eq(0xFF).all(-1).reshape(parts.shape)
    return whole.any(-1) if tensor.is_complex() else whole
