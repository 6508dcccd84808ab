"""Graphs of models whose modules have names that are no names in Python: "class", 'a"b', a newline.

torch.fx writes such names into the code that it makes of a graph as they are, in double quotes or, where it is a
keyword, behind a dot: a SyntaxError. While `any_name` holds it writes them as Python does.
"""

from __future__ import annotations

import contextlib
import keyword

import torch.fx.graph
from torch import nn
from torch.fx import Graph, GraphModule

from rannd.patches import declare, patched

_NAMES = declare("names in torch.fx's code", torch.fx.graph, "_format_target", "some of the user's are none in Python")


def _format_target(base: str, target: str) -> str:
    """As torch.fx.graph's, for any names: the expression for an attribute of an attribute."""
    found = base
    for name in target.split("."):
        # Python would normalize others than ASCII, and read another attribute.
        plain = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
        found = f"{found}.{name}" if plain else f"getattr({found}, {name!r})"
    return found


def any_name() -> contextlib.AbstractContextManager[None]:
    """Let torch.fx make code for any names of modules and attributes."""
    return patched(_NAMES.by(_format_target))


def graph_module(root: nn.Module, graph: Graph, name: str = "GraphModule") -> GraphModule:
    """A module that runs a graph, which may read attributes of any names."""
    with any_name():
        return GraphModule(root, graph, name)
