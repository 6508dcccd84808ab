"""graph_profile_file: loads and saves measured times of blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rannd import log
from rannd.config import Config
from rannd.errors import ProfileError
from rannd.plain_file import PlainFile
from rannd.plan.compatibility import plain
from rannd.profile.graph_profile import MAX_BYTES, GraphProfile, decode, encode

_FILE = PlainFile("graph profile", "save_graph_profile", ProfileError, MAX_BYTES)

Everywhere = Callable[[Callable[[], bytes]], bytes]
"""Type of a function that calls its argument on rank 0 and broadcasts the result or the error."""


class ProfileFile:
    """Graph profile of one job, if load_graph_profile or save_graph_profile is set. `device`, `flags`: this job's."""

    def __init__(self, config: Config, device: str, flags: Mapping[str, str]) -> None:
        self._load, self._path = config.load_graph_profile, Path(config.graph_profile_file).expanduser()
        self._device, self._flags = device, dict(flags)
        self.digest = ""
        """SHA-256 of the loaded file; '' if none was loaded."""

    def load(self, everywhere: Everywhere) -> GraphProfile | None:
        """Read the file; None if load_graph_profile is not set. Collective.

        ProfileError if it is not a graph profile, or cannot be read or trusted (see `PlainFile`).
        """
        if not self._load:
            return None
        logger = log.get("GraphProfiler")

        def read() -> bytes:
            data = _FILE.read(self._path)
            with _FILE.named(self._path):
                found = decode(data)
            logger.info("Using times of this model's blocks from %s (%d blocks)", self._path, len(found.blocks))
            if found.device != self._device:
                logger.warning(
                    "The times in %s were measured on %s, this job runs on %s", self._path, found.device, self._device
                )
            elif found.flags != self._flags:
                logger.warning(
                    "The times in %s were measured with other settings of torch: %s",
                    self._path,
                    _apart(found.flags, self._flags),
                )
            return data

        data = everywhere(read)
        self.digest = hashlib.sha256(data).hexdigest()
        return decode(data)

    def save(self, profile: GraphProfile, everywhere: Everywhere) -> None:
        """Add measurements to the file. Collective.

        ProfileError if it is not a graph profile, has times of another device or of other settings of torch, or cannot
        be written.
        """

        def write() -> bytes:
            whole = profile.lasting
            if self._path.exists():
                data = _FILE.read(self._path)
                with _FILE.named(self._path):
                    there = decode(data)
                if there.device != profile.device:
                    raise ProfileError(
                        f"graph_profile_file={self._path} has times of {there.device}, but this job measured times of "
                        f"{profile.device}; set graph_profile_file to another file"
                    )
                if there.flags != profile.flags:
                    raise ProfileError(
                        f"graph_profile_file={self._path} has times of other settings of torch: "
                        f"{_apart(there.flags, profile.flags)}; set graph_profile_file to another file"
                    )
                whole = whole.joined(there)
            _FILE.write(encode(whole), self._path)
            log.get("GraphProfiler").info("Wrote the times of %d blocks to %s", len(whole.blocks), self._path)
            return b""

        everywhere(write)


def _apart(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Describe the settings that differ: ``fp32 matmul tf32, here none``."""
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    theirs, ours = ([each.get(name, "unset") for name in names] for each in (there, here))
    told = zip(names, theirs, ours, strict=True)
    return ", ".join(f"{plain(name)} {plain(other)}, here {plain(own)}" for name, other, own in told)
