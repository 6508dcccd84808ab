"""Table of one model's graphs; finds the graph that a call runs.

A graph is valid for a signature, a Python state of the model's modules, and the branches that their code takes. All
ranks use the same numbers for the same graphs, because they add and use them in the same order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from rannd import log
from rannd.errors import StepError
from rannd.graph.call.call_diff import OTHER_CUT, SAME_CALL, SAME_SIZES, difference, leaf_names, of_signature
from rannd.graph.call.signature import Call, Mode, Signature
from rannd.graph.fx.traced import Decisions
from rannd.graph.model import ModelGraph
from rannd.graph.modules.attribute_reads import Mentions
from rannd.graph.python_state.guards import Change, PythonState, changed, outside, same_constants
from rannd.graph.python_state.state_reader import StateReader
from rannd.runtime.comm.context import Context
from rannd.runtime.execution.executor import Executor

UNKNOWN = -1
IDLE_CHANGES = 3
"""Number of retraces because of an attribute that left the graph the same, after which a warning is logged."""
MOST_STATES = 8
"""Maximum number of Python states remembered per graph."""
MOST_GRAPHS = 64
"""Maximum number of graphs, or two for each rank if that is more; the least recently used one is dropped."""


@dataclass(frozen=True)
class _Known:
    signature: Signature
    family: str
    """Equal for signatures that differ in sizes alone."""
    key: str
    """Equal for equal signatures."""
    executor: Executor
    ways: list[tuple[PythonState, Decisions | None]]
    """Python states of the model's modules, with the branches that their code takes, for which the graph is valid. The
    latest state is last."""

    @property
    def graph(self) -> ModelGraph:
        return self.executor.bound.graph


class Graphs:
    """Graphs of one model, by number."""

    def __init__(self, context: Context) -> None:
        self._world = context.world
        self._context = context
        self._known: OrderedDict[int, _Known] = OrderedDict()
        """The most recently used is last."""
        self._alike: dict[int, int] = {}
        """Of each graph that was in one step with others, the number that stands for all that can be."""
        self._most = max(MOST_GRAPHS, 2 * context.world.size)
        self._made = 0
        self._all: WeakSet[Executor] = WeakSet()
        """Includes executors of dropped graphs, because a backward may still run through them."""
        self._reader = StateReader(context.model)
        self._ignored: set[str] = set()
        """Names of attributes that have changed, but that no code reads."""
        self._idle_changes: Counter[str] = Counter()

    def executors(self) -> Iterator[Executor]:
        """Iterate over all executors that may still be used, including those of dropped graphs."""
        return iter(self._all)

    def state(self) -> PythonState:
        """Current Python state of the model's modules."""
        return self._reader.read(self._ignored)

    def find(self, call: Call, mode: Mode) -> int:
        """Number of the graph for a call; UNKNOWN if it has to be traced."""
        state = self.state()
        found = [
            (number, known, ways)
            for number, known in self._known.items()
            if known.signature.matches(call, mode)
            and (ways := [way for other, way in known.ways if other == outside(state, known.graph.traced.leaf_paths)])
        ]
        # Those with the fewest branches first: all ranks can run a graph in which what branches is an operator.
        for number, known, ways in sorted(found, key=lambda each: min(map(_branches, each[2]))):
            if self._decides(known, ways, call):
                return number
        return UNKNOWN

    def rows(self, number: int, call: Call) -> int:
        """Number of this rank's rows in a call of a graph; 0 for UNKNOWN."""
        return 0 if number == UNKNOWN else self._known[number].signature.rows(call.tensors)

    def use(self, numbers: Sequence[int]) -> Executor:
        """Executor of a call; `numbers`: of the graph of each slot's rank.

        Collective where these are several graphs. StepError if their microbatches cannot be in one step.
        """
        known = self._known[numbers[self._world.slot]]
        if len(set(numbers)) == 1:
            return known.executor
        others = [self._known[number].executor for number in numbers]
        if len({self._alike.get(number, number) for number in numbers}) > 1:
            fits = all(known.executor.own.plays_like(each.own) for each in others)
            if not all(told for (told,) in self._world.gather_numbers([int(fits)])):
                by_rank = sorted(zip(self._world.rank_of_slot, numbers, strict=True))
                calls = [of_signature(self._known[number].signature) for _, number in by_rank]
                raise StepError(f"ranks call the model in different ways: {difference(calls)}; {OTHER_CUT}")
            merged = {self._alike.get(number, number) for number in numbers}
            for number in self._known:
                if self._alike.get(number, number) in merged:
                    self._alike[number] = min(merged)
        found = known.executor.beside(others)
        self._all.add(found)
        return found

    def add(self, signature: Signature, executor: Executor, state: PythonState) -> int:
        """Add a graph that is valid for `state`; returns its number. Call it in the same order on all ranks."""
        traced = executor.bound.graph.traced
        self._made += 1
        number = self._made - 1
        ways = [(outside(state, traced.leaf_paths), traced.decisions)]
        self._known[number] = _Known(signature, signature.family(), signature.key(), executor, ways)
        self._all.add(executor)
        if len(self._known) > self._most:
            dropped, _ = self._known.popitem(last=False)
            self._alike.pop(dropped, None)
        return number

    def clear(self) -> None:
        """Remove all graphs; a later backward through one of them raises StepError."""
        for executor in self._all:
            executor.closed = True
        self._known.clear()
        self._alike.clear()
        self._all.clear()

    def common(self, told: Sequence[tuple[int, ...]], *, sizes: bool = False) -> tuple[int, ...] | None:
        """Number of the graph that each rank runs, given (graph, rows) of each rank.

        Ranks without rows follow the rest. The graph is the same on all ranks; with `sizes` it may be one for the sizes
        of each rank's call. None if ranks take different branches; StepError if they make different calls. The graphs
        become the most recently used ones.
        """
        self.note_use([each for each, _ in told])
        number = next((each for each, rows in told if rows), told[0][0])
        other = next((rank for rank, (each, rows) in enumerate(told) if each != number and rows), None)
        known = self._known[number]
        several = {each: self._known[each] for each, _ in told}.values()
        of_sizes = len({each.family for each in several}) == 1 and len({each.key for each in several}) > 1
        if sizes and of_sizes and all(_share_a_state(self._known[each], known) for each, _ in told):
            return tuple(each for each, _ in told)
        alike = all(
            self._known[each].signature == known.signature and _share_a_state(self._known[each], known)
            for each, _ in told
        )
        if not alike:
            calls = [of_signature(self._known[each].signature) for each, _ in told]
            what = difference(calls) or "the Python state of the model's modules differs"
            raise StepError(f"ranks call the model in different ways: {what}; {SAME_SIZES if of_sizes else SAME_CALL}")
        return (number,) * len(told) if other is None else None

    def note_use(self, numbers: Sequence[int]) -> None:
        """Make graphs the most recently used ones; UNKNOWN is none. Call it with the same numbers on all ranks."""
        for number in dict.fromkeys(numbers):
            if number != UNKNOWN:
                self._known.move_to_end(number)

    def twin(self, graph: ModelGraph, state: PythonState) -> int | None:
        """Find a known graph equal to `graph`, although the modules' Python state or branches differ.

        It becomes valid for `state` as well. None if there is no such graph.
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
            # Branches may depend on numbers in attributes, so decisions are valid only for the state of their trace.
            known.ways[:] = _latest([*known.ways, (state, graph.traced.decisions)])
            self._ignore_unread(changes)
            return number
        return None

    def varying(self, call: Call, mode: Mode) -> dict[str, tuple[Any, Any]]:
        """Name, former and present value of the plain arguments in which a call differs from the call of a graph.

        Of the graph whose call is most like it, if they differ in nothing else but sizes; {} if there is none.
        """
        found: list[dict[str, tuple[Any, Any]]] = []
        for known in reversed(self._known.values()):
            there = known.signature
            if (there.spec, there.positions, there.mode, there.numbers) != (
                call.spec,
                call.positions,
                mode,
                call.numbers,
            ):
                continue
            names = leaf_names(call.spec)
            pairs = zip(call.constants, there.constants, strict=True)
            found.append(
                {names[place]: (old, new) for (place, new), (_, old) in pairs if (type(old), old) != (type(new), new)}
            )
        return min(found, key=len, default={})

    def changed_attributes(self, graph: ModelGraph, state: PythonState) -> list[Change]:
        """Attributes that differ from those of the graph that is most like this one, in the latest state of that."""
        found = [
            changed(known.ways[-1][0], outside(state, known.graph.traced.leaf_paths))
            for known in self._known.values()
            if known.signature == graph.signature
        ]
        return min(found, key=len, default=[])

    def look_again(self) -> None:
        """Stop ignoring attributes that new code, such as a hook, reads."""
        if self._ignored:
            mentions = Mentions(self._context.model)
            self._ignored = {name for name in self._ignored if name not in mentions}

    def _decides(self, known: _Known, ways: Sequence[Decisions | None], call: Call) -> bool:
        """Whether the model's code takes the branches of this graph in a call; True for a call without rows."""
        rows = known.signature.rows(call.tensors)
        if rows in known.graph.traced.holes:
            return False
        if None in ways or rows == 0:
            return True
        tensors = [tensor.to(self._world.device) for tensor in call.tensors]
        return any(way is not None and way.hold(tensors) for way in ways)

    def _ignore_unread(self, changes: Sequence[Change]) -> None:
        """Handle attributes that changed without changing the graph: ignore those that no code reads.

        Changes of other attributes are still traced, because they may change the graph later (`if self.epoch < 6`).
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
                    "Attribute %s changed, but no code of the model reads an attribute %r: later changes are ignored",
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


def _branches(way: Decisions | None) -> int:
    """Number of branches that a graph has decided."""
    return 0 if way is None else len(way.values)


def _share_a_state(one: _Known, other: _Known) -> bool:
    """Whether both graphs are valid for a common Python state of the modules."""
    return any(state == known for state, _ in one.ways for known, _ in other.ways)


def _latest(ways: Sequence[tuple[PythonState, Decisions | None]]) -> list[tuple[PythonState, Decisions | None]]:
    """Entries of the latest states."""
    states: list[PythonState] = []
    for state, _ in reversed(ways):
        if state not in states:
            states.append(state)
    return [way for way in ways if way[0] in states[:MOST_STATES]]
