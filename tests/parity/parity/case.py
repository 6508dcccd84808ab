"""One parity case: what to train, how, and under which plan."""

from __future__ import annotations

import msgspec

from rannd.plan.run_modes import PARAMS_ZERO, Offload

STEPS = 5
"""Optimizer steps of a case."""

LATE = 3
"""First step (counted from 0) that uses `Case.late_rows`."""


class Case(msgspec.Struct, frozen=True):
    """A training run on `ranks` ranks, forced into a plan, that must equal the emulated one."""

    model: str
    """Name in `zoo.ZOO`."""
    ranks: int
    stages: int = 0
    """Forced number of stages; 0 leaves it to the planner."""
    micro: int = 0
    """Forced number of microbatches; 0 leaves it to the planner."""
    schedule: str = "1f1b"
    """How backward runs: inside the call that computes a loss (the name of a schedule), or "asked": when it is asked
    for, whatever the model computes."""
    passes: int = 1
    """Stages per slot; more than 1 with the schedules that have several, see placing.py."""
    optimizer: str = "sgd"
    """Name in `zoo.OPTIMIZERS`."""
    zero: int = -1
    """ZeRO stage; -1 leaves it to the planner."""
    recompute: bool = False
    """Activations are recomputed in backward."""
    every_other: bool = False
    """Only every other block recomputes, as where memory suffices for some of them, see recomputing.py."""
    joined: bool = False
    """Under ZeRO 2 and 3 some neighbouring blocks are one segment, see joining.py."""
    offload: Offload = Offload()
    """What is elsewhere while it is not needed; nothing leaves it to the planner, and memory is plentiful."""
    reshard: bool = False
    """ZeRO 3 lets go of whole parameters also where memory suffices."""
    script: str = "plain"
    """Name in `script.SCRIPTS`."""
    rows: tuple[int, ...] = (8,)
    """Rows of each rank's mini-batch; one number stands for all ranks."""
    late_rows: tuple[int, ...] = ()
    """The same from step `LATE` on, where it differs."""
    min_stages: int = 1
    """Where `stages` is free: fewer stages than this fail the case."""
    precision: str = "float64"
    """Of the model and its inputs. In float32 the first step's gradients are compared alone: what comes later hangs on
    how an optimizer blows rounding up."""
    env: tuple[tuple[str, str], ...] = ()
    """Further RANNC_* variables of this case."""

    @property
    def name(self) -> str:
        """Readable and unique; also the stem of its files."""
        parts = [self.model, f"np{self.ranks}", f"s{self.stages or 'any'}", f"m{self.micro or 'any'}"]
        parts += [self.schedule.replace("_", ""), self.optimizer, self.script]
        parts.append(
            ".".join(map(str, self.rows)) + ("to" + ".".join(map(str, self.late_rows)) if self.late_rows else "")
        )
        parts += [f"v{self.passes}"] if self.passes > 1 else []
        parts += [f"zero{self.zero}"] if self.zero > 0 else []
        parts += ["reshard"] if self.reshard else []
        parts += [f"recompute{'some' if self.every_other else ''}"] if self.recompute else []
        parts += ["joined"] if self.joined else []
        parts += [each.replace("_", "") for each in self.offload.settings]
        parts += [self.precision] if self.precision != "float64" else []
        parts += [f"{key.removeprefix('RANNC_').lower()}={value}" for key, value in self.env]
        return "-".join(parts)

    def rows_of(self, step: int, rank: int) -> int:
        """Rows of `rank`'s mini-batches in `step`."""
        rows = self.late_rows if self.late_rows and step >= LATE else self.rows
        if len(rows) not in (1, self.ranks):
            raise ValueError(f"{self.name}: rows {rows} are neither one number nor one for each of {self.ranks} ranks")
        return rows[rank] if len(rows) == self.ranks else rows[0]

    def total_rows(self, step: int) -> int:
        """Rows of the global batch in `step`."""
        return sum(self.rows_of(step, rank) for rank in range(self.ranks))

    def environment(self) -> dict[str, str]:
        """The variables that force this case's plan."""
        forced = {"RANNC_PARTITION_NUM": str(self.stages), "RANNC_PIPELINE_NUM": str(self.micro)}
        if self.passes > 1:
            # They are made for stages without replicas.
            forced["RANNC_ZERO_STAGE"] = str(PARAMS_ZERO if self.offload.params else 0)
        elif self.zero >= 0:
            forced["RANNC_ZERO_STAGE"] = str(self.zero)
        if self.recompute:
            forced["RANNC_CHECKPOINTING"] = "true"
        if self.reshard:
            forced["RANNC_RESHARD_AFTER_FORWARD"] = "true"
        forced |= {f"RANNC_{each.upper()}": "true" for each in self.offload.settings}
        if self.schedule == "asked":
            forced["RANNC_INTERLEAVE_LOSS"] = "false"
        elif self.passes == 1:  # others are planned under 1f1b, and placed anew
            forced["RANNC_SCHEDULE"] = self.schedule
        return {**forced, **dict(self.env)}


def encode_cases(cases: list[Case]) -> bytes:
    """Cases as JSON."""
    return msgspec.json.encode(cases)


def decode_cases(data: bytes) -> list[Case]:
    """Cases from JSON."""
    return msgspec.json.decode(data, type=list[Case])
