"""What the user may demand of a plan: the configuration items that the planner reads, by their own names."""

from __future__ import annotations

import msgspec

from rannd.config import Config
from rannd.errors import PlanError
from rannd.plan.run_modes import SCHEDULES


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Demands and limits of a search. 0 means 'free' where an item forces a number.

    Raises PlanError on construction where two of the numbers contradict each other.
    """

    partition_num: int = 0
    """Number of stages; 0: free."""
    replica_num: int = 0
    """Replicas of every stage; 0: free, and stages may differ."""
    pipeline_num: int = 0
    """Microbatches per rank; 0: free."""
    min_pipeline: int = 1
    """Fewest microbatches per rank that are tried; the search doubles from here."""
    max_pipeline: int = 32
    """Most microbatches per rank that are tried."""
    min_pipeline_bs: int = 1
    """Fewest rows of a piece."""
    min_partition_num: int = 5
    """Coarsening keeps at least so many blocks (where there are so many grains)."""
    max_partition_num: int = 32
    """Most blocks handed to the stage phase."""
    coarsen_by_time: bool = True
    """Weigh ops by their (analytic) time; otherwise by the bytes they touch alone."""
    do_coarsening: bool = True
    """Merge atoms over their most expensive boundaries first; otherwise only by weight."""
    do_uncoarsening: bool = False
    """Move the boundaries of coarsened blocks to cheaper places nearby."""
    schedule: str = "1f1b"
    """Name of the schedule, see ways.SCHEDULES."""
    opt_param_factor: float = 2.0
    """Bytes of optimizer state per byte of trainable parameters."""
    checkpointing: bool = False
    """Recompute in every stage. Otherwise only where nothing fits without."""
    sync_allreduce: bool = False
    """Reduce gradients when backward has ended, not while it runs."""
    limit_dev_num_pot: bool = False
    """Only powers of two (and all devices) as numbers of replicas."""
    mem_margin: float = 0.1
    """Part of a device's memory that was kept out of the planner's limit; read for messages only."""

    @staticmethod
    def of(config: Config) -> PlanOptions:
        """What the configuration demands."""
        return PlanOptions(**{name: getattr(config, name) for name in PlanOptions.__struct_fields__})

    def __post_init__(self) -> None:
        for low, item in ((0, "partition_num"), (0, "replica_num"), (0, "pipeline_num"), (1, "min_pipeline")):
            _at_least(low, item, getattr(self, item))
        for item in ("max_pipeline", "min_pipeline_bs", "min_partition_num", "max_partition_num"):
            _at_least(1, item, getattr(self, item))
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule={self.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
        if self.opt_param_factor < 0:
            raise PlanError(f"opt_param_factor={self.opt_param_factor} is negative; use 2 for Adam, 0 for plain SGD")
        if not 0 <= self.mem_margin < 1:
            raise PlanError(f"mem_margin={self.mem_margin} is not in [0, 1); use a part of the memory such as 0.1")
        for low_item, high_item in (("min_pipeline", "max_pipeline"), ("min_partition_num", "max_partition_num")):
            low, high = getattr(self, low_item), getattr(self, high_item)
            if low > high:
                raise PlanError(f"{low_item}={low} is above {high_item}={high}; raise {high_item} or lower {low_item}")


def _at_least(low: int, item: str, value: int) -> None:
    if value < low:
        raise PlanError(f"{item}={value} is below {low}; use {low} or more")
