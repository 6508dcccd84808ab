"""Hints about a command that may have been meant otherwise."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rannd.runner.hints import hints
from rannd.runner.job import prepare
from rannd.runner.run_options import Options

ONE = "there is no GPU, and -np is not given: starting one rank; -np 2 starts two"


def told(tmp_path: Path, *arguments: str, size: int | None = 2, gpus: int = 0, hosts: str = "") -> list[str]:
    script = tmp_path / "train.py"
    script.touch()
    options = Options(command=(str(script), *arguments), size=size)
    job = prepare(options, os.environ)
    return hints(options, replace(job, places=job.places[: size or 1], gpus=gpus, hosts_from=hosts))


@pytest.mark.parametrize("words", [("-np", "2"), ("--nproc=2",), ("--lr", "1", "--hosts", "a:2"), ("--plan-only",)])
def test_our_options_behind_the_script(tmp_path: Path, words: tuple[str, ...]) -> None:
    (line,) = told(tmp_path, *words)
    script = tmp_path / "train.py"
    ours = next(word for word in words if word.startswith(("-np", "--nproc", "--hosts", "--plan")))
    assert line.startswith(f"{ours} behind {script} is an argument of the script; options of rannc-run come before it")
    assert line.endswith(f"rannc-run {ours} .. {script}")


@pytest.mark.parametrize("words", [(), ("--lr", "0.1"), ("--config", "x"), ("-n", "2"), ("-m", "x"), ("np",)])
def test_the_scripts_own_options_are_its_own(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert told(tmp_path, *words) == []


def test_one_rank_that_nobody_asked_for(tmp_path: Path) -> None:
    assert told(tmp_path, size=None) == [ONE]
    assert told(tmp_path, size=1) == []
    assert told(tmp_path, size=None, gpus=1) == []
    assert told(tmp_path, size=None, hosts="SLURM_JOB_NODELIST=n1") == []
