"""Measures time and memory of parts of a graph on the real device.

A part runs alone, with synthetic parameters and inputs of the right shapes, for several row counts. Integer inputs of
the model are taken from the first mini-batch, because they have to be valid indices. The state of the user's model and
the random number generators stay unchanged.

The time for parameter gradients that a schedule may delay is what a backward takes less if it only queues them, as the
runtime does it (rannd.graph.weight_gradients). A stage that recomputes activations runs this same forward in its
backward. If memory runs out, fewer rows are measured, and the failing row count becomes a bound for the planner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from rannd.device import caches, timing
from rannd.device.generators import kept_generators
from rannd.device.identity import is_accelerator
from rannd.device.memory import release_unused
from rannd.device.timing import Sample, Stamp, spans
from rannd.errors import ProfileError
from rannd.graph.fx.ir import Size
from rannd.graph.partition.cut import Part, crossing_shape
from rannd.graph.partition.failing_op import failing_op
from rannd.graph.weight_gradients.separation import separate
from rannd.graph.weight_gradients.weight_queue import WeightQueue
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.profile.points import Measured, Point
from rannd.profile.samples import RowSamples, Turn

Meet: TypeAlias = Callable[[], None]
"""Waits for the ranks that measure the same at the same moment."""


class ProfileInputs:
    """Inputs for measuring parts: real rows of the arguments, synthetic values for all else."""

    def __init__(
        self,
        arguments: Mapping[Node, tuple[torch.Tensor, bool]],
        gradients: frozenset[Node],
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        runner: Callable[[Part, int], Callable[..., Sequence[Any]]] | None = None,
        *,
        touched: Size | None = None,
    ) -> None:
        self.arguments = arguments
        """Each argument of the graph, and whether dimension 0 is the batch."""
        self.gradients = gradients
        self.state = state
        """Every parameter, buffer and constant; only shape, dtype and requires_grad are used."""
        self.device = device
        self.around = around
        """Context manager to run parts in: undoes changes that the user's own code makes to the model."""
        self._touched = touched
        """Bytes that a step reads and writes, by rows; None: more than any cache has."""
        self._there: dict[tuple[Node, int], torch.Tensor] = {}
        """Rows of arguments on an accelerator: copying them there again would make the host wait for it."""
        self._runner = runner
        """Returns what runs a part with a number of rows, in place of its module: compiled code."""

    def evict(self, rows: int) -> None:
        """Drive out of the caches what a step with so many rows would."""
        caches.evict(self.device, small=self._touched is not None and self._touched.at(rows) < caches.LEAST / 2)

    @property
    def compiles(self) -> bool:
        """Whether compiled code runs, whose backward does not come in two halves."""
        return self._runner is not None

    def run(self, part: Part, rows: int, arguments: Iterable[torch.Tensor]) -> Sequence[Any]:
        """Run the forward of a part: the only place in which one is called to be measured."""
        module = part.module if self._runner is None else self._runner(part, rows)
        return module(*arguments, *part.numbers_at(rows))

    def value(self, node: Node, rows: int) -> torch.Tensor:
        """Return a value for `node` in a microbatch of `rows` rows."""
        if (node, rows) in self._there:
            return self._there[node, rows].clone()
        traced = node.meta["val"]
        shape = crossing_shape(node, rows)
        if node in self.arguments:
            tensor, batch = self.arguments[node]
            if not traced.is_floating_point() and not traced.is_complex():
                if batch and tensor.shape[0]:
                    tensor = tensor[torch.arange(rows, device=tensor.device) % tensor.shape[0]]
                if tuple(tensor.shape) == shape:
                    there = tensor.detach().to(self.device)
                    if is_accelerator(self.device):
                        self._there[node, rows] = there.clone()
                    return there
        return _synthetic(shape, traced.dtype, self.device).requires_grad_(node in self.gradients)


NUMBERS = 1 << 14
"""Number of random numbers that synthetic values repeat."""
_numbers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

FEWEST_RUNS = 2
"""Minimum of runs in a turn. Parts that have more are so short that it matters whether their code is in caches."""

_ZEROED = {
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}


class ProfiledPart:
    """A part that is measured several times. Modifies the part.

    Args:
        part: The part to run.
        sample: Inputs and parameters for it.
        crossing: Names of values that cross the part's border; the measurement says which of them autograd saves.
    """

    def __init__(self, part: Part, sample: ProfileInputs, crossing: Sequence[str] = ()) -> None:
        _zero_indices(part)
        self._part, self._sample, self._crossing = part, sample, crossing
        parameters = {name for name in part.tensors if _is_parameter(sample, name)}
        self._halves = None if sample.compiles else separate(part, parameters)

    def first(self, rows: Sequence[int]) -> Measured:
        """Measure activation bytes for each row count, and times once, which tell how long a turn will take.

        If memory runs out, fewer rows are tried, and the result says how many are too many.

        Args:
            rows: Row counts, ascending.

        Raises:
            ProfileError: The part does not run, or runs out of memory even with one row.
        """
        part, sample = self._part, self._sample
        found: dict[int, Point] = {}
        kept: set[str] = set()
        waiting, too_many = list(rows), 0
        error: ProfileError | None = None
        with kept_generators([sample.device]), sample.around():
            tensors = _InTurns([self._tensors()])
            while waiting:
                count = waiting.pop(0)
                try:
                    activations, kept = _kept(part, sample, tensors.next(), count)
                    forward, backward = self._runs(tensors, count, 1)
                    found[count] = Point(count, forward[0].us, sum(each.us for each in backward), 0.0, activations)
                except Exception as exc:
                    if not is_out_of_memory(exc):
                        if error is not None:
                            break  # some models do not take fewer rows: BatchNorm needs two
                        raise _cannot(part, sample, tensors.next(), count, exc) from exc
                    error, too_many = _cannot(part, sample, tensors.next(), count, exc), count
                if too_many:
                    # Halve the distance down to a row count that ran, or to one row, until the bound is within a factor
                    # of two.
                    free = max((count for count in found if count < too_many), default=0)
                    waiting = [max(too_many // 2, 1)] if too_many // 2 > free else []
                    release_unused(sample.device)
        if error is not None and not found:
            raise error
        places = tuple(place for place, name in enumerate(self._crossing) if name in kept)
        return Measured(tuple(found[count] for count in sorted(found)), too_many, places)

    def turn(self, runs: Mapping[int, int], meet: Meet) -> Turn:
        """Measure times, by number of rows. What runs out of memory, due to something else, has no samples.

        Args:
            runs: How often to run each row count; the same on all ranks.
            meet: Called the same number of times on all ranks, whatever happens.

        Raises:
            ProfileError: The part does not run.
        """
        part, sample, halves = self._part, self._sample, self._halves
        found: dict[int, RowSamples] = {}
        adding: tuple[Sample, ...] = ()
        start = time.perf_counter()
        with kept_generators([sample.device]), sample.around():
            tensors = self._copies()
            for count, repeats in runs.items():
                with _Meetings(meet, sample.device, repeats + (ceil(repeats / 2) if halves else 0)) as met:
                    try:
                        forward, backward = self._runs(tensors, count, repeats, met, short=repeats > FEWEST_RUNS)
                        half: tuple[Sample, ...] = ()
                        if backward and halves:
                            half = self._first_half(tensors, count, ceil(repeats / 2), met, short=repeats > FEWEST_RUNS)
                    except Exception as exc:
                        if not is_out_of_memory(exc):
                            raise _cannot(part, sample, tensors.next(), count, exc) from exc
                        release_unused(sample.device)
                        continue
                found[count] = RowSamples(forward, backward, half)
            meet()
            adding = _adding(tensors.next().values(), sample.device, lambda: sample.evict(max(runs)))
        return Turn(found, adding, time.perf_counter() - start)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Synthetic tensors of the part, by name."""
        sample, found = self._sample, {}
        for name in self._part.tensors:
            like = sample.state[name]
            tensor = _synthetic(tuple(like.shape), like.dtype, sample.device)
            # Compiled code distinguishes parameters.
            tensor = torch.nn.Parameter(tensor, False) if _is_parameter(sample, name) else tensor
            found[name] = tensor.requires_grad_(like.requires_grad)
        return found

    def _copies(self) -> _InTurns:
        """Tensors for runs: two copies, as one run prepares another one, unless they are larger than caches."""
        every = [self._tensors()]
        if not is_accelerator(self._sample.device) and sum(each.nbytes for each in every[0].values()) < caches.LEAST:
            every.append(self._tensors())
        return _InTurns(every)

    def _runs(
        self, tensors: _InTurns, rows: int, repeats: int, met: Meet = lambda: None, *, short: bool = False
    ) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
        """Times of forwards, and of their backwards; () if there is none."""
        part, sample = self._part, self._sample

        def run(stamp: Stamp) -> None:
            held = self._prepare(tensors, rows, met, short=short)
            inputs, own = [sample.value(node, rows) for node in part.inputs], tensors.next()
            stamp()
            roots = _forward(part, sample, inputs, own, rows)
            stamp()
            if not roots:
                return
            seeds = [torch.ones_like(root) for root in roots]  # in a job they come from the next part
            stamp()
            torch.autograd.backward(roots, seeds)
            stamp()
            del held

        forward, *backward = spans(sample.device, run, repeats)
        tensors.release()
        return tuple(forward), tuple(backward[0]) if backward else ()

    def _first_half(self, tensors: _InTurns, rows: int, repeats: int, met: Meet, *, short: bool) -> tuple[Sample, ...]:
        """Times of backwards that leave what can be delayed; () if there is nothing to delay."""
        part, sample, halves = self._part, self._sample, self._halves
        assert halves is not None
        delayed = 0

        def first_half(stamp: Stamp) -> None:
            nonlocal delayed
            queue = WeightQueue()
            held = self._prepare(tensors, rows, met, short=short)
            inputs, own = [sample.value(node, rows) for node in part.inputs], tensors.next()
            with _any_writes(), torch.enable_grad():
                outputs = halves.module(*inputs, *own.values(), *part.numbers_at(rows), queue)
            roots = _differentiable(outputs)
            seeds = [torch.ones_like(root) for root in roots]
            stamp()
            torch.autograd.backward(roots, seeds)
            stamp()
            delayed = len(queue)  # none of frozen parameters
            del held

        (found,) = spans(sample.device, first_half, repeats)
        tensors.release()
        return tuple(found) if delayed else ()

    def _prepare(self, tensors: _InTurns, rows: int, met: Meet, *, short: bool) -> object:
        """Bring caches into the state in which they are in a step, and meet the other ranks.

        What a run reads and writes is not there, as other parts ran since: caches are driven out. But its code is, as
        other parts have run the same. A short run is therefore prepared by another one, in other memory, which stays
        taken as long as what is returned lives.
        """
        part, sample = self._part, self._sample
        sample.evict(rows)
        met()
        if not short or is_accelerator(sample.device):
            return None
        inputs = [sample.value(node, rows) for node in part.inputs]
        roots = _forward(part, sample, inputs, tensors.next(), rows)
        if roots:
            again = not sample.compiles  # compiled code gives its memory away, and cannot
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots], retain_graph=again)
        return inputs, roots


class _InTurns:
    """Copies of a part's tensors, for runs in turns. Gradients stay until a copy's next turn, or `release`."""

    def __init__(self, every: Sequence[dict[str, torch.Tensor]]) -> None:
        self._every, self._place = every, 0

    def next(self) -> dict[str, torch.Tensor]:
        self._place = (self._place + 1) % len(self._every)
        found = self._every[self._place]
        for tensor in found.values():
            if not tensor.is_leaf:
                tensor.detach_()  # a buffer that a run has written a value with a gradient into
            tensor.grad = None
        return found

    def release(self) -> None:
        for _ in self._every:
            self.next()


class _Meetings:
    """Meets other ranks as often as announced: also where memory runs out on this one.

    On an accelerator they meet once, as runs are issued without waiting.
    """

    def __init__(self, meet: Meet, device: torch.device, count: int) -> None:
        self._meet, self._left = meet, count
        if is_accelerator(device):
            meet()
            self._left = 0

    def __enter__(self) -> Meet:
        return self

    def __call__(self) -> None:
        if self._left:
            self._left -= 1
            self._meet()

    def __exit__(self, *_: object) -> None:
        while self._left:
            self()


def _is_parameter(sample: ProfileInputs, name: str) -> bool:
    return isinstance(sample.state[name], torch.nn.Parameter)


def _cannot(
    part: Part, sample: ProfileInputs, tensors: Mapping[str, torch.Tensor], rows: int, exc: Exception
) -> ProfileError:
    """Return the error for a part that does not run."""
    if is_out_of_memory(exc):
        where = ""
        advice = "; this part of the model alone needs more memory than the device has: use smaller mini-batches"
    else:
        inputs = [sample.value(node, rows) for node in part.inputs]
        where = failing_op(part.module, [*inputs, *tensors.values(), *part.numbers_at(rows)])
        where = f"{where}: " if where else ""
        advice = (
            ". If the same call fails without RaNNCModule, fix the call: check types, shapes and values of its tensors"
        )
    return ProfileError(
        f"{type(part.module).__name__} cannot be measured with {rows} rows on {sample.device}: "
        f"{where}{type(exc).__name__}: {str(exc).rstrip('.')}{advice}"
    )


def _adding(tensors: Iterable[torch.Tensor], device: torch.device, evict: Callable[[], None]) -> tuple[Sample, ...]:
    """Time to accumulate parameter gradients, in one run; () if there are none."""
    trained = [tensor for tensor in tensors if tensor.requires_grad]

    def add(stamp: Stamp) -> None:
        sums = [torch.ones_like(tensor) for tensor in trained]
        evict()
        torch.ones(1, device=device).add_(1.0)  # what runs is there, what it reads is not
        for one in sums:
            other = torch.empty_like(one)
            with torch.no_grad():
                other.fill_(1.0)  # as if it came from a backward
            stamp()
            with torch.no_grad():
                one.add_(other)
            stamp()

    each = [found[0] for found in spans(device, add)] if trained else []
    return (Sample(sum(one.us for one in each), any(one.disturbed for one in each)),) if each else ()


def _forward(
    part: Part, sample: ProfileInputs, inputs: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor], rows: int
) -> list[torch.Tensor]:
    """Run a forward and return the outputs that require gradients.

    Saved-tensor hooks keep autograd from rejecting a backward over values that were modified in place: a model that
    cannot be trained for that reason may still be evaluated, and is planned as if it were trained.
    """
    with _any_writes(), torch.enable_grad():
        return _differentiable(sample.run(part, rows, (*inputs, *tensors.values())))


def _any_writes() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _differentiable(outputs: Sequence[Any]) -> list[torch.Tensor]:
    return [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kept(part: Part, sample: ProfileInputs, tensors: Mapping[str, torch.Tensor], rows: int) -> tuple[float, set[str]]:
    """Return the bytes that autograd saves in a forward, without parameters, and names of saved inputs and outputs."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    owned = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    inputs = [sample.value(node, rows) for node in part.inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, _same), torch.enable_grad():
        outputs = sample.run(part, rows, (*inputs, *tensors.values()))
        found = float(sum(size for pointer, size in storages.items() if pointer not in owned))
    border = [*zip(part.inputs, inputs, strict=True), *zip(part.outputs, outputs, strict=True)]
    names = {
        node.name
        for node, value in border
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storages
    }
    del outputs, border  # until here autograd holds what it saved, so no other tensor reuses the memory
    return found, names


def _dense_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors with memory that a tensor consists of: a sparse one, which a leaf may use, of indices and values."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    return *indices, tensor.values()


def _zero_indices(part: Part) -> None:
    """Replace uninitialised integer tensors (``torch.empty``) by zeros.

    A part that inverts a permutation (``inverse[order] = arange(n)``) writes all elements for the model's own values,
    but not for synthetic ones.
    """
    graph = part.module.graph
    for node in graph.nodes:
        if node.target in _ZEROED and not node.meta["val"].is_floating_point():
            if node.target is torch.ops.aten.empty.memory_format:
                node.kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}
            node.target = _ZEROED[node.target]
    part.module.recompile()


def finish() -> None:
    """Free the memory that measuring keeps between parts."""
    caches.release()
    timing.release()
    _numbers.clear()


def _synthetic(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return small positive numbers (a variance must not be negative); zeros for integers, True for masks."""
    if dtype.is_floating_point or dtype.is_complex:
        # Copies of a few: to draw all of them, for each run, takes longer than many parts.
        if (dtype, device) not in _numbers:
            _numbers[dtype, device] = torch.rand(NUMBERS, device=device).mul_(0.04).add_(0.01).to(dtype)
        numbers = _numbers[dtype, device]
        found = torch.empty(shape, dtype=dtype, device=device)
        flat, whole = found.view(-1), found.numel() - found.numel() % NUMBERS
        flat[:whole].view(-1, NUMBERS).copy_(numbers)
        flat[whole:].copy_(numbers[: found.numel() - whole])
        return found  # no view: one that was made without gradients could not be written with them
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)
