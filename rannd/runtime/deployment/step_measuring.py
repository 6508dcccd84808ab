"""Measures the steps of a deployment: times of all ranks after some steps, stored beside the plan, and timelines.

Ranks record for themselves (rannd/runtime/timeline). They gather what they have where they have just agreed on the
next call, which all of them count alike; such a call is not measured::

    call     0     1 .. 20            21                    22 ..
             -     recorded, each     times are gathered
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rannd import log
from rannd.daemon.common.keys import Key, measured_key
from rannd.errors import DeploymentError, UsageError
from rannd.plain_file import PlainFile
from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import (
    MEASURED_FORMAT,
    MOST_EVENTS,
    MeasuredStep,
    RankTimes,
    StepEvent,
    decode_measured,
    encode_measured,
)
from rannd.plan.plan_options import PlanOptions
from rannd.plan.simulate.layout import step_costs
from rannd.plan.simulate.simulator import simulate
from rannd.plan.simulate.timeline import Event, chrome_traces
from rannd.profile.costs import LinkCost, RuntimeCost
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import World
from rannd.runtime.timeline.first_messages import FirstMessages, flights
from rannd.runtime.timeline.joined_timeline import RankSteps, join, rank_events
from rannd.runtime.timeline.recorder import StepRecorder
from rannd.runtime.timeline.step_times import rank_times

TRACED = 10
"""Number of the step, of those as they were planned, whose timeline is written."""

_FILE = PlainFile("timeline", "event_trace_file", UsageError, 1 << 40)
_RANK = msgspec.msgpack.Decoder(tuple[RankTimes, FirstMessages, RankSteps])
_STEPS = msgspec.msgpack.Decoder(RankSteps)


@dataclass(frozen=True)
class MeasuringSettings:
    """What is done with what ranks record; rank 0's configuration, as hosts can have other files."""

    after: int
    """Steps after which times are gathered; 0: never."""
    file: str
    """Where the timeline is written; '': nowhere."""

    @staticmethod
    def of(context: Context) -> MeasuringSettings:
        """Return the same settings on all ranks. Collective. UsageError on all if the file cannot be written."""
        config, wrong = context.config, ""
        if config.event_trace_file and context.world.rank == 0:
            try:
                _FILE.ensure_writable(Path(config.event_trace_file))
            except UsageError as exc:
                wrong = str(exc)
        here = (config.calibrate_after if context.recorder.on else 0, config.event_trace_file, wrong)
        after, file, wrong = msgspec.msgpack.decode(
            context.world.broadcast_bytes(msgspec.msgpack.encode(here)), type=tuple[int, str, str]
        )
        if wrong:
            raise UsageError(f"event_trace_file (RANNC_EVENT_TRACE_FILE): {wrong}")
        return MeasuringSettings(after, file)


@dataclass(frozen=True)
class Planned:
    """What a step is compared with."""

    deployment: Deployment
    links: tuple[LinkCost, LinkCost | None] | None
    """Within a node and between nodes; None: not known, so no step can be simulated."""
    options: PlanOptions
    key: Key | None
    """Of the deployment; None: it is from a file, so nothing is stored."""


class StepMeasuring:
    """Measures the steps of one deployment. Methods are collective but for `close`."""

    def __init__(self, context: Context, planned: Planned, settings: MeasuringSettings) -> None:
        """`settings`: the same on all ranks."""
        self._world, self._recorder, self._cache = context.world, context.recorder, context.cache
        self._planned, self._settings = planned, settings
        self._counted = 0
        """Steps as they were planned, begun since the deployment."""
        self._bound: weakref.ref[BoundGraph] | None = None
        """The planned graph."""
        self._inside = False
        """Whether backward runs inside of its calls."""
        self._written = not settings.file
        self._unwritten: weakref.finalize[[str], StepMeasuring] | None = None
        """Tells when the job ends that there is no timeline."""
        if settings.file and self._world.rank == 0:
            self._unwritten = weakref.finalize(self, _tell_unwritten, settings.file)
        self.measured: MeasuredStep | None = None
        """Times of all ranks, on all ranks, once they are gathered."""
        self.gathered: list[Callable[[MeasuredStep], None]] = []
        """Called on all ranks when they are, while the cache is connected."""
        self._recorder.forget()
        if not settings.after:
            self._recorder.thin_out()
        global _latest
        _latest = self

    def close(self) -> None:
        """Forget the deployment."""
        self._has_told()
        global _latest
        if _latest is self:
            _latest = None

    def begin(self, bound: BoundGraph, rows: int, *, inside: bool, waits: bool = False) -> None:
        """Called when all ranks have agreed on a call: gathers what is due, or counts the call.

        Args:
            bound: Its graph, on all ranks the same.
            rows: Rows of all ranks together.
            inside: Whether its backward runs inside of it.
            waits: Whether its gradients wait for a later reduction, which is a part of steps as they were planned.
        """
        if waits or not is_planned(bound, rows, self._planned.deployment):
            return
        self._bound, self._inside = weakref.ref(bound), inside
        self._counted += 1
        done = self._counted - 2  # without the first step, which compiles and allocates, and this one
        if not self._written and done >= TRACED:
            self._written = True
            self._write(Path(self._settings.file))
        elif self.measured is None and self._settings.after and done >= self._settings.after:
            measured = self._gather()
            if not all(rank.steps for rank in measured.ranks):
                self._counted = 1  # a rank has recorded none of these steps: the next ones may do
                return
            self.measured = measured
            self._recorder.thin_out()
            with self._cache.connected():
                self._store(measured)
                for call in self.gathered:
                    call(measured)
        elif self._counted > 1:
            self._recorder.count_step()

    def _gather(self) -> MeasuredStep:
        """Gather the times of all ranks."""
        deployment, slot = self._planned.deployment, self._world.slot
        stages = [number for number, stage in enumerate(deployment.stages) if slot in stage.slots]
        mine = rank_times(self._recorder.rows(), slot, stages)
        firsts = FirstMessages.of(self._recorder.rows(), slot, self._world.slots[slot].node)
        steps = self._latest_step(self._recorder)
        if len(steps.events) > MOST_EVENTS // len(self._world.slots):
            steps = msgspec.structs.replace(steps, events=())
        data = self._world.gather_bytes(msgspec.msgpack.encode((mine, firsts, steps)))
        told = sorted((_RANK.decode(each) for each in data), key=lambda rank: rank[0].slot)
        found = flights([each for _, each, _ in told], deployment)
        events = _joined([each for *_, each in told])
        return MeasuredStep(MEASURED_FORMAT, tuple(rank for rank, *_ in told), found, events)

    def _store(self, measured: MeasuredStep) -> None:
        """Keep the times, unless others are known which no other processes have disturbed."""
        key, client = self._planned.key, self._cache.client
        if key is None or client is None:
            return
        place = measured_key(key.digest)
        before = client.get(place) if measured.disturbed else None
        if before is not None:
            with contextlib.suppress(DeploymentError):
                if not decode_measured(before, self._planned.deployment).disturbed:
                    return
        client.put(place, encode_measured(measured))

    def dump(self) -> None:
        """Write the timeline of the latest step that was as planned."""
        if not self._settings.file:
            if self._world.rank == 0:
                log.get("RaNNCProcess").warning(
                    "_dump_events has no effect: set event_trace_file (RANNC_EVENT_TRACE_FILE) to the file to write"
                )
            return
        self._written = True
        self._write(Path(self._settings.file))

    def _write(self, file: Path) -> None:
        """Write the timeline of the latest step, measured and predicted, on rank 0."""
        recorder, world = self._recorder, self._world
        recorder.settle()
        told = [_STEPS.decode(data) for data in world.gather_bytes(msgspec.msgpack.encode(self._latest_step(recorder)))]
        if world.rank:
            return
        self._has_told()
        logger = log.get("RaNNCModule")
        lacking = [rank for rank, each in enumerate(told) if not each.events or each.number != told[0].number]
        if lacking:
            logger.warning(
                "No timeline is written to %s: ranks %s have not recorded a whole step, the same as rank 0; what is "
                "recorded are calls of the training, after the first one, with as many rows as were planned for",
                file,
                lacking,
            )
            return
        measured, came_us = join(told)
        nodes = [slot.node for slot in world.slots]
        try:
            _FILE.write(chrome_traces({"measured": measured, "predicted": self._predicted(came_us)}, nodes), file)
        except Exception as exc:  # the training is worth more
            logger.error("No timeline is written: %s", exc)
        else:
            logger.info("The timeline of a step was written to %s; open it in https://ui.perfetto.dev", file)

    def _has_told(self) -> None:
        if self._unwritten is not None:
            self._unwritten.detach()

    def _latest_step(self, recorder: StepRecorder) -> RankSteps:
        world, rows = self._world, recorder.rows()
        events = recorder.events(rows[-1].number) if rows else []
        number, begin = (rows[-1].number, rows[-1].begin_ns) if rows else (-1, 0)
        agreed = {row.number: row.agreed_ns for row in rows}
        return RankSteps(number, world.slot, world.slots[world.slot].node, begin, rank_events(events), agreed)

    def _predicted(self, start_us: float) -> list[Event]:
        """Events of a simulated step that begins at `start_us`; none if links or graph are not known."""
        planned, bound = self._planned, self._bound() if self._bound is not None else None
        if planned.links is None or bound is None:
            return []
        program = bound.traffic_of(inside=self._inside).program
        options = planned.options
        costs = step_costs(
            bound.graph.task,
            planned.deployment,
            *planned.links,
            overlap=not options.sync_allreduce,
            options=options,
            runtime=RuntimeCost(0.0, planned.deployment.call_us, planned.deployment.host_us),
        )
        events = simulate(program, costs, record=True).events
        return [msgspec.structs.replace(each, start_us=each.start_us + start_us) for each in events]


def _joined(ranks: Sequence[RankSteps]) -> tuple[StepEvent, ...]:
    """Return the events of a step of all ranks; none if a rank has not recorded this one."""
    if not all(rank.events and rank.number == ranks[0].number for rank in ranks):
        return ()
    events, _ = join(ranks)
    return tuple(StepEvent(each.slot, each.category, max(each.start_us, 0.0), each.us, each.name) for each in events)


def is_planned(bound: BoundGraph, rows: int, deployment: Deployment) -> bool:
    """Whether a call of a graph with `rows` rows of all ranks is a training step of the kind that was planned."""
    mode = bound.graph.signature.mode
    return bound.stages[0].planned_rows > 0 and rows == deployment.batch_rows and mode.grad and mode.training


_latest: StepMeasuring | None = None
"""That of the model that was deployed last, on all ranks the same; None: it is deployed no more."""


def _tell_unwritten(file: str) -> None:
    log.get("RaNNCModule").warning(
        "No timeline was written to %s (event_trace_file): it is that of step %d after the first one, of those with "
        "the rows and sizes that were planned for; pyrannc._dump_events() writes that of an earlier one",
        file,
        TRACED,
    )


def forget_latest() -> None:
    """Forget the model that was deployed last; one that was collected as garbage could not be closed."""
    global _latest
    _latest = None


def dump_latest(world: World) -> None:
    """Write the timeline of the model that was deployed last, see `StepMeasuring.dump`. Collective."""
    meet(world, Phase.DUMP_EVENTS)
    if _latest is not None:
        _latest.dump()
    elif world.rank == 0:
        log.get("RaNNCProcess").warning("_dump_events has no effect: no model is deployed; call it after some steps")
