"""The table of configuration items: each one declared once, here, and nowhere else.

An item that belongs to RaNNC but does nothing in rannd stays known, so that a file written for RaNNC is read
whole, and says why it does nothing (`no_effect`). An item is `plan_affecting` when two of its values can lead
to two different plans: all those items are part of the key under which a plan is cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rannd.config.item import Item, Value, item, items_of, nearest, toml_text
from rannd.errors import ConfigError

#: Levels as spdlog names them, its long names too; empty: left to logging.toml.
LOG_LEVELS = ("", "trace", "debug", "info", "warn", "warning", "err", "error", "critical", "off")

_PLAN = "Plan"
_MEMORY = "Memory"
_SAVED = "Saved work"
_RUN = "Run"
_LAUNCH = "Launch"
_DEBUG = "Debugging"
_DAEMON = "Daemon and cache"
_LOG = "Logging"

_DEAD = "nothing reads it in RaNNC either"
_LATER = "not implemented yet in this version"
_PLANS = "the daemon keeps whole deployments between runs by itself"
_WATCH = "ranks watch each other over sockets, there are no files"

_DEFAULT = "default"
_CODE = "set in code"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The value of every item, and where it came from.

    Raises ConfigError on construction where a value has a wrong type or range, or where two contradict each
    other.
    """

    # --- PLAN
    decomposer: str = item(
        "ml_part", "How the model is partitioned.", group=_PLAN, plan_affecting=True, choices=("ml_part",)
    )
    partition_num: int = item(
        0, "Number of stages; 0: the planner's choice.", group=_PLAN, plan_affecting=True, least=0
    )
    replica_num: int = item(
        0,
        "Replicas of every stage; 0: the planner's choice, stage by stage.",
        group=_PLAN,
        plan_affecting=True,
        least=0,
    )
    pipeline_num: int = item(
        0, "Microbatches of each rank's mini-batch; 0: the planner's choice.", group=_PLAN, plan_affecting=True, least=0
    )
    min_pipeline: int = item(1, "Fewest microbatches that are tried.", group=_PLAN, plan_affecting=True, least=1)
    max_pipeline: int = item(32, "Most microbatches that are tried.", group=_PLAN, plan_affecting=True, least=1)
    min_pipeline_bs: int = item(
        1, "Fewest rows of a piece (one microbatch of one rank).", group=_PLAN, plan_affecting=True, least=1
    )
    min_partition_num: int = item(5, "Coarsening stops at so many blocks.", group=_PLAN, plan_affecting=True, least=1)
    max_partition_num: int = item(
        32, "Most blocks among which the stages are searched.", group=_PLAN, plan_affecting=True, least=1
    )
    dp_search_all: bool = item(
        False,
        "Search on after the first number of stages that fits.",
        group=_PLAN,
        plan_affecting=False,
        no_effect="rannd always compares all numbers of stages",
    )
    limit_dev_num_pot: bool = item(
        False,
        "Only powers of two as numbers of replicas; RaNNC's true costs step time and makes cases infeasible.",
        group=_PLAN,
        plan_affecting=True,
    )
    limit_dev_num_more_than_bs: bool = item(
        True,
        "No more devices for a stage than rows in its batch.",
        group=_PLAN,
        plan_affecting=False,
        no_effect="min_pipeline_bs bounds the rows of a piece instead",
    )
    alloc_repl_flat: bool = item(
        True,
        "How replicas are laid out on the nodes.",
        group=_PLAN,
        plan_affecting=False,
        no_effect="the planner lays them out by itself",
    )
    coarsen_by_time: bool = item(
        True,
        "Blocks are balanced by analytic time; false: by the bytes their ops touch.",
        group=_PLAN,
        plan_affecting=True,
    )
    do_coarsening: bool = item(
        True,
        "Merge ops over their most expensive boundaries before blocks are balanced.",
        group=_PLAN,
        plan_affecting=True,
    )
    do_uncoarsening: bool = item(
        False, "Move the boundaries of coarsened blocks to cheaper places nearby.", group=_PLAN, plan_affecting=True
    )
    profile_by_acc: bool = item(
        False,
        "Measure the smallest parts of a model that can be apart and add them up, instead of measuring whole blocks.",
        group=_PLAN,
        plan_affecting=True,
    )
    force_dist_matmul: bool = item(
        False,
        "Split matrix products over devices.",
        group=_PLAN,
        plan_affecting=False,
        no_effect="rannd does not split single ops",
    )
    schedule: str = item(
        "1f1b",
        "Order of forwards and backwards: 1f1b keeps few pieces in memory, fill_drain runs all forwards first.",
        group=_PLAN,
        plan_affecting=True,
        choices=("1f1b", "fill_drain"),
    )
    checkpointing: bool = item(
        False,
        "Recompute activations in every stage; false: only where nothing fits without.",
        group=_PLAN,
        plan_affecting=True,
    )
    checkpointing_no_last: bool = item(
        False, "No recomputation in the last stage.", group=_PLAN, plan_affecting=False, no_effect=_DEAD
    )
    auto_parallel: bool = item(
        False, "Choose the parallelism automatically.", group=_PLAN, plan_affecting=False, no_effect=_DEAD
    )
    disable_balancing: bool = item(True, "No balancing of stages.", group=_PLAN, plan_affecting=False, no_effect=_DEAD)
    max_mp_num: int = item(8, "Most stages.", group=_PLAN, plan_affecting=False, no_effect=_DEAD)
    # --- MEMORY
    mem_limit_gb: float = item(
        0.0,
        "Memory of a device to plan for, in GiB, fractions allowed; 0: what the device has.",
        group=_MEMORY,
        plan_affecting=True,
        least=0,
    )
    mem_margin: float = item(
        0.1, "Part of that memory that the planner leaves free.", group=_MEMORY, plan_affecting=True, least=0, below=1
    )
    opt_param_factor: float = item(
        2.0,
        "Bytes of optimizer state per byte of parameters: 2 for Adam, 0 for plain SGD.",
        group=_MEMORY,
        plan_affecting=True,
        least=0,
    )
    # --- SAVED
    save_deployment: bool = item(False, "Write the deployment to deployment_file.", group=_SAVED, plan_affecting=False)
    load_deployment: bool = item(
        False, "Run the deployment in deployment_file instead of planning.", group=_SAVED, plan_affecting=True
    )
    deployment_file: str = item(
        "", "File for save_deployment and load_deployment, which need it.", group=_SAVED, plan_affecting=False
    )
    save_graph_profile: bool = item(
        False,
        "Write measured times to graph_profile_file, besides what it has already.",
        group=_SAVED,
        plan_affecting=False,
    )
    load_graph_profile: bool = item(
        False, "Take measured times from graph_profile_file where it has them.", group=_SAVED, plan_affecting=True
    )
    graph_profile_file: str = item(
        "", "File for save_graph_profile and load_graph_profile, which need it.", group=_SAVED, plan_affecting=False
    )
    save_mlpart_results: bool = item(
        False, "Write the blocks to mlpart_results_file.", group=_SAVED, plan_affecting=False, no_effect=_PLANS
    )
    load_mlpart_results: bool = item(
        False, "Read the blocks from mlpart_results_file.", group=_SAVED, plan_affecting=False, no_effect=_PLANS
    )
    mlpart_results_file: str = item("", "File for blocks.", group=_SAVED, plan_affecting=False, no_effect=_PLANS)
    save_alloc_solutions: bool = item(
        False, "Write the stages found to files.", group=_SAVED, plan_affecting=False, no_effect=_PLANS
    )
    load_alloc_solutions: bool = item(
        False, "Read the stages found from files.", group=_SAVED, plan_affecting=False, no_effect=_PLANS
    )
    alloc_solutions_file_prefix: str = item(
        "", "Start of the names of files for stages.", group=_SAVED, plan_affecting=False, no_effect=_PLANS
    )
    # --- RUN
    device: str = item(
        "auto",
        "Device of the ranks; auto: CUDA where there is a CUDA device.",
        group=_RUN,
        plan_affecting=True,
        choices=("auto", "cpu", "cuda"),
    )
    partitioning_dry_run_np: int = item(
        0,
        "Plan for so many ranks at the first call, print the plan and exit; 0: train.",
        group=_RUN,
        plan_affecting=True,
        least=0,
    )
    partitioning_dry_run_cluster: str = item(
        "",
        "Cluster that partitioning_dry_run_np plans for, a name or a file; empty: devices like those of this machine.",
        group=_RUN,
        plan_affecting=True,
    )
    interleave_loss: bool = item(
        True,
        "Run backward inside the forward call where the model returns one loss; false: always when it is asked for.",
        group=_RUN,
        plan_affecting=True,
    )
    consolidate_grads: bool = item(
        False,
        "Reduce all gradients of one type and one set of ranks in one buffer instead of buckets of 25 MiB.",
        group=_RUN,
        plan_affecting=False,
    )
    sync_allreduce: bool = item(
        False,
        "Reduce gradients after the backward instead of while it runs.",
        group=_RUN,
        plan_affecting=True,
    )
    p2p_comm: bool = item(
        True, "Send values of stages point to point.", group=_RUN, plan_affecting=False, no_effect=_DEAD
    )
    use_mpi_to_gather_dist_params: bool = item(
        False,
        "Gather sharded parameters over MPI.",
        group=_RUN,
        plan_affecting=False,
        no_effect="MPI only starts the ranks, torch.distributed moves tensors",
    )
    run_watchdog: bool = item(
        False,
        "End the job, with the stacks of all ranks, when a rank waits for others longer than watchdog_timeout_s.",
        group=_RUN,
        plan_affecting=False,
    )
    watchdog_timeout_s: float = item(
        300.0, "Seconds of waiting that run_watchdog takes for a hang.", group=_RUN, plan_affecting=False, least=1
    )
    watchdog_lockfile_dir: str = item(
        "", "Directory of the watchdog's files.", group=_RUN, plan_affecting=False, no_effect=_WATCH
    )
    use_named_tensors: bool = item(
        False,
        "Name the tensors of a traced graph.",
        group=_RUN,
        plan_affecting=False,
        no_effect="the values of a traced graph always have names",
    )
    profiler_cache_size: int = item(
        0,
        "Measured graphs kept in memory.",
        group=_RUN,
        plan_affecting=False,
        least=0,
        no_effect="the daemon keeps what is measured; see cache_max_gb",
    )
    skip_grad_scaling: bool = item(
        True,
        "Do not scale gradients by the number of ranks.",
        group=_RUN,
        plan_affecting=False,
        no_effect="gradients are always the mean over ranks, as DistributedDataParallel's",
    )
    # --- LAUNCH: rannc-run alone reads them; each is a flag of it, too
    nproc: int = item(
        0,
        "Ranks that rannc-run starts (-np); 0: the slots of the hosts, else one per GPU, else one per pair of cores.",
        group=_LAUNCH,
        plan_affecting=False,
        least=0,
    )
    hosts: str = item(
        "",
        "Hosts and the ranks each takes, as in a:4,b:4 (--hosts); empty: hostfile, the batch system's, this machine.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    hostfile: str = item(
        "",
        "File of hosts, one a line: name slots=N (--hostfile); a path from the working directory, as all paths here.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    log_dir: str = item(
        "",
        "Directory in which each run's output is kept (--log-dir), from the working directory; empty: none is.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    show_ranks: str = item(
        "", "Ranks whose output is shown, as in 0,2-3 (--show-ranks); empty: all.", group=_LAUNCH, plan_affecting=False
    )
    grace_period: float = item(
        10.0,
        "Seconds between asking ranks to end and SIGKILL (--grace-period).",
        group=_LAUNCH,
        plan_affecting=False,
        least=0,
    )
    timeout_start: float = item(
        300.0,
        "Seconds in which all ranks have to have started (--timeout-start); 0: as long as it takes.",
        group=_LAUNCH,
        plan_affecting=False,
        least=0,
    )
    tune: bool = item(
        True,
        "Choose threads and malloc settings of the ranks; false (--no-tune): leave them alone.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    preflight: bool = item(
        True,
        "Look, before any rank starts, whether the other machines can be reached and have what a rank needs; false "
        "(--no-preflight): start at once.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    # --- DEBUG
    show_config_items: bool = item(
        False, "Print every item, its value and where it came from.", group=_DEBUG, plan_affecting=False
    )
    check_nan: str = item(
        "loss",
        "Error on all ranks for a loss of the model that is NaN in training; all: for any NaN that a stage makes, too.",
        group=_DEBUG,
        plan_affecting=False,
        choices=("off", "loss", "all"),
    )
    verify_trace: bool = item(
        True,
        "Compare each new trace with the model, on at most two rows of rank 0's mini-batch (outputs, gradients, "
        "buffers); what differs runs as one operator.",
        group=_DEBUG,
        plan_affecting=False,
    )
    verify_partitioning: bool = item(
        False, "Compare the partitioned model's results with the whole model's.", group=_DEBUG, plan_affecting=False
    )
    dump_graph: bool = item(
        False,
        "Write each graph with its blocks and stages: a .json and a .dot (Graphviz), named by its hash.",
        group=_DEBUG,
        plan_affecting=False,
    )
    dump_graph_prefix: str = item(
        "",
        "What the names of dump_graph's files begin with, folder included; dump_graph needs it.",
        group=_DEBUG,
        plan_affecting=False,
    )
    profiling: bool = item(
        False, "Measure where the time of a step goes.", group=_DEBUG, plan_affecting=False, no_effect=_LATER
    )
    graph_profiling: bool = item(
        False, "Measure subgraphs while training.", group=_DEBUG, plan_affecting=False, no_effect=_DEAD
    )
    profile_dump_path: str = item("", "File for graph_profiling.", group=_DEBUG, plan_affecting=False, no_effect=_DEAD)
    profiling_iter: int = item(
        1, "Repetitions of a measurement.", group=_DEBUG, plan_affecting=False, least=1, no_effect=_DEAD
    )
    validate_comm: bool = item(
        False, "Check what is sent between ranks.", group=_DEBUG, plan_affecting=False, no_effect=_DEAD
    )
    display_comm_value: bool = item(
        False, "Print the values sent between ranks.", group=_DEBUG, plan_affecting=False, no_effect=_LATER
    )
    display_act_value: bool = item(
        False, "Print the activations.", group=_DEBUG, plan_affecting=False, no_effect=_LATER
    )
    trace_events: bool = item(
        False, "Record a timeline of each step.", group=_DEBUG, plan_affecting=False, no_effect=_LATER
    )
    event_trace_file: str = item("", "File for trace_events.", group=_DEBUG, plan_affecting=False, no_effect=_LATER)
    verify_recomp: bool = item(
        False,
        "Check that recomputed values equal the first ones.",
        group=_DEBUG,
        plan_affecting=False,
        no_effect=_LATER,
    )
    dump_dp_node_profiles: str = item(
        "", "File for the costs that the search for stages reads.", group=_DEBUG, plan_affecting=False, no_effect=_LATER
    )
    dump_dp_cache: str = item(
        "", "File for the table of the search for stages.", group=_DEBUG, plan_affecting=False, no_effect=_LATER
    )
    enable_kineto: bool = item(
        False,
        "Profile with Kineto.",
        group=_DEBUG,
        plan_affecting=False,
        no_effect="wrap the training loop in torch.profiler.profile, which is Kineto",
    )
    # --- DAEMON
    cache: str = item(
        "on",
        "Use of kept deployments and profiles; readonly: write none, refresh: read none.",
        group=_DAEMON,
        plan_affecting=False,
        choices=("on", "off", "readonly", "refresh"),
    )
    cache_max_gb: float = item(
        2.0,
        "Size in GiB above which the least recently used entries are removed.",
        group=_DAEMON,
        plan_affecting=False,
        least=0,
    )
    daemon_idle_s: float = item(
        1800.0, "Seconds without work after which the daemon exits.", group=_DAEMON, plan_affecting=False, least=0
    )
    daemon_timeout_s: float = item(
        5.0, "Longest wait in seconds for an answer of the daemon.", group=_DAEMON, plan_affecting=False, least=0
    )
    # --- LOG
    log_level: str = item(
        "", "Level of all loggers; empty: as logging.toml says.", group=_LOG, plan_affecting=False, choices=LOG_LEVELS
    )

    _origins: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for row in ITEMS.values():
            object.__setattr__(self, row.name, row.check(getattr(self, row.name), self.origin(row.name)))
        for low, high in (("min_pipeline", "max_pipeline"), ("min_partition_num", "max_partition_num")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(f"{self._told(low)} is above {self._told(high)}; raise {high} or lower {low}")
        for switch, file in (
            ("save_deployment", "deployment_file"),
            ("load_deployment", "deployment_file"),
            ("save_graph_profile", "graph_profile_file"),
            ("load_graph_profile", "graph_profile_file"),
            ("dump_graph", "dump_graph_prefix"),
        ):
            if getattr(self, switch) and not getattr(self, file):
                raise ConfigError(f"{self._told(switch)}, but {file} names no file; set {file} too")
        if self.partitioning_dry_run_cluster and not self.partitioning_dry_run_np:
            raise ConfigError(
                f"{self._told('partitioning_dry_run_cluster')}, but partitioning_dry_run_np is 0; set it to the number "
                "of devices to plan for"
            )

    @staticmethod
    def of(values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
        """The configuration with `values` instead of the defaults; `origins` says where each of them is from.

        Raises:
            ConfigError: an item is not known, a value is wrong.
        """
        for name in values:
            if name not in ITEMS:
                raise ConfigError(f"no item is named {name}; the nearest is {nearest(name, ITEMS)}")
        # Types are checked by __post_init__, which is why they need not be known here.
        return Config(**values, _origins=dict(origins))  # type: ignore[arg-type]

    def replace(self, **items: object) -> Config:
        """A configuration with other values for some items, checked as those of a file.

        Raises:
            ConfigError: an item is not known, a value is wrong.
        """
        return self.override(items, dict.fromkeys(items, _CODE))

    def override(self, values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
        """`replace`, with the places that the values are from: the flags of a command.

        Raises:
            ConfigError: an item is not known, a value is wrong.
        """
        return Config.of({name: getattr(self, name) for name in ITEMS} | dict(values), {**self._origins, **origins})

    def origin(self, name: str) -> str:
        """Where the value is from: ``default``, ``/path/rannc_conf.toml:12``, ``RANNC_<ITEM>``, ``--<flag>``, or
        ``set in code``.

        Raises:
            ConfigError: no item has this name.
        """
        if name not in ITEMS:
            raise ConfigError(f"no item is named {name}; the nearest is {nearest(name, ITEMS)}")
        if name in self._origins:
            return self._origins[name]
        return _DEFAULT if getattr(self, name) == ITEMS[name].default else _CODE

    def plan_items(self) -> dict[str, Value]:
        """Every item that can change a plan, with its value: a part of the key of a cached plan."""
        return {name: getattr(self, name) for name, row in ITEMS.items() if row.plan_affecting}

    def no_effect_warnings(self) -> list[str]:
        """A line for each item that is set but does nothing in rannd.

        A line of the file that repeats the default asks for nothing: conf/rannc_conf.toml can be copied whole.
        """
        warnings = []
        for name, row in ITEMS.items():
            origin = self.origin(name)
            if row.no_effect is None or origin == _DEFAULT:
                continue
            if getattr(self, name) == row.default and not origin.startswith("RANNC_") and origin != _CODE:
                continue
            warnings.append(f"item {name} is set ({origin}) but has no effect in rannd: {row.no_effect}")
        return warnings

    def lines(self) -> list[str]:
        """A line for each item, for ``--show-config`` and show_config_items: ``name = value  # where from``."""
        return [f"{name} = {toml_text(getattr(self, name))}  # {self.origin(name)}" for name in ITEMS]

    def _told(self, name: str) -> str:
        return f"{name} = {toml_text(getattr(self, name))} ({self.origin(name)})"


#: The table: every item by name, in the order of documentation and files.
ITEMS: dict[str, Item] = items_of(Config)
