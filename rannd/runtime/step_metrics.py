"""Numbers of a training that a tracker shows beside its losses: predicted and measured steps, memory, samples."""

from __future__ import annotations

import time

import msgspec

from rannd.device.memory import used_memory
from rannd.plan.deployment import Deployment
from rannd.plan.slot_memory import slot_bytes
from rannd.runtime.session import Session

MIB = 2.0**20


class StepMetrics:
    """Collects the numbers of a wrapped model's training since they were collected before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun = time.monotonic()
        self._calls = session.audits.steps

    def collect(self) -> dict[str, float]:
        """Return the numbers, on all ranks the same. Collective. Empty before the model's first training call.

        ``rannd/``.. are::

            predicted_step_ms   of the plan, from the call of the model to the end of its backward
            measured_step_ms    the same, median of the steps that are measured (`calibrate_after`), once it is known
            predicted_bubble    part of it that is neither forward nor backward, mean of all devices: waiting for other
            measured_bubble     ranks, but also messages, reductions of gradients and the runtime itself
            call_ms             from one training call to the next: with the optimizer's step and the script's own work,
                                but without the first call, which traces and plans
            samples_per_s       the same: of all ranks together, if mini-batches have as many rows as were planned for
            memory_mib/rank0 .. on an accelerator the most that tensors have had, on CPUs the process's resident memory
            planned_mib/rank0 ..
        """
        session, world = self._session, self._session.world
        now, calls = time.monotonic(), session.audits.steps
        if not self._calls and calls:
            self._calls, self._begun = 1, session.audits.second_begun
        told = msgspec.msgpack.encode((used_memory(world.device), now - self._begun))
        every = [msgspec.msgpack.decode(each, type=tuple[int, float]) for each in world.gather_bytes(told)]
        done, self._calls, self._begun = calls - self._calls, calls, now
        deployment = session.deployment
        if deployment is None or not calls:
            return {}
        found = {
            "predicted_step_ms": deployment.step_us / 1e3,
            "predicted_bubble": _bubble(_planned_us(deployment), deployment.step_us, world.size),
        }
        if done:
            seconds = max(spent for _, spent in every) / done
            found |= {"call_ms": 1e3 * seconds, "samples_per_s": deployment.batch_rows / seconds}
        measured = session.measuring.measured if session.measuring is not None else None
        if measured is not None:
            found["measured_step_ms"] = measured.step_us / 1e3
            computing_us = sum(rank.computing_us for rank in measured.ranks)
            found["measured_bubble"] = _bubble(computing_us, measured.step_us, world.size)
        for rank, (used, _) in enumerate(every):
            found[f"memory_mib/rank{rank}"] = used / MIB
        for slot, rank in enumerate(world.rank_of_slot):
            found[f"planned_mib/rank{rank}"] = slot_bytes(deployment, slot) / MIB
        return {f"rannd/{name}": value for name, value in found.items()}


def _planned_us(deployment: Deployment) -> float:
    """Return the time of forwards and backwards of all devices in a step."""
    return sum(len(s.slots) * (s.estimate.forward_us + s.estimate.backward_us) for s in deployment.stages)


def _bubble(computing_us: float, step_us: float, devices: int) -> float:
    """Return the part of a step in which devices do not compute; `computing_us`: of all of them."""
    return max(1 - computing_us / (step_us * devices), 0.0) if step_us else 0.0
