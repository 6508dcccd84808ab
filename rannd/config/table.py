"""Declares all configuration items, each one once.

RaNNC items that have no effect in rannd are declared too, so that a file written for RaNNC can be read as it is;
`no_effect` says why. An item is `plan_affecting` if different values can lead to different plans; all such items are
part of the key under which a plan is cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rannd.config.item import Item, Value, item, items_of, nearest, toml_text, unused
from rannd.errors import ConfigError

#: spdlog's level names, short and long; empty: the levels of logging.toml.
LOG_LEVELS = ("", "trace", "debug", "info", "warn", "warning", "err", "error", "critical", "off")

_PLAN = "Plan"
_MEMORY = "Memory"
_SAVED = "Saved work"
_RUN = "Run"
_LAUNCH = "Launch"
_ELASTIC = "Elastic jobs"
_DEBUG = "Debugging"
_DAEMON = "Daemon and cache"
_LOG = "Logging"

_DEAD = "RaNNC does not read it either"
_LATER = "not implemented in this version"
_PLANS = "the daemon caches whole deployments between runs"
_WATCH = "ranks watch each other over sockets, without files"

_DEFAULT = "default"
_CODE = "set in code"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The value of every item, and its origin.

    Raises ConfigError on construction if a value has the wrong type, is out of range or contradicts another one.
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
        "Number of replicas of every stage; 0: the planner's choice for each stage.",
        group=_PLAN,
        plan_affecting=True,
        least=0,
    )
    pipeline_num: int = item(
        0,
        "Number of microbatches per mini-batch of a rank; 0: the planner's choice.",
        group=_PLAN,
        plan_affecting=True,
        least=0,
    )
    min_pipeline: int = item(1, "Minimum number of microbatches to try.", group=_PLAN, plan_affecting=True, least=1)
    max_pipeline: int = item(32, "Maximum number of microbatches to try.", group=_PLAN, plan_affecting=True, least=1)
    min_pipeline_bs: int = item(
        1, "Minimum number of samples per microbatch of one rank.", group=_PLAN, plan_affecting=True, least=1
    )
    min_partition_num: int = item(
        5, "Number of blocks at which coarsening stops.", group=_PLAN, plan_affecting=True, least=1
    )
    max_partition_num: int = item(
        32, "Maximum number of blocks in the search for stages.", group=_PLAN, plan_affecting=True, least=1
    )
    limit_dev_num_pot: bool = item(
        False,
        "Use only powers of two as numbers of replicas; true, RaNNC's default, costs step time and makes some jobs "
        "infeasible.",
        group=_PLAN,
        plan_affecting=True,
    )
    coarsen_by_time: bool = item(
        True,
        "Balance blocks by analytic time; false: by the bytes that their ops touch.",
        group=_PLAN,
        plan_affecting=True,
    )
    do_coarsening: bool = item(
        True,
        "Merge ops across their most expensive boundaries before balancing blocks.",
        group=_PLAN,
        plan_affecting=True,
    )
    do_uncoarsening: bool = item(
        False, "Move the boundaries of coarsened blocks to cheaper positions nearby.", group=_PLAN, plan_affecting=True
    )
    profile_by_acc: bool = item(
        False,
        "Measure the smallest separable parts of the model and add up their times, instead of measuring whole blocks.",
        group=_PLAN,
        plan_affecting=True,
    )
    schedule: str = item(
        "auto",
        "Pipeline schedule: 1f1b keeps few microbatches in memory, gpipe runs all forward passes first, zb_h1 is 1f1b "
        "that computes gradients of parameters while a device would wait; interleaved_1f1b and zb_v are 1f1b and zb_h1 "
        "with several stages per device (virtual_stages); auto: 1f1b, or another one where it is predicted to be "
        "faster and fits memory.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v"),
    )
    virtual_stages: str = item(
        "auto",
        "Number of stages on each device of a pipeline: several small ones in turn wait less for each other, and send "
        "more; auto: 1, or more where that is predicted to be faster and fits memory. partition_num counts all stages.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "1", "2", "4"),
    )
    checkpointing: bool = item(
        False,
        "Recompute the activations of all blocks; false: of as few as memory demands.",
        group=_PLAN,
        plan_affecting=True,
    )
    checkpointing_no_last: bool = item(
        False,
        "With checkpointing, the last stage recomputes as few as memory demands: its backward follows its forward.",
        group=_PLAN,
        plan_affecting=True,
    )
    zero_stage: str = item(
        "auto",
        "ZeRO stage, what the replicas of a stage share instead of each holding it whole: 0 nothing, 1 the optimizer's "
        "state, 2 gradients as well, 3 parameters as well; auto: the planner's choice, where memory asks for it.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "0", "1", "2", "3"),
    )
    reshard_after_forward: bool = item(
        False,
        "ZeRO 3: free a block's gathered parameters after each of its forwards and backwards. false: only in "
        "stages that would not fit memory with them until the last microbatch, or that recompute to fit, and with "
        "offload_params or several stages per device.",
        group=_PLAN,
        plan_affecting=True,
    )
    master_weights: bool = item(
        False,
        "The optimizer steps float32 copies of bfloat16 and float16 parameters, which get the rounded values.",
        group=_PLAN,
        plan_affecting=True,
    )
    offload_optimizer: str = item(
        "auto",
        "Between steps the optimizer's state is in pinned host memory (GPUs) or in a file below offload_dir (CPUs), "
        "not in the device's memory; auto: only if no other plan fits memory.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "true", "false"),
    )
    offload_params: str = item(
        "auto",
        "Parameters are in pinned host memory (GPUs) or in a file below offload_dir (CPUs), and in the device's memory "
        "only while the block that reads them runs; the stages' replicas divide them as with zero_stage=3. auto: only "
        "if no other plan fits memory.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "true", "false"),
    )
    offload_activations: str = item(
        "auto",
        "Keep the inputs of recomputed blocks, between forward and backward, in pinned host memory (GPUs) or in files "
        "below offload_dir (CPUs). true: all blocks recompute; auto: only if no plan with them in memory fits, but "
        "before offload_params, and where activations do not fit.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "true", "false"),
    )
    reduce_dtype: str = item(
        "auto",
        "Type in which gradients are accumulated over microbatches and reduced. auto: that of the parameter, float32 "
        "with master_weights.",
        group=_PLAN,
        plan_affecting=True,
        choices=("auto", "float32", "bfloat16"),
    )
    compile_stages: str = item(
        "off",
        "Compile with torch.compile: each kind of block once (blocks), or each whole stage (stages).",
        group=_PLAN,
        plan_affecting=True,
        choices=("off", "blocks", "stages"),
    )
    # --- MEMORY
    mem_limit_gb: float = item(
        0.0,
        "Memory per device to plan for, in GiB, fractions allowed; 0: all memory that is available to tensors.",
        group=_MEMORY,
        plan_affecting=True,
        least=0,
    )
    mem_margin: float = item(
        0.1,
        "Fraction of that memory that the planner leaves free.",
        group=_MEMORY,
        plan_affecting=True,
        least=0,
        below=1,
    )
    opt_param_factor: float = item(
        2.0,
        "Bytes of optimizer state per byte of parameters: 2 for Adam, 0 for plain SGD.",
        group=_MEMORY,
        plan_affecting=True,
        least=0,
    )
    offload_dir: str = item(
        "",
        "Folder on a disk for what CPUs offload (offload_optimizer, offload_params, offload_activations); empty: in "
        "that of the cache. The files are unnamed and disappear when the process ends.",
        group=_MEMORY,
        plan_affecting=False,
    )
    # --- SAVED
    save_deployment: bool = item(False, "Write the deployment to deployment_file.", group=_SAVED, plan_affecting=False)
    load_deployment: bool = item(
        False, "Run the deployment in deployment_file instead of planning.", group=_SAVED, plan_affecting=True
    )
    deployment_file: str = item(
        "", "File for save_deployment and load_deployment, which require it.", group=_SAVED, plan_affecting=False
    )
    save_graph_profile: bool = item(
        False,
        "Add measured times to graph_profile_file.",
        group=_SAVED,
        plan_affecting=False,
    )
    load_graph_profile: bool = item(
        False, "Use the measured times that graph_profile_file has.", group=_SAVED, plan_affecting=True
    )
    graph_profile_file: str = item(
        "", "File for save_graph_profile and load_graph_profile, which require it.", group=_SAVED, plan_affecting=False
    )
    # --- RUN
    device: str = item(
        "auto",
        "Device of the ranks; auto: CUDA if there is a CUDA device.",
        group=_RUN,
        plan_affecting=True,
        choices=("auto", "cpu", "cuda"),
    )
    transport: str = item(
        "auto",
        "How values and gradients get to other ranks. auto: NCCL on GPUs, gloo on CPUs; staged: through the host's "
        "memory, for ranks that share a GPU; strict: gloo under NCCL's rules, to find out on CPUs what hangs on GPUs.",
        group=_RUN,
        plan_affecting=False,
        choices=("auto", "gloo", "nccl", "staged", "strict"),
    )
    partitioning_dry_run_np: int = item(
        0,
        "Number of ranks to plan for: at the first call, print the plan and exit; 0: train.",
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
        "Run backward inside the forward call if the model returns one loss; false: when the script asks for it.",
        group=_RUN,
        plan_affecting=True,
    )
    consolidate_grads: bool = item(
        False,
        "Reduce all gradients of one dtype and one group of ranks in one buffer instead of buckets of 25 MiB.",
        group=_RUN,
        plan_affecting=False,
    )
    sync_allreduce: bool = item(
        False,
        "Reduce gradients after the backward pass instead of during it.",
        group=_RUN,
        plan_affecting=True,
    )
    run_watchdog: bool = item(
        False,
        "End the job and print the stacks of all ranks if a rank waits for others longer than watchdog_timeout_s.",
        group=_RUN,
        plan_affecting=False,
    )
    watchdog_timeout_s: float = item(
        300.0, "Seconds of waiting that run_watchdog considers a hang.", group=_RUN, plan_affecting=False, least=1
    )
    wait_notice_s: float = item(
        60.0,
        "Seconds that a rank waits for others until one line of the log says for whom, and where; 0: never.",
        group=_RUN,
        plan_affecting=False,
        least=0,
    )
    # --- LAUNCH: read by rannc-run only; each is also one of its flags
    nproc: int = item(
        0,
        "Number of ranks to start (-np); 0: the slots of the hosts, else one per GPU, else one per two cores.",
        group=_LAUNCH,
        plan_affecting=False,
        least=0,
    )
    hosts: str = item(
        "",
        "Hosts and their numbers of ranks, as in a:4,b:4 (--hosts); empty: hostfile, else those of the batch system, "
        "else this machine.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    hostfile: str = item(
        "",
        "File of hosts, one per line: name slots=N (--hostfile); relative to the working directory, as are all paths.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    log_dir: str = item(
        "",
        "Directory for the output of each run (--log-dir), relative to the working directory; empty: not kept.",
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
        "Seconds within which all ranks must have started (--timeout-start); 0: no limit.",
        group=_LAUNCH,
        plan_affecting=False,
        least=0,
    )
    tune: bool = item(
        True,
        "Set the number of threads, cores and malloc options of the ranks; false (--no-tune): leave them unchanged.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    preflight: bool = item(
        True,
        "Check before any rank starts that the other machines can be reached and have what a rank needs; false "
        "(--no-preflight): start at once.",
        group=_LAUNCH,
        plan_affecting=False,
    )
    # --- ELASTIC: those without a flag are read by pyrannc.elastic, the others are flags of rannc-run
    elastic: bool = item(
        False,
        "Start the ranks again when the host file changes or a rank fails (--elastic, docs/elastic.md).",
        group=_ELASTIC,
        plan_affecting=False,
    )
    min_np: int = item(
        1,
        "Minimum number of ranks of an elastic job; it waits for so many (--min-np).",
        group=_ELASTIC,
        plan_affecting=False,
        least=1,
    )
    max_np: int = item(
        0,
        "Maximum number of ranks of an elastic job (--max-np); 0: all slots of the host file.",
        group=_ELASTIC,
        plan_affecting=False,
        least=0,
    )
    max_restarts: int = item(
        100,
        "How often an elastic job is started again after failures (--max-restarts); three in a row without a new step "
        "end it in any case.",
        group=_ELASTIC,
        plan_affecting=False,
        least=0,
    )
    leave_timeout: float = item(
        120.0,
        "Seconds that the ranks of an elastic job get to save and end when hosts change (--leave-timeout).",
        group=_ELASTIC,
        plan_affecting=False,
        least=0,
    )
    drop_stragglers: bool = item(
        False,
        "Start an elastic job without its slow hosts when it is started again (--drop-stragglers).",
        group=_ELASTIC,
        plan_affecting=False,
    )
    straggler_factor: float = item(
        1.5,
        "A host counts as slow if its computations take this many times as long as those of the other hosts, each "
        "relative to the plan: 1 or more (rank 0's value is used); 0: no host is reported.",
        group=_ELASTIC,
        plan_affecting=False,
        least=0,
    )
    checkpoint_every: int = item(
        100, "Number of steps between checkpoints of pyrannc.elastic.", group=_ELASTIC, plan_affecting=False, least=1
    )
    snapshots: str = item(
        "auto",
        "Which steps the ranks keep in memory, for the time after a failure; neighbour: each one; auto: as many as "
        "take at most 2 % of the time.",
        group=_ELASTIC,
        plan_affecting=False,
        choices=("auto", "neighbour", "off"),
    )
    checkpoints_kept: int = item(
        2,
        "Number of whole checkpoints that pyrannc.elastic keeps.",
        group=_ELASTIC,
        plan_affecting=False,
        least=1,
    )
    # --- DEBUG
    show_config_items: bool = item(
        False, "Print every item with its value and origin.", group=_DEBUG, plan_affecting=False
    )
    check_nan: str = item(
        "loss",
        "Raise an error on all ranks for a NaN loss in training; all: also for any other NaN that a stage computes.",
        group=_DEBUG,
        plan_affecting=False,
        choices=("off", "loss", "all"),
    )
    verify_trace: bool = item(
        True,
        "Compare each new trace with the model on at most two rows of rank 0's mini-batch (outputs, gradients, "
        "buffers); parts that differ run as one operator.",
        group=_DEBUG,
        plan_affecting=False,
    )
    verify_partitioning: bool = item(
        False,
        "Compare the results of the partitioned model with those of the whole model.",
        group=_DEBUG,
        plan_affecting=False,
    )
    verify_step: int = item(
        0,
        "Replay this training step, counted from 1, in one process (--verify), and raise an error that names the first "
        "value, gradient or buffer that differs; 0: none.",
        group=_DEBUG,
        plan_affecting=False,
        least=0,
    )
    verify_recomp: bool = item(
        False,
        "Compare recomputed values with those of the forward in each step, and raise an error that names the first "
        "that differs. Keeps the values in memory that blocks give to others.",
        group=_DEBUG,
        plan_affecting=False,
    )
    dump_graph: bool = item(
        False,
        "Write each graph with its blocks and stages to a .json and a .dot file (Graphviz), named by its hash.",
        group=_DEBUG,
        plan_affecting=False,
    )
    dump_graph_prefix: str = item(
        "",
        "Prefix of the files that dump_graph writes, including their directory; dump_graph requires it.",
        group=_DEBUG,
        plan_affecting=False,
    )
    trace_events: str = item(
        "summary",
        "What ranks record of their steps: how long they compute and wait (summary), also each action (full or true), "
        "or nothing (off or false).",
        group=_DEBUG,
        plan_affecting=False,
        choices=("summary", "full", "off", "true", "false"),
    )
    event_trace_file: str = item(
        "",
        "File for the timeline of a step, measured and predicted, for Perfetto: of the tenth step after the first, and "
        "of the latest one when the script calls pyrannc._dump_events(). Sets trace_events to full.",
        group=_DEBUG,
        plan_affecting=False,
    )
    calibrate_after: int = item(
        20,
        "Number of steps after which their times are stored beside the plan, and used for the costs of later plans; "
        "0: never.",
        group=_DEBUG,
        plan_affecting=False,
        least=0,
    )
    replan: str = item(
        "next",
        "When to switch to a plan that is faster according to measured steps: in the next run, or now, between two "
        "steps, at most once per training.",
        group=_DEBUG,
        plan_affecting=False,
        choices=("next", "now"),
    )
    # --- DAEMON
    cache: str = item(
        "on",
        "Use of cached deployments and profiles; readonly: write none, refresh: read none.",
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
        1800.0, "Idle seconds after which the daemon exits.", group=_DAEMON, plan_affecting=False, least=0
    )
    daemon_timeout_s: float = item(
        5.0, "Maximum seconds to wait for an answer of the daemon.", group=_DAEMON, plan_affecting=False, least=0
    )
    # --- LOG
    log_level: str = item(
        "",
        "Level of all loggers; empty: the levels of logging.toml.",
        group=_LOG,
        plan_affecting=False,
        choices=LOG_LEVELS,
    )
    # --- RaNNC items without effect: default, meaning in RaNNC, why it has no effect
    dp_search_all: bool = unused(
        False,
        "Continue the search after the first number of stages that fits.",
        "rannd always compares all numbers of stages",
    )
    limit_dev_num_more_than_bs: bool = unused(
        True,
        "Use at most as many devices for a stage as its batch has rows.",
        "min_pipeline_bs bounds the samples of a microbatch instead",
    )
    alloc_repl_flat: bool = unused(True, "Layout of replicas on the nodes.", "the planner chooses the layout")
    force_dist_matmul: bool = unused(False, "Split matrix products across devices.", "rannd does not split single ops")
    auto_parallel: bool = unused(False, "Choose the parallelism automatically.", _DEAD)
    disable_balancing: bool = unused(True, "Do not balance stages.", _DEAD)
    max_mp_num: int = unused(8, "Maximum number of stages.", _DEAD)
    save_mlpart_results: bool = unused(False, "Write the blocks to mlpart_results_file.", _PLANS)
    load_mlpart_results: bool = unused(False, "Read the blocks from mlpart_results_file.", _PLANS)
    mlpart_results_file: str = unused("", "File for blocks.", _PLANS)
    save_alloc_solutions: bool = unused(False, "Write the stages to files.", _PLANS)
    load_alloc_solutions: bool = unused(False, "Read the stages from files.", _PLANS)
    alloc_solutions_file_prefix: str = unused("", "Prefix of the names of files for stages.", _PLANS)
    p2p_comm: bool = unused(True, "Send values between stages point to point.", _DEAD)
    use_mpi_to_gather_dist_params: bool = unused(
        False, "Gather sharded parameters over MPI.", "MPI only starts the ranks, torch.distributed moves tensors"
    )
    watchdog_lockfile_dir: str = unused("", "Directory of the watchdog's files.", _WATCH)
    use_named_tensors: bool = unused(
        False, "Name the tensors of a traced graph.", "the values of a traced graph always have names"
    )
    profiler_cache_size: int = unused(
        0, "Number of measured graphs kept in memory.", "the daemon caches measurements; see cache_max_gb", least=0
    )
    skip_grad_scaling: bool = unused(
        True,
        "Do not scale gradients by the number of ranks.",
        "gradients are always the mean over ranks, as in DistributedDataParallel",
    )
    profiling: bool = unused(False, "Measure how the time of a step is spent.", _LATER)
    graph_profiling: bool = unused(False, "Measure subgraphs while training.", _DEAD)
    profile_dump_path: str = unused("", "File for graph_profiling.", _DEAD)
    profiling_iter: int = unused(1, "Number of repetitions of a measurement.", _DEAD, least=1)
    validate_comm: bool = unused(False, "Check the values sent between ranks.", _DEAD)
    display_comm_value: bool = unused(False, "Print the values sent between ranks.", _LATER)
    display_act_value: bool = unused(False, "Print the activations.", _LATER)
    dump_dp_node_profiles: str = unused("", "File for the costs that the search for stages uses.", _LATER)
    dump_dp_cache: str = unused("", "File for the table of the search for stages.", _LATER)
    enable_kineto: bool = unused(
        False, "Profile with Kineto.", "wrap the training loop in torch.profiler.profile, which uses Kineto"
    )

    _origins: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for row in ITEMS.values():
            object.__setattr__(self, row.name, row.check(getattr(self, row.name), self.origin(row.name)))
        for low, high in (
            ("min_pipeline", "max_pipeline"),
            ("min_partition_num", "max_partition_num"),
            ("min_np", "max_np"),
        ):
            if getattr(self, low) > getattr(self, high) and (high != "max_np" or self.max_np):  # 0: no maximum
                raise ConfigError(f"{self._told(low)} is above {self._told(high)}; raise {high} or lower {low}")
        for switch, file in (
            ("save_deployment", "deployment_file"),
            ("load_deployment", "deployment_file"),
            ("save_graph_profile", "graph_profile_file"),
            ("load_graph_profile", "graph_profile_file"),
            ("dump_graph", "dump_graph_prefix"),
        ):
            if getattr(self, switch) and not getattr(self, file):
                raise ConfigError(f"{self._told(switch)}, but {file} is empty; set {file} too")
        if 0 < self.straggler_factor < 1:
            raise ConfigError(f"{self._told('straggler_factor')}; set it to 1 or more, or to 0 to report no host")
        if self.partitioning_dry_run_cluster and not self.partitioning_dry_run_np:
            raise ConfigError(
                f"{self._told('partitioning_dry_run_cluster')}, but partitioning_dry_run_np is 0; set it to the number "
                "of devices to plan for"
            )

    @staticmethod
    def of(values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
        """The configuration with `values` in place of the defaults; `origins` says where each value is from.

        Raises:
            ConfigError: an item is unknown, or a value is invalid.
        """
        for name in values:
            if name not in ITEMS:
                raise ConfigError(f"no item is named {name}; the nearest is {nearest(name, ITEMS)}")
        # __post_init__ checks the types.
        return Config(**values, _origins=dict(origins))  # type: ignore[arg-type]

    def replace(self, **items: object) -> Config:
        """A copy with other values for some items, which are checked like those of a file.

        Raises:
            ConfigError: an item is unknown, or a value is invalid.
        """
        return self.override(items, dict.fromkeys(items, _CODE))

    def override(self, values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
        """Like `replace`, with the origins of the values, such as the flags of a command.

        Raises:
            ConfigError: an item is unknown, or a value is invalid.
        """
        return Config.of({name: getattr(self, name) for name in ITEMS} | dict(values), {**self._origins, **origins})

    def origin(self, name: str) -> str:
        """The origin of a value: ``default``, ``/path/rannc_conf.toml:12``, ``RANNC_<ITEM>``, ``--<flag>``, or
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
        """The value of every plan-affecting item: part of the key of a cached plan."""
        return {name: getattr(self, name) for name, row in ITEMS.items() if row.plan_affecting}

    def no_effect_warnings(self) -> list[str]:
        """One line per item that is set but has no effect in rannd.

        A line of the file that repeats the default gives no warning, so that conf/rannc_conf.toml can be copied whole.
        """
        warnings = []
        for name, row in ITEMS.items():
            origin = self.origin(name)
            if row.no_effect is None or origin == _DEFAULT:
                continue
            if getattr(self, name) == row.default and not origin.startswith("RANNC_") and origin != _CODE:
                continue
            warnings.append(f"item {name} is set ({origin}) but has no effect in rannd: {row.no_effect}")
        lacking = {"calibrate_after": not self.calibrate_after, "cache": self.cache != "on"}
        lacking["trace_events"] = self.trace_events in ("off", "false") and not self.event_trace_file
        for name in (each for each, lacks in lacking.items() if lacks and self.replan == "now"):
            warnings.append(
                f"{self._told('replan')} has no effect with {self._told(name)}: nothing is learned of steps"
            )
        return warnings

    def lines(self) -> list[str]:
        """One line per item, for ``--show-config`` and show_config_items: ``name = value  # origin``."""
        return [f"{name} = {toml_text(getattr(self, name))}  # {self.origin(name)}" for name in ITEMS]

    def _told(self, name: str) -> str:
        return f"{name} = {toml_text(getattr(self, name))} ({self.origin(name)})"


#: All items by name, in the order of the documentation and the files.
ITEMS: dict[str, Item] = items_of(Config)
