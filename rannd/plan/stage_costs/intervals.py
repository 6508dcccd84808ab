"""Sums over all runs of consecutive blocks: what a stage of blocks i to j-1 reads, sends and keeps.

Every table is indexed ``[..., i, j]`` for ``0 <= i < j <= n`` (n blocks); other entries are zero. Sizes that grow with
the batch are polynomials of a microbatch's rows, ``[power, i, j]``, evaluated by :func:`at`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rannd.errors import PlanError
from rannd.graph.fx.ir import Size, TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.plan_options import PlanOptions
from rannd.plan.precision import state_weights
from rannd.plan.zero import Trained, WholeBytes
from rannd.profile.costs import BlockCost
from rannd.profile.delayed_gradients import delayed_bytes, separable
from rannd.profile.kept_values import Memory

Table = npt.NDArray[np.float64]
_Any = TypeVar("_Any", bound=np.generic)


def at(table: Table, rows: npt.ArrayLike) -> Table:
    """Evaluate a polynomial table for microbatches of `rows` rows, clamped at 0.

    `rows`: a number, or numbers ``[.., 1, 1]``, for a table ``[.., i, j]``.
    """
    rows = np.asarray(rows)
    result: Table = np.maximum(table[0] + rows * (table[1] + rows * table[2]), 0.0)
    return result


class Runs(NamedTuple):
    """Runs of blocks."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    """Of both in a flat table."""

    @staticmethod
    def of(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], blocks: int) -> Runs:
        """Return runs of so many blocks with these first blocks and ends."""
        return Runs(starts, ends, starts * (blocks + 1) + ends)


def of_runs(table: npt.NDArray[_Any], runs: Runs, *, behind: int = 0) -> npt.NDArray[_Any]:
    """Return ``table[.., i, j]`` for first blocks i and ends j, in a third of the time of numpy's indexing.

    `behind`: so many axes come after these two.
    """
    axis = table.ndim - behind - 2
    flat = (*table.shape[:axis], -1, *table.shape[axis + 2 :])
    found: npt.NDArray[_Any] = table.reshape(flat).take(runs.places, axis=axis)
    return found


def _largest_two(each: Table) -> Table:
    """Return the maximum over pairs of neighbours of their sum, up to each place; of the first alone, its own."""
    result: Table = np.maximum.accumulate(np.concatenate([each[:1], each[:-1] + each[1:]]))
    return result


class Intervals:
    """Tables of one graph, its blocks and their costs. Bytes and microseconds."""

    def __init__(
        self,
        graph: TaskGraph,
        blocks: Sequence[Block],
        costs: Sequence[BlockCost],
        options: PlanOptions | None = None,
    ) -> None:
        """PlanError if `costs` are not those of `blocks`. `options` say what gradients and optimizer state take."""
        if len(blocks) != len(costs):
            raise PlanError(f"costs of {len(costs)} blocks for a model of {len(blocks)}; profile these blocks again")
        self.count = len(blocks)
        self._graph, self._blocks = graph, blocks
        block_of = {op: index for index, block in enumerate(blocks) for op in block.ops}
        if sorted(block_of) != list(range(len(graph.ops))):
            raise PlanError(f"blocks hold {len(block_of)} of {len(graph.ops)} ops; make blocks of this graph")

        self._inside = np.triu(np.ones((self.count + 1,) * 2, dtype=bool), 1)
        """``[i, j]``: whether there is such a run."""
        self.runs = Runs.of(*np.triu_indices(self.count + 1, 1), self.count)
        """First blocks and ends of all runs, those of the same first block one after the other."""
        each = [(cost.forward_us, cost.backward_us, cost.weight_us, cost.activation_bytes) for cost in costs]
        self.forward, self.backward, self.weight, activation = self._sums(zip(*each, strict=True))
        ((self.adding, *_),) = self._sums([[Size(cost.add_us) for cost in costs]])
        """Time to accumulate a microbatch's parameter gradients."""
        ops, values = graph.ops, graph.values
        made = [{Size(), *(values[each].bytes for op in block.ops for each in ops[op].outputs)} for block in blocks]
        self._made = np.array([(size.c0, size.c1, size.c2) for sizes in made for size in sizes])
        """``[value, power]``: sizes of the different values that blocks compute, block by block,"""
        self._first_made = np.cumsum([0, *map(len, made[:-1])])
        """and the first of each block."""
        self._values(graph, block_of)
        self._params(graph, block_of, options or PlanOptions())
        self.activation = activation - self._twice(graph, block_of, costs)
        """Kept from forward to backward; what is also received, sent, an input, or kept by two blocks counts once."""

    @cached_property
    def delayed(self) -> Table:
        """Bytes that delayed gradients of parameters are computed from; asked for by few schedules."""
        memory, delayed = Memory(self._graph), separable(self._graph)
        found: Table = self._sums([[delayed_bytes(memory, block.ops, delayed) for block in self._blocks]])[0]
        return found

    def largest(self, rows: npt.ArrayLike) -> Table:
        """Return the bytes of the largest value that each run computes, for microbatches of `rows` rows (see `at`)."""
        sizes = at(self._made.T[:, None], rows)[..., 0, :]
        return self.largest_of(np.maximum.reduceat(sizes, self._first_made, axis=-1))

    def handed(self, start: int, end: int, rows: float) -> Table:
        """Return the bytes that parts of a run hand to later parts of it: ``[i, j]``, blocks counted from `start`."""
        count = end - start
        found = np.zeros((count + 1, count + 1))
        for home, readers, size in self._handed:
            last = max((reader for reader in readers if reader < end), default=-1)
            if start <= home and last >= 0:
                found[: home - start + 1, home - start + 1 : last - start + 1] += size.at(rows)
        return found

    def handed_apart(self, rows: float, least: float) -> tuple[Table, Table, Table]:
        """Divide what blocks of a run hand to later ones of it into small and large values, of `least` bytes or more.

        Returns ``[i, j]``: bytes of small values, each once; of large values, once for each block that reads one; of
        the two neighbouring blocks that read most large values.
        """
        small, read = (np.zeros((self.count + 1, self.count + 1)) for _ in range(2))
        by_reader = np.zeros(self.count)
        for home, readers, size in self._handed:
            found = size.at(rows)
            if found < least:
                small[: home + 1, readers[0] + 1 :] += found
            for reader in readers if found >= least else ():
                read[: home + 1, reader + 1 :] += found
                by_reader[reader] += found
        return small, read, self._largest_two_of(by_reader)

    def largest_of(self, each: Table) -> Table:
        """Return the maximum over each run of one number per block: ``[.., i, j]`` for ``[.., block]``."""
        return self._over_runs(np.maximum, each[..., None, :])

    def _largest_two_of(self, each: Table) -> Table:
        """Return the maximum over each run of `_largest_two`: ``[i, j]`` for ``[block]``."""
        before = np.concatenate([[0.0], each[:-1]])
        return self._over_runs(np.maximum, each + np.triu(np.tile(before, (self.count, 1)), 1))

    def _over_runs(self, what: np.ufunc, each: Table) -> Table:
        """Return the maximum, or the sum, over each run: ``[.., i, j]`` for ``[.., i, block]``, or one for all i."""
        found, runs = np.zeros((*each.shape[:-2], self.count + 1, self.count + 1)), self._inside[:-1, 1:]
        each = np.where(runs, each, 0.0)
        found[..., :-1, 1:] = np.where(runs, what.accumulate(each, axis=-1), 0.0)
        return found

    def _zeros(self) -> Table:
        return np.zeros((3, self.count + 1, self.count + 1))

    def _sums(self, each: Iterable[Sequence[Size]]) -> Table:
        """Return the sums over each run of some sizes, of which each block has one: ``[which, power, i, j]``."""
        sizes = np.array([[(size.c0, size.c1, size.c2) for size in of_blocks] for of_blocks in each])
        ends = np.zeros((len(sizes), 3, self.count + 1))
        ends[..., 1:] = np.moveaxis(np.cumsum(sizes, axis=1), 1, 2)
        return np.where(self._inside, ends[..., None, :] - ends[..., :, None], 0.0)

    def _values(self, graph: TaskGraph, block_of: dict[int, int]) -> None:
        homes = [block_of[value.producer] if value.producer >= 0 else -1 for value in graph.values]
        readers: dict[int, set[int]] = defaultdict(set)
        for index, op in enumerate(graph.ops):
            for read in op.inputs:
                if homes[read] < block_of[index]:
                    readers[read].add(block_of[index])

        self.received = self._zeros()
        """Values of earlier stages that the run reads; each once."""
        self.sent = self._zeros()
        """Values of the run that later stages read; each once."""
        self.sent_grad = self._zeros()
        """Those of `sent` that get gradients, which the run receives in the backward."""
        self.inner = self._zeros()
        """Values of the run that its own later blocks read; each once."""
        self._handed: list[tuple[int, list[int], Size]] = []
        """Block that makes such a value, later blocks that read it, bytes."""
        self.given = self._zeros()
        """Inputs of the model that the run reads."""
        outputs = [Size()] * self.count
        outputs_grad = [Size()] * self.count
        self.inputs_grad = np.zeros(3)
        """All inputs of the model whose gradients go back to the ranks: one polynomial."""
        for home, value in zip(homes, graph.values, strict=True):
            if value.is_output and home >= 0:
                outputs[home] += value.bytes
                if value.requires_grad:
                    outputs_grad[home] += value.bytes
        for index in sorted(readers):
            value, home, behind = graph.values[index], homes[index], sorted(readers[index])
            size = np.array([value.bytes.c0, value.bytes.c1, value.bytes.c2])[:, None, None]
            if home < 0:
                self._add_read(self.given, size, -1, behind)
                if value.requires_grad:
                    self.inputs_grad += size[:, 0, 0]
                continue
            self._add_read(self.received, size, home, behind)
            self.inner[:, : home + 1, behind[0] + 1 :] += size
            self._handed.append((home, behind, value.bytes))
            sent = self.sent_grad if value.requires_grad else self.sent
            sent[:, : home + 1, home + 1 : behind[-1] + 1] += size
        self.sent += self.sent_grad
        self.output, self.output_grad = self._sums([outputs, outputs_grad])
        """Outputs of the model that the run computes; those of them that get gradients."""

    def _twice(self, graph: TaskGraph, block_of: dict[int, int], costs: Sequence[BlockCost]) -> Table:
        """Return the bytes of kept values that are counted elsewhere, too, or in another block of the run."""
        keepers: dict[int, list[int]] = defaultdict(list)
        for block, cost in enumerate(costs):
            for value in cost.kept:
                keepers[value].append(block)
        last: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            for read in op.inputs:
                last[read] = max(last.get(read, 0), block_of[index])
        starts, ends = np.ogrid[: self.count + 1, : self.count + 1]
        found = self._zeros()
        for kept, blocks in keepers.items():
            made = graph.values[kept]
            home = block_of[made.producer] if made.producer >= 0 else -1
            behind = max(last.get(kept, 0), *blocks)
            if blocks == [home] and behind == home and not made.is_output:
                continue
            before = np.concatenate([[0], np.cumsum(np.bincount(blocks, minlength=self.count))])
            times = np.where(ends > starts, before[None, :] - before[:, None], 0)
            alone = (starts <= home) & (home < ends) & (ends > behind) & (not made.is_output)
            more = np.maximum(times - alone, 0)
            for power, part in enumerate((made.bytes.c0, made.bytes.c1, made.bytes.c2)):
                if part:
                    found[power] += part * more
        return found

    def _add_read(self, table: Table, size: Table, home: int, readers: Sequence[int]) -> None:
        """Add `size` to every run after block `home` that contains one of the `readers`, which are later blocks."""
        for before, first in pairwise([home, *readers]):
            table[:, before + 1 : first + 1, first + 1 :] += size

    def joined(self, start: int, end: int, most: float) -> tuple[int, ...]:
        """Return where runs of neighbouring blocks with `most` bytes of gradients end, counted from `start`.

        Each run has a block at least. What several blocks read counts in the last of them.
        """
        found, size = [], 0.0
        last = self._own[1].copy()
        for group, sizes in self._tied.items():
            last[group[-1]] += sizes[1]
        for block in range(start, end):
            if block > start and size + last[block] > most:
                found.append(block - start)
                size = 0.0
            size += float(last[block])
        return (*found, end - start)

    def units_of(self, start: int, ends: Sequence[int]) -> WholeBytes:
        """Return what replicas have as a whole at a time if runs of blocks are segments; each an array of one entry.

        Args:
            start: First block.
            ends: Blocks before the end of each segment, counted from `start`.
        """
        end = start + ends[-1]
        segment_of = np.searchsorted(ends, np.arange(end - start), side="right")
        each = np.array([np.bincount(segment_of, weights=sizes) for sizes in self._own[:, start:end]])
        tied_grads = 0.0
        for group, (param, grad) in self._tied.items():
            if start <= group[0] and group[-1] < end:
                homes = np.unique(segment_of[np.array(group) - start])
                each[0, homes] += param
                if len(homes) == 1:
                    each[1, homes] += grad
                else:
                    tied_grads += grad
        (params, grads), (two_params, two_grads) = each.max(axis=1), (_largest_two(one)[-1] for one in each)
        return WholeBytes(*(np.array([size]) for size in (params, two_params, grads, two_grads, tied_grads)))

    def _units(self) -> WholeBytes:
        """Return what replicas have as a whole at a time if each block is a segment.

        Parameters that several blocks of a run read count if no block outside of it does: others are not divided.
        """
        own, tied = self._own, self._tied
        whole = np.stack([self.largest_of(own[0]), self._largest_two_of(own[0])])
        tied_grads = np.zeros_like(whole[0])
        ordered = sorted(tied, key=lambda group: group[-1])
        for start in range(1 + max((group[0] for group in tied), default=-1)):
            # Of the runs from here, longer ones have all readers of more parameters.
            each, known = own[0].copy(), start + 1
            for group in (*(group for group in ordered if group[0] >= start), None):
                until = self.count + 1 if group is None else group[-1] + 1
                whole[0, start, known:until] = np.maximum.accumulate(each[start:])[
                    known - start - 1 : until - start - 1
                ]
                whole[1, start, known:until] = _largest_two(each[start:])[known - start - 1 : until - start - 1]
                if group is not None:
                    each[list(group)] += tied[group][0]
                    tied_grads[start, until:] += tied[group][1]
                    known = until
        return WholeBytes(whole[0], whole[1], self.largest_of(own[1]), self._largest_two_of(own[1]), tied_grads)

    def _params(self, graph: TaskGraph, block_of: dict[int, int], options: PlanOptions) -> None:
        readers: dict[int, set[int]] = defaultdict(set)
        for index, op in enumerate(graph.ops):
            for read in op.params:
                readers[read].add(block_of[index])
        self.params = np.zeros((self.count + 1, self.count + 1))
        """Parameters and buffers that the run reads, each once; a run from block 0 also keeps the unused ones."""
        trained = np.zeros((2, 4, *self.params.shape))
        """Of parameters, of what is reduced, gradients and optimizer state; what blocks outside the run read, too."""
        sizes: dict[tuple[tuple[int, ...], bool, int], int] = defaultdict(int)
        for index, blocks in readers.items():
            param = graph.params[index]
            several = tuple(blocks) if len(blocks) == 1 else tuple(sorted(blocks))
            sizes[several, param.trainable, param.itemsize] += param.bytes
        own = np.zeros((5, self.count))
        """What one block reads alone: all, and of trainable ones the four sizes of `trained`."""
        self._own = own[1:3]
        """Bytes of parameters that one block reads alone, and of their gradients as they are reduced."""
        self._tied: dict[tuple[int, ...], Table] = defaultdict(lambda: np.zeros(2))
        """The same of parameters that several blocks read, by these."""
        weights = {itemsize: np.array([1.0, *state_weights(itemsize, options)]) for _, _, itemsize in sizes}
        alone: dict[tuple[bool, int], list[float]] = defaultdict(lambda: [0.0] * self.count)
        for (ordered, trainable, itemsize), size in sizes.items():
            if len(ordered) == 1:
                alone[trainable, itemsize][ordered[0]] += size
                continue
            weighted = size * weights[itemsize]
            if trainable:
                self._tied[ordered] += weighted[:2]
            for before, first in pairwise([-1, *ordered]):  # the first block of these runs that reads them
                starts = slice(before + 1, first + 1)
                self.params[starts, first + 1 :] += size
                if trainable:
                    trained[0, :, starts, first + 1 :] += weighted[:, None, None]
                    whole_from = ordered[-1] + 1 if before < 0 else self.count + 1
                    if whole_from > first + 1:
                        trained[1, :, starts, first + 1 : whole_from] += weighted[:, None, None]
        for (trainable, itemsize), each in alone.items():
            own[0] += each
            if trainable:
                own[1:] += weights[itemsize][:, None] * np.array(each)
        together = self._over_runs(np.add, own[:, None])
        self.params += together[0]
        trained[0] += together[1:]
        self.trainable, self.reduced, self.gradients, self.optimizer = map(Trained, *trained)
        """Bytes of trainable parameters, of what is reduced of them, of their gradients and optimizer state."""
        self.units = self._units()
        """What replicas that divide parameters have as a whole at a time, if each block is a segment."""
        self.params[0, 1:] += sum(graph.params[index].bytes for index in graph.unused_params)
