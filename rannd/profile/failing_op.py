"""Finds the operator with which a part of a graph fails, for an error message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Interpreter, Node

from rannd.graph.fx.traced import operator_name
from rannd.graph.partition.cut import Part


def failing_op(part: Part, arguments: Sequence[Any]) -> str:
    """Return the op that fails, such as 'aten::embedding in module e: ', or '' if all ops run."""
    steps = _Steps(part.module)
    try:
        steps.run(*arguments)
    except Exception:
        module = steps.at.meta.get("module", "")
        return f"{operator_name(steps.at.target)} in {f'module {module}' if module else 'the model'}: "
    return ""


class _Steps(Interpreter):
    """Interpreter that remembers the node it is at."""

    at: Node

    def run_node(self, n: Node) -> object:
        """Run one node, see `Interpreter.run_node`."""
        self.at = n
        return super().run_node(n)
