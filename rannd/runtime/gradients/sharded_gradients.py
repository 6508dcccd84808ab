"""Gradients that the replicas of a stage share: each keeps the sum over all of them of its own pieces (ZeRO 2 and 3).

After the backward of a segment, of any microbatch, the whole gradients of its parameters are summed up and let go::

    backward of segment 3, 2, 1, ..      whole gradients, of one segment at a time
            │ sum over the replicas
            ▼
    sums                                 this rank's pieces, over all microbatches since the last delivery
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rannd.runtime.gradients.grad_hooks import hooked
from rannd.runtime.parameters.absent import part_of
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.zero.division import Bucket, Piece
from rannd.runtime.zero.replica_exchange import PendingSum, ReplicaExchange
from rannd.runtime.zero.sharded_parameters import ShardedParameters
from rannd.runtime.zero.tensor_piece import TensorPiece, flat_part

MOST_PENDING = 2
"""Buckets whose sums may be on their way at a time; each takes memory of almost two (`rannd.plan.zero.held`)."""

_NOTHING = Piece(0, 0)


@dataclass(frozen=True)
class Sums:
    """Sums over the replicas: this rank's pieces, flat, by parameter."""

    pieces: Mapping[str, torch.Tensor]
    present: frozenset[str]
    """Parameters that got a gradient on this rank."""


class ShardedGradients:
    """Sums up gradients that are accumulated in the aliases, and delivers them as `TensorPiece`.

    Args:
        parameters: Parameters of the deployed model.
        buckets: Those that the replicas of this rank's stage share.
        exchange: The replicas.
        values: What the replicas share of the parameters' values (ZeRO 3).
    """

    def __init__(
        self,
        parameters: Parameters,
        buckets: Sequence[Bucket],
        exchange: ReplicaExchange,
        values: ShardedParameters | None = None,
    ) -> None:
        self._parameters = parameters
        self.buckets = buckets
        self.values = values
        self.exchange = exchange
        self._pieces = {
            name: bucket.pieces(exchange.replica).get(name, _NOTHING) for bucket in buckets for name in bucket.names
        }
        count = exchange.replicas
        self._whole_sizes = [[*each.sizes, each.length * count - sum(each.sizes)] for each in buckets]
        """Numbers of elements of each bucket's gradients, and of what is behind them."""
        own = [[self._pieces[name].size for name in each.names] for each in buckets]
        self._own_sizes = [[*sizes, each.length - sum(sizes)] for each, sizes in zip(buckets, own, strict=True)]
        """The same of this rank's pieces."""
        self._pending: deque[tuple[int, PendingSum]] = deque()
        """Numbers of buckets, and their sums."""
        self._sums: dict[str, torch.Tensor] = {}
        self._present: set[str] = set()
        parameters.shared = self

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    @property
    def waits(self) -> bool:
        """Whether there are sums that were not delivered yet."""
        return len(self._sums) + len(self._pending) > 0

    # -- during a backward ------------------------------------------------------------------------------------

    def send(self, numbers: Iterable[int]) -> None:
        """Begin to sum up the gradients of some buckets, and take them from the aliases. Collective of the replicas."""
        for number in numbers:
            aliases = [self._parameters.aliases[name] for name in self.buckets[number].names]
            if any(alias.requires_grad for alias in aliases):  # on all replicas alike
                if len(self._pending) == MOST_PENDING:
                    self._settle()
                self._begin(number, aliases)

    def _begin(self, number: int, aliases: Sequence[torch.Tensor]) -> None:
        names = self.buckets[number].names
        dtype = self._parameters.gradient_dtypes(names[0]).reduced
        flat = self._flat(number, [alias.grad for alias in aliases], dtype)
        for name, alias in zip(names, aliases, strict=True):
            if alias.grad is not None:
                self._present.add(name)
                alias.grad = None
        self._pending.append((number, self.exchange.sum(flat)))

    def _flat(self, number: int, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """The gradients of a bucket, end to end; zeros for those that there are not."""
        sizes = self._whole_sizes[number]
        if len(gradients) == 1 and not sizes[-1]:
            (alone,) = gradients
            if alone is not None and alone.dtype == dtype:
                return flattened(alone).contiguous()
        flat = torch.empty(sum(sizes), dtype=dtype, device=self.exchange.device)
        *parts, rest = flat.split_with_sizes(sizes)
        there = [(part, flattened(each)) for part, each in zip(parts, gradients, strict=True) if each is not None]
        if there:
            torch._foreach_copy_([part for part, _ in there], [each for _, each in there])
        for part in (rest, *(part for part, each in zip(parts, gradients, strict=True) if each is None)):
            part.zero_()
        return flat

    def _settle(self) -> None:
        """Wait for the oldest sum that is on its way, and add it to what is there."""
        number, pending = self._pending.popleft()
        names, own = self.buckets[number].names, pending.wait()
        home = None if self.values is None else self.values.home
        if home is not None and names[0] not in self._sums:  # all of a bucket come together
            own = home.loan(own.to(self._parameters.gradient_dtypes(names[0]).accumulated))
        here: list[torch.Tensor] = []
        more: list[torch.Tensor] = []
        *parts, _ = own.split_with_sizes(self._own_sizes[number])
        for name, reduced in zip(names, parts, strict=True):
            part = reduced.to(self._parameters.gradient_dtypes(name).accumulated)
            if name in self._sums:
                here.append(self._sums[name])
                more.append(part)
            else:
                self._sums[name] = part
        if here:
            torch._foreach_add_(here, more)

    # -- sums -------------------------------------------------------------------------------------------------

    def take(self) -> Sums:
        """Take all sums; there are none afterwards."""
        while self._pending:
            self._settle()
        found = Sums(self._sums, frozenset(self._present))
        self._sums, self._present = {}, set()
        return found

    def put(self, sums: Sums) -> None:
        """Add sums to those that are there."""
        for name, piece in sums.pieces.items():
            if name in self._sums:
                self._sums[name].add_(piece)  # in place: it may be elsewhere (offload_params)
            else:
                self._sums[name] = piece
        self._present |= sums.present

    # -- delivery ---------------------------------------------------------------------------------------------

    def deliver(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Accumulate pieces of reduced gradients into the user's parameters. Collective of the replicas.

        Hooks of ``register_hook`` get the whole gradient; they have to be the same on all replicas.
        """
        here: list[torch.Tensor] = []
        more: list[torch.Tensor] = []
        for name in filter(gradients.__contains__, self._pieces):
            parameter, flat = self._parameters.tensors[name], gradients[name]
            if parameter._backward_hooks:
                flat = self._cut(name, self.hooked(name, flat))
            there = parameter.grad
            if there is None:
                parameter.grad = self._made(name, flat)
            else:
                if not isinstance(there, TensorPiece):  # the script's own
                    parameter.grad = self._made(name, self._cut(name, there.detach()).clone())
                here.append(flat_part(parameter.grad))  # type: ignore[arg-type]
                more.append(flat)
        if here:
            torch._foreach_add_(here, more)
        for name in filter(gradients.__contains__, self._pieces):
            parameter = self._parameters.tensors[name]
            for after in list((parameter._post_accumulate_grad_hooks or {}).values()):
                after(parameter)

    def hooked(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """The whole of a reduced gradient, after the hooks of its parameter. Collective of the replicas."""
        return hooked(name, self._parameters.tensors[name], self.whole(name, flat))

    def gradient(self, name: str) -> torch.Tensor | None:
        """The whole of a parameter's gradient as the script sees it. Collective of the replicas."""
        gradient = self._parameters.tensors[name].grad
        return self.whole(name, gradient.flat) if isinstance(gradient, TensorPiece) else gradient

    def whole_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that each replica has a piece of, as of parameter `name`. Collective of the
        replicas."""
        held = part_of(tensor)
        return self.whole(name, flat_part(tensor if held is None else held))

    def restore(self) -> None:
        """Give the replicas whole parameters back. Collective of the replicas."""
        if self.values is not None:
            self.values.restore()

    def whole(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """The whole of what each replica has a piece of. Collective of the replicas."""
        (bucket,) = (each for each in self.buckets if name in each.names)
        sizes = [bucket.pieces(replica).get(name, _NOTHING).size for replica in range(self.exchange.replicas)]
        largest = max(sizes)
        buffer = torch.zeros(largest * self.exchange.replicas, dtype=flat.dtype, device=self.exchange.device)
        parts = [part[:size] for part, size in zip(buffer.split(largest), sizes, strict=True)]
        parts[self.exchange.replica].copy_(flat)
        self.exchange.gather(buffer, largest).wait()
        return torch.cat(parts).view(self._parameters.tensors[name].shape)

    def _made(self, name: str, flat: torch.Tensor) -> TensorPiece:
        made = TensorPiece(flat, self._pieces[name], self._parameters.tensors[name].shape)
        made.agree = self.exchange.largest_
        return made

    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        piece = self._pieces[name]
        return whole.reshape(-1)[piece.start : piece.stop]


def flattened(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as one row; ranks sum up sparse ones as dense."""
    return (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)


def first_readers(buckets: Sequence[Bucket], segments: Sequence[Collection[str]]) -> list[list[int]]:
    """For each segment the buckets that no earlier segment reads: after its backward their gradients are complete.

    Args:
        buckets: Parameters that are divided together.
        segments: Names of the tensors that each segment reads.
    """
    found: list[list[int]] = [[] for _ in segments]
    for number, bucket in enumerate(buckets):
        names = set(bucket.names)
        reader = next((place for place, read in enumerate(segments) if not names.isdisjoint(read)), None)
        if reader is not None:
            found[reader].append(number)
    return found
