"""What the user is told of a new graph: how it was traced, and what of the model's code it does not do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rannd import log
from rannd.graph.model import ModelGraph
from rannd.graph.python_state.guards import users_hooks


class Notices:
    """Logs on rank 0; once for a model what graphs of other sizes or modes have in common."""

    def __init__(self) -> None:
        self._lines: set[str] = set()
        self._whole_told = False
        self._hooks_told = False
        self._uncached: set[str] = set()

    def tell(self, graph: ModelGraph, model: nn.Module) -> None:
        """Log what the front-end did, and what later calls do not."""
        traced = graph.traced
        logger = log.get("RaNNCModule")
        whole = "" in traced.leaf_paths
        for line in traced.record[: -1 if whole else None]:
            if line not in self._lines:
                self._lines.add(line)
                logger.info("Tracing: %s", line)
        if whole and not self._whole_told:
            self._whole_told = True
            logger.warning("The model runs in data parallel only: %s", traced.record[-1])
        changes: dict[str, list[str]] = {}
        for where in traced.changes:
            changes.setdefault(where.partition(" of ")[0], []).append(where)
        for where, *more in changes.values():
            logger.warning(
                "forward assigns attribute %s%s; the graph does not contain this, so it is not done in later calls",
                where,
                f" and of {len(more)} more" if more else "",
            )
        hooks = users_hooks(model, traced.leaf_paths)
        if hooks and not self._hooks_told:
            self._hooks_told = True
            logger.warning(
                "Forward hook %s%s: what it does to tensors is part of the graph. Anything else, such as keeping a "
                "tensor for the script, is not done in later calls; return such tensors from forward",
                hooks[0],
                f", and {len(hooks) - 1} more" if hooks[1:] else "",
            )

    def tell_uncached(self, reasons: Sequence[str]) -> None:
        """Log why a trace cannot be cached: a reason, or '', of each rank."""
        for reason in dict.fromkeys(reasons):
            if reason and reason not in self._uncached:
                self._uncached.add(reason)
                ranks = [rank for rank, each in enumerate(reasons) if each == reason]
                log.get("RaNNCModule").info(
                    "The trace cannot be cached%s: %s. Each start of the job traces again; if forward reads a value "
                    "from outside of the model, read it in __init__, and keep it as an attribute",
                    f" (ranks {ranks})" if len(ranks) < len(reasons) else "",
                    reason,
                )
