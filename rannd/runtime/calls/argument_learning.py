"""Learns, while a model's calls are traced, which of their plain arguments its code reads, and which may be tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rannd.errors import RanndError, StepError, TraceError
from rannd.graph.call.plain_arguments import ArgumentsChanged, PlainArguments, is_number
from rannd.graph.call.signature import Call
from rannd.graph.call.unread import UnreadArgument, noted_reads
from rannd.runtime.comm.world import World

Refusal = Callable[[Sequence[str]], Callable[[], None]]
"""Given the arguments that are read, or none: numbers that cannot be inputs. Returns what stores that."""


class ArgumentLearning:
    """What is known of the plain arguments of one model. All methods are collective.

    A call that cannot be traced is flattened in another way and traced again. Only if that succeeds was it due to the
    arguments: after an error of the model (a bad batch, say), what was learnt from it is forgotten.

    Args:
        world: The ranks.
        refusal: Prepares to store that the call just traced could not be traced as it was flattened.
        inputs: Whether numbers may become inputs: graphs are compared with the model, which would tell a difference.
    """

    def __init__(self, world: World, refusal: Refusal, *, inputs: bool) -> None:
        self.known = PlainArguments()
        self._world = world
        self._refusal = refusal
        self._inputs = inputs
        self._proven: set[str] = set()
        """Numbers that are inputs of a graph."""
        self._one_by_one = False
        """Whether numbers are tried one by one, because several together were no inputs."""
        self._before: tuple[PlainArguments, bool] | None = None
        """What was known before the first failure of the present call."""
        self._refused: list[Callable[[], None]] = []
        """Stores the failures of the present call."""

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Context manager in which a call is flattened and used, perhaps several times."""
        try:
            yield
        except Exception:
            if self._before is not None:
                self.known, self._one_by_one = self._before
            raise
        finally:
            self._before = None
            self._refused.clear()

    def may_be_inputs(self, varying: Mapping[str, tuple[Any, Any]]) -> None:
        """Make inputs of numbers that have changed since another call. ArgumentsChanged if there are any."""
        mine = [
            name
            for name, values in varying.items()
            if self._inputs and name not in self.known.constant and all(map(is_number, values))
        ]
        names = sorted(self._union(mine))
        if names:
            self.known.inputs |= set(names[:1] if self._one_by_one else names)
            raise ArgumentsChanged

    @contextlib.contextmanager
    def noted(self, call: Call) -> Iterator[None]:
        """Context manager in which the model is traced for a call, with errors that all ranks raise.

        ArgumentsChanged if it showed that the call has to be flattened in another way.
        """
        problem: RanndError | None = None
        with noted_reads() as read:
            try:
                yield
            except (TraceError, StepError) as exc:
                problem = exc
        if problem is not None and not read and UnreadArgument.__name__ in str(problem):
            # Native code says so of its class. Objects are tried last, because they are refused if they are read.
            read.update(each.name for each in [each for each in call.unread if each.plain] or call.unread)
        names = self._union(read)
        if names:
            self._failed(sorted(names))
            self.known.read |= names
            raise ArgumentsChanged from problem
        numbers = {call.names[number] for number in call.numbers}
        if problem is None:
            self._proven |= numbers
            for store in self._refused:
                store()
            self._refused.clear()
        elif numbers:
            self._failed(())
            tried = numbers - self._proven or numbers
            self.known.inputs -= tried
            if len(tried) == 1:
                self.known.constant |= tried
            self._one_by_one = True
            raise ArgumentsChanged from problem
        else:
            raise problem

    def _failed(self, read: Sequence[str]) -> None:
        """Note a failure of the present call, before anything is learnt from it."""
        if self._before is None:
            self._before = copy.deepcopy(self.known), self._one_by_one
        self._refused.append(self._refusal(read))

    def _union(self, names: Iterable[str]) -> set[str]:
        told = self._world.gather_bytes(msgspec.msgpack.encode(sorted(names)))
        return {name for data in told for name in msgspec.msgpack.decode(data, type=list[str])}
