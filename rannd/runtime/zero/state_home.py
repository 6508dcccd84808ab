"""What of training is elsewhere while it is not needed, if not in the device's memory: in one of two places.

The optimizer's state between steps (`offload_optimizer`), parameters that no segment reads at the moment
(`offload_params`, see `sharded_parameters.py`), and what segments recompute from between forward and backward
(`offload_activations`, see `runtime/execution/stage.py`). For ranks on CPUs the place is a file (`mapped_file.py`), for
those with a GPU the host's memory (`host_memory.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

VALUES = "values"
"""Key of what is no optimizer's state."""


class Place(NamedTuple):
    """Which tensor of an optimizer's state it is."""

    name: str
    """Of the parameter."""
    key: Any
    """In its state."""
    number: int
    """Among the tensors below that key."""


class StateHome(ABC):
    """Tensors of an optimizer's state that are elsewhere between steps.

    A tensor that goes there is one of as many elements as what the optimizer steps, at least two; others stay.
    """

    in_place: bool
    """Whether it is stepped where it is."""

    def __init__(self) -> None:
        self._homes: dict[Place, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are elsewhere between steps."""
        return sum(home.nbytes for home in self._homes.values())

    def keep(self, name: str, state: dict[str, Any], size: int) -> None:
        """Put a parameter's state where it is between steps, in place of what is in `state`.

        Args:
            name: Of the parameter.
            state: Its state, with the values to keep.
            size: Number of elements of what is stepped.

        Raises:
            UsageError: There is no room.
        """

        def kept(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() != size or size < 2 or tensor.layout is not torch.strided:
                return tensor
            home = self._homes.get(place)
            if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
                home = self._homes[place] = self._make(tensor)
            if tensor.data_ptr() != home.data_ptr():
                self._store(tensor.detach(), home)
            return home

        self._each(name, state, kept)

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor's values where they are until they are needed, and return what they are there."""
        state = {VALUES: tensor}
        self.keep(name, state, tensor.numel())
        self.leave([name])
        return state[VALUES]

    def prefetch(self, name: str, held: torch.Tensor) -> None:
        """Begin to bring what `hold` has returned."""
        self.ahead([name], [{VALUES: held}])

    @abstractmethod
    def drop(self, name: str) -> None:
        """Let go of what `prefetch` has brought, and nobody has fetched."""

    def fetch(self, name: str, held: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what `hold` has returned into `target`, which is on the device."""
        state = {VALUES: held}
        self.bring([name], [state])
        target.copy_(state[VALUES])
        self.leave([name])

    def loan(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy that is elsewhere as long as somebody has it, and can be used as any other."""
        return tensor

    @abstractmethod
    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is elsewhere as long as somebody has it, for `back`."""

    @abstractmethod
    def coming(self, laid: Iterable[torch.Tensor]) -> None:
        """Begin to bring back what `lay` has returned."""

    @abstractmethod
    def back(self, laid: torch.Tensor) -> torch.Tensor:
        """What `lay` has returned, on the device; without a gradient."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of what `coming` has brought, and nobody has asked for."""

    def restore(self, name: str, state: dict[str, Any]) -> None:
        """Put copies in the device's memory in the place of what was kept of a parameter's state."""
        self._each(name, state, lambda place, tensor: self._back(tensor) if self._is_home(place, tensor) else tensor)

    def _is_home(self, place: Place, tensor: torch.Tensor) -> bool:
        home = self._homes.get(place)
        return home is not None and home.data_ptr() == tensor.data_ptr()

    def _each(self, name: str, state: dict[str, Any], new: Callable[[Place, torch.Tensor], torch.Tensor]) -> None:
        for key, value in state.items():
            state[key] = _replaced(value, name, key, new, [])

    @abstractmethod
    def ahead(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        """Begin to bring the state of some parameters, which are stepped next."""

    @abstractmethod
    def bring(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        """Put what can be stepped into the state of some parameters."""

    @abstractmethod
    def leave(self, names: Sequence[str]) -> None:
        """Some parameters were stepped, and their state kept: it is not needed before the next step."""

    @abstractmethod
    def finish(self) -> None:
        """After a step: all that was kept can be read."""

    @abstractmethod
    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for the values of a tensor."""

    @abstractmethod
    def _store(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        """Copy a tensor's values to its home."""

    @abstractmethod
    def _back(self, home: torch.Tensor) -> torch.Tensor:
        """A copy in the device's memory."""


def _replaced(
    value: Any, name: str, key: Any, new: Callable[[Place, torch.Tensor], torch.Tensor], seen: list[torch.Tensor]
) -> Any:
    """A nested value with `new(its place, tensor)` in place of each tensor; dicts and lists are changed themselves."""
    if isinstance(value, torch.Tensor):
        seen.append(value)
        return new(Place(name, key, len(seen) - 1), value)
    if isinstance(value, dict):
        for each in value:
            value[each] = _replaced(value[each], name, key, new, seen)
    elif isinstance(value, list):
        value[:] = [_replaced(each, name, key, new, seen) for each in value]
    elif type(value) is tuple:
        return tuple(_replaced(each, name, key, new, seen) for each in value)
    return value


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor, or of a contiguous one if its elements are not all those of its memory."""
    return torch.empty_like(tensor, device="meta").stride()


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _replaced(value, "", None, lambda _, tensor: tensor, found)
    return found
