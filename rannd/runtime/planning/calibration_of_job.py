"""What a job learns from its own measured steps, for plans of later ones.

Rank 0 compares what stages took with what their parts took alone, and keeps it (rannd/runtime/costs/learned_costs.py).
Then one of these things happens::

    other processes are busy          nothing
    steps explain the costs           another plan would be 5 % faster      it takes the plan's place, for the next run
                                      none would                           nothing
    a stage takes something else      its parts are measured again in the next run, and the plan is made anew
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rannd import log
from rannd.daemon.client.cache import Client
from rannd.daemon.common.keys import Key, measured_key
from rannd.device.identity import is_accelerator
from rannd.plan.blocks.repeated_layers import parts_of
from rannd.plan.deployment import Deployment, StageEstimate
from rannd.plan.measured_step import TOLD, MeasuredStep, RankTimes
from rannd.plan.simulate.layout import piece_rows, step_costs
from rannd.profile.points import Measured
from rannd.profile.samples import UNCERTAIN
from rannd.runtime.comm.cache_client import Cache, understood
from rannd.runtime.comm.world import World
from rannd.runtime.costs.correction import Correction, StageWork, fitted
from rannd.runtime.costs.known_costs import MeasuredParts
from rannd.runtime.costs.learned_costs import LearnedCosts, StageTook
from rannd.runtime.costs.learned_runtime import LearnedRuntime
from rannd.runtime.costs.measured_reductions import reductions_took
from rannd.runtime.planning.plan_ahead import FASTER, Request, look_up, start
from rannd.runtime.planning.replanning import Replanning

DOUBTFUL = 0.25
"""How far a stage's time may be from what follows from its parts, relative; beyond it they were measured wrongly."""
DOUBTFUL_US = 300.0
"""Microseconds that it has to be off for that."""
MOST_DOUBTS = 2
"""How often parts of a graph are measured again for that reason: if it does not help, it is another one."""


_LEARNED = msgspec.msgpack.Decoder(LearnedCosts)
_RUNTIME = msgspec.msgpack.Decoder(LearnedRuntime)
_DOUBTED = "stages take something else than their parts did when they were measured"


@dataclass(frozen=True)
class LearnedKeys:
    """Where what is learned is kept."""

    costs: Key
    """`LearnedCosts` of the graph."""
    runtime: Key
    """`LearnedRuntime` of the machine."""


class Calibration:
    """Learns from the steps of a deployment.

    Args:
        world: The ranks.
        cache: Where what was learned is kept.
        deployment: Of these steps.
        request: What rank 0 knows for planning again, with the deployment as `instead`; None: nothing is learned.
        keys: Of what is learned.
        replanning: Is told of a better plan.
    """

    def __init__(
        self,
        world: World,
        cache: Cache,
        deployment: Deployment,
        request: Request | None,
        keys: LearnedKeys,
        replanning: Replanning,
    ) -> None:
        self._world, self._cache, self._deployment, self._request, self._keys = world, cache, deployment, request, keys
        self._replanning = replanning

    def take(self, measured: MeasuredStep) -> None:
        """Take the times of all ranks. Collective, while the cache is connected."""
        self._replanning.steps_measured()
        queued = is_accelerator(self._world.device)  # its host does not wait for it: a step's time is not known
        if self._world.rank == 0 and self._deployment.step_us and not queued:
            told = comparison(self._deployment, measured, self._world.rank_of_slot)
            log.get("RaNNCModule").info("%s", told)
        gone: list[Key] = []
        if self._request is not None and self._cache.client is not None and not tells_little(self._deployment):
            gone = self._learn_if_calm(self._request, measured, self._cache.client)
        self._cache.discard_on_nodes(gone, _DOUBTED)

    def _learn_if_calm(self, request: Request, measured: MeasuredStep, client: Client) -> list[Key]:
        """Learn, unless other processes are busy; returns what was discarded."""
        logger = log.get("RaNNCModule")
        if measured.disturbed:
            logger.info("Other processes use this machine: nothing is learned from these steps")
            return []
        try:
            return self._learn(request, self._deployment, measured, client)
        except Exception as exc:  # the training is worth more, and other ranks would wait for this one
            logger.warning("Nothing was learned from the steps: %s: %s", type(exc).__name__, exc)
        return []

    def _learn(self, request: Request, deployment: Deployment, measured: MeasuredStep, client: Client) -> list[Key]:
        grains = parts_of(request.task, compiled=request.compiled)
        parts = MeasuredParts(request.task, grains.atoms if request.by_atoms else grains.grains, request.toolchain)
        by_number = stages_took(request, deployment, measured)
        if not by_number:
            return []
        profile, wanted = dict(request.profile), parts.wanted([stage.ops for stage in by_number.values()])
        look_up(request, client, profile, wanted)
        missing = wanted.keys() - profile.keys()
        if missing:
            log.get("RaNNCModule").info(
                "Nothing is learned from these steps: the cache does not have the times of %d of the model's parts, "
                "which were measured elsewhere or are gone; cache=refresh (RANNC_CACHE=refresh) measures them",
                len(missing),
            )
            return []
        took, works = [], []
        for number, stage in by_number.items():
            (cost,) = parts.work([stage.ops], profile, stage.rows, stage.most)
            more = 1 - 1 / deployment.stages[number].estimate.pieces  # the first microbatch's gradients are not added
            alone = msgspec.structs.replace(stage, backward_us=max(stage.backward_us - more * cost.add_us, 0.0))
            took.append(alone)
            works.append(StageWork(cost.forward_us, cost.backward_us, alone.forward_us, alone.backward_us))
        correction = fitted(works)
        # Not what it was when this plan was made: other jobs may have learned since.
        key = self._keys.costs
        before = understood(client, key, client.get(key), _LEARNED, self._is_plausible) or LearnedCosts()
        doubts = before.doubts < MOST_DOUBTS and any(is_doubtful(work, correction) for work in works)
        learned = before.and_those(took, doubts=doubts)
        client.put(key, msgspec.msgpack.encode(learned))
        runtime = self._learned_runtime(request, measured, client)
        if doubts:
            # Which stage is wrong is not known: the correction is one for all.
            return self._distrust(request, parts.wanted([stage.ops for stage in took]), profile, client)
        off = abs(measured.step_us - deployment.step_us) > FASTER * measured.step_us
        if off or is_off(deployment, by_number) or runtime_is_off(deployment, measured):
            known = msgspec.structs.replace(request, learned=learned, runtime=runtime, profile=profile)
            start(known, self._replanning.found)
        return []

    def _learned_runtime(self, request: Request, measured: MeasuredStep, client: Client) -> LearnedRuntime:
        """Keep what the runtime took of the hosts, and messages of the links; not where hosts work ahead."""
        if request.queued:
            return request.runtime
        key = self._keys.runtime
        before = understood(client, key, client.get(key), _RUNTIME, lambda found: found.is_plausible)
        task, links, options = request.task, request.links, request.options
        learned = (before or LearnedRuntime()).and_those(
            task.graph_hash,
            measured,
            step_costs(task, self._deployment, *links, options=options).values_bytes,
            byte_us=links[0].p2p_host_us,
            reduced=reductions_took(task, self._deployment, measured, links, options),
        )
        client.put(key, msgspec.msgpack.encode(learned))
        return learned

    def _is_plausible(self, found: LearnedCosts) -> bool:
        return self._request is not None and found.is_plausible(len(self._request.task.ops))

    def _distrust(
        self, request: Request, parts: Collection[str], profile: Mapping[str, Measured], client: Client
    ) -> list[Key]:
        """Let the next run measure parts again, and plan anew; returns what is discarded."""
        again = 0
        for part in parts:
            points = tuple(msgspec.structs.replace(point, spread=UNCERTAIN) for point in profile[part].points)
            doubted = msgspec.structs.replace(profile[part], points=points).lasting
            client.put(request.key_of(part), msgspec.msgpack.encode(doubted))
            again += any(point.is_noisy for point in points)  # those that take next to no time are not
        (own,) = request.wanted
        gone = [own.key, measured_key(own.key.digest)]
        for each in gone:
            client.discard(each, _DOUBTED)
        log.get("RaNNCModule").warning(
            "Stages take something else than their parts did when these were measured. The next run measures these %d "
            "parts again and makes a new plan",
            again,
        )
        return gone


def comparison(deployment: Deployment, measured: MeasuredStep, rank_of_slot: Sequence[int]) -> str:
    """Say what was predicted and measured, and what explains the difference, of the rank that waits least.

    Steps of all ranks take equally long, as they wait for each other.
    """
    busiest = max(measured.ranks, key=lambda rank: rank.computing_us - rank.processor_us)
    whole = measured.step_us - deployment.step_us
    others = busiest.processor_us
    computing = busiest.computing_us - others - busiest.beside_us - planned_computing_us(deployment, busiest.slot)
    runtime = busiest.runtime_us - planned_host_us(deployment, busiest)
    place = f", on rank {rank_of_slot[busiest.slot]}" if len(measured.ranks) > 1 else ""
    told = f"processors that others had {others / 1e3:+.1f} ms, " if others > TOLD * measured.step_us else ""
    return (
        f"Steps take {measured.step_us / 1e3:.1f} ms, predicted were {deployment.step_us / 1e3:.1f} ms "
        f"({100 * whole / deployment.step_us:+.1f} %){place}: computing {computing / 1e3:+.1f} ms, the runtime itself "
        f"{runtime / 1e3:+.1f} ms, {told}waiting and transfers {(whole - computing - runtime - others) / 1e3:+.1f} ms"
    )


def planned_host_us(deployment: Deployment, rank: RankTimes) -> float:
    """Return the planned time of a rank's host in a step, beside computing and waiting."""
    return deployment.call_us + deployment.host_us * rank.handled


def runtime_is_off(deployment: Deployment, measured: MeasuredStep) -> bool:
    """Whether the runtime took something else than planned, so that another plan may be the fastest."""
    off = max(abs(rank.runtime_us - planned_host_us(deployment, rank)) for rank in measured.ranks)
    return off > FASTER * measured.step_us


def planned_computing_us(deployment: Deployment, slot: int) -> float:
    """Return the planned time of a slot's forwards and backwards in a step."""
    return sum(_planned_us(stage.estimate) for stage in deployment.stages if slot in stage.slots)


def tells_little(deployment: Deployment) -> bool:
    """Whether times of stages contain others than those of their parts: copies, gathers, repeated forwards."""
    return deployment.zero >= 2 or any(deployment.offloads) or all(any(stage.segments) for stage in deployment.stages)


def stages_took(request: Request, deployment: Deployment, measured: MeasuredStep) -> dict[int, StageTook]:
    """Return what the stages of a deployment took that repeat nothing, by number."""
    numbers = {op.name: number for number, op in enumerate(request.task.ops)}
    rows, most = (piece_rows(deployment.batch_rows, len(deployment.slots), m) for m in (deployment.microbatches, 1))
    found = {}
    for number, stage in enumerate(deployment.stages):
        times = list(measured.of_stage(number))
        if any(stage.segments):
            continue
        forward = statistics.median(each.forward.own_us for each in times)
        backward = statistics.median(each.backward.own_us + each.weight.own_us for each in times)
        if forward <= 0:  # it computes next to nothing
            continue
        found[number] = StageTook(tuple(numbers[name] for name in stage.ops), rows, most, forward, backward)
    return found


def is_off(deployment: Deployment, took: Mapping[int, StageTook]) -> bool:
    """Whether a stage took something else than planned, so that another plan may be the fastest.

    `took`: by number of the stage.
    """
    planned = {number: deployment.stages[number].estimate for number in took}
    return any(
        abs((each.forward_us + each.backward_us) * planned[number].pieces - _planned_us(planned[number]))
        > FASTER * _planned_us(planned[number])
        for number, each in took.items()
    )


def _planned_us(estimate: StageEstimate) -> float:
    return estimate.forward_us + estimate.backward_us


def is_doubtful(work: StageWork, correction: Correction) -> bool:
    """Whether a stage took something else than its parts, corrected as all stages are."""
    took = work.measured_forward_us + work.measured_backward_us
    told = correction.forward_us(work.forward_us) + correction.backward_us(work.backward_us)
    return abs(took - told) > max(DOUBTFUL * took, DOUBTFUL_US)
