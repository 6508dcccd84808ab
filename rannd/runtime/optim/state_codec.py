"""An optimizer's state by parameter name, split into a skeleton of plain values and named tensors, and put together.

``torch.optim.Optimizer.state_dict()`` numbers the parameters that one process has. Ranks hold different parameters, and
a checkpoint loads under other plans, so state travels by name. Gathering, loading, checkpoints and undeploy use this
form, in these steps and back::

    state_dict --NamedState.of--> by name --split--> skeleton, tensors     (to other ranks, or to files)
    skeletons, tensors --join--> by name --merge--> all ranks' --state_dict--> of any rank's parameters

Nothing here communicates or reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from rannd.errors import UsageError
from rannd.runtime.zero.division import Piece
from rannd.runtime.zero.state_pieces import join

MARK = "\0tensor"
"""A tensor's place in a skeleton is ``{MARK: its number among those of its parameter}``."""

Key = TypeVar("Key", bound=Hashable)
"""What names a parameter."""
TensorName = tuple[Any, ...]
"""Names a tensor of the state: the parameter's key, then the dict keys and list indices that lead to the tensor."""


@dataclass
class NamedState(Generic[Key]):
    """A ``state_dict()`` with keys of parameters in place of their numbers.

    Its fields are what ``script.pt`` of a checkpoint holds of an optimizer.
    """

    groups: list[dict[str, Any]]
    """``state_dict()["param_groups"]``; "params" has keys."""
    states: dict[Key, Any]
    """The entries of ``state_dict()["state"]`` that belong to parameters: nested dicts, lists and tuples."""
    other: dict[Any, Any]
    """The entries of ``state_dict()["state"]`` that belong to no parameter."""
    extra: dict[str, Any]
    """What the optimizer's class adds to its ``state_dict()``."""
    pieces: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """Of which elements of the flattened parameter a state is, where it is not of all (ZeRO); empty in files."""

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], keys: Sequence[Sequence[Key]]) -> NamedState[Key]:
        """The named form of a ``state_dict()``. `keys`: the parameters of each group, in its order."""
        key_of: dict[Any, Key] = {}
        groups = []
        for group, names in zip(state_dict["param_groups"], keys, strict=True):
            key_of.update(zip(group["params"], names, strict=True))
            groups.append({**group, "params": list(names)})
        states = {key_of[number]: value for number, value in state_dict["state"].items() if number in key_of}
        other = {number: value for number, value in state_dict["state"].items() if number not in key_of}
        extra = {name: value for name, value in state_dict.items() if name not in ("state", "param_groups")}
        return cls(groups, states, other, extra)

    @property
    def keys(self) -> list[list[Key]]:
        """The parameters of each group."""
        return [group["params"] for group in self.groups]

    def state_dict(self, keys: Sequence[Sequence[Key]]) -> dict[str, Any]:
        """The ``state_dict()`` of an optimizer whose groups have these of the parameters."""
        number: dict[Key, int] = {}
        groups = []
        for group, names in zip(self.groups, keys, strict=True):
            numbered = {**group, "params": [number.setdefault(key, len(number)) for key in names]}
            if "param_names" in group:
                label = dict(zip(group["params"], group["param_names"], strict=True))
                numbered["param_names"] = [label[key] for key in names]
            groups.append(numbered)
        states: dict[Any, Any] = {place: self.states[key] for key, place in number.items() if key in self.states}
        return {"state": {**states, **self.other}, "param_groups": groups, **self.extra}

    def split(self, *, inline: int = 0) -> tuple[NamedState[Key], dict[TensorName, torch.Tensor]]:
        """(skeleton, tensors by name).

        The skeleton is this state with marks in place of the parameters' tensors; those of up to `inline` elements
        (0: none) stay in it. Tensors in it are copies on the CPU, the named ones are the state's own.
        """
        skeletons: dict[Key, Any] = {}
        tensors: dict[TensorName, torch.Tensor] = {}
        for key, state in self.states.items():
            skeletons[key], own = _split(state, (key,), inline)
            tensors |= own
        skeleton = NamedState(copied(self.groups), skeletons, copied(self.other), copied(self.extra), self.pieces)
        return skeleton, tensors

    def join(
        self, tensor: Callable[[TensorName], torch.Tensor | None], wanted: Container[Key] | None = None
    ) -> NamedState[Key]:
        """The state of which this is the skeleton, of the `wanted` parameters. `tensor` gives the tensor of a name."""

        def filled(key: Key, skeleton: Any) -> Any:
            return _replaced(skeleton, _is_mark, lambda _, path: tensor((key, *path)))

        states = {key: filled(key, each) for key, each in self.states.items() if wanted is None or key in wanted}
        return NamedState(self.groups, states, self.other, self.extra, self.pieces)


def merge(parts: Sequence[NamedState[Key]], shape: Callable[[Key], Sequence[int]] | None = None) -> NamedState[Key]:
    """The state of which each rank has a part. Where ranks differ in more than parameters, rank 0's counts.

    `shape`: of a parameter, to put states of its pieces together; without it the first rank's stand for them.

    Ranks that were given the same parameters agree on the groups. Where a script gave each rank only its own (a group
    added after the model was deployed), parameters are in the order of the ranks, and within a rank in the script's.
    UsageError where ranks have different numbers of groups.
    """
    counts = [len(part.groups) for part in parts]
    if len(set(counts)) > 1:
        raise UsageError(f"the ranks' optimizers have {counts} groups; call add_param_group on every rank")
    groups = []
    for same in zip(*(part.groups for part in parts), strict=True):
        group = {**same[0], "params": list(dict.fromkeys(key for each in same for key in each["params"]))}
        if "param_names" in group:
            label: dict[Key, str] = {}
            for each in same:
                label.update(zip(each["params"], each["param_names"], strict=True))
            group["param_names"] = [label[key] for key in group["params"]]
        groups.append(group)
    whole: NamedState[Key] = NamedState(groups, {}, {}, {})
    for part in reversed(parts):
        whole.states.update(part.states)
        whole.other.update(part.other)
        whole.extra.update(part.extra)
    if shape is None:
        return whole
    for key in dict.fromkeys(key for part in parts for key in part.pieces):
        held = [(Piece(*part.pieces[key]), part.states[key]) for part in parts if key in part.states]
        try:
            if key in whole.states:
                whole.states[key] = join(held, shape(key))
        except ValueError as exc:
            raise UsageError(f"the ranks' states of parameter {key} do not fit together: {exc}") from exc
    return whole


def copied(value: Any) -> Any:
    """A nested value with its tensors copied to the CPU."""
    return _replaced(value, torch.is_tensor, lambda tensor, _: _copy(tensor))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _split(state: Any, name: TensorName, inline: int) -> tuple[Any, dict[TensorName, torch.Tensor]]:
    """Skeleton and named tensors of one parameter's state."""
    tensors: dict[TensorName, torch.Tensor] = {}

    def take(tensor: torch.Tensor, path: TensorName) -> Any:
        if inline and tensor.numel() <= inline:
            return _copy(tensor)
        tensors[(*name, *path)] = tensor
        return {MARK: len(tensors) - 1}

    return _replaced(state, torch.is_tensor, take), tensors


def _is_mark(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {MARK}


def _replaced(
    value: Any, wanted: Callable[[Any], bool], new: Callable[[Any, TensorName], Any], path: TensorName = ()
) -> Any:
    """A copy of nested dicts, lists and tuples in which `new(it, path to it)` stands in place of what is `wanted`."""
    if wanted(value):
        return new(value, path)
    if isinstance(value, dict):
        return {key: _replaced(each, wanted, new, (*path, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, wanted, new, (*path, place)) for place, each in enumerate(value))
    return value
