"""Measured blocks as a value: what `pyrannc.profile` gives, and what graph_profile_file holds.

No torch in this file.
"""

from __future__ import annotations

import msgspec

from rannd.errors import ProfileError
from rannd.profile.points import Measured, is_plausible

FORMAT = 1
MAX_BYTES = 64 << 20
_AGAIN = "profile again without it"


class GraphProfile(msgspec.Struct, frozen=True):
    """Blocks that were measured on one kind of device. Costs of links are no part of it."""

    format: int
    device: str
    """Model of the device, as in deployments; for a CPU with its threads."""
    rannd: str
    torch: str
    blocks: dict[str, Measured]
    """By structural hash."""

    def joined(self, other: GraphProfile) -> GraphProfile:
        """The blocks of both, and of one block the points of both; where both have one, this one's."""
        blocks = {key: value.joined(other.blocks.get(key)) for key, value in self.blocks.items()}
        return msgspec.structs.replace(self, blocks={**other.blocks, **blocks})

    @property
    def lasting(self) -> GraphProfile:
        """What may be kept, see Measured."""
        return msgspec.structs.replace(self, blocks={key: value.lasting for key, value in self.blocks.items()})

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows that something was measured with."""
        return tuple(sorted({point.rows for block in self.blocks.values() for point in block.points}))


class _Version(msgspec.Struct):
    format: int


_decoder = msgspec.msgpack.Decoder(GraphProfile)
_version = msgspec.msgpack.Decoder(_Version)


def encode(profile: GraphProfile) -> bytes:
    """As bytes (msgpack)."""
    return msgspec.msgpack.encode(profile)


def decode(data: bytes) -> GraphProfile:
    """What `encode` was given. ProfileError for what it cannot have made, and for other formats."""
    try:
        found = _version.decode(data).format
        if found != FORMAT:
            raise ProfileError(f"the graph profile has format {found}, this rannd reads {FORMAT}; {_AGAIN}")
        profile = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        raise ProfileError(f"not a graph profile of this version of rannd: {exc}; {_AGAIN}") from exc
    for key, measured in profile.blocks.items():
        if not is_plausible(measured):
            raise ProfileError(f"the graph profile is damaged: block {key[:12]!r} has {measured}; {_AGAIN}")
    return profile
