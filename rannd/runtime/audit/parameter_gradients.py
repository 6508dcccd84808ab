"""Gradients of parameters in an audit: sums over replayed microbatches, compared with each rank's before and after the
reduction, and with what the parameters were given.

A parameter is compared in the block that comes last in backward of those that read it. Until then its sums are kept;
of all others, those of one rank and of all together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from rannd.runtime.audit.block_replay import BlockTensors, ReplayBlock
from rannd.runtime.audit.differences import Comparisons, Differs, Measure, largest_element, like, wide
from rannd.runtime.audit.origins import Origins
from rannd.runtime.audit.record_exchange import Tensors
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.ownership import Parameters


class ParameterGradients:
    """Sums up and compares the gradients of parameters.

    Args:
        readers: The blocks that read each tensor, in their order.
        half: Whether the step was computed in half precision.
        unsure: Blocks that give other results in each run, as they are found.
        is_unsure: Looks for such blocks among those that read a parameter whose gradient differs.
    """

    def __init__(
        self,
        world: World,
        parameters: Parameters,
        origins: Origins,
        readers: Mapping[str, Sequence[ReplayBlock]],
        ask: Callable[..., Tensors],
        compared: Comparisons,
        *,
        half: bool,
        unsure: Collection[str],
        is_unsure: Callable[[str], bool],
    ) -> None:
        self._world = world
        self._parameters = parameters
        self._origins = origins
        self._readers = readers
        self._ask = ask
        self._compared = compared
        self._half = half
        self._unsure = unsure
        self._is_unsure = is_unsure
        self._local: dict[str, dict[int, torch.Tensor]] = {}
        """Sums of ranks that were not compared yet, by name and rank, in double precision."""
        self._total: dict[str, torch.Tensor] = {}
        """Sums of those that were, over ranks."""
        self._terms: dict[str, float] = {}
        """The largest element of what was summed up."""

    def take(self, block: ReplayBlock, tensors: BlockTensors, rank: int) -> float:
        """Add the gradients that a microbatch of a rank has left; returns their largest element."""
        noise = 0.0
        for name, parameter in zip(block.segment.part.tensors, tensors.tensors, strict=True):
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad.detach(), None
            here = wide(gradient if gradient.layout is torch.strided else gradient.to_dense()).cpu()
            sums = self._local.setdefault(name, {})
            sums[rank] = sums[rank] + here if rank in sums else here
            largest = largest_element(here)
            self._terms[name] = max(self._terms.get(name, 0.0), largest)
            noise = max(noise, largest)
        return noise

    def compare_local(self, block: ReplayBlock, rank: int, noise: float) -> None:
        """Compare the sums of a rank whose microbatches are all done in a block, before the reduction."""
        for name in self._complete(block):
            with self._unless_unsure(name):
                self._compare_before(name, block, rank, noise)

    def compare(self, block: ReplayBlock, done: Collection[int], noise: float) -> None:
        """Compare all that is left of the parameters that no earlier block reads.

        Args:
            done: The ranks of `compare_local`.
            noise: See `Measure`.
        """
        for name in self._complete(block):
            with self._unless_unsure(name):
                self._compare_reduced(name, block, done, noise)
        for name in block.segment.part.tensors:
            if self._readers[name][0].key == block.key:
                for kept in (self._local, self._total, self._terms):
                    kept.pop(name, None)

    @contextlib.contextmanager
    def _unless_unsure(self, name: str) -> Iterator[None]:
        """A difference counts, unless the gradient is another one in each run."""
        try:
            yield
        except Differs:
            if not self._is_unsure(name):
                raise

    def _complete(self, block: ReplayBlock) -> Iterator[str]:
        """Trained parameters that no earlier block reads, without those of blocks that cannot be replayed."""
        for name in block.segment.part.tensors:
            model, readers = self._parameters.tensors.get(name), self._readers[name]
            trained = isinstance(model, torch.nn.Parameter) and model.requires_grad
            if trained and readers[0].key == block.key and not any(str(each) in self._unsure for each in readers):
                yield name

    def _measure(self, name: str, noise: float) -> Measure:
        half = self._half or self._parameters.gradient_dtypes(name).reduced.itemsize < 4
        return Measure(noise=max(noise, self._terms.get(name, 0.0)), half=half)

    def _compare_before(self, name: str, block: ReplayBlock, rank: int, noise: float) -> None:
        """Compare a rank's gradient of a parameter before the reduction, and add it to those of the others."""
        expected = self._local.get(name, {}).pop(rank, None)
        if not self._ask(rank, "piece", name):  # ZeRO 2: replicas sum it up in each microbatch
            local = self._ask(rank, "local", name).get("")
            gap = self._measure(name, noise).gap(like(expected, local), local)
            what = f"the gradient of {name} before its reduction"
            self._compared.add("gradients", what, f"{block}, all pieces, rank {rank}", gap)
        if expected is not None:
            self._total[name] = self._total[name] + expected if name in self._total else expected

    def _compare_reduced(self, name: str, block: ReplayBlock, done: Collection[int], noise: float) -> None:
        """Compare the sum over all ranks with what the reduction has given to each holder."""
        holders = [self._world.rank_of_slot[slot] for slot in self._parameters.slots[name]]
        for rank in holders:
            if rank not in done:
                self._compare_before(name, block, rank, noise)
        measure = self._measure(name, noise)
        total = self._total.pop(name, None)
        if total is not None:
            mean = total / (self._origins.facts.averaged // self._origins.facts.divided)
            for rank in holders:
                self._compare_after(name, mean, rank, measure, f"{block}, all pieces, rank {rank}")

    def _compare_after(self, name: str, mean: torch.Tensor, rank: int, measure: Measure, where: str) -> None:
        """Compare a parameter's gradient after the reduction, and as it was given to the parameter."""
        piece = self._ask(rank, "piece", name).get("")
        if piece is not None:
            mean = mean.reshape(-1)[int(piece[0]) : int(piece[1])]
        reduced = self._ask(rank, "reduced", name).get("")
        if piece is None or reduced is not None:
            gap = measure.gap(like(mean, reduced), reduced)
            self._compared.add("gradients", f"the gradient of {name} after its reduction", where, gap)
        if self._ask(rank, "hooked", name) or not bool(mean.isfinite().all()):
            return  # a hook, or what makes all GradScalers skip a step, has changed it
        before, after = (self._ask(rank, kind, name).get("") for kind in ("grad before", "grad after"))
        factor = self._origins.factor(rank)
        given = mean * factor
        total = given if before is None else given + wide(before)
        scaled = Measure(noise=max(measure.noise * abs(factor), largest_element(before)), half=measure.half)
        what = f"the gradient that {name} was given"
        self._compared.add("gradients", what, where, scaled.gap(like(total, after), after))
