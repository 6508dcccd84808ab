"""Which transport a job uses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rannd.device.identity import is_accelerator
from rannd.errors import LaunchError
from rannd.runtime.transport.gloo_transport import GlooTransport
from rannd.runtime.transport.nccl_transport import NcclTransport
from rannd.runtime.transport.staged_transport import StagedTransport
from rannd.runtime.transport.strict_transport import StrictTransport
from rannd.runtime.transport.transport import MakeGroup, Transport

_CPU_ONLY = frozenset({GlooTransport.name, StrictTransport.name})
_BACKENDS = {kind.name: kind.backend for kind in (GlooTransport, NcclTransport, StagedTransport, StrictTransport)}


def transport_name(wanted: str, device: torch.device) -> str:
    """Name of the transport for the configuration item `transport`; `auto` is NCCL on GPUs and gloo on CPUs.

    Raises:
        LaunchError: It does not move tensors of this device.
    """
    if wanted == "auto":
        return NcclTransport.name if is_accelerator(device) else GlooTransport.name
    if is_accelerator(device) and wanted in _CPU_ONLY:
        raise LaunchError(f"transport={wanted} moves tensors of the CPU, but device is {device}; use auto or staged")
    if not is_accelerator(device) and wanted == NcclTransport.name:
        raise LaunchError(f"transport=nccl moves tensors between GPUs, but device is {device}; use auto")
    return wanted


def group_backend(name: str) -> str:
    """Backend of the process groups of a transport."""
    return _BACKENDS[name]


def make_transport(
    name: str,
    device: torch.device,
    rank: int,
    everyone: dist.ProcessGroup | None,
    make_group: MakeGroup,
) -> Transport:
    """Make the transport of a rank. Collective over all ranks.

    Args:
        name: As `transport_name` returned it.
        device: Device of the messages.
        rank: This rank.
        everyone: Group of all ranks, of the transport's backend; None for a single rank.
        make_group: Makes process groups.
    """
    if name == NcclTransport.name:
        return NcclTransport(device, rank, make_group)
    gradients = None if everyone is None else make_group(group_backend(name), None)
    if name == StrictTransport.name:
        return StrictTransport(device, rank, everyone, gradients)
    return (StagedTransport if name == StagedTransport.name else GlooTransport)(device, everyone, gradients)
