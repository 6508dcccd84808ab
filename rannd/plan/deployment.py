"""The deployment: a plan as it is run, stored and loaded again.

On disk and on the wire it is msgpack with the field names of :class:`Deployment`; ``format`` says which
version of this grammar it follows. No rank number appears in it, only slots (node ordinal, device ordinal).
A file may come from anywhere, so `decode` believes nothing: whatever it returns has sane numbers and indices in range.
"""

from __future__ import annotations

import math

import msgspec

from rannd.errors import DeploymentError

FORMAT = 2
MAX_BYTES = 64 * 2**20
"""Longer data is no deployment: 10,000 operators take less than a hundredth."""
_MOST_SLOTS = 1 << 16
_MOST = 1 << 53
"""Largest count that is believed."""


class Slot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A place for one rank: ordinal of the node, ordinal of the device on it."""

    node: int
    device: int


class StageEstimate(msgspec.Struct, frozen=True):
    """What the planner expects of one replica of a stage in one step. Microseconds and bytes."""

    forward_us: float
    backward_us: float
    allreduce_us: float
    input_bytes: int
    """Received from other stages for one piece."""
    output_bytes: int
    """Sent to other stages for one piece."""
    param_bytes: int
    grad_bytes: int
    activation_bytes: int
    optimizer_bytes: int
    comm_bytes: int
    total_bytes: int
    pieces: int = 1
    """Most pieces that a replica runs in a step; the times above are of all of them."""
    in_flight: int = 1
    """Most pieces between their forward and their backward; the bytes above are of all of them."""
    weight_us: float = 0.0
    """The part of `backward_us` that a schedule may run later than the rest (gradients of parameters)."""
    working_bytes: int = 0
    """Needed for a moment while a backward runs."""


class Stage(msgspec.Struct, frozen=True):
    """Ops that run together, on one or more replicas."""

    name: str
    """``MERGE_<first block>_<last block>``, as in the estimate's log lines."""
    ops: tuple[str, ...]
    """Names of the ops of the task graph."""
    slots: tuple[int, ...]
    """Index into `Deployment.slots` of each replica."""
    recompute: bool
    """Run the forward again in the backward instead of keeping activations."""
    estimate: StageEstimate


class Alternative(msgspec.Struct, frozen=True):
    """A plan that was not chosen, and why: for people to read."""

    name: str
    """As '4-way data parallel' or '2 stages x 2, 8 microbatches, 1f1b'."""
    step_us: float
    """Predicted time of a step; infinite is never stored: 0 where the plan does not fit."""
    most_bytes: int
    """What the fullest device would need."""
    over_bytes: int
    """By how much that is more than a device may use; 0 where the plan fits."""
    runs: bool = True
    """False where the runtime cannot run it yet (ways.py)."""


class Provenance(msgspec.Struct, frozen=True):
    """With what a deployment was made: it tells a user that another one may be better."""

    device: str
    """The model of the devices it was planned for."""
    costs: str
    """Where times came from: 'measured', or 'cluster NAME' where a file told them."""
    rannd: str
    """Version."""
    torch: str
    """Version."""


class Deployment(msgspec.Struct, frozen=True):
    """Everything the runtime needs to run a model in stages."""

    format: int
    graph_hash: str
    slots: tuple[Slot, ...]
    stages: tuple[Stage, ...]
    microbatches: int
    """Slices of each rank's mini-batch; a piece is one slice of one rank."""
    schedule: str
    batch_rows: int
    """Rows of the global batch the plan was made for."""
    step_us: float
    """Predicted time of one step."""
    unused_params: tuple[str, ...] = ()
    """Parameters and buffers no op reads; kept by the first stage."""
    e_us: float = 0.0
    """The closed form that the search minimises (docs/planning.md); `step_us` is simulated where plans were ranked."""
    bound_us: float = 0.0
    """No plan has a smaller closed form, by the same costs; 0 where it was not computed."""
    searched_all: bool = True
    """False where the search was cut off, so that a better plan may exist."""
    placement: str = "stages"
    """Order in which slots are given out: neighbours are 'stages' of one pipeline, or 'replicas' of one stage."""
    memory_bytes: int = 0
    """What the plan may use of each device, margin taken off; 0 where it is not known."""
    alternatives: tuple[Alternative, ...] = ()
    """The best of what was not chosen, the fastest first, those that do not fit last."""
    made: Provenance | None = None
    """With what it was made; None where nobody said."""
    zero: int = 0
    """Stage of ZeRO."""


class _Header(msgspec.Struct):
    format: int


_header = msgspec.msgpack.Decoder(_Header)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Deployment)


def encode(deployment: Deployment) -> bytes:
    """The deployment as bytes."""
    return _encoder.encode(deployment)


def decode(data: bytes) -> Deployment:
    """A deployment from bytes; DeploymentError where they are not one of this format, or it cannot be right."""
    if len(data) > MAX_BYTES:
        raise DeploymentError(f"{len(data)} bytes are no deployment, which has {MAX_BYTES} at most; {_AGAIN}")
    try:
        found = _header.decode(data).format  # before the rest: other formats have other fields
        if found != FORMAT:
            raise DeploymentError(f"the deployment has format {found}, this rannd reads {FORMAT}; {_AGAIN}")
        deployment = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        raise DeploymentError(f"not a deployment of this version of rannd: {exc}; {_AGAIN}") from exc
    wrong = _wrong(deployment)
    if wrong:
        raise DeploymentError(f"the deployment is damaged: {wrong}; {_AGAIN}")
    return deployment


_AGAIN = "plan again without it"


def _wrong(deployment: Deployment) -> str:
    """What cannot be in a deployment, '' where it is sound."""
    world, stages = len(deployment.slots), deployment.stages
    if not 1 <= world <= _MOST_SLOTS or not 1 <= len(stages) <= world:
        return f"it has {len(stages)} stages on {world} slots"
    for what, struct in (
        ("", deployment),
        *((f"slots[{place}].", slot) for place, slot in enumerate(deployment.slots)),
        *((f"stages[{place}].estimate.", stage.estimate) for place, stage in enumerate(stages)),
        *((f"alternatives[{place}].", other) for place, other in enumerate(deployment.alternatives)),
    ):
        for name in struct.__struct_fields__:
            value = getattr(struct, name)
            if isinstance(value, int | float) and not (0 <= value <= _MOST and math.isfinite(value)):
                return f"{what}{name} is {value}"
    for name in ("microbatches", "batch_rows"):
        if not getattr(deployment, name):
            return f"{name} is 0"
    if list(deployment.slots) != sorted(set(deployment.slots)):
        return "its slots are not sorted, or one of them is there twice"
    used = sorted(slot for stage in stages for slot in stage.slots)
    if used != list(range(world)):
        return f"its stages use {len(used)} slots, not each of {world} once"
    ops: set[str] = set()
    for place, stage in enumerate(stages):
        if not stage.slots or not stage.ops:
            return f"stages[{place}] has {len(stage.slots)} slots and {len(stage.ops)} operators"
        if len(ops) + len(stage.ops) != len(ops.union(stage.ops)):
            return f"an operator of stages[{place}] is there twice"
        ops.update(stage.ops)
    return ""
