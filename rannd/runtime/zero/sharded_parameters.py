"""Parameters that the replicas of a stage share: each holds its pieces, whole ones are gathered for segments (ZeRO 3).

Before a segment runs, forward or backward, its parameters are gathered, and those of the next segment begin to be,
while the segment computes. The rest is let go of::

    forward     gather 0    run 0, gather 1    run 1, gather 2    run 2     (2 stays for the backward that follows)
    backward                                                      run 2, gather 1    run 1, gather 0    run 0

Where memory suffices (`Stage.stays_whole`) nothing is let go of before the last microbatch, so all is gathered once,
and once more for a backward that runs after the call.

With `offload_params` a rank's pieces are elsewhere (`state_home.py`), also where a stage has one replica. Those of the
next segment begin to come while a segment computes.

What autograd has saved of a parameter shares the memory of the buffer that it is gathered into, which is freed and
filled again under the same tensors.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from rannd.runtime.parameters.absent import make_absent, make_present
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.tensor_swap import hollow
from rannd.runtime.zero.division import Bucket, Piece
from rannd.runtime.zero.replica_exchange import PendingGather, ReplicaExchange
from rannd.runtime.zero.state_home import StateHome
from rannd.runtime.zero.tensor_piece import TensorPiece


def _label(number: int) -> str:
    return f"bucket {number}"


class _Buffer:
    """Memory for the whole parameters of a bucket, which comes and goes."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        """What aliases are views of."""
        self._storage = flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        # The same memory, but changes of it are not changes of what autograd has saved.
        self.raw = torch.empty(0, dtype=flat.dtype, device=flat.device)
        self.raw.set_(self._storage, 0, flat.shape, (1,))
        self.full = True
        self.coming = False
        """Whether this rank's range is on its way to the device, and in no buffer yet."""
        self.pending: PendingGather | None = None

    @property
    def address(self) -> int:
        return self._storage.data_ptr()

    def allocate(self) -> None:
        self._storage.resize_(self._bytes)

    def free(self) -> None:
        self._storage.resize_(0)
        self.full = False


class ShardedParameters:
    """Divides the values of shared parameters, and gathers them for the segments of a stage.

    The user's parameters become absent, with a `TensorPiece` in place of their values. Aliases are views of buffers.

    Args:
        parameters: Parameters of the deployed model.
        buckets: Those that the replicas of this rank's stage share.
        exchange: The replicas.
        home: Where this rank's pieces are; None: in the device's memory.
    """

    def __init__(
        self,
        parameters: Parameters,
        buckets: Sequence[Bucket],
        exchange: ReplicaExchange,
        home: StateHome | None = None,
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._exchange = exchange
        self.home = home
        self._own: list[torch.Tensor] = []
        """This rank's range of each bucket."""
        self._buffers: list[_Buffer] = []
        self._addresses: set[int] = set()
        """Of the buffers that have memory."""
        with torch.no_grad():
            for bucket in buckets:
                self._divide(bucket)
        parameters.sharded = frozenset(name for bucket in buckets for name in bucket.names)

    def _divide(self, bucket: Bucket) -> None:
        tensors = [self._parameters.tensors[name] for name in bucket.names]
        first, size = tensors[0], bucket.length * self._exchange.replicas
        device = self._exchange.device
        flat = torch.zeros(size, dtype=first.dtype, device=device)
        *parts, _ = flat.split([*bucket.sizes, size - sum(bucket.sizes)])
        for tensor, part in zip(tensors, parts, strict=True):
            part.copy_(tensor.reshape(-1))
        own = self._range(flat).clone()
        if self.home is not None:
            own = self.home.hold(_label(len(self._own)), own)
        begin, pieces = 0, bucket.pieces(self._exchange.replica)
        for name, tensor, part in zip(bucket.names, tensors, parts, strict=True):
            alias = nn.Parameter(part.view(tensor.shape), requires_grad=tensor.requires_grad)
            alias.grad_dtype = self._parameters.gradient_dtypes(name).accumulated
            self._parameters.aliases[name] = alias
            piece = pieces.get(name, Piece(0, 0))
            held = TensorPiece(own[begin : begin + piece.size], piece, tensor.shape)
            begin += piece.size
            gradient = tensor.grad
            make_absent(tensor, hollow(tensor, device), f"{name}, of which this rank has a piece", held)
            tensor.grad = gradient if gradient is None else gradient.to(device)
        buffer = _Buffer(flat)
        buffer.free()
        self._own.append(own)
        self._buffers.append(buffer)

    def _range(self, flat: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flat.split(flat.numel() // self._exchange.replicas)[self._exchange.replica]
        return found

    # -- whole parameters -------------------------------------------------------------------------------------

    def readers(self, segments: Sequence[Collection[str]]) -> list[list[int]]:
        """For each segment the buckets that it reads, given the names of the tensors that each reads."""
        return [
            [number for number, bucket in enumerate(self._buckets) if not set(bucket.names).isdisjoint(read)]
            for read in segments
        ]

    def enter(self, numbers: Sequence[int], following: Sequence[int] = (), *, keep: bool = False) -> None:
        """Make buckets whole, begin to gather those that are needed next, and let go of others (not with `keep`).
        Collective of the replicas, with the same arguments on all."""
        if not keep:
            self._keep({*numbers, *following})
        self._begin(numbers)
        for number in numbers:
            self._finish(number)
        self._begin(following)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of whole parameters, which go when they are let go of."""
        if tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() in self._addresses

    def leave(self) -> None:
        """Let go of all whole parameters."""
        self._keep(())

    def _begin(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            buffer = self._buffers[number]
            if not buffer.full:
                buffer.full = True
                if self.home is not None:
                    self.home.prefetch(_label(number), self._own[number])
                    if self._exchange.replicas == 1:  # nobody else waits for it
                        buffer.coming = True
                        continue
                self._fill(number)

    def _fill(self, number: int) -> None:
        """Copy this rank's range of a bucket into its buffer, and begin to gather the others."""
        buffer, own = self._buffers[number], self._own[number]
        buffer.coming = False
        buffer.allocate()
        self._addresses.add(buffer.address)
        if self.home is None:
            self._range(buffer.raw).copy_(own)
        else:
            self.home.fetch(_label(number), own, self._range(buffer.raw))
        buffer.pending = self._exchange.gather(buffer.raw, len(own))

    def _finish(self, number: int) -> None:
        """Wait until a buffer has all of a bucket."""
        buffer = self._buffers[number]
        if buffer.coming:
            self._fill(number)
        if buffer.pending is not None:
            buffer.pending.wait()
            buffer.pending = None

    def _keep(self, numbers: Collection[int]) -> None:
        for number, buffer in enumerate(self._buffers):
            if buffer.full and number not in numbers:
                if buffer.coming and self.home is not None:
                    self.home.drop(_label(number))
                    buffer.coming = buffer.full = False
                    continue
                self._finish(number)
                self._addresses.discard(buffer.address)
                buffer.free()

    def changed(self) -> None:
        """Note that values have changed: a backward through an earlier forward is an error, as for any parameter."""
        for buffer in self._buffers:
            torch.autograd.graph.increment_version(buffer.flat)

    def restore(self) -> None:
        """Give the user's parameters their whole values back. Collective of the replicas."""
        self.leave()  # after an error in a phase
        for number, bucket in enumerate(self._buckets):
            self.enter([number])
            *parts, _ = self._buffers[number].raw.split(
                [*bucket.sizes, self._buffers[number].raw.numel() - sum(bucket.sizes)]
            )
            for name, part in zip(bucket.names, parts, strict=True):
                tensor = self._parameters.tensors[name]
                gradient = tensor.grad
                make_present(tensor)
                tensor.data = part.view(tensor.shape).clone()
                tensor.grad = gradient
        self.leave()
        self._parameters.sharded = frozenset()
