"""Replays the forward and the backward of a microbatch in a stage, operator by operator.

Memory of a value begins with the operator that makes it and ends after the last one of the stage that reads it, or, if
it is saved, after the backward of the operators that save it. Gradients of values live from the backward of a reader to
the one of the operator that made them; those of parameters come one by one in the first backward and stay. Values and
gradients that come from other slots are in message buffers, which the replay of the slot counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from rannd.plan.memory.op_bytes import OpBytes, SavedBytes


class Level:
    """Bytes in use, and the most of them until now, relative to when it began."""

    def __init__(self) -> None:
        self.now = self.most = 0.0

    def change(self, size: float) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def beside(self, size: float) -> None:
        """Bytes that are allocated and freed at once."""
        self.most = max(self.most, self.now + size)


Done = Callable[[int, Level], None]
"""Called with a parameter whose gradient is complete in a backward of its stage."""


class StageLives:
    """Lives in one stage.

    Args:
        of: Bytes of operators.
        saved: What they save.
        segments: Operators of each segment, ascending, and whether it recomputes.
        leaving: Values that the stage sends, or that are outputs.
        split: Whether gradients of parameters are delayed to the second half of a backward.
        fresh: Bytes of a new gradient of each parameter, by number.
        summed: Bytes of an accumulated one.
    """

    def __init__(
        self,
        of: OpBytes,
        saved: SavedBytes,
        segments: Sequence[tuple[Sequence[int], bool]],
        leaving: Collection[int],
        *,
        split: bool,
        fresh: Sequence[float],
        summed: Sequence[float],
    ) -> None:
        self.parts = of, saved, segments
        """Operators, what they save, segments."""
        self._of, self._saved, self._segments = self.parts
        self.split, self.fresh, self.summed = split, fresh, summed
        graph = of.graph
        number_of = {op: number for number, (own, _) in enumerate(segments) for op in own}
        made = {value for op in number_of for value in graph.ops[op].outputs}
        read = {value for op in number_of for value in graph.ops[op].inputs}
        self.entering = read - made
        """Values in message buffers, or the rank's own."""
        self._homes_entering = {of.home[value] for value in self.entering}
        self.leaving = set(leaving) & made
        last: dict[int, int] = {}
        for op, number in number_of.items():
            for value in graph.ops[op].inputs:
                last[value] = max(last.get(value, -1), number)
        self._handed = [
            {value for op in own for value in graph.ops[op].outputs if last.get(value, -1) > number}
            for number, (own, _) in enumerate(segments)
        ]
        """Values that each segment hands to later ones."""
        self._sent = [
            {value for op in own for value in graph.ops[op].outputs if value in self.leaving} for own, _ in segments
        ]
        self.params = frozenset(index for op in number_of for index in of.trained(op) if of.differentiable(op))
        """Parameters that get gradients."""
        self._kept = [self._bytes(home for op in own for home in saved.homes[op]) for own, _ in segments]
        self._copies = sum(of.written(op) for op in number_of)
        """Buffers that the stage writes."""

    def _bytes(self, values: Iterable[int]) -> dict[int, float]:
        """Bytes of the memory of values made in this stage, each once."""
        homes = {self._of.home[value] for value in values} - self._homes_entering
        return {home: self._of.whole[home] for home in homes}

    def kept_by(self, number: int) -> dict[int, float]:
        """What a segment saves for its backward, in bytes."""
        return self._kept[number]

    def seeded(self, number: int) -> set[int]:
        """Values whose gradients a segment's backward begins with."""
        return self._handed[number] | self._sent[number]

    def outputs(self, number: int) -> dict[int, float]:
        """The memory of what a segment gives to others, which its backward begins with."""
        return self._bytes(self.seeded(number))

    def handed_before(self, number: int) -> dict[int, float]:
        """The memory of what earlier segments hand over."""
        return self._bytes(value for each in range(number) for value in self.seeded(each))

    def homes(self) -> set[int]:
        """Values in memory from a forward to its backward."""
        found = set(self.handed_before(len(self._segments)))
        for (_, again), kept in zip(self._segments, self._kept, strict=True):
            found |= set() if again else kept.keys()
        return found

    def kept(self) -> float:
        """Bytes from a forward to its backward, but what came in messages."""
        found = self._copies + sum(self._of.whole[home] for home in self.homes())
        for ops, again in self._segments:
            if not again:
                found += sum(self._saved.more[op] for op in ops)
                found += sum(self._saved.excess[number] for number in {self._saved.block_of[op] for op in ops})
        return found

    def forward(self) -> float:
        """Most bytes of a forward, more than before it."""
        level, there = Level(), set[int]()
        level.change(2 * self._copies)  # those that the microbatch writes, and those of before
        for number, (_, again) in enumerate(self._segments):
            there |= self.run(number, level, there, saves=not again)
        return max(level.most, self.kept())

    def run(self, number: int, level: Level, there: Collection[int], *, saves: bool) -> set[int]:
        """Run the forward of a segment; returns the values that it leaves in memory.

        `there`: values that are in memory. `saves`: what its backward needs stays.
        """
        of, saved, graph = self._of, self._saved, self._of.graph
        ops, _ = self._segments[number]
        keep = set(self.outputs(number)) | (self._kept[number].keys() if saves else set())
        ends: dict[int, int] = {}
        for op in ops:
            ends.update((of.home[value], op) for value in (*graph.ops[op].inputs, *graph.ops[op].outputs))
        by_op: dict[int, list[int]] = defaultdict(list)
        for home, op in ends.items():
            by_op[op].append(home)
        left = Counter(saved.block_of[op] for op in ops)
        begun: set[int] = set()
        held: set[int] = set()
        for op in ops:
            block = saved.block_of[op]
            if saves and block not in begun:
                begun.add(block)
                level.change(max(saved.excess[block], 0.0))
            if not of.memory.view[op]:
                for home in {of.home[value] for value in graph.ops[op].outputs} - held - set(there):
                    held.add(home)
                    level.change(of.whole[home])
            level.beside(of.beside(op, backward=False))
            level.change(saved.more[op] if saves else 0.0)
            for home in by_op[op]:
                if home in held and home not in keep:
                    held.remove(home)
                    level.change(-of.whole[home])
            left[block] -= 1
            if saves and not left[block]:
                level.change(min(saved.excess[block], 0.0))
        return held

    def backward(self, present: Collection[int], done: Done | None = None) -> Backward:
        """Replay a backward.

        Args:
            present: Parameters that have a gradient before it.
            done: Called with each parameter whose gradient is complete.
        """
        return Backward(self, present, done)


class Backward:
    """The replay of one backward: `level` has the most bytes, relative to those before it."""

    def __init__(self, stage: StageLives, present: Collection[int], done: Done | None) -> None:
        self._stage, self._done = stage, done
        self._of, self._saved, self._segments = stage.parts
        self.level = Level()
        self.present = set(present)
        """Parameters that have a gradient."""
        self._grads: dict[int, list[int]] = defaultdict(list)
        """Buffers of the gradients of values."""
        self._sizes: list[float] = []
        self._uses: list[int] = []
        """Bytes of each buffer, and how often it is used."""
        self._sums: dict[int, float] = {}
        """Gradients of parameters that other operators of the segment add to."""
        self._waiting: list[tuple[int, set[int], list[int]]] = []
        """Of delayed gradients of parameters: the operator, values and buffers that it holds."""
        self._queued: Counter[int] = Counter()
        self._there = stage.homes()
        """Values that are in memory."""
        self._left = Counter(
            index
            for ops, _ in self._segments
            for op in ops
            for index in self._of.trained(op)
            if self._of.differentiable(op) and not self._delays(op)
        )
        """How many operators still compute a gradient of each parameter."""
        for value in stage.leaving:  # from a message
            if self._of.graded[value]:
                self._grads[value].append(self._buffer(0.0))
        for number in reversed(range(len(self._segments))):
            self._segment(number)
        buffers = {buffer for value in stage.entering for buffer in self._grads.get(value, ())}
        self.outgoing = sum(self._sizes[buffer] for buffer in buffers)
        """Bytes of the gradients that the backward leaves for other stages, or ranks."""
        held = {buffer for _, _, waiting in self._waiting for buffer in waiting} - buffers
        self.waiting = sum(self._of.whole[home] for home in self._queued) + sum(self._sizes[each] for each in held)
        """Bytes that the second half is computed from."""

    def _delays(self, op: int) -> bool:
        return self._stage.split and op in self._of.separable

    def _buffer(self, size: float) -> int:
        self._sizes.append(size)
        self._uses.append(1)
        self.level.change(size)
        return len(self._sizes) - 1

    def _release(self, buffer: int) -> None:
        self._uses[buffer] -= 1
        if not self._uses[buffer]:
            self.level.change(-self._sizes[buffer])

    def _segment(self, number: int) -> None:
        stage, saved = self._stage, self._saved
        ops, again = self._segments[number]
        own, outputs, outlives = stage.kept_by(number), stage.outputs(number), stage.handed_before(number)
        if again:  # its outputs are computed again, and nobody reads the first ones any more
            for home in outputs:
                self._free(home)
            self._there |= stage.run(number, self.level, self._there, saves=True)
        savers = Counter(home for op in ops for home in saved.homes[op] if home in own)
        seeds = [buffer for value in stage.seeded(number) for buffer in self._grads.get(value, ())]
        for buffer in seeds:  # autograd is called with them
            self._uses[buffer] += 1
        left = Counter(saved.block_of[op] for op in ops)
        inner = {block: saved.inner[block] for block in left}
        for op in reversed(ops):
            block = saved.block_of[op]
            if self._of.differentiable(op):
                self._op(op, own)
            for home in saved.homes[op] & own.keys():
                savers[home] -= 1
                if not savers[home] and home not in self._queued and home not in outputs and home not in outlives:
                    self._free(home, block, inner)
            if saved.more[op]:
                self._lose(saved.more[op], block, inner)
            left[block] -= 1
            if not left[block]:
                self.level.change(-max(saved.excess[block], 0.0))
        for home in outputs:
            if home not in self._queued:
                self._free(home)
        for buffer in seeds:
            self._release(buffer)

    def _free(self, home: int, block: int = -1, inner: dict[int, float] | None = None) -> None:
        if home not in self._there:
            return
        self._there.remove(home)
        if inner is not None and home in self._saved.alone[block]:
            self._lose(self._of.whole[home], block, inner)
        else:
            self.level.change(-self._of.whole[home])

    def _lose(self, size: float, block: int, inner: dict[int, float]) -> None:
        """Free what a block saves by name; where it saves less, only what is left below that counts."""
        most = self._saved.inner[block] + min(self._saved.excess[block], 0.0)
        before = min(inner[block], most)
        inner[block] -= size
        self.level.change(min(inner[block], most) - before)

    def _op(self, op: int, own: Collection[int]) -> None:
        of, level = self._of, self.level
        node = of.graph.ops[op]
        given = [buffer for value in node.outputs for buffer in self._grads.pop(value, ())]
        if not given:
            return
        if of.names[op] == "getitem":
            self._grads[node.inputs[0]] += given
            return
        fresh: list[tuple[int, int]] = []
        for value in node.inputs:
            if of.graded[value] and of.passes(op, value) and len(given) == 1:
                self._uses[given[0]] += 1
                fresh.append((value, given[0]))
            elif of.graded[value]:
                fresh.append((value, self._buffer(of.size[value])))
        params = of.trained(op)
        if self._delays(op):
            homes = {of.home[value] for value in node.inputs} & set(own)
            self._queued.update(homes)
            for buffer in given:
                self._uses[buffer] += 1
            self._waiting.append((op, homes, given))
            params = []
        for index in params:
            level.change(self._stage.fresh[index])
        level.beside(of.beside(op, backward=True))
        for buffer in given:
            self._release(buffer)
        for value, buffer in fresh:
            there = self._grads.get(value)
            if there:
                both = self._buffer(of.size[value])
                self._release(there[0])
                self._release(buffer)
                self._grads[value] = [both]
            else:
                self._grads[value] = [buffer]
        for index in params:
            self._arrives(index)

    def _arrives(self, index: int) -> None:
        """A gradient of a parameter was computed: it is added to those of other operators, at last to the sum."""
        size, level = self._stage.fresh[index], self.level
        if index in self._sums:
            level.beside(size)
            level.change(-size)
        self._sums[index] = size
        self._left[index] -= 1
        if not self._left[index]:
            del self._sums[index]
            level.change(-size)
            self._complete(index)

    def _complete(self, index: int) -> None:
        if index not in self.present:
            self.present.add(index)
            self.level.change(self._stage.summed[index])
        if self._done is not None:
            self._done(index, self.level)

    def second_half(self, present: Collection[int], done: Done | None) -> Level:
        """Replay the second half: the delayed gradients of parameters, in the order of the backward."""
        of = self._of
        level = self.level = Level()
        self.present, self._done = set(present), done
        left = Counter(index for op, _, _ in self._waiting for index in of.trained(op))
        for op, homes, buffers in self._waiting:
            for index in of.trained(op):
                if index not in self.present or not of.adds_in_place(op):
                    level.change(self._stage.fresh[index])
            level.beside(of.beside(op, backward=True))
            for index in of.trained(op):
                left[index] -= 1
                if index not in self.present or not of.adds_in_place(op):
                    level.change(-self._stage.fresh[index])
                if index not in self.present:
                    self.present.add(index)
                    level.change(self._stage.summed[index])
            self._queued.subtract(homes)
            for home in homes:
                if not self._queued[home]:
                    level.change(-of.whole[home])
            for buffer in buffers:
                self._release(buffer)
            for index in of.trained(op):
                if not left[index] and done is not None:
                    done(index, level)
        return level
