"""Autograd functions of C++ extensions (``torch::autograd::Function``) that are called past torch's dispatcher.

Export sees the operators inside of one and forgets its backward, as it does with a Python Function, but nothing of
Python runs that could be watched. What is left is the node that it makes in the autograd graph of the traced tensors.
An operator that is registered with torch (``TORCH_LIBRARY``, ``torch.library``) makes such nodes, too, and is right: it
stands in the graph itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from rannd.graph.blame import Offence, Place
from rannd.graph.suspects import ancestors

_KIND = "CppFunction"
"""Name of the Python class of such nodes."""


class _Known(TorchFunctionMode):
    """Takes down the nodes that torch's own functions and registered operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            made = _behind(_nodes(result), set(_nodes((args, kwargs))))
        else:
            made = iter(_nodes(result) if isinstance(result, (torch.Tensor, tuple, list)) else ())
        self.nodes.update(node for node in made if type(node).__name__ == _KIND)
        return result


@contextlib.contextmanager
def watch_cpp_functions(model: nn.Module) -> Iterator[None]:
    """Raise Offence at the end of a module that has called one, while the model is traced."""
    names = {id(module): name for name, module in model.named_modules()}
    known = _Known()
    seen: set[Any] = set()

    def left(module: nn.Module, _: Any, result: Any) -> None:
        if id(module) not in names:
            return
        for node in _behind(_nodes(result), seen):
            if type(node).__name__ == _KIND and node not in known.nodes:
                name = names[id(module)]
                place = Place((name, *ancestors(name)) if name else ("",), "")
                what = f"calls the autograd function {node.name()} of a C++ extension past torch's dispatcher"
                raise Offence(what, place)

    with known, contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_hook(left).remove)
        yield


def _nodes(result: object) -> list[Any]:
    with torch._C.DisableTorchFunction():  # what watches the user's code is not to see this
        found = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [node for node in found if node is not None]


def _behind(nodes: Iterable[Any], seen: set[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph behind some, but for those `seen`; they are added there."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [other for other, _ in node.next_functions]
        yield node
