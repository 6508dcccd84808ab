"""Finds the operator with which a part of a graph fails, for an error message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from rannd.errors import RanndError
from rannd.graph.fx.traced import operator_name


def failing_op(module: GraphModule, arguments: Sequence[Any]) -> str:
    """Return the op that fails, such as 'aten::embedding in module e, model.py:12'; '' if all ops run.

    It runs them once more.
    """
    steps = _Steps(module)
    try:
        steps.run(*arguments)
    except Exception:
        meta = steps.at.meta.get("source", steps.at).meta
        home, line = meta.get("module", ""), meta.get("line", "")
        where = f"{operator_name(steps.at.target)} in {f'module {home}' if home else 'the model'}"
        return f"{where}, {line}" if line else where
    return ""


def tell_op(exc: Exception, module: GraphModule, arguments: Sequence[Any]) -> None:
    """Add to the message of an error of ``module(*arguments)`` what has failed, if it fails again.

    A graph has none of the user's lines in its traceback.
    """
    if len(exc.args) == 1 and isinstance(exc.args[0], str) and not isinstance(exc, RanndError):
        where = failing_op(module, arguments)
        if where:
            exc.args = (f"{exc.args[0]} ({where})",)


class _Steps(Interpreter):
    """Interpreter that remembers the node it is at."""

    at: Node

    def run_node(self, n: Node) -> object:
        """Run one node, see `Interpreter.run_node`."""
        self.at = n
        return super().run_node(n)
