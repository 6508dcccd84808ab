"""The measured blocks of a model, as `pyrannc.profile` returns them and graph_profile_file stores them.

No torch in this file.
"""

from __future__ import annotations

import msgspec

from rannd.errors import ProfileError
from rannd.profile.points import Measured, is_plausible

FORMAT = 3
MAX_BYTES = 64 << 20
_AGAIN = "run without it to profile again"


class GraphProfile(msgspec.Struct, frozen=True):
    """Measurements of blocks on one kind of device, without the costs of links."""

    format: int
    device: str
    """Model of the device, as in deployments; for a CPU with its number of threads."""
    rannd: str
    torch: str
    flags: dict[str, str]
    """Settings of torch that decide which kernels ran, by name."""
    blocks: dict[str, Measured]
    """By structural hash of the block."""

    def joined(self, other: GraphProfile) -> GraphProfile:
        """Merge two profiles block by block, and their points; where both have a point, this profile's is taken."""
        blocks = {key: value.joined(other.blocks.get(key)) for key, value in self.blocks.items()}
        return msgspec.structs.replace(self, blocks={**other.blocks, **blocks})

    @property
    def lasting(self) -> GraphProfile:
        """Return the profile without what must not be stored, see `Measured.lasting`."""
        return msgspec.structs.replace(self, blocks={key: value.lasting for key, value in self.blocks.items()})

    @property
    def rows(self) -> tuple[int, ...]:
        """All row counts that were measured, ascending."""
        return tuple(sorted({point.rows for block in self.blocks.values() for point in block.points}))


class _Version(msgspec.Struct):
    format: int


_decoder = msgspec.msgpack.Decoder(GraphProfile)
_version = msgspec.msgpack.Decoder(_Version)


def encode(profile: GraphProfile) -> bytes:
    """Serialize a profile to msgpack."""
    return msgspec.msgpack.encode(profile)


def decode(data: bytes) -> GraphProfile:
    """Deserialize a profile.

    Raises:
        ProfileError: The data is not a profile, is damaged, or has another format.
    """
    try:
        found = _version.decode(data).format
        if found != FORMAT:
            raise ProfileError(f"the graph profile has format {found}, this version of rannd reads {FORMAT}; {_AGAIN}")
        profile = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        raise ProfileError(f"not a graph profile of this version of rannd: {exc}; {_AGAIN}") from exc
    for key, measured in profile.blocks.items():
        if not is_plausible(measured):
            raise ProfileError(f"the graph profile is damaged: block {key[:12]!r} has {measured}; {_AGAIN}")
    return profile
