"""The content of a page as one frozen value; as JSON it is what `page.js` draws.

All texts may come from anybody's model or file: they are plain text here, and are made neither HTML nor code there.
Times are microseconds.
"""

from __future__ import annotations

import msgspec


class Runner(msgspec.Struct, frozen=True):
    """A plan that was not chosen."""

    name: str
    step_us: float
    """0: it does not fit."""
    at_least: bool
    most_bytes: int
    why: str
    """Why it lost."""


class PlanVerdict(msgspec.Struct, frozen=True):
    """What was decided, and how sure that is."""

    step_us: float
    measured_us: float
    """0: not measured."""
    measured_steps: int
    """Steps whose median that is."""
    closed_us: float
    """By the closed form; 0: not known."""
    certificate: str
    bubble: float
    runner: Runner | None
    """The fastest plan that was not chosen and fits."""
    others: tuple[Runner, ...]
    reasons: tuple[tuple[str, str, str], ...]
    """What, what was chosen, why."""
    facts: tuple[tuple[str, str], ...]


class SlotUse(msgspec.Struct, frozen=True):
    """What each of the devices with the same stages spends a step for."""

    devices: str
    stages: str
    count: int
    """Devices."""
    forward_us: float
    backward_us: float
    reduce_us: float
    """What of the reductions is not beside a computation."""
    idle_us: float
    critical: bool
    """Whether they compute longest of all."""


class Cost(msgspec.Struct, frozen=True):
    """What takes long in a step."""

    what: str
    detail: str
    us: float
    """Of one device in a step."""


class DeviceMemory(msgspec.Struct, frozen=True):
    """Planned bytes of each of some devices."""

    devices: str
    stages: str
    count: int
    used: int
    parts: tuple[int, ...]
    """Maxima, in the order of `PlanPage.memory_names`; together they may be more than what is used at a time."""


class Events(msgspec.Struct, frozen=True):
    """Events in columns; times are in units of `Timeline.unit_us`."""

    slot: tuple[int, ...]
    kind: tuple[int, ...]
    """Number in KINDS."""
    start: tuple[int, ...]
    length: tuple[int, ...]
    name: tuple[int, ...]
    """Number in `names`."""
    names: tuple[str, ...]


class TypicalStep(msgspec.Struct, frozen=True):
    """What steps took, beside which a timeline has another time."""

    what: str
    step_us: float


class Timeline(msgspec.Struct, frozen=True):
    """What each of some slots does in a step."""

    title: str
    note: str
    step_us: float
    unit_us: float
    slots: tuple[str, ...]
    events: Events
    what: str = ""
    """Which step it is, if that is not the one that its title says."""
    typical: TypicalStep | None = None


class Layers(msgspec.Struct, frozen=True):
    """Equal layers that follow each other."""

    name: str
    count: int
    first: int
    """Place of the first operator of the first one, of all operators in the order of the stages."""
    ops: int
    """Operators of each."""
    flops: int
    """Of all together, as the bytes."""
    param_bytes: int
    source: str
    """Line that called the first operator of which it is known."""


class PageStage(msgspec.Struct, frozen=True):
    """A stage."""

    name: str
    modules: str
    devices: str
    replicas: int
    pieces: int
    forward_us: float
    backward_us: float
    reduce_us: float
    recomputes: str
    ops: int
    layers: tuple[Layers, ...]
    left_out: int = 0
    """Layers that would have made the page too large."""


class PageEdge(msgspec.Struct, frozen=True):
    """What a microbatch sends from stage to stage."""

    src: str
    dst: str
    values_bytes: int
    values_us: float
    grads_bytes: int
    grads_us: float
    far_us: float
    """Values between nodes; 0: as inside of one, or all devices are on one."""


class Ops(msgspec.Struct, frozen=True):
    """Operators in columns; those of `TEXTS` are numbers of `texts`."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    stage: tuple[int, ...]
    block: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    module: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    dtype: tuple[int, ...] = ()
    flops: tuple[int, ...] = ()
    param_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    left_out: int = 0
    """Operators that would have made the page too large."""


class PlanDifference(msgspec.Struct, frozen=True):
    """What two plans do differently."""

    what: str
    this: str
    other: str
    change: str = ""


class ComparedPlan(msgspec.Struct, frozen=True):
    """Another plan."""

    key: str
    title: str
    rows: tuple[PlanDifference, ...]
    note: str


class PlanPage(msgspec.Struct, frozen=True):
    """All of a page."""

    title: str
    key: str
    written: str
    verdict: PlanVerdict
    uses: tuple[SlotUse, ...]
    costs: tuple[Cost, ...]
    memory_limit: int
    memory_names: tuple[str, ...]
    memory: tuple[DeviceMemory, ...]
    timelines: tuple[Timeline, ...]
    timeline_note: str
    stages: tuple[PageStage, ...]
    edges: tuple[PageEdge, ...]
    ops: Ops
    against: ComparedPlan | None
    text: str
    """The plan as `rannc-cache show` prints it."""
    shortened: str = ""
    """What is left out of the page."""


KINDS = ("forward", "backward", "weight gradients", "receive", "reduce", "send", "wait", "other")
"""Kinds of events, in the order of their numbers."""
