"""The deployment: a plan as it is run, stored and loaded again.

On disk and on the wire it is msgpack with the field names of :class:`Deployment`; ``format`` says which
version of this grammar it follows. No rank number appears in it, only slots (node ordinal, device ordinal).
"""

from __future__ import annotations

import msgspec

from rannd.errors import DeploymentError

FORMAT = 2


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
    bound_us: float = 0.0
    """No plan can take less, by the same costs; 0 where it was not computed."""
    searched_all: bool = True
    """False where the search was cut off, so that a better plan may exist."""
    placement: str = "stages"
    """Order in which slots are given out: neighbours are 'stages' of one pipeline, or 'replicas' of one stage."""
    memory_bytes: int = 0
    """What the plan may use of each device, margin taken off; 0 where it is not known."""
    alternatives: tuple[Alternative, ...] = ()
    """The best of what was not chosen, the fastest first, those that do not fit last."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Deployment)


def encode(deployment: Deployment) -> bytes:
    """The deployment as bytes."""
    return _encoder.encode(deployment)


def decode(data: bytes) -> Deployment:
    """A deployment from bytes; DeploymentError where they are not one of this format."""
    try:
        deployment = _decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise DeploymentError(f"not a deployment of this version of rannd: {exc}; plan again without it") from exc
    if deployment.format != FORMAT:
        raise DeploymentError(
            f"the deployment has format {deployment.format}, this rannd reads {FORMAT}; plan again without it"
        )
    used = sorted(slot for stage in deployment.stages for slot in stage.slots)
    if used != list(range(len(deployment.slots))):
        raise DeploymentError(
            f"the deployment's stages use slots {used} of {len(deployment.slots)}; plan again without it"
        )
    return deployment
