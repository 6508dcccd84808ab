"""The interface of transports, and how a value becomes a message."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from rannd.errors import StepError
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.stream_checker import StreamRules
from rannd.runtime.transport import host_wait

Pair = tuple[bool, int, int]
"""Two ranks, the lower one first, that exchange gradients (True) or values (False)."""


def pair(gradients: bool, one: int, other: int) -> Pair:
    """The pair of two ranks (or slots)."""
    return gradients, min(one, other), max(one, other)


MakeGroup = Callable[[str, Sequence[int] | None], dist.ProcessGroup | None]
"""Makes a process group of a backend, of some ranks or of all; collective over all ranks."""


class Transport(abc.ABC):
    """Moves messages between ranks: one-dimensional contiguous tensors of uint8 on `device`.

    A rank and its peer have to issue the transfers of each pair in the same order. Memory of a message must not be
    changed, and that of a buffer not be touched, before the transfer is settled or taken.
    """

    name: ClassVar[str]
    """Value of the configuration item `transport`."""
    backend: ClassVar[str]
    """Backend of the process groups that reduce tensors of the device."""
    posting: Posting = Posting.AHEAD
    """When the steps that are run post receives."""
    rules: ClassVar[StreamRules | None] = None
    """Rules that steps are checked against; None: a transfer holds up only who waits for it."""
    reads_late: ClassVar[bool] = False
    """Whether what a step computes is looked at one step later, as the device works on while the host goes on."""
    shares_devices: ClassVar[bool] = False
    """Whether several ranks may have the same device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def open(self, pairs: Iterable[Pair]) -> int:
        """Connect pairs of ranks that are not connected yet, and return their number.

        Collective over all ranks, with the same pairs.
        """
        return 0

    def empty(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes for `post`."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give_back(self, buffer: torch.Tensor) -> None:  # noqa: B027
        """Note that everything this rank has issued so far may still use a buffer, and nothing later does."""

    @abc.abstractmethod
    def send(self, message: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Start to send a message to rank `peer`; returns what `settle` takes."""

    @abc.abstractmethod
    def post(self, buffer: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Start to receive a message of rank `peer`; returns what `take` takes."""

    @abc.abstractmethod
    def take(self, posted: object) -> None:
        """Wait for a message: computations issued from now on read it."""

    @abc.abstractmethod
    def settle(self, sent: object) -> None:
        """Wait until a message has been sent: what is issued from now on may overwrite it."""

    def before_computation(self) -> None:  # noqa: B027
        """Called before each computation of a step."""


def finish(work: object, *, on_host: bool = False) -> None:
    """Wait for a transfer; `on_host`: it is a collective of hosts, and not one of devices, for which the device waits.

    torch returns None on ranks outside the group, which would be a bug of the caller.
    """
    if not isinstance(work, dist.Work):
        raise StepError("internal error: a transfer was started on a rank outside its group; please report this")
    if on_host:
        host_wait.wait(work)
    else:
        work.wait()


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a value as a message, copied only if it is not contiguous."""
    return value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
