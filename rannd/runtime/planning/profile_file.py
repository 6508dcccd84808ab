"""graph_profile_file: measured times that a user keeps on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from rannd import log
from rannd.config import Config
from rannd.errors import ProfileError
from rannd.plain_file import PlainFile
from rannd.profile.graph_profile import MAX_BYTES, GraphProfile, decode, encode

_FILE = PlainFile("graph profile", "save_graph_profile", ProfileError, MAX_BYTES)

Everywhere = Callable[[Callable[[], bytes]], bytes]
"""What rank 0 makes, on all ranks; its error is raised on all of them."""


class ProfileFile:
    """The file of one job, where load_graph_profile or save_graph_profile is set. `device`: that of this job."""

    def __init__(self, config: Config, device: str) -> None:
        self._load, self._path = config.load_graph_profile, Path(config.graph_profile_file).expanduser()
        self._device = device
        self.digest = ""
        """Of what was loaded."""

    def load(self, everywhere: Everywhere) -> GraphProfile | None:
        """What the file knows, None where it is not asked for. Collective.

        ProfileError where it is no graph profile, or cannot be trusted (see PlainFile).
        """
        if not self._load:
            return None
        logger = log.get("GraphProfiler")

        def read() -> bytes:
            data = _FILE.read(self._path)
            with _FILE.named(self._path):
                found = decode(data)
            logger.info("Taking times from %s where they are this model's (%d blocks)", self._path, len(found.blocks))
            if found.device != self._device:
                logger.warning("The times in %s are of %s, not of %s", self._path, found.device, self._device)
            return data

        data = everywhere(read)
        self.digest = hashlib.sha256(data).hexdigest()
        return decode(data)

    def save(self, profile: GraphProfile, everywhere: Everywhere) -> None:
        """Write what is known to the file, besides what it has already. Collective.

        ProfileError where it holds something else, or another device's times, or cannot be written.
        """

        def write() -> bytes:
            whole = profile.lasting
            if self._path.exists():
                data = _FILE.read(self._path)
                with _FILE.named(self._path):
                    there = decode(data)
                if there.device != profile.device:
                    raise ProfileError(
                        f"graph_profile_file={self._path} holds times of {there.device}, and these are of "
                        f"{profile.device}; name another file"
                    )
                whole = whole.joined(there)
            _FILE.write(encode(whole), self._path)
            log.get("GraphProfiler").info("Wrote the times of %d blocks to %s", len(whole.blocks), self._path)
            return b""

        everywhere(write)
