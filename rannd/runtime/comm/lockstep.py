"""What ranks tell each other before they do something together: where they are, and a few numbers."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence

import msgspec

from rannd.errors import StepError, UsageError
from rannd.runtime.comm import process_flags
from rannd.runtime.comm.world import World

FLAG_BITS = 62
"""Flags that one number of a message holds."""
TOGETHER = 8
"""Numbers that go along with where a rank is."""

_uncompared: list[tuple[int, float, bool]] = []
"""Backwards of this process that the ranks have not compared yet: see `compare_later`."""


class Phase(enum.IntEnum):
    """What a rank is about to do with all others."""

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


_PLACES = {
    Phase.WRAP: "profile, or the making of a RaNNCModule",
    Phase.DISTRIBUTE: "DistributeModelParams",
    Phase.GET_PARAM: "get_param, or what gathers parameters",
}


def _place(phase: int, step: int) -> str:
    """Where in the script that is, in words."""
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        return f"the {Phase(phase).name.lower()} of call {step}"
    try:
        return _PLACES.get(Phase(phase), Phase(phase).name.lower())
    except ValueError:  # a message of something that does not agree first
        return "something else that all ranks do together"


def agree(world: World, phase: Phase, step: int, *numbers: int) -> list[tuple[int, ...]]:
    """The numbers of every rank (as many on each), by rank. StepError where ranks are at different places."""
    _ensure_memory(phase, step)
    # As long in every phase: ranks at different places have to understand each other, too.
    first = [*numbers[:TOGETHER], *[0] * (TOGETHER - len(numbers))]
    told = world.gather_numbers([phase, step, _digest(_uncompared), *first])
    places = [(each[0], each[1]) for each in told]
    if len(set(places)) > 1:
        other = next(rank for rank, place in enumerate(places) if place != places[0])
        here, there = (_place(*place) for place in (places[0], places[other]))
        raise StepError(
            f"rank 0 is in {here}, rank {other} in {there}: every rank has to call the model, and backward, equally "
            "often and in the same order, and so all else that ranks do together (barrier, what gathers or loads state)"
        )
    if len({each[2] for each in told}) > 1:
        _compare(world)
    _uncompared.clear()
    found = [each[3 : 3 + len(numbers)] for each in told]
    if len(numbers) > TOGETHER:
        rest = world.gather_numbers(numbers[TOGETHER:])
        found = [[*each, *more] for each, more in zip(found, rest, strict=True)]
    return [tuple(each) for each in found]


def _ensure_memory(phase: Phase, step: int) -> None:
    """UsageError in a block of DistributeModelParams, where what ranks send each other would have no memory."""
    if process_flags.building and phase is not Phase.BARRIER:
        raise UsageError(
            f"{_place(phase, step)}, inside of a block of DistributeModelParams: tensors have no memory there; only "
            "make the model in it, and end it before all else"
        )


def compare_later(world: World, call: int, gradient: float, delivered: bool) -> None:
    """Let the next agreement find out whether all ranks ran backward of this call, from the same gradient of its loss.

    `delivered`: whether the parameters have got their gradients.

    For a backward in which nothing is moved between ranks: to compare at once would have each rank wait for the
    slowest in every step. What comes of a difference is not kept: all that reads state of the ranks agrees before.
    """
    if world.size > 1:
        _uncompared.append((call, gradient, delivered))


def forget_uncompared() -> None:
    """Never compare what `compare_later` has noted: the models are dropped."""
    _uncompared.clear()


def _digest(uncompared: Sequence[tuple[int, float, bool]]) -> int:
    return _number(msgspec.msgpack.encode(uncompared))


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _compare(world: World) -> None:
    """StepError that says in what backwards differ. Collective, where they do."""
    told = [
        msgspec.msgpack.decode(data, type=list[tuple[int, float, bool]])
        for data in world.gather_bytes(msgspec.msgpack.encode(_uncompared))
    ]
    calls = [[f"{call}{'' if now else ' (delayed)'}" for call, _, now in each] for each in told]
    other = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
    if other is not None:
        raise StepError(
            f"since ranks last compared, rank 0 has run backward of the calls [{', '.join(calls[0])}], rank {other} of "
            f"[{', '.join(calls[other])}]: every rank has to call the model, and backward, equally often and in the "
            "same order, and to turn delay_grad_allreduce on and off at the same places"
        )
    for each in zip(*told, strict=True):
        same_loss_gradient([gradient for _, gradient, _ in each])


def same_loss_gradient(gradients: Sequence[float]) -> None:
    """StepError where the ranks give different gradients to a loss whose backward has run."""
    if len({struct.pack("d", each) for each in gradients}) > 1:
        raise StepError(
            f"the gradient of the loss differs between ranks ({list(gradients)}), but its backward has run already, "
            "with the same for all; multiply the loss by the same number on all ranks, or set interleave_loss=false "
            "(RANNC_INTERLEAVE_LOSS=false)"
        )


def meet(world: World, phase: Phase, about: str = "") -> None:
    """Wait for all ranks to do the same, with the same thing. StepError where some rank is at another place."""
    _ensure_memory(phase, 0)
    if world.size == 1:
        return
    with world.watch.inside(phase.name.lower()):
        told = agree(world, phase, 0, _number(about.encode()))
        if len(set(told)) > 1:
            names = [data.decode() for data in world.gather_bytes(about.encode())]
            other = next(rank for rank, name in enumerate(names) if name != names[0])
            raise StepError(
                f"in {_place(phase, 0)} rank 0 wants {names[0]!r}, rank {other} {names[other]!r}: every rank has "
                "to ask for the same, in the same order (that of a set of names differs from process to process)"
            )


def pack_flags(flags: Sequence[bool]) -> list[int]:
    """Flags as numbers of 64 bits."""
    return [
        sum(int(flag) << place for place, flag in enumerate(flags[start : start + FLAG_BITS]))
        for start in range(0, len(flags), FLAG_BITS)
    ]


def unpack_flags(numbers: Sequence[int], count: int) -> list[bool]:
    """The flags that `pack_flags` packed."""
    return [bool(numbers[place // FLAG_BITS] >> place % FLAG_BITS & 1) for place in range(count)]


def pack_floats(values: Sequence[float]) -> list[int]:
    """Floating-point numbers as whole numbers with the same bits."""
    return [struct.unpack("q", struct.pack("d", value))[0] for value in values]


def unpack_floats(numbers: Sequence[int]) -> list[float]:
    """The numbers that `pack_floats` packed."""
    return [struct.unpack("d", struct.pack("q", number))[0] for number in numbers]
