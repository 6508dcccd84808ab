"""Examples of elastic jobs that are told to go: by Slurm, by Kubernetes, by a provider's metadata service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # comes with transformers, which the examples need
from elastic_outcome import EPOCHS, Outcome
from job import ROOT, Job
from metadata_service import Service
from stand_ins import install, install_forking

SBATCH = ROOT / "examples" / "slurm" / "elastic.sbatch"
MANIFEST = ROOT / "examples" / "kubernetes" / "elastic.yaml"
WATCH = ROOT / "examples" / "spot" / "watch_preemption.py"
LONG_S = 200.0
TRAIN = """
import runpy, sys
sys.argv[1:] = [{folder!r}, "{epochs}", "sgd", "0.4"]
runpy.run_path({program!r}, run_name="__main__")
"""


def a_training(folder: Path, job: Job) -> tuple[Outcome, dict[str, str]]:
    """A train.py in a folder, and the variables with which its ranks are forks."""
    program = str(ROOT / "tests/e2e/programs/elastic.py")
    (folder / "train.py").write_text(TRAIN.format(folder=str(folder), epochs=EPOCHS, program=program))
    tools = install(folder / "tools")
    install_forking(tools, "rannc-run")
    return Outcome(folder), {"PATH": f"{tools}:{job.environment['PATH']}"}


def signalled(
    job: Job, training: Outcome, command: list[str], signum: signal.Signals, variables: dict[str, str]
) -> tuple[int, str]:
    """(exit code, output) of a command that gets a signal once the ranks train."""
    started = subprocess.Popen(
        command,
        env={**job.environment, **variables},
        cwd=training.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + LONG_S
    try:
        while not (training.folder / "losses").exists() or max(training.losses()) < 3:
            assert started.poll() is None, started.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
        started.send_signal(signum)
        output, _ = started.communicate(timeout=LONG_S)
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
            started.communicate(timeout=LONG_S)
    return started.returncode, output


def goes_on(training: Outcome) -> None:
    """The training is over, and has not lost a step."""
    training.check()
    assert all(len(made) == 1 for made in training.losses().values()), "no step was lost"


# --- Slurm ----------------------------------------------------------------------------------------

SCONTROL = """\
#!/bin/sh
echo "$@" >> {log}
"""


@pytest.mark.long
@pytest.mark.ranks
def test_a_job_that_slurm_stops_is_queued_again_and_goes_on(job: Job, tmp_path: Path) -> None:
    training, variables = a_training(tmp_path, job)
    log = tmp_path / "scontrol.log"
    scontrol = tmp_path / "tools" / "scontrol"
    scontrol.write_text(SCONTROL.format(log=log))
    scontrol.chmod(0o755)
    command = [str(tmp_path / "tools" / "sbatch"), str(SBATCH)]
    code, output = signalled(job, training, command, signal.SIGUSR1, variables)
    assert code == 128 + signal.SIGUSR1, output
    assert "SIGUSR1: 2 ranks may save and end by themselves, for 50 s" in output
    assert log.read_text() == "requeue 4711\n"
    job.run(*command, folder=tmp_path, **variables)
    goes_on(training)
    assert log.read_text() == "requeue 4711\n", "the training is over"


ENDS = """\
#!/bin/sh
trap 'sleep 0.2; exit {on_notice}' USR1
trap 'sleep 0.2; exit 143' TERM
echo ready
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("signals", "on_notice", "code", "requeued"),
    [
        ([signal.SIGUSR1], 138, 138, True),
        ([signal.SIGUSR1], 1, 1, False),
        ([signal.SIGUSR1], 0, 0, False),
        ([signal.SIGTERM], 138, 143, False),
    ],
    ids=["notice", "failure", "over", "scancel"],
)
def test_a_job_is_queued_again_after_a_notice_alone(
    tmp_path: Path, signals: list[signal.Signals], on_notice: int, code: int, requeued: bool
) -> None:
    log = tmp_path / "log"
    for name, text in (("rannc-run", ENDS.format(on_notice=on_notice)), ("scontrol", SCONTROL.format(log=log))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    with subprocess.Popen(["bash", str(SBATCH)], env=environment, stdout=subprocess.PIPE) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"ready\n"
        for signum in signals:
            script.send_signal(signum)
        assert script.wait(LONG_S) == code
    assert log.exists() == requeued


def test_slurm_gives_the_time_that_the_job_takes() -> None:
    text = SBATCH.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    warned = re.fullmatch(r"B:USR1@(\d+)", asked["signal"])
    (grace,) = re.findall(r"--grace-period (\d+)", text)
    assert warned is not None
    assert 2 * int(grace) < int(warned[1])
    assert "\n#SBATCH --requeue\n" in text


# --- Kubernetes -----------------------------------------------------------------------------------


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]
    return spec


def test_the_pod_gives_the_time_that_the_job_takes() -> None:
    made = yaml.safe_load(MANIFEST.read_text())
    assert (made["apiVersion"], made["kind"]) == ("batch/v1", "Job")
    (container,) = pod()["containers"]
    arguments = container["args"]
    assert container["command"] == ["rannc-run"], "it gets the signals of the pod"
    assert 2 * int(arguments[arguments.index("--grace-period") + 1]) < pod()["terminationGracePeriodSeconds"]
    assert int(arguments[arguments.index("--nproc") + 1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod()["volumes"]}
    assert pod()["restartPolicy"] == "Never", "a podFailurePolicy needs it"
    (codes,) = [rule["onExitCodes"] for rule in made["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == {"containerName": container["name"], "operator": "In", "values": [138, 143]}


@pytest.mark.long
@pytest.mark.ranks
def test_a_pod_that_is_evicted_saves_and_the_next_one_goes_on(job: Job, tmp_path: Path) -> None:
    training, variables = a_training(tmp_path, job)
    (container,) = pod()["containers"]
    command = [*container["command"], *container["args"]]
    code, output = signalled(job, training, command, signal.SIGTERM, variables)
    assert code == 128 + signal.SIGTERM, output
    assert "SIGTERM: 4 ranks may save and end by themselves, for 50 s" in output
    job.run(*command, folder=tmp_path, **variables)
    goes_on(training)


# --- spot instances -------------------------------------------------------------------------------

NOTIFY = """\
#!/bin/sh
echo "$@" >> {log}
[ "$(wc -l < {log})" -gt 1 ]  # nobody listens at the first time
"""


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def asked_often(service: Service, times: int) -> None:
    """Wait until the service was asked so many times more."""
    until, begin = time.monotonic() + LONG_S, len(service.asked)
    while len(service.asked) < begin + times:
        assert time.monotonic() < until
        time.sleep(0.02)


def with_rannc_run(folder: Path, log: Path) -> dict[str, str]:
    """An environment whose rannc-run, in the folder, writes its arguments to the log."""
    (folder / "rannc-run").write_text(NOTIFY.format(log=log))
    (folder / "rannc-run").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("name", "given", "least"), [("aws", 120.0, 100), ("gcp", 30.0, 30), ("azure", 60.0, 40)])
def test_a_notice_of_the_provider_is_handed_on(
    tmp_path: Path, service: Service, name: str, given: float, least: int
) -> None:
    log = tmp_path / "log"
    environment = {**with_rannc_run(tmp_path, log), "http_proxy": "http://127.0.0.1:1"}
    command = [sys.executable, str(WATCH), name, "--address", service.address, "--every", "0.05"]
    service.resources = ["spot_7"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as watching:
        try:
            asked_often(service, 3)
            assert not log.exists(), "there is no notice"
            service.seconds = given
            if name == "azure":
                asked_often(service, 4)
                assert not log.exists(), "the event is for another machine"
                service.resources.append("spot_0")
            _, complaints = watching.communicate(timeout=LONG_S)
        finally:
            watching.kill()
    assert (watching.returncode, complaints) == (0, "")
    lines = log.read_text().splitlines()
    assert len(lines) == 2, "until a job takes it"
    for line in lines:
        told = re.fullmatch(r"notify-preempt --in (\d+)", line)
        assert told is not None
        assert least <= int(told[1]) <= given


def test_a_service_that_is_not_there_is_told_once(tmp_path: Path, service: Service) -> None:
    service.server_close()
    environment = with_rannc_run(tmp_path, tmp_path / "log")
    command = [sys.executable, str(WATCH), "aws", "--address", service.address, "--every", "0.05"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stderr is not None
        assert "Connection refused" in watching.stderr.readline()
        time.sleep(0.5)
        watching.kill()
        assert watching.stderr.read() == ""
