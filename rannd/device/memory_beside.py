"""Memory of an accelerator that is in use beside tensors: contexts, libraries, communicators, other processes.

torch's allocator takes memory of the device in segments (*reserved*) for tensors. Everything else that is in use is
beside it: each process's context with its kernels, what libraries and NCCL's communicators take from the driver, and
all of other processes. Workspaces of libraries lie between the two: they come from torch's allocator, and are kept.
"""

from __future__ import annotations

import os

import torch

from rannd.device.identity import is_accelerator
from rannd.device.streams import synchronize


def bytes_beside(device: torch.device) -> int:
    """Bytes in use outside of this process's allocator; 0 on the CPU."""
    if not is_accelerator(device):
        return 0
    free, total = torch.accelerator.get_memory_info(device)
    return max(total - free - torch.accelerator.memory_reserved(device), 0)


def load_libraries(device: torch.device, *, convolutions: bool) -> int:
    """Load the context and the libraries for matrices and, if wanted, convolutions; returns the bytes that they keep.

    These are workspaces in torch's allocator, of all calls in this process together. Libraries are used in a forward
    and in a backward, whose thread has workspaces of its own.
    """
    before = torch.accelerator.memory_allocated(device)
    with torch.inference_mode(False), torch.enable_grad():
        if not refuses_products():
            side = torch.ones(64, 64, device=device, requires_grad=True)
            # The square's backward comes first, so that its thread has a context: cuBLAS without one makes torch warn.
            torch.nn.functional.linear(side, side, side[0]).square().sum().backward()
            del side
        if convolutions:
            image = torch.ones(8, 8, 3, 3, device=device, requires_grad=True)
            torch.nn.functional.conv2d(image, image, padding=1).sum().backward()
            del image
    synchronize(device)
    _kept[device] = _kept.get(device, 0) + max(torch.accelerator.memory_allocated(device) - before, 0)
    return _kept[device]


_kept: dict[torch.device, int] = {}
"""What libraries of this process were seen to keep."""


def refuses_products() -> bool:
    """Whether torch refuses products of matrices on CUDA: they shall be deterministic, and no workspace was set."""
    return torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
