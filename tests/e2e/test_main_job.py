"""The main job, end to end: what a user sees of planning, the cache, limits, failures."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from job import DEBUG, FORK, FROM_CACHE, PLANNED, ROOT, Job

pytestmark = pytest.mark.ranks

TUTORIAL = ("examples/tutorial.py", "64", "512", "10")
AS_TYPED = ("rannc-run", "-np", "2")
"""What starts ranks as for a user, where `Job.train` forks them."""
PLANNING = ("Running profiler", "Starting model partitioning", "Estimated profiles")


@pytest.fixture(scope="module")
def first_run(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """Output of the main job while nothing is cached; its working, home and temporary directory, which were empty."""
    job.run("rannc-cache", "clear")
    places = {name: tmp_path_factory.mktemp(name) for name in ("work", "home", "tmp")}
    for place in places.values():
        place.chmod(0o700)
    variables = {"HOME": str(places["home"]), "TMPDIR": str(places["tmp"])}
    script = (str(ROOT / TUTORIAL[0]), *TUTORIAL[1:])
    return job.run(*AS_TYPED, *script, folder=places["work"], **variables), places


def test_second_run_plans_nothing_until_the_cache_is_cleared(job: Job, first_run: tuple[str, dict[str, Path]]) -> None:
    first, _ = first_run
    assert not [line for line in PLANNING if line in first]
    (planned,) = (line for line in first.splitlines() if PLANNED in line)
    plan = r"[12] stages?: .* on ranks? 0.*; \d+ microbatch(es)?; step about [0-9.]+ m?s; \d+ of [0-9,]+ MiB per device"
    assert re.fullmatch(plan, planned.partition(PLANNED)[2])
    assert re.search(r"\[info\] The model is ready on 2 ranks after [0-9.]+ s; training begins", first)
    assert len([line for line in first.splitlines() if "[info]" in line]) == 2, first

    second = job.train(2, *TUTORIAL)
    assert second.partition(FROM_CACHE)[2].partition("): ")[2].startswith(planned.partition(PLANNED)[2])
    assert PLANNED not in second
    assert _losses(second) == _losses(first)

    entries = json.loads(job.run("rannc-cache", "ls", "--json"))
    kinds = {entry["kind"] for entry in (entries["entries"] if isinstance(entries, dict) else entries)}
    assert {"deployment", "profile", "links"} <= kinds
    assert re.search(
        r"^deployment\t.*\tNet 2\.6M, [12] stages?, ranks 2, batch 128", job.run("rannc-cache", "ls"), re.M
    )
    job.run("rannc-cache", "clear")
    assert PLANNED in job.train(2, *TUTORIAL)


@pytest.mark.long
@pytest.mark.parametrize("by", ["log_level", "logging.toml"])
def test_what_the_tutorial_of_rannc_shows_is_there_if_asked_for(job: Job, tmp_path: Path, by: str) -> None:
    """At log_level=debug, and with RaNNC's logging.toml, which names its loggers."""
    variables = DEBUG
    if by == "logging.toml":
        names = ("RaNNCModule", "RaNNCProcess", "Decomposer", "DPStaging", "ParamStorage")
        loggers = "".join(f'[[logger]]\nname = "{name}"\nsinks = ["s"]\nlevel = "info"\n' for name in names)
        (tmp_path / "logging.toml").write_text(
            f'[[sink]]\nname = "s"\ntype = "stderr_sink_mt"\nlevel = "info"\n{loggers}'
        )
        variables = {"RANNC_CONF_DIR": str(tmp_path)}
    shown = job.train(2, *TUTORIAL, RANNC_CACHE="refresh", **variables)
    assert all(line in shown for line in (*PLANNING, "Tracing model ...", "Converting torch model to IR ..."))
    assert "[RaNNCModule] [info] Routes verification passed." in shown
    assert len(re.findall(r"RaNNCModule is ready. \(rank[01]\)", shown)) == 2
    estimate = r"graph=MERGE_\d+_\d+ repl=\d+ fwd_time=\d+ bwd_time=\d+ ar_time=\d+ in_size=\d+ out_size=\d+ "
    estimate += r"fp32param_size=\d+ fp16param_size=0 total_mem=\d+ \(fwd\+bwd=\d+ opt=\d+ comm=\d+\)"
    assert re.search(estimate, shown)
    assert re.search(r"\[Decomposer\] \[info\]  Assigned subgraph MERGE_\d+_\d+ to rank\[", shown)
    again = job.train(2, *TUTORIAL, **variables)
    assert FROM_CACHE in again
    assert not [line for line in (*PLANNING, "Tracing model") if line in again]


def test_a_quiet_job_prints_what_its_script_prints(job: Job) -> None:
    output = job.run("rannc-run", "--quiet", "-np", "2", FORK, *TUTORIAL)
    assert output.count("Finished on rank") == 2
    assert not re.search(r"\[info\]|rannc-run:", output)
    assert "[warning]" in job.run("rannc-run", "-q", "-np", "2", FORK, *TUTORIAL, RANNC_P2P_COMM="false")


@pytest.mark.long
def test_another_batch_plans_again_but_other_seeds_do_not(job: Job) -> None:
    job.train(2, *TUTORIAL)
    assert PLANNED in job.train(2, "examples/tutorial.py", "32", "512", "10")
    assert PLANNED in job.train(1, *TUTORIAL)
    assert FROM_CACHE in job.train(2, *TUTORIAL)
    assert PLANNED in job.train(2, *TUTORIAL, RANNC_OPT_PARAM_FACTOR="1")


def test_without_a_daemon_the_job_trains_with_one_warning(job: Job, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o777)
    open_to_all.chmod(0o777)
    (open_to_all / "rannd").mkdir(mode=0o777)
    (open_to_all / "rannd").chmod(0o777)
    output = job.train(2, "examples/tutorial.py", "4", "8", "4", XDG_RUNTIME_DIR=str(open_to_all))
    assert output.count("Finished on rank") == 2
    ranks = [line for line in output.splitlines() if "without a cache" in line and line.startswith("[")]
    assert len(ranks) == 1, output


def test_little_memory_forces_stages(job: Job) -> None:
    output = job.train(2, *TUTORIAL, RANNC_MEM_LIMIT_GB="0.05", RANNC_ZERO_STAGE="0")
    assert f"{PLANNED}2 stages: layers." in output


def test_a_model_that_fits_nowhere_says_what_would_do(job: Job) -> None:
    output = job.train(2, *TUTORIAL, code=1, RANNC_MEM_LIMIT_GB="0.005")
    found = re.search(r"mem_limit_gb=([0-9.]+)", output)
    assert found
    assert re.search(r"block MERGE_\d+_\d+ \(layers\.\d+", output)
    least = float(found[1])
    job.train(2, *TUTORIAL, RANNC_MEM_LIMIT_GB=str(least))  # what it names is enough ...
    output = job.train(2, *TUTORIAL, code=1, RANNC_MEM_LIMIT_GB=str(round(least * 0.9, 4)))  # ... and not much too much
    assert "DoesNotFitError" in output


@pytest.mark.long
def test_three_stages_on_four_ranks(job: Job) -> None:
    script = [
        "examples/gpt2_bytes.py",
        "--layers",
        "2",
        "--embd",
        "32",
        "--heads",
        "2",
        "--seq",
        "32",
        "--batch",
        "4",
        "--steps",
        "2",
    ]
    output = job.train(4, *script, RANNC_PARTITION_NUM="3")
    (plan,) = (line for line in output.splitlines() if PLANNED in line)
    assigned = re.findall(r" on ranks? ([\d,-]+)[,;]", plan)
    assert len(assigned) == 3
    assert sorted("".join(assigned).replace("-", "").replace(",", "")) == list("0123")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_plain_mpirun_and_plain_python(job: Job, ranks: int) -> None:
    command = [sys.executable, *TUTORIAL]
    if ranks > 1:
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        output = job.run("mpirun", "-np", str(ranks), "--oversubscribe", *command, **variables)
    else:
        output = job.run(*command)
    assert output.count("Finished on rank") == ranks


@pytest.mark.long
def test_verify_partitioning_and_dump_graph(job: Job, tmp_path: Path) -> None:
    prefix = tmp_path / "graph-"
    output = job.train(
        2,
        *TUTORIAL,
        RANNC_VERIFY_PARTITIONING="true",
        RANNC_DUMP_GRAPH="true",
        RANNC_DUMP_GRAPH_PREFIX=str(prefix),
    )
    assert "The traced graph gives the same outputs as the model." in output
    dot, told = sorted(tmp_path.iterdir())
    assert re.fullmatch(r"graph-[0-9a-f]{12}\.dot", dot.name)
    assert told.name == f"{dot.stem}.json"
    found = json.loads(told.read_text())
    assert found["graph_hash"].startswith(dot.stem.removeprefix("graph-"))
    assert sum(op["target"] == "aten::linear" for op in found["ops"]) >= 10
    assert {op for block in found["blocks"] for op in block["ops"]} == set(range(len(found["ops"])))
    assert sorted(slot for stage in found["stages"] for slot in stage["slots"]) == [0, 1]
    assert dot.read_text().count("subgraph") >= len(found["stages"]) + len(found["blocks"])


def test_a_saved_deployment_is_used(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "deployment.bin"
    job.train(2, *TUTORIAL, RANNC_SAVE_DEPLOYMENT="true", RANNC_DEPLOYMENT_FILE=str(file))
    loaded = {"RANNC_LOAD_DEPLOYMENT": "true", "RANNC_DEPLOYMENT_FILE": str(file), "RANNC_CACHE": "off"}
    output = job.train(2, *TUTORIAL, **loaded)
    assert f"[info] Plan from {file}: " in output
    assert PLANNED not in output
    output = job.train(2, "examples/tutorial.py", "64", "512", "9", code=1, **loaded)
    assert "DeploymentError" in output
    assert "run without it to plan again" in output


def test_plan_for_devices_that_are_not_there(job: Job) -> None:
    output = job.run("rannc-run", "--plan-only", "-np", "8", FORK, *TUTORIAL, **DEBUG)
    assert re.search(r"Estimated profiles of subgraphs: batch_size=512 np=8", output)
    assert "Finished" not in output


def test_a_script_that_never_calls_its_model_has_no_plan(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("import pyrannc, torch\nmodel = pyrannc.RaNNCModule(torch.nn.Linear(2, 2))\n")
    output = job.run("rannc-run", "--plan-only", "-np", "2", FORK, str(script), code=4)
    assert "nothing was planned: the script ended without calling a pyrannc.RaNNCModule; call the model once" in output


@pytest.mark.long
def test_plan_for_a_cluster_without_ranks_or_devices(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(
        "import pyrannc, torch\n"
        "from torch import nn\n"
        "with torch.device('meta'):\n"
        "    layers = [nn.Sequential(nn.Linear(8192, 8192), nn.ReLU()) for _ in range(96)]\n"
        "    model = nn.Sequential(*layers)\n"
        "model = pyrannc.RaNNCModule(model, torch.optim.Adam(model.parameters()))\n"
        "model(torch.randn(16, 8192))\n"
        "print('went on')\n"
    )

    def kept() -> set[str]:
        """Keys of all that is kept but traces."""
        entries = json.loads(job.run("rannc-cache", "ls", "--json"))
        return {entry["key"] for entry in entries if entry["kind"] != "trace"}

    before = kept()
    plan = ("rannc-run", "--plan-only", "--cluster", "a100x8", "-np", "20", FORK, str(script))
    output = job.run(*plan)
    assert "devices   20 on 3 nodes" in output
    assert "device    NVIDIA A100-SXM4-80GB" in output
    assert "times     cluster a100x8, by rannd" in output
    assert "batch     320 rows: 20 ranks x" in output
    assert "of 71.19 GiB allowed" in output  # 79.1 GiB, and mem_margin of them stays free
    assert not re.search("went on|Running profiler", output)
    # 6.4 billion parameters, with gradients (twice) and Adam's state: 120 GiB.
    assert "1 stage\n" not in output
    assert kept() == before
    assert "of 36.00 GiB allowed" in job.run(*plan, RANNC_MEM_LIMIT_GB="40")
    assert "no plan fits" in job.run(*plan, code=1, RANNC_MEM_LIMIT_GB="1")


@pytest.mark.long
def test_a_plan_made_elsewhere_is_run_and_what_differs_is_told(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    named = {"RANNC_DEPLOYMENT_FILE": str(file)}
    planned = job.run(
        *("rannc-run", "--plan-only", "--cluster", "cpu", "-np", "2", FORK, *TUTORIAL),
        RANNC_SAVE_DEPLOYMENT="true",
        **named,
    )
    assert "times     cluster cpu, by rannd" in planned
    shown = job.run("python", "-c", f"import pyrannc; pyrannc.show_deployment({str(file)!r}, 256)")
    assert shown.startswith("plan      ")
    assert "batch     256 rows: 2 ranks" in shown
    output = job.train(2, *TUTORIAL, RANNC_LOAD_DEPLOYMENT="true", **named)
    assert f"The deployment in {file} is used although its times are from cluster cpu, not measured" in output
    assert PLANNING[1] not in output
    output = job.train(3, *TUTORIAL, code=1, RANNC_LOAD_DEPLOYMENT="true", **named)
    assert "the deployment was made for 2 ranks, this job has 3; start 2 ranks" in output


def test_a_crash_of_one_rank_ends_all(job: Job, tmp_path: Path) -> None:
    script = _script(
        tmp_path / "crash.py",
        "for step in range(100):\n"
        "    if step == 3 and pyrannc.get_rank() == 1:\n"
        "        raise SystemExit(9)\n"
        "    model(torch.randn(2, 4)).sum().backward()\n",
    )
    output = job.run(*AS_TYPED, script, code=9)
    assert not _alive(output)


def test_ranks_that_call_unequally_are_told(job: Job, tmp_path: Path) -> None:
    script = _script(
        tmp_path / "unequal.py",
        "for step in range(3):\n"
        "    out = model(torch.randn(2, 4)).sum()\n"
        "    if step != 1 or pyrannc.get_rank() == 0:\n"
        "        out.backward()\n",
    )
    output = job.train(2, script, code=1)
    assert "every rank has to call the model and backward equally often and in the same order" in output
    script = _script(
        tmp_path / "unlike.py", "model(torch.randn(2, 4) if pyrannc.get_rank() else torch.randn(2, 3, 4))\n"
    )
    output = job.train(2, script, code=1)
    assert re.search(r"rank 1 passes a tensor of float32 with 2 dimensions as argument 0, rank 0 .* 3 dim", output)


def test_ctrl_c_leaves_no_process(job: Job, tmp_path: Path) -> None:
    script = _script(
        tmp_path / "endless.py",
        "for step in range(10**9):\n"
        "    model(torch.randn(2, 4)).sum().backward()\n"
        "    if step == 3:\n"
        "        print('training', flush=True)\n",
    )
    code, output = job.interrupted(*AS_TYPED, script, ready="training", signum=signal.SIGINT, seconds=120)
    assert code == 130, output
    assert not _alive(output)


def test_nothing_is_written_elsewhere(first_run: tuple[str, dict[str, Path]]) -> None:
    _, places = first_run
    assert [list(places[name].iterdir()) for name in ("work", "home")] == [[], []]
    # torch makes this folder, empty, for whoever makes an optimizer
    assert [path for path in places["tmp"].rglob("*") if not path.name.startswith("torchinductor_")] == []


def test_importing_pyrannc_starts_nothing(job: Job) -> None:
    code = (
        "import sys, threading, logging, pyrannc, torch.distributed as dist;"
        "assert not dist.is_initialized();"
        "assert threading.active_count() == 1, threading.enumerate();"
        "assert not logging.getLogger('rannd').handlers;"
        "assert not [m for m in sys.modules if m.startswith('mpi4py.MPI')]"
    )
    job.run(sys.executable, "-c", code, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")


def _script(file: Path, body: str) -> str:
    """A script whose ranks print their pids, wrap a small model, and run `body`."""
    file.write_text(
        "import os, pyrannc, torch\n"
        "print('pid', os.getpid(), flush=True)\n"
        "model = pyrannc.RaNNCModule(torch.nn.Linear(4, 4))\n" + body
    )
    return str(file)


def _losses(output: str) -> list[str]:
    return sorted(re.findall(r"rank=\d+ step=\d+ loss=\S+", output))


def _alive(output: str) -> list[int]:
    """Pids that the ranks printed and that still run."""
    pids = [int(pid) for pid in re.findall(r"\] pid (\d+)", output)]
    assert len(pids) == 2, output
    return [pid for pid in pids if psutil.pid_exists(pid)]
