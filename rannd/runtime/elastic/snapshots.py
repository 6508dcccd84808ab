"""The last steps of a training, kept in memory: what is left of them after a failure makes a checkpoint.

Each rank writes its part of a step to a file in memory that its watcher has as well; on several hosts another host gets
a copy. Two steps are kept in turn, and the older one is written over only when all copies of the newer one have
arrived: so there is always a step of which every part is somewhere. After a failure `rannc-run` knows who is left, lets
the watchers write the parts of the newest such step (rannd/runner/elastic/rescue_plan.py), and the next start makes a
checkpoint of them (rannd/runtime/checkpoint/rescue.py).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rannd import log
from rannd.device.memory import device_memory, free_memory
from rannd.ranks import memory_files
from rannd.runtime.checkpoint.outline import Subject
from rannd.runtime.comm.world import World
from rannd.runtime.elastic.memory_part import bytes_of, part_of, write_part
from rannd.runtime.elastic.neighbours import Neighbours
from rannd.units import amount

OFF, AUTO, EACH_STEP = "off", "auto", "neighbour"
"""Values of the item `snapshots`."""
SHARE = 0.02
"""Maximum part of the time that snapshots take with `auto`."""
_LEAST_FREE = 0.5
"""Part of the memory that is free before the first one that has to be left after it."""
WAIT, DUE, OVER = 0, 1, 2
"""What a rank says between two steps: not yet, now, or not any more."""


class Snapshots:
    """Keeps steps of this rank in memory, if rannc-run --elastic runs it. The constructor is collective.

    Args:
        world: The ranks.
        mode: OFF, AUTO or EACH_STEP, the same on all ranks.
        directory: Where the checkpoints of the training are, the same on all ranks.
    """

    def __init__(self, world: World, mode: str, directory: str) -> None:
        self._world, self._mode, self._directory = world, mode, directory
        files = memory_files.given() if mode != OFF else []
        # Not where another launcher runs the ranks, nor where a watcher could not make the files: then nobody keeps.
        self._on = all(each == (1,) for each in map(tuple, world.gather_numbers([int(bool(files))])))
        self._own, self._copies = files[:2], files[2:]
        for each in files:  # of an earlier training in this process
            os.ftruncate(each, 0)
        self._neighbours = Neighbours(world) if self._on else None
        self._began = 0.0
        self._costs: deque[float] = deque(maxlen=2)
        """Seconds that the last two took: the first one of all takes longer."""
        self._number = -1
        self._error = ""

    def ready(self) -> int:
        """WAIT, DUE or OVER, as this rank sees it; the other ranks have to know it before anything is done."""
        if not self._on:
            return WAIT
        assert self._neighbours is not None
        if self._mode == EACH_STEP:
            self._neighbours.join()
        if self._error or self._neighbours.error:
            return OVER
        if not self._neighbours.done():
            return WAIT
        if self._mode == EACH_STEP or len(self._costs) < 2:
            return DUE
        return DUE if (time.monotonic() - self._began) * SHARE >= min(self._costs) else WAIT

    def go_on(self, told: Sequence[int], step: int, what: Callable[[], tuple[Subject, dict[str, Any]]]) -> None:
        """Do what all ranks are ready for. Collective, with all ranks' `ready`.

        Args:
            told: What the ranks were ready for.
            step: Number of steps that are done.
            what: Returns what would be saved of this step now.
        """
        if OVER in told and self._on:
            self._on = False
            self._give_back()
            error = self._error or (self._neighbours.error if self._neighbours is not None else "")
            if error:
                log.get("RaNNCModule").warning(
                    "Steps are not kept in memory any more: %s. After a failure the training goes on from the last "
                    "checkpoint (checkpoint_every); snapshots = off says so from the start",
                    error,
                )
        if self._on and all(each == DUE for each in told):
            self._keep(step, what)

    def _keep(self, step: int, what: Callable[[], tuple[Subject, dict[str, Any]]]) -> None:
        assert self._neighbours is not None
        self._began = time.monotonic()
        self._number += 1
        turn = self._number % 2
        try:
            subject, extra = what()
            content, outline = part_of(self._world, subject, step, extra)
            if self._number == 0:
                self._check_memory(bytes_of(content))
            write_part(
                self._own[turn],
                self._world,
                content,
                outline,
                number=self._number,
                step=step,
                folder=self._directory,
            )
        except Exception as exc:  # a scheduler's state_dict may raise anything
            self._error = str(exc) or type(exc).__name__
            os.ftruncate(self._own[turn], 0)  # nobody shall take what is half of a part
        else:
            self._costs.append(time.monotonic() - self._began)
        # Also after an error: the others send and take in any case.
        self._neighbours.begin(self._own[turn], self._copies[turn])

    def _give_back(self) -> None:
        """Give the memory back of the step that not all ranks have; the one before stays for a failure."""
        assert self._neighbours is not None
        self._neighbours.join()
        for files in (self._own, self._copies):
            os.ftruncate(files[self._number % 2], 0)

    def _check_memory(self, size: int) -> None:
        """MemoryError if what this host's ranks keep would take more than half of the memory that is free."""
        assert self._neighbours is not None
        needed = size * self._world.local_size * (4 if self._neighbours.exist else 2)
        cpu = torch.device("cpu")
        free = min(free_memory(cpu)[0], device_memory(cpu, 1))
        if needed > free * _LEAST_FREE:
            raise MemoryError(
                f"two steps of {self._world.local_size} rank(s) take {amount(needed)} of the memory of "
                f"{self._world.hosts[self._world.rank]}, of which {amount(free)} is free"
            )

    def close(self) -> None:
        """Wait for copies on their way. What was kept stays until the ranks have ended well."""
        if self._neighbours is not None:
            self._neighbours.join()
