"""Whether what ranks recorded equals what the emulator says."""

from __future__ import annotations

import numpy as np

from parity.case import Case
from parity.record import Record
from rannd.plan.run_modes import Offload

RELATIVE = {"float64": 1e-9, "float32": 5e-6}
"""Wanted agreement of a tensor, relative to its largest magnitude."""

NOISE = {"float64": 1e-14, "float32": 2e-7}
"""Rounding of a tensor whose true value is zero, relative to the largest magnitude among its kind.

Some gradients are zero mathematically (a linear layer's bias ahead of BatchNorm) and rounding noise
of the size of the terms that cancel in floating point: relative to themselves they never agree.
"""


def _kind(name: str) -> str:
    """Tensors whose magnitudes can be compared: a gradient with the gradients of its step, and so on."""
    return name.rsplit("/", 1)[0]


def _magnitude(value: np.ndarray) -> float:
    return float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind == "f" else 0.0


def _difference(name: str, want: np.ndarray, got: np.ndarray, scale: float, precision: str) -> str | None:
    """What is wrong with one tensor, or None. `scale`: the largest magnitude among its kind."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{name}: {got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    if want.dtype.kind != "f":
        if np.array_equal(want, got):
            return None
        if want.dtype == np.uint8:
            return f"{name}: nested as {got.tobytes().decode()} instead of {want.tobytes().decode()}"
        return f"{name}: {got.ravel()[:4]} instead of {want.ravel()[:4]}"
    if want.size == 0:
        return None
    if not np.isfinite(got).all():
        return f"{name}: not finite"
    worst = float(np.max(np.abs(got - want)))
    magnitude = _magnitude(want)
    if worst <= RELATIVE[precision] * magnitude + NOISE[precision] * scale:
        return None
    where = np.unravel_index(int(np.argmax(np.abs(got - want))), want.shape)
    return (
        f"{name}: off by {worst:.3e} (relative {worst / magnitude if magnitude else np.inf:.3e}) "
        f"at {tuple(map(int, where))}: {got[where]!r} instead of {want[where]!r}"
    )


def _order(name: str) -> tuple[int, int]:
    """Sorts names by when they happened, so that the first difference is the cause."""
    head, _, rest = name.partition("/")
    if not head.isdecimal():
        return (10**6, 0)
    call = rest.partition("/")[0]
    return (int(head), int(call) if call.isdecimal() else 10**6)


def differences(want: list[Record], got: list[Record], precision: str = "float64") -> list[str]:
    """Every difference between the emulated and the real ranks, in the order of time.

    A rank owns a part of the parameters: it must agree on those, and every parameter needs an owner.
    state_dict() must be complete on rank 0, and complete or empty on others.
    """
    if precision != "float64":
        want, got = ([_first_gradients(record) for record in each] for each in (want, got))
    found: list[tuple[tuple[int, int], str]] = []
    owned: set[str] = set()
    for rank, (expected, actual) in enumerate(zip(want, got, strict=True)):
        scales: dict[str, float] = {}
        for name, value in expected.items():
            scales[_kind(name)] = max(scales.get(_kind(name), 0.0), _magnitude(value))
        stateless = rank > 0 and not any(name.startswith("end/state/") for name in actual)
        for name in sorted(expected.keys() | actual.keys()):
            if name.startswith("plan/"):
                continue
            message: str | None
            if name not in expected:
                message = f"{name}: unexpected"
            elif name in actual:
                message = _difference(name, expected[name], actual[name], scales[_kind(name)], precision)
                owned.add(name)
            elif _may_be_elsewhere(name) or (stateless and name.startswith("end/state/")):
                message = None
            else:
                message = f"{name}: missing"
            if message is not None:
                found.append((_order(name), f"rank {rank}: {message}"))
    for name in sorted(want[0]):
        if _may_be_elsewhere(name) and name not in owned:
            found.append((_order(name), f"no rank has {name}"))
    return [message for _, message in sorted(found)]


def _first_gradients(record: Record) -> Record:
    return {name: value for name, value in record.items() if name.startswith(("0/grad/", "0/nograd/"))}


def _may_be_elsewhere(name: str) -> bool:
    """Belongs to a parameter, which another rank may own."""
    return name.split("/")[1] in ("grad", "nograd", "param")


def plan_differences(case: Case, got: list[Record]) -> list[str]:
    """Where the plan that ran is not the one that the case forces."""
    found = []
    for rank, record in enumerate(got):
        replicas = record["plan/replicas"].tolist()
        micro = int(record["plan/micro"])
        if case.stages and len(replicas) != case.stages:
            found.append(f"rank {rank}: {len(replicas)} stages ran instead of {case.stages}")
        if len(replicas) < case.min_stages:
            found.append(f"rank {rank}: {len(replicas)} stages ran instead of at least {case.min_stages}")
        wanted = min(case.micro, case.total_rows(0))  # more would be without rows
        if case.micro and micro != wanted:
            found.append(f"rank {rank}: {micro} microbatches ran instead of {wanted}")
        keeps, recomputes = record["plan/recompute"].any(0).tolist()
        if case.recompute and not (recomputes and keeps == case.every_other):
            found.append(f"rank {rank}: {'no' if not recomputes else 'some' if keeps else 'all'} blocks recompute")
        offloaded = Offload(*record["plan/offload"].tolist())
        if offloaded != case.offload:
            found.append(f"rank {rank}: {offloaded} was elsewhere instead of {case.offload}")
        if min(replicas) < 1 or sum(replicas) > case.ranks * case.passes:
            found.append(f"rank {rank}: stages have {replicas} replicas on {case.ranks} ranks")
        if case.passes > 1 and sum(replicas) != case.ranks * case.passes:
            found.append(f"rank {rank}: {sum(replicas)} replicas of stages ran, not {case.passes} on each rank")
    return found
