"""Detect autograd functions of C++ extensions (``torch::autograd::Function``) that bypass torch's dispatcher.

torch.export traces the operators inside of one and drops its backward, as for a Python Function, but calls no Python
code that could be patched. It can be detected only by the node that it creates in the autograd graph of the traced
tensors. An operator registered with torch (``TORCH_LIBRARY``, ``torch.library``) creates such nodes, too, and is
traced correctly: as an operator of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from rannd.graph.modules.bisection import ancestors
from rannd.graph.modules.source_location import Offence, SourceLocation, here
from rannd.patches import MODULE_ENTERED, MODULE_LEFT, patched

_KIND = "CppFunction"
"""Name of the Python class of such nodes."""


class _Watch(TorchFunctionMode):
    """Checks the autograd nodes of the arguments of torch functions; nodes that torch functions create are known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._known: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _nodes((args, kwargs))
        self.look(given, None)
        result = func(*args, **(kwargs or {}))
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            made = _behind(_nodes(result), set(given))
        else:
            made = iter(_nodes(result) if isinstance(result, (torch.Tensor, tuple, list)) else ())
        self._known.update(node for node in made if type(node).__name__ == _KIND)
        return result

    def look(self, nodes: Iterable[Any], place: SourceLocation | None) -> None:
        """Raise Offence for a C++ node that no torch function has created, at `place` or where the code runs."""
        for node in nodes:
            if type(node).__name__ == _KIND and node not in self._known:
                raise Offence(
                    f"calls the autograd function {node.name()} of a C++ extension, bypassing torch's dispatcher",
                    place or here(self._model),
                    "whose backward a graph would lose (register it with TORCH_LIBRARY to make it an operator)",
                )


@contextlib.contextmanager
def watch_cpp_functions(model: nn.Module) -> Iterator[None]:
    """Raise Offence during tracing if a module calls an unregistered C++ autograd function.

    The check runs when its result is passed to another module, returned from a module, or passed to a torch function.
    """
    names = {id(module): name for name, module in model.named_modules()}
    watch = _Watch(model)
    running: list[str] = [""]

    def look(made: object) -> None:
        name = running[-1]
        watch.look(_nodes(made), SourceLocation((name, *ancestors(name)) if name else ("",), ""))

    def entered(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            look(args)
            running.append(names[id(module)])

    def left(module: nn.Module, _: Any, result: Any) -> None:
        if id(module) in names:
            look(result)
            while len(running) > 1 and running.pop() != names[id(module)]:
                pass  # modules that have raised do not reach MODULE_LEFT

    with watch, patched(MODULE_ENTERED.by(entered), MODULE_LEFT.by(left)):
        yield


def _nodes(values: object) -> list[Any]:
    with torch._C.DisableTorchFunction():  # hide this from the function modes that watch user code
        found = [leaf.grad_fn for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [node for node in found if node is not None]


def _behind(nodes: Iterable[Any], seen: set[Any]) -> Iterator[Any]:
    """Yield the ancestors of autograd nodes, without those in `seen`."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [other for other, _ in node.next_functions]
        yield node
