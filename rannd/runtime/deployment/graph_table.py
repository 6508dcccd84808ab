"""The graphs of one model that were met so far, and which of them a call runs.

A graph belongs to a signature, to the Python state of the model's modules, and to the branches that its code takes
then. Ranks know the same graphs by the same numbers, because they make and use them in the same order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from rannd import log
from rannd.errors import StepError
from rannd.graph.call.call_diff import difference, of_signature
from rannd.graph.call.signature import Call, Mode, Signature
from rannd.graph.fx.traced import Decisions
from rannd.graph.model import ModelGraph
from rannd.graph.modules.attribute_reads import Mentions
from rannd.graph.modules.guards import Change, PythonState, changed, outside, same_constants, state_of
from rannd.runtime.comm.context import Context
from rannd.runtime.execution.executor import Executor
from rannd.runtime.traces.trace_provider import other_branches

UNKNOWN = -1
IDLE_CHANGES = 3
"""So often an attribute may change for nothing before the user is told what that costs."""
MOST_STATES = 8
"""So many Python states are remembered that lead to one graph."""
MOST_GRAPHS = 64
"""So many graphs are kept; the one that was not used for longest goes."""


@dataclass(frozen=True)
class _Known:
    signature: Signature
    executor: Executor
    ways: list[tuple[PythonState, Decisions | None]]
    """What leads to the graph: Python state of the model's modules, and the branches that its code takes then. The
    latest state comes last."""

    @property
    def graph(self) -> ModelGraph:
        return self.executor.bound.graph


class Graphs:
    """The graphs of one model, by number."""

    def __init__(self, context: Context) -> None:
        self._world = context.world
        self._context = context
        self._known: OrderedDict[int, _Known] = OrderedDict()
        """The latest used comes last."""
        self._made = 0
        self._all: WeakSet[Executor] = WeakSet()
        """Also those that were dropped: a backward may still run through them."""
        self._ignored: set[str] = set()
        """Names of attributes that changed, and that no code reads."""
        self._idle_changes: Counter[str] = Counter()

    def executors(self) -> Iterator[Executor]:
        """All that may still be asked to do something."""
        return iter(self._all)

    def state(self) -> PythonState:
        """The Python state of the model's modules."""
        return state_of(self._context.model, self._ignored)

    def find(self, call: Call, mode: Mode) -> int:
        """The graph for a call, UNKNOWN where it has to be traced."""
        state = self.state()
        for number, known in self._known.items():
            if not known.signature.matches(call, mode):
                continue
            here = outside(state, known.graph.traced.leaf_paths)
            ways = [way for other, way in known.ways if other == here]
            if ways and self._decides(known, ways, call):
                return number
        return UNKNOWN

    def rows(self, number: int, call: Call) -> int:
        """This rank's rows in a call that runs a graph; 0 for UNKNOWN."""
        return 0 if number == UNKNOWN else self._known[number].signature.rows(call.tensors)

    def use(self, number: int) -> Executor:
        """What runs a graph. On all ranks, alike."""
        self._known.move_to_end(number)
        return self._known[number].executor

    def add(self, signature: Signature, executor: Executor, state: PythonState) -> int:
        """Remember a new graph, which `state` leads to; returns its number. On all ranks, alike."""
        traced = executor.bound.graph.traced
        self._made += 1
        number = self._made - 1
        self._known[number] = _Known(signature, executor, [(outside(state, traced.leaf_paths), traced.decisions)])
        self._all.add(executor)
        if len(self._known) > MOST_GRAPHS:
            self._known.popitem(last=False)
        return number

    def clear(self) -> None:
        """Forget all; a backward through one of them is an error from now on."""
        for executor in self._all:
            executor.closed = True
        self._known.clear()
        self._all.clear()

    def common(self, told: Sequence[tuple[int, ...]]) -> int:
        """The graph that all ranks run, from the graph and the rows of each; those without rows follow the others."""
        number = next((each for each, rows in told if rows), told[0][0])
        other = next((rank for rank, (each, rows) in enumerate(told) if each != number and rows), None)
        known = self._known[number]
        alike = all(
            self._known[each].signature == known.signature and _share_a_state(self._known[each], known)
            for each, _ in told
        )
        if not alike:
            calls = [of_signature(self._known[each].signature) for each, _ in told]
            what = difference(calls) or "the Python state of the model's modules is another"
            raise StepError(f"ranks call the model in different ways: {what}; all ranks have to make the same call")
        if other is not None:
            raise StepError(other_branches(other))
        return number

    def twin(self, graph: ModelGraph, state: PythonState) -> int | None:
        """A graph that is the same although the Python state of the modules, or a branch of their code, is another.

        It is the graph of that state as well from now on.
        """
        state = outside(state, graph.traced.leaf_paths)
        for number, known in self._known.items():
            if known.signature != graph.signature or known.graph.task.graph_hash != graph.task.graph_hash:
                continue
            changes = changed(known.ways[-1][0], state)
            if any(each.attribute in ("_buffers", "_parameters") for each in changes):
                return None
            if not same_constants(graph.traced.constants, known.graph.traced.constants, state.held):
                return None
            # What the code decides with numbers in attributes is for the state that it was traced with.
            known.ways[:] = _latest([*known.ways, (state, graph.traced.decisions)])
            self._idle(changes)
            return number
        return None

    def look_again(self) -> None:
        """There may be code that was not there before (a hook): attributes that it reads count again."""
        if self._ignored:
            mentions = Mentions(self._context.model)
            self._ignored = {name for name in self._ignored if name not in mentions}

    def _decides(self, known: _Known, ways: Sequence[Decisions | None], call: Call) -> bool:
        """Whether the model's code takes the branches of this graph for a call; any, where the call has no rows."""
        rows = known.signature.rows(call.tensors)
        if rows in known.graph.traced.holes:
            return False
        if None in ways or rows == 0:
            return True
        tensors = [tensor.to(self._world.device) for tensor in call.tensors]
        return any(way is not None and way.hold(tensors) for way in ways)

    def _idle(self, changes: Sequence[Change]) -> None:
        """Attributes changed without changing the graph. What no code reads is not looked at any more.

        Other changes go on being traced: they may well change the graph another time (`if self.epoch < 6`).
        """
        logger = log.get("RaNNCModule")
        mentions = Mentions(self._context.model)
        unread = [each.unread(mentions) for each in changes]
        names = {name for name in unread if name is not None}
        self._ignored |= names
        for known in self._known.values():
            for state, _ in known.ways:
                state.forget(names)
        if self._world.rank != 0:
            return
        for change, name in zip(changes, unread, strict=True):
            if name is not None:
                logger.info(
                    "Attribute %s changed, and no code of the model reads a %r: it is not looked at any more",
                    change,
                    name,
                )
                continue
            self._idle_changes[str(change)] += 1
            if self._idle_changes[str(change)] == IDLE_CHANGES:
                logger.warning(
                    "Attribute %s changed %d times without changing the graph, but the model was traced each time, "
                    "because its code reads it; pass what changes from call to call as a tensor argument",
                    change,
                    IDLE_CHANGES,
                )


def _share_a_state(one: _Known, other: _Known) -> bool:
    """Whether some Python state of the modules leads to both graphs."""
    return any(state == known for state, _ in one.ways for known, _ in other.ways)


def _latest(ways: Sequence[tuple[PythonState, Decisions | None]]) -> list[tuple[PythonState, Decisions | None]]:
    """The ways of the latest states."""
    states: list[PythonState] = []
    for state, _ in reversed(ways):
        if state not in states:
            states.append(state)
    return [way for way in ways if way[0] in states[:MOST_STATES]]
