"""Plans for the hosts that an elastic job may have next, made while it trains: then its next start is a look-up.

Rank 0 starts one process of the lowest priority for each graph that it has a deployment for. It plans for one host
fewer, two fewer and one more (on a single host: slots), and stores the deployments in the daemon under the keys that a
job on those hosts asks for. No torch in this file: the process begins to plan after a fraction of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key, measured_key, profile_key
from rannd.errors import DeploymentError, RanndError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.repeated_layers import parts_of
from rannd.plan.deployment import Deployment, Provenance, Slot, decode, encode
from rannd.plan.memory.replayed_memory import replayed
from rannd.plan.plan_options import PlanOptions
from rannd.plan.plan_text import plan_line
from rannd.plan.search.planner import plan
from rannd.plan.search.ranking import simulated_us
from rannd.plan.simulate.plan_records import with_records
from rannd.profile.costs import CostTable, LinkCost
from rannd.profile.points import Measured, is_plausible
from rannd.ranks import core_share
from rannd.runtime.costs.known_costs import MeasuredParts, with_costs
from rannd.runtime.costs.learned_costs import LearnedCosts
from rannd.runtime.costs.learned_runtime import LearnedRuntime

FASTER = 0.05
"""Part of a step that another plan has to save to replace one."""
MOST = 8
"""Maximum number of sets of hosts to plan for."""
NICE = 19
"""The lowest priority."""
_PR_SET_PDEATHSIG = 1


class Wanted(msgspec.Struct, frozen=True):
    """A set of slots to plan for."""

    key: Key
    slots: tuple[Slot, ...]
    memory: int
    """Bytes of each device that may be used."""
    instead: Deployment | None = None
    """The plan that is there: it is replaced if another one is faster by `FASTER`. None: a plan is only made where none
    is there."""


class Better(msgspec.Struct, frozen=True):
    """A plan that has replaced another one: what the process tells."""

    line: str
    """The plan, in a line."""
    step_us: float
    before_us: float
    """Step of the plan that was there, with the same costs."""
    key: Key
    """Of the deployment in the cache."""
    memory: int
    """Bytes of each device that it may use."""
    deployment: bytes
    """The plan, encoded."""


class Request(msgspec.Struct, frozen=True):
    """All that the process has to know."""

    task: TaskGraph
    compiled: bool
    by_atoms: bool
    """Whether atoms were measured, not grains."""
    toolchain: str
    """See `MeasuredParts`."""
    profile: dict[str, Measured]
    """What the rank knows; the rest is in the daemon, if it was ever measured."""
    device_model: str
    threads: int
    versions: dict[str, str]
    flags: dict[str, Any]
    """These four are parts of the keys of what was measured."""
    links: tuple[LinkCost, LinkCost | None]
    """As they were measured alone."""
    learned: LearnedCosts
    """What steps said of the costs of stages,"""
    runtime: LearnedRuntime
    """and of the runtime and the links."""
    queued: bool
    """Whether hosts work ahead of their devices."""
    options: PlanOptions
    interleaved: bool
    rows: int
    """Rows of the global batch."""
    made: Provenance
    model: str
    timeout_s: float
    idle_s: float
    max_bytes: int
    wanted: tuple[Wanted, ...]

    def key_of(self, part: str) -> Key:
        """Key of what was measured of a part."""
        return profile_key(
            block_hash=part,
            device_model=self.device_model,
            threads=self.threads,
            versions=self.versions,
            flags=self.flags,
        )


def next_slots(slots: Sequence[Slot]) -> list[tuple[Slot, ...]]:
    """Return the slots that a job may have next, the most likely first.

    One host fewer, one more (like the largest), two fewer; on a single host the same with slots.
    """
    counts = list(Counter(slot.node for slot in slots).values())
    if len(counts) == 1:
        others = [[counts[0] + change] for change in (-1, 1, -2)]
    else:
        every = range(len(counts))
        others = [[*counts[:one], *counts[one + 1 :]] for one in every]
        others.append([*counts, max(counts)])
        others += [[counts[each] for each in every if each not in (one, two)] for one in every for two in range(one)]
    found = dict.fromkeys(tuple(each) for each in others if sum(each) > 0)
    return [tuple(Slot(node, device) for node, count in enumerate(each) for device in range(count)) for each in found][
        :MOST
    ]


_running: list[subprocess.Popen[bytes]] = []
"""Processes of this rank that plan."""


def end() -> None:
    """End the processes: with this one, as whoever watches it would take them for the script's, or with its models."""
    for process in _running:
        process.kill()
    for process in _running:
        process.wait()
    _running.clear()


def start(request: Request, tell: Callable[[Better], None] | None = None) -> None:
    """Start the process; it ends with this one at the latest.

    `tell`: called in a thread for each plan that has replaced another one.
    """
    if not _running:
        atexit.register(end)
    _running[:] = [each for each in _running if each.poll() is None]
    data = msgspec.msgpack.encode(request)
    code = "from rannd.runtime.planning.plan_ahead import main; main()"
    # Its threads would take cores from the ranks, whatever its priority.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid())],
        env={**os.environ, **single},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if tell is None else subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    _running.append(process)
    # It reads when it has imported what it needs, for which nobody waits.
    threading.Thread(target=_attend, args=(process, data, tell), name="rannd-planning", daemon=True).start()


def _attend(process: subprocess.Popen[bytes], data: bytes, tell: Callable[[Better], None] | None) -> None:
    """Give the process what it needs, and tell what it tells."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # if it has failed, plans are made when they are needed
        process.stdin.write(data)
    if tell is not None and process.stdout is not None:
        with process.stdout:
            for line in process.stdout:
                with contextlib.suppress(msgspec.DecodeError):  # what a library prints
                    tell(msgspec.json.decode(line, type=Better))
    process.wait()


def main() -> None:
    """Entry point of the process; ``sys.argv[1]``: the rank's process id."""
    os.nice(NICE)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    core_share.unbind(os.environ)
    if os.getppid() != int(sys.argv[1]):
        return  # the rank is gone
    run(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Request))


def run(request: Request) -> int:
    """Make and store the plans that are not there yet; return how many were stored."""
    parts = parts_of(request.task, compiled=request.compiled)
    measured = MeasuredParts(request.task, parts.atoms if request.by_atoms else parts.grains, request.toolchain)
    client = connect(mode="on", timeout_s=request.timeout_s, idle_s=request.idle_s, max_bytes=request.max_bytes)
    stored, profile = 0, dict(request.profile)
    for wanted in request.wanted:
        if not client.connected or (wanted.instead is None and client.get(wanted.key) is not None):
            continue
        world = len(wanted.slots)
        try:
            blocks = make_blocks(parts, request.options, world=world)
            look_up(request, client, profile, measured.wanted([block.ops for block in blocks]))
            correction = request.learned.correction(measured, profile)
            of_blocks = measured.costs(blocks, profile, -(-request.rows // world), correction)
            runtime = request.runtime.cost(request.task.graph_hash, correction.action_us, queued=request.queued)
            costs = CostTable(of_blocks, *request.runtime.links(*request.links), runtime)
            found = plan(
                request.task,
                blocks,
                costs,
                world=world,
                slots=wanted.slots,
                batch_rows=request.rows,
                memory_bytes=wanted.memory,
                options=request.options,
                interleaved=request.interleaved,
                ranked=True,
            )
        except (RanndError, KeyError):  # a part that was not measured: the job itself will say what is wrong
            continue
        found = replayed(request.task, blocks, of_blocks, found, request.options, interleaved=request.interleaved)
        found = with_records(request.task, blocks, costs, found, request.options)
        own = {"call_us": runtime.call_us, "host_us": runtime.host_us}
        found = msgspec.structs.replace(found, made=request.made, model=request.model, **own)
        if wanted.instead is None:
            stored += client.put(wanted.key, encode(found))
            continue
        now = with_costs(request.task, wanted.instead, measured, profile, correction)
        now = with_records(request.task, blocks, costs, now, request.options)
        before_us = simulated_us(request.task, costs, now, request.options)
        if found.step_us > (1 - FASTER) * before_us:
            _predict_anew(client, wanted, msgspec.structs.replace(now, step_us=before_us, **own))
            continue
        data = encode(found)
        if client.put(wanted.key, data):
            client.discard(measured_key(wanted.key.digest), "another plan takes its place")
            stored += 1
            line = plan_line(found, range(world))
            better = Better(line, found.step_us, before_us, wanted.key, wanted.memory, data)
            sys.stdout.buffer.write(msgspec.json.encode(better) + b"\n")
    return stored


def _predict_anew(client: Client, wanted: Wanted, now: Deployment) -> None:
    """Let the plan that stays have the times by these costs, unless another one has taken its place meanwhile."""
    data = client.get(wanted.key)
    with contextlib.suppress(DeploymentError):  # the next job will say so
        if data is not None and decode(data) == wanted.instead:
            client.put(wanted.key, encode(now))


def look_up(request: Request, client: Client, profile: dict[str, Measured], wanted: Iterable[str]) -> None:
    """Add to `profile` what the daemon has of these parts."""
    missing = [part for part in wanted if part not in profile]
    found = client.get_many([request.key_of(part) for part in missing])
    for part, data in zip(missing, found, strict=True):
        with contextlib.suppress(msgspec.DecodeError):  # the job itself will say so
            if data is not None and is_plausible(known := msgspec.msgpack.decode(data, type=Measured)):
                profile[part] = known
