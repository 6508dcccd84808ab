"""Record the operators of code that creates and initializes tensors, without allocating the tensors.

The recording is a `rannd.runtime.parameters.op_tape.Tape`.

While a `Recorder` is active, new tensors are on the meta device, but report the device on which the code created them,
and every operator that writes is appended to the tape.

Code that reads values during the recording (`linspace(...).tolist()`, `if w.any()`) gets them: the operators that they
depend on are replayed immediately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rannd.device.generators import kept_generators, prepare
from rannd.device.identity import is_accelerator
from rannd.runtime.parameters.op_tape import CPU, Storage, Tape, TapeOp, Unrepeatable, View, view_of

META = torch.device("meta")

_READS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__, torch.Tensor.__format__}
)
"""Methods that read a tensor's values without dispatching an operator."""

_aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operators (`with recorder.recording()`). Not thread-safe.

    Args:
        seed: Base seed; seeds of random operators are derived from it and the names of tensors.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape(seed)
        self._numbers: dict[int, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records the operators inside."""
        with self, _ReportedDevice(self):
            yield

    # -- what a tensor is -------------------------------------------------------------------------------------

    def view(self, tensor: torch.Tensor) -> View | None:
        """View of a tensor on its recorded storage; None for other tensors."""
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else view_of(number, tensor)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Device on which the recorded code created a tensor."""
        view = self.view(tensor)
        return self.tape.storages[view.storage].device if view is not None else tensor.device

    def _add(self, storage: torch.UntypedStorage, device: torch.device, **more: Any) -> int:
        prepare(device)
        number = self.tape.add(Storage(CPU if device.type == "meta" else device, storage, **more))
        self._numbers[storage._cdata] = number
        return number

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Meta tensor that represents a tensor created outside the recorder, whose storage becomes a constant."""
        if tensor.layout is not torch.strided:
            raise Unrepeatable(f"a tensor of layout {tensor.layout}")
        storage = tensor.untyped_storage()
        if tensor.is_meta:
            if storage._cdata not in self._numbers:
                self._add(storage, CPU, blank=True)
            return tensor
        if storage._cdata not in self._numbers:
            self._add(storage, tensor.device, value=tensor.detach(), version=tensor._version)
        number = self._numbers[storage._cdata]
        shadow = self.tape.storages[number].kept
        if shadow.device.type != "meta":
            shadow = torch.UntypedStorage(storage.nbytes(), device="meta")
            self.tape.storages[number].kept = shadow
            self._numbers[shadow._cdata] = number
        return view_of(number, tensor).on(shadow)

    # -- recording --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is _aten.lift_fresh.default and not tensors[0].is_meta:
            return self._adopt(tensors[0]) if tensors[0].layout is torch.strided else func(*args, **kwargs)
        makes = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if not makes and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written) or torch.Tag.data_dependent_output in func.tags:
            return self._for_real(func, args, kwargs, written)
        try:
            given_args, given_kwargs = pytree.tree_map_only(torch.Tensor, self._adopt, (args, kwargs))
        except Unrepeatable:
            return self._for_real(func, args, kwargs, written)
        return self._on_meta(func, given_args, given_kwargs, written)

    def _on_meta(self, func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> Any:
        described_args, described = pytree.tree_map_only(torch.Tensor, self._described, (args, kwargs))
        generator = kwargs.get("generator")
        state = None
        if generator is not None:
            state = generator.get_state()
            self._advance(func, args, kwargs, generator)
        device = kwargs.get("device")
        run_kwargs = dict(kwargs)
        if generator is not None:
            run_kwargs["generator"] = None
        if device is not None or not pytree.tree_any(lambda leaf: isinstance(leaf, torch.Tensor), (args, kwargs)):
            run_kwargs["device"] = META
        if run_kwargs.get("pin_memory"):
            run_kwargs["pin_memory"] = False
        try:
            result = func(*args, **run_kwargs)
        except (NotImplementedError, RuntimeError):
            # No meta kernel, or an error of the user's code, which then appears when the operator runs with values.
            if not written:
                if generator is not None:
                    generator.set_state(state)
                return self._for_real(func, args, kwargs, written)
            if generator is None:  # otherwise `_advance` has already run it with values
                with kept_generators():
                    real_args, real = pytree.tree_map_only(torch.Tensor, self.value, (args, kwargs))
                    func(*real_args, **real)
            result = written[0] if len(func._schema.returns) == 1 else tuple(written)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(leaf.layout is not torch.strided for leaf in leaves):
            if generator is not None:
                generator.set_state(state)
            return self._for_real(func, args, kwargs, written)
        inputs = [leaf for leaf in pytree.tree_leaves((described_args, described)) if isinstance(leaf, View)]
        home = torch.device(device) if device is not None else None
        if home is None:
            home = self.tape.storages[inputs[0].storage].device if inputs else CPU
        fresh = set()
        for leaf in leaves:
            if leaf.untyped_storage()._cdata not in self._numbers:
                fresh.add(self._add(leaf.untyped_storage(), home))
        if torch.Tag.inplace_view in func.tags and "resize" not in func._schema.name:
            return result  # changes only the metadata of a tensor, writes nothing
        writes = fresh | {each.storage for tensor in written if (each := self.view(tensor)) is not None}
        if not writes:
            return result
        described = {**described, "generator": None} if generator is not None else dict(described)
        if "device" in described or "device" in run_kwargs:
            described["device"] = home if home.type != "meta" else CPU
        if not inputs and leaves and any(each.name == "dtype" for each in func._schema.arguments):
            described["dtype"] = leaves[0].dtype  # the default dtype may differ at replay
        self.tape.note(
            TapeOp(
                func,
                described_args,
                described,
                tuple(self.view(leaf) for leaf in leaves),
                frozenset(view.storage for view in inputs),
                frozenset(writes),
                torch.Tag.nondeterministic_seeded in func.tags and generator is None,
                state,
            )
        )
        return result

    def _described(self, tensor: torch.Tensor) -> View:
        view = self.view(tensor)
        assert view is not None
        return view

    def _advance(self, func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> None:
        """Advance the code's own generator as the operator would, by running it with values and dropping the result."""
        real_args, real = pytree.tree_map_only(torch.Tensor, self.value, (args, kwargs))
        func(*real_args, **{**real, "generator": generator})

    def _for_real(self, func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> Any:
        """Run an operator with values, because its result is data-dependent or it writes into real memory."""
        unreal = [tensor for tensor in written if tensor.is_meta]
        if unreal:
            raise Unrepeatable(f"{func} writes to a tensor of DistributeModelParams in a way that cannot be recorded")
        real_args, real = pytree.tree_map_only(torch.Tensor, self.value, (args, kwargs))
        result = func(*real_args, **real)
        if written:
            return result
        return pytree.tree_map_only(
            torch.Tensor, lambda made: self._adopt(made) if made.layout is torch.strided else made, result
        )

    # -- values -----------------------------------------------------------------------------------------------

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replay a recorded tensor; other tensors are returned unchanged."""
        if not tensor.is_meta:
            return tensor
        view = self.view(tensor)
        return self.tape.peek(view if view is not None else self._described(self._adopt(tensor)))


class _ReportedDevice(TorchFunctionMode):
    """Function mode that makes recorded tensors report the device requested by the code, and lets it read values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        told = (
            _DEVICE_ATTRIBUTES.get(getattr(func, "__self__", None))
            if getattr(func, "__name__", "") == "__get__"
            else None
        )
        if told is not None:
            with torch._C.DisableTorchFunction():
                if isinstance(args[0], torch.Tensor) and args[0].is_meta:
                    return told(self._recorder.device(args[0]))
        if func in _READS:
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                unreal = isinstance(args[0], torch.Tensor) and args[0].is_meta
                result = func(*pytree.tree_map_only(torch.Tensor, self._recorder.value, args), **kwargs)
            if unreal and func in (torch.Tensor.numpy, torch.Tensor.__array__):
                result.flags.writeable = False  # writes into the array would not reach the tensor
            return result
        return func(*args, **kwargs)


_DEVICE_ATTRIBUTES: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device: lambda device: device,
    torch.Tensor.is_meta: lambda device: False,
    torch.Tensor.is_cpu: lambda device: device.type == "cpu",
    torch.Tensor.is_cuda: is_accelerator,
}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensor arguments that an operator writes."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
