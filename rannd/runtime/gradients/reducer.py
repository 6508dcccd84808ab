"""All-reduces gradients over the ranks that hold a parameter, to the same mean as DistributedDataParallel.

A parameter may be held by the replicas of one stage, or by several stages (tied weights); its gradient is the sum
over all of them, divided by the number of ranks. It is accumulated, reduced and given to the parameter in the types of
`Parameters.gradient_dtypes`. Gradients with the same holders and dtype are reduced together in
*buckets*, the last layers first; the all-reduce of a bucket starts as soon as its last gradient is there, while the
rest of backward still runs. All ranks start the buckets that they share in the same order. The gradient of a parameter
that got none on any rank is not touched, so that optimizers skip the parameter as in a single process. Which have one
travels with the gradients on CPUs; where values of the device are read late, the hosts exchange it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rannd.device.reads import read
from rannd.runtime.comm.lockstep import pack_flags, unpack_flags
from rannd.runtime.comm.world import World
from rannd.runtime.gradients.autograd_inputs import Asked
from rannd.runtime.gradients.grad_hooks import give_all, hooked
from rannd.runtime.gradients.grad_overflow import Overflow
from rannd.runtime.gradients.gradient_buckets import GradientBucket, make_buckets, shared_parameters
from rannd.runtime.gradients.scaling import Factor, scale_
from rannd.runtime.gradients.sharded_gradients import ShardedGradients, Sums, flattened
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.timeline.recorder import OFF, Doing, Mark, StepRecorder
from rannd.runtime.transport.transport import finish


@dataclass(frozen=True)
class Gathered:
    """Gradients of one backward, by parameter name."""

    gradients: Mapping[str, torch.Tensor]
    reduced: bool
    """Whether they are already the mean over all ranks."""
    present: frozenset[str] = frozenset()
    """Of gradients of which this rank has a piece: those that are not zero because there are none."""


class Agreed(Protocol):
    """Something that the ranks agree on while they compute."""

    def is_ready(self) -> bool:
        """Whether `agreed` does not wait any more."""

    def agreed(self) -> object:
        """Wait for the other ranks; StepError if they are at different places."""


class Reducer:
    """Reduces the gradients accumulated in the aliases and delivers them to the user's parameters.

    Args:
        world: The ranks of the job.
        parameters: Parameters of the deployed model, with their owners and aliases.
        divisor: Number of ranks that the mean is taken over.
        overlap: Reduce while backward runs.
        consolidate: Use a single bucket for all gradients with the same holders and dtype.
        overflow: Propagates infinite or NaN gradients before delivery, in a deployment with several stages.
        sharded: Gradients that the replicas of this rank's stage share (ZeRO 2 and 3).
        agrees: Ranks exchange which gradients there are: on all ranks, if some have `sharded` ones.
        recorder: Records when gradients are reduced, and how long that is waited for.
    """

    def __init__(
        self,
        world: World,
        parameters: Parameters,
        *,
        divisor: int,
        overlap: bool = True,
        consolidate: bool = False,
        overflow: Overflow | None = None,
        sharded: ShardedGradients | None = None,
        agrees: bool = False,
        recorder: StepRecorder = OFF,
    ) -> None:
        self._world = world
        self._parameters = parameters
        self.sharded = sharded
        self._agrees = agrees or world.reads.late
        self.divisor = divisor
        self._division = divisor
        """Divisor that the running backward's gradients still have to be divided by."""
        self._overlap = overlap
        self._recorder = recorder
        self._begun: Mark = None
        """When the first reduction of this backward began."""
        self._buckets, groups = make_buckets(world, parameters, consolidate, sharded or ())
        for slots in groups:  # on every rank in the same order
            world.group_of(slots)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._place = {name: place for place, name in enumerate(shared_parameters(parameters))}
        """Numbers of the parameters with several holders, the same on all ranks."""
        self._hooked: dict[str, torch.Tensor] = {}
        self._armed = self._early = self._counts = False
        self._completed = -1
        """The stage whose last gradients are being computed."""
        self._started = 0
        """Number of buckets whose all-reduce has started in this backward."""
        self._aside: dict[str, torch.Tensor] = {}
        self._sums_aside: Sums | None = None
        self._ready: dict[str, torch.Tensor] = {}
        """Reduced gradients that were not delivered to the user's parameters yet."""
        self._overflow = overflow
        self.something_waits = False
        """Whether there are gradients to be reduced; the same on all ranks, even if this one has none of them."""
        self.delivered: list[Callable[[], None]] = []
        """Called after gradients were delivered to the user's parameters."""
        self.upstream: Agreed | None = None
        """What the ranks have to agree on before the first reduction of a backward."""
        self.audited: Callable[[str, Mapping[str, torch.Tensor | None]], None] | None = None
        """Gets gradients before ("local") and after ("reduced") their reduction, in a step that is audited."""

    @property
    def compares(self) -> bool:
        """Whether delivering gradients is collective, because overflows are compared."""
        return self._overflow is not None and self._overflow.watched

    # -- a backward -------------------------------------------------------------------------------------------

    def set_aside(self, *, divided: bool = False) -> None:
        """Set accumulated gradients aside, so that the next backward starts from none, until `gathered`.

        `divided`: that backward computes gradients that are already divided by `divisor`, all of which are reduced.
        """
        self._aside = {}
        self._division = 1 if divided else self.divisor
        for name, alias in self._parameters.aliases.items():
            if alias.grad is not None:
                self._aside[name], alias.grad = alias.grad, None
        if self.sharded is not None:
            self._sums_aside = self.sharded.take()

    def gathered(self, *, reduce: bool) -> Gathered:
        """Take the gradients computed since `set_aside`, and restore those set aside. Collective with `reduce`."""
        present: frozenset[str] = frozenset()
        if reduce:
            found = self._finish()
        else:
            found = {}
            for name, alias in self._parameters.aliases.items():
                if alias.grad is not None:
                    found[name], alias.grad = alias.grad, None
            if self.sharded is not None:
                sums = self.sharded.take()
                found |= sums.pieces
                present = sums.present
        for name, gradient in self._aside.items():
            self._parameters.aliases[name].grad = gradient
        if self.sharded is not None and self._sums_aside is not None:
            self.sharded.put(self._sums_aside)
        self._aside, self._sums_aside = {}, None
        self._division = self.divisor
        return Gathered(found, reduce, present)

    def asked_of(self, gathered: Gathered, asked: Asked) -> Gathered:
        """Select the requested gradients."""
        held = self._parameters.tensors
        found = {name: each for name, each in gathered.gradients.items() if id(held[name]) in asked.ids}
        return Gathered(found, gathered.reduced, gathered.present & found.keys())

    def forget(self) -> None:
        """Drop the gradients that were not reduced yet."""
        for name in self._parameters.trainable():
            self._parameters.aliases[name].grad = None
        if self.sharded is not None:
            self.sharded.take()
        self.something_waits = False

    def accept(self, gathered: Gathered, factor: Factor, *, keep: bool) -> None:
        """Accumulate gradients times `factor` for the next `reduce`; with `keep`, `gathered` is not changed."""
        self.something_waits = True
        gradients = dict(gathered.gradients)
        if keep:
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            scale_(list(gradients.values()), factor)
        if self.sharded is not None and not gathered.reduced:
            sums = {name: gradients.pop(name) for name in list(gradients) if name in self.sharded}
            self.sharded.put(Sums(sums, gathered.present))
        for name, gradient in gradients.items():
            if gathered.reduced:
                self._ready[name] = self._ready[name] + gradient if name in self._ready else gradient
            else:
                alias = self._parameters.aliases[name]
                alias.grad = gradient if alias.grad is None else alias.grad + gradient

    def arm(self, *, early: bool = False, readers: Sequence[Collection[str]] = ()) -> None:
        """Called before the first of the computations that complete gradients, see `completing`.

        Args:
            early: Buckets are reduced as soon as they are complete.
            readers: The parameters that each stage of this rank reads.
        """
        for name, bucket in self._bucket_of.items():
            alias = self._parameters.aliases[name]
            if len(bucket.slots) > 1 and alias.requires_grad and self._hooked.get(name) is not alias:
                alias.register_post_accumulate_grad_hook(lambda _, name=name: self.arrived(name))
                self._hooked[name] = alias
        stages = Counter(name for read in readers for name in read)
        for bucket in self._buckets:
            bucket.active = [name for name in bucket.names if self._parameters.tensors[name].requires_grad]
            bucket.waiting = sum(max(stages[name], 1) for name in bucket.active)
        self._started = 0
        self._begun = None
        self._armed = True
        self._early = early

    @contextlib.contextmanager
    def completing(self, arrivals: Mapping[str, int], stage: int = -1) -> Iterator[None]:
        """Around the last backward of a stage, or its second half where backwards come in two.

        Args:
            arrivals: How often the gradient of each parameter that the stage reads is accumulated in it.
            stage: What is recorded of it is of this stage.
        """
        self._completed = stage
        for name, number in arrivals.items():
            bucket = self._bucket_of.get(name)
            if bucket is not None and self._parameters.tensors[name].requires_grad:
                bucket.waiting += number - 1
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def arrived(self, name: str) -> None:
        """Called when a gradient was accumulated: by autograd, or by what computes it otherwise."""
        bucket = self._bucket_of.get(name)
        if bucket is not None and self._counts and self._early and self._overlap:
            bucket.waiting -= 1
            if not bucket.waiting:
                self._start_complete()

    def _start_complete(self) -> None:
        if self.upstream is not None:
            if not self.upstream.is_ready():
                return  # computing goes on; `_finish` begins what is left
            self.upstream.agreed()
            self.upstream = None
        while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
            begun = self._recorder.begin()
            self._start(self._buckets[self._started])
            self._recorder.end(Doing.PACK, self._completed, self._completed, None, begun)
            self._started += 1

    def _finish(self) -> dict[str, torch.Tensor]:
        """Start the remaining buckets and wait for all; takes the gradients from the aliases. Collective."""
        if not self._armed:
            self.arm()
        self._armed = False
        waits = self._recorder.begin()
        if self.upstream is not None:
            self.upstream.agreed()
            self.upstream = None
        for bucket in self._buckets[self._started :]:
            self._start(bucket)
        sums = Sums({}, frozenset()) if self.sharded is None else self.sharded.take()
        present = self._agree_on_present(sums.present) if self._agrees else frozenset()
        reduced: dict[str, torch.Tensor] = {}
        for bucket in self._buckets:
            reduced.update(self._finished(bucket))
        pieces = {name: piece for name, piece in sums.pieces.items() if name in present}
        if self._division != 1 and pieces:
            torch._foreach_div_(list(pieces.values()), self._division)
        self._recorder.end(Doing.DRAIN, -1, -1, None, waits)
        if self._begun is not None:
            self._recorder.end(Doing.REDUCE, -1, -1, None, self._begun)
            self._begun = None
        if self.audited is not None:
            self.audited("reduced", reduced | pieces)
        return reduced | pieces

    def _start(self, bucket: GradientBucket) -> None:
        aliases = [self._parameters.aliases[name] for name in bucket.active]
        if self.audited is not None:
            self.audited("local", {name: each.grad for name, each in zip(bucket.active, aliases, strict=True)})
        group = self._world.group_of(bucket.slots)
        if group is None or not bucket.active:
            return
        if self._begun is None:
            self._begun = self._recorder.begin()
        bucket.present = [alias.grad is not None for alias in aliases]
        sizes = [len(aliases), *(alias.numel() for alias in aliases)]
        reduced = self._parameters.gradient_dtypes(bucket.active[0]).reduced
        bucket.flat = torch.empty(sum(sizes), dtype=reduced, device=aliases[0].device)
        flags, *parts = bucket.flat.split(sizes)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for alias, part in zip(aliases, parts, strict=True):
            if alias.grad is None:
                part.zero_()
            elif self._division != 1 and alias.grad.dtype != reduced:  # a narrower type may have no room before
                torch.div(flattened(alias.grad), self._division, out=part)
            else:
                targets.append(part)
                sources.append(flattened(alias.grad))
            alias.grad = None
        if targets:
            torch._foreach_copy_(targets, sources)
            if self._division != 1:
                torch._foreach_div_(targets, self._division)
        # The flags have their place in any case: sums over three and more ranks depend on it, bit for bit.
        if self._world.reads.late:
            flags.zero_()
        else:
            flags.copy_(torch.tensor(bucket.present))
        bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

    def _agree_on_present(self, present: frozenset[str]) -> frozenset[str]:
        """Find out which gradients some rank has, for all buckets at once; those that are sharded too. Collective.

        `present`: which of the sharded ones this rank has.
        """
        alone = frozenset(name for name in present if name not in self._place)  # nobody else holds them
        if not self._place:
            return alone
        reduced = [bucket for bucket in self._buckets if bucket.flat is not None]
        mine = [(name, flag) for bucket in reduced for name, flag in zip(bucket.active, bucket.present, strict=True)]
        here = {self._place[name] for name, flag in mine if flag} | {self._place[name] for name in present - alone}
        told = self._world.gather_numbers(pack_flags([place in here for place in range(len(self._place))]))
        flags = (unpack_flags(each, len(self._place)) for each in told)
        everywhere = [any(column) for column in zip(*flags, strict=True)]
        for bucket in reduced:
            bucket.present = [everywhere[self._place[name]] for name in bucket.active]
        return alone.union(name for name, place in self._place.items() if everywhere[place])

    def _finished(self, bucket: GradientBucket) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if bucket.flat is None:
            for name in bucket.active:
                alias = self._parameters.aliases[name]
                if alias.grad is not None:
                    found[name] = alias.grad.div_(self._division) if self._division != 1 else alias.grad
                    alias.grad = None
            return found
        assert bucket.work is not None
        finish(bucket.work, on_host=bucket.flat.device.type == "cpu")
        aliases = [self._parameters.aliases[name] for name in bucket.active]
        flags, *parts = bucket.flat.split([len(aliases), *(alias.numel() for alias in aliases)])
        if not self._world.reads.late:
            bucket.present = read(flags).bool().tolist()
        for name, alias, part, present in zip(bucket.active, aliases, parts, bucket.present, strict=True):
            if present:  # several may be summed, in no narrower type than the parameter's
                found[name] = _in_type(part.view(alias.shape), self._parameters.gradient_dtypes(name).accumulated)
        bucket.flat = bucket.work = None
        return found

    # -- the user's parameters --------------------------------------------------------------------------------

    def reduce(self, asked: Asked | None = None) -> None:
        """Reduce all accumulated gradients, and deliver them; see `deliver`. Collective."""
        for name, gradient in self._finish().items():
            self._ready[name] = self._ready[name] + gradient if name in self._ready else gradient
        self.deliver(asked)

    def deliver(self, asked: Asked | None = None) -> None:
        """Accumulate reduced gradients into the user's parameters, or store them in `asked.found`."""
        types = self._parameters.gradient_dtypes
        ready = {name: _in_type(each, types(name).given) for name, each in self._ready.items()}
        self._ready = {}
        self.something_waits = False
        if self._overflow is not None:
            self._overflow.spread(ready.values())
        with torch.no_grad():  # as hooks of autograd run
            held = self._parameters.tensors
            sharded = {name: ready.pop(name) for name in list(ready) if self.sharded and name in self.sharded}
            given = [(name, held[name], ready[name]) for name in self._parameters.own if name in ready]
            if asked is not None and asked.found is not None:
                asked.found.update((id(tensor), hooked(name, tensor, gradient)) for name, tensor, gradient in given)
                if self.sharded is not None:
                    whole = self.sharded.hooked
                    asked.found.update((id(held[name]), whole(name, sharded[name])) for name in sorted(sharded))
            else:
                give_all(given)
                if self.sharded is not None:
                    self.sharded.deliver(sharded)
        for call in self.delivered:
            call()


def _in_type(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As ``gradient.to(dtype)``, which dispatches even for what has the type already: nearly always."""
    return gradient if gradient.dtype is dtype else gradient.to(dtype)
