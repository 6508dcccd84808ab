"""examples/slurm and examples/kubernetes: what rannc-run makes of them, under the variables that are set there."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml  # comes with transformers, which the examples need
from job import ROOT, Job
from stand_ins import install

SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
MANIFEST = ROOT / "examples" / "kubernetes" / "mpijob.yaml"


def directives() -> dict[str, str]:
    """What the script asks Slurm for."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", SBATCH.read_text(), re.MULTILINE))


def test_the_script_of_sbatch_puts_a_rank_on_each_gpu_of_its_nodes(job: Job, tmp_path: Path) -> None:
    asked = directives()
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    (tmp_path / "train.py").touch()
    dry = tmp_path / "dry.sbatch"
    dry.write_text(SBATCH.read_text().replace("exec rannc-run", "exec rannc-run --dry-run"))
    each = int(asked["ntasks-per-node"])
    output = job.run(
        *("bash", str(dry)),
        folder=tmp_path,
        SLURM_JOB_NODELIST="gpu[07-08]",
        SLURM_NTASKS=str(2 * each),
        SLURM_NTASKS_PER_NODE=str(each),
        SLURM_TASKS_PER_NODE=f"{each}(x2)",
        SLURM_GPUS_ON_NODE=asked["gpus-per-node"],
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
    )
    places = re.findall(r"^rank (\d+): host (\w+), local rank (\d+)", output, re.MULTILINE)
    assert places == [(str(rank), f"gpu0{7 + rank // each}", str(rank % each)) for rank in range(2 * each)]
    assert f"--host gpu07:{each},gpu08:{each}" in output
    assert "hosts: from SLURM_JOB_NODELIST=gpu[07-08], SLURM_TASKS_PER_NODE=" in output


def test_its_grace_period_is_shorter_than_slurms() -> None:
    text = SBATCH.read_text()
    (grace,) = re.findall(r"--grace-period (\d+)", text)
    warned = re.fullmatch(r"B:TERM@(\d+)", directives()["signal"])
    assert warned is not None
    assert int(grace) < int(warned[1])
    assert "\nexec rannc-run " in text, "bash would keep the signal to itself"


@pytest.mark.long
@pytest.mark.ranks
def test_the_script_of_sbatch_trains(job: Job, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        (ROOT / "examples" / "tutorial.py")
        .read_text()
        .replace("if len(sys.argv) != 4:", "sys.argv[1:] = '4 8 4'.split()\nif False:")
    )
    tools = install(tmp_path / "tools")
    path = f"{tools}:{job.environment['PATH']}"
    output = job.run("sbatch", str(SBATCH), folder=tmp_path, PATH=path)
    assert output.count("Finished on rank") == 2
    assert (tmp_path / "logs").is_dir()


@pytest.mark.ranks
def test_a_signal_of_slurm_reaches_the_ranks_through_the_script(job: Job, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/e2e/programs/on_signal.py", tmp_path / "train.py")
    tools = install(tmp_path / "tools")
    code, output = job.interrupted(
        *("bash", "-c", f"cd {tmp_path} && exec {tools}/sbatch {SBATCH}"),
        ready="ready",
        signum=signal.SIGTERM,
        seconds=100,
    )
    assert code == 128 + signal.SIGTERM, output
    assert len(re.findall(r"\] SIGTERM$", output, re.MULTILINE)) == 2


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return found


def container(role: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifest()["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    (found,) = spec["containers"]
    return dict(found)


def test_the_manifest_is_a_job_of_the_mpi_operator() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["spec"]["slotsPerWorker"] == container("Worker")["resources"]["limits"]["nvidia.com/gpu"]
    assert container("Worker")["image"] == container("Launcher")["image"]
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    arguments = container("Launcher")["args"]
    grace = int(arguments[arguments.index("--grace-period") + 1])
    assert grace < launcher["terminationGracePeriodSeconds"]
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert {mount["name"] for mount in container("Worker")["volumeMounts"]} == {v["name"] for v in worker["volumes"]}


@pytest.mark.parametrize(
    ("variable", "line", "others"),
    [
        (
            "OMPI_MCA_orte_default_hostfile",
            "{host} slots={slots}",
            {"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"},
        ),
        ("I_MPI_HYDRA_HOST_FILE", "{host}:{slots}", {"I_MPI_PERHOST": "4"}),
        ("HYDRA_HOST_FILE", "{host}:{slots}", {}),
    ],
)
def test_the_launcher_takes_the_hosts_of_the_operator(
    job: Job, tmp_path: Path, variable: str, line: str, others: dict[str, str]
) -> None:
    """As the operator sets them for each of its `mpiImplementation`s; its /etc/mpi is a folder of the test."""
    spec = manifest()["spec"]
    slots, workers = spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    names = [f"train-worker-{number}.train.default.svc" for number in range(workers)]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(line.format(host=name, slots=slots) + "\n" for name in names))
    (tmp_path / "train.py").touch()
    own = {each["name"]: each["value"] for each in container("Launcher")["env"]}
    (command, *arguments) = [*container("Launcher")["command"], *container("Launcher")["args"]]
    output = job.run(
        *(command, "--dry-run", *arguments),
        folder=tmp_path,
        K_MPI_JOB_ROLE="launcher",
        **{variable: str(hostfile)},
        **own,
        **others,
    )
    places = re.findall(r"^rank (\d+): host (\S+), local rank (\d+)", output, re.MULTILINE)
    assert places == [(str(rank), names[rank // slots], str(rank % slots)) for rank in range(slots * workers)]
    assert f"hosts: from {variable}={hostfile}\n" in output
    assert f"--host {','.join(f'{name}:{slots}' for name in names)}" in output
    assert f"  MASTER_ADDR={names[0]}\n" in output
