"""The configuration items that the planner reads, under their own names."""

from __future__ import annotations

import msgspec

from rannd.config import ITEMS, Config
from rannd.errors import PlanError

AUTO = "auto"
"""What leaves an item with choices to the planner."""


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints and limits of a search. 0 means 'free' for items that force a number.

    Raises:
        PlanError: On construction, if a number is out of range or two contradict each other.
    """

    partition_num: int = 0
    """Number of stages; 0: free."""
    replica_num: int = 0
    """Replicas of every stage; 0: free, and stages may have different numbers."""
    pipeline_num: int = 0
    """Microbatches per rank; 0: free."""
    min_pipeline: int = 1
    """Minimum number of microbatches per rank; the search doubles it from here."""
    max_pipeline: int = 32
    """Maximum number of microbatches per rank."""
    min_pipeline_bs: int = 1
    """Minimum number of rows per microbatch."""
    min_partition_num: int = 5
    """Minimum number of blocks after coarsening (if there are enough grains)."""
    max_partition_num: int = 32
    """Maximum number of blocks for the stage search."""
    coarsen_by_time: bool = True
    """Weigh ops by their analytic time; otherwise only by the bytes they touch."""
    do_coarsening: bool = True
    """Merge atoms across their most expensive boundaries first; otherwise only by weight."""
    do_uncoarsening: bool = False
    """Move the boundaries of coarsened blocks to cheaper positions nearby."""
    schedule: str = AUTO
    """Name of the schedule, one of those that the runtime can run; 'auto': the one whose plan is simulated fastest."""
    virtual_stages: str = AUTO
    """Stages per slot; 'auto': one, or more where that is simulated to be faster."""
    opt_param_factor: float = 2.0
    """Bytes of optimizer state per byte of trainable parameters."""
    checkpointing: bool = False
    """Recompute the activations of all blocks; otherwise of as few as memory demands."""
    checkpointing_no_last: bool = False
    """With `checkpointing`, the last stage recomputes as few as memory demands."""
    zero_stage: str = AUTO
    """ZeRO stage; 'auto': what is fastest of those that fit."""
    reshard_after_forward: bool = False
    """ZeRO 3: let go of a block's parameters after each forward and backward of it, whatever memory allows."""
    master_weights: bool = False
    """Half-precision parameters have float32 copies, which the optimizer steps."""
    offload_optimizer: str = AUTO
    """'true': between steps the optimizer's state is not in the device's memory; 'auto': if nothing else fits."""
    offload_params: str = AUTO
    """'true': parameters are not in the device's memory but while they are used; 'auto': if nothing else fits."""
    offload_activations: str = AUTO
    """'true': all blocks recompute, and what they start from is not in the device's memory; 'auto': of stages that
    would not fit otherwise, if no other plan fits."""
    device: str = "auto"
    """Type of the devices: to a GPU's memory state comes from the host's, to a CPU's from files."""
    reduce_dtype: str = "auto"
    """Type in which gradients are reduced; 'auto': that in which they are given to parameters."""
    sync_allreduce: bool = False
    """Reduce gradients after the backward, not during it."""
    limit_dev_num_pot: bool = False
    """Use only powers of two (and all devices) as numbers of replicas."""
    mem_margin: float = 0.1
    """Fraction of a device's memory that is already taken off the planner's limit; only used in messages."""

    divides: bool = True
    """Whether the optimizer can step parts of parameters, as ZeRO needs; only used in messages."""
    steps_apart: bool = True
    """Whether it can step some parameters after others, as `offload_optimizer` needs; only used in messages."""

    @staticmethod
    def of(config: Config) -> PlanOptions:
        """Take the options from the configuration."""
        return PlanOptions(**{name: getattr(config, name) for name in PlanOptions.__struct_fields__ if name in ITEMS})

    @property
    def passes(self) -> int:
        """Stages per slot that are asked for; 1 if that is left to the planner."""
        return 1 if self.virtual_stages == AUTO else int(self.virtual_stages)

    def __post_init__(self) -> None:
        for low, item in ((0, "partition_num"), (0, "replica_num"), (0, "pipeline_num"), (1, "min_pipeline")):
            _at_least(low, item, getattr(self, item))
        for item in ("max_pipeline", "min_pipeline_bs", "min_partition_num", "max_partition_num"):
            _at_least(1, item, getattr(self, item))
        # Not from schedules.py, which blocks may not know; a test compares the two.
        schedules = ITEMS["schedule"].choices or ()
        if self.schedule not in schedules:
            raise PlanError(f"schedule={self.schedule!r} is not known; use one of {', '.join(schedules)}")
        for item in ("virtual_stages", "offload_optimizer", "offload_params", "offload_activations"):
            choices = ITEMS[item].choices or ()
            if getattr(self, item) not in choices:
                raise PlanError(f"{item}={getattr(self, item)!r}; use one of {', '.join(choices)}")
        if self.opt_param_factor < 0:
            raise PlanError(f"opt_param_factor={self.opt_param_factor} is negative; use 2 for Adam, 0 for plain SGD")
        if not 0 <= self.mem_margin < 1:
            raise PlanError(f"mem_margin={self.mem_margin} is not in [0, 1); use a fraction of the memory such as 0.1")
        for low_item, high_item in (("min_pipeline", "max_pipeline"), ("min_partition_num", "max_partition_num")):
            low, high = getattr(self, low_item), getattr(self, high_item)
            if low > high:
                raise PlanError(f"{low_item}={low} is above {high_item}={high}; raise {high_item} or lower {low_item}")


def _at_least(low: int, item: str, value: int) -> None:
    if value < low:
        raise PlanError(f"{item}={value} is below {low}; use {low} or more")
