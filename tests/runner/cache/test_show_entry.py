"""`rannc-cache show` of deployments: drawn, as a page, and against others, as a user types it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cache_command import PROFILES, cache, client, deployment, on_terminal
from shown_plans import measured, planned

from rannd.daemon.common.keys import measured_key
from rannd.errors import DeploymentError
from rannd.plan.deployment import Deployment, encode
from rannd.plan.measured_step import encode_measured
from rannd.plan.plan_text import show, show_measured
from rannd.runner.page.terminal_drawing import drawn

ONE, OTHER = deployment(64), deployment(65)


@pytest.fixture(scope="module")
def plans() -> tuple[Deployment, Deployment]:
    return planned(partition_num=2, pipeline_num=4), planned(partition_num=4, pipeline_num=4)


@pytest.fixture
def filled(daemon_home, plans) -> object:
    with client() as job:
        assert job.put(ONE, encode(plans[0]))
        assert job.put(OTHER, encode(plans[1]))
        assert job.put(measured_key(ONE.digest), encode_measured(measured(plans[0])))
        assert job.put(PROFILES[0], bytes(10))
    return daemon_home


def test_a_plan_is_drawn_below_its_tables(filled, plans) -> None:
    told = cache("show", ONE.short).stdout
    took = show_measured(plans[0], measured(plans[0]))
    assert told.startswith(f"{show(plans[0])}\n\n{drawn(plans[0])}\n\n{took}\n\nkey        {ONE.digest}\n")
    on_80 = on_terminal("show", ONE.short)
    assert drawn(plans[0], 80) in on_80
    assert max(map(len, on_80.splitlines())) <= 80
    assert max(map(len, told.splitlines())) > 150, "not cut where it is no terminal"


def test_a_page_is_written(filled, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text("older")
    told = cache("show", ONE.short, "--html", str(file))
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("wrote a page of ")
    text = file.read_text()
    assert text.startswith("<!doctype html>")
    assert ONE.digest in text
    assert '"title":"measured"' in text
    assert [each.name for each in tmp_path.iterdir()] == ["plan.html"]
    told = cache("show", ONE.short, "--html", str(file), "--json", "--against", OTHER.short)
    assert json.loads(told.stdout) == {"file": str(file), "bytes": file.stat().st_size}
    assert OTHER.digest in file.read_text()


def test_the_difference_is_printed_too(filled, plans) -> None:
    lines = cache("show", ONE.short, "--against", OTHER.short).stdout.splitlines()
    assert lines[0].split() == ["what", "differs", ONE.short, OTHER.short, "relative"]
    assert any(line.split()[:3] == ["stages", "2", "4"] for line in lines)
    told = json.loads(cache("show", ONE.short, "--against", OTHER.short, "--json").stdout)
    assert (told["key"], told["against"]) == (ONE.digest, OTHER.digest)
    assert {"what": "stages", "this": "2", "other": "4", "change": "-50.0 %"} in told["differences"]
    same = cache("show", ONE.short, "--against", ONE.short).stdout
    assert "step" not in same


@pytest.mark.parametrize("html", [True, False])
def test_what_has_no_plan_is_refused(filled, tmp_path: Path, html: bool) -> None:
    more = ["--html", str(tmp_path / "x.html")] if html else []
    wrong = cache("show", ONE.short, "--against", "0" * 40, *more)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no entry's key starts with 0000" in wrong.stderr
    wrong = cache("show", ONE.short, "--against", PROFILES[0].digest, *more)
    assert wrong.returncode == 2
    assert "is of kind profile, not a deployment; `rannc-cache ls --kind deployment` lists" in wrong.stderr
    with client() as job:
        assert job.put(OTHER, b"damaged")
    wrong = cache("show", OTHER.short, "--against", ONE.short, *more)
    assert wrong.returncode == DeploymentError.exit_code
    assert "cannot be shown: not a deployment" in wrong.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_page_goes_to_no_other_file_than_the_one_that_is_named(filled, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("kept")
    os.symlink(target, link)
    wrong = cache("show", ONE.short, "--html", str(link))
    assert wrong.returncode == 2
    assert "a symbolic link" in wrong.stderr
    assert target.read_text() == "kept"
    wrong = cache("show", ONE.short, "--html", str(tmp_path / "missing" / "x.html"))
    assert wrong.returncode == 2
    assert "cannot be written" in wrong.stderr


def test_a_damaged_measurement_is_told_and_left_out(filled, tmp_path: Path) -> None:
    with client() as job:
        assert job.put(measured_key(ONE.digest), b"damaged")
    told = cache("show", ONE.short, "--html", str(tmp_path / "x.html"))
    assert told.returncode == 0
    assert "without what its steps took: not the measured times" in told.stdout
    assert '"title":"measured"' not in (tmp_path / "x.html").read_text()
