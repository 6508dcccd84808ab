"""What ranks tell each other before they do something together: where they are, and a few numbers."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from rannd.errors import StepError
from rannd.runtime.world import World

FLAG_BITS = 62
"""Flags that one number of a message holds."""


class Phase(enum.IntEnum):
    """What a rank is about to do with all others."""

    FORWARD = 1
    BACKWARD = 2
    CLIP = 3


def agree(world: World, phase: Phase, step: int, *numbers: int) -> list[tuple[int, ...]]:
    """The numbers of every rank (as many on each), by rank. StepError where ranks are at different places."""
    told = world.gather_numbers([phase, step, *numbers])
    places = [(Phase(each[0]), each[1]) for each in told]
    if len(set(places)) > 1:
        other = next(rank for rank, place in enumerate(places) if place != places[0])
        raise StepError(
            f"rank 0 is in the {places[0][0].name.lower()} of call {places[0][1]}, rank {other} in the "
            f"{places[other][0].name.lower()} of call {places[other][1]}: every rank has to call the model, and "
            "backward, equally often and in the same order"
        )
    return [tuple(each[2:]) for each in told]


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
