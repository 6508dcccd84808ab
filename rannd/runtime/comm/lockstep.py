"""Checks before each collective operation that all ranks are at the same place of the script; exchanges few numbers."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rannd.errors import StepError, UsageError
from rannd.runtime.comm import process_flags
from rannd.runtime.comm.world import Gathering, World
from rannd.runtime.failure import late_error

FLAG_BITS = 62
"""Number of flags packed into one integer of a message."""
TOGETHER = 8
"""Number of integers that fit into the first message, beside the rank's position."""

_uncompared: list[tuple[int, float, bool]] = []
"""Backwards of this process that the ranks have not compared yet, see `compare_later`."""


class Phase(enum.IntEnum):
    """Kinds of collective operations of a script."""

    FORWARD = 1
    BACKWARD = 2
    STATE_DICT = 3
    LOAD_STATE_DICT = 4
    OPTIMIZER_STATE_DICT = 5
    OPTIMIZER_LOAD_STATE_DICT = 6
    SAVE_CHECKPOINT = 7
    LOAD_CHECKPOINT = 8
    CLIP = 9
    UNDEPLOY = 10
    BARRIER = 11
    GET_PARAM = 12
    GET_PARAM_GRAD = 13
    ALLREDUCE_GRADS = 14
    WRAP = 15
    DISTRIBUTE = 16
    SAVE_PRETRAINED = 17
    AVERAGE = 18
    AVERAGES = 19
    ALL_GATHER = 20
    ELASTIC = 21
    DUMP_EVENTS = 22


_STEADY = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.CLIP, Phase.ALLREDUCE_GRADS, Phase.ELASTIC})
"""Those of a training step; before all others, values of the device that were to be used later are used."""

_PLACES = {
    Phase.WRAP: "profile or the constructor of RaNNCModule",
    Phase.DISTRIBUTE: "DistributeModelParams",
    Phase.AVERAGE: "the constructor of AveragedModel",
    Phase.AVERAGES: "state_dict or undeploy of an AveragedModel",
    Phase.ELASTIC: "pyrannc.elastic, between two batches or steps",
    Phase.DUMP_EVENTS: "pyrannc._dump_events",
    Phase.GET_PARAM: "get_param, or another function that gathers parameters",
}
_RETURNED = frozenset({Phase.STATE_DICT, Phase.OPTIMIZER_STATE_DICT, Phase.AVERAGES})
"""Those whose result a script saves itself."""


def _name(phase: Phase) -> str:
    return phase.name.lower().replace("optimizer_", "optimizer.")


def _place(phase: int, step: int) -> str:
    """Describe a position in the script, for messages."""
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        return f"the {Phase(phase).name.lower()} of call {step}"
    try:
        return _PLACES.get(Phase(phase), _name(Phase(phase)))
    except ValueError:  # a message of a collective that does not call `agree` first
        return "another collective operation"


def _remedy(*phases: int) -> str:
    """What to do about ranks in these different phases: usually one of them is inside ``if rank == 0:``."""
    alone = next((Phase(each) for each in phases if each in tuple(Phase) and each not in _STEADY), None)
    if alone is None:
        return "likewise all other collective functions (barrier, those that gather or load state)"
    save = ", and save what it returns on rank 0 alone" if alone in _RETURNED else ""
    return f"likewise {_place(alone, 0)}: call it on all ranks, outside of `if rank == 0`{save}"


def agree(world: World, phase: Phase, step: int, *numbers: int) -> list[tuple[int, ...]]:
    """All-gather a few integers (equally many on all ranks); StepError if ranks are at different places. Collective.

    Raises the error of an asynchronous save on all ranks once one of them knows it, but for backwards, whose gradients
    would be lost.
    """
    return begin_to_agree(world, phase, step, *numbers).finish()


def begin_to_agree(world: World, phase: Phase, step: int, *numbers: int) -> Agreement:
    """Begin to `agree`. No other collective on the host may start before it has finished."""
    ensure_memory(phase, step)
    if phase not in _STEADY:
        world.reads.settle()
    # Equally long in every phase, so that ranks in different phases can decode each other's messages.
    first = [*numbers[:TOGETHER], *[0] * (TOGETHER - len(numbers))]
    late = phase is not Phase.BACKWARD and late_error.known() is not None
    told = world.begin_gather([phase, step, _digest(_uncompared), int(late), *first])
    return Agreement(world, numbers, told)


@dataclass(frozen=True)
class Agreement:
    """An `agree` that has begun."""

    world: World
    numbers: Sequence[int]
    """Of this rank."""
    told: Gathering

    def is_ready(self) -> bool:
        """Whether all ranks have told their places."""
        return self.told.is_ready()

    def finish(self) -> list[tuple[int, ...]]:
        """Wait for the other ranks; what `agree` returns and raises. Once."""
        told = self.told.finish()
        places = [(each[0], each[1]) for each in told]
        if len(set(places)) > 1:
            other = next(rank for rank, place in enumerate(places) if place != places[0])
            here, there = (_place(*place) for place in (places[0], places[other]))
            raise StepError(
                f"rank 0 is in {here}, rank {other} in {there}: every rank has to call the model and backward equally "
                f"often and in the same order, and {_remedy(places[0][0], places[other][0])}"
            )
        if len({each[2] for each in told}) > 1:
            _compare(self.world)
        _uncompared.clear()
        if any(each[3] for each in told):
            late_error.raise_known()
        found = [each[4 : 4 + len(self.numbers)] for each in told]
        if len(self.numbers) > TOGETHER:
            rest = self.world.gather_numbers(self.numbers[TOGETHER:])
            found = [[*each, *more] for each, more in zip(found, rest, strict=True)]
        return [tuple(each) for each in found]


def ensure_memory(phase: Phase, step: int) -> None:
    """UsageError inside a block of DistributeModelParams, where tensors for messages would have no memory."""
    if process_flags.building and phase is not Phase.BARRIER:
        raise UsageError(
            f"{_place(phase, step)} was called inside a block of DistributeModelParams, where tensors have no memory; "
            "build the model inside the block, and do everything else after it"
        )


def compare_later(world: World, call: int, gradient: float, delivered: bool) -> None:
    """Note a backward that needs no communication; the next `agree` checks that all ranks ran it alike.

    Comparing at once would make each rank wait for the slowest one in every step. A difference does no harm until then:
    everything that reads the state of several ranks calls `agree` first.

    Args:
        call: Number of the call that backward went through.
        gradient: Gradient of its loss, which has to be the same on all ranks.
        delivered: Whether the parameters have received their gradients.
    """
    if world.size > 1:
        _uncompared.append((call, gradient, delivered))


def forget_uncompared() -> None:
    """Drop the backwards that `compare_later` has noted, because their models are dropped."""
    _uncompared.clear()


def _digest(uncompared: Sequence[tuple[int, float, bool]]) -> int:
    return _number(msgspec.msgpack.encode(uncompared))


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _compare(world: World) -> None:
    """Raise a StepError that says how the noted backwards differ. Collective; called if they differ."""
    told = [
        msgspec.msgpack.decode(data, type=list[tuple[int, float, bool]])
        for data in world.gather_bytes(msgspec.msgpack.encode(_uncompared))
    ]
    calls = [[f"{call}{'' if now else ' (delayed)'}" for call, _, now in each] for each in told]
    other = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
    if other is not None:
        raise StepError(
            f"since the last comparison, rank 0 has run backward of the calls [{', '.join(calls[0])}], rank {other} of "
            f"[{', '.join(calls[other])}]: every rank has to call the model and backward equally often and in the "
            "same order, and to switch delay_grad_allreduce on and off at the same places"
        )
    for each in zip(*told, strict=True):
        same_loss_gradient([gradient for _, gradient, _ in each])


def same_loss_gradient(gradients: Sequence[float]) -> None:
    """StepError if ranks pass different gradients to a loss whose backward has already run."""
    if len({struct.pack("d", each) for each in gradients}) > 1:
        raise StepError(
            f"the gradient of the loss differs between ranks ({list(gradients)}), but its backward has already run "
            "with the same gradient on all ranks; multiply the loss by the same number on all ranks, or set "
            "interleave_loss=false (RANNC_INTERLEAVE_LOSS=false)"
        )


def meet(world: World, phase: Phase, about: str = "") -> None:
    """Barrier that checks that all ranks are in the same phase, with the same `about`; StepError if not."""
    ensure_memory(phase, 0)
    with world.watch.inside(_name(phase)):
        told = agree(world, phase, 0, _number(about.encode()))
        if len(set(told)) > 1:
            names = [data.decode() for data in world.gather_bytes(about.encode())]
            other = next(rank for rank, name in enumerate(names) if name != names[0])
            raise StepError(
                f"in {_place(phase, 0)} rank 0 asks for {names[0]!r}, rank {other} for {names[other]!r}: every rank "
                "has to ask for the same in the same order (the order of a set differs from process to process)"
            )


def pack_flags(flags: Sequence[bool]) -> list[int]:
    """Pack flags into 64-bit integers."""
    return [
        sum(int(flag) << place for place, flag in enumerate(flags[start : start + FLAG_BITS]))
        for start in range(0, len(flags), FLAG_BITS)
    ]


def unpack_flags(numbers: Sequence[int], count: int) -> list[bool]:
    """Unpack `count` flags that `pack_flags` packed."""
    return [bool(numbers[place // FLAG_BITS] >> place % FLAG_BITS & 1) for place in range(count)]


def pack_floats(values: Sequence[float]) -> list[int]:
    """Reinterpret the bits of doubles as 64-bit integers."""
    return [struct.unpack("q", struct.pack("d", value))[0] for value in values]


def unpack_floats(numbers: Sequence[int]) -> list[float]:
    """Reverse `pack_floats`."""
    return [struct.unpack("d", struct.pack("q", number))[0] for number in numbers]
