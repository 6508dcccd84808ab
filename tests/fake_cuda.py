"""CUDA without a GPU: tensors of torch's FakeTensorMode, which have a device and no values.

They exist in every build of torch, but autograd asks for the device's streams, which a build for the CPU refuses by
ending the process. `pretend` gives it those of the meta device, which do nothing.
"""

from __future__ import annotations

import ctypes
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
    """Let autograd record operations on fake CUDA tensors in this process, torch.tensor make fake ones, and autocast be
    entered, which is off where torch sees no GPU.
    """
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
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)


def autocast(dtype: torch.dtype | None = torch.bfloat16) -> torch.autocast:
    """Autocast of CUDA; None: without it."""
    return torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None)
