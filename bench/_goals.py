"""Numbers that rannd is to reach, who is where, and which of them this repository can only simulate.

Sources of others' numbers: Piper (Tarnawski et al., NeurIPS 2021), PipeDream (Narayanan et al., SOSP 2019), Alpa (Zheng
et al., OSDI 2022), Varuna (Athlur et al., EuroSys 2022), zero bubble (Qi et al., ICLR 2024); what is measured beside
rannd in the same run is in the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Goal:
    """A number, and the limit that it is to keep."""

    area: str
    name: str
    limit: float
    most: bool = True
    """Whether the limit is the largest number that is good, or the smallest."""
    form: str = "{:.3f}"
    peer: str = ""
    """Who is where now."""
    kind: Literal["measured", "simulated", "needs-gpu"] = "measured"

    def reached(self, value: float) -> bool:
        """Whether a number is good; NaN never is."""
        return value <= self.limit if self.most else value >= self.limit

    def shown(self, value: float) -> str:
        """A number as text."""
        return self.form.format(value)

    @property
    def limit_text(self) -> str:
        """The limit as text."""
        return f"at {'most' if self.most else 'least'} {self.shown(self.limit)}"


_PLANNERS = "Piper (C++): 42, 190, 2,700 ms for 8, 64, 512; PipeDream: 20 s for 16; Alpa: 2,393 s"
_RANNC = "RaNNC's table: not the best plan in 50 to 59 % of cases, up to 44 % slower"

GOALS = {
    "planner-8": Goal("planner", "stage search, 32 blocks, 8 devices", 10, form="{:.1f} ms", peer=_PLANNERS),
    "planner-64": Goal("planner", "stage search, 64 devices", 50, form="{:.1f} ms", peer=_PLANNERS),
    "planner-512": Goal("planner", "stage search, 512 devices", 500, form="{:.0f} ms", peer=_PLANNERS),
    "planner-ranked-64": Goal("planner", "with ranking by simulation, 64 devices", 500, form="{:.0f} ms"),
    "planner-gap": Goal("planner", "distance to the proved bound, 64 devices", 0.02, form="{:.1%}", peer=_RANNC),
    "planner-exhaustive": Goal(
        "planner", "random instances where exhaustive search finds a better plan", 0, form="{:.0f}", peer=_RANNC
    ),
    "graph-1000": Goal("planner", "from a graph of 1,000 operators to a plan", 2, form="{:.2f} s"),
    "graph-10000": Goal("planner", "from a graph of 10,000 operators to a plan", 15, form="{:.2f} s"),
    "value-rannc": Goal(
        "value of a plan", "RaNNC's rule / rannd, geometric mean", 1.10, most=False, kind="simulated"
    ),
    "value-even": Goal(
        "value of a plan", "even stages / rannd, geometric mean", 1.25, most=False, kind="simulated",
        peer="a proposal for torchtitan: 1.28",
    ),
    "value-worst": Goal("value of a plan", "the least of all ratios", 0.999, most=False, kind="simulated"),
    "profiling-runs": Goal(
        "profiling", "runs of RaNNC's procedure / rannd's, width 4096", 20, most=False, form="{:.1f}", kind="simulated",
        peer="RaNNC: one rank measures up to 528 merged graphs for a batch size",
    ),
    "profiling-steps": Goal("profiling", "profiling in training steps", 15, form="{:.1f}"),
    "estimate-median": Goal(
        "estimates", "error of a step's time, held-out plans, median", 0.05, form="{:.1%}", peer="Varuna: about 5 %"
    ),
    "estimate-p95": Goal("estimates", "the same, 95th percentile", 0.10, form="{:.1%}"),
    "estimate-noise": Goal(
        "estimates", "the same / the larger of 10 % and twice the spread of its steps, 95th percentile", 1.0,
        form="{:.2f}",
    ),
    "estimate-memory": Goal("estimates", "error of memory, median", 0.05, form="{:.1%}", peer="Megatron: 1 %"),
    "estimate-memory-most": Goal("estimates", "most of used / planned memory", 1.0),
    "profiles-cut": Goal(
        "estimates", "cold profiles beside busy processes that give a plan within 2 % of the best", 0.9, most=False,
        form="{:.0%}",
    ),
    "bubble": Goal("pipeline", "ideal / measured step, 1F1B, operations of 50 ms and more", 0.97, most=False),
    "action": Goal("pipeline", "runtime for an action without transport", 150, form="{:.0f} us"),
    "tracing": Goal("pipeline", "recording of events, share of a step", 0.01, form="{:.2%}"),
    "data-parallel": Goal("pipeline", "data parallel plan / DistributedDataParallel, throughput", 0.98, most=False),
    "pipeline-torch": Goal("pipeline", "pipeline / torch's 1F1B with the same cut, throughput", 1.0, most=False),
    "peer-best": Goal("pipeline", "rannd's own plan / the best peer, throughput, geometric mean", 1.0, most=False),
    "gradients": Goal("gradients", "parity tests that fail (float64, 1e-9)", 0, form="{:.0f}"),
    "memory-planned": Goal("memory", "peak bytes / planned", 1.10),
    "memory-share": Goal("memory", "a rank's training state, 4 balanced stages / whole model's", 0.30),
    "repeat-wrap": Goal("repeated run", "wrap to the end of the first step", 1.0, form="{:.2f} s"),
    "repeat-cold": Goal("repeated run", "the same / that of the first run", 0.10),
    "look-up-median": Goal("daemon", "look-up, 64 clients now and then, median", 1, form="{:.2f} ms"),
    "look-up-p99": Goal("daemon", "the same, 99th percentile", 5, form="{:.2f} ms"),
    "daemon-start": Goal("daemon", "start to the first answer, without Python's own", 100, form="{:.0f} ms"),
    "daemon-memory": Goal("daemon", "memory of the daemon", 60, form="{:.0f} MB"),
    "hash": Goal("daemon", "hash of a graph of 10,000 nodes", 150, form="{:.0f} ms"),
    "mutations": Goal(
        "daemon", "tests of 10,000 mutated graphs, and of 64 misses at once, that fail", 0, form="{:.0f}"
    ),
    "zero-1": Goal(
        "ZeRO", "stage 1 / DistributedDataParallel, throughput", 0.97, most=False, peer="DeepSpeed ZeRO-1: 0.85 to 0.90"
    ),
    "zero-2": Goal("ZeRO", "stage 2 / DistributedDataParallel, throughput", 0.95, most=False),
    "zero-3": Goal(
        "ZeRO", "stage 3 / FSDP2, throughput", 1.0, most=False, peer="FSDP2: 0.75 to 0.83 of DistributedDataParallel"
    ),
    "zero-bytes": Goal("ZeRO", "bytes of a rank away from 1 / ranks of the whole", 0.02, form="{:.1%}"),
    "offload": Goal("ZeRO", "step with optimizer and parameters in files / in memory", 1.3),
    "zb-idle": Goal("zero bubble", "idle time / 1F1B's, virtual operations", 0.4, peer="ZB-H1 in theory: 0.33"),
    "zb-step": Goal("zero bubble", "step of 1F1B / of zb_h1, 2 stages, m = 4", 1.06, most=False),
    "elastic-kill": Goal(
        "elastic", "kill -9 to the end of a new step, without torch's import", 10, form="{:.1f} s",
        peer="torchelastic: 30 s and more",
    ),
    "elastic-lost": Goal("elastic", "steps lost", 1, form="{:.0f}"),
    "elastic-plan": Goal("elastic", "plan by look-up", 100, form="{:.0f} ms"),
    "elastic-saving": Goal("elastic", "time for snapshots (default), of a step", 0.03, form="{:.1%}"),
    "elastic-share": Goal(
        "elastic", "useful steps of a day on 256 devices, of an oracle's", 0.95, most=False, kind="simulated",
        peer="Varuna's policy and a restart for each change: in the table",
    ),
    "gpu-eager": Goal("GPU", "one rank / eager, throughput", 0.98, most=False, kind="needs-gpu"),
    "gpu-compiled": Goal("GPU", "compiled blocks / torch.compile of the whole", 0.98, most=False, kind="needs-gpu"),
    "gpu-reads": Goal("GPU", "device reads in a step", 1, form="{:.0f}", kind="needs-gpu"),
    "coverage": Goal(
        "coverage", "models with at most a fifth of their parameters in leaves, cut, right gradients", 0.95, most=False,
        form="{:.1%}", peer="torch's pipeline(): in the table",
    ),
    "frameworks": Goal("frameworks", "slowest framework's step / a plain loop's", 1.02),
    "page": Goal("page of a plan", "time for 10,000 operators", 2, form="{:.2f} s"),
    "page-size": Goal("page of a plan", "size for 10,000 operators", 2, form="{:.2f} MB"),
    "start": Goal("start", "rannc-run beside mpirun, an empty script, the daemon starts", 0.3, form="{:.2f} s"),
    "start-torchrun": Goal("start", "end of the first step, cached / torchrun's", 1.0),
}  # fmt: skip
"""By the names that `_results.found` takes."""
