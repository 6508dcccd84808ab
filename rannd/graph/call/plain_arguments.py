"""What a session knows of a model's arguments that are not tensors: strings, objects, and numbers.

An argument without a tensor in it is taken for unread (`unread.py`) if it has strings or objects, or is a list with a
number for each row, until tracing shows that the code reads it. A number that changes from call to call may become a
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.graph.call.containers import is_plain_list
from rannd.graph.call.unread import Unread

NUMBERS = {float: torch.float64, int: torch.int64}
"""Types of numbers that can be passed as tensors, with the dtypes that hold their values exactly."""
SIMPLE = (torch.Tensor, type(None), bool, int, float, complex, torch.dtype, torch.device)
"""Types of leaves that may be part of a call; neither strings nor objects."""
_LARGEST = 2**63


@dataclass
class PlainArguments:
    """How the arguments of one model's calls are used, by their names. The same on all ranks."""

    read: set[str] = field(default_factory=set)
    """Read by the code, so part of the call."""
    inputs: set[str] = field(default_factory=set)
    """Numbers that are inputs of the graph."""
    constant: set[str] = field(default_factory=set)
    """Numbers of which the code needs the value."""

    def is_input(self, name: str, value: object) -> bool:
        """Whether a number is passed to the graph as a tensor."""
        return name in self.inputs and is_number(value)


class ArgumentsChanged(BaseException):
    """The call has to be read again, because more is known now of its arguments. On all ranks.

    A BaseException, so that nothing takes it for a failure of the model.
    """


def is_number(value: object) -> bool:
    """Whether a value is a number that a tensor can hold exactly."""
    return type(value) in NUMBERS and not (type(value) is int and not -_LARGEST <= value < _LARGEST)


def without_unread(
    tree: Any, plain: PlainArguments, name_of: Callable[[tuple[Any, ...]], str], rows: set[int], path: tuple[Any, ...]
) -> Any:
    """The tree with its largest parts without tensors that are taken for unread replaced by `Unread`.

    `path` is the tree's own, `rows` the numbers of rows that a list with a number for each may have.
    """

    def outermost(node: Any) -> bool:
        return node is not tree

    children, spec = pytree.tree_flatten_with_path(tree, is_leaf=outermost)
    found = []
    for key, child in children:
        where = (*path, *key)
        if isinstance(child, torch.Tensor):
            pass
        elif _has_tensor(child):
            child = without_unread(child, plain, name_of, rows, where)
        elif _may_be_unread(child, rows):
            name = name_of(where)
            if name not in plain.read:
                plainly = all(isinstance(leaf, (*SIMPLE, str)) for leaf in _plain_leaves(child))
                child = Unread(name, type(child), plainly, child)
            elif isinstance(child, Mapping):  # the code reads an item of it, perhaps not all
                child = without_unread(child, plain, name_of, rows, where)
        found.append(child)
    return pytree.tree_unflatten(found, spec) if children else tree


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(tree, is_leaf=is_plain_list))


def _may_be_unread(tree: Any, rows: set[int]) -> bool:
    """Whether a part without tensors has more than settings: strings, objects, or a number for each row."""
    if is_plain_list(tree):
        types = set(map(type, tree))
        return str in types or (NUMBERS.keys() >= types and len(tree) in rows)
    return any(not isinstance(leaf, SIMPLE) for leaf in _plain_leaves(tree))


def _plain_leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree; of a list of numbers and strings, one of each type."""
    for leaf in pytree.tree_leaves(tree, is_leaf=is_plain_list):
        yield from {type(each): each for each in leaf}.values() if is_plain_list(leaf) else (leaf,)
