"""What steps of a deployment took, measured by the ranks that ran it: the entry of kind `measured` beside the plan's.

It may come from anywhere, as a deployment may: :func:`decode_measured` believes no number of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rannd.errors import DeploymentError
from rannd.plan.deployment import Deployment

MEASURED_FORMAT = 3
BUSY = 1.25
"""How much longer computations take than they would by themselves, from which on they tell nothing of these."""
TOLD = 0.01
"""Part of a step that ranks wait for processors, from which on that is told."""
LONGEST_STEP_US = 1e12
"""Eleven days."""
_MOST_BYTES = 64 * 2**20
_MOST_COUNT = 1 << 40
MOST_EVENTS = 8000
"""Of all ranks in the step whose events are stored."""
_LONGEST_NAME = 64
"""Characters of a name or category."""


class Typical(msgspec.Struct, frozen=True, array_like=True):
    """Microseconds of what was done once in several steps: of one microbatch, the mean of each step."""

    median_us: float = 0.0
    own_us: float = 0.0
    """Likewise, without waiting for a processor."""
    threads_us: float = 0.0
    """What of that other threads of the rank had the processor, which copy messages."""


class StageTimes(msgspec.Struct, frozen=True):
    """Computations of a stage on one rank, without copying gradients into buckets (`RankTimes.pack_us`)."""

    stage: int
    pieces: int
    """Microbatches of a step."""
    forward: Typical
    """Of one microbatch."""
    backward: Typical
    """Of one microbatch; if its backward comes in two halves, the first."""
    weight: Typical = Typical()
    """Of one microbatch, the second half; 0 if it does not come in two."""


class EdgeWaits(msgspec.Struct, frozen=True, array_like=True):
    """Waits of a rank for the messages of one edge, see `Layout.edges`."""

    src: int
    dst: int
    messages: int
    """Values and gradients that it gets in a step."""
    wait_us: float
    """Time of a step in which it waited for them."""


class RankTimes(msgspec.Struct, frozen=True):
    """Times of one rank in a step, medians of several, in microseconds."""

    slot: int
    steps: int
    """Number of steps that were measured."""
    stages: tuple[StageTimes, ...]
    waits: tuple[EdgeWaits, ...]
    step_us: float
    """Call of the model and backward through it, from the end of the agreement on."""
    agree_us: float
    """Agreement of the ranks at the begin of the call. All but the last rank to come wait in it."""
    send_us: float
    """Packing messages, and beginning to send them."""
    settle_us: float
    """Waiting until what was sent has left."""
    reduce_us: float
    """From the first reduction of gradients that begins to the last one that ends; 0: none between replicas."""
    drain_us: float
    """What of it is waited for, when all is computed; with the wait for what replicas share (ZeRO 2 and 3)."""
    between_us: float
    """From the end of a step to the begin of the next one: the optimizer's step, and what else the script does."""
    sends: int = 0
    """Messages that it sends in a step."""
    host_us: float = 0.0
    """What its host does in a step beside computing and waiting: sending, and the runtime's own. Without waiting for a
    processor."""
    threads_us: float = 0.0
    """Time of a step in which other threads of the rank had the processor that its computations waited for."""
    pack_us: float = 0.0
    """Copying gradients into the buckets that are reduced while it still computes, and beginning to reduce them."""
    reduced_us: float = 0.0
    """What reductions make a step longer: that, waiting for them, and what their threads took of computations. 0: not
    known, as other processes disturbed too many of the steps: what they do to threads, or to ranks that this one waits
    for, is not known."""

    @property
    def handled(self) -> int:
        """Computations and messages of a step."""
        halves = sum(each.pieces * (2 + (each.weight.median_us > 0)) for each in self.stages)
        return halves + sum(each.messages for each in self.waits) + self.sends

    @property
    def computing_us(self) -> float:
        """Time of a step in forwards and backwards."""
        return sum(
            each.pieces * (each.forward.median_us + each.backward.median_us + each.weight.median_us)
            for each in self.stages
        )

    @property
    def processor_us(self) -> float:
        """Time of that in which it waited for a processor that other processes had."""
        return sum(pieces * max(one.median_us - one.own_us - one.threads_us, 0.0) for pieces, one in self._parts())

    @property
    def beside_us(self) -> float:
        """Time of that in which other threads of the rank had its processor."""
        return sum(pieces * one.threads_us for pieces, one in self._parts())

    @property
    def runtime_us(self) -> float:
        """What the runtime took of the rank's processor: its own, and threads for messages. What these took while
        replicas reduced gradients is not known apart, and plans count that for each byte: then without threads."""
        return self.host_us + (0.0 if self.reduce_us else self.threads_us)

    def _parts(self) -> Iterator[tuple[int, Typical]]:
        return ((each.pieces, one) for each in self.stages for one in (each.forward, each.backward, each.weight))

    @property
    def rest_us(self) -> float:
        """Time of a step in nothing that is listed here: the runtime's own, and what the host gives to others."""
        waits = sum(each.wait_us for each in self.waits) + self.settle_us + self.drain_us
        return max(self.step_us - self.computing_us - waits - self.send_us - self.pack_us, 0.0)


class Flight(msgspec.Struct, frozen=True, array_like=True):
    """How long values were on their way from a stage to the next one, for ranks that waited for them."""

    src: int
    dst: int
    between: bool
    """Whether the ranks are on different nodes."""
    us: float
    """From the end of sending to the end of receiving."""


class StepEvent(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did in a step, see `rannd.plan.simulate.timeline.Event`."""

    slot: int
    category: str
    start_us: float
    """From the begin of the step on the first rank."""
    us: float
    name: str


class MeasuredStep(msgspec.Struct, frozen=True):
    """Times of all ranks of a deployment."""

    format: int
    ranks: tuple[RankTimes, ...]
    """By slot."""
    flights: tuple[Flight, ...] = ()
    events: tuple[StepEvent, ...] = ()
    """Of one step, if ranks have recorded them (`trace_events = "full"`) and they are not too many."""

    @property
    def steps(self) -> int:
        """Number of steps whose medians these are."""
        return min(rank.steps for rank in self.ranks)

    @property
    def step_us(self) -> float:
        """Time of a step: of the slowest rank, from the agreement on, which takes as long as on the last rank to come.

        To be compared with `Deployment.step_us`.
        """
        return max(rank.step_us for rank in self.ranks) + min(rank.agree_us for rank in self.ranks)

    @property
    def disturbed(self) -> bool:
        """Whether other processes have slowed down the computations of a rank, by `BUSY` or more."""
        for rank in self.ranks:
            typical = [each for stage in rank.stages for each in (stage.forward, stage.backward, stage.weight)]
            if sum(each.median_us for each in typical) > BUSY * sum(each.own_us + each.threads_us for each in typical):
                return True
        return False

    def of_stage(self, stage: int) -> Iterator[StageTimes]:
        """Yield the times of the stage's replicas."""
        return (each for rank in self.ranks for each in rank.stages if each.stage == stage)


_decoder = msgspec.msgpack.Decoder(MeasuredStep)
_encoder = msgspec.msgpack.Encoder()


def encode_measured(measured: MeasuredStep) -> bytes:
    """Serialize to msgpack."""
    return _encoder.encode(measured)


def decode_measured(data: bytes, deployment: Deployment) -> MeasuredStep:
    """Deserialize and validate what was measured of `deployment`.

    Raises:
        DeploymentError: It cannot be that.
    """
    try:
        found = _decoder.decode(data) if len(data) <= _MOST_BYTES else None
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        raise DeploymentError(f"not the measured times of a step: {exc}") from exc
    wrong = f"{len(data)} bytes are too many" if found is None else _wrong(found, deployment)
    if wrong or found is None:
        raise DeploymentError(f"not the measured times of this deployment: {wrong}")
    return found


def _wrong(measured: MeasuredStep, deployment: Deployment) -> str:
    """Return what cannot be of the deployment, or ''."""
    if measured.format != MEASURED_FORMAT:
        return f"format {measured.format}, this version of rannd reads {MEASURED_FORMAT}"
    if [rank.slot for rank in measured.ranks] != list(range(len(deployment.slots))):
        return f"{len(measured.ranks)} ranks, of {len(deployment.slots)} devices"
    last = len(deployment.stages)
    for flight in measured.flights:
        if not (0 <= flight.src < flight.dst < last and 0 <= flight.us <= LONGEST_STEP_US):
            return f"values were {flight.us} us on their way from stage {flight.src} to {flight.dst}"
    if len(measured.events) > MOST_EVENTS:
        return f"{len(measured.events)} events, more than {MOST_EVENTS}"
    for event in measured.events:
        inside = all(0 <= us <= LONGEST_STEP_US for us in (event.start_us, event.us))
        if not (0 <= event.slot < len(measured.ranks) and inside):
            return f"slot {event.slot} did something for {event.us} us at {event.start_us} us"
        if max(len(event.name), len(event.category)) > _LONGEST_NAME:
            return f"an event has a name of {max(len(event.name), len(event.category))} characters"
    for rank in measured.ranks:
        stages = [number for number, stage in enumerate(deployment.stages) if rank.slot in stage.slots]
        if [each.stage for each in rank.stages] != stages:
            return f"slot {rank.slot} has stages {[each.stage for each in rank.stages]}, not {stages}"
        edges = [(each.src, each.dst) for each in rank.waits]
        if any(not -1 <= src < dst <= last for src, dst in edges) or edges != sorted(set(edges)):
            return f"slot {rank.slot} waits for {edges[:8]}"
        for name, value in _numbers(msgspec.to_builtins(rank)):
            most = _MOST_COUNT if isinstance(value, int) else LONGEST_STEP_US
            least = -1 if name == "waits" and isinstance(value, int) else 0  # an edge from the ranks
            if not least <= value <= most:
                return f"{name} is {value}"
        if any(each.messages < 0 for each in rank.waits):
            return f"slot {rank.slot} has got {[each.messages for each in rank.waits[:8]]} messages"
    return ""


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers in plain data with the names of their fields."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _numbers(each, str(inner))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, name)
