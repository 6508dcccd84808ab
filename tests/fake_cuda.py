"""CUDA without a GPU: tensors of torch's FakeTensorMode, which have a device and no values.

They exist in every build of torch, but autograd asks for the device's streams, which a build for the CPU refuses by
ending the process. `pretend` gives it those of the meta device, which do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental import proxy_tensor

CUDA = torch.device("cuda", 0)
_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
"""c10::impl::device_guard_impl_registry: an array of pointers by c10::DeviceType."""
_OF_CUDA, _OF_META, _TYPES = 1, 14, 16
"""c10::DeviceType."""


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let autograd record operations on fake CUDA tensors in this process, and torch.tensor make fake ones."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _TYPES).in_dll(library, _TABLE)
    if not guards[_OF_CUDA]:
        guards[_OF_CUDA] = guards[_OF_META]
    original = torch.tensor

    def tensor(data: Any, *, device: torch.device | str | None = None, **options: Any) -> torch.Tensor:
        made = original(data, **options)
        return made if device is None else made.to(device)

    monkeypatch.setattr(torch, "tensor", tensor)
    # Export knows the values of constants this small, and would compute with them on the real device.
    monkeypatch.setattr(proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1)


@contextlib.contextmanager
def autocast(dtype: torch.dtype | None = torch.bfloat16, *, cache: bool = True) -> Iterator[None]:
    """As torch.autocast("cuda"), which switches itself off where torch sees no GPU; None: not at all."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before[1])
    torch.set_autocast_cache_enabled(cache)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])
