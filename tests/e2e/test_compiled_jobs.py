"""Jobs whose blocks are compiled: the same losses, one rank compiles for all, and a second run compiles nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/compiled.py"
COMPILED = {"RANNC_COMPILE_STAGES": "blocks", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
ONE = {"RANNC_PIPELINE_NUM": "1"}
WHOLE = {"RANNC_PARTITION_NUM": "1"}
TWO = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}


def losses(output: str) -> list[str]:
    return sorted(re.findall(r"step \d: [\d.]+", output))


def graphs(output: str) -> list[int]:
    """Number of graphs that inductor has compiled on each rank, ascending."""
    return sorted(map(int, re.findall(r"inductor compiled (\d+) graphs", output)))


@pytest.mark.long
def test_stages_of_a_pipeline_compute_the_same(job: Job) -> None:
    # Without dropout: the stages begin elsewhere, and each has random numbers of its own.
    compiled = job.train(2, PROGRAM, "8", "0.0", "aot_eager", **COMPILED, **TWO)
    assert losses(compiled) == losses(job.train(2, PROGRAM, "8", "0.0", **TWO))
    assert "kinds of blocks" in compiled


@pytest.mark.long
def test_one_rank_compiles_for_all_and_a_second_run_compiles_nothing(job: Job) -> None:
    # Both ranks have the whole model, also where a busy machine makes two stages look faster.
    plain = job.train(2, PROGRAM, "1", "0.2", **WHOLE)
    first = job.train(2, PROGRAM, "1", "0.2", **COMPILED, **WHOLE)
    assert re.search(r"Compiled 3 kinds of blocks in [\d.]+ s \(0 from the cache\)", first), first
    assert sum(graphs(first)) == 6, "forward and backward of an embedding, a layer and a head"
    second = job.train(2, PROGRAM, "1", "0.2", **COMPILED, **WHOLE)
    assert re.search(r"3 kinds of blocks from the cache \([\d.]+ s\)", second), second
    assert graphs(second) == [0, 0]
    assert losses(first) == losses(second) == losses(plain)

    entries = [each for each in json.loads(job.run("rannc-cache", "ls", "--json")) if each["kind"] == "compiled"]
    folders = {folder.name: folder for folder in Path(job.home.path).rglob("compiled/*")}
    assert {each["key"] for each in entries} == folders.keys()
    assert all(each["length"] > 10_000 for each in entries)
    job.run("rannc-cache", "clear", "--kind", "compiled")
    assert not any(folder.exists() for folder in folders.values())


@pytest.mark.long
def test_without_a_compiler_blocks_run_eagerly_and_one_line_says_why(job: Job) -> None:
    # Not a fork, in which torch has looked at CXX already.
    output = job.run("rannc-run", "-np", "1", PROGRAM, "2", "0.2", **COMPILED, **ONE, CXX="/nowhere/g++")
    (line,) = [each for each in output.splitlines() if "eagerly" in each]
    assert "No working C++ compiler" in line
    assert losses(output) == losses(job.train(1, PROGRAM, "2", "0.2", **ONE))


@pytest.mark.long
def test_ctrl_c_while_compiling_ends_everything(job: Job, tmp_path: Path) -> None:
    """The compiler hangs; nothing of it is left, and nothing that a later run would trust."""
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\necho $$ >> {tmp_path}/pids\nexec sleep 300\n'
    )
    slow.chmod(0o755)
    environment = {**job.environment, **COMPILED, "CXX": str(slow)}
    job.environment, before = environment, job.environment
    try:
        code, output = interrupted(job, tmp_path / "pids")
    finally:
        job.environment = before
    assert code == 128 + signal.SIGINT, output
    compilers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    end = time.monotonic() + 30  # whoever becomes the parent of an ended process takes a moment to notice
    while alive := [pid for pid in compilers if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)
    assert not [each for each in Path(job.home.path).rglob("compiled/*") if not each.name.startswith(".")]


def interrupted(job: Job, pids: Path) -> tuple[int, str]:
    """Interrupt a job once its compiler runs."""
    started = subprocess.Popen(
        ["rannc-run", "-np", "2", PROGRAM, "3", "0.2"],
        env=job.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 200
        while not pids.exists():
            assert started.poll() is None, started.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGINT)
        output, _ = started.communicate(timeout=60)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    return started.returncode, output
