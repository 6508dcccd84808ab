"""What a job learns from its own measured steps, for plans of later ones.

Rank 0 compares what stages took with what their parts took alone, and keeps both (`rannd/runtime/costs/learned_costs.py`).
Then one of three things happens::

    steps explain the costs           another plan would be 5 % faster      it takes the plan's place, for the next run
                                      none would                           nothing
    a stage takes something else      its parts are measured again in the next run, and the plan is made anew
"""

from __future__ import annotations

import statistics

import msgspec

from rannd import log
from rannd.daemon.client.cache import Client
from rannd.daemon.common.keys import Key, profile_key
from rannd.plan.blocks.repeated_layers import parts_of
from rannd.plan.calibration import Correction, StageWork, fitted
from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import MeasuredStep, RankTimes, StageTimes
from rannd.plan.simulate.layout import piece_rows
from rannd.profile.points import Measured
from rannd.profile.samples import UNCERTAIN
from rannd.runtime.comm.cache_client import Cache
from rannd.runtime.comm.world import World
from rannd.runtime.costs.known_costs import MeasuredParts
from rannd.runtime.costs.learned_costs import LearnedCosts, StageTook
from rannd.runtime.planning.plan_ahead import Better, Request, look_up, start

DOUBTFUL = 0.15
"""How far a stage's time may be from what follows from its parts, relative; beyond it they were measured wrongly."""
DOUBTFUL_US = 300.0
"""Microseconds that it has to be off for that."""
MOST_DOUBTS = 2
"""How often parts of a graph are measured again for that reason: if it does not help, it is another one."""


class Calibration:
    """Learns from the steps of a deployment.

    Args:
        world: The ranks.
        cache: Where what was learned is kept.
        request: What rank 0 knows for planning again, with the deployment as `instead`; None: nothing is learned.
        key: Of what is learned.
    """

    def __init__(self, world: World, cache: Cache, request: Request | None, key: Key) -> None:
        self._world, self._cache, self._request, self._key = world, cache, request, key

    def take(self, measured: MeasuredStep) -> None:
        """Take the times of all ranks. Collective, as rank 0 shares what it stores with other nodes."""
        with self._cache.connected():
            client = self._cache.client
            if self._request is None or client is None:
                return
            (own,) = self._request.wanted
            assert own.instead is not None
            self._tell(own.instead, measured)
            if tells_little(own.instead):
                return
            try:
                self._learn(self._request, own.instead, measured, client)
            except KeyError:  # a part that nobody has measured: the plan was made elsewhere
                log.get("RaNNCModule").debug("Nothing was learned from the steps: costs of some parts are not known")

    def _learn(self, request: Request, deployment: Deployment, measured: MeasuredStep, client: Client) -> None:
        grains = parts_of(request.task, compiled=request.compiled)
        parts = MeasuredParts(request.task, grains.atoms if request.by_atoms else grains.grains, request.toolchain)
        took = stages_took(request, deployment, measured)
        profile = dict(request.profile)
        look_up(request, client, profile, parts.wanted([stage.ops for stage in took]))
        works = [
            StageWork(work.forward_us, work.backward_us, stage.forward_us, max(stage.backward_us - added, 0.0))
            for stage, work in zip(took, parts.work([each.ops for each in took], profile, took[0].rows), strict=True)
            for added in [work.add_us * (1 - 1 / max(deployment.microbatches, 1))]
        ]
        took = [
            msgspec.structs.replace(stage, backward_us=work.measured_backward_us)
            for stage, work in zip(took, works, strict=True)
        ]
        correction = fitted(works)
        wrong = [stage for stage, work in zip(took, works, strict=True) if is_doubtful(work, correction)]
        doubts = bool(wrong) and request.learned.doubts < MOST_DOUBTS
        call_us = min(rank.rest_us for rank in measured.ranks)
        learned = request.learned.and_those(took, call_us, doubts=doubts)
        client.put(self._key, msgspec.msgpack.encode(learned))
        if doubts:
            self._distrust(request, parts, profile, wrong, client)
        else:
            start(msgspec.structs.replace(request, learned=learned, profile=profile), _tell_better)

    def _distrust(
        self,
        request: Request,
        parts: MeasuredParts,
        profile: dict[str, Measured],
        wrong: list[StageTook],
        client: Client,
    ) -> None:
        """Let the next run measure the parts of stages again, and plan anew."""
        doubted = parts.wanted([stage.ops for stage in wrong])
        for part in doubted:
            points = tuple(msgspec.structs.replace(point, spread=UNCERTAIN) for point in profile[part].points)
            key = profile_key(
                block_hash=part,
                device_model=request.device_model,
                threads=request.threads,
                versions=request.versions,
                flags=request.flags,
            )
            client.put(key, msgspec.msgpack.encode(msgspec.structs.replace(profile[part], points=points).lasting))
        (own,) = request.wanted
        client.discard(own.key, "stages take something else than their parts did when they were measured")
        log.get("RaNNCModule").warning(
            "%d stages take something else than their %d parts did when these were measured. The next run measures "
            "them again and makes a new plan",
            len(wrong),
            len(doubted),
        )

    def _tell(self, deployment: Deployment, measured: MeasuredStep) -> None:
        """Log what was predicted and measured, and what explains the difference."""
        if not deployment.step_us:
            return
        slowest = max(measured.ranks, key=lambda rank: rank.step_us)
        planned_us = planned_computing_us(deployment, slowest.slot)
        computing = slowest.computing_us - planned_us
        whole = measured.step_us - deployment.step_us
        log.get("RaNNCModule").info(
            "Steps take %.1f ms, predicted were %.1f ms (%+.1f %%): computing %+.1f ms, the runtime itself %+.1f ms, "
            "waiting and transfers %+.1f ms",
            measured.step_us / 1e3,
            deployment.step_us / 1e3,
            100 * whole / deployment.step_us,
            computing / 1e3,
            slowest.rest_us / 1e3,
            (whole - computing - slowest.rest_us) / 1e3,
        )


def planned_computing_us(deployment: Deployment, slot: int) -> float:
    """Return the planned time of a slot's forwards and backwards in a step."""
    return sum(
        stage.estimate.forward_us + stage.estimate.backward_us for stage in deployment.stages if slot in stage.slots
    )


def tells_little(deployment: Deployment) -> bool:
    """Whether times of stages contain others than those of their parts: copies, gathers, repeated forwards."""
    return (
        deployment.zero >= 2
        or any(deployment.offloads)
        or all(any(stage.segments) for stage in deployment.stages)
    )


def stages_took(request: Request, deployment: Deployment, measured: MeasuredStep) -> list[StageTook]:
    """Return what the stages of a deployment took that repeat nothing."""
    numbers = {op.name: number for number, op in enumerate(request.task.ops)}
    rows = piece_rows(deployment.batch_rows, len(deployment.slots), deployment.microbatches)
    found = []
    for number, stage in enumerate(deployment.stages):
        times = list(measured.of_stage(number))
        if any(stage.segments) or not times:
            continue
        forward = statistics.median(each.forward.quartile_us for each in times)
        backward = statistics.median(each.backward.quartile_us + each.weight.quartile_us for each in times)
        found.append(StageTook(tuple(numbers[name] for name in stage.ops), rows, forward, backward))
    return found


def is_doubtful(work: StageWork, correction: Correction) -> bool:
    """Whether a stage took something else than its parts, corrected as all stages are."""
    took = work.measured_forward_us + work.measured_backward_us
    told = correction.forward_us(work.forward_us) + correction.backward_us(work.backward_us)
    return abs(took - told) > max(DOUBTFUL * took, DOUBTFUL_US)


def _tell_better(better: Better) -> None:
    log.get("RaNNCModule").info(
        "Measured costs make another plan %.0f %% faster, %.1f ms instead of %.1f ms a step; the next run takes it: %s",
        100 * (1 - better.step_us / better.before_us),
        better.step_us / 1e3,
        better.before_us / 1e3,
        better.line,
    )
