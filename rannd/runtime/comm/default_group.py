"""Lets a script call ``init_process_group`` although rannd has made torch's default process group already.

A process has one default group, and a second `init_process_group` is an error of torch. A script written for torchrun
may call it after it has wrapped its model, which makes the group if there is none: the script then uses that one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from rannd import log
from rannd.errors import UsageError
from rannd.patches import declare, install

_INIT = declare("init_process_group", dist, "init_process_group", "scripts may call it after rannd has made the group")


def share(backend: str) -> None:
    """Give the default group, just made by rannd with `backend`, to later calls of init_process_group.

    Scripts import the function by name, too, so it is replaced in every module that has it.
    """
    group, original = dist.group.WORLD, dist.init_process_group

    def again(before: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if dist.group.WORLD is not group:  # destroyed by the script, which may make another one
            before(*args, **kwargs)
        else:
            _check(inspect.signature(original).bind(*args, **kwargs).arguments, backend)

    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("init_process_group") is original:
            install(_INIT.on(module).around(again))


def _check(asked: dict[str, Any], backend: str) -> None:
    """UsageError if a script asks for another group than the existing one; else one line in the log of rank 0."""
    size, rank = dist.get_world_size(), dist.get_rank()
    here = {"backend": backend, "world_size": size, "rank": rank}
    known = _backends(backend) | {"undefined"}
    other = {name: asked[name] for name, value in here.items() if asked.get(name) not in (None, -1, value)}
    if "backend" in other and _backends(str(other["backend"])) <= known:
        del other["backend"]
    if other:
        told = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise UsageError(
            f"init_process_group({told}): rannd has made the default process group already, with backend={backend!r}, "
            f"world_size={size}, rank={rank} here. Call init_process_group before RaNNCModule, or without {told}"
        )
    if rank == 0:
        log.get("RaNNCProcess").info(
            "init_process_group: the script uses the default process group that rannd has made (%s, %d rank%s)",
            backend,
            size,
            "s" if size > 1 else "",
        )


def _backends(text: str) -> set[str]:
    """Names in ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    return {part.rpartition(":")[2].strip() for part in text.lower().split(",")}
