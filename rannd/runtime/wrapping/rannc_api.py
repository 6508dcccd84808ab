"""What scripts written for RaNNC call that means nothing here, or something else.

What has a meaning is a function of `pyrannc` or a method of `RaNNCModule`, with RaNNC's names of arguments. What has
none is accepted with one line of the log if a script can go on without it, and refused with what to do otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rannd import config as configuration
from rannd import log
from rannd.errors import UsageError
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import current
from rannd.runtime.deployment.step_measuring import dump_latest

_NO_APEX = (
    "Apex is not supported. In place of its O1 run the model under torch.autocast, with a torch.amp.GradScaler for "
    "float16 (RaNNCModule(model, optimizer, scaler=scaler)); parameters stay float32. In place of O2 convert the model "
    "(model.bfloat16()) before its optimizer is made, and set master_weights=true (RANNC_MASTER_WEIGHTS=true): the "
    "optimizer steps float32 copies"
)
_REFUSED_OPTIONS = {
    "enable_apex_amp": _NO_APEX,
}
_IDLE_OPTIONS = {
    "allreduce_amp_master_params": (
        "gradients are reduced in the type of the parameters, or with master_weights in float32; reduce_dtype chooses"
    ),
}

_NOT_DIVIDED = (
    "parameters are not divided in this way: a rank holds those of its stage, whole or (ZeRO 3) a piece that its "
    "stage's replicas know of, and those of other stages not at all. "
    "model.named_parameters(own=True) has those that this rank holds, model.get_param(name) a copy of any; "
    "values for a model built under DistributeModelParams are loaded by model.load_state_dict or checkpoint="
)
REFUSED_FUNCTIONS = {
    "get_dist_param_range": _NOT_DIVIDED,
    "load_dist_param": _NOT_DIVIDED,
    "set_dist_param": _NOT_DIVIDED,
    "set_dist_param_dtype": _NOT_DIVIDED,
    "store_dist_param": _NOT_DIVIDED,
}
"""Functions of RaNNC's module -> why they cannot work, and what does."""


def check_options(options: dict[str, bool]) -> None:
    """UsageError for an option of RaNNC's constructor that is set and has no meaning here; a log line for idle ones."""
    for name, value in options.items():
        if value and name in _REFUSED_OPTIONS:
            raise UsageError(f"RaNNCModule(.., {name}=True): {_REFUSED_OPTIONS[name]}")
        if value and name in _IDLE_OPTIONS:
            log.get("RaNNCModule").warning("%s has no effect: %s", name, _IDLE_OPTIONS[name])


def refused_function(name: str) -> Callable[..., Any]:
    """A function that raises the UsageError of a name in `REFUSED_FUNCTIONS`."""

    def refused(*_: Any, **__: Any) -> Any:
        raise UsageError(f"pyrannc.{name}: {REFUSED_FUNCTIONS[name]}")

    refused.__name__ = name
    return refused


def recreate_all_communicators() -> None:
    """No-op with a log line: connections between ranks last as long as the job."""
    _ready()
    log.get("RaNNCProcess").warning("recreate_all_communicators has no effect: connections last as long as the job")


def dump_events() -> None:
    """Write the timeline of the latest step to `event_trace_file`. Collective; a log line where nothing is recorded."""
    dump_latest(current(_ready()))


def all_gather(ten: torch.Tensor, buf: torch.Tensor) -> None:
    """Write the tensors of all ranks into `buf`, one after the other by rank. Collective.

    Args:
        ten: This rank's tensor; of the same shape and dtype on all ranks.
        buf: Tensor of the same dtype with room for one `ten` of each rank, in any shape; contiguous.

    Raises:
        UsageError: `buf` has another size or dtype, or is not contiguous.
    """
    world = current(_ready())
    if buf.numel() != world.size * ten.numel() or buf.dtype != ten.dtype or not buf.is_contiguous():
        raise UsageError(
            f"all_gather of {world.size} tensors of shape {tuple(ten.shape)}, {ten.dtype}, into one of shape "
            f"{tuple(buf.shape)}, {buf.dtype}: make it torch.empty({world.size}, {', '.join(map(str, ten.shape))}"
            f"{', ' if ten.ndim else ''}dtype={ten.dtype})"
        )
    meet(world, Phase.ALL_GATHER, f"{tuple(ten.shape)} {ten.dtype}")
    mine = ten.detach().to(world.device).contiguous().view(-1)
    parts = [mine]
    if world.size > 1:
        parts = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(parts, mine, group=world.group_of(tuple(range(world.size))))
    with torch.no_grad():
        buf.view(-1).copy_(torch.cat(parts))


def _ready() -> configuration.Config:
    config = configuration.load()
    log.setup(level=config.log_level)
    return config
