"""After running out of memory: compares with the plan's estimate, suggests what to do, and discards the cached plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from rannd import log
from rannd.config import Config
from rannd.daemon.common.keys import Key, limit_key
from rannd.device.memory import free_memory
from rannd.device.memory_beside import bytes_beside
from rannd.errors import text_of
from rannd.plan.deployment import Deployment
from rannd.plan.slot_memory import device_bytes, stages_by_slots
from rannd.runtime.comm.cache_client import Cache
from rannd.runtime.comm.world import World
from rannd.runtime.failure.failure_report import Failure
from rannd.units import amount

GIB = 1024**3

LOWER = 0.9
"""Fraction of the estimated memory that the next plan may use."""

_ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)? ?(?:bytes|[KMGT]iB))")


@dataclass(frozen=True)
class MemoryPromise:
    """Memory estimate of a deployment, and its cache key. Holds no reference to the model, which it may outlive."""

    world: World
    config: Config
    cache: Cache
    deployment: Deployment
    usable: int
    """Bytes of each device that the plan was allowed to use."""
    key: Key | None
    """Cache key of the deployment; None for a deployment from a file."""
    base: Key | None
    """Cache key before any memory limit was lowered."""

    @property
    def digest(self) -> str:
        """Identifier of the deployment in messages between ranks; '' for a deployment from a file."""
        return self.key.digest if self.key is not None else ""

    def marks(self, stage: int | None) -> dict[str, Any]:
        """Fields of a `Failure`: the deployment, and the memory limit for the next plan."""
        stages, sizes = self.deployment.stages, device_bytes(self.deployment)
        # It is not above the fullest device; otherwise the same plan would be found again.
        limit = sizes[stages[stage].slots] if stage is not None and stage < len(stages) else max(sizes.values())
        return {"deployment": self.digest, "limit": int(limit * LOWER)}

    def text(self, exc: BaseException, stage: int | None) -> str:
        """Error text: the requested, free and planned memory, and what to do."""
        device = self.world.device
        free, total = free_memory(device)
        found = _ASKED.search(text_of(exc))
        parts = [f"out of memory on {device}; requested: {found[1] if found else 'unknown'}"]
        parts.append(f"free now: {amount(free)} of {amount(total)}")
        beside = bytes_beside(device)
        if beside:
            parts.append(f"contexts, libraries, communicators and other processes have {amount(beside)}")
        if stage is not None:
            planned = self.deployment.stages[stage]
            e = planned.estimate
            beside_it = [number for number in stages_by_slots(self.deployment)[planned.slots] if number != stage]
            if beside_it:
                whole = amount(device_bytes(self.deployment)[planned.slots])
                numbers = ", ".join(map(str, beside_it))
                parts.append(f"the plan estimated {whole} for each device with stage {stage} and also {numbers}")
            divided = self.deployment.zero >= 2
            brief = "whole parameters and gradients of ZeRO" if divided else "gradients on their way"
            alone = e.total_bytes if beside_it else e.used_bytes
            parts.append(
                f"the plan estimated {amount(alone)} for stage {stage} ({planned.name}): parameters "
                f"{amount(e.param_bytes)}, gradients {amount(e.grad_bytes)}, activations {amount(e.activation_bytes)}, "
                f"optimizer {amount(e.optimizer_bytes)}, transfers {amount(e.comm_bytes)}, temporary memory of an "
                f"operator's backward {amount(e.working_bytes - e.whole_bytes)}"
                + (f", {brief} {amount(e.whole_bytes)}" if e.whole_bytes else "")
                + f"; its limit was {amount(self.usable)}"
            )
        count = self.deployment.microbatches
        todo = [f"more and smaller microbatches (pipeline_num={2 * count})"]
        if not self.config.checkpointing:
            todo.append("checkpointing=true")
        if stage is not None and self.deployment.stages[stage].stays_whole:
            todo.append("reshard_after_forward=true")
        limit = self.marks(stage)["limit"] / GIB
        todo += [f"a lower mem_limit_gb ({limit:.3g})", "more ranks", "smaller mini-batches"]
        parts.append("what helps: " + ", ".join(todo))
        if self.key is None:
            parts.append("the deployment is from a file: plan again without it")
        return "; ".join(parts)

    def mark(self, failure: Failure) -> None:
        """Discard the cached deployment, and let the next run plan for less memory."""
        if self.key is None or self.base is None or not self.world.first_on_node:
            return
        logger = log.get("RaNNCModule")
        reason = f"out of memory on rank {failure.rank} in {failure.place}"
        with self.cache.connect() as client:
            client.discard(self.key, reason)
            if client.put(limit_key(self.base), msgspec.msgpack.encode(failure.limit)):
                logger.warning(
                    "Discarded the cached deployment %s (%s); the next run plans for at most %s of each device",
                    self.key.short,
                    reason,
                    amount(failure.limit),
                )
