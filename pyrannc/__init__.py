"""Automatic parallelism for PyTorch models: ``model = pyrannc.RaNNCModule(model, optimizer)``.

The public API, under the name that RaNNC scripts import. Importing it starts nothing;
where gloo would listen on an address that other nodes cannot reach, or that they reach although all ranks are on this
machine, it sets GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch as _torch

from rannd import log as _log
from rannd import torch_versions as _torch_versions

# Before the other imports, which may fail with an untested torch version; only rank 0 warns.
if _log.rank_of(os.environ) in ("", "0"):
    _torch_versions.warn_if_untried(_torch.__version__, stacklevel=2)

from rannd import config as _configuration
from rannd.graph.partition.cut_point import CutPoint
from rannd.plan.deployment import decode as _decode
from rannd.plan.plan_text import show as _show
from rannd.runtime.comm import network_interface as _network_interface
from rannd.runtime.comm.lockstep import Phase as _Phase
from rannd.runtime.comm.lockstep import meet as _meet
from rannd.runtime.comm.process_flags import delay_grad_allreduce, keep_graph, sync_params_on_init
from rannd.runtime.comm.rendezvous import find_place as _find_place
from rannd.runtime.comm.world import current as _current
from rannd.runtime.comm.world import made as _made
from rannd.runtime.module import RaNNCModule, clear
from rannd.runtime.parameters.deferred_init import DistributeModelParams
from rannd.runtime.planning.deployment_file import named as _named
from rannd.runtime.planning.deployment_file import read_file as _read_file
from rannd.runtime.profiling import profile
from rannd.runtime.wrapping.rannc_api import REFUSED_FUNCTIONS as _REFUSED_FUNCTIONS
from rannd.runtime.wrapping.rannc_api import all_gather, dump_events, recreate_all_communicators
from rannd.runtime.wrapping.rannc_api import refused_function as _refused_function

_network_interface.choose(os.environ)

if TYPE_CHECKING:
    from rannd.runtime.averaged_model import AveragedModel
    from rannd.runtime.checkpoint.checkpoint_api import load_checkpoint, save_checkpoint
    from rannd.runtime.elastic.elastic_sampler import ElasticSampler
    from rannd.runtime.elastic.elastic_state import elastic, resume_step
    from rannd.runtime.notebook_launcher import notebook_launcher

__all__ = [
    "AveragedModel",
    "CutPoint",
    "DistributeModelParams",
    "ElasticSampler",
    "RaNNCModule",
    "all_gather",
    "barrier",
    "clear",
    "delay_grad_allreduce",
    "elastic",
    "get_rank",
    "get_world_size",
    "keep_graph",
    "load_checkpoint",
    "notebook_launcher",
    "profile",
    "recreate_all_communicators",
    "resume_step",
    "save_checkpoint",
    "show_deployment",
    "sync_params_on_init",
]

_dump_events = dump_events
"""RaNNC's name."""


def __getattr__(name: str) -> Any:
    """Import at first use what takes time: torch.distributed.checkpoint adds a fifth to torch's import time.

    Functions of RaNNC that have no meaning here are there as well; calling one raises a UsageError.
    """
    if name == "AveragedModel":
        from rannd.runtime.averaged_model import AveragedModel

        return AveragedModel
    if name in ("load_checkpoint", "save_checkpoint"):
        from rannd.runtime.checkpoint import checkpoint_api

        return getattr(checkpoint_api, name)
    if name == "ElasticSampler":
        from rannd.runtime.elastic.elastic_sampler import ElasticSampler

        return ElasticSampler
    if name in ("elastic", "resume_step"):
        from rannd.runtime.elastic import elastic_state

        return getattr(elastic_state, name)
    if name == "notebook_launcher":
        from rannd.runtime.notebook_launcher import notebook_launcher

        return notebook_launcher
    if name in _REFUSED_FUNCTIONS:
        return _refused_function(name)
    raise AttributeError(f"module 'pyrannc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def get_rank() -> int:
    """Rank of this process, 0 without a launcher."""
    return _find_place(os.environ).rank


def get_world_size() -> int:
    """Number of ranks, 1 without a launcher."""
    return _find_place(os.environ).size


def barrier() -> None:
    """Wait until all ranks get here; StepError if some rank makes a different collective call instead."""
    world = _made()
    if world is None:
        config = _configuration.load()
        _log.setup(level=config.log_level)
        world = _current(config)
    _meet(world, _Phase.BARRIER)


def show_deployment(path: str | Path, batch_size: int | None = None) -> None:
    """Print the plan in a file written by `save_deployment`: stages, memory, time and rejected alternatives.

    Needs no launcher and no devices; under a launcher only rank 0 prints. `batch_size` is the global batch size; if it
    is not the planned one, estimates are scaled to it roughly. DeploymentError if the file does not exist or is not a
    deployment; UsageError for a batch size below 1.
    """
    if get_rank() == 0:
        file = Path(path).expanduser()
        data = _read_file(file)
        with _named(file):
            deployment = _decode(data)
        print(_show(deployment, batch_size), flush=True)
