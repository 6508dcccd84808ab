"""The deployment: the plan that the runtime executes, and its file format.

On disk and on the wire it is msgpack with the field names of :class:`Deployment`; ``format`` is the version of this
format. It contains no rank numbers, only slots (node ordinal, device ordinal). A file may come from anywhere, so
`decode` validates everything: numbers are in sane ranges, indices are in bounds.
"""

from __future__ import annotations

import math

import msgspec

from rannd.errors import DeploymentError

FORMAT = 3
MAX_BYTES = 64 * 2**20
"""Maximum size; a graph of 10,000 operators takes less than a hundredth of it."""
_MOST_SLOTS = 1 << 16
_MOST_PIECES = 1 << 20
"""Microbatches of all ranks: a program has actions for each. More than any plan for 65,536 ranks has."""
_MOST = 1 << 53
"""Largest number that `decode` accepts."""


class Slot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Place of one rank: ordinal of the node, ordinal of the device on that node."""

    node: int
    device: int


class StageEstimate(msgspec.Struct, frozen=True):
    """Estimated times and memory of one replica of a stage in one step. Microseconds and bytes."""

    forward_us: float
    backward_us: float
    allreduce_us: float
    input_bytes: int
    """Received from other stages per microbatch."""
    output_bytes: int
    """Sent to other stages per microbatch."""
    param_bytes: int
    grad_bytes: int
    activation_bytes: int
    """Kept from forward to backward, by all microbatches in flight."""
    optimizer_bytes: int
    comm_bytes: int
    total_bytes: int
    pieces: int = 1
    """Maximum number of microbatches that a replica runs in a step; the times above are for all of them."""
    in_flight: int = 1
    """Maximum number of microbatches between their forward and their backward; the bytes above are for all of them."""
    weight_us: float = 0.0
    """The part of `backward_us` that a schedule may delay (parameter gradients)."""
    working_bytes: int = 0
    """Temporary memory of a backward, activations that are computed again and `whole_bytes` included."""
    whole_bytes: int = 0
    """Parameters and gradients that replicas divide and have as a whole for a while (ZeRO 2 and 3), for any rows."""
    weight_bytes: int = 0
    """Of each microbatch, what stays until its delayed gradients of parameters are computed; 0 if none are delayed."""
    offloaded_bytes: int = 0
    """Parameters, gradients, optimizer state and activations that are elsewhere while they are not needed;
    `optimizer_bytes` and `working_bytes` have what of them is on the device at a time."""
    offload_us: float = 0.0
    """Time to copy what of it a step changes to the device and back, in each step."""
    fetch_us: float = 0.0
    """Time to copy the parameters among it to the device, in each forward and each backward of a microbatch; copies of
    activations are in `forward_us` and `backward_us`."""
    most_bytes: int = 0
    """Most bytes in use at a time on a device that runs the stage, with all of its stages, by a replay of the Program;
    0: not replayed. The other bytes are maxima, each at a moment of its own."""

    @property
    def used_bytes(self) -> int:
        """What a device needs: by the replay, or else the sum of all maxima of this stage."""
        return self.most_bytes or self.total_bytes


class Stage(msgspec.Struct, frozen=True):
    """Ops that run together on one or more replicas."""

    name: str
    """``MERGE_<first block>_<last block>``, as in the estimate's log lines."""
    ops: tuple[str, ...]
    """Names of the ops of the task graph."""
    slots: tuple[int, ...]
    """Index into `Deployment.slots` for each replica. Every slot is in one stage, or all are in equally many, as
    schedules with several stages per slot have it."""
    recompute: bool
    """Recompute activations in the backward instead of keeping them: of all segments, or of some."""
    estimate: StageEstimate
    modules: str = ""
    """First and last of the user's modules, such as 'transformer.h.0..4', for display; '' if not known."""
    segment_of: tuple[int, ...] = ()
    """Number of the segment that each of `ops` belongs to: segments run one after the other, forward and backward.
    Empty: the stage is one segment."""
    recomputed: tuple[bool, ...] = ()
    """Whether each segment recomputes its activations; empty: as `recompute` says."""
    stays_whole: bool = False
    """With ZeRO 3: parameters that replicas divide stay whole from the first forward until the last microbatch (and are
    gathered once more for a backward that runs after the call). False: those of a segment, and of the next one, are
    gathered for each forward and each backward of it."""

    @property
    def segments(self) -> tuple[bool, ...]:
        """Whether each segment recomputes its activations."""
        return self.recomputed or (self.recompute,)


class Alternative(msgspec.Struct, frozen=True):
    """A plan that was not chosen, and why; for display."""

    name: str
    """Such as '4-way data parallel' or '2 stages x 2, 8 microbatches, 1f1b'."""
    step_us: float
    """Predicted time of a step; 0 if the plan does not fit memory (infinity is never stored)."""
    most_bytes: int
    """Memory of the fullest device."""
    over_bytes: int
    """Bytes above what a device may use; 0 if the plan fits."""
    at_least: bool = False
    """Whether `step_us` is a lower bound, with which the plan could not win, so that it was not simulated."""
    busy_us: float = 0.0
    """Forwards and backwards of the device that computes longest, by the estimates of its stages; 0: not known."""


OFFLOAD = "offload"
"""What of a plan a `Reason` for offloading the optimizer's state is about."""
OFFLOAD_PARAMS = "offload params"
"""The same for parameters."""
OFFLOAD_ACTIVATIONS = "offload activations"
"""The same for activations."""
OFFLOAD_REASONS = (OFFLOAD, OFFLOAD_PARAMS, OFFLOAD_ACTIVATIONS)
"""All of them, in the order of `Deployment.offloads`."""


class Reason(msgspec.Struct, frozen=True):
    """Why a plan has what it has; for display."""

    what: str
    """Such as 'ZeRO' or 'microbatches'."""
    chosen: str
    """Such as '2' or 'no'."""
    why: str
    """What was compared, and by how much it lost or what memory it lacked."""


class Provenance(msgspec.Struct, frozen=True):
    """Devices, costs and versions that a deployment was planned with, so that differences can be reported."""

    device: str
    """Model of the devices."""
    costs: str
    """Source of the times: 'measured', or 'cluster NAME' if a cluster file gave the rates."""
    rannd: str
    """Version."""
    torch: str
    """Version."""


class EdgeCost(msgspec.Struct, frozen=True, array_like=True):
    """What a microbatch sends from one stage to another: bytes, and microseconds inside a node and between nodes."""

    src: int
    """-1: the ranks, which have the inputs."""
    dst: int
    """The number of stages: the ranks, which get the outputs."""
    values_bytes: int
    near_us: float
    far_us: float
    has_grads: bool
    """Whether gradients come back."""
    grads_bytes: int = 0
    near_grads_us: float = 0.0
    far_grads_us: float = 0.0


class BlockTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of one microbatch in a block, which the search never divides; in microseconds."""

    forward_us: float
    backward_us: float


class PlannedStep(msgspec.Struct, frozen=True):
    """What a step is simulated with, without the graph; by stage, of one microbatch unless said otherwise."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    edges: tuple[EdgeCost, ...]
    """Sorted by their stages."""
    reduce_us: tuple[tuple[float, ...], ...]
    """Of each bucket of a stage's gradients, once in a step."""
    after_us: tuple[float, ...] = ()
    """What follows the reductions, once in a step; empty: nothing."""
    tied: tuple[tuple[int, ...], ...] = ()
    """Sets of stages that share parameters,"""
    tied_us: tuple[tuple[float, ...], ...] = ()
    """and the reductions of these."""
    host_us: float = 0.0
    """Of each action,"""
    byte_us: float = 0.0
    """and of each byte of a message on both sides."""
    agreeing_us: float = 0.0
    """At the begin of a step."""


class OpTable(msgspec.Struct, frozen=True):
    """The operators of all stages, in the order of `Stage.ops`, one column per field; for display.

    `targets`, `modules`, `sources` and `dtypes` are numbers of `texts`.
    """

    texts: tuple[str, ...]
    targets: tuple[int, ...]
    modules: tuple[int, ...]
    """Path of the user's module that ran it."""
    sources: tuple[int, ...]
    """File and line that called it, such as 'examples/tutorial.py:27'; '': not known."""
    dtypes: tuple[int, ...]
    blocks: tuple[int, ...]
    """Number of its block, of all blocks that the planner had."""
    flops: tuple[int, ...]
    """Of the forward of a microbatch, by its shapes."""
    param_bytes: tuple[int, ...]
    """Parameters and buffers that it reads."""
    output_bytes: tuple[int, ...]
    """Of a microbatch."""
    block_times: tuple[BlockTimes, ...] = ()


class Deployment(msgspec.Struct, frozen=True):
    """Everything the runtime needs to run a model in stages."""

    format: int
    graph_hash: str
    slots: tuple[Slot, ...]
    stages: tuple[Stage, ...]
    microbatches: int
    """Microbatches per rank: the slices of each rank's mini-batch."""
    schedule: str
    batch_rows: int
    """Rows of the global batch that the plan was made for."""
    step_us: float
    """Predicted time of one step."""
    unused_params: tuple[str, ...] = ()
    """Parameters and buffers that no op reads; the first stage keeps them."""
    e_us: float = 0.0
    """Step time by the closed form E, which the search minimises (docs/planning.md); `step_us` may be simulated."""
    bound_us: float = 0.0
    """Lower bound of the closed form for all plans that would be preferred, with the same costs; 0 if it was not
    computed."""
    searched_all: bool = True
    """False if the search was cut off, so that a better plan may exist."""
    placement: str = "stages"
    """Order of slots: neighbours are 'stages' of one pipeline, or 'replicas' of one stage."""
    memory_bytes: int = 0
    """Memory that the plan may use per device, after the margin; 0 if not known."""
    alternatives: tuple[Alternative, ...] = ()
    """The best plans that were not chosen, fastest first, those that do not fit last."""
    made: Provenance | None = None
    """How it was planned; None if not known."""
    zero: int = 0
    """ZeRO stage."""
    model: str = ""
    """Class of the model and its number of parameters, such as 'GPT2LMHeadModel 11.1M', for display; '': not known."""
    offload: bool = False
    """Between steps the optimizer's state is not in the device's memory."""
    offload_params: bool = False
    """Parameters are in the device's memory only while a segment reads them; with ZeRO stage 3."""
    offload_activations: bool = False
    """What segments that recompute start from is not in the device's memory between forward and backward."""
    reasons: tuple[Reason, ...] = ()
    """Why it was chosen; empty: nothing was compared."""
    call_us: float = 0.0
    """The part of `step_us` that the runtime takes itself, once,"""
    host_us: float = 0.0
    """and for each computation and message; see `RuntimeCost`."""
    planned: PlannedStep | None = None
    """To draw a step; None: not known."""
    table: OpTable | None = None
    """To list operators; None: not known."""

    @property
    def offloads(self) -> tuple[bool, bool, bool]:
        """Whether it offloads optimizer state, parameters, activations."""
        return self.offload, self.offload_params, self.offload_activations


class _Header(msgspec.Struct):
    format: int


_header = msgspec.msgpack.Decoder(_Header)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Deployment)


def encode(deployment: Deployment) -> bytes:
    """Serialize a deployment to msgpack."""
    return _encoder.encode(deployment)


def decode(data: bytes) -> Deployment:
    """Deserialize and validate a deployment.

    Raises:
        DeploymentError: The data is not a deployment, has another format, or is inconsistent.
    """
    if len(data) > MAX_BYTES:
        raise DeploymentError(f"{len(data)} bytes are too many for a deployment (limit {MAX_BYTES}); {_AGAIN}")
    try:
        found = _header.decode(data).format  # decoded first: other formats have other fields
        if found != FORMAT:
            raise DeploymentError(f"the deployment has format {found}, this version of rannd reads {FORMAT}; {_AGAIN}")
        deployment = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        raise DeploymentError(f"not a deployment of this version of rannd: {exc}; {_AGAIN}") from exc
    wrong = _wrong(deployment)
    if wrong:
        raise DeploymentError(f"the deployment is damaged: {wrong}; {_AGAIN}")
    return deployment


_AGAIN = "run without it to plan again"


def _wrong(deployment: Deployment) -> str:
    """Return what is inconsistent in a deployment, or ''."""
    world, stages = len(deployment.slots), deployment.stages
    used = sorted(slot for stage in stages for slot in stage.slots)
    passes = max(len(used) // max(world, 1), 1)
    if not 1 <= world <= _MOST_SLOTS or not 1 <= len(stages) <= world * passes:
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
    if deployment.microbatches > deployment.batch_rows:  # a program is made of them before any row is seen
        return f"it has {deployment.microbatches} microbatches for {deployment.batch_rows} rows"
    if deployment.microbatches * world * passes > _MOST_PIECES:
        return f"its {deployment.microbatches} microbatches on {world} slots are more than {_MOST_PIECES} together"
    if list(deployment.slots) != sorted(set(deployment.slots)):
        return "its slots are not sorted, or one of them occurs twice"
    if used != [slot for slot in range(world) for _ in range(passes)]:
        return f"its stages use {len(used)} slots, not each of {world} once, or all of them equally often"
    if deployment.offload_params and deployment.zero != 3:
        return f"it offloads parameters with ZeRO stage {deployment.zero}, not 3"
    ops: set[str] = set()
    for place, stage in enumerate(stages):
        if stage.estimate.offloaded_bytes and not any(deployment.offloads):
            return f"stages[{place}] offloads {stage.estimate.offloaded_bytes} bytes of a plan that offloads nothing"
        if len(set(stage.slots)) < len(stage.slots):
            return f"stages[{place}] uses a slot twice: {stage.slots}"
        if not stage.slots or not stage.ops:
            return f"stages[{place}] has {len(stage.slots)} slots and {len(stage.ops)} operators"
        if len(ops) + len(stage.ops) != len(ops.union(stage.ops)):
            return f"an operator of stages[{place}] occurs twice"
        ops.update(stage.ops)
        divided = deployment.zero == 3 and len(stage.slots) > 1
        if stage.stays_whole and (not divided or deployment.offload_params or passes > 1):
            return (
                f"the parameters of stages[{place}] stay whole for a while, with ZeRO stage {deployment.zero} and "
                f"{len(stage.slots)} replicas, {passes} stages on each slot{', offloaded' * deployment.offload_params}"
            )
        if stage.segment_of:
            if len(stage.segment_of) != len(stage.ops) or set(stage.segment_of) != set(range(len(stage.recomputed))):
                return f"the segments of stages[{place}] do not have each of its operators once"
        elif stage.recomputed:
            return f"stages[{place}] has no segments, but {len(stage.recomputed)} settings for them"
    planned, table = deployment.planned, deployment.table
    return (_wrong_step(planned, len(stages)) if planned else "") or (_wrong_table(table, len(ops)) if table else "")


def _wrong_step(planned: PlannedStep, stages: int) -> str:
    """Return what is inconsistent in what a step is simulated with, or ''."""
    edges = [(edge.src, edge.dst) for edge in planned.edges]
    if edges != sorted(set(edges)) or any(
        not -1 <= src < dst <= stages or (src, dst) == (-1, stages) for src, dst in edges
    ):
        return f"planned.edges are {edges[:8]} of {stages} stages"
    for name in ("forward_us", "backward_us", "weight_us", "reduce_us", "after_us"):
        count = len(getattr(planned, name))
        if count != stages and (count or name != "after_us"):
            return f"planned.{name} has {count} numbers for {stages} stages"
    if any(weight > backward for weight, backward in zip(planned.weight_us, planned.backward_us, strict=True)):
        return "planned.weight_us is more than planned.backward_us"
    tied = planned.tied
    odd = [each for each in tied if len(each) < 2 or list(each) != sorted(set(each) & set(range(stages)))]
    if odd or list(tied) != sorted(set(tied)) or len(planned.tied_us) != len(tied):
        return f"planned.tied is {tied[:8]} with {len(planned.tied_us)} reductions"
    for name in planned.__struct_fields__:
        if not _is_sane(getattr(planned, name), least=-1 if name == "edges" else 0):
            return f"planned.{name} has a number out of range"
    return "planned.edges has a negative number" if any(
        value < 0 for edge in planned.edges for value in (edge.values_bytes, edge.near_us, edge.far_us,
                                                          edge.grads_bytes, edge.near_grads_us, edge.far_grads_us)
    ) else ""  # fmt: skip


def _wrong_table(table: OpTable, ops: int) -> str:
    """Return what is inconsistent in a table of operators, or ''."""
    for name in table.__struct_fields__:
        if name in ("texts", "block_times"):
            continue
        column = getattr(table, name)
        if len(column) != ops:
            return f"table.{name} has {len(column)} entries for {ops} operators"
        most = len(table.texts) - 1 if name in ("targets", "modules", "sources", "dtypes") else _MOST
        if min(column) < 0 or max(column) > most:
            return f"table.{name} has a number out of range"
    return "" if _is_sane(table.block_times) else "table.block_times has a number out of range"


def _is_sane(value: object, least: int = 0) -> bool:
    """Whether all numbers of a value are in range."""
    if isinstance(value, msgspec.Struct):
        return all(_is_sane(getattr(value, name), least) for name in value.__struct_fields__)
    if isinstance(value, tuple):
        return all(_is_sane(each, least) for each in value)
    return not isinstance(value, int | float) or (math.isfinite(value) and least <= value <= _MOST)
